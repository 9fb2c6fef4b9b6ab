"""The queues of ready samples, against lists that do the obvious thing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tests.unit.control.list_queues import ListOfGroups, ListOfRows, PrioritisedGroups

from rlplane.control.groups import GroupQueue
from rlplane.control.ordered_rows import KnownKeys, OrderedRowQueue
from rlplane.control.policies import Order
from rlplane.control.queues import Match, ReadyQueue, RowQueue

ROWS = 12


class Table:
    """What a queue sees of a partition."""

    def __init__(self, size: int = ROWS) -> None:
        self.size = size
        self.serial = np.full(size, -1, np.int64)
        self.ids: np.ndarray[Any, Any] = np.full(size, None, object)
        self.tags: np.ndarray[Any, Any] = np.full(size, None, object)
        self.groups: np.ndarray[Any, Any] = np.full(size, None, object)
        self._next_serial = 0

    def bear(self, rows: list[int], groups: list[str] | None = None) -> None:
        self.serial[rows] = range(self._next_serial, self._next_serial + len(rows))
        self._next_serial += len(rows)
        if groups:
            self.groups[rows] = groups


def rows_where(condition: Callable[[int], bool]) -> Match:
    return lambda rows: np.array([condition(row) for row in rows.tolist()], bool)


def rows_in(rows: set[int]) -> Match:
    return rows_where(rows.__contains__)


row_sets = st.lists(st.integers(0, ROWS - 1), unique=True, max_size=6)
conditions = st.none() | st.sets(st.integers(0, 2))


class _QueueMachine(RuleBasedStateMachine):
    """A row is absent, unclaimed (so it may be in the queue) or claimed, as in a partition."""

    queue: ReadyQueue
    model: Any

    def __init__(self) -> None:
        super().__init__()
        self.table = Table()
        self.claimed: list[int] = []
        self.tags = dict.fromkeys(range(ROWS), 0)
        self.groups: dict[int, str] = {}
        self.askers: dict[int, object] = {number: object() for number in range(3)}

    @rule(rows=row_sets, groups=st.lists(st.sampled_from("abc"), min_size=6, max_size=6))
    def write_new_samples(self, rows: list[int], groups: list[str]) -> None:
        new = [row for row in rows if self.table.serial[row] < 0]
        self.groups.update(zip(new, groups, strict=False))
        self.table.bear(new, [self.groups[row] for row in new])
        self.queue.offer(_array(new))
        self.model.offer(new, self.groups)

    @rule(rows=row_sets)
    def write_samples_again(self, rows: list[int]) -> None:
        ready = [row for row in rows if self.table.serial[row] >= 0 and row not in self.claimed]
        self.queue.offer(_array(ready))
        self.model.offer(ready, self.groups)

    @rule(rows=row_sets)
    def claim_through_another_queue(self, rows: list[int]) -> None:
        waiting = [row for row in rows if row in self.model.waiting()]
        self.queue.discard(_array(waiting))
        self.model.discard(waiting, self.groups)
        self.claimed += waiting

    @rule(rows=row_sets)
    def clear(self, rows: list[int]) -> None:
        live = [row for row in rows if self.table.serial[row] >= 0]
        self.queue.discard(_array(live))
        self.model.discard(live, self.groups)
        self.table.serial[live] = -1
        self.table.groups[live] = None
        self.claimed = [row for row in self.claimed if row not in live]

    @rule(data=st.data())
    def return_claims(self, data: st.DataObject) -> None:
        if self.claimed:
            rows = data.draw(st.lists(st.sampled_from(self.claimed), unique=True))
            self.queue.restore(_array(rows))
            self.model.restore(rows, self.groups)
            self.claimed = [row for row in self.claimed if row not in rows]

    @rule(row=st.integers(0, ROWS - 1), tag=st.integers(0, 2))
    def change_a_tag(self, row: int, tag: int) -> None:
        self.queue.withdraw(_array([row]))
        self.tags[row] = tag
        self.queue.readmit(_array([row]))

    @rule(count=st.integers(1, 8), tags=conditions)
    def take(self, count: int, tags: set[int] | None) -> None:
        match = self._matching(tags)
        taken = self.queue.pop(count, None if match is None else rows_in(match)).tolist()
        assert taken == self.model.take(count, match)
        self.claimed += taken

    @rule(rows=row_sets)
    def look_among(self, rows: list[int]) -> None:
        assert self.queue.among(_array(rows)).tolist() == [r for r in self.model.fitting(None) if r in rows]

    # One asker always asks with one condition, as a claim does; its answer may be a remembered one.
    @rule(asker=st.integers(0, 2), enough=st.integers(1, 8))
    def count(self, asker: int, enough: int) -> None:
        match = self._matching({asker, 2})
        assert match is not None
        where = rows_where(lambda row: self.tags[row] in {asker, 2})
        counted = self.queue.count(enough, where, self.askers[asker])
        assert min(counted, enough) == min(len(self.model.fitting(match)), enough)

    @invariant()
    def as_many_are_ready_as_can_be_taken(self) -> None:
        assert self.queue.ready == len(self.model.fitting(None))

    def _matching(self, tags: set[int] | None) -> set[int] | None:
        return None if tags is None else {row for row, tag in self.tags.items() if tag in tags}


class RowQueueMachine(_QueueMachine):
    def __init__(self) -> None:
        super().__init__()
        self.queue: RowQueue = RowQueue(self.table)
        self.model = ListOfRows()

    @rule(rows=row_sets)
    def take_among(self, rows: list[int]) -> None:
        taken = self.queue.among(_array(rows))
        self.queue.take(taken)
        assert taken.tolist() == self.model.take(ROWS, set(rows))
        self.claimed += taken.tolist()

    @rule()
    def compact(self) -> None:
        if self.queue._chunks:
            self.queue._compact()
            assert self.queue._held == self.queue.ready

    @rule()
    def grow(self) -> None:
        self.queue.grow(len(self.queue._entry) + 1)


class PairQueueMachine(_QueueMachine):
    def __init__(self) -> None:
        super().__init__()
        self.queue = GroupQueue(self.table, 2)
        self.model = ListOfGroups(2)


class TripleQueueMachine(_QueueMachine):
    def __init__(self) -> None:
        super().__init__()
        self.queue = GroupQueue(self.table, 3)
        self.model = ListOfGroups(3)


class PriorityQueueMachine(_QueueMachine):
    """Pairs of which the one with the highest tag comes first."""

    def __init__(self) -> None:
        super().__init__()
        order = Order("priority:v")
        self.keys = KnownKeys(self.table, order)
        self.table.tags[:] = [{"v": 0}] * ROWS
        self.queue: GroupQueue = GroupQueue(self.table, 2, order=order, keys=self.keys)
        self.model = PrioritisedGroups(2, self.tags)

    @rule(row=st.integers(0, ROWS - 1), tag=st.integers(0, 2))
    def change_a_tag(self, row: int, tag: int) -> None:
        self.queue.withdraw(_array([row]))
        self.tags[row] = tag
        self.table.tags[row] = {"v": tag}
        self.keys.forget(_array([row]))
        self.queue.readmit(_array([row]))
        self.queue.move(_array([row]))

    @rule(count=st.integers(1, 12))
    def sort_ahead(self, count: int) -> None:
        assert isinstance(self.queue.line, OrderedRowQueue)
        self.queue.line.lengthen_front(count)


_settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestRowQueueIsAList = RowQueueMachine.TestCase
TestRowQueueIsAList.settings = _settings
TestPairsAreAListOfGroups = PairQueueMachine.TestCase
TestPairsAreAListOfGroups.settings = _settings
TestPairsInAnOrderAreASortedListOfGroups = PriorityQueueMachine.TestCase
TestPairsInAnOrderAreASortedListOfGroups.settings = _settings
TestTriplesAreAListOfGroups = TripleQueueMachine.TestCase
TestTriplesAreAListOfGroups.settings = _settings


def test_rows_that_leave_by_the_back_door_are_forgotten() -> None:
    table = Table(64)
    queue = RowQueue(table)
    for _ in range(1000):
        rows = np.arange(64)
        table.bear(rows.tolist())
        queue.offer(rows)
        queue.discard(rows[:60])
        queue.discard(rows[60:])
    assert queue.ready == 0
    assert queue._held <= 4096 + 64


def test_groups_that_leave_by_the_back_door_are_forgotten() -> None:
    table = Table(64)
    queue = GroupQueue(table, 4)
    for _ in range(2000):
        rows = np.arange(64)
        table.bear(rows.tolist(), [f"g{row // 4}" for row in range(64)])
        queue.offer(rows)
        queue.discard(rows)
    assert queue.ready == 0
    assert isinstance(queue.line, RowQueue)
    assert queue.line._held <= 4096 + 16
    assert not queue._gathering and (queue._whole.leader(rows) < 0).all()


def test_the_others_of_two_broken_groups_of_one_name_keep_their_order() -> None:
    table = Table()
    queue = GroupQueue(table, 2)
    for rows in ([0, 3, 4], [1]):
        table.bear(rows, ["a"] * len(rows))
        queue.offer(_array(rows))
    queue.discard(_array([0, 1]))
    assert queue.pop(2, None).tolist() == [3, 4]


def test_compaction_keeps_the_order_and_drops_doubles() -> None:
    table = Table(10_000)
    queue = RowQueue(table)
    rows = np.arange(10_000)
    table.bear(rows.tolist())
    queue.offer(rows)
    queue.discard(_array([7, 5]))
    queue.restore(_array([7, 5]))
    # Enough of them that the queue puts itself in order.
    queue.discard(rows[100:])
    assert queue._held == queue.ready == 100
    assert queue.pop(200, None).tolist() == [7, 5, *[row for row in range(100) if row not in (5, 7)]]


@pytest.mark.parametrize("where", [None, lambda row: row % 2 == 0])
def test_a_take_costs_what_it_takes_and_not_what_is_queued(
    where: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = Table(1_000_000)
    queue = RowQueue(table)
    rows = np.arange(1_000_000)
    table.serial[:] = rows
    queue.offer(rows)
    looked_at = 0
    valid = queue._valid

    def counted(some: Any, serials: Any) -> Any:
        nonlocal looked_at
        looked_at += len(some)
        return valid(some, serials)

    monkeypatch.setattr(queue, "_valid", counted)
    taken = queue.pop(64, None if where is None else rows_where(where))
    assert taken.tolist() == [row for row in range(200) if where is None or where(row)][:64]
    assert looked_at < 2000
    assert queue.ready == 1_000_000 - 64


def _array(rows: list[int]) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array(rows, np.int64)
