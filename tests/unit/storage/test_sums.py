"""Checksums of rows, in storages that can look into a block and in those that bytes travel to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorData, NonTensorStack, TensorDict
from tests.unit.storage.chunk_stores import MemoryChunks

from rlplane.storage.chunks import ChunkedStorage
from rlplane.storage.layout import encode_columns
from rlplane.storage.leases import ReadLease
from rlplane.storage.memory import MemoryStore
from rlplane.storage.places import FieldRows, Layout, Located, Place
from rlplane.storage.sums import CheckCounts, RowChecks, with_sums

KEY = ("p", "f")


class Written:
    """One column in a storage, its rows with sums."""

    def __init__(self, value: Any, count: int, *, in_chunks: bool) -> None:
        self._chunks = MemoryChunks()
        self._storage: Any = ChunkedStorage(self._chunks) if in_chunks else MemoryStore(1 << 30)
        self.ids = [f"s{row}" for row in range(count)]
        (column,) = encode_columns(
            TensorDict({"f": value}, batch_size=[]),
            count,
            {},
            allow_pickle=False,
            offsets_in_block=self._storage.keeps_offsets,
        )
        column = with_sums(column, self.ids)
        self.layout = column.layout
        self._place = Place(7, column.nbytes)
        self._storage.write(self._place, [column], 0.0)

    def held(self) -> Any:
        """The bytes, to be changed."""
        if isinstance(self._storage, MemoryStore):
            (buffer,) = self._storage._buffers.values()
            return buffer.numpy()
        (chunk,) = self._chunks.values.values()
        return chunk

    def check(
        self, positions: Sequence[int], ids: Sequence[str], *, layout: Layout | None = None
    ) -> CheckCounts:
        """What a reader finds that was sent to these rows for these samples."""
        rows = FieldRows(
            len(positions),
            blocks=np.zeros(len(positions), np.int64).tobytes(),
            positions=np.array(positions, np.int32).tobytes(),
        )
        located = Located(1, [self._place], {0: (0, 0, layout or self.layout)}, [rows])
        checks = RowChecks()
        checks.check("p", ids, ["f"], located, self._storage.open(located, ReadLease(lambda: None)).read)
        return checks.take()


def stack(rows: Sequence[Any]) -> NonTensorStack:
    return NonTensorStack(*[NonTensorData(row, batch_size=[]) for row in rows])


IMAGE = torch.arange(40.0).reshape(8, 5)
COLUMNS = {
    "dense": torch.arange(12).reshape(3, 4),
    "jagged": torch.nested.nested_tensor([torch.ones(n + 1) for n in range(3)], layout=torch.jagged),
    "ragged": torch.nested.nested_tensor([torch.ones(n + 1, 3 - n) for n in range(3)]),
    "objects": stack(["a", ["b", 1], {"c": None}]),
    "trees": stack([{"image": IMAGE, "n": n} for n in range(3)]),
}


@pytest.fixture(params=[False, True], ids=["memory", "chunks"])
def in_chunks(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.mark.parametrize("kind", COLUMNS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_whichever_byte_of_a_row_changes_it_is_noticed(kind: str, data: st.DataObject) -> None:
    written = Written(COLUMNS[kind], 3, in_chunks=data.draw(st.booleans()))
    assert written.check([0, 1, 2], written.ids)[:3] == ({KEY: 3}, {KEY: 0}, {KEY: 0})
    at = data.draw(st.integers(0, written.layout.values_nbytes - 1))
    written.held()[at] ^= data.draw(st.integers(1, 255))
    assert written.check([0, 1, 2], written.ids).mismatched[KEY] == rows_with_byte(kind, at)


def rows_with_byte(kind: str, at: int) -> int:
    """How many rows have the byte: all have the shared image, and none the padding behind a tensor."""
    if kind == "trees" and at < 192:
        return 3 if at < IMAGE.nbytes else 0
    if kind == "ragged" and at < 192:
        return int(at % 64 < [12, 16, 12][at // 64])
    return 1


def test_a_row_of_another_sample_is_not_taken_for_the_right_one(in_chunks: bool) -> None:
    written = Written(torch.zeros(3, 4), 3, in_chunks=in_chunks)  # all rows have the same bytes
    found = written.check([0, 2, 1], written.ids)
    assert found.mismatched[KEY] == 2
    assert [(m.field, m.sample_id) for m in found.mismatches] == [("f", "s1")]


def test_rows_without_sums_and_with_too_few_are_unchecked(in_chunks: bool) -> None:
    import msgspec

    written = Written(COLUMNS["dense"], 3, in_chunks=in_chunks)
    for sums in (None, b"", b"1234"):
        layout = msgspec.structs.replace(written.layout, sums=sums)
        assert written.check([0, 1], ["s0", "s1"], layout=layout)[:3] == ({KEY: 0}, {KEY: 2}, {KEY: 0})


def test_what_makes_no_sense_is_left_to_the_read(in_chunks: bool) -> None:
    written = Written(COLUMNS["dense"], 3, in_chunks=in_chunks)
    assert written.check([0, 1], ["s0"])[:3] == ({KEY: 0}, {KEY: 1}, {KEY: 0})
