"""How many bytes the columns of a batch have, row by row: of the data, not of what lies behind a view.

Two steps, because the first one runs on the path of every put and has to cost less than a microsecond per
column: :func:`note` takes down what can be read off without work, and :func:`measure`, later and on another
thread, makes a :class:`ColumnSize` of each note. Neither keeps the data alive; of nested tensors the offsets,
and of text the text itself, are kept until they are measured.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase
from torch.nested._internal.nested_tensor import NestedTensor

NotedSizes: TypeAlias = list[tuple[Any, ...]]
"""What :func:`note` took down, one tuple per column: see :func:`measure` for the three shapes they have."""

# A column is a "large storage view" when the storage behind it is so much larger than its data: an engine
# that pickles it, or a worker that keeps it, holds all of that.
LARGE_VIEW_FACTOR = 2
LARGE_VIEW_FLOOR = 1 << 16

_SMALL = 64  # Up to here a Python list is faster than an array.


@dataclass(slots=True, eq=False)
class ColumnSize:
    """The size of one field in one put.

    Row ``i`` has ``unit`` bytes; times ``counts[i]`` if there are counts, or times the distance from
    ``ends[i]`` to ``ends[i + 1]`` if there are ends. ``leaves`` has the bytes of a tree by leaf.
    """

    name: str
    total: int
    unit: int
    counts: Any = None
    ends: Any = None
    leaves: Mapping[str, int] | None = None

    def by_leaf(self) -> dict[str, int]:
        """The bytes by leaf, as in ``{"mm.pixel_values": 4096}``; of what is no tree, by its name."""
        return {f"{self.name}{leaf}": size for leaf, size in (self.leaves or {"": self.total}).items()}

    def row(self, position: int) -> int:
        """The bytes of one row."""
        if self.ends is not None:
            return int(self.ends[position + 1] - self.ends[position]) * self.unit
        return self.unit if self.counts is None else int(self.counts[position]) * self.unit

    def drop(self, position: int, rows: int) -> int:
        """Let one row of ``rows`` have no bytes from now on, and return what it had."""
        had = self.row(position)
        if self.unit != 1 or self.counts is None:
            self.counts = [self.row(row) for row in range(rows)]
            self.unit, self.ends = 1, None
        self.counts[position] = 0
        return had


def note(fields: TensorDict | None) -> NotedSizes:
    """What :func:`measure` needs to know about each column, in well under a microsecond per tensor."""
    if fields is None:
        return []
    noted: NotedSizes = []
    add = noted.append
    items = fields._tensordict.items() if type(fields) is TensorDict else fields.items()
    for name, value in items:
        kind = type(value)
        if kind is NestedTensor:
            values = value._values
            add(
                (
                    name,
                    values.nbytes,
                    values.untyped_storage().nbytes(),
                    values.shape,
                    value._offsets,
                    value._lengths,
                    value._ragged_idx,
                )
            )
        elif kind is torch.Tensor and not value.is_nested:
            add((name, value.nbytes, value.untyped_storage().nbytes()))
        elif isinstance(value, torch.Tensor):
            add(_note_other_tensor(name, value))
        else:
            add((name, _rows_of_objects(value, fields)))
    return noted


def measure(noted: NotedSizes, rows: int) -> tuple[list[ColumnSize], int]:
    """The columns, and how many of them are a small view of a large storage."""
    columns: list[ColumnSize] = []
    large_views = 0
    ends: Any = None
    last_offsets: Any = None
    for what in noted:
        if len(what) == 3:
            name, total, storage = what
            columns.append(ColumnSize(name, total, total // rows if rows else 0))
        elif len(what) == 2:
            name, counts = what
            leaves = counts.leaves if isinstance(counts, _Counted) else None
            is_counted = isinstance(counts, tuple)
            counts = list(counts) if is_counted else list(map(object_bytes, _payloads(counts)))
            columns.append(ColumnSize(name, sum(counts), 1, counts, leaves=leaves))
            continue
        else:
            name, total, storage, shape, offsets, lengths, ragged = what
            unit = total // shape[ragged - 1] if shape[ragged - 1] else 0
            if lengths is None:
                if offsets is not last_offsets:  # Columns that were cut alike often share them.
                    # A copy: the caller's tensor may lie in memory that is only leased to it.
                    ends = offsets.tolist() if rows <= _SMALL else offsets.cpu().numpy().copy()
                    last_offsets = offsets
                total = unit * int(ends[-1] - ends[0])
                columns.append(ColumnSize(name, total, unit, None, ends))
            else:
                counts = lengths.tolist()
                total = unit * sum(counts)
                columns.append(ColumnSize(name, total, unit, counts))
        if storage > LARGE_VIEW_FACTOR * total + LARGE_VIEW_FLOOR:
            large_views += 1
    return columns, large_views


def _td_bytes(td: TensorDict | None) -> int:
    """The bytes of all columns, now, with nothing kept for later."""
    if td is None:
        return 0
    rows = td.batch_size[0] if td.batch_size else 1
    return sum(column.total for column in measure(note(td), rows)[0])


def object_bytes(value: Any, seen: set[tuple[Any, ...]] | None = None) -> int:
    """The payload of an object: text as UTF-8, arrays their data, numbers 8, containers what they hold.

    With ``seen``, a tensor that was counted before counts nothing.
    """
    kind = type(value)
    if kind is str:
        return len(value) if value.isascii() else len(value.encode("utf-8", "surrogatepass"))
    if kind is bytes:
        return len(value)
    if value is None or kind is bool:
        return 1
    if kind is int or kind is float:
        return 8
    if kind is list or kind is tuple:
        return sum([object_bytes(item, seen) for item in value])
    if kind is dict:
        return sum(map(object_bytes, value)) + sum([object_bytes(item, seen) for item in value.values()])
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        return sum(map(object_bytes, value.flat))
    if isinstance(value, (np.ndarray, torch.Tensor)):
        return 0 if seen is not None and _was_seen(value, seen) else int(value.nbytes)
    if isinstance(value, np.generic):
        return int(value.nbytes)
    try:
        return len(pickle.dumps(value, protocol=5))
    except Exception:
        return sys.getsizeof(value)


def _was_seen(value: np.ndarray[Any, Any] | torch.Tensor, seen: set[tuple[Any, ...]]) -> bool:
    if isinstance(value, torch.Tensor):
        if value.is_nested or value.layout is not torch.strided:
            return False
        same: tuple[Any, ...] = (value.device, value.data_ptr(), value.dtype, value.shape, value.stride())
    else:
        same = (value.ctypes.data, value.dtype, value.shape, value.strides)
    before = len(seen)
    seen.add(same)
    return len(seen) == before


def _note_other_tensor(name: str, value: torch.Tensor) -> tuple[Any, ...]:
    if not value.is_nested:
        return name, value.nbytes, value.untyped_storage().nbytes()
    # The old, strided layout of nested tensors: rows may differ in any dimension, so count their elements.
    sizes = value._nested_tensor_size()
    counts = sizes.prod(dim=1) if sizes.dim() == 2 else torch.ones(len(sizes), dtype=torch.int64)
    itemsize, storage = value.element_size(), value.untyped_storage().nbytes()
    elements = int(counts.sum())
    return name, itemsize * elements, storage, (elements,), counts, counts, 1


def _rows_of_objects(value: Any, fields: TensorDict) -> Any:
    """The rows, to be counted later, as a list; or, as a tuple, their sizes.

    Strings and bytes cannot change, so they can wait. A list, a dict or an array might be changed by
    its owner before then, so a column that does not begin with text is counted at once.
    """
    rows = fields.batch_size[0] if fields.batch_size else 1
    if isinstance(value, NonTensorStack):
        objects = list(value.tensordicts)
    elif isinstance(value, NonTensorData):
        data = value.data
        has_rows = isinstance(data, (list, np.ndarray)) and len(data) == rows
        objects = list(data) if has_rows else [data] * rows
    elif isinstance(value, TensorDictBase):
        columns = measure(note(value), rows)[0]
        inside = {f".{leaf}": size for column in columns for leaf, size in column.by_leaf().items()}
        return _Counted((sum(column.row(row) for column in columns) for row in range(rows)), inside)
    else:
        objects = [value] * rows
    if objects and type(_payloads(objects[:1])[0]) in (str, bytes):
        return objects
    # A tensor that several rows hold is stored once, and counts for the first of them.
    seen: set[tuple[Any, ...]] = set()
    leaves: dict[str, int] = {}
    counts = [_count_leaves(payload, seen, "", leaves) for payload in _payloads(objects)]
    return _Counted(counts, leaves)


class _Counted(tuple[int, ...]):
    """The sizes of rows, and of all rows together by leaf."""

    leaves: Mapping[str, int]

    def __new__(cls, counts: Iterable[int], leaves: Mapping[str, int]) -> Self:
        made = super().__new__(cls, counts)
        made.leaves = leaves
        return made


def _count_leaves(value: Any, seen: set[tuple[Any, ...]], path: str, leaves: dict[str, int]) -> int:
    """The bytes of a row, each added to its leaf; the items of a list have the name of the list."""
    if type(value) is dict and all(type(key) is str for key in value):
        return sum([_count_leaves(item, seen, f"{path}.{key}", leaves) for key, item in value.items()]) + sum(
            map(object_bytes, value)
        )
    if type(value) is list or type(value) is tuple:
        return sum([_count_leaves(item, seen, path, leaves) for item in value])
    size = object_bytes(value, seen)
    leaves[path] = leaves.get(path, 0) + size
    return size


def _payloads(rows: list[Any]) -> list[Any]:
    try:  # The public ``row.data`` takes a microsecond each.
        return [row._non_tensordict["data"] for row in rows]
    except (AttributeError, KeyError, TypeError):
        return [row.data if isinstance(row, NonTensorData) else row for row in rows]
