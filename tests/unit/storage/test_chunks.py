"""Places cut into chunks: any rows of any columns come back, and no chunk travels that nobody asked for."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorStack, TensorDict
from tests.unit.storage.chunk_stores import ChunkPlane

from rlplane.errors import PlaneConnectionError
from rlplane.service import protocol as wire
from rlplane.storage import chunks, keyed
from rlplane.storage.assembly import element_size
from rlplane.storage.dtypes import DTYPES
from rlplane.storage.places import Located, Place

WORDS = ["up", "down", "sideways"]
TYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.complex64]
OBJECTS = st.none() | st.integers(-(2**40), 2**40) | st.text(max_size=40) | st.binary(max_size=40)

# name -> rows, one list per put
Puts = list[dict[str, list[Any]]]


@st.composite
def puts(draw: st.DrawFn) -> Puts:
    """One to three puts of the same columns."""
    dtype = draw(st.sampled_from(TYPES))
    shape = draw(st.sampled_from([(), (3,), (2, 5), (0,), (33,)]))
    made: Puts = []
    for number in range(draw(st.integers(1, 3))):
        count = draw(st.integers(1, 12))
        lengths = draw(st.lists(st.integers(0, 20), min_size=count, max_size=count))
        numel = int(np.prod(shape))
        made.append(
            {
                "dense": [
                    (torch.arange(numel) + 17 * row + number).to(dtype).reshape(shape) for row in range(count)
                ],
                "ragged": [torch.arange(n * 2).reshape(n, 2) + 1000 * row for row, n in enumerate(lengths)],
                "object": draw(st.lists(OBJECTS, min_size=count, max_size=count)),
                "enum": draw(st.lists(st.sampled_from(WORDS), min_size=count, max_size=count)),
            }
        )
    return made


def as_fields(rows: dict[str, list[Any]]) -> TensorDict:
    columns = {
        "dense": torch.stack(rows["dense"]),
        "ragged": torch.nested.as_nested_tensor(rows["ragged"], layout=torch.jagged),
        "object": NonTensorStack(*rows["object"]),
        "enum": NonTensorStack(*rows["enum"]),
    }
    return TensorDict(columns, batch_size=[len(rows["dense"])])


def as_rows(name: str, column: Any) -> list[Any]:
    if name in ("object", "enum"):
        return list(column)
    return list(column.unbind())


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


def wanted_keys(located: Located, size: int) -> set[int]:
    """The chunks that the rows of a read lie in, byte by byte. A place of one chunk is always fetched."""
    keys = {place.number for place in located.places if place.size <= size}
    for rows in located.rows:
        if rows.blocks is None:
            pairs = [(rows.block, rows.start + row) for row in range(rows.count)]
        else:
            blocks = np.frombuffer(rows.blocks, np.int64).tolist()
            pairs = list(zip(blocks, np.frombuffer(rows.positions or b"", np.int32).tolist(), strict=True))
        for block, position in pairs:
            index, start, layout = located.blocks[block]
            if layout.offsets is not None:
                bounds = np.frombuffer(layout.offsets, np.int64)[position : position + 2]
            else:
                bounds = np.array([position, position + 1])
            item = DTYPES[layout.dtype].itemsize if layout.kind == "enum" else element_size(layout)
            begin, end = (start + bounds * item).tolist()
            keys |= {located.places[index].number + byte // size for byte in range(begin, end)}
    return keys


@settings(max_examples=60, deadline=None)
@given(puts(), st.integers(1, 400), st.data())
def test_any_rows_of_any_columns_come_back_and_no_other_chunk_travels(
    made: Puts, size: int, data: st.DataObject
) -> None:
    plane = ChunkPlane()
    with (
        mock.patch.object(keyed, "CHUNK_BYTES", size),
        mock.patch.object(chunks, "CHUNK_BYTES", size),
        plane.client() as client,
    ):
        client.register_partition("p", ["dense", "ragged", "object", "enum"], 0, ["t"], enums={"enum": WORDS})
        known = {}
        for number, rows in enumerate(made):
            ids = [f"{number}-{row}" for row in range(len(rows["dense"]))]
            client.put_samples(ids, "p", as_fields(rows))
            known.update({sample_id: (rows, row) for row, sample_id in enumerate(ids)})
        assert all(len(value) <= size for value in plane.store.values.values())
        chosen = data.draw(st.lists(st.sampled_from(sorted(known)), min_size=1, max_size=15))
        names = data.draw(
            st.lists(st.sampled_from(["dense", "ragged", "object", "enum"]), min_size=1, unique=True)
        )
        located = client._link().request(wire.Locate("p", chosen, names), Located)
        plane.store.fetched.clear()
        got = client.get_samples(chosen, "p", names)
        for name in names:
            expected = [known[sample_id][0][name][known[sample_id][1]] for sample_id in chosen]
            assert all(map(same, as_rows(name, got[name]), expected)), name
        assert len(set(plane.store.fetched)) == len(plane.store.fetched), "a chunk was fetched twice"
        assert set(plane.store.fetched) == wanted_keys(located, size)
        client._link().connection.release(located.lease)
        client.clear_samples(sorted(known), "p")
        assert plane.store.values == {}, "chunks of what was cleared are still in the store"
        status = client.service_status()
        assert status["storage"]["used"] == status["reserved"]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 500), st.integers(1, 100), st.data())
def test_any_bytes_of_a_place_can_be_fetched(total: int, size: int, data: st.DataObject) -> None:
    plane = ChunkPlane()
    start = data.draw(st.integers(0, total))
    nbytes = data.draw(st.integers(0, total - start))
    content = bytes(byte % 251 for byte in range(total))
    with mock.patch.object(keyed, "CHUNK_BYTES", size), mock.patch.object(chunks, "CHUNK_BYTES", size):
        place = Place(1000, total)
        assert list(chunks.chunk_keys(place)) == list(range(1000, 1000 + -(-total // size)))
        for number, key in enumerate(chunks.chunk_keys(place)):
            plane.store.values[key] = content[number * size : (number + 1) * size]
        got = chunks.ChunkedStorage(plane.store).fetch(place, start, nbytes)
    assert bytes(got.numpy()) == content[start : start + nbytes]


def test_the_samples_whose_chunks_are_lost_are_named_and_the_others_can_be_read() -> None:
    plane = ChunkPlane()
    client = plane.client()
    client.register_partition("p", ["x"], 0, ["t"])
    rows = torch.arange(8 * keyed.CHUNK_BYTES // 8).reshape(8, -1)
    ids = [f"s{row}" for row in range(8)]
    client.put_samples(ids, "p", TensorDict({"x": rows}, batch_size=[8]))
    assert len(plane.store.values) == 8
    lost = sorted(plane.store.values)[3]
    del plane.store.values[lost]
    with pytest.raises(PlaneConnectionError, match=r"lost with it are 1 of the 8 samples asked for: 's3'$"):
        client.get_samples(ids, "p", ["x"])
    kept = [sample_id for sample_id in ids if sample_id != "s3"]
    got = client.get_samples(kept, "p", ["x"])["x"]
    assert torch.equal(got, rows[[0, 1, 2, 4, 5, 6, 7]])


def test_a_row_of_a_large_place_does_not_keep_the_memory_of_the_place() -> None:
    plane = ChunkPlane()
    client = plane.client()
    client.register_partition("p", ["x"], 0, ["t"])
    rows = torch.zeros(16, keyed.CHUNK_BYTES, dtype=torch.uint8)
    client.put_samples([f"s{row}" for row in range(16)], "p", TensorDict({"x": rows}, batch_size=[16]))
    row = client.get_samples(["s7"], "p", ["x"])["x"]
    assert row.untyped_storage().nbytes() < 2 * keyed.CHUNK_BYTES
