"""What got slower between two runs, beyond the noise."""

import numpy as np
import pytest
from tests.simulated_run import series_of

from rlplane.cli.compare import Change, compare_runs, render_comparison
from rlplane.metrics.snapshot import CounterStat, MetricsSnapshot, SessionState, TimelinePoint


def run_of(latencies: np.ndarray, rate: float = 100.0, seed: int = 0, **totals: int) -> MetricsSnapshot:
    random = np.random.default_rng(seed)
    timeline = [
        TimelinePoint(float(at), 1.0, ops=round(max(0.0, random.normal(rate, rate / 20))))
        for at in range(100)
    ]
    return MetricsSnapshot(
        run_id=f"run-{seed}",
        state=SessionState.COMPLETE,
        seq=1,
        time_ns=0,
        monotonic_ns=0,
        metrics=[
            series_of("op_latency", latencies, op="put"),
            *(CounterStat(k, v) for k, v in totals.items()),
        ],
        timeline=timeline,
    )


def draw(seed: int, median_us: float = 500.0, number: int = 5000) -> np.ndarray:
    return np.random.default_rng(seed).lognormal(np.log(median_us * 1000), 0.4, number)


def change_of(before: MetricsSnapshot, after: MetricsSnapshot, what: str) -> Change:
    return next(change for change in compare_runs(before, after).changes if change.what == what)


def test_a_run_is_the_same_as_itself() -> None:
    snapshot = run_of(draw(1))
    assert {change.verdict for change in compare_runs(snapshot, snapshot).changes} == {"same"}
    assert "Nothing changed beyond the noise." in render_comparison(compare_runs(snapshot, snapshot))


@pytest.mark.parametrize("seed", range(10))
def test_another_draw_of_the_same_latency_is_noise(seed: int) -> None:
    comparison = compare_runs(run_of(draw(seed), seed=seed), run_of(draw(100 + seed), seed=100 + seed))
    assert {change.verdict for change in comparison.changes} <= {"same", "unknown"}


def test_an_operation_that_got_slower_is_found_with_its_amount() -> None:
    change = change_of(run_of(draw(1)), run_of(draw(2, 650)), "latency of put, p50")
    assert change.verdict == "worse"
    assert change.change == pytest.approx(0.3, abs=0.05)
    text = render_comparison(compare_runs(run_of(draw(1)), run_of(draw(2, 650))))
    assert "Worse beyond the noise:" in text and "latency of put, p50: " in text


def test_an_operation_that_got_faster_is_better() -> None:
    assert change_of(run_of(draw(1)), run_of(draw(2, 350)), "latency of put, p50").verdict == "better"


def test_less_than_five_percent_is_not_worth_a_word_however_sure() -> None:
    before, after = run_of(draw(1, 500, 400_000)), run_of(draw(2, 515, 400_000))
    assert change_of(before, after, "latency of put, p50").verdict == "same"


def test_the_same_change_in_too_few_operations_cannot_be_told() -> None:
    before, after = run_of(draw(1, number=20)), run_of(draw(2, 650, number=20))
    assert change_of(before, after, "latency of put, p50").verdict == "unknown"
    assert change_of(
        run_of(draw(1, number=500)), run_of(draw(2, number=500)), "latency of put, p99"
    ).verdict == ("unknown")


def test_a_tail_that_grew_is_found_though_the_median_stayed() -> None:
    values = draw(2)
    values[:150] *= 20
    before, after = run_of(draw(1)), run_of(values)
    assert change_of(before, after, "latency of put, p99").verdict == "worse"
    assert change_of(before, after, "latency of put, p50").verdict == "same"


def test_a_rate_that_fell_is_worse_and_one_that_varies_more_than_that_is_not() -> None:
    assert (
        change_of(run_of(draw(1)), run_of(draw(1), rate=70, seed=1), "operations per second").verdict
        == "worse"
    )
    wild = run_of(draw(1))
    for at, point in enumerate(wild.timeline):
        point.ops = 200 if at % 50 < 25 else 10
    assert change_of(wild, run_of(draw(1), rate=95), "operations per second").verdict == "same"


def test_a_larger_share_of_failures_is_worse() -> None:
    before, after = run_of(draw(1), ops=1000), run_of(draw(1), ops=1000, op_failures=30)
    change = change_of(before, after, "operations that failed")
    assert (change.before, change.after, change.verdict) == (0.0, 0.03, "worse")
    assert "operations that failed: 0% → 3%" in render_comparison(compare_runs(before, after))


def test_a_run_that_is_ten_times_longer_and_fails_ten_times_as_often_is_the_same() -> None:
    before, after = run_of(draw(1), ops=1000, op_failures=5), run_of(draw(1), ops=10_000, op_failures=50)
    change = change_of(before, after, "operations that failed")
    assert change.verdict == "same" and change.change == pytest.approx(0.0)


def test_one_failure_more_is_chance() -> None:
    before, after = run_of(draw(1), ops=1000, op_failures=5), run_of(draw(1), ops=1000, op_failures=6)
    assert change_of(before, after, "operations that failed").verdict == "same"


def test_what_got_worse_comes_first() -> None:
    changes = compare_runs(run_of(draw(1)), run_of(draw(2, 650), rate=150, seed=3)).changes
    verdicts = [change.verdict for change in changes]
    assert verdicts == sorted(verdicts, key=["worse", "better", "same", "unknown"].index)
    assert verdicts[0] == "worse" and "better" in verdicts
