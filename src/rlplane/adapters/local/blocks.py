"""How a column becomes bytes and a batch is put together again from them.

A put stores each field as one block: the values, and for ragged columns the offsets of the rows.
A row is (block, position). Neighbouring rows of one block are a slice of it; anything else is
gathered with a few vectorised calls per field, never with Python per row and field.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import NonTensorData, NonTensorStack, TensorDict, is_tensor_collection
from torch import Tensor
from torch.nested._internal.nested_tensor import NestedTensor

from rlplane.adapters.local.wire import Layout
from rlplane.errors import InvalidRequestError
from rlplane.objects import decode_object, encode_objects

__all__ = ["Assembler", "Layout", "Source", "open_block", "prepare", "stack_objects"]

_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_PLAIN = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_RUNS_WORTH_SLICING = 4
Bytes = NDArray[np.uint8]
_SIMPLE = frozenset((type(None), bool, int, float, str, bytes))


@dataclass(frozen=True, slots=True)
class Source:
    """One field of a put, ready to be copied into a block."""

    name: str
    layout: Layout
    values: Tensor
    offsets: Tensor | None

    @property
    def nbytes(self) -> int:
        """The size of the block."""
        return self.layout.nbytes

    def copies(self, block: Bytes) -> list[tuple[Bytes, Bytes]]:
        """What has to be copied where, so that ``block``, of :attr:`nbytes`, holds the column.

        A source that is not contiguous, or conjugate or negative by a mark, is copied at once by torch.
        """
        layout = self.layout
        size = layout.values_nbytes
        pairs = []
        if not size:
            pass
        elif _is_plain(self.values):
            pairs.append((block[:size], self.values.view(-1).view(torch.uint8).numpy()))
        else:
            open_block(torch.from_numpy(block), layout)[0].copy_(self.values)
        if self.offsets is not None:
            at = layout.offsets_at
            offsets = self.offsets.contiguous().numpy().view(np.uint8)
            pairs.append((block[at : at + offsets.nbytes], offsets))
        return pairs


def prepare(
    fields: TensorDict, count: int, enums: dict[str, list[str]], *, allow_pickle: bool
) -> list[Source]:
    """Check the columns of a put and lay them out. Nothing is copied yet, except objects."""
    if not is_tensor_collection(fields):
        raise InvalidRequestError(f"fields must be a TensorDict, not {type(fields).__name__}")
    if len(fields.batch_size) == 0 and not list(fields.keys()):
        return []
    sources = []
    for name, value in fields.items():
        if type(value) is NestedTensor and name not in enums:
            sources.append(_nested_source(name, value, count))
        elif isinstance(value, Tensor):
            if name in enums:
                raise InvalidRequestError(
                    f"field {name!r} is declared as an enum of {enums[name]}; give its values as strings"
                )
            if value.is_nested:
                sources.append(_nested_source(name, value, count))
            else:
                sources.append(_dense_source(name, value.detach().cpu(), count))
        elif isinstance(value, (NonTensorData, NonTensorStack)):
            rows = _object_rows(name, value, count)
            if name in enums:
                sources.append(_enum_source(name, rows, enums[name]))
            else:
                sources.append(_object_source(name, rows, allow_pickle))
        else:
            raise InvalidRequestError(
                f"field {name!r} is a {type(value).__name__}; a field is a tensor, a nested tensor or "
                "objects, so flatten a nested TensorDict into fields of its own"
            )
    return sources


def open_block(block: Tensor, layout: Layout) -> tuple[Tensor, Tensor | None]:
    """The values and offsets of a block, as views of its bytes."""
    values = block[: layout.values_nbytes].view(_DTYPES[layout.dtype])
    if layout.kind in ("dense", "enum"):
        return values.view(layout.rows, *layout.shape), None
    at = layout.offsets_at
    offsets = block[at : at + 8 * (layout.rows + 1)].view(torch.int64)
    # An element of no bytes leaves no trace in the values; how many there are is in the offsets alone.
    count = _elements(layout) if layout.values_nbytes else int(offsets[-1])
    return values.view(count, *layout.shape), offsets


class Assembler:
    """Puts the columns of one read together.

    Args:
        layouts: What is in the blocks.
        read: Gives a block's bytes, to copy from.
        own: Gives bytes ``[start, stop)`` of a block as memory that belongs to the caller without a copy;
            None where there is no such thing.
        empty: Gives fresh memory of so many bytes for a gather.
        allow_pickle: Whether objects may be unpickled.
    """

    def __init__(
        self,
        layouts: dict[int, Layout],
        read: Callable[[int], Tensor],
        own: Callable[[int, int, int], Tensor] | None,
        empty: Callable[[int], Tensor],
        *,
        allow_pickle: bool,
    ) -> None:
        self._layouts, self._read, self._own, self._empty = layouts, read, own, empty
        self._allow_pickle = allow_pickle
        self._offsets: dict[bytes, Tensor] = {}

    def column(self, name: str, blocks: NDArray[np.int64], positions: NDArray[np.int32]) -> Any:
        """The rows of one field, each given by its block and its position in it."""
        if not len(blocks):
            return torch.empty(0)
        first_block = int(blocks[0])
        one = first_block == blocks[-1] and (len(blocks) == 1 or bool((blocks == first_block).all()))
        numbers = [first_block] if one else np.unique(blocks).tolist()
        kinds = [self._layouts[number] for number in numbers]
        if all(layout.kind in ("object", "enum") for layout in kinds):
            return self._objects(blocks, positions, numbers)
        _check_one_dtype(name, kinds)
        runs = _runs(blocks, positions)
        if len(runs) == 1:
            return self.neighbours(name, *runs[0])
        if all(layout.kind == "dense" and layout.shape == kinds[0].shape for layout in kinds):
            return self._dense(kinds[0], runs, blocks, positions, numbers)
        return self._jagged(name, kinds, runs, blocks, positions, numbers)

    def neighbours(self, name: str, block: int, start: int, stop: int) -> Any:
        """Rows ``[start, stop)`` of one block, without a copy where the engine can do without."""
        layout = self._layouts[block]
        if layout.kind in ("object", "enum"):
            positions = np.arange(start, stop, dtype=np.int32)
            return self._objects(np.full(stop - start, block, np.int64), positions, [block])
        values, offsets = open_block(self._read(block), layout)
        if offsets is None:
            begin, end = start, stop
        else:
            ends = offsets.numpy()[start : stop + 1]
            begin, end = int(ends[0]), int(ends[-1])
        if self._own is None:
            mine = values[begin:end].clone()
        else:
            element = values.itemsize * math.prod(values.shape[1:])
            flat = self._own(block, begin * element, end * element).view(values.dtype)
            mine = flat.view(end - begin, *values.shape[1:])
        return mine if offsets is None else self._nested(mine, ends - begin)

    def _dense(
        self,
        layout: Layout,
        runs: list[tuple[int, int, int]],
        blocks: NDArray[np.int64],
        positions: NDArray[np.int32],
        numbers: list[int],
    ) -> Tensor:
        count = len(blocks)
        row = layout.values_nbytes // layout.rows
        dtype = _DTYPES[layout.dtype]
        out = self._empty(row * count).view(dtype).view(count, *layout.shape)
        opened = {number: open_block(self._read(number), self._layouts[number])[0] for number in numbers}
        scattered = len(runs) * _RUNS_WORTH_SLICING > count
        if scattered and len(numbers) == 1:
            index = torch.from_numpy(positions.astype(np.int64))
            # As plain numbers of that size, because torch cannot select from all dtypes.
            number = _PLAIN.get(dtype.itemsize, dtype)
            torch.index_select(opened[numbers[0]].view(number), 0, index, out=out.view(number))
            return out
        if scattered:
            parts = {number: torch.split(values, 1) for number, values in opened.items()}
            pieces = [parts[b][p] for b, p in zip(blocks.tolist(), positions.tolist(), strict=True)]
        else:
            pieces = [opened[block][start:stop] for block, start, stop in runs]
        return torch.cat(pieces, out=out)

    def _jagged(
        self,
        name: str,
        kinds: list[Layout],
        runs: list[tuple[int, int, int]],
        blocks: NDArray[np.int64],
        positions: NDArray[np.int32],
        numbers: list[int],
    ) -> Tensor:
        if len({_element_shape(name, layout) for layout in kinds}) > 1:
            raise InvalidRequestError(
                f"field {name!r} holds rows of shapes {sorted({layout.shape for layout in kinds})}, which "
                "differ in more than the first dimension; read them apart"
            )
        opened: dict[int, Tensor] = {}
        offsets: dict[int, NDArray[np.int64]] = {}
        for number in numbers:
            values, inner = open_block(self._read(number), self._layouts[number])
            if inner is None:
                # A dense block among ragged ones is ragged with equal rows.
                offsets[number] = np.arange(values.shape[0] + 1, dtype=np.int64) * values.shape[1]
                values = values.flatten(0, 1)
            else:
                offsets[number] = inner.numpy()
            opened[number] = values
        sample = opened[numbers[0]]
        element = sample.itemsize * math.prod(sample.shape[1:])
        lengths = np.empty(len(blocks), np.int64)
        for number in numbers:
            mine = slice(None) if len(numbers) == 1 else blocks == number
            where = positions[mine]
            lengths[mine] = offsets[number][where + 1] - offsets[number][where]
        ends = np.zeros(len(blocks) + 1, np.int64)
        np.cumsum(lengths, out=ends[1:])
        if len(runs) * _RUNS_WORTH_SLICING > len(blocks):
            rows = {n: torch.split(opened[n], np.diff(offsets[n]).tolist()) for n in numbers}
            pieces = [rows[b][p] for b, p in zip(blocks.tolist(), positions.tolist(), strict=True)]
        else:
            pieces = [opened[b][offsets[b][start] : offsets[b][stop]] for b, start, stop in runs]
        total = int(ends[-1])
        out = self._empty(total * element).view(sample.dtype).view(total, *sample.shape[1:])
        return self._nested(torch.cat(pieces, out=out), ends)

    def _nested(self, values: Tensor, offsets: NDArray[np.int64]) -> Tensor:
        # Fields with equal lengths get the same offsets, so that torch lets them be combined.
        known = self._offsets.setdefault(offsets.tobytes(), torch.from_numpy(offsets))
        # The constructor, because the public function costs four times as much and checks what is known.
        return NestedTensor(values, offsets=known)

    def _objects(
        self, blocks: NDArray[np.int64], positions: NDArray[np.int32], numbers: list[int]
    ) -> NonTensorStack:
        columns: dict[int, Callable[[int], Any]] = {}
        for number in numbers:
            layout = self._layouts[number]
            values, offsets = open_block(self._read(number), layout)
            if offsets is None:
                columns[number] = _word_reader(values.tolist(), layout.vocabulary or [])
            else:
                data = memoryview(values.numpy().data)
                columns[number] = _object_reader(data, offsets.tolist(), self._allow_pickle)
        return stack_objects(
            [columns[b](p) for b, p in zip(blocks.tolist(), positions.tolist(), strict=True)]
        )


# Writing


def _is_plain(values: Tensor) -> bool:
    """Whether the bytes of a tensor, one after the other, are its values."""
    # torch calls a single element contiguous whatever its stride, and then refuses to see bytes in it.
    return (
        values.is_contiguous()
        and values.view(-1).stride(0) == 1
        and not values.is_conj()
        and not values.is_neg()
    )


def _check_rows(name: str, got: int, count: int) -> None:
    if got != count:
        raise InvalidRequestError(
            f"field {name!r} has {got} rows for {count} sample_ids; it needs one per sample"
        )


def _dense_source(name: str, value: Tensor, count: int) -> Source:
    _check_rows(name, value.shape[0] if value.ndim else 0, count)
    layout = Layout(
        "dense", _dtype_name(name, value), tuple(value.shape[1:]), count, value.numel() * value.itemsize
    )
    return Source(name, layout, value, None)


def _nested_source(name: str, value: Any, count: int) -> Source:
    if type(value) is NestedTensor and value._lengths is None and value._ragged_idx == 1:
        # Its parts directly: asking a nested tensor costs tens of microseconds a question.
        values, offsets = value._values.detach(), value._offsets
        if values.device.type != "cpu":
            values, offsets = values.cpu(), offsets.cpu()
        _check_rows(name, offsets.shape[0] - 1, count)
        if offsets.dtype is not torch.int64:
            offsets = offsets.to(torch.int64)
        if count:
            start, stop = int(offsets[0]), int(offsets[-1])
            if start or stop != values.shape[0]:
                values, offsets = values[start:stop], offsets - start
    else:
        value = value.detach().cpu()
        _check_rows(name, value.size(0), count)
        rows = list(value.unbind()) if count else []
        shapes = {tuple(row.shape[1:]) for row in rows}
        if len(shapes) > 1 or any(row.ndim == 0 for row in rows):
            raise InvalidRequestError(
                f"field {name!r} has rows of shapes {sorted(shapes)[:3]} after their first dimension; rows "
                "may differ in the first dimension only (numpy arrays as objects may have any shape)"
            )
        values = torch.cat(rows) if rows else torch.empty(0, dtype=value.dtype)
        lengths = torch.tensor([0] + [row.shape[0] for row in rows], dtype=torch.int64)
        offsets = lengths.cumsum(0)
    if not count:
        offsets = torch.zeros(1, dtype=torch.int64)
    layout = Layout(
        "jagged", _dtype_name(name, values), tuple(values.shape[1:]), count, values.numel() * values.itemsize
    )
    return Source(name, layout, values, offsets)


def _object_rows(name: str, value: Any, count: int) -> list[Any]:
    rows: list[Any]
    if isinstance(value, NonTensorStack):
        rows = value.tolist()
    else:
        data = value.data
        if isinstance(data, (list, tuple)) or (
            isinstance(data, np.ndarray) and data.dtype == object and data.ndim
        ):
            rows = list(data)
        else:
            # One object for the whole batch is, to tensordict, the same object in every row.
            rows = [data] * count
    _check_rows(name, len(rows), count)
    return rows


def _object_source(name: str, rows: list[Any], allow_pickle: bool) -> Source:
    encoded = encode_objects(rows, field=name, allow_pickle=allow_pickle)
    offsets = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, encoded), np.int64, len(encoded)), out=offsets[1:])
    joined = np.frombuffer(bytearray(b"".join(encoded)), np.uint8)
    layout = Layout("object", "torch.uint8", (), len(rows), joined.nbytes)
    return Source(name, layout, torch.from_numpy(joined), torch.from_numpy(offsets))


def _enum_source(name: str, rows: list[Any], vocabulary: list[str]) -> Source:
    codes = {word: code for code, word in enumerate(vocabulary)}
    try:
        numbers = [codes[row] for row in rows]
    except (KeyError, TypeError):
        bad = next(row for row in rows if not isinstance(row, str) or row not in codes)
        raise InvalidRequestError(
            f"field {name!r} is an enum of {vocabulary}; {bad!r} is not one of them"
        ) from None
    dtype = torch.uint8 if len(vocabulary) <= 256 else torch.int32
    values = torch.tensor(numbers, dtype=dtype)
    layout = Layout("enum", str(dtype), (), len(rows), values.numel() * values.itemsize, vocabulary)
    return Source(name, layout, values, None)


def _dtype_name(name: str, value: Tensor) -> str:
    if value.is_quantized or value.layout not in (torch.strided, torch.jagged):
        raise InvalidRequestError(
            f"field {name!r} has dtype {value.dtype} and layout {value.layout}; "
            "a field is dense or nested, and not quantized"
        )
    return _NAMES[value.dtype]


# Reading


def _elements(layout: Layout) -> int:
    size = _DTYPES[layout.dtype].itemsize
    for extent in layout.shape:
        size *= extent
    return layout.values_nbytes // size if size else 0


def _element_shape(name: str, layout: Layout) -> tuple[int, ...]:
    if layout.kind == "jagged":
        return layout.shape
    if not layout.shape:
        raise InvalidRequestError(
            f"field {name!r} holds scalars and sequences in the rows asked for; read them apart"
        )
    return layout.shape[1:]


def _runs(blocks: NDArray[np.int64], positions: NDArray[np.int32]) -> list[tuple[int, int, int]]:
    """Split the rows into maximal stretches of neighbours: (block, first position, last + 1)."""
    breaks = np.flatnonzero((np.diff(positions) != 1) | (np.diff(blocks) != 0)) + 1
    starts = np.concatenate(([0], breaks))
    stops = np.concatenate((breaks, [len(blocks)]))
    begin = positions[starts]
    return list(
        zip(blocks[starts].tolist(), begin.tolist(), (begin + (stops - starts)).tolist(), strict=True)
    )


def _check_one_dtype(name: str, kinds: list[Layout]) -> None:
    held = {"objects" if layout.kind in ("object", "enum") else layout.dtype for layout in kinds}
    if len(held) > 1:
        raise InvalidRequestError(
            f"field {name!r} holds {' and '.join(sorted(held))} in the rows asked for; read them apart"
        )


def _word_reader(codes: Sequence[int], vocabulary: list[str]) -> Callable[[int], str]:
    return lambda position: vocabulary[codes[position]]


def _object_reader(data: memoryview, offsets: list[int], allow_pickle: bool) -> Callable[[int], Any]:
    return lambda p: decode_object(data[offsets[p] : offsets[p + 1]], allow_pickle=allow_pickle)


def stack_objects(rows: list[Any]) -> NonTensorStack:
    """One object per row, each in a NonTensorData of its own, so that lists stay objects."""
    if set(map(type, rows)) <= _SIMPLE:
        return NonTensorStack(*rows)
    return NonTensorStack(*[NonTensorData(row, batch_size=[]) for row in rows])
