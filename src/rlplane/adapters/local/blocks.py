"""How a column becomes bytes and a batch is put together again from them.

A put stores each field as one block: the values, and for ragged columns the offsets of the rows.
A row is (block, position). Neighbouring rows of one block are a slice of it; anything else is
gathered, with one copy per stretch of neighbours and one call for all fields.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import NonTensorData, NonTensorStack, TensorDict, is_tensor_collection
from torch import Tensor
from torch.nested._internal.nested_tensor import NestedTensor

from rlplane.adapters.local.copying import Copies, Copy, copy_table
from rlplane.adapters.local.wire import Layout
from rlplane.errors import DataPlaneError, InvalidRequestError
from rlplane.objects import decode_object, encode_objects

__all__ = ["Assembler", "Bytes", "Layout", "Source", "prepare", "stack_objects"]

_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
_HOST = torch.device("cpu")  # said everywhere, because a user may have set another default
_QUANTIZED = (torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4)
_NAMES = {dtype: name for name, dtype in _DTYPES.items() if dtype not in _QUANTIZED}
Bytes = NDArray[np.uint8]
# Shorter rows are taken faster by numpy, one by one, than copied.
_WORTH_A_COPY = 512
# So few offsets are checked without numpy, whose first use after a pause costs more than all the rest.
_FEW_ROWS = 64
_SIMPLE = frozenset((type(None), bool, int, float, str, bytes))


class Source(NamedTuple):
    """One field of a put, ready to be copied into a block of ``nbytes``."""

    name: str
    layout: Layout
    nbytes: int
    values: Tensor
    offsets: Tensor | None = None

    def copies(self, memory: Tensor, start: int) -> list[Copy]:
        """What has to be copied, so that the block at ``memory[start:]`` holds the column.

        A source that is not contiguous, or conjugate or negative by a mark, is copied at once by torch.
        """
        _, layout, _, values, offsets = self
        size = layout.values_nbytes
        block = memory.data_ptr() + start
        copies = []
        if not size:
            pass
        elif values.is_contiguous() and not values.is_conj() and not values.is_neg():
            address = values.data_ptr()
            if not address:
                kind = type(values).__name__
                raise InvalidRequestError(
                    f"field {self.name!r} is a {kind} without memory of its own; give a plain tensor"
                )
            copies.append((block, address, size))
        else:
            _values_in(memory[start : start + size], layout).copy_(values.detach())
        if offsets is not None:
            copies.append((block + layout.offsets_at, offsets.data_ptr(), 8 * (layout.rows + 1)))
        return copies


def prepare(
    fields: TensorDict, count: int, enums: dict[str, list[str]], *, allow_pickle: bool
) -> list[Source]:
    """Check the columns of a put and lay them out. Nothing is copied yet, except objects."""
    if type(fields) is not TensorDict and not is_tensor_collection(fields):
        raise InvalidRequestError(f"fields must be a TensorDict, not {type(fields).__name__}")
    if len(fields.batch_size) == 0 and not list(fields.keys()):
        return []
    sources = []
    known: dict[int, _Offsets] = {}
    for name, value in fields.items():
        if type(value) is NestedTensor and name not in enums:
            sources.append(_nested_source(name, value, count, known))
        elif isinstance(value, Tensor):
            if name in enums:
                raise InvalidRequestError(
                    f"field {name!r} is declared as an enum of {enums[name]}; give its values as strings"
                )
            if value.is_nested:
                sources.append(_nested_source(name, value, count, known))
            else:
                sources.append(_dense_source(name, value, count))
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


def _values_in(block: Tensor, layout: Layout) -> Tensor:
    """The values of a block, as a view of its bytes."""
    shape = (layout.rows, *layout.shape) if layout.kind == "dense" else (-1, *layout.shape)
    return block[: layout.values_nbytes].view(_DTYPES[layout.dtype]).view(shape)


class Assembler:
    """Puts the columns of one read together.

    Args:
        layouts: What is in the blocks.
        read: Gives a block's bytes, to copy from.
        own: Gives bytes ``[start, stop)`` of a block, of this dtype and shape, as the caller's own.
        empty: Gives memory of so many bytes for a gather.
        allow_pickle: Whether objects may be unpickled.
    """

    def __init__(
        self,
        layouts: dict[int, Layout],
        read: Callable[[int], Bytes],
        own: Callable[[int, int, int, torch.dtype, tuple[int, ...]], Tensor],
        empty: Callable[[int], Tensor],
        *,
        allow_pickle: bool,
    ) -> None:
        self._layouts, self._read, self._own, self._empty = layouts, read, own, empty
        self._allow_pickle = allow_pickle
        self._offsets: dict[bytes, Tensor] = {}
        self._gathers: list[Copies] = []

    def finish(self) -> None:
        """Fill the columns that are gathered, all at once. Until then their bytes are undefined."""
        if self._gathers:
            copy_table(self._gathers[0] if len(self._gathers) == 1 else np.concatenate(self._gathers))
            self._gathers.clear()

    def column(self, name: str, blocks: NDArray[np.int64], positions: NDArray[np.int32]) -> Any:
        """The rows of one field, each given by its block and its position in it."""
        if not len(blocks):
            return torch.empty(0, device=_HOST)
        first_block = int(blocks[0])
        one = first_block == blocks[-1] and (len(blocks) == 1 or bool((blocks == first_block).all()))
        numbers = [first_block] if one else np.unique(blocks).tolist()
        kinds = [self._layouts[number] for number in numbers]
        if all(layout.kind in ("object", "enum") for layout in kinds):
            return self._objects(blocks, positions, numbers)
        _check_one_dtype(name, kinds)
        runs = _runs(blocks, positions)
        if len(runs) == 1:
            return self.neighbours(name, first_block, int(positions[0]), int(positions[-1]) + 1)
        if all(layout.kind == "dense" and layout.shape == kinds[0].shape for layout in kinds):
            return self._dense(kinds[0], runs, blocks, positions, numbers)
        return self._jagged(name, kinds, runs, blocks, positions, numbers)

    def neighbours(self, name: str, block: int, start: int, stop: int) -> Any:
        """Rows ``[start, stop)`` of one block, without a copy where the engine can do without."""
        layout = self._layouts[block]
        if layout.kind in ("object", "enum"):
            positions = np.arange(start, stop, dtype=np.int32)
            return self._objects(np.full(stop - start, block, np.int64), positions, [block])
        size, dtype = _element_size(layout), _DTYPES[layout.dtype]
        if layout.kind == "dense":
            return self._own(block, start * size, stop * size, dtype, (stop - start, *layout.shape))
        ends = _offsets(self._read(block), layout)[start : stop + 1]
        begin, end = int(ends[0]), int(ends[-1])
        if not 0 <= begin <= end or end * size > layout.values_nbytes:
            _raise_torn(name)
        mine = self._own(block, begin * size, end * size, dtype, (end - begin, *layout.shape))
        return self._nested(mine, ends - begin)

    def _dense(
        self,
        layout: Layout,
        runs: NDArray[np.int64],
        blocks: NDArray[np.int64],
        positions: NDArray[np.int32],
        numbers: list[int],
    ) -> Tensor:
        count, size = len(blocks), _element_size(layout)
        out = self._empty(size * count)
        if 0 < size < _WORTH_A_COPY and len(numbers) == 1:
            rows = self._read(numbers[0])[: layout.values_nbytes].reshape(layout.rows, size)
            # With "clip" it writes straight into out; the positions are known to be there.
            np.take(rows, positions, axis=0, out=out.numpy().reshape(count, size), mode="clip")
        else:
            raw = [self._read(number) for number in numbers]
            begins = positions.astype(np.int64) * size
            self._gather(raw, numbers, blocks, begins, begins + size, runs, out)
        return out.view(_DTYPES[layout.dtype]).view(count, *layout.shape)

    def _jagged(
        self,
        name: str,
        kinds: list[Layout],
        runs: NDArray[np.int64],
        blocks: NDArray[np.int64],
        positions: NDArray[np.int32],
        numbers: list[int],
    ) -> Tensor:
        shapes = {_element_shape(name, layout) for layout in kinds}
        if len(shapes) > 1:
            raise InvalidRequestError(
                f"field {name!r} holds rows of shapes {sorted({layout.shape for layout in kinds})}, which "
                "differ in more than the first dimension; read them apart"
            )
        (shape,) = shapes
        dtype = _DTYPES[kinds[0].dtype]
        size = dtype.itemsize * math.prod(shape)
        raw = [self._read(number) for number in numbers]
        # The offsets of all blocks, one after the other, so that one step finds those of every row.
        found = [_offsets(block, self._layouts[number]) for number, block in zip(numbers, raw, strict=True)]
        room = np.array([layout.values_nbytes for layout in kinds], np.int64)
        if len(found) == 1:
            known, at = found[0], positions.astype(np.int64)
        else:
            known = np.concatenate(found, dtype=np.int64)
            homes = np.cumsum([0, *map(len, found[:-1])], dtype=np.int64)
            which = np.searchsorted(numbers, blocks)
            at, room = homes[which] + positions, room[which]
        begins, stops = known[at], known[at + 1]
        if ((begins < 0) | (stops < begins) | (stops * size > room)).any():
            _raise_torn(name)
        ends = np.zeros(len(blocks) + 1, np.int64)
        np.cumsum(stops - begins, out=ends[1:])
        total = int(ends[-1])
        out = self._empty(total * size)
        self._gather(raw, numbers, blocks, begins * size, stops * size, runs, out)
        return self._nested(out.view(dtype).view(total, *shape), ends)

    def _gather(
        self,
        raw: list[Bytes],
        numbers: list[int],
        blocks: NDArray[np.int64],
        begins: NDArray[np.int64],
        ends: NDArray[np.int64],
        runs: NDArray[np.int64],
        out: Tensor,
    ) -> None:
        """Plan to copy bytes ``[begins, ends)`` of every row's block to ``out``, each stretch at once."""
        lasts = np.empty_like(runs)
        lasts[:-1], lasts[-1] = runs[1:] - 1, len(blocks) - 1
        addresses = np.array([block.ctypes.data for block in raw], np.int64)
        homes = addresses if len(numbers) == 1 else addresses[np.searchsorted(numbers, blocks[runs])]
        copies = np.empty((len(runs), 3), np.int64)
        copies[:, 1] = homes + begins[runs]
        copies[:, 2] = sizes = ends[lasts] - begins[runs]
        copies[:, 0] = out.data_ptr() + np.cumsum(sizes) - sizes
        self._gathers.append(copies)

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
            layout, block = self._layouts[number], self._read(number)
            if layout.kind == "enum":
                codes = block[: layout.values_nbytes].view(layout.dtype.removeprefix("torch.")).tolist()
                columns[number] = _word_reader(codes, layout.vocabulary or [])
            else:
                data = memoryview(block[: layout.values_nbytes].data)
                offsets = _offsets(block, layout).tolist()
                columns[number] = _object_reader(data, offsets, self._allow_pickle)
        return stack_objects(
            [columns[b](p) for b, p in zip(blocks.tolist(), positions.tolist(), strict=True)]
        )


# Writing


def _check_rows(name: str, got: int, count: int) -> None:
    if got != count:
        raise InvalidRequestError(
            f"field {name!r} has {got} rows for {count} sample_ids; it needs one per sample"
        )


def _dense_source(name: str, value: Tensor, count: int) -> Source:
    if not value.is_cpu:
        value = value.cpu()
    _check_rows(name, value.shape[0] if value.ndim else 0, count)
    layout = Layout("dense", _dtype_name(name, value), tuple(value.shape[1:]), count, value.nbytes)
    return Source(name, layout, layout.nbytes, value)


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
        return _Offsets(given, torch.zeros(1, dtype=torch.int64, device=_HOST), 0, 0)
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


def _nested_source(name: str, value: Any, count: int, known: dict[int, _Offsets]) -> Source:
    if type(value) is NestedTensor and value._lengths is None and value._ragged_idx == 1:
        # Its parts directly: asking a nested tensor costs tens of microseconds a question.
        values, given = value._values, value._offsets
        checked = known.get(id(given))
        if checked is None:
            # Fields of one batch mostly have the same.
            checked = known[id(given)] = _checked_offsets(name, given, count)
        _, offsets, start, stop = checked
        if not values.is_cpu:
            values = values.cpu()
        shape = values.shape
        if start or stop != shape[0]:
            if stop > shape[0]:
                raise InvalidRequestError(
                    f"field {name!r} has {shape[0]} values, and its offsets go to {stop}"
                )
            values = values[start:stop]
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
        values = torch.cat(rows) if rows else torch.empty(0, dtype=value.dtype, device=_HOST)
        lengths = torch.tensor([0] + [row.shape[0] for row in rows], dtype=torch.int64, device=_HOST)
        offsets = lengths.cumsum(0)
        shape = values.shape
    layout = Layout("jagged", _dtype_name(name, values), tuple(shape[1:]), count, values.nbytes)
    return Source(name, layout, layout.nbytes, values, offsets)


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
    return Source(name, layout, layout.nbytes, torch.from_numpy(joined), torch.from_numpy(offsets))


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
    values = torch.tensor(numbers, dtype=dtype, device=_HOST)
    layout = Layout("enum", str(dtype), (), len(rows), values.numel() * values.itemsize, vocabulary)
    return Source(name, layout, layout.nbytes, values)


def _dtype_name(name: str, value: Tensor) -> str:
    known = _NAMES.get(value.dtype)
    if known is None or value.layout is not torch.strided:
        raise InvalidRequestError(
            f"field {name!r} has dtype {value.dtype} and layout {value.layout}; "
            "a field is dense or nested, and not quantized"
        )
    return known


# Reading


def _element_size(layout: Layout) -> int:
    """The bytes of a row of a dense block, or of an element of a ragged one."""
    return _DTYPES[layout.dtype].itemsize * math.prod(layout.shape)


def _offsets(block: Bytes, layout: Layout) -> NDArray[np.int64]:
    """Where the rows of a block begin and end, in elements."""
    if layout.kind == "dense":
        # A dense block among ragged ones is ragged with equal rows.
        return np.arange(layout.rows + 1, dtype=np.int64) * layout.shape[0]
    at = layout.offsets_at
    return block[at : at + 8 * (layout.rows + 1)].view(np.int64)


def _element_shape(name: str, layout: Layout) -> tuple[int, ...]:
    if layout.kind == "jagged":
        return layout.shape
    if not layout.shape:
        raise InvalidRequestError(
            f"field {name!r} holds scalars and sequences in the rows asked for; read them apart"
        )
    return layout.shape[1:]


def _raise_torn(name: str) -> NoReturn:
    # A put checks them, so somebody has written over them since. Reading on would read other memory.
    raise DataPlaneError(f"the offsets of field {name!r} are damaged: they lie outside of its values")


def _runs(blocks: NDArray[np.int64], positions: NDArray[np.int32]) -> NDArray[np.int64]:
    """Where the maximal stretches of neighbouring rows begin."""
    # numpy's diff, append and flatnonzero are Python around this, and cost more than it for few rows.
    begins = np.empty(len(blocks), bool)
    begins[0] = True
    np.not_equal(positions[1:] - positions[:-1], 1, out=begins[1:])
    begins[1:] |= blocks[1:] != blocks[:-1]
    return begins.nonzero()[0]


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
