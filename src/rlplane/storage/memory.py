"""Bytes in a dictionary, for clients of one process: both halves of the memory engine's storage."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from rlplane.storage.assembly import Bytes
from rlplane.storage.copying import copy_all
from rlplane.storage.keyed import KeyedHost
from rlplane.storage.layout import EncodedColumn, fill
from rlplane.storage.leases import ReadLease
from rlplane.storage.places import Located, Place
from rlplane.storage.scratch import scratch


class MemoryStore:
    """A storage inside the process. ``host`` is its ``StorageHost``; the object itself is the
    ``StorageClient`` of every client."""

    keeps_offsets = True
    is_remote = False

    def __init__(self, limit: int) -> None:
        self._buffers: dict[int, Tensor] = {}
        self._lock = threading.Lock()
        self.host = KeyedHost(limit, self._drop)

    def take_spare(self, place: Place) -> bool:
        return True

    def write(self, place: Place, columns: Sequence[EncodedColumn], deadline: float) -> None:
        buffer = torch.empty(sum(column.nbytes for column in columns), dtype=torch.uint8, device="cpu")
        fill(buffer, 0, columns)
        with self._lock:
            self._buffers[place.number] = buffer

    def discard(self, place: Place) -> None:
        self._drop(place)

    def open(self, located: Located, lease: ReadLease) -> _HeldBuffers:
        # Holding the tensors keeps them alive: what is read stays valid after a clear.
        with self._lock:
            return _HeldBuffers(located, [self._buffers[place.number] for place in located.places])

    def fetch(self, place: Place, start: int, nbytes: int) -> Tensor:
        with self._lock:
            return self._buffers[place.number][start : start + nbytes]

    def detach(self) -> None:
        """See :class:`~rlplane.storage.places.StorageClient`."""

    def close(self) -> None:
        """See :class:`~rlplane.storage.places.StorageClient`."""

    def _drop(self, place: Place) -> bool:
        with self._lock:
            self._buffers.pop(place.number, None)
        return True


class _HeldBuffers:
    def __init__(self, located: Located, buffers: list[Tensor]) -> None:
        self._located, self._buffers = located, buffers
        self.nbytes = 0

    def read(self, block: int) -> Bytes:
        index, start, layout = self._located.blocks[block]
        found: Bytes = self._buffers[index].numpy()[start : start + layout.nbytes]
        return found

    def own(self, block: int, start: int, stop: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        index, at, _ = self._located.blocks[block]
        copy = self.empty(stop - start)
        copy_all([(copy.data_ptr(), self._buffers[index].data_ptr() + at + start, stop - start)])
        return copy.view(dtype).view(shape)

    def empty(self, nbytes: int) -> Tensor:
        self.nbytes += nbytes
        return scratch.empty(nbytes)
