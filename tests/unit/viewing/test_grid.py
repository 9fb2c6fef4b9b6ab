"""Percentiles of what came between two snapshots."""

from typing import Any

import numpy as np
import pytest
from tests.simulated_run import series_of

from rlplane.metrics.registry import MetricsRegistry
from rlplane.metrics.snapshot import GRIDS
from rlplane.viewing.grid import full_counts, percentile, subtract, sum_counts


def test_the_difference_of_two_snapshots_is_what_was_recorded_between_them() -> None:
    old = np.full(1000, 50_000.0)
    new = np.full(200, 8_000_000.0)
    before = full_counts(series_of("op_latency", old))
    after = full_counts(series_of("op_latency", np.concatenate([old, new])))
    added = subtract(after, before)
    assert sum(added) == 200
    assert percentile(added, "ns", 0.5) == pytest.approx(8e6, rel=0.2)
    assert percentile(after, "ns", 0.5) == pytest.approx(5e4, rel=0.4)


def test_an_aggregators_series_carry_the_same_counts_as_the_values_give() -> None:
    registry = MetricsRegistry()
    series = registry.register_series("op_latency", {"op": "put"})
    values = np.random.default_rng(1).lognormal(13, 1.5, 5000).astype(np.int64)
    for value in values.tolist():
        series.record(value)
    stat = series.stat()
    expected = np.histogram(np.clip(values, 1000, 1e12 - 1), np.array(GRIDS["ns"]))[0]
    assert sum(full_counts(stat)) == stat.count == 5000
    # The live histogram has three figures: a value at an edge may fall on its other side.
    assert np.abs(np.array(full_counts(stat)) - expected).max() <= 25


def test_percentiles_stay_within_their_bucket() -> None:
    values = np.random.default_rng(2).lognormal(13, 0.6, 20_000)
    counts = full_counts(series_of("op_latency", values))
    found: list[Any] = [percentile(counts, "ns", share) for share in (0.5, 0.9, 0.99)]
    true = np.quantile(values, (0.5, 0.9, 0.99))
    assert np.digitize(found, GRIDS["ns"]).tolist() == np.digitize(true, GRIDS["ns"]).tolist()


def test_staleness_is_told_in_whole_versions() -> None:
    counts = full_counts(series_of("staleness", [0] * 50 + [1] * 40 + [3] * 10, unit="versions"))
    assert [percentile(counts, "versions", share) for share in (0.5, 0.9, 0.95)] == [0, 1, 3]


def test_no_values_have_no_percentile() -> None:
    assert percentile([0, 0, 0], "ns", 0.5) is None
    assert sum_counts([]) == []
    assert full_counts(series_of("op_latency", [])) == []
