"""Distributions on the fixed grid: what was added between two snapshots, and its percentiles.

A snapshot's series covers the whole run, so its percentiles hardly move after an hour. Counts on the fixed
grid can be subtracted: the difference is the distribution of the last seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from rlplane.metrics.snapshot import GRIDS, SeriesStat


def full_counts(stat: SeriesStat) -> list[int]:
    """One count per bucket of ``GRIDS[stat.unit]``; empty when the series has none."""
    if not stat.grid_counts or stat.unit not in GRIDS:
        return []
    size = len(GRIDS[stat.unit]) - 1
    counts = [0] * stat.grid_first + list(stat.grid_counts)
    return (counts + [0] * (size - len(counts)))[:size]


def sum_counts(many: Iterable[Sequence[int]]) -> list[int]:
    """Bucket by bucket, over series of one unit."""
    total: list[int] = []
    for counts in many:
        if not counts:
            continue
        if not total:
            total = list(counts)
        else:
            total = [left + right for left, right in zip(total, counts, strict=True)]
    return total


def subtract(now: Sequence[int], before: Sequence[int]) -> list[int]:
    """What was added since ``before``, which may be empty. A restarted run's counts do not go below zero."""
    if not before:
        return list(now)
    return [max(0, new - old) for new, old in zip(now, before, strict=False)]


def percentile(counts: Sequence[int], unit: str, share: float) -> float | None:
    """The value with ``share`` of the counts at or below it; None without any.

    Within a bucket it is interpolated: geometrically for times and sizes; for ``versions``, whose buckets
    are single numbers at the lower end, it is the bucket's lower edge.
    """
    total = sum(counts)
    if not total:
        return None
    edges, rank, below = GRIDS[unit], max(1.0, share * total), 0
    for position, count in enumerate(counts):
        if count and below + count >= rank:
            low, high = edges[position], edges[position + 1]
            if unit == "versions" or low <= 0:
                return float(low)
            return low * math.exp(math.log(high / low) * (rank - below) / count)
        below += count
    return float(edges[len(counts)])
