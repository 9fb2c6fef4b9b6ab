"""Columns as bytes: what is laid out comes back the same, in any selection, and nothing gets lost."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import NonTensorData, NonTensorStack, TensorDict

from rlplane.adapters.transfer_queue import _assert_no_key_loss, _from_wire, _promote_1d_leaves, wire
from rlplane.errors import DataPlaneError, InvalidRequestError, UnsupportedValueError


def jagged(*rows):
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)


def encode(columns, count, **options):
    return wire.encode_columns(TensorDict(columns, batch_size=[count]), count, allow_pickle=False, **options)


def read_back(column, rows):
    """Read rows of a column through pieces of one row each, as if every chunk had one row."""
    layout, offsets = column.layout, column.layout.offsets()
    pieces = [column.data[offsets[r] : offsets[r + 1]] for r in range(layout.rows)]
    rows = np.array(rows, np.int64)
    sizes = np.diff(offsets)[rows]
    data = wire.gather_rows(pieces, rows, np.zeros(len(rows), np.int64), sizes, private=False)
    joined = wire.join_layouts("x", [layout])
    lengths = layout.lengths[rows] if layout.lengths is not None else np.zeros(len(rows), np.int64)
    return wire.decode_column(joined, lengths, data, allow_pickle=False)


DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.uint8,
    torch.float8_e4m3fn,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(5,), (5, 3), (5, 2, 4), (5, 0)], ids=str)
def test_dense_rows_come_back_in_any_order(dtype, shape):
    column = torch.arange(int(np.prod(shape))).reshape(shape).to(dtype)
    got = read_back(encode({"x": column}, 5)["x"], [4, 0, 0, 2])
    assert got.dtype == dtype
    if len(shape) == 1:
        got = _from_wire(TensorDict({"x": got}, batch_size=[4]), ["x"])["x"]
    expected = torch.stack([column[row] for row in (4, 0, 0, 2)])
    assert got.shape == expected.shape
    assert torch.equal(got.contiguous().view(torch.uint8), expected.view(torch.uint8))


def test_columns_that_are_not_contiguous_are_laid_out_in_order():
    base = torch.arange(24.0).reshape(4, 6)
    got = read_back(encode({"x": base.t()[:4]}, 4)["x"], range(4))
    assert torch.equal(got, base.t()[:4])


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8), st.data())
def test_ragged_rows_come_back_in_any_selection(lengths, data):
    rows = [torch.arange(n, dtype=torch.float32) + 100 * place for place, n in enumerate(lengths)]
    wanted = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=10))
    got = read_back(encode({"x": jagged(*rows)}, len(rows))["x"], wanted)
    assert got.layout == torch.jagged
    assert [row.tolist() for row in got.unbind()] == [rows[place].tolist() for place in wanted]


def test_a_slice_of_a_jagged_tensor_leaves_the_rest_behind():
    whole = jagged(torch.arange(3.0), torch.arange(4.0), torch.arange(5.0))
    values, offsets = whole.values(), whole.offsets()
    part = torch.nested.nested_tensor_from_jagged(values, offsets[1:])
    column = encode({"x": part}, 2)["x"]
    assert column.layout.nbytes == column.data.numel() == 4 * 9


def test_strided_nested_rows_come_back_jagged():
    rows = [torch.ones(2, 3), torch.zeros(4, 3)]
    got = read_back(encode({"x": torch.nested.nested_tensor(rows)}, 2)["x"], [1, 0])
    assert [tuple(row.shape) for row in got.unbind()] == [(4, 3), (2, 3)]


def test_nested_rows_that_differ_behind_the_first_dimension_are_refused():
    with pytest.raises(InvalidRequestError, match="first dimension only"):
        encode({"x": torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(2, 4)])}, 2)


OBJECTS = [None, True, 7, 1.5, "é", b"\x00", [1, [2]], {"a": {"b": None}}]


@pytest.mark.parametrize(
    "column",
    [
        NonTensorStack(*[NonTensorData(value) for value in OBJECTS]),
        NonTensorData(OBJECTS, batch_size=[len(OBJECTS)]),
        NonTensorData(np.array([*OBJECTS, None], object)[:-1], batch_size=[len(OBJECTS)]),
    ],
    ids=["stack", "list", "array"],
)
def test_objects_come_back_equal_however_they_are_held(column):
    got = read_back(encode({"x": column}, len(OBJECTS))["x"], range(len(OBJECTS)))
    assert got.tolist() == OBJECTS


@pytest.mark.parametrize(
    ("column", "says"),
    [
        (NonTensorData("one for all", batch_size=[2]), "holds a str"),
        (TensorDict({"a": torch.zeros(2)}, batch_size=[2]), "flat columns"),
        (NonTensorData([1, 2, 3], batch_size=[2]), "3 rows for 2"),
    ],
    ids=["single", "tensordict", "count"],
)
def test_what_is_no_column_is_refused_by_name(column, says):
    with pytest.raises(InvalidRequestError, match=f"'x'.*{says}"):
        encode({"x": column}, 2)


def test_an_object_that_may_not_travel_is_refused_by_name():
    with pytest.raises(UnsupportedValueError, match="'x'"):
        encode({"x": NonTensorStack({1, 2}, {3})}, 2)


def test_a_row_count_that_differs_is_refused():
    with pytest.raises(InvalidRequestError, match="3 rows for 2"):
        wire.encode_columns(TensorDict({"x": torch.zeros(3)}, batch_size=[3]), 2, allow_pickle=False)


def test_neighbouring_rows_are_copied_as_one_run_and_a_whole_private_piece_not_at_all():
    piece = torch.arange(12, dtype=torch.uint8)
    place, start = np.zeros(3, np.int64), np.array([0, 4, 8])
    whole = wire.gather_rows([piece], place, start, start + 4, private=True)
    assert whole.data_ptr() == piece.data_ptr()
    shared = wire.gather_rows([piece], place, start, start + 4, private=False)
    assert torch.equal(shared, piece) and shared.data_ptr() != piece.data_ptr()


def test_rows_of_different_dtypes_are_no_column():
    layouts = [wire.Layout("dense", "float32", (), 1), wire.Layout("dense", "int64", (), 1)]
    with pytest.raises(InvalidRequestError, match="float32, int64"):
        wire.join_layouts("x", layouts)


def test_dense_rows_of_several_lengths_become_ragged_and_scalars_cannot():
    two, three = wire.Layout("dense", "int64", (2, 5), 1), wire.Layout("dense", "int64", (3, 5), 1)
    assert wire.join_layouts("x", [two, three]) == wire.Layout("ragged", "int64", (5,), 0)
    with pytest.raises(InvalidRequestError, match="no tensor can hold"):
        wire.join_layouts("x", [wire.Layout("dense", "int64", (1,), 1, promoted=True), two])


def test_chunks_are_small_and_never_empty():
    big = encode({"x": torch.zeros(64, 1 << 14), "y": torch.zeros(64)}, 64)
    assert wire.rows_per_chunk(big, 64) == wire.CHUNK_BYTES // (4 << 14)
    assert wire.rows_per_chunk(encode({"x": torch.zeros(2, 1 << 20)}, 2), 2) == 1
    assert wire.rows_per_chunk(encode({"x": torch.zeros(7, 0)}, 7), 7) == 7


def test_promoting_and_squeezing_are_inverse_and_leave_the_rest_alone():
    column = torch.arange(3)
    td = TensorDict(
        {"a": column, "b": torch.zeros(3, 1), "c": jagged(*torch.eye(3)), "d": NonTensorStack("x", "y", "z")},
        batch_size=[3],
    )
    promoted = _promote_1d_leaves(td)
    assert {name: tuple(promoted[name].shape) for name in "ab"} == {"a": (3, 1), "b": (3, 1)}
    assert promoted["c"] is td["c"] and list(promoted["d"]) == ["x", "y", "z"]
    back = _from_wire(promoted, ["a"])
    assert torch.equal(back["a"], column) and back["b"].shape == (3, 1)
    assert _from_wire(promoted)["b"].shape == (3,)


def test_a_tensordict_that_has_lost_a_column_is_noticed():
    kept = TensorDict({"a": torch.zeros(2)}, batch_size=[2])
    _assert_no_key_loss({"a": 1}, kept, "somewhere")
    with pytest.raises(DataPlaneError, match=r"somewhere.*\['b'\]"):
        _assert_no_key_loss({"a": 1, "b": 2}, kept, "somewhere")


def test_an_enum_takes_the_strings_of_its_vocabulary_only():
    column = encode({"x": NonTensorStack("stop", "length")}, 2)["x"]
    wire.check_enum("x", column, ["stop", "length"])
    with pytest.raises(InvalidRequestError, match="cannot hold 'length'"):
        wire.check_enum("x", column, ["stop"])
    with pytest.raises(InvalidRequestError, match="as strings"):
        wire.check_enum("x", encode({"x": torch.zeros(2)}, 2)["x"], ["stop"])
