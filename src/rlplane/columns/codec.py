"""Between the padded tensors that models want and the jagged columns that the plane moves.

A jagged column is one block of values and the lengths of its rows, so padding never travels. Every
function here works on whole columns: rows are never visited one by one to pack, pad or cut them. The
results are detached and on the host (packed first, then moved, so that padding does not cross the bus),
keep the dtype to the bit, and share memory with the input when nothing has to be rearranged.

The functions that NeMo-RL has too (``nemo_rl.data_plane.codec``) take its arguments and mean the same. What
they take beyond that is optional.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase, is_non_tensor
from torch import Tensor

from rlplane.columns.padding import Lengths, PaddingSide, TokenSpans, checked_lengths, token_spans
from rlplane.errors import InvalidRequestError

__all__ = [
    "TOKEN_ALIGNED_FIELDS",
    "as_column",
    "materialize",
    "pack_jagged_fields",
    "pack_per_token_field",
    "response_from_nested",
    "row_lengths",
    "stack_or_nest",
    "to_nested_by_length",
]

PadValue = float | int | bool
# NeMo-RL's names for what a trainer has per token, and those of two columns of multimodal models.
TOKEN_ALIGNED_FIELDS = frozenset(
    {
        "advantages",
        "generation_logprobs",
        "input_ids",
        "mm_token_type_ids",
        "prev_logprobs",
        "reference_policy_logprobs",
        "routed_experts",
        "sample_mask",
        "token_mask",
        "token_type_ids",
    }
)


def to_nested_by_length(padded: Tensor, lengths: Lengths, *, padding: PaddingSide = "right") -> Tensor:
    """Pack ``[N, S, ...]`` into a jagged tensor whose row ``i`` is ``padded[i, :lengths[i]]``; with
    ``padding="left"``, the last ``lengths[i]`` of it.

    Copies once; not at all when every row is full and the input is contiguous on the host.

    Raises:
        ValueError: ``lengths`` is not one number in ``[0, S]`` per row, or the tensor has no second
            dimension.
    """
    _check_padded(padded)
    rows, width = padded.shape[:2]
    return _pack_padded(padded, TokenSpans(checked_lengths(lengths, rows, width), padding))


def stack_or_nest(tensors: Sequence[Tensor]) -> Tensor:
    """One column from one tensor per sample: dense if the rows have one shape, else jagged.

    0-d rows become ``(N,)``. No rows become an empty ``(0,)`` tensor of the default dtype. A single row
    is not copied.

    Raises:
        ValueError: The rows differ in dtype, in the number of dimensions, or beyond the first one.
    """
    parts = [row.detach() for row in tensors]
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


def pack_per_token_field(
    val: Tensor | Sequence[Tensor],
    lengths: Lengths | None,
    *,
    padding: PaddingSide | None = None,
    attention_mask: Any = None,
) -> Tensor:
    """Pack one per-token field, in whichever form a stage has it, into a jagged tensor.

    A dense tensor that cannot be packed, because it has one dimension, another number of rows or fewer
    columns than the longest row has tokens, is returned as it is: a name that is usual for columns per token
    may also be that of a value per sample.

    Args:
        val: A padded ``[N, S, ...]`` tensor; a nested tensor, whose rows must have these lengths
            already; or a sequence of rows (tensors, arrays, lists), each at least as long as its length.
        lengths: The number of tokens of each row; None when ``attention_mask`` says it.
        padding: On which side the rows are padded; on the right by default.
        attention_mask: Instead of ``padding``: 1 where a token is, ``[N, S]``.

    Raises:
        ValueError: A row of a sequence or of a nested tensor does not have its length, or what is said about
            the padding contradicts itself.
    """
    given = lengths if lengths is not None else attention_mask
    rows = 0 if given is None else len(given)
    return _pack_tokens(val, token_spans(lengths, rows, padding=padding, attention_mask=attention_mask))


def pack_jagged_fields(
    fields: Mapping[str, Any],
    *,
    lengths: Lengths | None,
    token_aligned_fields: Collection[str] | None = None,
    padding: PaddingSide | None = None,
    attention_mask: Any = None,
) -> TensorDict:
    """Pack the per-token fields of a batch by its lengths, leave the others, and return a ``TensorDict``.

    Args:
        fields: Per-token fields as :func:`pack_per_token_field` takes them, per-sample tensors or arrays
            of ``N`` rows, and lists of ``N`` objects.
        lengths: The number of tokens of each row. None, without ``attention_mask``: nothing is packed.
        token_aligned_fields: Which fields are per token, if they are there; all others are left as they are.
        padding: On which side per-token fields are padded; on the right by default.
        attention_mask: Instead of ``padding``: 1 where a token is, ``[N, S]``, one stretch in each row.

    Raises:
        ValueError: A field does not have ``N`` rows, or a row is too short.
    """
    given = lengths if lengths is not None else attention_mask
    size = len(next(iter(fields.values()), ()) if given is None else given)
    spans = (
        None if given is None else token_spans(lengths, size, padding=padding, attention_mask=attention_mask)
    )
    per_token = frozenset(token_aligned_fields or ())
    columns = {}
    for name, value in fields.items():
        try:
            packed = value if spans is None or name not in per_token else _pack_tokens(value, spans)
            columns[name] = as_column(packed, size)
        except InvalidRequestError as error:
            raise InvalidRequestError(f"field {name!r}: {error}") from error
    return TensorDict(columns, batch_size=[size])


def response_from_nested(full: Tensor, response_mask: Lengths, *, shift: int = 1) -> Tensor:
    """The response of each row of prompt and response, one token earlier: outputs that predict its tokens.

    A model's output at position ``i`` is about token ``i + 1``, so its outputs about the last ``n`` tokens
    are those at the ``n`` positions before the last.

    Args:
        full: Rows of prompt and response, ``[N, j, ...]``.
        response_mask: A nested tensor with one row per response, or the number of tokens of each.
        shift: How many tokens earlier. With 0, the last tokens themselves.

    Raises:
        ValueError: A window reaches over the start of its row.
    """
    values, counts = _nested_parts(full)
    wanted = response_mask
    if isinstance(wanted, Tensor) and wanted.is_nested:
        wanted = row_lengths(wanted)
    kept = checked_lengths(wanted, len(counts))
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
    """Turn what was read from the plane into what a model takes: tensors, and arrays of objects, by name.

    Args:
        td: The result of ``get_data`` or ``get_samples``.
        layout: ``"padded"``: ragged columns become ``[N, S, ...]``, each padded at the end. ``"jagged"``:
            they stay jagged. Objects and columns whose rows differ in more than the first dimension are the
            same in both.
        pad_value_dict: What to pad with, by field; 0 (False) for a field that is not in it.
        pad_to_seqlen: The least ``S`` of every column of two or more dimensions, dense ones too; 0 for the
            longest row of each. Nothing is cut.

    Returns:
        A new dict. Its tensors share memory with ``td`` when nothing had to be padded.

    Raises:
        ValueError: An unknown layout.
    """
    if layout not in ("padded", "jagged"):
        raise InvalidRequestError(f"layout is 'padded' or 'jagged'; got {layout!r}")
    pads = pad_value_dict or {}
    columns: dict[str, Any] = {}
    for name, value in td.items():
        if not isinstance(value, Tensor):
            columns[name] = _object_array(_objects(value))
        elif value.is_nested and _differs_beyond_the_first_dimension(value):
            columns[name] = value
        elif value.is_nested and layout == "jagged":
            columns[name] = value if _is_packed(value) else _jagged(*_nested_parts(value))
        elif value.dim() > 1:
            columns[name] = _pad(value, pads.get(name, 0), pad_to_seqlen)
        else:
            columns[name] = value
    return columns


def row_lengths(nested: Tensor) -> Tensor:
    """The lengths of the rows of a nested tensor, as int64 on the host."""
    return torch.from_numpy(_nested_parts(nested)[1])


def as_column(value: Any, size: int) -> Any:
    """What a ``TensorDict`` of ``size`` rows holds for ``value``: a dense or jagged tensor, or objects.

    A list of tensors is one row each, as a tensor if they have one dtype and differ in the first dimension
    only, else as objects. Any other list or array of objects is objects, one per row, which may be trees of
    tensors. A numeric array becomes a tensor, which shares its memory if it can. A ``TensorDict`` stays one.

    Raises:
        ValueError: It does not have ``size`` rows.
    """
    value = _numbers_as_tensor(value)
    if isinstance(value, (list, tuple)) and value and _are_rows_of_one_tensor(value):
        value = stack_or_nest(value)
    if isinstance(value, Tensor):
        if value.dim() == 0 or value.size(0) != size:
            raise InvalidRequestError(f"a column of {size} rows is needed; got {_describe(value)}")
        if not value.is_nested or _differs_beyond_the_first_dimension(value):
            return value.detach().cpu()
        values, counts = _nested_parts(value)
        return _jagged(values.cpu(), counts)
    if isinstance(value, TensorDictBase) and not is_non_tensor(value):
        if value.batch_size[:1] != (size,):
            raise InvalidRequestError(
                f"a column of {size} rows is needed; got a TensorDict of {value.batch_size}"
            )
        return value
    rows = _objects(value)
    if len(rows) != size:
        raise InvalidRequestError(f"a column of {size} rows is needed; got {len(rows)} objects")
    return NonTensorStack(*(NonTensorData(row) for row in rows))


def _object_array(rows: list[Any]) -> np.ndarray[Any, Any]:
    array = np.empty(len(rows), dtype=object)
    for index, row in enumerate(rows):  # one by one: numpy would take rows that are sequences apart
        array[index] = row
    return array


def _are_rows_of_one_tensor(rows: Sequence[Any]) -> bool:
    """Whether ``rows`` are tensors that :func:`stack_or_nest` takes."""
    if not all(isinstance(row, Tensor) and not row.is_nested for row in rows):
        return False
    shapes = {row.shape for row in rows}
    of_one_shape = len(shapes) == 1 or (torch.Size([]) not in shapes and len({s[1:] for s in shapes}) == 1)
    return of_one_shape and len({row.dtype for row in rows}) == 1


# Any, because torch does not declare the methods of nested tensors on Tensor.
def _differs_beyond_the_first_dimension(nested: Any) -> bool:
    if nested.layout == torch.jagged:
        return bool(nested._ragged_idx != 1)
    sizes = nested._nested_tensor_size().numpy() if nested.size(0) else np.zeros((0, 1))
    return bool(sizes.shape[1] == 0 or (sizes[:, 1:] != sizes[:1, 1:]).any())


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


def _pack_tokens(value: Any, spans: TokenSpans) -> Tensor:
    value = _numbers_as_tensor(value)
    counts = spans.counts
    if not isinstance(value, Tensor):
        rows = [
            _numbers_as_tensor(np.asarray(row) if isinstance(row, (list, tuple)) else row) for row in value
        ]
        if len(rows) != len(counts):
            raise InvalidRequestError(f"a column of {len(counts)} rows is needed; got {len(rows)} rows")
        if not all(isinstance(row, Tensor) for row in rows):
            raise InvalidRequestError("a column per token has rows of numbers; it has rows of something else")
        for index, (row, count) in enumerate(zip(rows, counts.tolist(), strict=True)):
            if row.dim() == 0 or row.shape[0] < count:
                raise InvalidRequestError(f"row {index} has {_describe(row)} for a length of {count}")
        begins = spans.begins(np.array([row.shape[0] for row in rows], np.int64)).tolist()
        cut = [
            row[begin : begin + count]
            for row, begin, count in zip(rows, begins, counts.tolist(), strict=True)
        ]
        column = stack_or_nest(cut)
        if column.is_nested:
            return column
        return _jagged(column.flatten(0, 1) if cut else column, counts)
    if not value.is_nested:
        longest = int(counts.max(initial=0))
        if value.dim() < 2 or value.shape[0] != len(counts) or value.shape[1] < longest:
            return value.detach().cpu()
        return _pack_padded(value, spans)
    values, found = _nested_parts(value)
    if len(found) != len(counts):
        raise InvalidRequestError(f"a column of {len(counts)} rows is needed; got {_describe(value)}")
    if not np.array_equal(counts, found):
        bad = int(np.flatnonzero(counts != found)[0])
        raise InvalidRequestError(
            f"row {bad} of the nested tensor has {found[bad]} tokens, not {counts[bad]}"
        )
    return _jagged(values.cpu(), found)


def _pack_padded(padded: Tensor, spans: TokenSpans) -> Tensor:
    _check_padded(padded)
    rows, width = padded.shape[:2]
    begins = spans.begins(np.full(rows, width, np.int64))
    values = _compress(padded.detach(), _span_mask(begins, spans.counts, width))
    return _jagged(values.cpu(), spans.counts)


def _check_padded(padded: Tensor) -> None:
    if padded.is_nested or padded.dim() < 2:
        raise InvalidRequestError(f"a padded tensor has the shape (N, S, ...); got {_describe(padded)}")


def _pad(value: Tensor, pad: PadValue, least: int) -> Tensor:
    if value.is_nested:
        values, counts = _nested_parts(value)
    elif value.shape[1] >= least:
        return value
    else:
        values, counts = value.flatten(0, 1), np.full(value.shape[0], value.shape[1])
    width = max(least, int(counts.max(initial=0)))
    shape = (len(counts), width, *values.shape[1:])
    if (counts == width).all():
        return values.reshape(shape)
    padded = torch.full(shape, pad, dtype=values.dtype, device=values.device)
    mask = _span_mask(np.zeros_like(counts), counts, width)
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


def _span_mask(
    begins: np.ndarray[Any, Any], counts: np.ndarray[Any, Any], width: int
) -> np.ndarray[Any, Any]:
    """Where the tokens are: ``counts[i]`` of row ``i`` from ``begins[i]`` on."""
    at = np.arange(width)
    mask: np.ndarray[Any, Any] = at < (begins + counts)[:, None]
    if begins.any():
        mask &= at >= begins[:, None]
    return mask


def _jagged(values: Tensor, counts: np.ndarray[Any, Any]) -> Tensor:
    offsets = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=offsets[1:])
    # Without the longest row's length torch would pad to that of all rows together.
    longest = int(counts.max(initial=0))
    return torch.nested.nested_tensor_from_jagged(values, torch.from_numpy(offsets), max_seqlen=longest)


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
