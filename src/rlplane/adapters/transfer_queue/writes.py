"""Writes, as the control actor keeps them and as they travel: to writers, readers and checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from rlplane.adapters.transfer_queue.wire import Layout
from rlplane.index import Put

__all__ = ["Frozen", "FrozenWrite", "Location", "Reservation", "Write"]


@dataclass
class Write:
    """One put in storage: the rows of TransferQueue it has, and what its fields look like.

    ``number`` is never used again, unlike TransferQueue's indexes: it is stored beside the bytes, so
    that a reader who comes too late notices that an index has a new owner.
    """

    number: int
    partition_id: str
    indexes: list[int]
    chunk_rows: int
    layouts: dict[str, Layout]
    nbytes: int
    put: Put | None = None
    new_samples: int = 0
    blocks_left: int = 0

    def narrowed(self, fields: set[str]) -> Write:
        """The write as a reader of these fields needs it."""
        layouts = {name: layout for name, layout in self.layouts.items() if name in fields}
        return Write(self.number, self.partition_id, self.indexes, self.chunk_rows, layouts, self.nbytes)


class Reservation(NamedTuple):
    """Leave to store a write: its number, TransferQueue's indexes, what the partition says of its fields."""

    number: int
    indexes: list[int]
    undeclared: list[str]
    enums: dict[str, list[str]]


@dataclass
class Location:
    """Where samples are: for each field the number of the write and the position in it, sample by sample."""

    places: dict[str, tuple[NDArray[np.int64], NDArray[np.int32]]]
    writes: dict[int, Write]


class _FrozenLayout(msgspec.Struct):
    kind: Literal["dense", "ragged", "object"]
    dtype: str
    tail: tuple[int, ...]
    rows: int
    lengths: bytes | None
    promoted: bool


class FrozenWrite(msgspec.Struct):
    """A write in a checkpoint."""

    number: int
    partition_id: str
    indexes: list[int]
    chunk_rows: int
    layouts: dict[str, _FrozenLayout]
    nbytes: int

    @classmethod
    def of(cls, write: Write) -> FrozenWrite:
        layouts = {}
        for name, layout in write.layouts.items():
            lengths = None if layout.lengths is None else layout.lengths.tobytes()
            layouts[name] = _FrozenLayout(
                layout.kind, layout.dtype, layout.tail, layout.rows, lengths, layout.promoted
            )
        return cls(write.number, write.partition_id, write.indexes, write.chunk_rows, layouts, write.nbytes)

    def thaw(self) -> Write:
        layouts = {}
        for name, saved in self.layouts.items():
            lengths = None if saved.lengths is None else np.frombuffer(saved.lengths, np.int64)
            layouts[name] = Layout(saved.kind, saved.dtype, saved.tail, saved.rows, lengths, saved.promoted)
        return Write(self.number, self.partition_id, self.indexes, self.chunk_rows, layouts, self.nbytes)


class Frozen(msgspec.Struct):
    """The content of a plane in a checkpoint: the control state, and per block its write and field."""

    state: bytes
    blocks: dict[int, tuple[int, str]]
    writes: list[FrozenWrite]
