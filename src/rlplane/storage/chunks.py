"""The client's half of storages that bytes travel to: a place is cut into chunks, one value of the store
each.

What a read fetches goes to where it lies in its place, in memory that stands for the place. Chunks that
nobody asked for stay unfilled there. Columns are then put together as if the place were here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from rlplane.errors import PlaneConnectionError
from rlplane.storage.assembly import Bytes
from rlplane.storage.copying import copy_all
from rlplane.storage.keyed import CHUNK_BYTES, chunk_count
from rlplane.storage.layout import EncodedColumn, fill
from rlplane.storage.leases import ReadLease
from rlplane.storage.places import Located, Loss, Place, RowsLostError
from rlplane.storage.rows import stretches
from rlplane.storage.scratch import scratch, tensor_at


class Chunk(NamedTuple):
    """A value of the store, and where its bytes are in a buffer. ``dead`` are the storage units that had
    died before its place was reserved."""

    key: int
    start: int
    size: int
    dead: tuple[int, ...] = ()


class ChunksLostError(PlaneConnectionError):
    """Chunks that were written are not to be had any more; ``keys`` says which, and ``loss`` what is known to
    be gone for good."""

    def __init__(
        self, message: str = "", keys: frozenset[int] = frozenset(), loss: Loss | None = None
    ) -> None:
        super().__init__(message)
        self.keys, self.loss = keys, loss or Loss()


class ChunkStore(Protocol):
    """A store of values by number. Calls raise ``PlaneConnectionError`` instead of hanging."""

    def put(self, chunks: Sequence[Chunk], buffer: Tensor, deadline: float) -> None:
        """Store the bytes of chunks; ``UnitsDiedError`` when others could be stored."""

    def get(self, chunks: Sequence[Chunk], buffer: Tensor) -> None:
        """Fetch the bytes of chunks into the buffer; ``ChunksLostError`` when one is not there."""

    def drop(self, chunks: Sequence[Chunk]) -> None:
        """Remove values; those that are not there are ignored."""

    def close(self) -> None:
        """Let go of the store."""


def chunk_keys(place: Place) -> range:
    """The keys of a place's chunks."""
    return range(place.number, place.number + chunk_count(place.size))


def chunks_of(place: Place) -> list[Chunk]:
    """The chunks of a place, in memory that stands for it."""
    starts = range(0, max(place.size, 1), CHUNK_BYTES)
    return [
        Chunk(key, start, min(CHUNK_BYTES, place.size - start), place.at)
        for key, start in zip(chunk_keys(place), starts, strict=True)
    ]


class ChunkedStorage:
    """A ``StorageClient``: places in a :class:`ChunkStore`."""

    keeps_offsets = False
    is_remote = True

    def __init__(self, store: ChunkStore) -> None:
        self._store = store

    def take_spare(self, place: Place) -> bool:
        return True

    def write(self, place: Place, columns: Sequence[EncodedColumn], deadline: float) -> None:
        total = max(sum(column.nbytes for column in columns), 1)
        buffer = scratch.empty(total)
        fill(buffer, 0, columns)
        self._store.put(chunks_of(Place(place.number, total, place.at)), buffer, deadline)

    def discard(self, place: Place) -> None:
        self._store.drop(chunks_of(place))

    def open(self, located: Located, lease: ReadLease) -> _FetchedPlaces:
        bases = np.concatenate(([0], np.cumsum([place.size for place in located.places], dtype=np.int64)))
        chunks = [
            Chunk(place.number + number, base + start, min(CHUNK_BYTES, place.size - start), place.at)
            for place, base, wanted in zip(
                located.places, bases[:-1].tolist(), _wanted_chunks(located), strict=True
            )
            for number in wanted
            for start in [number * CHUNK_BYTES]
        ]
        buffer = scratch.empty(int(bases[-1]))
        try:
            if chunks:
                self._store.get(chunks, buffer)
        except ChunksLostError as error:
            raise RowsLostError(error.message, _rows_in(located, error.keys), error.loss) from error
        return _FetchedPlaces(located, bases.tolist(), buffer, sum(chunk.size for chunk in chunks))

    def fetch(self, place: Place, start: int, nbytes: int) -> Tensor:
        origin = start // CHUNK_BYTES * CHUNK_BYTES
        end = min(-(-max(start + nbytes, 1) // CHUNK_BYTES) * CHUNK_BYTES, place.size)
        buffer = scratch.empty(end - origin)
        chunks = [
            Chunk(place.number + at // CHUNK_BYTES, at - origin, min(CHUNK_BYTES, end - at), place.at)
            for at in range(origin, end, CHUNK_BYTES)
        ]
        self._store.get(chunks, buffer)
        return buffer[start - origin : start - origin + nbytes]

    def detach(self) -> None:
        """See :class:`~rlplane.storage.places.StorageClient`."""

    def close(self) -> None:
        self._store.close()


class _FetchedPlaces:
    """The bytes of one read, in one piece of memory that belongs to the reader."""

    def __init__(self, located: Located, bases: list[int], buffer: Tensor, fetched: int) -> None:
        self._located, self._bases, self._buffer = located, bases, buffer
        self._bytes: Bytes = buffer.numpy()
        # A column that is handed out without a copy keeps all of the memory. That is fine if most of it was
        # asked for, and not if it is a row of a large place.
        self._may_share = 2 * fetched >= len(self._bytes)
        self.nbytes = 0

    def read(self, block: int) -> Bytes:
        index, start, layout = self._located.blocks[block]
        base = self._bases[index] + start
        return self._bytes[base : base + layout.nbytes]

    def own(self, block: int, start: int, stop: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        index, at, _ = self._located.blocks[block]
        begin = self._bases[index] + at + start
        if self._may_share and begin % dtype.itemsize == 0 and start < stop:
            self.nbytes += stop - start
            return tensor_at(self._bytes, begin, dtype, shape)
        copy = self.empty(stop - start)
        copy_all([(copy.data_ptr(), self._buffer.data_ptr() + begin, stop - start)])
        return copy.view(dtype).view(shape)

    def empty(self, nbytes: int) -> Tensor:
        self.nbytes += nbytes
        return scratch.empty(nbytes)


def _wanted_chunks(located: Located) -> list[Sequence[int]]:
    """For each place, the numbers of the chunks that hold the rows that are read."""
    wanted: list[Sequence[int]] = [range(chunk_count(place.size)) for place in located.places]
    large = {index for index, chunks in enumerate(wanted) if len(chunks) > 1}
    if not large:
        return wanted
    # Where intervals of wanted chunks begin (+1) and end (-1): their running sum tells how often one is
    # wanted.
    edges = {index: np.zeros(len(wanted[index]) + 1, np.int64) for index in large}
    for rows, path in zip(located.rows, _paths(located), strict=True):
        blocks, positions = rows.homes()
        for block in np.unique(blocks).tolist():
            index, at, layout = located.blocks[block]
            if index not in large:
                continue
            begins, ends = stretches(layout, positions[blocks == block].astype(np.int64), path)
            some = ends > begins
            np.add.at(edges[index], (at + begins[some]) // CHUNK_BYTES, 1)
            np.add.at(edges[index], (at + ends[some] - 1) // CHUNK_BYTES + 1, -1)
    for index in large:
        wanted[index] = np.flatnonzero(np.cumsum(edges[index]) > 0).tolist()
    return wanted


def _rows_in(located: Located, keys: frozenset[int]) -> list[int]:
    """Which rows of a read lie in these chunks."""
    lost: dict[int, None] = {}
    for rows, path in zip(located.rows, _paths(located), strict=True):
        homes = (part.tolist() for part in rows.homes())
        for row, block, position in zip(rows.numbers(), *homes, strict=True):
            index, at, layout = located.blocks[block]
            number = located.places[index].number
            begins, ends = stretches(layout, np.array([position], np.int64), path)
            for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
                first, last = (at + begin) // CHUNK_BYTES, (at + max(begin, end - 1)) // CHUNK_BYTES
                if any(key in keys for key in range(number + first, number + last + 1)):
                    lost[row] = None
    return list(lost)


def _paths(located: Located) -> list[str]:
    return located.paths or [""] * len(located.rows)
