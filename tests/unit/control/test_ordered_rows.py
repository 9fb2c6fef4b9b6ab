"""The queue of samples in another order, against a list that is sorted anew every time."""

from __future__ import annotations

import math
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.control.test_queues import Table, rows_in

from rlplane.control import ordered_rows
from rlplane.control.ordered_rows import KnownKeys, LongFront, OrderedRowQueue
from rlplane.control.policies import Order

ROWS = 24


@pytest.fixture(autouse=True)
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """So short that few rows make several of them."""
    for name, length in {
        "_FRONT": 2,
        "_PIECE": 2,
        "_LARGEST_PIECE": 4,
        "_LONGEST_MERGED": 6,
        "_LONGEST_SORTED": 4,
        "_SORTED_AHEAD": 1,
        "_DISCARDED_AT_ONCE": 2,
    }.items():
        monkeypatch.setattr(ordered_rows, name, length)


class SortedList:
    """The same queue: a key and a number for each row, sorted whenever somebody asks."""

    def __init__(self, order: Order, table: Table) -> None:
        self.order, self.table = order, table
        self.places: dict[int, tuple[Any, int]] = {}
        self.count = 0

    def key(self, row: int) -> Any:
        if self.order.kind == "lifo":
            return 0
        return self.order.keys([self.table.ids[row]], [self.table.tags[row]])[0]

    def offer(self, rows: list[int]) -> None:
        for row in rows:
            if row in self.places:
                self.places[row] = (self.key(row), self.places[row][1])
            else:
                self.count += 1
                self.places[row] = (self.key(row), -self.count if self.order.kind == "lifo" else self.count)

    def restore(self, rows: list[int]) -> None:
        for row in reversed(rows):
            self.count += 1
            self.places[row] = (self.key(row), -self.count)

    def discard(self, rows: list[int]) -> None:
        for row in rows:
            self.places.pop(row, None)

    def ordered(self, match: set[int] | None) -> list[int]:
        rows = sorted(self.places, key=self.places.__getitem__)
        return [row for row in rows if match is None or row in match]

    def pop(self, count: int, match: set[int] | None) -> list[int]:
        taken = self.ordered(match)[:count]
        self.discard(taken)
        return taken


some_rows = st.lists(st.integers(0, ROWS - 1), unique=True, max_size=9)
values = st.sampled_from([0, 1, 1.5, -2, True, None, "three", math.nan, 1e300])
matches = st.none() | st.sets(st.integers(0, ROWS - 1))
steps = st.lists(
    st.one_of(
        st.tuples(st.just("offer"), some_rows, st.lists(values, min_size=9, max_size=9)),
        st.tuples(st.just("offer"), some_rows, st.lists(st.integers(0, 5), min_size=9, max_size=9)),
        st.tuples(st.just("restore"), some_rows),
        st.tuples(st.just("discard"), some_rows),
        st.tuples(st.just("pop"), st.integers(0, 9), matches),
        st.tuples(st.just("look"), st.integers(1, 9), matches),
        st.tuples(st.just("sort"), st.integers(1, 20)),
        st.tuples(st.just("dump")),
    ),
    max_size=30,
)


@pytest.mark.parametrize("order", ["lifo", "priority:v", "random:7", "oldest", "freshest"])
@settings(max_examples=80, deadline=None)
@given(steps=steps)
def test_it_hands_out_what_a_sorted_list_would(order: str, steps: list[Any]) -> None:
    table = Table(ROWS)
    table.bear(list(range(ROWS)))
    table.ids[:] = [f"s{row}" for row in range(ROWS)]
    by_version = order in ("oldest", "freshest")
    how = Order.by_version("v", freshest=order == "freshest") if by_version else Order(order)
    table.tags[:] = [{} for _ in range(ROWS)]
    keys = None if order == "lifo" else KnownKeys(table, how)
    queue, model = OrderedRowQueue(table, keys), SortedList(how, table)
    for kind, *arguments in steps:
        if kind == "offer":
            rows, tags = arguments
            queue.withdraw(np.array(rows, np.int64))
            for row, value in zip(rows, tags, strict=False):
                table.tags[row] = {"v": value}
            if keys is not None:
                keys.forget(np.array(rows, np.int64))
            queue.readmit(np.array(rows, np.int64))
            queue.offer(np.array(rows, np.int64))
            model.offer(rows)
        elif kind == "restore":
            rows = [row for row in arguments[0] if row not in model.places]
            queue.restore(np.array(rows, np.int64))
            model.restore(rows)
        elif kind == "discard":
            queue.discard(np.array(arguments[0], np.int64))
            model.discard(arguments[0])
        elif kind == "pop":
            count, match = arguments
            taken = queue.pop(count, None if match is None else rows_in(match))
            assert taken.tolist() == model.pop(count, match)
        elif kind == "sort":
            look = LongFront(queue, arguments[0])
            while not look(lambda: True):
                pass
            assert len(queue._front.rows) >= min(arguments[0], len(model.places))
        elif kind == "look":
            enough, match = arguments
            there = model.ordered(match)
            pieces = list(queue.pieces(None if match is None else rows_in(match)))
            assert [row for units in pieces for row in units.rows.tolist()] == there
            assert match is None or queue.among(np.array(list(match), np.int64)).tolist() == there
            counted = queue.count(enough, None if match is None else rows_in(match), None)
            assert min(counted, enough) == min(len(there), enough)
        else:
            queue = pickle.loads(pickle.dumps(queue))
            queue._table = table
            if keys is not None:
                keys = queue._known_keys
                assert isinstance(keys, KnownKeys)
                keys._table = table
        assert queue.ready == len(model.places)
        assert set(model.places) <= set(queue.candidates()[0].tolist())


def test_numbers_beyond_64_bits_come_first_or_last() -> None:
    tags: list[dict[str, Any]] = [{"v": 10**400}, {"v": 3}, {"v": -(10**400)}, {"v": True}, {"v": "3"}]
    keys = Order("priority:v").keys(["a", "b", "c", "d", "e"], tags)
    assert keys.tolist() == [-math.inf, -3, math.inf, -1, math.inf]


def test_rows_that_leave_by_the_back_door_are_forgotten() -> None:
    table = Table(64)
    queue = OrderedRowQueue(table, KnownKeys(table, Order("random:1")))
    rows = np.arange(64)
    table.ids[:] = [f"s{row}" for row in range(64)]
    table.tags[:] = [{} for _ in range(64)]
    for _ in range(500):
        table.bear(rows.tolist())
        queue.offer(rows)
        queue.discard(rows)
    assert queue.ready == 0 and queue._held <= 4096 + 64


def test_a_row_is_looked_at_a_few_times_however_many_are_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ordered_rows, "_FRONT", 8192)
    monkeypatch.setattr(ordered_rows, "_LONGEST_MERGED", 1 << 18)
    monkeypatch.setattr(ordered_rows, "_LONGEST_SORTED", 1 << 16)
    table = Table(200_000)
    queue = OrderedRowQueue(table, KnownKeys(table, Order("priority:v")))
    chosen = np.random.default_rng(5).permutation(200_000)
    table.tags[:] = [{"v": int(value)} for value in chosen]
    for start in range(0, 200_000, 1000):
        queue.offer(np.arange(start, start + 1000))
    assert len(queue._runs) < 20
    moved = 0
    merged = ordered_rows.Run.merged

    def counted(runs: Any) -> Any:
        nonlocal moved
        moved += sum(len(run.rows) for run in runs)
        return merged(runs)

    monkeypatch.setattr(ordered_rows.Run, "merged", counted)
    taken = [row for _ in range(100) for row in queue.pop(256, None).tolist()]
    assert chosen[taken].tolist() == list(range(199_999, 199_999 - 25_600, -1))
    assert moved < 8 * 25_600
