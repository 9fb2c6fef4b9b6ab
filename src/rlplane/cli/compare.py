"""What changed between two runs, and whether it is more than noise.

A median or a tail is said to have changed when its 99 % intervals in the two runs do not overlap, and it
changed by at least 5 %. The intervals come from the ranks, so no shape of distribution is assumed; they are
widened as if only every fourth operation told something new, since operations close in time resemble each
other. Rates are compared with how they vary over each run's own time. Without enough data the answer is that
it cannot be told.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from rlplane.metrics.snapshot import GRIDS, MetricsSnapshot, SeriesStat, TimelinePoint
from rlplane.viewing.grid import full_counts, percentile
from rlplane.viewing.units import format_bytes, format_full_count, format_ns

Verdict = Literal["worse", "better", "same", "unknown"]

_SMALLEST = 0.05
_Z = 2.576  # 99 %
_ALIKE = 4  # Operations in a row that tell as much as one.
_BATCHES = 16
_MIN_COUNT = {0.5: 30, 0.99: 1000}
_TIMES = {
    "op_latency": "latency of {op}",
    "written_to_claimed": "from write to claim by {task} in {partition}",
    "written_to_cleared": "life in {partition}",
    "transfer_duration": "transfer time",
}
_ORDER: dict[Verdict, int] = {"worse": 0, "better": 1, "same": 2, "unknown": 3}


class Change(msgspec.Struct):
    """One figure in both runs. ``change`` is relative; ``noise`` is how much of it may be chance."""

    what: str
    unit: str
    before: float
    after: float
    change: float | None
    noise: float | None
    verdict: Verdict


class Comparison(msgspec.Struct):
    """Two runs, and every figure that both have; what got worse first."""

    before: str
    after: str
    changes: list[Change]


def compare_runs(before: MetricsSnapshot, after: MetricsSnapshot) -> Comparison:
    """Compare every latency and rate that both runs have."""
    changes = [*_latencies(before, after), *_rates(before, after), *_shares(before, after)]
    changes.sort(key=lambda change: (_ORDER[change.verdict], -abs(change.change or 0.0)))
    return Comparison(before.run_id, after.run_id, changes)


def _latencies(before: MetricsSnapshot, after: MetricsSnapshot) -> Iterator[Change]:
    known = {_key(stat): stat for name in _TIMES for stat in before.series(name) if stat.count}
    for name, title in _TIMES.items():
        for stat in after.series(name):
            old = known.get(_key(stat))
            if old is None or not stat.count:
                continue
            for share, label in ((0.5, "p50"), (0.99, "p99")):
                yield _quantile(f"{title.format_map(stat.labels)}, {label}", old, stat, share, label)


def _key(stat: SeriesStat) -> tuple[str, tuple[tuple[str, str], ...]]:
    return stat.name, tuple(sorted(stat.labels.items()))


def _quantile(what: str, old: SeriesStat, new: SeriesStat, share: float, label: str) -> Change:
    before, after = old.percentiles[label], new.percentiles[label]
    change = _relative(before, after)
    if min(old.count, new.count) < _MIN_COUNT[share] or change is None:
        return Change(what, "ns", before, after, change, None, "unknown")
    first, second = _interval(old, share), _interval(new, share)
    apart = first[1] < second[0] or second[1] < first[0]
    noise = _combine(*((high - low) / 2 / value for (low, high), value in ((first, before), (second, after))))
    return Change(what, "ns", before, after, change, noise, _judge(change, 0.0 if apart else math.inf))


def _interval(stat: SeriesStat, share: float) -> tuple[float, float]:
    """The 99 % interval of a quantile: between which ranks it lies is binomial, whatever the distribution."""
    half = _Z * math.sqrt(_ALIKE * share * (1 - share) / stat.count)
    counts = full_counts(stat)
    if not counts:
        return -math.inf, math.inf
    low, high = (percentile(counts, stat.unit, min(1.0, max(0.0, share + side * half))) for side in (-1, 1))
    middle, point = percentile(counts, stat.unit, share), stat.percentiles[f"p{share * 100:g}"]
    # The grid is coarse, but its error is the same for all three: move the interval onto the exact value.
    factor = point / middle if middle else 1.0
    lowest, highest = GRIDS[stat.unit][0], GRIDS[stat.unit][-1]
    return (lowest if low is None else low) * factor, (highest if high is None else high) * factor


def _rates(before: MetricsSnapshot, after: MetricsSnapshot) -> Iterator[Change]:
    for what, unit, name in (
        ("operations per second", "1/s", "ops"),
        ("bytes per second", "bytes/s", "bytes"),
        ("samples written per second", "1/s", "written"),
        ("samples cleared per second", "1/s", "cleared"),
    ):
        old, new = (_per_second(snapshot.timeline, name) for snapshot in (before, after))
        if old is None or new is None or not (old or new):
            continue
        noise = _combine(_spread(before.timeline, name), _spread(after.timeline, name))
        change = _relative(old, new)
        verdict: Verdict = "unknown" if noise is None or change is None else _judge(-change, noise)
        yield Change(what, unit, old, new, change, noise, verdict)


def _shares(before: MetricsSnapshot, after: MetricsSnapshot) -> Iterator[Change]:
    """Shares, because runs of different lengths differ in every total."""
    for name, what, of in (
        ("op_failures", "operations that failed", {}),
        ("op_timeouts", "claims that found nothing in time", {"op": "claim_meta"}),
        ("op_timeouts", "puts that found no room in time", {"op": "put"}),
    ):
        (old, all_old), (new, all_new) = (
            (snapshot.total(name, **of), snapshot.total("ops", **of)) for snapshot in (before, after)
        )
        if not (old or new) or not all_old or not all_new:
            continue
        first, second = old / all_old, new / all_new
        # The difference of two shares that are the same varies this much by chance.
        mean = (old + new) / (all_old + all_new)
        chance = _Z * math.sqrt(mean * (1 - mean) * (1 / all_old + 1 / all_new))
        verdict: Verdict = (
            "same" if abs(second - first) <= chance else "worse" if second > first else "better"
        )
        noise = chance / first if first else None
        yield Change(what, "share", first, second, _relative(first, second), noise, verdict)


def _judge(worsening: float, noise: float) -> Verdict:
    if abs(worsening) < max(_SMALLEST, noise):
        return "same"
    return "worse" if worsening > 0 else "better"


def _relative(before: float, after: float) -> float | None:
    return after / before - 1 if before else None


def _combine(*parts: float | None) -> float | None:
    known = [part for part in parts if part is not None]
    return math.hypot(*known) if len(known) == len(parts) else None


def _per_second(timeline: Sequence[TimelinePoint], name: str) -> float | None:
    seconds = sum(point.seconds for point in timeline)
    return sum(getattr(point, name) for point in timeline) / seconds if seconds else None


def _spread(timeline: Sequence[TimelinePoint], name: str) -> float | None:
    """How uncertain a run's mean is, relative to it, from how it varies over the run's time.

    Means over a few long stretches of time: what is alike within a stretch does not count twice.
    """
    size = max(1, len(timeline) // _BATCHES)
    stretches = [timeline[at : at + size] for at in range(0, len(timeline), size)]
    means = [mean for stretch in stretches if (mean := _per_second(stretch, name)) is not None]
    if len(means) < 4:
        return None
    centre = statistics.fmean(means)
    return _Z * statistics.stdev(means) / math.sqrt(len(means)) / centre if centre else None


# Rendering

_WORDS: dict[Verdict, str] = {
    "worse": "WORSE",
    "better": "better",
    "same": "same",
    "unknown": "cannot be told",
}


def render_comparison(comparison: Comparison) -> str:
    """For people: what got worse in sentences, then everything as a table."""
    lines = [f"{comparison.before} → {comparison.after}", ""]
    for verdict, sentence in (("worse", "Worse beyond the noise:"), ("better", "Better beyond the noise:")):
        found = [change for change in comparison.changes if change.verdict == verdict]
        if found:
            lines += [sentence, *(f"  {_sentence(change)}" for change in found), ""]
    if all(change.verdict in ("same", "unknown") for change in comparison.changes):
        lines += ["Nothing changed beyond the noise." if comparison.changes else "Nothing to compare.", ""]
    rows = [("what", "before", "after", "change", "noise", "")]
    rows += [
        (
            change.what,
            _format(change.before, change.unit),
            _format(change.after, change.unit),
            _percent(change.change, signed=True),
            "–" if change.noise is None else f"±{_percent(change.noise)}",
            _WORDS[change.verdict],
        )
        for change in comparison.changes
    ]
    widths = [max(len(row[at]) for row in rows) for at in range(6)]
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(row[at].rjust(widths[at]) for at in range(1, 5)), row[5]]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _sentence(change: Change) -> str:
    before, after = _format(change.before, change.unit), _format(change.after, change.unit)
    return f"{change.what}: {before} → {after} ({_percent(change.change, signed=True)})"


def _percent(value: float | None, *, signed: bool = False) -> str:
    if value is None:
        return "–"
    return f"{100 * value:+.1f}%" if signed else f"{100 * value:.1f}%"


def _format(value: float, unit: str) -> str:
    if unit == "ns":
        return format_ns(value)
    if unit == "share":
        return f"{100 * value:.3g}%"
    return f"{format_bytes(value)}/s" if unit == "bytes/s" else format_full_count(value)
