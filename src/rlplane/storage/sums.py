"""Checksums of rows: what a put says the bytes of each row are, and whether a read finds them so.

With ``observability: {verify: true}`` a put computes the CRC-32 of every row of every field from the caller's
tensors, and sends them with the layouts of its blocks: so they are there for readers in any process, become
visible with the rows, are replaced with them, and are part of checkpoints. A sum begins with the names of
the field and the sample, so that the bytes of another row are not taken for those of this one. A reader
computes them again from what the storage gives it. What it finds is counted (:class:`RowChecks`) and changes
nothing about the read.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple
from zlib import crc32

import msgspec
import numpy as np
import torch
from torch import Tensor

from rlplane.storage.assembly import Bytes, element_size, row_offsets
from rlplane.storage.layout import EncodedColumn
from rlplane.storage.places import FieldRows, Layout, Located
from rlplane.storage.trees import references_in

_TREES = ("tree", "ragged")

_Piece = Callable[[int, int], memoryview]


class Mismatch(NamedTuple):
    """A row whose bytes are not those that were written."""

    partition_id: str
    field: str
    sample_id: str


class CheckCounts(NamedTuple):
    """Rows by partition and field: looked at, not to be checked, and of those looked at, different."""

    checked: Counter[tuple[str, str]]
    unchecked: Counter[tuple[str, str]]
    mismatched: Counter[tuple[str, str]]
    mismatches: list[Mismatch]
    """The first mismatch of each field."""


def with_sums(column: EncodedColumn, ids: Sequence[str]) -> EncodedColumn:
    """The same column with the sums of its rows in its layout."""
    layout, values = column.layout, _bytes_of(column.values)
    parts = {at: value for at, _, _, value in column.parts}
    before = layout.values_nbytes - len(values)  # the bytes of a tree's tensors
    offsets = None if column.offsets is None else column.offsets.numpy()
    if layout.offsets is not None:
        offsets = np.frombuffer(layout.offsets, np.int64)
    bounds = _bounds(layout, offsets)
    rows = [values[begin - before : end - before] for begin, end in pairwise(bounds)]
    sums = _Sums(layout, column.name, lambda begin, end: _bytes_of(parts[begin]))
    found = [sums.of(row, sample) for row, sample in zip(rows, ids, strict=True)]
    sealed = msgspec.structs.replace(layout, sums=np.array(found, np.uint32).tobytes())
    return column._replace(layout=sealed)


class RowChecks:
    """Checks rows that are read, and counts what it found until somebody takes it. For several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = _no_counts()

    def check(
        self,
        partition_id: str,
        ids: Sequence[str],
        names: Sequence[str],
        located: Located,
        read: Callable[[int], Bytes],
    ) -> None:
        """Check what a read has found, before it is made into columns."""
        for name, rows, path in zip(names, located.rows, located.paths or [""] * len(names), strict=True):
            found: list[tuple[str, bool | None]] = [(sample, None) for sample in ids]
            # A leaf has no sum of its own. Whatever is wrong with what the service says, the read will tell.
            if not path:
                with contextlib.suppress(Exception):
                    found = _compared(name, ids, rows, located, read)
            wrong = [sample for sample, right in found if right is False]
            unchecked = sum(right is None for _, right in found)
            self._add(partition_id, name, len(found) - unchecked, unchecked, wrong)

    def _add(self, partition_id: str, field: str, checked: int, unchecked: int, wrong: Sequence[str]) -> None:
        key = (partition_id, field)
        with self._lock:
            counts = self._counts
            counts.checked[key] += checked
            counts.unchecked[key] += unchecked
            if wrong and not counts.mismatched[key]:
                counts.mismatches.append(Mismatch(partition_id, field, wrong[0]))
            counts.mismatched[key] += len(wrong)

    def take(self) -> CheckCounts:
        """What was counted since the last time."""
        with self._lock:
            counts, self._counts = self._counts, _no_counts()
        return counts


def _compared(
    name: str, ids: Sequence[str], rows: FieldRows, located: Located, read: Callable[[int], Bytes]
) -> list[tuple[str, bool | None]]:
    """Each row of a field, by its sample, with whether it is what was written (:meth:`_Block.is_right`)."""
    homes, positions = (part.tolist() for part in rows.homes())
    blocks = {
        number: _Block(name, located.blocks[number][2], read(number)) for number in dict.fromkeys(homes)
    }
    samples = [ids[number] for number in rows.numbers()]
    return [
        (sample, blocks[home].is_right(position, sample))
        for home, position, sample in zip(homes, positions, samples, strict=True)
    ]


class _Block:
    """The rows of one block, as they are stored."""

    def __init__(self, name: str, layout: Layout, block: Bytes) -> None:
        self._data = block.data
        known = layout.sums is not None and len(layout.sums) == 4 * layout.rows
        self._wanted = np.frombuffer(layout.sums or b"", np.uint32).tolist() if known else None
        self._bounds = _bounds(layout, row_offsets(block, layout) if layout.has_offsets else None)
        self._sums = _Sums(layout, name, lambda begin, end: self._data[begin:end])

    def is_right(self, position: int, sample_id: str) -> bool | None:
        """Whether a row is what was written; None if its writer did not say."""
        if self._wanted is None:
            return None
        try:
            row = self._data[self._bounds[position] : self._bounds[position + 1]]
            return bool(self._sums.of(row, sample_id) == self._wanted[position])
        except (IndexError, ValueError, msgspec.DecodeError):
            return False  # what says where its bytes are is not what was written


class _Sums:
    """The sums of rows of one column. Tensors that rows of trees share are summed once."""

    def __init__(self, layout: Layout, field: str, piece: _Piece) -> None:
        self._is_tree, self._piece = layout.kind in _TREES, piece
        self._field = crc32(field.encode(errors="surrogatepass"))
        self._pieces: dict[tuple[int, int], bytes] = {}

    def of(self, row: memoryview, sample_id: str) -> int:
        total = crc32(row, crc32(sample_id.encode(errors="surrogatepass"), self._field))
        if self._is_tree:
            for bounds in references_in(row):
                known = self._pieces.get(bounds)
                if known is None:
                    known = self._pieces[bounds] = crc32(self._piece(*bounds)).to_bytes(4, "little")
                total = crc32(known, total)
        return total


def _bounds(layout: Layout, offsets: np.ndarray[tuple[int], np.dtype[np.int64]] | None) -> list[int]:
    """Where the rows begin in the block, and where the last one ends, in bytes."""
    if offsets is None:
        size = layout.values_nbytes // max(layout.rows, 1)
        return [size * row for row in range(layout.rows + 1)]
    bounds: list[int] = (offsets * element_size(layout)).tolist()
    return bounds


def _bytes_of(value: Tensor) -> memoryview:
    plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().data


def _no_counts() -> CheckCounts:
    return CheckCounts(Counter(), Counter(), Counter(), [])
