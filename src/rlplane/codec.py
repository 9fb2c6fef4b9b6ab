"""Between the padded tensors that models want and the jagged columns that the plane moves.

A jagged column is one block of values and the lengths of its rows, so padding never travels. Every
function here works on whole columns: rows are never visited one by one to pack, pad or cut them. The
results are detached and on the host (packed first, then moved, so that padding does not cross the bus),
keep the dtype to the bit, and share memory with the input when nothing has to be rearranged.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch import Tensor

from rlplane.errors import InvalidRequestError

__all__ = [
    "as_column",
    "materialize",
    "pack_jagged_fields",
    "pack_per_token_field",
    "response_from_nested",
    "row_lengths",
    "stack_or_nest",
    "to_nested_by_length",
]

Lengths = Sequence[int] | Tensor
PadValue = float | int | bool


def to_nested_by_length(tensor_padded: Tensor, lengths: Lengths) -> Tensor:
    """Pack ``[N, S, ...]`` into a jagged tensor whose row ``i`` is ``tensor_padded[i, :lengths[i]]``.

    Copies once; not at all when every row is full and the input is contiguous on the host.

    Raises:
        ValueError: ``lengths`` is not one number in ``[0, S]`` per row, or the tensor has no second
            dimension.
    """
    if tensor_padded.is_nested or tensor_padded.dim() < 2:
        raise InvalidRequestError(
            f"a padded tensor has the shape [N, S, ...]; got {_describe(tensor_padded)}"
        )
    rows, width = tensor_padded.shape[:2]
    counts = _checked_lengths(lengths, rows, width)
    values = _compress(tensor_padded.detach(), _prefix_mask(counts, width))
    return _jagged(values.cpu(), counts)


def stack_or_nest(rows: Sequence[Tensor]) -> Tensor:
    """One column from one tensor per sample: dense if the rows have one shape, else jagged.

    0-d rows become ``(N,)``. No rows become an empty ``(0,)`` tensor of the default dtype. A single row
    is not copied.

    Raises:
        ValueError: The rows differ in dtype, in the number of dimensions, or beyond the first one.
    """
    parts = [row.detach() for row in rows]
    if not parts:
        return torch.empty(0)
    dtypes = {part.dtype for part in parts}
    if len(dtypes) > 1:
        raise InvalidRequestError(f"rows of one column have one dtype; got {sorted(map(str, dtypes))}")
    shapes = {part.shape for part in parts}
    if len(shapes) == 1:
        return (parts[0].unsqueeze(0) if len(parts) == 1 else torch.stack(parts)).cpu()
    if len({shape[1:] for shape in shapes}) > 1 or torch.Size([]) in shapes:
        shown = sorted(tuple(shape) for shape in shapes)[:4]
        raise InvalidRequestError(f"rows of one column may differ in their first dimension only; got {shown}")
    counts = np.fromiter((part.shape[0] for part in parts), dtype=np.int64, count=len(parts))
    return _jagged(torch.cat(parts).cpu(), counts)


def pack_per_token_field(value: Tensor | Sequence[Tensor], lengths: Lengths) -> Tensor:
    """Pack one per-token field, in whichever form a stage has it, into a jagged tensor.

    Args:
        value: A padded ``[N, S, ...]`` tensor; a nested tensor, whose rows must have these lengths
            already; or a sequence of rows, each at least as long as its length and cut to it.
        lengths: The number of tokens of each row.

    Raises:
        ValueError: A row is shorter than its length, or the number of rows differs.
    """
    value = _numbers_as_tensor(value)
    if not isinstance(value, Tensor):
        rows = list(value)
        counts = _checked_lengths(lengths, len(rows), None)
        for index, (row, count) in enumerate(zip(rows, counts.tolist(), strict=True)):
            if row.dim() == 0 or row.shape[0] < count:
                raise InvalidRequestError(f"row {index} has {_describe(row)} for a length of {count}")
        cut = [row[:count] for row, count in zip(rows, counts.tolist(), strict=True)]
        column = stack_or_nest(cut)
        if column.is_nested:
            return column
        return _jagged(column.flatten(0, 1) if cut else column, counts)
    if not value.is_nested:
        return to_nested_by_length(value, lengths)
    values, found = _nested_parts(value)
    counts = _checked_lengths(lengths, len(found), None)
    if not np.array_equal(counts, found):
        bad = int(np.flatnonzero(counts != found)[0])
        raise InvalidRequestError(
            f"row {bad} of the nested tensor has {found[bad]} tokens, not {counts[bad]}"
        )
    return _jagged(values.cpu(), found)


def pack_jagged_fields(
    fields: Mapping[str, Any], lengths: Lengths, *, per_token: Collection[str] | None = None
) -> TensorDict:
    """Pack the per-token fields of a batch by its lengths, leave the others, and return a ``TensorDict``.

    Args:
        fields: Per-token fields as :func:`pack_per_token_field` takes them, per-sample tensors or arrays
            of ``N`` rows, and lists of ``N`` objects.
        lengths: The number of tokens of each row.
        per_token: Which fields are per token. Without it: every dense tensor or array of two or more
            dimensions. Such a field is refused when it is narrower than the longest row, or when what
            lies beyond the longest row is not padding (one value all over): then it may be a per-sample
            vector, which must not be cut, and only the caller can say.

    Raises:
        ValueError: A field does not have ``N`` rows, a row is too short, or it is not clear whether a
            field is per token.
    """
    size = len(lengths)
    counts = _checked_lengths(lengths, size, None)
    packed = set(_guess_per_token(fields, counts) if per_token is None else per_token)
    unknown = packed - set(fields)
    if unknown:
        raise InvalidRequestError(f"per_token names {sorted(unknown)}, which are not among {sorted(fields)}")
    columns = {}
    for name, value in fields.items():
        try:
            if name in packed:
                columns[name] = pack_per_token_field(value, lengths)
            else:
                columns[name] = as_column(value, size)
        except InvalidRequestError as error:
            raise InvalidRequestError(f"field {name!r}: {error}") from error
    return TensorDict(columns, batch_size=[size])


def response_from_nested(nested: Tensor, response_lengths: Lengths, *, shift: int = 0) -> Tensor:
    """The last ``response_lengths[i]`` tokens of each row, as a jagged tensor.

    Args:
        nested: Rows of prompt and response, ``[N, j, ...]``.
        response_lengths: How many tokens of each row are response; or a nested tensor with one row per
            response, such as a response mask.
        shift: Take the window this many tokens earlier. With 1, a model's outputs at the positions that
            predict the response tokens.

    Raises:
        ValueError: A window reaches over the start of its row.
    """
    values, counts = _nested_parts(nested)
    wanted = response_lengths
    if isinstance(wanted, Tensor) and wanted.is_nested:
        wanted = row_lengths(wanted)
    kept = _checked_lengths(wanted, len(counts), None)
    if shift < 0 or (kept + (kept > 0) * shift > counts).any():
        bad = np.flatnonzero(kept + (kept > 0) * shift > counts)
        where = f"row {bad[0]} has {counts[bad[0]]} tokens" if len(bad) else "shift must be at least 0"
        raise InvalidRequestError(f"{where}; asked for {kept.tolist()[:8]} with shift {shift}")
    if np.array_equal(kept, counts):
        return _jagged(values.cpu(), counts)
    # In the flat block a window is [end - shift - kept, end - shift) of its row's end.
    positions = _window_positions(np.cumsum(counts) - shift - kept, kept)
    if values.is_cuda:
        taken = values[torch.from_numpy(positions).to(values.device)].cpu()
    else:
        taken = _from_numpy(_to_numpy(values)[positions], values)
    return _jagged(taken, kept)


def materialize(
    td: TensorDict | Mapping[str, Any],
    layout: Literal["padded", "jagged"] = "padded",
    pad_value_dict: Mapping[str, PadValue] | None = None,
    pad_to_seqlen: int = 0,
) -> dict[str, Any]:
    """Turn what was read from the plane into what a model takes: tensors by name, objects as lists.

    Args:
        td: The result of ``get_data`` or ``get_samples``.
        layout: ``"padded"``: ragged columns become ``[N, S, ...]``, each padded at the end. ``"jagged"``:
            they stay jagged. Dense columns and objects are the same in both.
        pad_value_dict: What to pad with, by field; 0 (False) for a field that is not in it.
        pad_to_seqlen: The ``S`` of every ragged column; 0 for the longest row of each. A dense column
            that ``pad_value_dict`` names counts as ragged with full rows, and is padded too.

    Returns:
        A new dict. Its tensors share memory with ``td`` when nothing had to be padded.

    Raises:
        ValueError: An unknown layout, or a row that is longer than ``pad_to_seqlen``.
    """
    if layout not in ("padded", "jagged"):
        raise InvalidRequestError(f"layout is 'padded' or 'jagged'; got {layout!r}")
    pads = pad_value_dict or {}
    columns: dict[str, Any] = {}
    for name, value in td.items():
        if not isinstance(value, Tensor):
            columns[name] = _objects(value)
        elif value.is_nested and layout == "jagged":
            columns[name] = value if _is_packed(value) else _jagged(*_nested_parts(value))
        elif layout == "padded" and (value.is_nested or (name in pads and value.dim() > 1)):
            try:
                columns[name] = _pad(value, pads.get(name, 0), pad_to_seqlen)
            except InvalidRequestError as error:
                raise InvalidRequestError(f"field {name!r}: {error}") from error
        else:
            columns[name] = value
    return columns


def row_lengths(nested: Tensor) -> Tensor:
    """The lengths of the rows of a nested tensor, as int64 on the host."""
    return torch.from_numpy(_nested_parts(nested)[1])


def as_column(value: Any, size: int) -> Any:
    """What a ``TensorDict`` of ``size`` rows holds for ``value``: a dense or jagged tensor, or objects.

    A list of tensors is one row each. Any other list or array of objects is objects, one per row. A
    numeric array becomes a tensor, which shares its memory if it can.

    Raises:
        ValueError: It does not have ``size`` rows.
    """
    value = _numbers_as_tensor(value)
    if isinstance(value, (list, tuple)) and value and all(isinstance(item, Tensor) for item in value):
        value = stack_or_nest(value)
    if isinstance(value, Tensor):
        if value.dim() == 0 or value.size(0) != size:
            raise InvalidRequestError(f"a column of {size} rows is needed; got {_describe(value)}")
        if not value.is_nested:
            return value.detach().cpu()
        values, counts = _nested_parts(value)
        return _jagged(values.cpu(), counts)
    rows = _objects(value)
    if len(rows) != size:
        raise InvalidRequestError(f"a column of {size} rows is needed; got {len(rows)} objects")
    return NonTensorStack(*(NonTensorData(row) for row in rows))


def _numbers_as_tensor(value: Any) -> Any:
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "biufc":
        return value
    # torch shares memory only with what it could write to, in the machine's byte order, forwards.
    if min(value.strides, default=0) < 0 or not value.flags.writeable or not value.dtype.isnative:
        value = value.astype(value.dtype.newbyteorder("="), order="C")
    return torch.from_numpy(value)


def _objects(value: Any) -> list[Any]:
    if isinstance(value, NonTensorData) and isinstance(value.data, (list, np.ndarray)):
        # What the TensorDict constructor makes of an object array: one entry per row, not one object.
        value = value.data
    if isinstance(value, np.ndarray) and value.dtype != object:
        return list(value.tolist())
    if isinstance(value, (list, tuple, np.ndarray)):
        return list(value)
    if isinstance(value, (NonTensorData, NonTensorStack)):
        return list(value.tolist())
    raise InvalidRequestError(f"a column is a tensor, an array or a list; got {type(value).__name__}")


def _guess_per_token(fields: Mapping[str, Any], counts: np.ndarray[Any, Any]) -> list[str]:
    longest = int(counts.max(initial=0))
    guessed = []
    for name, raw in fields.items():
        value = _numbers_as_tensor(raw)
        if not isinstance(value, Tensor) or value.is_nested or value.dim() < 2:
            continue
        beyond = _to_numpy(value.detach()[:, longest:].cpu())
        if value.shape[1] < longest or (beyond.size and (beyond != beyond.flat[0]).any()):
            raise InvalidRequestError(
                f"is field {name!r} per token? Its shape is {tuple(value.shape)} and the longest row has"
                f" {longest} tokens; name the fields that are with per_token=[...]"
            )
        guessed.append(name)
    return guessed


def _pad(value: Tensor, pad: PadValue, to_length: int) -> Tensor:
    if value.is_nested:
        values, counts = _nested_parts(value)
    elif to_length in (0, value.shape[1]):
        return value
    else:
        values, counts = value.flatten(0, 1), np.full(value.shape[0], value.shape[1])
    longest = int(counts.max(initial=0))
    width = to_length or longest
    if longest > width:
        raise InvalidRequestError(f"a row has {longest} tokens, more than pad_to_seqlen={to_length}")
    shape = (len(counts), width, *values.shape[1:])
    if (counts == width).all():
        return values.reshape(shape)
    padded = torch.full(shape, pad, dtype=values.dtype, device=values.device)
    mask = _prefix_mask(counts, width)
    if values.is_cuda:
        padded[torch.from_numpy(mask).to(values.device)] = values
    else:
        _to_numpy(padded)[mask] = _to_numpy(values)
    return padded


def _compress(padded: Tensor, mask: np.ndarray[Any, Any]) -> Tensor:
    """The rows of ``[N, S, ...]`` where ``mask`` holds, as one block ``[tokens, ...]``."""
    if mask.all():
        return padded.flatten(0, 1)
    if padded.is_cuda:
        return padded[torch.from_numpy(mask).to(padded.device)]
    # numpy, because torch's masked gather is several times slower than a plain copy, and numpy's is not.
    return _from_numpy(_to_numpy(padded)[mask], padded)


def _prefix_mask(counts: np.ndarray[Any, Any], width: int) -> np.ndarray[Any, Any]:
    mask: np.ndarray[Any, Any] = np.arange(width) < counts[:, None]
    return mask


def _jagged(values: Tensor, counts: np.ndarray[Any, Any]) -> Tensor:
    offsets = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=offsets[1:])
    return torch.nested.nested_tensor_from_jagged(values, torch.from_numpy(offsets))


# The parameters below are Any because torch does not declare the methods of nested tensors on Tensor.


def _is_packed(nested: Any) -> bool:
    """Whether the rows of a nested tensor lie in its values without gaps, as rows of tokens."""
    return nested.layout == torch.jagged and nested._ragged_idx == 1 and nested.lengths() is None


def _nested_parts(nested: Any) -> tuple[Tensor, np.ndarray[Any, Any]]:
    """The flat block and the row lengths of any nested tensor, detached."""
    nested = nested.detach()
    if nested.layout != torch.jagged:
        return _strided_parts(nested)
    if nested._ragged_idx != 1:
        raise InvalidRequestError(
            f"rows of one column may differ in their first dimension only; got {nested.shape}"
        )
    offsets, values = nested.offsets().cpu().numpy(), nested.values()
    if nested.lengths() is None:
        # A part of a larger block may start inside it.
        return values[int(offsets[0]) : int(offsets[-1])], np.diff(offsets)
    counts = nested.lengths().cpu().numpy()
    positions = _window_positions(offsets[:-1], counts)
    return values[torch.from_numpy(positions).to(values.device)], counts


def _strided_parts(nested: Any) -> tuple[Tensor, np.ndarray[Any, Any]]:
    if nested.size(0) == 0:
        return torch.empty(0, dtype=nested.dtype), np.zeros(0, dtype=np.int64)
    sizes = nested._nested_tensor_size().numpy()
    if sizes.shape[1] == 0 or (sizes[:, 1:] != sizes[:1, 1:]).any():
        shown = sorted({tuple(row) for row in sizes.tolist()})[:4]
        raise InvalidRequestError(f"rows of one column may differ in their first dimension only; got {shown}")
    block = nested.contiguous().values()
    counts = sizes[:, 0].astype(np.int64)
    return block.reshape(int(counts.sum()), *sizes[0, 1:].tolist()), counts


def _window_positions(starts: np.ndarray[Any, Any], counts: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The positions ``starts[i] … starts[i] + counts[i] - 1`` of all windows, one after the other."""
    positions: np.ndarray[Any, Any] = np.arange(int(counts.sum()))
    positions += np.repeat(starts - (np.cumsum(counts) - counts), counts)
    return positions


def _checked_lengths(lengths: Any, rows: int, width: int | None) -> np.ndarray[Any, Any]:
    raw = lengths.detach().cpu().numpy() if isinstance(lengths, Tensor) else np.asarray(lengths)
    if raw.ndim != 1 or len(raw) != rows or (raw.dtype.kind not in "iu" and len(raw)):
        raise InvalidRequestError(
            f"lengths has one whole number per row; got shape {raw.shape} of {raw.dtype} for {rows} rows"
        )
    counts = raw.astype(np.int64)
    bad = np.flatnonzero((counts < 0) | (counts > (counts if width is None else width)))
    if len(bad):
        limit = "at least 0" if width is None else f"between 0 and {width}"
        raise InvalidRequestError(f"the length of row {bad[0]} is {counts[bad[0]]}; it must be {limit}")
    return counts


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _to_numpy(tensor: Tensor) -> np.ndarray[Any, Any]:
    """The same memory as numpy; as integers of the same size, since numpy lacks bfloat16 and float8."""
    tensor = tensor.resolve_conj().resolve_neg()
    bits = _BITS.get(tensor.element_size())
    array: np.ndarray[Any, Any] = (tensor if bits is None else tensor.view(bits)).numpy()
    return array


def _from_numpy(array: np.ndarray[Any, Any], like: Tensor) -> Tensor:
    return torch.from_numpy(array).view(like.dtype)


def _describe(tensor: Tensor) -> str:
    kind = "a nested tensor" if tensor.is_nested else "a tensor"
    return f"{kind} of shape {tuple(tensor.shape)}"
