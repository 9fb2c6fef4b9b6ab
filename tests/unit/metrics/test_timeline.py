"""The run over time: bounded, and never losing an operation."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rlplane.metrics.snapshot import TimelinePoint
from rlplane.metrics.timeline import Timeline


@given(st.lists(st.tuples(st.floats(0.01, 5.0), st.integers(0, 100)), min_size=1, max_size=300))
def test_points_are_bounded_contiguous_and_complete(ticks: list[tuple[float, int]]) -> None:
    timeline = Timeline(limit=20)
    elapsed, ops = 0.0, 0
    for width, count in ticks:
        elapsed += width
        ops += count
        timeline.add(elapsed, TimelinePoint(elapsed, 0.0, ops=ops, samples_held=count))
        points = timeline.points()
        assert len(points) <= 20
        assert sum(point.ops for point in points) == ops
        assert abs(sum(point.seconds for point in points) - elapsed) < 1e-6
        assert points[-1].samples_held == count


def test_a_tick_without_time_adds_nothing() -> None:
    timeline = Timeline()
    timeline.add(1.0, TimelinePoint(1.0, 0.0, ops=1))
    timeline.add(1.0, TimelinePoint(1.0, 0.0, ops=2))
    timeline.add(2.0, TimelinePoint(2.0, 0.0, ops=5))
    assert [point.ops for point in timeline.points()] == [1, 4]
