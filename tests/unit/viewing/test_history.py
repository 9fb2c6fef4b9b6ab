"""The bounded past of a run."""

import pytest
from tests.simulated_run import SimulatedRun

from rlplane.metrics.snapshot import SessionState
from rlplane.viewing.history import ALL_OPS, History


def test_what_happened_before_the_viewer_came_is_taken_from_the_timeline() -> None:
    run = SimulatedRun()
    for _ in range(20):
        snapshot = run.step()
    history = History()
    assert history.add(snapshot) is None
    assert len(history.points) == 20
    assert history.points[-1].time_s == pytest.approx(20)
    assert history.points[-1].latency == {}
    assert history.points[-1].latency_mean == pytest.approx(450_000, rel=0.05)


def test_a_point_has_the_rates_and_percentiles_of_its_own_seconds() -> None:
    run = SimulatedRun()
    history = History()
    history.add(run.step())
    before = run.step()
    history.add(before)
    after = run.step(2.0)
    point = history.add(after)
    assert point is not None
    assert point.seconds == pytest.approx(2.0)
    assert point.ops == pytest.approx((after.total("ops") - before.total("ops")) / 2)
    assert point.written == pytest.approx(
        (after.total("samples_written") - before.total("samples_written")) / 2
    )
    p50, p90, p99 = point.latency["put"]
    assert p50 is not None and p90 is not None and p99 is not None
    assert p50 == pytest.approx(640_000, rel=0.5)
    assert p50 < p90 <= p99
    assert ALL_OPS in point.latency


def test_snapshots_that_come_faster_than_the_interval_are_passed_over() -> None:
    run, history = SimulatedRun(), History(interval_s=1.0)
    history.add(run.step())
    assert history.add(run.step(0.25)) is None
    assert history.add(run.step(0.25)) is None
    assert history.add(run.step(0.5)) is not None


def test_the_last_snapshot_of_a_run_always_makes_a_point() -> None:
    run, history = SimulatedRun(), History(interval_s=1.0)
    history.add(run.step())
    assert history.add(run.step(0.1, SessionState.COMPLETE)) is not None


def test_old_points_are_merged_and_nothing_is_lost_from_the_totals() -> None:
    run, history = SimulatedRun(), History(max_points=32)
    first = run.step()
    history.add(first)
    for _ in range(300):
        last = run.step()
        history.add(last)
    assert len(history.points) <= 32
    measured = [point for point in history.points if point.time_s > 1.5]
    written = sum(point.written * point.seconds for point in measured)
    assert written == pytest.approx(last.total("samples_written") - first.total("samples_written"), rel=0.01)
    assert history.points[-1].seconds == pytest.approx(1.0)
    assert history.points[0].seconds > 8
    times = [point.time_s for point in history.points]
    assert times == sorted(times)


def test_another_run_starts_over() -> None:
    history = History()
    first, second = SimulatedRun(run_id="one"), SimulatedRun(run_id="two")
    for _ in range(5):
        history.add(first.step())
    history.add(second.step())
    assert [point.time_s for point in history.points] == [pytest.approx(1.0)]


def test_an_aggregator_that_restarted_under_the_same_name_starts_over() -> None:
    history = History()
    run = SimulatedRun()
    for _ in range(5):
        history.add(run.step())
    history.add(SimulatedRun(started_ns=run.started_ns + 10**9).step())
    assert len(history.points) == 1


def test_columns_are_cut_to_the_span_and_to_the_number_asked_for() -> None:
    run, history = SimulatedRun(), History()
    for _ in range(100):
        history.add(run.step())
    columns = history.columns(start_s=50, end_s=90, max_points=15)
    assert 2 < len(columns["time_s"]) <= 15
    assert min(columns["time_s"]) >= 50 and max(columns["time_s"]) <= 90
    lengths = {len(column) for name, column in columns.items() if name != "latency"}
    assert lengths == {len(columns["time_s"])}
    assert all(len(column) in lengths for columns in columns["latency"].values() for column in columns)


def test_a_bound_too_small_to_merge_is_refused() -> None:
    with pytest.raises(ValueError, match="max_points is 3"):
        History(max_points=3)
