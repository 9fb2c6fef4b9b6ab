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

from rlplane.errors import CapacityError, PlaneConnectionError
from rlplane.storage import leases
from rlplane.storage.leases import ReadLease, detach_all
from rlplane.storage.places import Place
from rlplane.storage.shm import directory as directory_module
from rlplane.storage.shm.directory import PlaneDirectory
from rlplane.storage.shm.mapping import Segments

PAGE = 4096


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PlaneDirectory]:
    monkeypatch.setattr(directory_module, "SHM", tmp_path)
    plane = PlaneDirectory.create()
    make_segment(plane, 0)
    yield plane
    plane.remove()


def make_segment(plane: PlaneDirectory, number: int, size: int = 16 * PAGE) -> None:
    Path(plane.segment(number)).write_bytes(bytes(size))


def at(segment: int, offset: int, size: int, *, backed: bool = True) -> Place:
    """A place, measured in pages."""
    return Place(1, size * PAGE, (segment, offset * PAGE, int(backed)))


def lease() -> tuple[ReadLease, list[str]]:
    released: list[str] = []
    return ReadLease(lambda: released.append("released")), released


def test_what_one_writes_the_other_sees(directory: PlaneDirectory) -> None:
    place = at(0, 2, 1)
    Segments(directory).view(place).fill_(7)
    assert Segments(directory).view(place).tolist() == [7] * PAGE
    assert Segments(directory).view(at(0, 0, 2)).sum() == 0


def test_a_reader_may_change_what_it_got_and_nobody_sees_it(directory: PlaneDirectory) -> None:
    segments, place = Segments(directory), at(0, 1, 2)
    segments.view(place).fill_(7)
    (first, _), (second, _) = lease(), lease()
    mine, other = segments.private(place, first), segments.private(place, second)
    mine[0] = 99
    assert [int(memory[0]) for memory in (mine, other, segments.view(place))] == [99, 7, 7]


def test_a_lease_goes_back_once_when_the_reader_is_done_and_every_tensor_is_gone(
    directory: PlaneDirectory,
) -> None:
    segments, (held, released) = Segments(directory), lease()
    one = segments.private(at(0, 0, 1), held)
    two = segments.private(at(0, 1, 1), held)
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


def test_what_is_detached_no_longer_follows_the_arena(directory: PlaneDirectory) -> None:
    segments, place = Segments(directory), at(0, 0, 3)
    segments.view(place).fill_(7)
    held, _ = lease()
    mine = segments.private(place, held)
    mine[PAGE] = 42
    detach_all()
    segments.view(place).fill_(1)
    assert mine[0] == 7 and mine[PAGE] == 42 and mine[-1] == 7


def test_a_child_that_drops_its_copies_does_not_give_the_parents_lease_back(
    directory: PlaneDirectory,
) -> None:
    segments, (held, released) = Segments(directory), lease()
    mine = segments.private(at(0, 0, 1), held)
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


def test_a_segment_that_is_gone_is_a_lost_connection(directory: PlaneDirectory) -> None:
    with pytest.raises(PlaneConnectionError, match="segment-5 is gone: the control service has ended"):
        Segments(directory).view(at(5, 0, 1))
    Path(directory.segment(6)).write_bytes(b"")
    with pytest.raises(PlaneConnectionError, match="segment-6 cannot be mapped"):
        Segments(directory).view(at(6, 0, 1))


def test_segments_that_were_given_back_are_let_go(directory: PlaneDirectory) -> None:
    segments = Segments(directory)
    segments.view(at(0, 0, 1))
    os.unlink(directory.segment(0))
    make_segment(directory, 1)
    segments.view(at(1, 0, 1))
    assert list(segments._open) == [1]
    segments.close()
    assert segments._open == {}


def test_running_out_of_file_descriptors_says_so(directory: PlaneDirectory) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open("/dev/null", os.O_RDONLY)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        with pytest.raises(CapacityError, match=r"no file descriptor is left .*ulimit -n"):
            Segments(directory).view(at(0, 0, 1))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_pages_are_made_before_they_are_written_and_a_full_disk_is_an_error(
    directory: PlaneDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    segments = Segments(directory)
    segments.back(at(0, 0, 1, backed=False))

    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    segments.back(at(0, 0, 1, backed=True))
    with pytest.raises(CapacityError, match=r"is full: 4,096 bytes are needed and .* nothing was written"):
        segments.back(at(0, 0, 1, backed=False))


def test_memory_that_is_collected_while_its_lease_is_locked_does_not_wait_for_itself(
    directory: PlaneDirectory,
) -> None:
    # The collector may run a finalizer at any allocation, in the thread that holds the lock.
    held, _ = lease()

    def collect() -> None:
        tensor = Segments(directory).private(at(0, 0, 1), held)
        with leases._lock:
            del tensor

    thread = threading.Thread(target=collect, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
