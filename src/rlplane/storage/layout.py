"""How a column becomes bytes: dense tensors, nested tensors, objects, trees and enums.

A put stores each field as one block: the values, and for ragged columns the offsets of the rows. What the
bytes mean is said by the block's :class:`~rlplane.storage.places.Layout`. :mod:`rlplane.storage.assembly` is
the way back.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    is_tensor_collection,
)
from torch import Tensor
from torch.nested._internal.nested_tensor import NestedTensor

from rlplane.errors import InvalidRequestError
from rlplane.storage.copying import Copy, copy_all
from rlplane.storage.dtypes import HOST, dtype_name
from rlplane.storage.objects import encode_objects
from rlplane.storage.places import Layout
from rlplane.storage.trees import Bulk, Part, address_of, pieces_of

# Up to this many offsets are checked without numpy, whose first use after a pause costs more than all the
# rest.
_FEW_ROWS = 64
OBJECT_BYTES = 2048  # at least so many are copied in the time that it takes to encode or decode an object


class EncodedColumn(NamedTuple):
    """One field of a put, ready to be copied into a block of ``nbytes``."""

    name: str
    layout: Layout
    nbytes: int
    values: Tensor
    offsets: Tensor | None = None
    parts: Sequence[Part] = ()
    """The tensors of trees; ``values`` are then what is behind them."""

    def copies(self, memory: Tensor, start: int) -> list[Copy]:
        """What has to be copied, so that the block at ``memory[start:]`` holds the column.

        What does not lie in memory as it is to be stored is copied at once, by torch.
        """
        _, layout, _, values, offsets, parts = self
        block = memory.data_ptr() + start
        if layout.values_nbytes:
            nbytes = values.nbytes
            last = (layout.values_nbytes - nbytes, nbytes, address_of(values, self.name), values)
            parts = [*parts, last] if parts else [last]
        copies = [(block + at, address, nbytes) for at, nbytes, address, _ in parts if address]
        if len(copies) < len(parts):
            for at, nbytes, address, value in parts:
                if not address:
                    target = memory[start + at : start + at + nbytes].view(value.dtype).view(value.shape)
                    target.copy_(value.detach())
        if offsets is not None:
            copies.append((block + layout.offsets_at, offsets.data_ptr(), 8 * (layout.rows + 1)))
        return copies


def encode_columns(
    fields: TensorDict,
    count: int,
    enums: dict[str, list[str]],
    *,
    allow_pickle: bool,
    offsets_in_block: bool = True,
) -> list[EncodedColumn]:
    """Check the columns of a put and say what their bytes are. Nothing is copied yet, except objects.

    Args:
        fields: The columns.
        count: How many rows each of them must have.
        enums: The vocabulary of each field that is an enum.
        allow_pickle: Whether objects may be pickled.
        offsets_in_block: Whether the offsets of ragged columns are stored behind their values, or go with
            the layout.
    """
    if type(fields) is not TensorDict and not is_tensor_collection(fields):
        raise InvalidRequestError(
            f"fields must be a TensorDict, not {type(fields).__name__}; "
            f"TensorDict(columns, [{count}]) makes one"
        )
    if len(fields.batch_size) == 0 and not list(fields.keys()):
        return []
    columns = []
    known: dict[int, _Offsets] = {}
    for name, value in fields.items():
        if type(value) is NestedTensor and name not in enums:
            columns.append(_nested_column(name, value, count, known))
        elif isinstance(value, Tensor):
            if name in enums:
                raise InvalidRequestError(
                    f"field {name!r} is declared as an enum of {enums[name]}; give its values as strings"
                )
            if value.is_nested:
                columns.append(_nested_column(name, value, count, known))
            else:
                columns.append(_dense_column(name, value, count))
        elif isinstance(value, (NonTensorData, NonTensorStack)):
            rows = _object_rows(name, value, count)
            if name in enums:
                columns.append(_enum_column(name, rows, enums[name]))
            else:
                columns.append(_object_column(name, rows, allow_pickle))
        elif is_tensor_collection(value) and name not in enums:
            columns.append(_object_column(name, _rows_of_collection(name, value, count), allow_pickle))
        else:
            raise InvalidRequestError(
                f"field {name!r} is a {type(value).__name__}; a field is a tensor, a nested tensor, objects "
                "or a TensorDict, and an enum is given as strings"
            )
    return columns if offsets_in_block else [with_offsets_in_layout(column) for column in columns]


def bytes_to_encode(fields: TensorDict) -> int:
    """About how many bytes encoding copies, or could copy in the time that it takes."""
    if not isinstance(fields, TensorDict):
        return 0
    total = 0
    for value in fields.values():
        if type(value) is NestedTensor:
            if not _is_jagged(value) or not value._values.is_cpu:
                total += value._values.nbytes
        elif isinstance(value, Tensor):
            if value.is_nested or not value.is_cpu:
                total += value.nbytes
        elif value.batch_size:
            leaves = 1 if isinstance(value, (NonTensorData, NonTensorStack)) else len(value.keys(True, True))
            total += OBJECT_BYTES * len(value) * leaves
    return total


def fill(memory: Tensor, start: int, columns: Sequence[EncodedColumn]) -> None:
    """Copy columns into ``memory``, their blocks one behind the other from byte ``start`` on."""
    copies: list[Copy] = []
    for column in columns:
        copies += column.copies(memory, start)
        start += column.nbytes
    copy_all(copies)


def with_offsets_in_layout(column: EncodedColumn) -> EncodedColumn:
    """The same column for a storage in which nobody can look into a block before fetching it."""
    if column.offsets is None:
        return column
    layout = msgspec.structs.replace(column.layout, offsets=column.offsets.numpy().tobytes())
    if layout.kind in ("tree", "ragged"):
        structures = memoryview(column.values.numpy().data)
        begin = layout.values_nbytes - len(structures)
        leaves, pieces = pieces_of(structures, column.offsets.tolist(), begin=begin)
        layout = msgspec.structs.replace(layout, leaves=leaves, pieces=pieces.tobytes())
    return column._replace(layout=layout, nbytes=layout.nbytes, offsets=None)


def _on_host(name: str, values: Tensor) -> Tensor:
    if values.is_cpu:
        return values
    if values.is_meta:
        raise InvalidRequestError(
            f"field {name!r} is on the device 'meta': it has a shape and no values that could be written"
        )
    return values.cpu()


def _check_rows(name: str, got: int, count: int) -> None:
    if got != count:
        raise InvalidRequestError(
            f"field {name!r} has {got} rows for {count} sample_ids; it needs one per sample"
        )


def _dense_column(name: str, value: Tensor, count: int) -> EncodedColumn:
    value = _on_host(name, value)
    _check_rows(name, value.shape[0] if value.ndim else 0, count)
    layout = Layout("dense", dtype_name(name, value), tuple(value.shape[1:]), count, value.nbytes)
    return EncodedColumn(name, layout, layout.nbytes, value)


class _Offsets(NamedTuple):
    """Offsets that start at 0, and which values they are of."""

    given: Tensor  # kept, so that nothing else gets its id
    offsets: Tensor
    start: int
    stop: int


def _checked_offsets(name: str, given: Tensor, count: int) -> _Offsets:
    offsets = given if given.is_cpu else given.cpu()
    if offsets.dtype is not torch.int64 or not offsets.is_contiguous():
        offsets = offsets.to(torch.int64).contiguous()
    _check_rows(name, offsets.shape[0] - 1, count)
    if not count:
        return _Offsets(given, torch.zeros(1, dtype=torch.int64, device=HOST), 0, 0)
    if count <= _FEW_ROWS:
        places = offsets.tolist()
        start, stop, ascend = places[0], places[-1], places == sorted(places)
    else:
        ends = offsets.numpy()
        start, stop, ascend = int(ends[0]), int(ends[-1]), not (ends[1:] < ends[:-1]).any()
    if start < 0 or not ascend:
        raise InvalidRequestError(
            f"field {name!r} has offsets that start below 0 or decrease; they are where its rows begin"
        )
    return _Offsets(given, offsets - start if start else offsets, start, stop)


def _is_jagged(value: Any) -> bool:
    """Whether the rows of a nested tensor lie one behind the other, as they are stored."""
    return value._lengths is None and value._ragged_idx == 1


def _nested_column(name: str, value: Any, count: int, known: dict[int, _Offsets]) -> EncodedColumn:
    if type(value) is NestedTensor and _is_jagged(value):
        # Its parts directly: asking a nested tensor costs tens of microseconds a question.
        values, given = _on_host(name, value._values), value._offsets
        checked = known.get(id(given))
        if checked is None:
            # Fields of one batch mostly have the same.
            checked = known[id(given)] = _checked_offsets(name, given, count)
        _, offsets, start, stop = checked
        shape = values.shape
        if start or stop != shape[0]:
            if stop > shape[0]:
                raise InvalidRequestError(
                    f"field {name!r} has {shape[0]} values, and its offsets go to {stop}"
                )
            values = values[start:stop]
    else:
        value = _on_host(name, value.detach())
        _check_rows(name, value.size(0), count)
        rows = list(value.unbind()) if count else []
        shapes = {tuple(row.shape[1:]) for row in rows}
        if len(shapes) > 1 or any(row.ndim == 0 for row in rows):
            bulk = Bulk(name)
            return _tree_column(name, "ragged", encode_objects(rows, field=name, bulk=bulk), bulk)
        values = torch.cat(rows) if rows else torch.empty(0, dtype=value.dtype, device=HOST)
        lengths = torch.tensor([0] + [row.shape[0] for row in rows], dtype=torch.int64, device=HOST)
        offsets = lengths.cumsum(0)
        shape = values.shape
    layout = Layout("jagged", dtype_name(name, values), tuple(shape[1:]), count, values.nbytes)
    return EncodedColumn(name, layout, layout.nbytes, values, offsets)


def _object_rows(name: str, value: NonTensorData | NonTensorStack, count: int) -> list[Any]:
    """One object per row. A single object for all rows is refused: on one engine it would be easy to
    broadcast, on another it would be stored many times, and whether a string or an array is one object or
    many is a guess."""
    rows: list[Any]
    if isinstance(value, NonTensorStack):
        rows = value.tolist()
    else:
        data = value.data
        if not isinstance(data, (list, tuple)) and not (isinstance(data, np.ndarray) and data.ndim):
            raise InvalidRequestError(
                f"field {name!r} holds a single {type(data).__name__} for {count} samples; give one entry "
                f"per sample, such as NonTensorStack(*[value] * {count})"
            )
        rows = list(data) if not isinstance(data, np.ndarray) or data.ndim > 1 else data.tolist()
    _check_rows(name, len(rows), count)
    return rows


def _rows_of_collection(name: str, value: Any, count: int) -> list[Any]:
    """The rows of a nested TensorDict, each as a dict."""
    _check_rows(name, value.batch_size[0] if value.batch_size else 0, count)
    if isinstance(value, LazyStackedTensorDict) and value.stack_dim == 0:
        return [row.to_dict() for row in value.tensordicts]
    leaves: dict[str, Sequence[Any]] = {}
    for key, leaf in value.items():
        if isinstance(leaf, Tensor):
            leaves[key] = leaf.detach().unbind() if count else ()
        elif isinstance(leaf, (NonTensorData, NonTensorStack)):
            leaves[key] = _object_rows(f"{name}.{key}", leaf, count)
        else:
            leaves[key] = _rows_of_collection(f"{name}.{key}", leaf, count)
    return [{key: rows[row] for key, rows in leaves.items()} for row in range(count)]


def _object_column(name: str, rows: list[Any], allow_pickle: bool) -> EncodedColumn:
    bulk = Bulk(name)
    encoded = encode_objects(rows, field=name, allow_pickle=allow_pickle, bulk=bulk)
    return _tree_column(name, "tree" if bulk.used else "object", encoded, bulk)


def _tree_column(name: str, kind: str, encoded: list[bytes], bulk: Bulk) -> EncodedColumn:
    """Objects one behind the other, and before them what they refer to."""
    offsets = np.array([*accumulate(map(len, encoded), initial=bulk.nbytes)], np.int64)
    joined = np.frombuffer(bytearray(b"".join(encoded)), np.uint8)
    layout = Layout(kind, "torch.uint8", (), len(encoded), int(offsets[-1]))
    values, ends = torch.from_numpy(joined), torch.from_numpy(offsets)
    return EncodedColumn(name, layout, layout.nbytes, values, ends, bulk.parts)


def _enum_column(name: str, rows: list[Any], vocabulary: list[str]) -> EncodedColumn:
    codes = {word: code for code, word in enumerate(vocabulary)}
    try:
        numbers = [codes[row] for row in rows]
    except (KeyError, TypeError):
        bad = next(row for row in rows if not isinstance(row, str) or row not in codes)
        raise InvalidRequestError(
            f"field {name!r} is an enum of {vocabulary}; {bad!r} is not one of them"
        ) from None
    dtype = torch.uint8 if len(vocabulary) <= 256 else torch.int32
    values = torch.tensor(numbers, dtype=dtype, device=HOST)
    layout = Layout("enum", str(dtype), (), len(rows), values.numel() * values.itemsize, vocabulary)
    return EncodedColumn(name, layout, layout.nbytes, values)
