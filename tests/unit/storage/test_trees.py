"""Rows that are trees, through bytes and back, in storages that can look into a block and in chunked ones."""

from __future__ import annotations

import gc
import pickle
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict
from torch import Tensor

from rlplane.errors import DataPlaneError, MissingDataError, UnsupportedValueError
from rlplane.storage import chunks, keyed
from rlplane.storage.assembly import Assembler
from rlplane.storage.chunks import Chunk, ChunkedStorage
from rlplane.storage.layout import EncodedColumn, encode_columns
from rlplane.storage.leases import ReadLease
from rlplane.storage.memory import MemoryStore
from rlplane.storage.places import FieldRows, Layout, Located, Place
from rlplane.testing.expectations import is_same

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int64,
    torch.uint16,
    torch.bfloat16,
    torch.float32,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
]
CHUNK = 512


class DictChunks:
    """A chunk store in a dictionary that notes what it was asked for."""

    def __init__(self) -> None:
        self.values: dict[int, bytes] = {}
        self.fetched: list[int] = []

    def put(self, chunks: Sequence[Chunk], buffer: Tensor, deadline: float) -> None:
        for key, start, size, _ in chunks:
            self.values[key] = buffer[start : start + size].numpy().tobytes()

    def get(self, chunks: Sequence[Chunk], buffer: Tensor) -> None:
        for key, start, size, _ in chunks:
            self.fetched.append(key)
            buffer.numpy()[start : start + size] = np.frombuffer(self.values[key], np.uint8)

    def drop(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            self.values.pop(chunk.key, None)

    def close(self) -> None:
        self.values.clear()


class Blocks:
    """Columns written to a storage, one place each, and read from it."""

    def __init__(self, storage: Any) -> None:
        self.storage = storage
        self.places: list[Place] = []
        self.layouts: list[Layout] = []

    def put(self, value: Any, count: int, **options: Any) -> Layout:
        (column,) = encode_columns(
            TensorDict({"f": value}, batch_size=[]),
            count,
            {},
            allow_pickle=options.get("allow_pickle", False),
            offsets_in_block=self.storage.keeps_offsets,
        )
        return self.write(column)

    def write(self, column: EncodedColumn) -> Layout:
        place = Place(1000 * len(self.places), column.nbytes)
        self.storage.write(place, [column], 0.0)
        self.places.append(place)
        self.layouts.append(column.layout)
        return column.layout

    def get(self, rows: Sequence[tuple[int, int]], path: str = "", **options: Any) -> Any:
        """The rows at these (block, position)."""
        blocks, positions = zip(*rows, strict=True)
        scattered = FieldRows(
            len(rows),
            blocks=np.array(blocks, np.int64).tobytes(),
            positions=np.array(positions, np.int32).tobytes(),
        )
        used = sorted(set(blocks))
        located = Located(
            1,
            [self.places[block] for block in used],
            {block: (index, 0, self.layouts[block]) for index, block in enumerate(used)},
            [scattered],
            [path] if path else None,
        )
        source = self.storage.open(located, ReadLease(lambda: None))
        layouts = {block: layout for block, (_, _, layout) in located.blocks.items()}
        assembler = Assembler(layouts, source, allow_pickle=options.get("allow_pickle", False))
        column = assembler.column("f", scattered, path)
        assembler.finish()
        return column


def in_memory() -> Blocks:
    return Blocks(MemoryStore(1 << 30))


def in_chunks() -> Blocks:
    return Blocks(ChunkedStorage(DictChunks()))


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small rows are in several of them."""
    monkeypatch.setattr(chunks, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(keyed, "CHUNK_BYTES", CHUNK)


@pytest.fixture(params=[in_memory, in_chunks])
def blocks(request: pytest.FixtureRequest) -> Blocks:
    made: Blocks = request.param()
    return made


def stack(rows: Sequence[Any]) -> NonTensorStack:
    return NonTensorStack(*[NonTensorData(row, batch_size=[]) for row in rows])


def random_tensor(shape: Sequence[int], dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    nbytes = int(np.prod(shape)) * dtype.itemsize
    high = 2 if dtype is torch.bool else 256
    raw = torch.randint(0, high, (nbytes,), generator=generator).to(torch.uint8)
    return raw.view(dtype).view(tuple(shape))


tensors = st.builds(
    random_tensor, st.lists(st.integers(0, 5), max_size=4), st.sampled_from(DTYPES), st.integers(0, 99)
)
arrays = st.builds(
    lambda size, dtype: (np.arange(size) % 7).astype(dtype),
    st.sampled_from([0, 3, 700, 5000]),
    st.sampled_from(["<f4", ">i8", "u1", "?", "<U3"]),
)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
atoms = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False), texts
)
trees = st.recursive(
    st.one_of(tensors, arrays, atoms),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(texts, inner, max_size=3)),
    max_leaves=8,
)


@pytest.mark.parametrize("make", [in_memory, in_chunks])
@given(
    data=st.data(),
    first=st.lists(trees, min_size=1, max_size=5),
    second=st.lists(trees, min_size=1, max_size=3),
)
@settings(deadline=None, max_examples=150)
def test_trees_come_back_equal_in_any_order(make: Any, data: st.DataObject, first: Any, second: Any) -> None:
    blocks = make()
    blocks.put(stack(first), len(first))
    blocks.put(NonTensorData(second), len(second))
    written = {(0, i): row for i, row in enumerate(first)} | {(1, i): row for i, row in enumerate(second)}
    wanted = data.draw(st.lists(st.sampled_from(sorted(written)), min_size=1, max_size=6))
    got = blocks.get(wanted).tolist()
    assert is_same(got, [written[place] for place in wanted])


@pytest.mark.parametrize("make", [in_memory, in_chunks])
@given(rows=st.lists(trees, min_size=1, max_size=4))
@settings(deadline=None, max_examples=100)
def test_every_leaf_is_read_alone_as_it_is_in_the_tree(make: Any, rows: list[Any]) -> None:
    blocks = make()
    wrapped = [{"mm": row} for row in rows]
    blocks.put(stack(wrapped), len(rows))
    got = blocks.get([(0, i) for i in range(len(rows))], "mm").tolist()
    assert is_same(got, rows)


def test_a_column_without_tensors_stays_a_column_of_objects(blocks: Blocks) -> None:
    assert blocks.put(stack([{"a": [1, "b"]}, np.arange(3)]), 2).kind == "object"
    assert blocks.put(stack([{"a": torch.ones(1)}, None]), 2).kind == "tree"


def test_every_form_of_a_column_of_trees_is_one_tree_per_row(blocks: Blocks) -> None:
    rows = [{"x": torch.ones(2, 3), "s": "a"}, {"x": torch.zeros(4), "s": "b"}]
    array = np.empty(2, object)
    array[:] = rows
    lazy = LazyStackedTensorDict(*[TensorDict(row, batch_size=[]) for row in rows])
    for form in (stack(rows), NonTensorData(list(rows)), NonTensorData(array), lazy):
        blocks.put(form, 2)
        assert is_same(
            blocks.get([(len(blocks.places) - 1, 1), (len(blocks.places) - 1, 0)]).tolist(), rows[::-1]
        )


def test_a_tensordict_in_a_column_is_one_dict_per_row(blocks: Blocks) -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)], layout=torch.jagged)
    inner = TensorDict({"y": torch.tensor([5, 6])}, batch_size=[2])
    value = TensorDict(
        {"x": torch.arange(6).view(2, 3), "n": nested, "o": NonTensorStack("a", "b"), "inner": inner}, [2]
    )
    blocks.put(value, 2)
    wanted = [
        {"x": torch.tensor([3, 4, 5]), "n": torch.zeros(3), "o": "b", "inner": {"y": torch.tensor(6)}},
        {"x": torch.tensor([0, 1, 2]), "n": torch.ones(2), "o": "a", "inner": {"y": torch.tensor(5)}},
    ]
    assert is_same(blocks.get([(0, 1), (0, 0)]).tolist(), wanted)


def test_tensors_of_every_memory_layout_come_back(blocks: Blocks) -> None:
    base = torch.arange(24.0).view(4, 6)
    rows = [
        base.T,
        base[:, ::2],
        base[1],
        base.expand(2, 4, 6),
        torch.view_as_complex(base.view(4, 3, 2)).conj(),
        torch.nn.Parameter(base),
    ]
    blocks.put(stack(rows), len(rows))
    got = blocks.get([(0, i) for i in range(len(rows))]).tolist()
    assert is_same(got, [row.detach().resolve_conj() for row in rows])
    assert not any(row.requires_grad for row in got)


def test_a_tensor_that_rows_share_is_stored_once(blocks: Blocks) -> None:
    image = random_tensor((100, 50), torch.bfloat16, 1)
    array = np.arange(3000.0)
    rows = [{"image": image, "array": array, "own": torch.tensor([i])} for i in range(8)]
    layout = blocks.put(stack(rows), 8)
    held = image.nbytes + array.nbytes
    assert held <= layout.values_nbytes < 1.05 * held + 8 * 256
    assert is_same(blocks.get([(0, 5), (0, 2)]).tolist(), [rows[5], rows[2]])


def test_tensors_of_one_memory_are_stored_once_whatever_object_holds_them(blocks: Blocks) -> None:
    image, array = random_tensor((100, 50), torch.float32, 1), np.arange(3000.0)
    array.flags.writeable = False
    parameter = torch.nn.Parameter(image)
    rows: list[dict[str, Any]] = [
        {"image": image.view(100, 50), "array": array[:]},
        {"image": image.expand(1, 100, 50)[0], "array": array[:]},
        {"image": parameter, "array": array},
        {"image": parameter, "empty": torch.empty(0, 3)},
        {"empty": torch.empty(3, 0)},
    ]
    layout = blocks.put(stack(rows), 5)
    held = image.nbytes + array.nbytes
    assert held <= layout.values_nbytes < held + 8 * 256
    for row in rows[2:4]:
        row["image"] = image
    assert is_same(blocks.get([(0, row) for row in range(5)]).tolist(), rows)


def test_a_tensor_of_a_class_that_msgpack_would_take_for_a_dict_is_a_tensor(blocks: Blocks) -> None:
    @dataclass
    class Named(torch.Tensor):
        name: str = "x"

    rows = [{"a": torch.arange(3.0).as_subclass(Named)}, {"a": [torch.ones(2).as_subclass(Named)]}]
    blocks.put(stack(rows), 2)
    got = blocks.get([(0, 0), (0, 1)]).tolist()
    assert is_same(got, [{"a": torch.arange(3.0)}, {"a": [torch.ones(2)]}])
    assert type(got[0]["a"]) is Tensor


def test_views_of_one_memory_that_differ_are_not_taken_for_the_same(blocks: Blocks) -> None:
    base = torch.arange(1024)
    rows = [base, base[:512], base.view(32, 32), base.view(32, 32).T, base.view(torch.float64)]
    blocks.put(stack(rows), 5)
    assert is_same(blocks.get([(0, i) for i in range(5)]).tolist(), rows)


def test_the_reader_may_change_what_it_got(blocks: Blocks) -> None:
    blocks.put(stack([{"a": torch.zeros(3), "b": np.zeros(1000)}]), 1)
    row = blocks.get([(0, 0)]).tolist()[0]
    row["a"] += 1
    row["b"] += 1
    again = blocks.get([(0, 0)]).tolist()[0]
    assert again["a"].sum() == 0 and again["b"].sum() == 0


@pytest.mark.parametrize("path", ["", "a"])
def test_what_was_read_is_given_back_when_its_reader_drops_it(blocks: Blocks, path: str) -> None:
    blocks.put(stack([{"a": torch.zeros(3)}, {"a": torch.zeros(4)}]), 2)
    gc.disable()
    try:
        column = blocks.get([(0, 0), (0, 1)], path)
        row = column.tolist()[0]
        kept = weakref.ref(row if path else row["a"])
        assert kept() is not None
        del column, row
        assert kept() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.bool, torch.bfloat16, torch.complex64])
def test_nested_rows_may_differ_in_every_dimension(blocks: Blocks, dtype: torch.dtype) -> None:
    rows = [random_tensor(shape, dtype, 3) for shape in ((2, 3), (2, 4), (0, 5), (1, 1))]
    blocks.put(torch.nested.as_nested_tensor(rows, layout=torch.strided), 4)
    got = blocks.get([(0, 3), (0, 0), (0, 2), (0, 0)])
    assert got.is_nested and got.dtype == dtype
    assert is_same(list(got.unbind()), [rows[3], rows[0], rows[2], rows[0]])


def test_rows_of_different_shapes_from_several_writes_are_read_together(blocks: Blocks) -> None:
    blocks.put(torch.arange(12).view(2, 2, 3), 2)
    blocks.put(torch.arange(16).view(2, 2, 4), 2)
    blocks.put(
        torch.nested.as_nested_tensor([torch.ones(1, 5), torch.ones(2, 5)], layout=torch.jagged).long(), 2
    )
    blocks.put(torch.nested.as_nested_tensor([torch.zeros(1, 1), torch.zeros(2, 2)]).long(), 2)
    got = blocks.get([(3, 1), (0, 1), (2, 0), (1, 0)])
    wanted = [
        torch.zeros(2, 2).long(),
        torch.arange(6, 12).view(2, 3),
        torch.ones(1, 5).long(),
        torch.arange(8).view(2, 4),
    ]
    assert is_same(list(got.unbind()), wanted)


ROWS = [
    {"pixels": {"big": torch.full((4, 400), i)}, "grid": [torch.tensor([i, i])], "a.b": {"c": i}}
    for i in range(6)
]


@pytest.mark.parametrize(
    ("path", "leaf"),
    [
        ("grid.0", lambda row: row["grid"][0]),
        ("grid", lambda row: row["grid"]),
        ("pixels.big", lambda row: row["pixels"]["big"]),
        ("pixels", lambda row: row["pixels"]),
        ("a.b", lambda row: row["a.b"]),
        ("a.b.c", lambda row: row["a.b"]["c"]),
    ],
)
def test_a_leaf_is_named_by_its_path(blocks: Blocks, path: str, leaf: Any) -> None:
    blocks.put(stack(ROWS), 6)
    assert is_same(blocks.get([(0, 4), (0, 1)], path).tolist(), [leaf(ROWS[4]), leaf(ROWS[1])])


def test_keys_that_are_empty_or_have_dots_name_a_leaf_like_others(blocks: Blocks) -> None:
    leaf = torch.arange(1000)
    rows = [{"": {"x": leaf, "": leaf + 1}, "a": [{"": leaf + 2, "b.": leaf + 3}], "many": torch.zeros(3000)}]
    blocks.put(stack(rows), 1)
    for number, path in enumerate([".x", ".", "a.0.", "a.0.b."]):
        assert is_same(blocks.get([(0, 0)], path).tolist(), [leaf + number]), path


@pytest.mark.parametrize("path", ["nope", "grid.1", "grid.x", "grid.00", "grid.٠", "pixels.big.0", "a", "."])
def test_a_path_that_leads_nowhere_is_an_error(blocks: Blocks, path: str) -> None:
    blocks.put(stack(ROWS), 6)
    with pytest.raises(MissingDataError, match=f"field 'f': a row has nothing at '{path}'"):
        blocks.get([(0, 0)], path)


def test_chunks_that_nobody_asked_for_are_not_fetched() -> None:
    blocks = in_chunks()
    store = blocks.storage._store
    shared = torch.zeros(1000, dtype=torch.int64)
    blocks.put(stack([{**row, "shared": shared} for row in ROWS]), 6)
    everything = len(store.values)
    needs = {}
    for path in ("", "pixels", "shared", "grid", "a.b"):
        store.fetched.clear()
        blocks.get([(0, 1), (0, 3)], path)
        needs[path] = len(set(store.fetched)) * CHUNK
        assert len(store.fetched) == len(set(store.fetched))
    image = 4 * 400 * 8
    slack = 6 * CHUNK
    assert everything * CHUNK > 6 * image + shared.nbytes
    assert 2 * image + shared.nbytes <= needs[""] <= 2 * image + shared.nbytes + slack
    assert 2 * image <= needs["pixels"] <= 2 * image + slack
    assert shared.nbytes <= needs["shared"] <= shared.nbytes + slack
    assert max(needs["grid"], needs["a.b"]) <= slack


def test_a_tensor_that_cannot_travel_is_refused_by_name(blocks: Blocks) -> None:
    nested = torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged)
    with pytest.raises(UnsupportedValueError, match="field 'f' holds a nested tensor inside a row"):
        blocks.put(stack([{"a": nested}]), 1)
    with pytest.raises(ValueError, match=r"field 'f' has dtype .* and layout torch.sparse_coo"):
        blocks.put(stack([{"a": torch.ones(2, 2).to_sparse()}]), 1)
    with pytest.raises(ValueError, match="without memory of its own"):
        blocks.put(stack([{"a": torch.ones(2, device="meta")}]), 1)


def test_a_tensor_is_not_pickled_when_pickle_is_allowed(blocks: Blocks) -> None:
    layout = blocks.put(stack([{"a": torch.ones(2), "b": {1, 2}}]), 1, allow_pickle=True)
    assert layout.kind == "tree"
    assert is_same(blocks.get([(0, 0)], allow_pickle=True).tolist(), [{"a": torch.ones(2), "b": {1, 2}}])


def test_references_that_were_written_over_are_noticed() -> None:
    blocks = in_memory()
    layout = blocks.put(stack([{"a": torch.ones(64)}]), 1)
    buffer = blocks.storage._buffers[0]
    structure = buffer[256 : layout.values_nbytes]
    at = structure.numpy().tobytes().index((256).to_bytes(2, "big"))
    structure[at : at + 2] = torch.tensor([0xFF, 0xFF], dtype=torch.uint8)
    with pytest.raises(DataPlaneError, match="the rows of field 'f' are damaged"):
        blocks.get([(0, 0)])


def test_a_leaf_is_saved_without_the_others_of_its_read(blocks: Blocks) -> None:
    rows = [{"t": random_tensor([100, 100], torch.bfloat16, seed)} for seed in range(8)]
    blocks.put(stack(rows), len(rows))
    for row in blocks.get([(0, position) for position in range(len(rows))]).tolist():
        assert len(pickle.dumps(row["t"])) < 1.5 * row["t"].nbytes
