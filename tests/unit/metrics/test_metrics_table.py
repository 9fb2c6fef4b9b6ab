"""Samples in flight: every step counts once, in whatever order the steps arrive."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlplane.metrics.events import SampleEvent
from rlplane.metrics.metrics_table import LifecycleStep, MetricsTable


def life(kind: str, *ids: str, at: int = 100, **fields: object) -> SampleEvent:
    if kind == "claimed":
        fields.setdefault("task", "train")
    return SampleEvent(kind=kind, partition_id="p", sample_ids=list(ids), time_ns=at, **fields)  # type: ignore[arg-type]


class Watched:
    """A table that counts its steps."""

    def __init__(self, **options: int) -> None:
        self.table = MetricsTable(**options)
        self.steps: Counter[str] = Counter()
        self.waits: list[int] = []
        for kind in ("written", "claimed", "reclaimed", "cleared", "failed"):
            self.table.add_trigger(kind, self.note)

    def note(self, step: LifecycleStep) -> None:
        self.steps[step.kind] += len(step.rows)
        if step.kind in ("claimed", "cleared"):
            self.waits += [t - (row.written_ns or 0) for t, row in zip(step.times_ns, step.rows, strict=True)]

    def apply(self, *records: SampleEvent, worker: str = "w") -> None:
        for record in records:
            self.table.apply(record, worker)


def test_a_life_in_order_is_counted_step_by_step() -> None:
    watched = Watched()
    watched.apply(life("written", "a", "b", n_bytes=11), life("claimed", "a", at=150))
    assert watched.table.n_in_flight == 2
    assert watched.table.held("p") == (2, 11)
    watched.apply(life("cleared", "a", at=300))
    assert watched.steps == {"written": 2, "claimed": 1, "cleared": 1}
    assert watched.waits == [50, 200]
    assert watched.table.held("p") == (1, 5)
    assert [row.sample_id for row in watched.table.in_flight()] == ["b"]


STEPS = [
    life("written", "a", at=100, n_bytes=8, weight_versions=[3]),
    life("claimed", "a", at=150),
    life("claimed", "a", at=160, task="ref"),
    life("failed", "a", at=170),
    life("cleared", "a", at=200),
]


@pytest.mark.parametrize("order", list(itertools.permutations(range(5))))
def test_the_steps_of_a_life_count_the_same_in_any_order_of_arrival(order: tuple[int, ...]) -> None:
    watched = Watched()
    watched.apply(*(STEPS[index] for index in order))
    assert watched.steps == {"written": 1, "claimed": 2, "failed": 1, "cleared": 1}
    assert sorted(watched.waits) == [50, 60, 100]
    assert watched.table.n_in_flight == 0
    assert watched.table.held("p") == (0, 0)


@pytest.mark.parametrize("failed_at", ["before the clear", "after the clear"])
def test_a_failure_counts_once_whether_before_or_after_the_clear(failed_at: str) -> None:
    watched = Watched()
    watched.apply(life("written", "a"))
    if failed_at == "before the clear":
        watched.apply(life("failed", "a", at=110), life("failed", "a", at=120), life("cleared", "a", at=200))
    else:
        watched.apply(life("cleared", "a", at=200), life("failed", "a", at=210))
    watched.apply(life("failed", "a", at=250))
    assert watched.steps["failed"] == 1
    assert watched.steps["cleared"] == 1


def test_duplicates_count_nothing_again() -> None:
    watched = Watched()
    records = [life("written", "a", n_bytes=4), life("claimed", "a", at=120), life("cleared", "a", at=130)]
    watched.apply(*records[:2], *records[:2], *records, *records)
    assert watched.steps == {"written": 1, "claimed": 1, "cleared": 1}
    assert watched.table.n_in_flight == 0


def test_a_second_claim_by_the_same_task_is_a_reclaim() -> None:
    watched = Watched()
    watched.apply(life("written", "a"), life("claimed", "a", at=120))
    watched.apply(life("claimed", "a", at=180), worker="other")
    assert watched.steps == {"written": 1, "claimed": 1, "reclaimed": 1}


def test_more_columns_of_a_sample_grow_it_and_are_no_second_sample() -> None:
    watched = Watched()
    watched.apply(life("written", "a", n_bytes=10), life("written", "a", at=140, n_bytes=5))
    assert watched.steps["written"] == 1
    assert watched.table.held("p") == (1, 15)


def test_an_id_that_is_used_again_is_a_new_sample() -> None:
    watched = Watched()
    watched.apply(life("written", "a"), life("cleared", "a", at=200))
    watched.apply(life("written", "a", at=300))
    assert watched.steps["written"] == 2
    assert watched.table.n_in_flight == 1
    watched.apply(life("cleared", "a", at=250))
    assert watched.table.n_in_flight == 1, "a clear of the former life is late, not the new one's"
    watched.apply(life("cleared", "a", at=400))
    assert watched.table.n_in_flight == 0


def test_a_second_life_whose_clear_arrives_before_its_write_ends_too() -> None:
    watched = Watched()
    watched.apply(life("written", "a"), life("cleared", "a", at=200))
    watched.apply(life("cleared", "a", at=400), life("written", "a", at=300))
    assert watched.steps == {"written": 2, "cleared": 2}
    assert watched.table.n_in_flight == 0


def test_a_late_column_of_a_cleared_sample_does_not_bring_it_back() -> None:
    watched = Watched()
    watched.apply(life("written", "a"), life("cleared", "a", at=200), life("written", "a", at=150))
    assert watched.table.n_in_flight == 0
    assert watched.steps["written"] == 1


def test_clearing_everything_takes_what_was_there_at_that_time() -> None:
    watched = Watched()
    watched.apply(life("written", "a", "b"), life("written", "c", at=300))
    watched.apply(life("cleared", at=200, everything=True))
    assert [row.sample_id for row in watched.table.in_flight()] == ["c"]


def test_rows_are_bounded_and_the_rest_is_counted() -> None:
    watched = Watched(max_rows=2)
    watched.apply(life("written", "a", "b", "c", "d"))
    assert watched.table.n_in_flight == 2
    assert watched.table.n_untracked == 2
    watched.apply(life("cleared", "a", "b", at=200), life("written", "e", at=300))
    assert watched.table.n_in_flight == 1


def test_finished_rows_are_remembered_only_so_far() -> None:
    watched = Watched(max_finished=2)
    watched.apply(life("written", "a", "b", "c"), life("cleared", "a", "b", "c", at=200))
    assert [row.sample_id for row in watched.table.last_cleared(5)] == ["c", "b"]


def test_the_oldest_come_first_whatever_order_they_arrived_in() -> None:
    watched = Watched()
    for at in (500, 100, 300, 200, 400):
        watched.apply(life("written", f"s{at}", at=at))
    assert [row.written_ns for row in watched.table.oldest(3)] == [100, 200, 300]


@given(
    st.lists(
        st.tuples(st.sampled_from(["written", "claimed", "cleared", "failed"]), st.integers(0, 3)),
        max_size=60,
    )
)
def test_what_is_held_is_always_what_was_written_and_not_cleared(events: list[tuple[str, int]]) -> None:
    watched = Watched()
    for at, (kind, sample) in enumerate(events, 1):
        watched.apply(life(kind, f"s{sample}", at=at, n_bytes=10 if kind == "written" else 0))
        rows = list(watched.table.in_flight())
        assert len(rows) == watched.table.n_in_flight == watched.table.held("p")[0]
        assert sum(row.n_bytes for row in rows) == watched.table.held("p")[1]
    assert watched.steps["written"] - watched.steps["cleared"] == watched.table.n_in_flight
    assert watched.steps["failed"] <= watched.steps["written"]


# Triggers.


def test_a_failing_trigger_is_counted_and_stops_nothing() -> None:
    watched = Watched()

    def broken(step: LifecycleStep) -> None:
        raise RuntimeError("broken")

    watched.table.add_trigger("written", broken)
    after: list[LifecycleStep] = []
    watched.table.add_trigger("written", after.append)
    watched.apply(life("written", "a"), life("written", "b"))
    assert watched.table.n_trigger_failures == 2
    assert len(after) == 2
    assert watched.table.n_in_flight == 2


async def test_async_triggers_are_pending_until_they_end() -> None:
    table = MetricsTable()
    gate = asyncio.Event()

    async def wait(step: LifecycleStep) -> None:
        await gate.wait()

    table.add_trigger("written", wait)
    table.apply(life("written", "a"), "w")
    table.apply(life("written", "b"), "w")
    assert table.in_flight_tasks_count == 2
    assert await table.drain_tasks(0.01) == 2
    gate.set()
    assert await table.drain_tasks(10.0) == 0
    assert table.n_trigger_failures == 0


async def test_pending_tasks_can_be_cancelled_and_are_no_failures() -> None:
    table = MetricsTable()

    async def for_ever(step: LifecycleStep) -> None:
        await asyncio.Event().wait()

    table.add_trigger("written", for_ever)
    table.apply(life("written", "a"), "w")
    assert table.cancel_all_tasks() == 1
    assert await table.drain_tasks(10.0) == 0
    assert table.n_trigger_failures == 0


async def test_an_async_trigger_that_raises_is_counted() -> None:
    table = MetricsTable()

    async def broken(step: LifecycleStep) -> None:
        raise RuntimeError("broken")

    table.add_trigger("written", broken)
    table.apply(life("written", "a"), "w")
    await table.drain_tasks(10.0)
    assert table.n_trigger_failures == 1


def test_a_put_that_returns_after_its_samples_were_cleared_leaves_none_in_flight() -> None:
    # Another process claims and clears between the commit and the return of the put.
    watched = Watched()
    watched.apply(life("cleared", "a", at=200), life("written", "a", at=210, start_ns=150))
    assert watched.table.n_in_flight == 0
    assert watched.steps == {"written": 1, "cleared": 1}
    watched.apply(life("written", "a", at=310, start_ns=300))
    assert watched.table.n_in_flight == 1


def test_a_write_that_arrives_after_everything_was_cleared_is_over() -> None:
    watched = Watched()
    watched.apply(life("cleared", at=200, everything=True))
    watched.apply(life("written", "a", at=190, start_ns=180), life("written", "b", at=400, start_ns=390))
    assert [row.sample_id for row in watched.table.in_flight()] == ["b"]
    assert watched.steps == {"written": 2, "cleared": 1}
