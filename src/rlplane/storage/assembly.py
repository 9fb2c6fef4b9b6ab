"""How bytes become columns again: the rows of a read, put together from blocks.

A row is (block, position). Neighbouring rows of one block are a slice of it; anything else is gathered, with
one copy per stretch of neighbours and one call for all fields.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, Protocol

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import NonTensorStack
from torch import Tensor
from torch.nested._internal.nested_tensor import NestedTensor

from rlplane.errors import DataPlaneError, InvalidRequestError
from rlplane.storage.copying import Copies, copy_all, copy_table
from rlplane.storage.dtypes import DTYPES, HOST
from rlplane.storage.objects import decode_object
from rlplane.storage.places import FieldRows, Layout
from rlplane.storage.trees import Own, TreeReader

Bytes = NDArray[np.uint8]
# Shorter rows are taken faster by numpy, one by one, than copied.
_WORTH_A_COPY = 512
_OBJECTS = ("object", "tree", "enum")
_SIMPLE = frozenset((type(None), bool, int, float, str, bytes))


class ByteSource(Protocol):
    """Where an :class:`Assembler` gets the bytes of blocks from, and memory for what it gathers."""

    nbytes: int
    """How many bytes were handed out so far."""

    def read(self, block: int) -> Bytes:
        """The bytes of a block, to copy from."""

    def own(self, block: int, start: int, stop: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """Bytes ``[start, stop)`` of a block, as a tensor that belongs to the caller."""

    def empty(self, nbytes: int) -> Tensor:
        """Memory for a gather."""


class Assembler:
    """Puts the columns of one read together."""

    def __init__(self, layouts: Mapping[int, Layout], source: ByteSource, *, allow_pickle: bool) -> None:
        self._layouts, self._allow_pickle = layouts, allow_pickle
        self._read, self._own, self._empty = source.read, source.own, source.empty
        self._offsets: dict[bytes, tuple[Tensor, Tensor]] = {}
        self._gathers: list[Copies] = []

    def finish(self) -> None:
        """Fill the columns that are gathered, all at once. Until then their bytes are undefined."""
        if self._gathers:
            copy_table(self._gathers[0] if len(self._gathers) == 1 else np.concatenate(self._gathers))
            self._gathers.clear()

    def column(self, name: str, rows: FieldRows, path: str = "") -> Any:
        """The rows of one field, or the leaf at ``path`` of each. Gathered ones have their bytes after
        :meth:`finish`."""
        if rows.turns is not None:
            turns = np.frombuffer(rows.turns, np.int32)
            if rows.blocks is None or turns.sum() != rows.count or (turns < 0).any():
                raise DataPlaneError(f"the turns of field {name!r} are not where the service says")
            pieces = self.column(name, msgspec.structs.replace(rows, turns=None), path)
            return self._joined(pieces, np.cumsum(turns, dtype=np.int64))
        if path and rows.count:
            return self._leaves(name, rows, path)
        if rows.blocks is None and rows.count:
            return self._neighbours(name, rows.block, rows.start, rows.start + rows.count)
        blocks, positions = rows.homes()
        if len(blocks) != len(positions):
            raise DataPlaneError(f"the rows of field {name!r} are not where the service says")
        return self._scattered(name, blocks, positions)

    def _scattered(self, name: str, blocks: NDArray[np.int64], positions: NDArray[np.int32]) -> Any:
        if not len(blocks):
            return torch.empty(0, device=HOST)
        first_block = int(blocks[0])
        one = first_block == blocks[-1] and (len(blocks) == 1 or bool((blocks == first_block).all()))
        numbers = [first_block] if one else np.unique(blocks).tolist()
        kinds = [self._layouts[number] for number in numbers]
        self._check_positions(name, kinds, blocks, positions, numbers)
        if all(layout.kind in _OBJECTS for layout in kinds):
            return self._objects(name, blocks, positions, numbers)
        _check_one_dtype(name, kinds)
        runs = _runs(blocks, positions)
        if len(runs) == 1:
            return self._neighbours(name, first_block, int(positions[0]), int(positions[-1]) + 1)
        if all(layout.kind == "dense" and layout.shape == kinds[0].shape for layout in kinds):
            return self._dense(kinds[0], runs, blocks, positions, numbers)
        if any(layout.kind == "ragged" for layout in kinds) or len(_element_shapes(name, kinds)) > 1:
            return self._ragged(name, blocks, positions, numbers)
        return self._jagged(name, kinds, runs, blocks, positions, numbers)

    def _joined(self, pieces: Tensor, ends: NDArray[np.int64]) -> Tensor:
        """Rows whose pieces lie one behind the other: only where a row ends is different."""
        starts = np.zeros(len(ends) + 1, np.int64)
        if isinstance(pieces, NestedTensor):
            starts[1:] = pieces._offsets.numpy()[ends]
            return self._nested(pieces._values, starts)
        starts[1:] = ends * pieces.shape[1]
        return self._nested(pieces.flatten(0, 1), starts)

    def _neighbours(self, name: str, block: int, start: int, stop: int) -> Any:
        """Rows ``[start, stop)`` of one block, without a copy where the engine can do without."""
        layout = self._layouts[block]
        if not 0 <= start < stop <= layout.rows:
            raise DataPlaneError(f"rows {start} to {stop} of field {name!r} are not in their block")
        if layout.kind in _OBJECTS or layout.kind == "ragged":
            blocks, positions = np.full(stop - start, block, np.int64), np.arange(start, stop, dtype=np.int32)
            if layout.kind == "ragged":
                return self._ragged(name, blocks, positions, [block])
            return self._objects(name, blocks, positions, [block])
        size, dtype = element_size(layout), DTYPES[layout.dtype]
        _check_values(name, layout)
        if layout.kind == "dense":
            return self._own(block, start * size, stop * size, dtype, (stop - start, *layout.shape))
        ends = row_offsets(self._read(block), layout)[start : stop + 1]
        begin, end = int(ends[0]), int(ends[-1])
        if not 0 <= begin <= end or end * size > layout.values_nbytes:
            _raise_torn(name)
        mine = self._own(block, begin * size, end * size, dtype, (end - begin, *layout.shape))
        return self._nested(mine, ends - begin)

    @staticmethod
    def _check_positions(
        name: str,
        kinds: list[Layout],
        blocks: NDArray[np.int64],
        positions: NDArray[np.int32],
        numbers: list[int],
    ) -> None:
        """What the service says is checked before memory is touched: each row lies in its block."""
        rows: Any = kinds[0].rows
        if len(numbers) > 1:
            rows = np.array([layout.rows for layout in kinds])[np.searchsorted(numbers, blocks)]
        if positions.min() < 0 or (positions >= rows).any():
            raise DataPlaneError(f"a row of field {name!r} is not in its block")
        for layout in kinds:
            _check_values(name, layout)

    def _dense(
        self,
        layout: Layout,
        runs: NDArray[np.int64],
        blocks: NDArray[np.int64],
        positions: NDArray[np.int32],
        numbers: list[int],
    ) -> Tensor:
        count, size = len(blocks), element_size(layout)
        out = self._empty(size * count)
        if 0 < size < _WORTH_A_COPY and len(numbers) == 1:
            rows = self._read(numbers[0])[: layout.values_nbytes].reshape(layout.rows, size)
            # With "clip" it writes straight into out; the positions are known to be there.
            np.take(rows, positions, axis=0, out=out.numpy().reshape(count, size), mode="clip")
        else:
            raw = [self._read(number) for number in numbers]
            begins = positions.astype(np.int64) * size
            self._gather(raw, numbers, blocks, begins, begins + size, runs, out)
        return out.view(DTYPES[layout.dtype]).view(count, *layout.shape)

    def _jagged(
        self,
        name: str,
        kinds: list[Layout],
        runs: NDArray[np.int64],
        blocks: NDArray[np.int64],
        positions: NDArray[np.int32],
        numbers: list[int],
    ) -> Tensor:
        (shape,) = _element_shapes(name, kinds)
        dtype = DTYPES[kinds[0].dtype]
        size = dtype.itemsize * math.prod(shape)
        raw = [self._read(number) for number in numbers]
        # The offsets of all blocks, one after the other, so that one step finds those of every row.
        found = [
            row_offsets(block, self._layouts[number]) for number, block in zip(numbers, raw, strict=True)
        ]
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
        key = offsets.tobytes()
        if key not in self._offsets:
            longest = int(np.diff(offsets).max(initial=0))
            self._offsets[key] = torch.from_numpy(offsets), torch.empty(longest, 0, device=HOST)
        known, longest_row = self._offsets[key]
        # The constructor, because the public function costs four times as much and checks what is known.
        # Without the longest row, which torch keeps as a shape, torch would pad to all rows together.
        return NestedTensor(values, offsets=known, _metadata_cache={"max_seqlen": longest_row})

    def _leaves(self, name: str, rows: FieldRows, path: str) -> NonTensorStack:
        blocks, positions = rows.homes()
        numbers = np.unique(blocks).tolist()
        for number in numbers:
            if self._layouts[number].kind not in ("object", "tree"):
                field = name.removesuffix("." + path)
                raise InvalidRequestError(
                    f"field {name!r}: the rows of {field!r} are not trees, so they have nothing at {path!r}"
                )
        return self._objects(name, blocks, positions, numbers, path)

    def _ragged(
        self, name: str, blocks: NDArray[np.int64], positions: NDArray[np.int32], numbers: list[int]
    ) -> Tensor:
        """Rows that differ in any dimension, one behind the other in the strided layout of nested tensors."""
        readers = {number: self._tensor_reader(name, number) for number in numbers}
        rows = [readers[b](p) for b, p in zip(blocks.tolist(), positions.tolist(), strict=True)]
        if len({(row.dtype, row.ndim) for row in rows}) > 1:
            held = sorted({f"{row.ndim}-d {row.dtype}" for row in rows})
            raise InvalidRequestError(
                f"field {name!r} holds {' and '.join(held)} rows in those asked for; read them apart"
            )
        sizes = np.array([row.nbytes for row in rows], np.int64)
        out = self._empty(int(sizes.sum()))
        starts = np.cumsum(sizes) - sizes
        copies = [
            (out.data_ptr() + start, row.data_ptr(), row.nbytes)
            for start, row in zip(starts.tolist(), rows, strict=True)
        ]
        copy_all(copies)
        dtype = rows[0].dtype
        shapes = torch.tensor([row.shape for row in rows], dtype=torch.int64, device=HOST)
        strides = torch.tensor([row.stride() for row in rows], dtype=torch.int64, device=HOST)
        begins = torch.from_numpy(starts // dtype.itemsize)
        nested: Tensor = torch._nested_view_from_buffer(out.view(dtype), shapes, strides, begins)
        return nested

    def _tensor_reader(self, name: str, number: int) -> Callable[[int], Tensor]:
        """Rows of a block as views of it, to copy from."""
        layout, block = self._layouts[number], self._read(number)

        def view(start: int, stop: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
            if start == stop:
                return torch.empty(shape, dtype=dtype, device=HOST)
            return torch.from_numpy(block[start:stop]).view(dtype).view(shape)

        if layout.kind == "ragged":
            return self._tree_reader(name, number, "", view)
        size, dtype = element_size(layout), DTYPES[layout.dtype]
        if layout.kind == "dense":
            return lambda p: view(p * size, (p + 1) * size, dtype, layout.shape)
        ends = row_offsets(block, layout).tolist()

        def read(position: int) -> Tensor:
            begin, end = ends[position], ends[position + 1]
            if not 0 <= begin <= end or end * size > layout.values_nbytes:
                _raise_torn(name)
            return view(begin * size, end * size, dtype, (end - begin, *layout.shape))

        return read

    def _tree_reader(self, name: str, number: int, path: str, give: Own | None = None) -> TreeReader:
        layout, block, own = self._layouts[number], self._read(number), self._own
        return TreeReader(
            name,
            memoryview(block[: layout.values_nbytes].data),
            row_offsets(block, layout).tolist(),
            give or partial(own, number),
            allow_pickle=self._allow_pickle,
            path=path,
        )

    def _objects(
        self,
        name: str,
        blocks: NDArray[np.int64],
        positions: NDArray[np.int32],
        numbers: list[int],
        path: str = "",
    ) -> NonTensorStack:
        columns: dict[int, Callable[[int], Any]] = {}
        for number in numbers:
            layout, block = self._layouts[number], self._read(number)
            if layout.kind == "enum":
                codes = block[: layout.values_nbytes].view(layout.dtype.removeprefix("torch.")).tolist()
                columns[number] = _word_reader(codes, layout.vocabulary or [])
            elif layout.kind == "tree" or path:
                columns[number] = self._tree_reader(name, number, path)
            else:
                data = memoryview(block[: layout.values_nbytes].data)
                offsets = row_offsets(block, layout).tolist()
                columns[number] = _object_reader(data, offsets, self._allow_pickle)
        return stack_objects(
            [columns[b](p) for b, p in zip(blocks.tolist(), positions.tolist(), strict=True)]
        )


def element_size(layout: Layout) -> int:
    """The bytes of a row of a dense block, or of an element of a ragged one."""
    return DTYPES[layout.dtype].itemsize * math.prod(layout.shape)


def row_offsets(block: Bytes, layout: Layout) -> NDArray[np.int64]:
    """Where the rows of a block begin and end, in elements."""
    if layout.kind == "dense":
        # A dense block among ragged ones is ragged with equal rows.
        return np.arange(layout.rows + 1, dtype=np.int64) * layout.shape[0]
    if layout.offsets is not None:
        return np.frombuffer(layout.offsets, np.int64)
    at = layout.offsets_at
    return block[at : at + 8 * (layout.rows + 1)].view(np.int64)


def _check_values(name: str, layout: Layout) -> None:
    """The rows of a dense block are as long as it says."""
    if layout.kind == "dense" and layout.rows * element_size(layout) > layout.values_nbytes:
        raise DataPlaneError(f"the values of field {name!r} are longer than their block")


def _element_shape(name: str, layout: Layout) -> tuple[int, ...]:
    if layout.kind in ("jagged", "ragged"):
        return layout.shape
    if not layout.shape:
        raise InvalidRequestError(
            f"field {name!r} holds scalars and sequences in the rows asked for; read them apart"
        )
    return layout.shape[1:]


def _element_shapes(name: str, kinds: list[Layout]) -> set[tuple[int, ...]]:
    return {_element_shape(name, layout) for layout in kinds}


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
    held = {
        "objects" if layout.kind in _OBJECTS else layout.dtype for layout in kinds if layout.kind != "ragged"
    }
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
    # The constructor of NonTensorData takes three times as long for an object as for None.
    stack = NonTensorStack(*[None] * len(rows))
    for member, row in zip(stack.tensordicts, rows, strict=True):
        member._non_tensordict["data"] = row
    return stack
