"""Packing, padding and cutting whole columns, against the same done row by row."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch import Tensor

from rlplane.columns.codec import (
    as_column,
    materialize,
    pack_jagged_fields,
    pack_per_token_field,
    response_from_nested,
    row_lengths,
    stack_or_nest,
    to_nested_by_length,
)

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.complex64,
    torch.complex128,
]


def values(shape: tuple[int, ...], dtype: torch.dtype = torch.int64) -> Tensor:
    """Distinct-looking values of any dtype, the same every time."""
    count = int(np.prod(shape))
    return (torch.arange(count) * 7 % 5 + 1).reshape(shape).to(dtype)


def same(left: Tensor, right: Tensor) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    if left.element_size() == 1:  # torch cannot compare float8
        left, right = left.view(torch.uint8), right.view(torch.uint8)
    return bool(torch.equal(left, right))


def rows_of(nested: Tensor) -> list[Tensor]:
    assert nested.layout == torch.jagged
    return list(nested.unbind())


def jagged(rows: list[Tensor]) -> Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


batches = st.lists(st.integers(0, 6), max_size=7)
trailing = st.lists(st.integers(0, 3), max_size=2).map(tuple)


# padded -> jagged


@given(lengths=batches, rest=trailing, spare=st.integers(0, 3), dtype=st.sampled_from(DTYPES))
@settings(deadline=None)
def test_packing_takes_the_first_tokens_of_each_row(
    lengths: list[int], rest: tuple[int, ...], spare: int, dtype: torch.dtype
) -> None:
    padded = values((len(lengths), max(lengths, default=0) + spare, *rest), dtype)
    packed = to_nested_by_length(padded, lengths)
    assert packed.dtype == dtype
    assert packed.size(0) == len(lengths)
    found = rows_of(packed) if lengths else []
    assert all(same(row, padded[i, :n]) for i, (row, n) in enumerate(zip(found, lengths, strict=True)))


@given(lengths=batches, rest=trailing, spare=st.integers(0, 3), dtype=st.sampled_from(DTYPES))
@settings(deadline=None)
def test_padding_is_the_inverse_of_packing(
    lengths: list[int], rest: tuple[int, ...], spare: int, dtype: torch.dtype
) -> None:
    width = max(lengths, default=0) + spare
    padded = values((len(lengths), width, *rest), dtype)
    for row, length in enumerate(lengths):
        padded[row, length:] = torch.zeros((), dtype=dtype)
    td = TensorDict({"x": to_nested_by_length(padded, lengths)}, batch_size=[len(lengths)])
    # Without padding of its own, 0 means "the longest row".
    back = materialize(td, pad_to_seqlen=width)["x"]
    assert same(back, padded if width else padded[:, :0])


@pytest.mark.parametrize("lengths", [[3, 0, 2], [0, 0, 0], [4, 4, 4]])
def test_torch_pads_a_packed_batch_to_its_longest_row(lengths: list[int]) -> None:
    """As ``nemo_rl.data_plane.codec.materialize`` does: torch has to know which row is the longest."""
    padded = torch.arange(1, 13).reshape(3, 4)
    again = torch.nested.to_padded_tensor(to_nested_by_length(padded, lengths), 0)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    assert torch.equal(again, padded[:, : max(lengths)] * mask)


def test_a_full_contiguous_batch_is_packed_without_a_copy() -> None:
    padded = values((3, 4))
    packed = to_nested_by_length(padded, [4, 4, 4])
    assert packed.values().data_ptr() == padded.data_ptr()


def test_a_ragged_batch_is_packed_into_memory_of_its_own() -> None:
    padded = values((3, 4))
    packed = to_nested_by_length(padded, [4, 1, 2])
    before = packed.values().clone()
    padded.zero_()
    assert torch.equal(packed.values(), before)


def test_a_view_that_is_not_contiguous_is_packed_by_its_own_rows() -> None:
    padded = values((4, 6)).t()[::2]
    assert not padded.is_contiguous()
    packed = to_nested_by_length(padded, torch.tensor([1, 4, 0]))
    assert [row.tolist() for row in rows_of(packed)] == [padded[0, :1].tolist(), padded[1].tolist(), []]


def test_gradients_do_not_travel() -> None:
    leaf = torch.ones(2, 3, requires_grad=True)
    nested = jagged([torch.ones(2, requires_grad=True), torch.ones(1, requires_grad=True)])
    for result in (
        to_nested_by_length(leaf * 2, [1, 3]),
        to_nested_by_length(leaf * 2, [3, 3]),
        stack_or_nest([leaf[0] * 2, leaf[1]]),
        stack_or_nest([leaf[0], leaf[1, :2]]),
        stack_or_nest([leaf[0]]),
        pack_per_token_field(nested, [2, 1]),
        response_from_nested(nested, [1, 0]),
        as_column(leaf * 2, 2),
        as_column(nested, 2),
    ):
        assert not result.requires_grad


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([1], r"lengths shape \(1,\) of int64 does not fit 2 rows: one whole number per row"),
        ([1, 4], "the length of row 1 is 4; it must be between 0 and 3"),
        ([-1, 2], "the length of row 0 is -1"),
        ([1.0, 2.0], "float64"),
        (torch.tensor([True, False]), "bool"),
        ([[1], [2]], r"shape \(2, 1\)"),
    ],
)
def test_lengths_that_do_not_fit_are_named(lengths: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        to_nested_by_length(values((2, 3)), lengths)


def test_a_tensor_without_tokens_cannot_be_packed() -> None:
    with pytest.raises(ValueError, match=r"\(N, S, ...\); got a tensor of shape \(3,\)"):
        to_nested_by_length(values((3,)), [1, 1, 1])


# rows -> column


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_one_shape_are_stacked(dtype: torch.dtype) -> None:
    for shape in [(), (3,), (2, 3), (0,)]:
        rows = [values(shape, dtype) for _ in range(3)]
        assert same(stack_or_nest(rows), torch.stack(rows))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_several_lengths_are_nested(dtype: torch.dtype) -> None:
    rows = [values((n, 2), dtype) for n in (2, 0, 3)]
    nested = stack_or_nest(rows)
    assert all(same(a, b) for a, b in zip(rows_of(nested), rows, strict=True))


def test_no_rows_are_an_empty_column() -> None:
    assert stack_or_nest([]).shape == (0,)


def test_a_single_row_is_not_copied() -> None:
    row = values((4,))
    assert stack_or_nest([row]).data_ptr() == row.data_ptr()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([values((2,)), values((2,), torch.int32)], r"one dtype; got \['torch.int32', 'torch.int64'\]"),
        ([values((2, 3)), values((2, 4))], "first dimension only"),
        ([values((2, 3)), values((2,))], "first dimension only"),
        ([values(()), values((2,))], "first dimension only"),
    ],
)
def test_rows_that_cannot_be_one_column_are_refused(rows: list[Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stack_or_nest(rows)


# one per-token field


def test_a_per_token_field_may_come_in_four_forms() -> None:
    padded, lengths = values((3, 4)), [4, 0, 2]
    forms: list[Any] = [
        padded,
        padded.numpy(),
        list(padded),
        jagged([padded[0], padded[1, :0], padded[2, :2]]),
    ]
    expected = [padded[i, :n].tolist() for i, n in enumerate(lengths)]
    for form in forms:
        assert [row.tolist() for row in rows_of(pack_per_token_field(form, lengths))] == expected


def test_a_per_token_field_is_jagged_also_when_its_rows_are_equal() -> None:
    for form in (values((2, 3)), list(values((2, 3)))):
        assert row_lengths(pack_per_token_field(form, [3, 3])).tolist() == [3, 3]


def test_a_per_token_field_of_no_rows_is_jagged() -> None:
    assert pack_per_token_field([], []).is_nested
    assert pack_per_token_field(values((0, 5)), []).is_nested


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([values((3,)), values((1,))], r"row 1 has a tensor of shape \(1,\) for a length of 2"),
        ([values((3,)), values(())], r"row 1 has a tensor of shape \(\)"),
        (jagged([values((3,)), values((1,))]), "row 1 of the nested tensor has 1 tokens, not 2"),
    ],
)
def test_a_row_shorter_than_its_length_is_named(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack_per_token_field(value, [3, 2])


@pytest.mark.parametrize("shape", [(2,), (2, 2), (3, 4)])
def test_a_tensor_that_cannot_be_packed_is_passed_through(shape: tuple[int, ...]) -> None:
    """As NeMo-RL's ``pack_per_token_field`` does."""
    val = values(shape)
    assert torch.equal(pack_per_token_field(val, torch.tensor([3, 2])), val)


# many fields


def test_packing_a_batch_leaves_per_sample_fields_and_objects() -> None:
    td = pack_jagged_fields(
        {
            "input_ids": values((2, 4)),
            "logprobs": values((2, 4), torch.bfloat16),
            "mask": values((2, 4), torch.bool).numpy(),
            "reward": torch.tensor([0.5, 1.5]),
            "prompt": ["a", {"b": [1]}],
            "image": [values((3, 3)), values((2, 3))],
        },
        lengths=torch.tensor([4, 1]),
        token_aligned_fields=["input_ids", "logprobs", "mask"],
    )
    assert td.batch_size == torch.Size([2])
    assert [row_lengths(td[name]).tolist() for name in ("input_ids", "logprobs", "mask")] == [[4, 1]] * 3
    assert td["reward"].tolist() == [0.5, 1.5]
    assert td.get("prompt").tolist() == ["a", {"b": [1]}]
    assert row_lengths(td["image"]).tolist() == [3, 2]


def test_named_fields_are_packed_and_the_others_are_not() -> None:
    fields = {"ids": values((2, 4)), "embedding": values((2, 9))}
    td = pack_jagged_fields(fields, lengths=[1, 4], token_aligned_fields=["ids", "not_there"])
    assert td["ids"].is_nested
    assert torch.equal(td["embedding"], fields["embedding"])


@pytest.mark.parametrize("shape", [(2, 9), (2, 4), (2, 3, 5)])
def test_a_field_that_is_not_named_is_never_cut(shape: tuple[int, ...]) -> None:
    """As in NeMo-RL's ``pack_jagged_fields``, where without ``token_aligned_fields`` nothing is packed."""
    fields = {"input_ids": values((2, 4)), "what": values(shape)}
    for named in (None, {"input_ids"}):
        td = pack_jagged_fields(fields, lengths=torch.tensor([1, 4]), token_aligned_fields=named)
        assert td["input_ids"].is_nested == (named is not None)
        assert torch.equal(td["what"], fields["what"])


def test_without_lengths_nothing_is_packed() -> None:
    """As in NeMo-RL's ``pack_jagged_fields``."""
    td = pack_jagged_fields({"input_ids": values((2, 4))}, lengths=None, token_aligned_fields={"input_ids"})
    assert td.batch_size == torch.Size([2])
    assert torch.equal(td["input_ids"], values((2, 4)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_field_padded_beyond_the_longest_row_is_packed(dtype: torch.dtype) -> None:
    padded = values((2, 8), dtype)
    padded[:, 4:] = padded[0, 0]
    packed = pack_jagged_fields({"x": padded}, lengths=[1, 4], token_aligned_fields={"x"})["x"]
    assert row_lengths(packed).tolist() == [1, 4]


@pytest.mark.parametrize(
    ("fields", "token_aligned_fields", "message"),
    [
        ({"x": values((3,))}, None, "field 'x': a column of 2 rows is needed; got a tensor of shape"),
        ({"x": ["a"]}, None, "field 'x': a column of 2 rows is needed; got 1 objects"),
        ({"x": "ab"}, None, "field 'x': a column is a tensor, an array or a list; got str"),
        ({"x": values(())}, None, "field 'x': a column of 2 rows"),
        ({"x": values((3, 4))}, ["x"], "field 'x': a column of 2 rows is needed; got a tensor of shape"),
        ({"x": [values((1,)), values((2,))]}, ["x"], "field 'x': row 1 has a tensor of shape"),
    ],
)
def test_a_field_that_does_not_fit_is_named(
    fields: dict[str, Any], token_aligned_fields: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        pack_jagged_fields(fields, lengths=[1, 4], token_aligned_fields=token_aligned_fields)


def test_a_batch_of_no_samples_packs() -> None:
    td = pack_jagged_fields({"input_ids": values((0, 4)), "y": values((0,)), "o": []}, lengths=[])
    assert td.batch_size == torch.Size([0])
    assert materialize(td)["o"].tolist() == []


# responses


@given(data=st.data(), lengths=batches, rest=trailing, shift=st.integers(0, 2), dtype=st.sampled_from(DTYPES))
@settings(deadline=None)
def test_a_response_is_the_end_of_its_row(
    data: st.DataObject, lengths: list[int], rest: tuple[int, ...], shift: int, dtype: torch.dtype
) -> None:
    padded = values((len(lengths), max(lengths, default=0), *rest), dtype)
    kept = [data.draw(st.integers(0, max(0, n - shift))) for n in lengths]
    result = response_from_nested(to_nested_by_length(padded, lengths), kept, shift=shift)
    found = rows_of(result) if lengths else []
    for i, (row, n, k) in enumerate(zip(found, lengths, kept, strict=True)):
        assert same(row, padded[i, n - shift - k : n - shift] if k else padded[i, :0])


def test_a_response_mask_says_the_lengths() -> None:
    sequences = jagged([torch.arange(5), torch.arange(3)])
    mask = jagged([torch.ones(2), torch.ones(3)])
    responses = response_from_nested(sequences, mask, shift=0)
    assert [row.tolist() for row in rows_of(responses)] == [[3, 4], [0, 1, 2]]


def test_a_response_is_taken_one_token_earlier_unless_told_otherwise() -> None:
    """As NeMo-RL's ``response_from_nested`` does: outputs, which are about the token after their own."""
    outputs = jagged([torch.arange(5), torch.arange(3)])
    mask = jagged([torch.ones(3), torch.ones(2)])
    assert [row.tolist() for row in rows_of(response_from_nested(outputs, mask))] == [[1, 2, 3], [0, 1]]


def test_whole_rows_are_not_copied() -> None:
    sequences = jagged([torch.arange(5), torch.arange(3)])
    response = response_from_nested(sequences, [5, 3], shift=0)
    assert response.values().data_ptr() == sequences.values().data_ptr()


@pytest.mark.parametrize(
    ("lengths", "shift", "message"),
    [
        ([1, 4], 0, "row 1 has 3 tokens"),
        ([1, 3], 1, "row 1 has 3 tokens"),
        ([1, 1], -1, "shift must be at least 0"),
        ([1], 0, "does not fit 2 rows"),
    ],
)
def test_a_response_longer_than_its_row_is_refused(lengths: list[int], shift: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        response_from_nested(jagged([torch.arange(5), torch.arange(3)]), lengths, shift=shift)


# materialize


def batch() -> TensorDict:
    return TensorDict(
        {
            "ids": jagged([torch.tensor([1, 2, 3]), torch.tensor([4])]),
            "logprobs": jagged([torch.tensor([0.5, 0.5]), torch.tensor([0.25])]),
            "reward": torch.tensor([1.0, 2.0]),
            "fixed": torch.tensor([[1, 2], [3, 4]]),
            "note": NonTensorStack("x", "y"),
            "array": np.array(["p", {"q": 1}], dtype=object),
        },
        batch_size=[2],
    )


def test_padded_columns_take_the_pad_value_of_their_field() -> None:
    columns = materialize(batch(), pad_value_dict={"ids": -1})
    assert columns["ids"].tolist() == [[1, 2, 3], [4, -1, -1]]
    assert columns["logprobs"].tolist() == [[0.5, 0.5], [0.25, 0.0]]
    assert columns["reward"].tolist() == [1.0, 2.0]
    for name, rows in (("note", ["x", "y"]), ("array", ["p", {"q": 1}])):
        # Object arrays, as NeMo-RL's materialize gives them.
        assert columns[name].dtype == object
        assert columns[name].tolist() == rows


def test_padding_goes_up_to_the_length_asked_for() -> None:
    columns = materialize(batch(), pad_value_dict={"fixed": 9}, pad_to_seqlen=4)
    assert columns["ids"].tolist() == [[1, 2, 3, 0], [4, 0, 0, 0]]
    assert columns["logprobs"].shape == (2, 4)
    assert columns["fixed"].tolist() == [[1, 2, 9, 9], [3, 4, 9, 9]]


def test_every_column_of_two_or_more_dimensions_is_padded_and_none_is_cut() -> None:
    """As NeMo-RL's ``materialize`` does with ``pad_to_seqlen``."""
    columns = materialize({**batch(), "image": torch.ones(2, 5, 3)}, pad_to_seqlen=4)
    assert {name: tuple(columns[name].shape) for name in ("ids", "fixed", "reward", "image")} == {
        "ids": (2, 4),
        "fixed": (2, 4),
        "reward": (2,),
        "image": (2, 5, 3),
    }
    assert columns["fixed"].tolist() == [[1, 2, 0, 0], [3, 4, 0, 0]]
    assert materialize(batch(), pad_to_seqlen=2)["ids"].shape == (2, 3)
    assert materialize(batch(), pad_value_dict={"fixed": 9})["fixed"].shape == (2, 2)


def test_jagged_columns_stay_as_they_are() -> None:
    td = batch()
    columns = materialize(td, layout="jagged")
    assert columns["ids"].values().data_ptr() == td["ids"].values().data_ptr()
    assert columns["fixed"].data_ptr() == td["fixed"].data_ptr()
    assert columns["note"].tolist() == ["x", "y"]


def test_equal_rows_are_padded_without_a_copy() -> None:
    nested = jagged([torch.tensor([1, 2]), torch.tensor([3, 4])])
    padded = materialize({"x": nested})["x"]
    assert padded.tolist() == [[1, 2], [3, 4]]
    assert padded.data_ptr() == nested.values().data_ptr()


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_dtype_can_be_padded_with_a_value_of_its_own(dtype: torch.dtype) -> None:
    nested = jagged([values((3,), dtype), values((1,), dtype)])
    padded = materialize({"x": nested}, pad_value_dict={"x": 1})["x"]
    assert same(padded[1, 1:], torch.ones(2).to(dtype))
    assert same(padded[0], values((3,), dtype))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_other_kinds_of_nested_tensors_are_understood() -> None:
    rows = [values((3, 2)), values((1, 2))]
    strided = torch.nested.nested_tensor(rows, layout=torch.strided)
    gaps = torch.nested.nested_tensor_from_jagged(
        values((9, 2)), torch.tensor([0, 5, 9]), torch.tensor([3, 1])
    )
    for nested in (strided, gaps):
        columns = materialize({"x": nested}, layout="jagged")
        assert columns["x"].layout == torch.jagged
        assert row_lengths(nested).tolist() == row_lengths(columns["x"]).tolist() == [3, 1]
        assert materialize({"x": nested})["x"].shape == (2, 3, 2)
    assert all(same(a, b) for a, b in zip(rows_of(as_column(strided, 2)), rows, strict=True))
    assert rows_of(as_column(gaps, 2))[1].tolist() == values((9, 2))[5:6].tolist()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_rows_that_are_ragged_in_a_later_dimension_are_refused() -> None:
    late = torch.nested.nested_tensor_from_jagged(values((2, 5)), torch.tensor([0, 2, 5]), jagged_dim=2)
    strided = torch.nested.nested_tensor([values((2, 3)), values((2, 4))], layout=torch.strided)
    for nested in (late, strided):
        with pytest.raises(ValueError, match="first dimension only"):
            row_lengths(nested)


def test_an_unknown_layout_is_refused() -> None:
    with pytest.raises(ValueError, match="'padded' or 'jagged'; got 'packed'"):
        materialize(batch(), layout="packed")  # type: ignore[arg-type]


def test_an_empty_batch_materializes() -> None:
    td = TensorDict({"x": to_nested_by_length(values((0, 3)), [])}, batch_size=[0])
    assert materialize(td)["x"].shape == (0, 0)
    assert materialize(td, pad_to_seqlen=5)["x"].shape == (0, 5)


# columns


@pytest.mark.parametrize(
    "array",
    [
        np.arange(4, dtype=">i4"),
        np.arange(4)[::-1],
        np.broadcast_to(np.float32(1), (4,)),
        np.arange(8, dtype=np.uint16)[::2],
    ],
)
def test_any_numeric_array_becomes_a_tensor_of_its_values(array: np.ndarray[Any, Any]) -> None:
    column = as_column(array, 4)
    assert column.tolist() == array.tolist()


def test_a_plain_array_shares_its_memory() -> None:
    array = np.arange(4)
    assert as_column(array, 4).data_ptr() == array.ctypes.data


OBJECTS: list[tuple[Any, list[Any]]] = [
    (["a", None], ["a", None]),
    ([[1], [2, 3]], [[1], [2, 3]]),
    (("x", 1.5), ["x", 1.5]),
    (np.array(["a", {"b": 1}], dtype=object), ["a", {"b": 1}]),
    (np.array(["text", "more"]), ["text", "more"]),
    (NonTensorStack("a", "b"), ["a", "b"]),
    (NonTensorData(["a", "b"], batch_size=[2]), ["a", "b"]),
    (NonTensorData("same", batch_size=[2]), ["same", "same"]),
]


@pytest.mark.parametrize(("value", "rows"), OBJECTS)
def test_anything_else_is_one_object_per_row(value: Any, rows: list[Any]) -> None:
    column = as_column(value, 2)
    assert isinstance(column, NonTensorStack)
    assert materialize(TensorDict({"x": column}, batch_size=[2]))["x"].tolist() == rows
