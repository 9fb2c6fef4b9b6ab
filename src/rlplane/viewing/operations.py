"""Operations summed up over all partitions: one entry per op, the same for terminal, page and report."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlplane.metrics.snapshot import MetricsSnapshot, SeriesStat

OP_COUNTERS = {
    "ops": "count",
    "op_keys": "keys",
    "op_bytes": "bytes",
    "op_failures": "failures",
    "op_timeouts": "timeouts",
}
"""The counters that an op has in each partition, and what they are called in its figures."""


@dataclass
class OpFigures:
    """One op. ``counts`` and ``rates`` (per second, now) have a value for each of :data:`OP_COUNTERS`.

    ``latency`` leaves out the time in which it waited for samples or for room: ``waited_s`` in all, of
    ``waits`` operations.
    """

    op: str
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(OP_COUNTERS.values(), 0))
    rates: dict[str, float] = field(default_factory=lambda: dict.fromkeys(OP_COUNTERS.values(), 0.0))
    latency: SeriesStat | None = None
    waited_s: float = 0.0
    waits: int = 0


def by_operation(snapshot: MetricsSnapshot) -> list[OpFigures]:
    """The operations of a snapshot, the most frequent first."""
    found: dict[str, OpFigures] = {}
    for counter, name in OP_COUNTERS.items():
        for stat in snapshot.counters(counter):
            op = stat.labels.get("op", "")
            figures = found.setdefault(op, OpFigures(op))
            figures.counts[name] += stat.value
            figures.rates[name] += stat.rate
    for series in snapshot.series("op_latency"):
        if (op := series.labels.get("op", "")) in found:
            found[op].latency = series
    for series in snapshot.series("op_wait"):
        if (op := series.labels.get("op", "")) in found:
            found[op].waited_s += series.total / 1e9
            found[op].waits += series.count
    return sorted(found.values(), key=lambda figures: -figures.counts["count"])
