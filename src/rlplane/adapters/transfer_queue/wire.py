"""The form in which columns travel: the bytes of whole rows, and a small description for the control state.

TransferQueue moves one value per row and field, and its fixed cost per value is that of copying some 30 KB.
So neighbouring rows of a write travel together, as one *chunk* of about :data:`CHUNK_BYTES` per field, and
what TransferQueue sees is always a one-dimensional tensor of bytes. That also keeps clear of what it does to
types: scalars, dtypes that change between writes, objects, and rows that are uniform or empty.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import NonTensorData, NonTensorStack, TensorDict, is_tensor_collection
from torch import Tensor

from rlplane.errors import DataPlaneError, InvalidRequestError
from rlplane.objects import decode_object, encode_objects

__all__ = [
    "CHUNK_BYTES",
    "Column",
    "Layout",
    "_assert_no_key_loss",
    "_from_wire",
    "_promote_1d_leaves",
    "check_enum",
    "decode_column",
    "encode_columns",
    "gather_rows",
    "join_layouts",
    "rows_per_chunk",
]

CHUNK_BYTES = 256 * 1024


@dataclass(frozen=True)
class Layout:
    """What the rows of one field of one write look like.

    ``tail`` is the shape of a row for ``dense``, and of a row after its first dimension for ``ragged``.
    ``lengths`` are the rows' first dimensions for ``ragged``, their bytes for ``object``.
    ``promoted`` marks scalars, which travel as rows of one.
    """

    kind: Literal["dense", "ragged", "object"]
    dtype: str
    tail: tuple[int, ...]
    rows: int
    lengths: NDArray[np.int64] | None = None
    promoted: bool = False

    @property
    def element_bytes(self) -> int:
        """Bytes of a row (dense) or of one step of a row (ragged, object)."""
        size = 1 if self.kind == "object" else int(getattr(torch, self.dtype).itemsize)
        for extent in self.tail:
            size *= extent
        return size

    def offsets(self) -> NDArray[np.int64]:
        """Where each row starts, in bytes, and behind the last one the total."""
        if self.lengths is None:
            return np.arange(self.rows + 1, dtype=np.int64) * self.element_bytes
        starts = np.zeros(self.rows + 1, np.int64)
        np.cumsum(self.lengths, out=starts[1:])
        return starts * self.element_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        steps = self.rows if self.lengths is None else int(self.lengths.sum())
        return steps * self.element_bytes


@dataclass(frozen=True)
class Column:
    """One field of a write, ready to travel."""

    layout: Layout
    data: Tensor
    objects: list[Any] | None = None


def encode_columns(fields: TensorDict, count: int, *, allow_pickle: bool) -> dict[str, Column]:
    """Turn the fields of a put into columns of bytes, without copying what is contiguous on the host.

    Raises:
        InvalidRequestError: A column does not have ``count`` rows, or is of a kind that cannot travel.
        UnsupportedValueError: An object that may not travel.
    """
    if not is_tensor_collection(fields):
        raise InvalidRequestError(f"fields must be a TensorDict, not a {type(fields).__name__}")
    if fields.batch_size and fields.batch_size[0] != count:
        raise InvalidRequestError(f"fields has {fields.batch_size[0]} rows for {count} sample_ids")
    scalars = {name for name, leaf in fields.items() if isinstance(leaf, Tensor) and _is_scalar_column(leaf)}
    columns = {}
    for name, leaf in _promote_1d_leaves(fields).items():
        columns[name] = _encode(name, leaf, count, allow_pickle, name in scalars)
    return columns


def _encode(name: str, leaf: Any, count: int, allow_pickle: bool, promoted: bool) -> Column:
    if isinstance(leaf, Tensor):
        tensor = leaf.detach()
        if tensor.is_nested:
            return _encode_ragged(name, tensor, count)
        if tensor.dim() == 0 or tensor.shape[0] != count:
            raise InvalidRequestError(
                f"field {name!r} has shape {tuple(tensor.shape)} for {count} sample_ids; "
                "it needs one row per sample"
            )
        if tensor.layout != torch.strided:
            raise InvalidRequestError(f"field {name!r} is {tensor.layout}; a column is dense or nested")
        layout = Layout("dense", _dtype_name(tensor), tuple(tensor.shape[1:]), count, promoted=promoted)
        return Column(layout, _bytes_of(tensor))
    values = _object_rows(name, leaf, count)
    encoded = encode_objects(values, field=name, allow_pickle=allow_pickle)
    lengths = np.fromiter(map(len, encoded), np.int64, count)
    data = torch.frombuffer(bytearray(b"".join(encoded)) or bytearray(1), dtype=torch.uint8)
    return Column(Layout("object", "object", (), count, lengths), data[: int(lengths.sum())], values)


def check_enum(name: str, column: Column, vocabulary: Collection[str]) -> None:
    """Refuse a column that holds anything but the strings of its enum."""
    if column.objects is None:
        raise InvalidRequestError(
            f"field {name!r} is an enum of {list(vocabulary)}; give its values as strings"
        )
    for value in column.objects:
        if type(value) is not str or value not in vocabulary:
            raise InvalidRequestError(
                f"field {name!r} is an enum of {list(vocabulary)}; it cannot hold {value!r}"
            )


def _encode_ragged(name: str, tensor: Any, count: int) -> Column:
    if tensor.layout == torch.jagged and tensor._ragged_idx == 1 and tensor.lengths() is None:
        offsets = tensor.offsets().cpu()
        values = tensor.values()[int(offsets[0]) : int(offsets[-1])]
        lengths = np.diff(offsets.numpy()).astype(np.int64)
    else:
        rows = tensor.unbind()
        if any(row.dim() == 0 or row.shape[1:] != rows[0].shape[1:] for row in rows):
            shapes = sorted({tuple(row.shape) for row in rows})[:4]
            raise InvalidRequestError(
                f"field {name!r} has rows of shapes {shapes}; "
                "nested rows may differ in the first dimension only"
            )
        values = torch.cat([*rows]) if rows else torch.empty(0, dtype=tensor.dtype)
        lengths = np.array([row.shape[0] for row in rows], np.int64)
    if len(lengths) != count:
        raise InvalidRequestError(f"field {name!r} has {len(lengths)} rows for {count} sample_ids")
    layout = Layout("ragged", _dtype_name(tensor), tuple(values.shape[1:]), count, lengths)
    return Column(layout, _bytes_of(values))


def _object_rows(name: str, leaf: Any, count: int) -> list[Any]:
    if isinstance(leaf, NonTensorStack):
        values = list(leaf.tolist())
    elif isinstance(leaf, NonTensorData):
        held = leaf.data
        if isinstance(held, np.ndarray) and held.ndim == 1:
            values = list(held) if held.dtype == object else held.tolist()
        elif isinstance(held, (list, tuple)):
            values = list(held)
        else:
            raise InvalidRequestError(
                f"field {name!r} is NonTensorData that holds a {type(held).__name__}; it needs a list or an "
                f"object array with one entry per row"
            )
    elif is_tensor_collection(leaf):
        raise InvalidRequestError(
            f"field {name!r} is a nested {type(leaf).__name__}; fields are flat columns"
        )
    else:
        raise InvalidRequestError(
            f"field {name!r} is a {type(leaf).__name__}; a column is a tensor or objects"
        )
    if len(values) != count:
        raise InvalidRequestError(f"field {name!r} has {len(values)} rows for {count} sample_ids")
    return values


def _bytes_of(tensor: Tensor) -> Tensor:
    flat = tensor.resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8)


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def rows_per_chunk(columns: Mapping[str, Column], count: int) -> int:
    """How many neighbouring rows travel together: as many as keep every field's chunk small."""
    largest = max((column.data.numel() for column in columns.values()), default=0)
    return max(1, min(count, CHUNK_BYTES * count // largest if largest else count))


# Reading


def join_layouts(name: str, layouts: Sequence[Layout]) -> Layout:
    """The layout of a column whose rows come from writes with ``layouts``, without ``rows`` and ``lengths``.

    Raises:
        InvalidRequestError: They cannot be one column; the message says why.
    """
    dtypes = sorted({layout.dtype for layout in layouts})
    if len(dtypes) > 1:
        raise InvalidRequestError(f"field {name!r} has rows of different dtypes: {', '.join(dtypes)}")
    first = layouts[0]
    if first.kind == "object":
        return Layout("object", "object", (), 0)
    shapes = {(layout.tail, layout.promoted) for layout in layouts if layout.kind == "dense"}
    if len(shapes) == 1 and all(layout.kind == "dense" for layout in layouts):
        return Layout("dense", first.dtype, first.tail, 0, promoted=first.promoted)
    tails = {layout.tail if layout.kind == "ragged" else layout.tail[1:] for layout in layouts}
    scalars = any(layout.promoted or (layout.kind == "dense" and not layout.tail) for layout in layouts)
    if len(tails) > 1 or scalars:
        raise InvalidRequestError(
            f"field {name!r} has rows of shapes that no tensor can hold together: "
            f"{sorted(str(layout.tail) for layout in layouts)[:4]}"
        )
    return Layout("ragged", first.dtype, tails.pop(), 0)


def gather_rows(
    pieces: Sequence[Tensor],
    piece: NDArray[np.int64],
    start: NDArray[np.int64],
    stop: NDArray[np.int64],
    *,
    private: bool,
) -> Tensor:
    """Copy rows out of pieces of bytes: row ``i`` is ``pieces[piece[i]][start[i]:stop[i]]``.

    Rows that follow each other are copied at once. When that is all of a single piece that nobody
    else holds (``private``), nothing is copied.
    """
    if not len(piece):
        return torch.empty(0, dtype=torch.uint8)
    breaks = np.flatnonzero((piece[1:] != piece[:-1]) | (start[1:] != stop[:-1])) + 1
    first = np.concatenate(([0], breaks))
    last = np.concatenate((breaks - 1, [len(piece) - 1]))
    runs = zip(piece[first].tolist(), start[first].tolist(), stop[last].tolist(), strict=True)
    if private and len(first) == 1 and stop[-1] - start[0] == pieces[0].numel():
        return pieces[0]
    # Copied by numpy: torch would use threads, which wait for each other on a machine that is busy.
    arrays = [piece.numpy() for piece in pieces]
    slices = [arrays[number][begin:end] for number, begin, end in runs]
    joined = torch.empty(sum(map(len, slices)), dtype=torch.uint8)
    np.concatenate(slices, out=joined.numpy())
    return joined


def decode_column(layout: Layout, lengths: NDArray[np.int64], data: Tensor, *, allow_pickle: bool) -> Any:
    """Build a column from the bytes of its rows.

    ``lengths`` has one entry per row: its first dimension for ``ragged``, its bytes for ``object``.
    """
    if layout.kind == "object":
        whole = data.numpy().data
        stops = np.cumsum(lengths).tolist()
        starts = [0, *stops[:-1]]
        return NonTensorStack(
            *[
                NonTensorData(decode_object(whole[begin:end], allow_pickle=allow_pickle))
                for begin, end in zip(starts, stops, strict=True)
            ]
        )
    values = data.view(getattr(torch, layout.dtype))
    if layout.kind == "dense":
        return values.view(len(lengths), *layout.tail)
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64)
    torch.cumsum(torch.from_numpy(lengths), 0, out=offsets[1:])
    return torch.nested.nested_tensor_from_jagged(values.view(int(offsets[-1]), *layout.tail), offsets)


def _assert_no_key_loss(src_dict: Mapping[str, Any], new_td: TensorDict, fn: str) -> None:
    """Refuse a TensorDict that has lost columns of the dict it was built from.

    TensorDict's constructor has dropped ``NonTensorStack`` and ``NonTensorData`` leaves in the past.
    """
    lost = sorted(set(src_dict) - set(new_td.keys()))
    if lost:
        raise DataPlaneError(f"{fn}: TensorDict dropped the fields {lost} of {sorted(src_dict)}")


def _promote_1d_leaves(td: TensorDict) -> TensorDict:
    """Unsqueeze ``(N,)`` leaves to ``(N, 1)``, so that every row has a dimension; others pass through."""
    columns = {
        name: leaf.unsqueeze(-1) if isinstance(leaf, Tensor) and _is_scalar_column(leaf) else leaf
        for name, leaf in td.items()
    }
    promoted = TensorDict(columns, batch_size=td.batch_size)
    _assert_no_key_loss(columns, promoted, "_promote_1d_leaves")
    return promoted


def _from_wire(td: TensorDict, promoted: Collection[str] | None = None) -> TensorDict:
    """Inverse of :func:`_promote_1d_leaves`: squeeze the trailing 1 of ``(N, 1)`` leaves.

    ``promoted`` names the leaves that were unsqueezed, because a caller's own ``(N, 1)`` looks the same;
    None takes every leaf of that shape.
    """
    columns = {}
    for name, leaf in td.items():
        narrow = isinstance(leaf, Tensor) and not leaf.is_nested and leaf.dim() == 2 and leaf.shape[1] == 1
        chosen = narrow if promoted is None else name in promoted
        columns[name] = leaf.squeeze(-1) if chosen and narrow else leaf
    squeezed = TensorDict(columns, batch_size=td.batch_size)
    _assert_no_key_loss(columns, squeezed, "_from_wire")
    return squeezed


def _is_scalar_column(leaf: Tensor) -> bool:
    return not leaf.is_nested and leaf.dim() == 1
