"""Stores of chunks inside the process, and a whole client over one: the keyed storage without a cluster."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from torch import Tensor

from rlplane.adapters.client import PlaneClient
from rlplane.adapters.link import Link
from rlplane.config import load_config
from rlplane.service.in_process import InProcessConnection, LocalService
from rlplane.storage.chunks import Chunk, ChunkedStorage, ChunksLostError, chunks_of
from rlplane.storage.keyed import KeyedHost
from rlplane.storage.places import Loss, Place


class MemoryChunks:
    """A ChunkStore over a dictionary, which remembers what was fetched."""

    def __init__(self) -> None:
        self.values: dict[int, bytes | bytearray] = {}
        self.fetched: list[int] = []
        self.lock = threading.Lock()

    def put(self, chunks: Sequence[Chunk], buffer: Tensor, deadline: float) -> None:
        memory = buffer.numpy()
        with self.lock:
            for key, start, size, _ in chunks:
                self.values[key] = bytearray(memory[start : start + size])

    def get(self, chunks: Sequence[Chunk], buffer: Tensor) -> None:
        memory = buffer.numpy().data.cast("B")
        with self.lock:
            lost = frozenset(chunk.key for chunk in chunks if chunk.key not in self.values)
            if lost:
                raise ChunksLostError("gone", lost, Loss(chunks=tuple(sorted(lost))))
            for key, start, size, _ in chunks:
                assert len(self.values[key]) == size
                memory[start : start + size] = self.values[key]
                self.fetched.append(key)

    def drop(self, chunks: Sequence[Chunk]) -> None:
        with self.lock:
            for chunk in chunks:
                self.values.pop(chunk.key, None)

    def close(self) -> None:
        pass


class ChunkPlane:
    """A control service over a store of chunks; any number of clients."""

    def __init__(self, limit: int = 1 << 40, capacity: int = 10**6) -> None:
        self.store = MemoryChunks()
        self.host = KeyedHost(limit, self._discard)
        self.service = LocalService(capacity, self.host)

    def client(self) -> ChunkClient:
        return ChunkClient(self)

    def _discard(self, place: Place) -> bool:
        self.store.drop(chunks_of(place))
        return True


class ChunkClient(PlaneClient):
    """A client of a :class:`ChunkPlane`."""

    def __init__(self, plane: ChunkPlane) -> None:
        super().__init__(load_config("cluster-simple"), bootstrap=False)
        self._plane = plane

    def _open_link(self) -> Link:
        return Link(InProcessConnection(self._plane.service), ChunkedStorage(self._plane.store))
