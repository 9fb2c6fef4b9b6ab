"""How many bytes the columns of a batch have, row by row: of the data, not of what lies behind a view.

Two steps, because the first one runs on the path of every put and has to cost less than a microsecond per
column: :func:`glance` notes what can be read off without work, and :func:`settle`, later and elsewhere, makes
:class:`Column` of it. Neither keeps the data alive; offsets of nested tensors, and text, wait to be settled.
"""

from __future__ import annotations

import pickle
import sys
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase
from torch.nested._internal.nested_tensor import NestedTensor

__all__ = ["DRAG_FACTOR", "DRAG_FLOOR", "Column", "glance", "object_bytes", "settle", "total_bytes"]

# A column "drags" when the storage behind it is so much larger than its data: an engine that pickles it, or
# a worker that keeps it, holds all of that.
DRAG_FACTOR = 2
DRAG_FLOOR = 1 << 16

_SMALL = 64  # Up to here a Python list is faster than an array.


class Column:
    """The size of one field in one put.

    Row ``i`` has ``unit`` bytes; times ``counts[i]`` if there are counts, or times the distance from
    ``ends[i]`` to ``ends[i + 1]`` if there are ends.
    """

    __slots__ = ("counts", "ends", "name", "total", "unit")

    def __init__(self, name: str, total: int, unit: int, counts: Any = None, ends: Any = None) -> None:
        self.name = name
        self.total = total
        self.unit = unit
        self.counts = counts
        self.ends = ends

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


def glance(fields: TensorDict | None) -> list[tuple[Any, ...]]:
    """What :func:`settle` needs to know about each column, in well under a microsecond per tensor."""
    if fields is None:
        return []
    seen: list[tuple[Any, ...]] = []
    add = seen.append
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
            add(_glance_at_other_tensor(name, value))
        else:
            add((name, _rows_of_objects(value, fields)))
    return seen


def settle(seen: list[tuple[Any, ...]], rows: int) -> tuple[list[Column], int]:
    """The columns, and how many of them are a small view of a large storage."""
    columns: list[Column] = []
    dragging = 0
    ends: Any = None
    last_offsets: Any = None
    for what in seen:
        if len(what) == 3:
            name, total, storage = what
            columns.append(Column(name, total, total // rows if rows else 0))
        elif len(what) == 2:
            name, counts = what
            counts = list(counts) if type(counts) is tuple else list(map(object_bytes, _payloads(counts)))
            columns.append(Column(name, sum(counts), 1, counts))
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
                columns.append(Column(name, total, unit, None, ends))
            else:
                counts = lengths.tolist()
                total = unit * sum(counts)
                columns.append(Column(name, total, unit, counts))
        if storage > DRAG_FACTOR * total + DRAG_FLOOR:
            dragging += 1
    return columns, dragging


def total_bytes(fields: TensorDict | None) -> int:
    """The bytes of all columns, now, with nothing kept for later."""
    if fields is None:
        return 0
    rows = fields.batch_size[0] if fields.batch_size else 1
    return sum(column.total for column in settle(glance(fields), rows)[0])


def object_bytes(value: Any) -> int:
    """The payload of an object: text as UTF-8, arrays their data, numbers 8, containers what they hold."""
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
        return sum(map(object_bytes, value))
    if kind is dict:
        return sum(map(object_bytes, value)) + sum(map(object_bytes, value.values()))
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        return sum(map(object_bytes, value.flat))
    if isinstance(value, (np.ndarray, np.generic, torch.Tensor)):
        return int(value.nbytes)
    try:
        return len(pickle.dumps(value, protocol=5))
    except Exception:
        return sys.getsizeof(value)


def _glance_at_other_tensor(name: str, value: torch.Tensor) -> tuple[Any, ...]:
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
    elif isinstance(value, TensorDictBase):  # Engines refuse it; its size still belongs into the event.
        return (total_bytes(value),)
    else:
        objects = [value] * rows
    if objects and type(_payloads(objects[:1])[0]) in (str, bytes):
        return objects
    return tuple(map(object_bytes, _payloads(objects)))


def _payloads(rows: list[Any]) -> list[Any]:
    try:  # The public ``row.data`` takes a microsecond each.
        return [row._non_tensordict["data"] for row in rows]
    except (AttributeError, KeyError, TypeError):
        return [row.data if isinstance(row, NonTensorData) else row for row in rows]
