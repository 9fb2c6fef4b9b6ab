"""The past of a run, bounded: recent seconds one by one, older ones merged, whatever the run's length.

What happened before the viewer came is taken from the snapshot's own timeline, which knows rates and means;
from then on every point also has percentiles of just its own seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rlplane.metrics.snapshot import MetricsSnapshot, TimelinePoint
from rlplane.viewing.grid import full_counts, percentile, subtract, sum_counts

ALL_OPS = "all"
_QUANTILES = (0.5, 0.9, 0.99)
_MAX_OPS = 12

_RATES = ("ops", "bytes", "failures", "written", "claimed", "cleared")
_MEANS = (
    "latency_mean",
    "stale_mean",
    "stale_p90",
    "waiting",
    "wait_mean",
    "wait_p50",
    "wait_p90",
    "wait_p99",
)
Quantiles = tuple[float | None, float | None, float | None]


@dataclass(frozen=True, slots=True)
class HistoryPoint:
    """``seconds`` of the run that end at ``time_s`` after its start. Rates are per second, latencies in ns.

    ``latency`` has p50, p90 and p99 by op and for :data:`ALL_OPS`; it is empty before the viewer came.
    ``waiting`` is how many operations waited at a time, on average: claims for samples, puts for room; and
    ``wait_…`` for how long, in ns.
    """

    time_s: float
    seconds: float
    ops: float = 0.0
    bytes: float = 0.0
    failures: float = 0.0
    written: float = 0.0
    claimed: float = 0.0
    cleared: float = 0.0
    samples_held: float = 0.0
    bytes_held: float = 0.0
    latency_mean: float | None = None
    stale_mean: float | None = None
    stale_p90: float | None = None
    waiting: float = 0.0
    wait_mean: float | None = None
    wait_p50: float | None = None
    wait_p90: float | None = None
    wait_p99: float | None = None
    latency: dict[str, Quantiles] = field(default_factory=dict)


class History:
    """Points of one run; a snapshot of another run, or of one that began anew, starts over.

    Args:
        max_points: Points kept. When there are more, the older half is merged two by two.
        interval_s: The least time between two points.
    """

    def __init__(self, max_points: int = 1800, interval_s: float = 1.0) -> None:
        if max_points < 4:
            raise ValueError(f"max_points is {max_points}; merging needs at least 4")
        self._max_points = max_points
        self._interval_s = interval_s
        self._clear()

    def _clear(self) -> None:
        self.points: list[HistoryPoint] = []
        self._run: tuple[str, int] | None = None
        self._last_s = 0.0
        self._totals: dict[str, float] = {}
        self._grids: dict[str, list[int]] = {}

    def add(self, snapshot: MetricsSnapshot) -> HistoryPoint | None:
        """Take a snapshot; return the point that it completes, or None when too little time has passed."""
        run, now = (snapshot.run_id, snapshot.started_ns), snapshot.elapsed_s
        if run != self._run or now < self._last_s:
            self._clear()
            self._run = run
            self.points = [_from_timeline(point) for point in snapshot.timeline]
            self._remember(snapshot)
            return None
        seconds = now - self._last_s
        if seconds < self._interval_s and not (snapshot.state.is_final and seconds > 0):
            return None
        point = self._measure(snapshot, seconds)
        self._remember(snapshot)
        self.points.append(point)
        if len(self.points) > self._max_points:
            half = len(self.points) // 2
            self.points = _merge_pairs(self.points[:half]) + self.points[half:]
        return point

    def _remember(self, snapshot: MetricsSnapshot) -> None:
        self._last_s = snapshot.elapsed_s
        self._totals = _totals(snapshot)
        self._grids = _grids(snapshot)

    def _measure(self, snapshot: MetricsSnapshot, seconds: float) -> HistoryPoint:
        totals, grids = _totals(snapshot), _grids(snapshot)
        gained = {name: max(0.0, value - self._totals.get(name, 0.0)) for name, value in totals.items()}
        latency: dict[str, Quantiles] = {}
        stale_p90 = None
        waits: Quantiles = (None, None, None)
        for name, counts in grids.items():
            added = subtract(counts, self._grids.get(name, []))
            if name == "staleness":
                stale_p90 = percentile(added, "versions", 0.9)
            elif name == "waits":
                p50, p90, p99 = (percentile(added, "ns", share) for share in _QUANTILES)
                waits = (p50, p90, p99)
            elif sum(added):
                p50, p90, p99 = (percentile(added, "ns", share) for share in _QUANTILES)
                latency[name.removeprefix("op:")] = (p50, p90, p99)
        gauges = {gauge.name: gauge.value for gauge in snapshot.gauges() if not gauge.labels}
        return HistoryPoint(
            time_s=snapshot.elapsed_s,
            seconds=seconds,
            **{name: gained[name] / seconds for name in _RATES},
            samples_held=gauges.get("samples_held", 0.0),
            bytes_held=gauges.get("bytes_held", 0.0),
            latency_mean=_ratio(gained["latency_total"], gained["latency_count"]),
            stale_mean=_ratio(gained["stale_total"], gained["stale_count"]),
            stale_p90=stale_p90,
            waiting=gained["wait_total"] / 1e9 / seconds,
            wait_mean=_ratio(gained["wait_total"], gained["wait_count"]),
            wait_p50=waits[0],
            wait_p90=waits[1],
            wait_p99=waits[2],
            latency=latency,
        )

    def columns(
        self, start_s: float = -math.inf, end_s: float = math.inf, max_points: int = 600
    ) -> dict[str, Any]:
        """The points in a span of time as columns, merged to at most ``max_points``."""
        points: Sequence[HistoryPoint] = [p for p in self.points if start_s <= p.time_s <= end_s]
        while len(points) > max(2, max_points):
            points = _merge_pairs(points)
        return as_columns(points)


def as_columns(points: Sequence[HistoryPoint]) -> dict[str, Any]:
    """One list per figure, in the order of time: what a plot wants."""
    plain = [name for name in HistoryPoint.__slots__ if name != "latency"]
    ops = sorted({op for point in points for op in point.latency})
    none: Quantiles = (None, None, None)
    latency = {
        op: [list(column) for column in zip(*(point.latency.get(op, none) for point in points), strict=True)]
        for op in ops
    }
    return {name: [getattr(point, name) for point in points] for name in plain} | {"latency": latency}


def _from_timeline(point: TimelinePoint) -> HistoryPoint:
    seconds = point.seconds or 1.0
    return HistoryPoint(
        time_s=point.elapsed_s + point.seconds,
        seconds=seconds,
        **{name: getattr(point, name) / seconds for name in _RATES},
        samples_held=point.samples_held,
        bytes_held=point.bytes_held,
        latency_mean=_ratio(point.busy_ns, point.ops),
        stale_mean=_ratio(point.stale_sum, point.stale_count),
        waiting=point.wait_ns / 1e9 / seconds,
        wait_mean=_ratio(point.wait_ns, point.waits),
    )


def _totals(snapshot: MetricsSnapshot) -> dict[str, float]:
    latency, stale, waits = (list(snapshot.series(name)) for name in ("op_latency", "staleness", "op_wait"))
    return {
        "ops": snapshot.total("ops"),
        "bytes": snapshot.total("op_bytes"),
        "failures": snapshot.total("op_failures"),
        "written": snapshot.total("samples_written"),
        "claimed": snapshot.total("samples_claimed"),
        "cleared": snapshot.total("samples_cleared"),
        "latency_total": sum(stat.total for stat in latency),
        "latency_count": sum(stat.count for stat in latency),
        "stale_total": sum(stat.total for stat in stale),
        "stale_count": sum(stat.count for stat in stale),
        "wait_total": sum(stat.total for stat in waits),
        "wait_count": sum(stat.count for stat in waits),
    }


def _grids(snapshot: MetricsSnapshot) -> dict[str, list[int]]:
    by_count = sorted(snapshot.series("op_latency"), key=lambda stat: -stat.count)
    grids = {f"op:{stat.labels.get('op', '')}": full_counts(stat) for stat in by_count[:_MAX_OPS]}
    grids[f"op:{ALL_OPS}"] = sum_counts(map(full_counts, by_count))
    grids["waits"] = sum_counts(map(full_counts, snapshot.series("op_wait")))
    grids["staleness"] = sum_counts(map(full_counts, snapshot.series("staleness")))
    return {name: counts for name, counts in grids.items() if counts}


def _merge_pairs(points: Sequence[HistoryPoint]) -> list[HistoryPoint]:
    merged = [_merge(points[at], points[at + 1]) for at in range(0, len(points) - 1, 2)]
    return merged + list(points[len(merged) * 2 :])


def _merge(first: HistoryPoint, second: HistoryPoint) -> HistoryPoint:
    weights = (first.seconds, second.seconds)
    means = {
        name: _mean((getattr(first, name), getattr(second, name)), weights) for name in (*_RATES, *_MEANS)
    }
    none: Quantiles = (None, None, None)
    latency: dict[str, Quantiles] = {}
    for op in first.latency.keys() | second.latency.keys():
        pairs = zip(first.latency.get(op, none), second.latency.get(op, none), strict=True)
        p50, p90, p99 = (_mean(pair, weights) for pair in pairs)
        latency[op] = (p50, p90, p99)
    return replace(second, seconds=sum(weights), latency=latency, **means)  # type: ignore[arg-type]


def _mean(values: Iterable[float | None], weights: Sequence[float]) -> float | None:
    known = [(value, weight) for value, weight in zip(values, weights, strict=True) if value is not None]
    return _ratio(sum(value * weight for value, weight in known), sum(weight for _, weight in known))


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
