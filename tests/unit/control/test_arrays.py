"""Columns that grow keep what they have, and are not copied where they need not be."""

from __future__ import annotations

import pickle
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.control import at_once

from rlplane.control.arrays import filled, grown
from rlplane.control.requests import Put
from rlplane.control.rules import PartitionSpec
from rlplane.control.samples import rows_by_birth
from rlplane.control.state import ControlState


@pytest.mark.parametrize(
    ("array", "fill"),
    [
        (np.arange(5), -1),
        (np.array([True, False]), False),
        (np.array([1.5, 2.5]), np.nan),
        (np.array(["a", {"b": 1}, None], object), None),
        (np.arange(10)[3:7], 0),
        (pickle.loads(pickle.dumps(np.arange(4), protocol=5)), 9),
        (np.empty(0, np.int64), 1),
    ],
)
def test_a_grown_array_has_what_it_had_and_the_fill(array: Any, fill: Any) -> None:
    before = array.tolist()
    bigger = grown(array, len(before) + 100, fill)
    assert bigger[: len(before)].tolist() == before
    assert len(bigger) == len(before) + 100
    np.testing.assert_array_equal(bigger[len(before) :], np.full(100, fill, bigger.dtype))


def test_the_objects_of_a_grown_array_are_not_referred_to_twice() -> None:
    thing = object()
    array = np.full(1000, thing, object)
    before = sys.getrefcount(thing)
    bigger = grown(array, 2000, None)
    assert bigger is array and sys.getrefcount(thing) == before


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 300)), max_size=30))
def test_rows_are_never_given_out_twice_however_the_table_grows(steps: list[tuple[bool, int]]) -> None:
    state = ControlState()
    state.register(PartitionSpec.checked("p", ["x"], 0, ["t"]))
    table = state.partitions["p"].table
    live: list[str] = []
    for number, (is_put, count) in enumerate(steps):
        if is_put:
            ids = [f"{number}-{each}" for each in range(count)]
            state.put(Put("p", ids, {"x": number}, [{"id": each} for each in ids]))
            live += ids
        else:
            at_once.clear(state, "p", live[:count])
            del live[:count]
        rows = [table.rows[each] for each in live]
        assert len(set(rows)) == len(rows) and all(row < table.size for row in rows)
        assert table.ids[rows].tolist() == live
        assert [tags["id"] for tags in table.tags[rows]] == live
        assert len(table.rows) == len(live)
        assert rows_by_birth(table.serial).tolist() == table.live_rows(None).tolist() == rows


@pytest.mark.parametrize("fill", [0, -1])
@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.bool_, np.float64])
def test_a_long_column_of_numbers_grows_where_it_is(dtype: type[Any], fill: int) -> None:
    array = filled(20_000, dtype, fill)
    array[:] = 1
    where = array.ctypes.data
    for size in (20_001, 50_000, 300_000):
        before = len(array)
        array = grown(array, size, fill)
        assert array.ctypes.data == where and len(array) == size
        assert (array[before:] == dtype(fill)).all() and (array[:20_000] == 1).all()
    again = grown(pickle.loads(pickle.dumps(array, protocol=5)), 400_000, fill)
    np.testing.assert_array_equal(again[:300_000], array)
    assert (again[300_000:] == dtype(fill)).all()


@pytest.mark.skipif(
    not Path("/proc/self/smaps").exists(), reason="the kernel does not say how memory is mapped"
)
def test_a_long_column_is_not_in_large_pages() -> None:
    array = filled(20_000, np.int64, 0)
    where = array.ctypes.data
    mappings = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
    (mapping,) = [each for each in mappings[1:] if _holds(each, where)]
    assert " nh" in mapping.split("VmFlags:")[1] or "THPeligible:    0" in mapping


def _holds(mapping: str, address: int) -> bool:
    start, end = (int(each, 16) for each in mapping.split()[0].split("-"))
    return start <= address < end
