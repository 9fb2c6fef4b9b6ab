"""Very many rows are sorted some at a time, and come in the order in which one sort would have put them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlplane.control import sorted_rows
from rlplane.control.sorted_rows import SortedRows


@given(keys=st.lists(st.integers(0, 9), max_size=60), counts=st.lists(st.integers(0, 9), max_size=20))
def test_rows_come_in_the_order_of_a_stable_sort(keys: list[int], counts: list[int]) -> None:
    numbers, rows = np.array(keys, np.float64), np.arange(len(keys))[::-1] * 3
    wanted = rows[np.argsort(numbers, kind="stable")].tolist()
    found: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sorted_rows, "_SORTED_AT_ONCE", 7)
        in_order = SortedRows(numbers, rows)
        if len(keys) % 2:
            in_order.sort_some()
        for count in [*counts, len(keys)]:
            some = in_order.next_rows(count).tolist()
            assert len(some) == min(count, len(keys) - len(found))
            found += some
    assert found == wanted


def test_no_more_is_sorted_at_once_than_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sorted_rows, "_SORTED_AT_ONCE", 10)
    in_order = SortedRows(np.random.default_rng(0).random(35), np.arange(35))
    steps = 1
    while not in_order.sort_some():
        steps += 1
    assert steps == 4
