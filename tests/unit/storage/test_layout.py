"""Columns through bytes and back: any dtype, any shape, rows in any order, against plain torch."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch import Tensor
from torch.nested._internal.nested_tensor import NestedTensor

from rlplane.errors import DataPlaneError, InvalidRequestError, UnsupportedValueError
from rlplane.storage.assembly import Assembler, Bytes
from rlplane.storage.layout import EncodedColumn, encode_columns, fill
from rlplane.storage.places import FieldRows, Layout

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.complex128,
]


class Store:
    """Blocks as an engine keeps them, and the source of bytes of what is read from them."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[Layout, Tensor]] = {}
        self.nbytes = 0

    def read(self, block: int) -> Bytes:
        found: Bytes = self.blocks[block][1].numpy()
        return found

    def own(self, block: int, start: int, stop: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        return self.blocks[block][1][start:stop].clone().view(dtype).view(shape)

    def empty(self, nbytes: int) -> Tensor:
        return torch.full((nbytes,), 0xCD, dtype=torch.uint8)

    def put(self, column: EncodedColumn) -> int:
        # Rubbish first, because recycled memory is full of it.
        block = torch.full((column.nbytes,), 0xAB, dtype=torch.uint8)
        fill(block, 0, [column])
        self.blocks[len(self.blocks)] = (column.layout, block)
        return len(self.blocks) - 1

    def assembler(self, *, allow_pickle: bool = False) -> Assembler:
        layouts = {number: layout for number, (layout, _) in self.blocks.items()}
        return Assembler(layouts, self, allow_pickle=allow_pickle)

    def rows(self, places: list[tuple[int, int]], *, allow_pickle: bool = False) -> Any:
        """The rows at these (block, position), each asked for by itself."""
        assembler = self.assembler(allow_pickle=allow_pickle)
        blocks, positions = zip(*places, strict=True) if places else ((), ())
        scattered = FieldRows(
            len(places),
            blocks=np.array(blocks, np.int64).tobytes(),
            positions=np.array(positions, np.int32).tobytes(),
        )
        read = assembler.column("f", scattered)
        assembler.finish()
        return read


def column(value: Any, count: int, **options: Any) -> EncodedColumn:
    (encoded,) = encode_columns(
        TensorDict({"f": value}, batch_size=[]),
        count,
        options.pop("enums", {}),
        allow_pickle=options.pop("allow_pickle", False),
        **options,
    )
    return encoded


def bits(tensor: Tensor) -> tuple[Any, ...]:
    """A tensor as something that compares exactly, NaNs and all."""
    plain = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    return tensor.dtype, tuple(tensor.shape), plain.view(-1).view(torch.uint8).tolist()


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    nbytes = int(np.prod(shape)) * dtype.itemsize
    high = 2 if dtype is torch.bool else 256
    return torch.randint(0, high, (nbytes,), generator=generator).to(torch.uint8).view(dtype).view(shape)


def jagged(rows: list[Tensor]) -> Tensor:
    offsets = torch.tensor([0] + [len(row) for row in rows]).cumsum(0)
    return torch.nested.nested_tensor_from_jagged(torch.cat(rows), offsets)


def expected(rows: list[tuple[str, Tensor]]) -> Any:
    """What the contract says of these rows: dense if all are and of one shape, else nested, else an error."""
    shapes = {tuple(row.shape) for _, row in rows}
    if all(kind == "dense" for kind, _ in rows) and len(shapes) == 1:
        return torch.stack([row for _, row in rows])
    if any(not shape for shape in shapes) or len(set(map(len, shapes))) > 1:
        return InvalidRequestError
    return [row for _, row in rows]


sides = st.integers(0, 3)


@st.composite
def fields(draw: st.DrawFn) -> tuple[list[tuple[str, list[Tensor]]], list[tuple[int, int]]]:
    """Some blocks of one field, and places in them in some order."""
    dtype = draw(st.sampled_from(DTYPES))
    element = tuple(draw(st.lists(sides, max_size=2)))
    blocks = []
    for number in range(draw(st.integers(1, 3))):
        count = draw(st.integers(1, 5))
        kind = draw(st.sampled_from(["dense", "dense", "jagged"]))
        if kind == "dense":
            shape = draw(st.sampled_from([element, (2, *element), (3, *element)]))
            rows = list(random_tensor((count, *shape), dtype, number))
        else:
            lengths = draw(st.lists(sides, min_size=count, max_size=count))
            rows = [random_tensor((length, *element), dtype, 7 * number + length) for length in lengths]
        blocks.append((kind, rows))
    every = [(number, place) for number, (_, rows) in enumerate(blocks) for place in range(len(rows))]
    stretch = st.tuples(st.integers(0, len(every) - 1), st.integers(1, 4)).map(lambda s: every[s[0] : sum(s)])
    scattered = st.lists(st.sampled_from(every), min_size=1, max_size=8)
    stretches = st.lists(stretch, min_size=1, max_size=4).map(lambda runs: list(chain.from_iterable(runs)))
    return blocks, draw(scattered | stretches)


@settings(max_examples=300, deadline=None)
@given(fields(), st.booleans())
def test_rows_of_any_dtype_and_shape_come_back_in_any_order(field: Any, offsets_in_block: bool) -> None:
    blocks, places = field
    store = Store()
    for kind, rows in blocks:
        value = torch.stack(rows) if kind == "dense" else jagged(rows)
        store.put(column(value, len(rows), offsets_in_block=offsets_in_block))
    wanted = expected([(blocks[number][0], blocks[number][1][place]) for number, place in places])
    if wanted is InvalidRequestError:
        with pytest.raises(InvalidRequestError, match="field 'f' holds"):
            store.rows(places)
        return
    got = store.rows(places)
    if isinstance(wanted, Tensor):
        assert not got.is_nested and bits(got) == bits(wanted)
    else:
        one_shape_beyond_the_first = len({row.shape[1:] for row in wanted}) == 1
        assert got.is_nested and (got.layout is torch.jagged) == one_shape_beyond_the_first
        assert got.size(0) == len(places)
        assert list(map(bits, got.unbind())) == list(map(bits, wanted))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_survives_every_way_of_reading(dtype: torch.dtype) -> None:
    store = Store()
    first, second = random_tensor((40, 3), dtype, 1), random_tensor((40, 3), dtype, 2)
    numbers = [store.put(column(first, 40)), store.put(column(second, 40))]
    both = [first, second]
    orders = {
        "neighbours": [(0, place) for place in range(3, 20)],
        "scattered in one": [(0, place) for place in (5, 3, 5, 39, 0)],
        "scattered in two": [(place % 2, place) for place in range(30, 0, -1)],
        "stretches": [(number, place) for number in (1, 0, 1) for place in range(30)],
    }
    for places in orders.values():
        wanted = torch.stack([both[number].view(torch.uint8)[place] for number, place in places])
        got = store.rows([(numbers[number], place) for number, place in places])
        assert got.dtype is dtype and got.shape == (len(places), 3)
        assert torch.equal(got.view(torch.uint8), wanted)
    single = store.put(column(first[:, 0], 40))
    for picked in ([5, 3, 5], [39], list(range(40))):
        assert bits(store.rows([(single, place) for place in picked])) == bits(first[picked][:, 0])


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(24).view(4, 6)[:, ::2],
        torch.arange(24).view(6, 4).T,
        torch.ones(1, 3).expand(4, 3),
        torch.ones(4, 2, requires_grad=True) * 2,
        torch.zeros(4, 0),
        torch.zeros(4, 0, 3),
        torch.arange(4) * 1j,
        (torch.arange(8).view(4, 2) * 1j).conj(),
        torch._neg_view(torch.arange(4.0)),
        torch.tensor([float("nan"), float("inf"), -0.0, 1e-45]),
    ],
    ids=["strided", "transposed", "expanded", "grad", "empty", "empty 3-d", "complex", "conj", "neg", "odd"],
)
def test_whatever_lies_oddly_in_memory_is_written_as_it_looks(value: Tensor) -> None:
    store = Store()
    store.put(column(value, 4))
    plain = value.detach().resolve_conj().resolve_neg()
    for places in ([0, 1, 2, 3], [2, 0], [1]):
        got = store.rows([(0, place) for place in places])
        assert not got.requires_grad
        assert bits(got) == bits(plain[places])


@pytest.mark.parametrize(
    "row",
    [
        torch.ones(1, 3)[:, 0],
        torch.ones(5, 1, 3)[2, :, ::2],
        torch.ones(3, 1).T[:, 1],
        torch.ones(1).expand(1),
    ],
)
def test_a_single_row_of_something_larger_is_written(row: Tensor) -> None:
    # torch calls a tensor of one element contiguous, whatever its strides.
    store = Store()
    store.put(column(row, 1))
    assert bits(store.rows([(0, 0)])) == bits(row)
    store.put(column(torch.nested.nested_tensor_from_jagged(row, torch.tensor([0, 1])), 1))
    assert bits(store.rows([(1, 0)])[0]) == bits(row)


def nested_cases() -> tuple[list[Tensor], dict[str, Any]]:
    """The same rows in every way that torch has for them."""
    rows = [torch.arange(6.0).view(3, 2), torch.zeros(0, 2), torch.ones(1, 2)]
    whole = jagged([torch.full((2, 2), 9.0), *rows])
    base = torch.cat(rows)
    small = torch.tensor([0, 3, 3, 4], dtype=torch.int32)
    return rows, {
        "jagged": jagged(rows),
        "strided": torch.nested.nested_tensor(rows),
        "narrowed": torch.nested.nested_tensor_from_jagged(
            torch.cat([rows[0], torch.zeros(1, 2), torch.ones(2, 2)]),
            torch.tensor([0, 3, 4, 6]),
            lengths=torch.tensor([3, 0, 1]),
        ),
        "int32 offsets": torch.nested.nested_tensor_from_jagged(base, small),
        "offsets that start later": torch.nested.nested_tensor_from_jagged(
            whole.values(), torch.tensor([2, 5, 5, 6])
        ),
        "with room behind": torch.nested.nested_tensor_from_jagged(
            torch.cat([base, torch.full((3, 2), 9.0)]), torch.tensor([0, 3, 3, 4])
        ),
        "with gradients": torch.nested.nested_tensor_from_jagged(
            base.clone().requires_grad_(), torch.tensor([0, 3, 3, 4])
        ),
        "values that are strided": torch.nested.nested_tensor_from_jagged(
            torch.stack([base, base], -1)[..., 0], torch.tensor([0, 3, 3, 4])
        ),
    }


@pytest.mark.parametrize("case", nested_cases()[1])
def test_every_kind_of_nested_tensor_comes_back_jagged(case: str) -> None:
    rows, values = nested_cases()
    store = Store()
    store.put(column(values[case], 3))
    for places in ([0, 1, 2], [2, 1, 0, 2], [1]):
        got = store.rows([(0, place) for place in places])
        assert got.layout is torch.jagged and not got.requires_grad
        assert list(map(bits, got.unbind())) == [bits(rows[place]) for place in places]


def test_fields_with_equal_lengths_can_be_combined() -> None:
    store = Store()
    store.put(column(jagged([torch.ones(2), torch.ones(3)]), 2))
    store.put(column(jagged([torch.ones(2), torch.ones(3)]), 2))
    assembler = store.assembler()
    left, right = (assembler.column(name, FieldRows(2, block)) for name, block in (("l", 0), ("r", 1)))
    assert (left + right).values().tolist() == [2.0] * 5


def test_no_rows_are_an_empty_tensor() -> None:
    assert Store().rows([]).shape == (0,)


# Objects and enums


@pytest.mark.parametrize(
    "pack", [lambda rows: NonTensorStack(*[NonTensorData(row) for row in rows]), NonTensorData]
)
def test_objects_come_back_one_per_row_in_any_order(pack: Any) -> None:
    rows = [None, [1, 2], {"a": np.arange(2)}, "text", b"", []]
    store = Store()
    store.put(column(pack(rows), len(rows)))
    store.put(column(NonTensorStack("plain", "words"), 2))
    got = store.rows([(0, 3), (1, 1), (0, 1), (0, 5), (0, 1)])
    assert got.tolist() == ["text", "words", [1, 2], [], [1, 2]]
    assert store.rows([(0, 2)]).tolist()[0]["a"].tolist() == [0, 1]


SINGLES = ["same", 7, None, {"a": 1}, b"bytes", np.array("a"), np.float32(1)]


@pytest.mark.parametrize("single", SINGLES, ids=repr)
def test_a_single_object_for_all_rows_is_refused_with_the_way_to_write_it(single: Any) -> None:
    for enums in ({}, {"f": ["same"]}):
        with pytest.raises(InvalidRequestError) as refused:
            column(NonTensorData(single), 3, enums=enums)
        assert f"field 'f' holds a single {type(single).__name__} for 3 samples" in str(refused.value)
        assert "NonTensorStack(*[value] * 3)" in str(refused.value)


@pytest.mark.parametrize(
    ("rows", "values"),
    [
        (np.array(["a", None], object), ["a", None]),
        (np.array(["a", "long"]), ["a", "long"]),
        (np.array([b"a", b"b"]), [b"a", b"b"]),
        (("a", None), ["a", None]),
        (["a", None], ["a", None]),
    ],
    ids=["object array", "<U array", "<S array", "tuple", "list"],
)
def test_what_holds_one_entry_per_row_is_rows(rows: Any, values: list[Any]) -> None:
    store = Store()
    store.put(column(NonTensorData(rows), 2))
    got = store.rows([(0, 1), (0, 0)]).tolist()
    assert got == values[::-1] and [type(value) for value in got] == [type(value) for value in values[::-1]]
    with pytest.raises(InvalidRequestError, match="field 'f' has 2 rows for 3 sample_ids"):
        column(NonTensorData(rows), 3)


def test_the_rows_of_an_array_of_arrays_are_arrays() -> None:
    store = Store()
    store.put(column(NonTensorData(np.arange(6).reshape(2, 3)), 2))
    assert [row.tolist() for row in store.rows([(0, 1), (0, 0)]).tolist()] == [[3, 4, 5], [0, 1, 2]]


@pytest.mark.parametrize("words", [2, 256, 257, 1000])
def test_enums_are_small_numbers_that_come_back_as_words(words: int) -> None:
    vocabulary = [f"word {number}" for number in range(words)]
    rows = [vocabulary[-1], vocabulary[0], vocabulary[-1]]
    source = column(NonTensorStack(*rows), 3, enums={"f": vocabulary})
    assert source.layout.values_nbytes == 3 * (1 if words <= 256 else 4)
    store = Store()
    store.put(source)
    # Written before the vocabulary was declared, and read together.
    store.put(column(NonTensorStack("free", "text"), 2))
    assert store.rows([(0, 2), (1, 0), (0, 1)]).tolist() == [rows[2], "free", rows[1]]


@pytest.mark.parametrize("bad", ["ugly", None, 3, ["good"]])
def test_a_word_outside_the_vocabulary_is_named(bad: Any) -> None:
    value = NonTensorStack(NonTensorData("good"), NonTensorData(bad))
    with pytest.raises(InvalidRequestError) as error:
        column(value, 2, enums={"f": ["good", "bad"]})
    assert f"field 'f' is an enum of ['good', 'bad']; {bad!r} is not one of them" in str(error.value)


# What is refused


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.ones(3), r"field 'f' has 3 rows for 2 sample_ids"),
        (torch.tensor(1), r"field 'f' has 0 rows for 2 sample_ids"),
        (jagged([torch.ones(1)] * 3), r"field 'f' has 3 rows for 2 sample_ids"),
        (NonTensorStack("a", "b", "c"), r"field 'f' has 3 rows for 2 sample_ids"),
        (NonTensorData(["a"]), r"field 'f' has 1 rows for 2 sample_ids"),
        (TensorDict({"g": torch.ones(3)}, batch_size=[3]), r"field 'f' has 3 rows for 2 sample_ids"),
        (torch.ones(2, 2).to_sparse(), r"field 'f' has dtype torch.float32 and layout torch.sparse_coo"),
    ],
)
def test_a_column_that_cannot_be_kept_is_refused_by_name(value: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        column(value, 2)


@pytest.mark.filterwarnings("ignore:.*quantiz:UserWarning")
def test_quantized_columns_are_refused() -> None:
    value = torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8)
    with pytest.raises(InvalidRequestError, match=r"field 'f' has dtype torch\.qint8"):
        column(value, 2)


def test_numbers_where_an_enum_is_declared_are_refused() -> None:
    for value in (torch.ones(2), jagged([torch.ones(1)] * 2)):
        with pytest.raises(InvalidRequestError, match=r"field 'f' is declared as an enum of \['a'\]"):
            column(value, 2, enums={"f": ["a"]})


def test_fields_are_a_tensordict() -> None:
    with pytest.raises(InvalidRequestError, match="fields must be a TensorDict, not dict"):
        encode_columns({"f": torch.ones(2)}, 2, {}, allow_pickle=False)


def test_an_object_that_may_not_travel_names_its_field() -> None:
    with pytest.raises(UnsupportedValueError, match=r"field 'f' holds a builtins\.set"):
        column(NonTensorStack(NonTensorData({1}), NonTensorData({2})), 2)
    store = Store()
    store.put(column(NonTensorStack(NonTensorData({1}), NonTensorData({2})), 2, allow_pickle=True))
    assert store.rows([(0, 1)], allow_pickle=True).tolist() == [{2}]


def test_rows_of_several_dtypes_are_named() -> None:
    store = Store()
    store.put(column(torch.ones(2), 2))
    store.put(column(torch.ones(2, dtype=torch.int64), 2))
    store.put(column(NonTensorStack("a", "b"), 2))
    with pytest.raises(InvalidRequestError, match=r"'f' holds torch\.float32 and torch\.int64 in the rows"):
        store.rows([(0, 0), (1, 0)])
    with pytest.raises(InvalidRequestError, match=r"'f' holds objects and torch\.float32"):
        store.rows([(2, 0), (0, 0)])


# Layouts


@settings(max_examples=60, deadline=None)
@given(fields())
def test_a_block_is_aligned_and_says_how_large_it_is(field: Any) -> None:
    kind, rows = field[0][0]
    source = column(torch.stack(rows) if kind == "dense" else jagged(rows), len(rows))
    layout = source.layout
    assert source.nbytes == layout.nbytes and layout.nbytes % 64 == layout.offsets_at % 64 == 0
    assert layout.values_nbytes == sum(row.numel() * row.itemsize for row in rows)
    assert layout.values_nbytes <= layout.offsets_at <= layout.nbytes
    block = torch.zeros(source.nbytes, dtype=torch.uint8)
    fill(block, 0, [source])
    if kind != "dense":
        offsets = block[layout.offsets_at :][: 8 * (len(rows) + 1)].view(torch.int64)
        assert offsets.diff().tolist() == [len(row) for row in rows]


@pytest.mark.parametrize(
    ("offsets", "said"),
    [
        ([0, 3, 9], "has 6 values, and its offsets go to 9"),
        ([-1, 3, 6], "start below 0 or decrease"),
        ([0, 7, 6], "start below 0 or decrease"),
    ],
)
def test_offsets_that_lie_are_refused(offsets: list[int], said: str) -> None:
    lying = NestedTensor(torch.arange(6), offsets=torch.tensor(offsets))
    with pytest.raises(InvalidRequestError, match=said):
        column(lying, 2)


def test_offsets_that_one_field_can_have_and_another_cannot_are_refused() -> None:
    offsets = torch.tensor([0, 2, 4])
    fields = TensorDict({}, batch_size=[])
    fields["enough"] = NestedTensor(torch.arange(4), offsets=offsets)
    fields["short"] = NestedTensor(torch.arange(3), offsets=offsets)
    with pytest.raises(InvalidRequestError, match="'short' has 3 values"):
        encode_columns(fields, 2, {}, allow_pickle=False)


@pytest.mark.parametrize("places", [[(0, 0), (0, 1)], [(0, 1), (0, 0)]])
@pytest.mark.parametrize("bad", [-1, 10**6])
def test_offsets_that_somebody_has_written_over_are_not_followed(
    places: list[tuple[int, int]], bad: int
) -> None:
    store = Store()
    number = store.put(column(jagged([torch.arange(3), torch.arange(4)]), 2))
    layout, block = store.blocks[number]
    block[layout.offsets_at :].view(torch.int64)[2] = bad
    with pytest.raises(DataPlaneError, match="offsets of field 'f' are damaged"):
        store.rows(places)


def test_a_tensor_without_memory_of_its_own_is_refused() -> None:
    source = column(torch._efficientzerotensor((3, 4)), 3)
    with pytest.raises(InvalidRequestError, match="without memory of its own"):
        source.copies(torch.empty(source.nbytes, dtype=torch.uint8), 0)


def test_a_default_device_of_the_users_is_not_where_bytes_go() -> None:
    store = Store()
    rows = [torch.arange(200), torch.arange(300)]
    with torch.device("meta"):
        words = column(NonTensorStack("a", "b"), 2, enums={"f": ["a", "b"]})
        empty = column(NestedTensor(torch.empty(0, device="cpu"), torch.zeros(1, device="cpu").long()), 0)
    assert words.values.is_cpu and empty.offsets is not None and empty.offsets.is_cpu
    number = store.put(column(jagged(rows), 2))
    with torch.device("meta"):
        assert store.rows([]).is_cpu
        assert [row.tolist() for row in store.rows([(number, 0), (number, 1)]).unbind()] == [
            row.tolist() for row in rows
        ]
