"""Shared memory as a reader sees it: its own to change, valid while it is held, and given back after."""

from __future__ import annotations

import gc
import os
import resource
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rlplane.adapters.local import mapping, planedir
from rlplane.adapters.local.mapping import Lease, ScratchPool, Segments, detach_all, scratch
from rlplane.adapters.local.planedir import PlaneDir
from rlplane.adapters.local.wire import Extent
from rlplane.errors import CapacityError, PlaneConnectionError

PAGE = 4096


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PlaneDir]:
    monkeypatch.setattr(planedir, "SHM", tmp_path)
    plane = PlaneDir.create()
    make_segment(plane, 0)
    yield plane
    plane.remove()


def make_segment(plane: PlaneDir, number: int, size: int = 16 * PAGE) -> None:
    Path(plane.segment(number)).write_bytes(bytes(size))


def lease() -> tuple[Lease, list[str]]:
    released: list[str] = []
    return Lease(lambda: released.append("released")), released


def test_what_one_writes_the_other_sees(directory: PlaneDir) -> None:
    extent = Extent(1, 0, 2 * PAGE, PAGE)
    Segments(directory).view(extent).fill_(7)
    assert Segments(directory).view(extent).tolist() == [7] * PAGE
    assert Segments(directory).view(Extent(2, 0, 0, 2 * PAGE)).sum() == 0


def test_a_reader_may_change_what_it_got_and_nobody_sees_it(directory: PlaneDir) -> None:
    segments, extent = Segments(directory), Extent(1, 0, PAGE, 2 * PAGE)
    segments.view(extent).fill_(7)
    (first, _), (second, _) = lease(), lease()
    mine, other = segments.private(extent, first), segments.private(extent, second)
    mine[0] = 99
    assert (mine[0], other[0], segments.view(extent)[0]) == (99, 7, 7)


def test_a_lease_goes_back_once_when_the_reader_is_done_and_every_tensor_is_gone(directory: PlaneDir) -> None:
    segments, (held, released) = Segments(directory), lease()
    one = segments.private(Extent(1, 0, 0, PAGE), held)
    two = segments.private(Extent(2, 0, PAGE, PAGE), held)
    view = one[10:20].view(torch.int16)[1:]
    held.done()
    del one
    gc.collect()
    assert released == [], "a view still uses it"
    del view
    gc.collect()
    assert released == []
    del two
    gc.collect()
    assert released == ["released"]


def test_a_lease_that_nothing_was_attached_to_goes_back_when_the_reader_is_done() -> None:
    held, released = lease()
    held.done()
    assert released == ["released"]


def test_what_is_detached_no_longer_follows_the_arena(directory: PlaneDir) -> None:
    segments, extent = Segments(directory), Extent(1, 0, 0, 3 * PAGE)
    segments.view(extent).fill_(7)
    held, _ = lease()
    mine = segments.private(extent, held)
    mine[PAGE] = 42
    detach_all()
    segments.view(extent).fill_(1)
    assert mine[0] == 7 and mine[PAGE] == 42 and mine[-1] == 7


def test_a_child_that_drops_its_copies_does_not_give_the_parents_lease_back(directory: PlaneDir) -> None:
    segments, (held, released) = Segments(directory), lease()
    mine = segments.private(Extent(1, 0, 0, PAGE), held)
    held.done()
    child = os.fork()
    if not child:
        del mine
        gc.collect()
        os._exit(len(released))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert released == []
    del mine
    gc.collect()
    assert released == ["released"]


def test_a_segment_that_is_gone_is_a_lost_connection(directory: PlaneDir) -> None:
    with pytest.raises(PlaneConnectionError, match="segment-5 is gone: the controller has ended"):
        Segments(directory).view(Extent(1, 5, 0, PAGE))
    Path(directory.segment(6)).write_bytes(b"")
    with pytest.raises(PlaneConnectionError, match="segment-6 cannot be mapped"):
        Segments(directory).view(Extent(1, 6, 0, PAGE))


def test_segments_that_were_given_back_are_let_go(directory: PlaneDir) -> None:
    segments = Segments(directory)
    segments.view(Extent(1, 0, 0, PAGE))
    os.unlink(directory.segment(0))
    make_segment(directory, 1)
    segments.view(Extent(2, 1, 0, PAGE))
    assert list(segments._open) == [1]
    segments.close()
    assert segments._open == {}


def test_running_out_of_file_descriptors_says_so(directory: PlaneDir) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open("/dev/null", os.O_RDONLY)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        with pytest.raises(CapacityError, match=r"no file descriptor is left .*ulimit -n"):
            Segments(directory).view(Extent(1, 0, 0, PAGE))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_pages_are_made_before_they_are_written_and_a_full_disk_is_an_error(
    directory: PlaneDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    segments = Segments(directory)
    segments.back(Extent(1, 0, 0, PAGE, backed=False))

    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    segments.back(Extent(1, 0, 0, PAGE, backed=True))
    with pytest.raises(CapacityError, match=r"is full: 4,096 bytes are needed and .* nothing was written"):
        segments.back(Extent(1, 0, 0, PAGE, backed=False))


# Scratch memory


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
    mine = scratch.empty(2**20)
    mine.numpy()[:] = 1
    address = mine.data_ptr()
    del mine
    child = os.fork()
    if not child:
        first = scratch.empty(2**20)
        first.numpy()[:] = 2  # not in torch, whose threads do not survive a fork
        place = first.data_ptr()
        del first
        os._exit(0 if scratch.empty(2**20).data_ptr() == place else 1)
    assert os.waitpid(child, 0)[1] == 0
    again = scratch.empty(2**20)
    assert again.data_ptr() == address and bool((again.numpy() == 1).all())


@pytest.mark.parametrize("what", ["pool", "lease"])
def test_memory_that_is_collected_while_the_lock_is_held_does_not_wait_for_itself(
    what: str, directory: PlaneDir
) -> None:
    # The collector may run a finalizer at any allocation, in the thread that holds the lock.
    pool = ScratchPool(keep=PAGE, smallest=1)
    held, _ = lease()

    def collect() -> None:
        if what == "pool":
            tensor = pool.empty(PAGE)
            with pool._lock:
                del tensor
        else:
            tensor = Segments(directory).private(Extent(1, 0, 0, PAGE), held)
            with held._lock:
                del tensor

    thread = threading.Thread(target=collect, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()


def test_memory_that_cannot_be_had_is_a_capacity_error() -> None:
    with pytest.raises(CapacityError, match=r"cannot map .* bytes: Cannot allocate memory"):
        mapping._map(2**60, 0x22, -1, 0)
