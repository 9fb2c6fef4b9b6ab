"""The service's half of shared memory: the arena, and the files behind it.

A client may use its spare place without asking, and the service may take it back. Which of them was first is
decided by a number in the client's own file, under a lock that the kernel releases when its holder dies.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import struct
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from rlplane.errors import CapacityError, InvalidRequestError
from rlplane.storage.places import Loss, Place, Stretches
from rlplane.storage.shm.arena import Arena
from rlplane.storage.shm.directory import PlaneDirectory
from rlplane.storage.shm.holes import discard_pages

logger = logging.getLogger(__name__)

_NO_SPARE = 0
_NUMBER = struct.Struct("<Q")
_IDLE_SEGMENT_S = 10.0


class ShmHost:
    """The ``StorageHost`` of shared memory: places in segments, in the directory of a plane, which goes with
    it."""

    def __init__(self, directory: PlaneDirectory, limit: int, segment_size: int | None = None) -> None:
        self.directory = directory
        about = os.statvfs(directory.path)
        if limit > about.f_blocks * about.f_frsize:
            logger.warning(
                "global_segment_size is %s bytes, and %s has %s: puts will wait before the plane is full; "
                "make it smaller, or the file system larger (docker run --shm-size=…)",
                f"{limit:,}",
                directory.path.parent,
                f"{about.f_blocks * about.f_frsize:,}",
            )
        # Called with what destroys a segment: at once, or when nothing refers to it any more that must last.
        self.before_destroying: Callable[[Callable[[], None]], None] = lambda destroy: destroy()
        self._files: dict[int, int] = {}
        self._locks: dict[int, int] = {}
        self._arena = Arena(
            limit,
            self._create_segment,
            self._destroy_segment,
            self._discard_pages,
            segment_size=segment_size,
        )

    def adopt(
        self,
        places: Sequence[Place],
        last_place: int,
        clients: Iterable[int],
        given_back: Mapping[int, Stretches],
    ) -> None:
        """Take over the files of the service of before, whose places are these but for what was given back,
        and whose clients these."""
        sizes, data = {}, {}
        for number, path in self.directory.segments().items():
            fd = self._files[number] = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            sizes[number] = os.fstat(fd).st_size
            data[number] = _data_in(fd, sizes[number])
        self._arena.adopt(sizes, places, last_place, data, given_back)
        for number, start, size in self._arena.untouched():
            # Pages that were made and never written are no data, and nobody would find them again.
            discard_pages(self._files[number], start, size)
        for client in clients:
            self._open_lock(client)

    @property
    def limit(self) -> int:
        return self._arena.limit

    @property
    def used(self) -> int:
        return self._arena.used

    def reserve(self, nbytes: int, client: int) -> Place | None:
        try:
            place = self._arena.allocate(nbytes, client, time.monotonic())
        except OSError as error:
            raise CapacityError(f"the control service cannot make shared memory: {error}") from error
        if place is not None and not place.at[2]:
            short = place.size - self.directory.room
            if short > 0:
                self._arena.drop_cached(short)
        return place

    def shrink(self, place: Place, nbytes: int) -> Place:
        return self._arena.shrink(place, nbytes)

    def free(self, place: Place) -> None:
        self._arena.free(place, time.monotonic())

    def lose(self, loss: Loss) -> None:
        raise InvalidRequestError("shared memory is in no storage units")

    def give_back(self, place: Place, stretches: Stretches) -> Stretches:
        return self._arena.give_back_part(place, stretches)

    def read_numbers(self, place: Place, start: int, count: int) -> NDArray[np.int64]:
        number, offset, _ = place.at
        data = os.pread(self._files[number], 8 * count, offset + start)
        return np.frombuffer(data[: len(data) // 8 * 8], np.int64)

    def offer_spare(self, client: int, place: Place) -> None:
        # By its number, because a thread of the client may still think of one that was revoked.
        write_spare(self._locks[client], place.number)

    def revoke_spare(self, client: int) -> bool:
        lock = self._locks.get(client)
        if lock is None:
            return False
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        try:
            if read_spare(lock) == _NO_SPARE:
                return False
            write_spare(lock)
            return True
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)

    def join(self, client: int) -> None:
        self._open_lock(client)
        write_spare(self._locks[client])

    def _open_lock(self, client: int) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._locks[client] = os.open(self.directory.client_file(client), flags, 0o600)

    def leave(self, client: int) -> None:
        self._arena.leave_home(client)
        with contextlib.suppress(OSError, KeyError):
            os.close(self._locks.pop(client))
            os.unlink(self.directory.client_file(client))

    def tidy(self, now: float) -> None:
        """See :class:`~rlplane.storage.places.StorageHost`: segments that are idle go back to the machine."""
        self._arena.give_back(now - _IDLE_SEGMENT_S)

    def describe(self) -> dict[str, int]:
        return self._arena.describe()

    def close(self) -> None:
        for fd in [*self._files.values(), *self._locks.values()]:
            os.close(fd)
        self._files.clear()
        self._locks.clear()
        self.directory.remove()

    def _create_segment(self, number: int, size: int) -> None:
        fd = os.open(self.directory.segment(number), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, size)
        except OSError:
            os.close(fd)
            os.unlink(self.directory.segment(number))
            raise
        self._files[number] = fd

    def _discard_pages(self, number: int, start: int, size: int) -> None:
        self.before_destroying(lambda: discard_pages(self._files[number], start, size))

    def _destroy_segment(self, number: int) -> None:
        self.before_destroying(lambda: self._destroy(number))

    def _destroy(self, number: int) -> None:
        fd = self._files.pop(number)
        # Truncating frees the pages at once, even while clients still have the file mapped.
        with contextlib.suppress(OSError):
            os.ftruncate(fd, 0)
        os.close(fd)
        with contextlib.suppress(OSError):
            os.unlink(self.directory.segment(number))


def _data_in(fd: int, end: int) -> list[tuple[int, int]]:
    """The stretches (start, size) of a file that have been written to."""
    found = []
    start = 0
    while start < end:
        try:
            start = os.lseek(fd, start, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # nothing comes any more
                break
            raise
        hole = os.lseek(fd, start, os.SEEK_HOLE)
        found.append((start, hole - start))
        start = hole
    return found


def read_spare(fd: int) -> int:
    """The place that a client may take as its spare, from its file; 0 if there is none."""
    data = os.pread(fd, _NUMBER.size, 0)
    return int(_NUMBER.unpack(data)[0]) if len(data) == _NUMBER.size else _NO_SPARE


def write_spare(fd: int, number: int = _NO_SPARE) -> None:
    """Let a client take this place as its spare, or none."""
    os.pwrite(fd, _NUMBER.pack(number), 0)
