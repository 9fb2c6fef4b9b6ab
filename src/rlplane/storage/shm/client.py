"""The client's half of shared memory: a put is one copy, a read of neighbouring rows is none."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Sequence
from ctypes import memmove

import torch
from torch import Tensor

from rlplane.errors import PlaneConnectionError
from rlplane.storage.assembly import Bytes
from rlplane.storage.dtypes import HOST
from rlplane.storage.layout import EncodedColumn, fill
from rlplane.storage.leases import ReadLease, detach_all
from rlplane.storage.places import Located, Place
from rlplane.storage.scratch import scratch, tensor_at
from rlplane.storage.shm.directory import PlaneDirectory
from rlplane.storage.shm.host import read_spare, write_spare
from rlplane.storage.shm.mapping import Segments

# Below this a copy is cheaper than a mapping of the reader's own.
_WORTH_MAPPING = 128 * 1024


class ShmStorage:
    """The ``StorageClient`` of shared memory: that of the plane in ``directory``, as client number ``client``
    uses it."""

    keeps_offsets = True
    is_remote = False

    def __init__(self, directory: PlaneDirectory, client: int) -> None:
        self._segments = Segments(directory)
        self._lock = threading.Lock()
        self._spare_file = os.open(directory.client_file(client), os.O_RDWR | os.O_CLOEXEC)

    def take_spare(self, place: Place) -> bool:
        with self._lock:
            fcntl.flock(self._spare_file, fcntl.LOCK_EX)
            try:
                if read_spare(self._spare_file) != place.number:
                    return False
                write_spare(self._spare_file)
                return True
            finally:
                fcntl.flock(self._spare_file, fcntl.LOCK_UN)

    def write(self, place: Place, columns: Sequence[EncodedColumn], deadline: float) -> None:
        self._segments.check(place)
        if sum(column.nbytes for column in columns) > place.size:
            raise PlaneConnectionError(f"place {place.number} is too small for what was to be written")
        self._segments.back(place)
        segment, offset, _ = place.at
        fill(self._segments.whole(segment), offset, columns)

    def discard(self, place: Place) -> None:
        """See :class:`~rlplane.storage.places.StorageClient`. The memory is free when the service says so."""

    def open(self, located: Located, lease: ReadLease) -> _LeasedPlaces:
        for place in located.places:
            self._segments.check(place)
        for block, (index, start, layout) in located.blocks.items():
            if (
                not 0 <= index < len(located.places)
                or not 0 <= start <= start + layout.nbytes <= located.places[index].size
            ):
                raise PlaneConnectionError(f"block {block} does not lie in its place")
        return _LeasedPlaces(self._segments, located, lease)

    def fetch(self, place: Place, start: int, nbytes: int) -> Tensor:
        self._segments.check(place)
        if not 0 <= start <= start + nbytes <= place.size:
            raise PlaneConnectionError(
                f"bytes {start:,} to {start + nbytes:,} are not in place {place.number}"
            )
        return self._segments.copy(place, start, nbytes)

    def detach(self) -> None:
        detach_all()

    def close(self) -> None:
        self._segments.close()
        os.close(self._spare_file)


class _LeasedPlaces:
    """The bytes of one read, which its lease protects."""

    def __init__(self, segments: Segments, located: Located, lease: ReadLease) -> None:
        self._segments, self._located, self._lease = segments, located, lease
        self._shared: dict[int, Bytes] = {}
        self._addresses: dict[int, tuple[int, Tensor]] = {}
        self._private: dict[int, Bytes] = {}
        self.nbytes = 0

    def read(self, block: int) -> Bytes:
        index, start, layout = self._located.blocks[block]
        shared = self._shared.get(index)
        if shared is None:
            shared = self._shared[index] = self._segments.view(self._located.places[index]).numpy()
        return shared[start : start + layout.nbytes]

    def own(self, block: int, start: int, stop: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        size = stop - start
        self.nbytes += size
        if size < _WORTH_MAPPING:
            known = self._addresses.get(block)
            if known is None:
                known = self._addresses[block] = self._address(block)
            # With ``*``, because torch takes half as long again to read a shape that comes as a tuple.
            copy = (
                torch.empty(*shape, dtype=dtype, device=HOST)
                if shape
                else torch.empty((), dtype=dtype, device=HOST)
            )
            memmove(copy.data_ptr(), known[0] + start, size)
            return copy
        index, at, _ = self._located.blocks[block]
        private = self._private.get(index)
        if private is None:
            place = self._located.places[index]
            private = self._private[index] = self._segments.private(place, self._lease).numpy()
        return tensor_at(private, at + start, dtype, shape)

    def _address(self, block: int) -> tuple[int, Tensor]:
        """Where a block begins, and the segment, which could be unmapped meanwhile if nobody held it."""
        index, at, _ = self._located.blocks[block]
        number, offset, _ = self._located.places[index].at
        segment = self._segments.whole(number)
        return segment.data_ptr() + offset + at, segment

    def empty(self, nbytes: int) -> Tensor:
        self.nbytes += nbytes
        return scratch.empty(nbytes)
