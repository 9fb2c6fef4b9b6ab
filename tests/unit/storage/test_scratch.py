"""Memory for what a read gathers: reused when nobody has it any more, bounded, and a child's own."""

from __future__ import annotations

import os
import threading

import pytest

from rlplane.errors import CapacityError
from rlplane.storage.scratch import PAGE, ScratchPool, map_pages, scratch


def test_scratch_memory_is_reused_when_nobody_has_it_any_more() -> None:
    pool = ScratchPool(keep=64 * PAGE, smallest=PAGE)
    first = pool.empty(3 * PAGE - 5)
    address, view = first.data_ptr(), first[7:]
    assert first.shape == (3 * PAGE - 5,) and address % PAGE == 0
    del first
    other = pool.empty(3 * PAGE)
    assert other.data_ptr() != address, "a view still uses it"
    del view
    assert pool.empty(2 * PAGE).data_ptr() == address
    # Not for something so small that most of it would lie idle.
    assert pool.empty(PAGE).data_ptr() != address


def test_small_scratch_memory_is_not_pooled() -> None:
    pool = ScratchPool(keep=PAGE, smallest=PAGE)
    small = pool.empty(PAGE - 1)
    assert small.shape == (PAGE - 1,)
    del small
    assert pool._free == [] and pool.empty(0).shape == (0,)


def test_the_pool_keeps_no_more_than_it_may() -> None:
    pool = ScratchPool(keep=10 * PAGE, smallest=1)
    batches = [pool.empty(4 * PAGE) for _ in range(5)]
    batches.append(pool.empty(11 * PAGE))
    del batches[:]
    assert pool._kept == sum(size for _, size in pool._free) == 8 * PAGE
    again = pool.empty(4 * PAGE)
    assert pool._kept == 4 * PAGE
    del again
    assert pool._kept == 8 * PAGE


def test_a_forked_child_has_scratch_memory_of_its_own() -> None:
    size = 2**20 + 7 * PAGE  # of which nobody else has left any in the pool of the process
    mine = scratch.empty(size)
    mine.numpy()[:] = 1
    address = mine.data_ptr()
    del mine
    child = os.fork()
    if not child:
        first = scratch.empty(size)
        first.numpy()[:] = 2  # not in torch, whose threads do not survive a fork
        place = first.data_ptr()
        del first
        os._exit(0 if scratch.empty(size).data_ptr() == place else 1)
    assert os.waitpid(child, 0)[1] == 0
    again = scratch.empty(size)
    assert again.data_ptr() == address and bool((again.numpy() == 1).all())


def test_memory_that_is_collected_while_the_pool_is_locked_does_not_wait_for_itself() -> None:
    # The collector may run a finalizer at any allocation, in the thread that holds the lock.
    pool = ScratchPool(keep=PAGE, smallest=1)

    def collect() -> None:
        tensor = pool.empty(PAGE)
        with pool._lock:
            del tensor

    thread = threading.Thread(target=collect, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()


def test_memory_that_cannot_be_had_is_a_capacity_error() -> None:
    with pytest.raises(CapacityError, match=r"cannot map .* bytes: Cannot allocate memory"):
        map_pages(2**60, 0x22, -1, 0)
