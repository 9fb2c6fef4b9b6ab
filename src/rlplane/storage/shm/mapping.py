"""Shared memory as a client sees it: segments to write into, and private views to hand out.

A segment is mapped once, shared, for writing and for gathering. What a reader gets without a copy is a
mapping of its own: private and writable, so that a page it changes becomes its own copy, which nobody else
sees, not even another read in the same process. It is unmapped when the last tensor over it is gone, and then
the lease goes back.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading

import numpy as np
import torch
from torch import Tensor

from rlplane.errors import PlaneConnectionError
from rlplane.storage.leases import ReadLease
from rlplane.storage.places import OutOfPagesError, Place
from rlplane.storage.scratch import map_pages, out_of_memory
from rlplane.storage.shm.directory import PlaneDirectory


class Segments:
    """The segments of one plane that this process has mapped."""

    def __init__(self, directory: PlaneDirectory) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._open: dict[int, tuple[int, mmap.mmap, Tensor]] = {}

    def view(self, place: Place) -> Tensor:
        """The bytes of a place, shared: to write into before the commit, or to copy from under a lease."""
        segment, offset, _ = place.at
        return self._segment(segment)[2][offset : offset + place.size]

    def whole(self, segment: int) -> Tensor:
        """All bytes of a segment, shared: to reach a place at its offset without making a view of it."""
        return self._segment(segment)[2]

    def check(self, place: Place) -> None:
        """Refuse a place that does not lie in its segment: nothing may touch memory beyond it."""
        segment, offset, _ = place.at
        if offset % mmap.PAGESIZE or not 0 <= offset < offset + place.size <= len(self._segment(segment)[1]):
            raise PlaneConnectionError(f"place {place.number} does not lie in segment {segment}")

    def back(self, place: Place) -> None:
        """Make sure that the pages of a place exist: writing to a page that cannot be made kills the
        process."""
        segment, offset, backed = place.at
        if backed:
            return
        room = self._directory.room
        try:
            if place.size > room:
                raise OSError(errno.ENOSPC, "the rest is for the journal")
            os.posix_fallocate(self._segment(segment)[0], offset, place.size)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.ENOMEM):
                raise
            raise OutOfPagesError(
                f"{self._directory.path.parent} is full: {place.size:,} bytes are needed and "
                f"{max(room, 0):,} are free; nothing was written"
            ) from error

    def private(self, place: Place, lease: ReadLease) -> Tensor:
        """The bytes of a place as memory of the reader's own, without a copy."""
        segment, offset, _ = place.at
        fd = self._segment(segment)[0]
        return lease.attach(map_pages(place.size, mmap.MAP_PRIVATE, fd, offset), place.size)

    def copy(self, place: Place, start: int, nbytes: int) -> Tensor:
        """Bytes of a place, as they are now. Rows of it that were cleared may belong to another place by
        now, which is being written, or to none: a look through a mapping would make pages for them."""
        segment, offset, _ = place.at
        copied = bytearray(nbytes)
        done = 0
        while done < nbytes:
            done += os.preadv(self._segment(segment)[0], [memoryview(copied)[done:]], offset + start + done)
        return torch.frombuffer(copied, dtype=torch.uint8) if nbytes else torch.empty(0, dtype=torch.uint8)

    def close(self) -> None:
        """Unmap everything that is not in use."""
        with self._lock:
            for fd, _, _ in self._open.values():
                os.close(fd)
            self._open.clear()

    def _segment(self, number: int) -> tuple[int, mmap.mmap, Tensor]:
        known = self._open.get(number)
        if known is not None:
            return known
        with self._lock:
            if number in self._open:
                return self._open[number]
            self._forget_removed()
            path = self._directory.segment(number)
            try:
                fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                raise PlaneConnectionError(
                    f"the shared memory {path} is gone: the control service has ended, or somebody removed it"
                ) from None
            except OSError as error:
                raise out_of_memory(error, path) from error
            try:
                mapped = mmap.mmap(fd, 0)
            except (OSError, ValueError) as error:
                os.close(fd)
                raise PlaneConnectionError(f"the shared memory {path} cannot be mapped: {error}") from error
            tensor = torch.from_numpy(np.frombuffer(mapped, np.uint8))
            self._open[number] = (fd, mapped, tensor)
            return self._open[number]

    def _forget_removed(self) -> None:
        """Unmap segments that the service has given back to the machine."""
        gone = [number for number in self._open if not os.path.exists(self._directory.segment(number))]
        for number in gone:
            os.close(self._open.pop(number)[0])
