"""Counters, gauges and series: what they count, what they refuse, and how near the truth they are."""

from __future__ import annotations

import itertools
import math
import statistics
from array import array
from pathlib import Path

import numpy as np
import pytest
from hdrh.histogram import HdrHistogram
from hypothesis import given, settings
from hypothesis import strategies as st

from rlplane.errors import InvalidRequestError
from rlplane.metrics.hdr import HIGHEST_TRACKABLE
from rlplane.metrics.registry import MetricsRegistry, SeriesSampler
from rlplane.metrics.snapshot import GRIDS, PERCENTILES, CounterStat, SeriesStat

SHARES = dict(PERCENTILES)


def series(integer: bool = True, **options: object) -> SeriesSampler:
    return MetricsRegistry(**options).register_series("s", integer=integer)  # type: ignore[arg-type]


def exact_percentile(values: list[float], share: int) -> float:
    ordered = sorted(values)
    return ordered[max(1, math.ceil(len(ordered) * share / 100_000)) - 1]


# Registering.


def test_a_name_with_the_same_labels_is_registered_once() -> None:
    registry = MetricsRegistry()
    registry.register_counter("ops", {"op": "put", "partition": "a"})
    registry.register_counter("ops", {"op": "put", "partition": "b"})
    with pytest.raises(InvalidRequestError, match="already registered"):
        registry.register_counter("ops", {"partition": "a", "op": "put"})


def test_a_name_cannot_be_of_two_kinds() -> None:
    registry = MetricsRegistry()
    registry.register_counter("x", {"op": "put"})
    with pytest.raises(InvalidRequestError, match="already registered as a CounterSampler"):
        registry.register_series("x")
    with pytest.raises(InvalidRequestError, match="already registered as a CounterSampler"):
        registry.register_gauge("x", {"op": "get"})


# Counters and gauges.


def test_a_counter_refuses_what_would_make_it_shrink() -> None:
    counter = MetricsRegistry().register_counter("c")
    counter.increment(5)
    for bad in (-1, 1.5, float("nan"), True, "1"):
        counter.increment(bad)  # type: ignore[arg-type]
    assert (counter.value, counter.n_refused) == (5, 5)


def test_a_counters_rate_is_its_growth_over_the_last_seconds() -> None:
    counter = MetricsRegistry().register_counter("c")
    assert counter.rate(100.0) == 0.0
    for second in range(1, 11):
        counter.increment(10)
        rate = counter.rate(100.0 + second)
    assert rate == pytest.approx(10.0)
    for second in range(11, 20):
        rate = counter.rate(100.0 + second)
    assert rate == 0.0


def test_a_gauge_keeps_its_peak_and_refuses_what_is_not_finite() -> None:
    gauge = MetricsRegistry().register_gauge("g")
    for value in (3, 9, float("inf"), float("nan"), 4):
        gauge.set(value)
    assert (gauge.value, gauge.peak, gauge.n_refused) == (4, 9, 2)


# Series: what goes in.


def test_bad_values_are_refused_one_by_one_without_harm_to_the_others() -> None:
    sampler = series()
    for value in (5, -1, 2.5, float("nan"), None, "7", 2**63, 7):
        sampler.record(value)  # type: ignore[arg-type]
    sampler.record_many(np.array([1, -9, 3], np.int64))
    sampler.record_many(np.array([2**63 + 1, 4], np.uint64))
    sampler.record_many(np.array([1.5, 2.0]))
    stat = sampler.stat()
    assert (stat.count, stat.total, stat.min, stat.max) == (5, 5 + 7 + 1 + 3 + 4, 1, 7)
    assert stat.n_refused == 10


def test_a_float_series_refuses_nan_infinity_and_negatives() -> None:
    sampler = series(integer=False)
    for value in (0.5, float("nan"), float("inf"), -0.25, 1, "x"):
        sampler.record(value)  # type: ignore[arg-type]
    stat = sampler.stat()
    assert (stat.count, stat.min, stat.max, stat.n_refused) == (2, 0.5, 1.0, 4)


def test_an_empty_series_has_no_figures() -> None:
    stat = series().stat()
    assert (stat.count, stat.min, stat.max, stat.percentiles, stat.bucket_counts) == (0, None, None, {}, [])
    assert series().summary() is None


# Series: live figures.


@given(st.lists(st.integers(0, HIGHEST_TRACKABLE), min_size=1, max_size=300))
def test_live_percentiles_are_those_of_hdrhistogram(values: list[int]) -> None:
    sampler, oracle = series(), HdrHistogram(1, HIGHEST_TRACKABLE, 3)
    for value in values:
        sampler.record(value)
        oracle.record_value(value)
    stat = sampler.stat()
    for name, share in PERCENTILES:
        rank_value = exact_percentile([float(v) for v in values], share)
        # hdrhistogram rounds the rank in floats; its slot of the true value is what counts.
        expected = min(oracle.get_highest_equivalent_value(int(rank_value)), max(values))
        assert stat.percentiles[name] == max(expected, min(values))


@given(st.lists(st.integers(0, 10**13), min_size=1, max_size=200))
def test_every_histogram_adds_up_and_spans_what_was_observed(values: list[int]) -> None:
    sampler = series()
    sampler.record_many(np.array(values, np.int64))
    for exact in (False, True):
        stat = sampler.stat(exact=exact)
        assert sum(stat.bucket_counts) == stat.count == len(values)
        assert sum(stat.grid_counts) == len(values)
        assert (stat.bucket_edges[0], stat.bucket_edges[-1]) == (min(values), max(values))
        assert stat.bucket_edges == sorted(stat.bucket_edges)
        assert len(stat.bucket_edges) == len(stat.bucket_counts) + 1
        assert all(count >= 0 for count in stat.bucket_counts)


def test_histogram_edges_fit_a_narrow_distribution() -> None:
    sampler = series()
    values = 10_000_000_000 + np.random.default_rng(1).normal(0, 100, 5000).astype(np.int64)
    sampler.record_many(values)
    stat = sampler.stat(exact=True)
    assert len(stat.bucket_counts) == 32
    assert sum(count > 0 for count in stat.bucket_counts) > 20, "the shape must be visible"
    assert len(set(stat.bucket_edges)) == 33


def test_edges_are_log_spaced_and_follow_the_data() -> None:
    sampler = series()
    sampler.record_many(np.array([1_000, 1_000_000_000], np.int64))
    edges = sampler.stat().bucket_edges
    ratios = [b / a for a, b in itertools.pairwise(edges)]
    assert max(ratios) / min(ratios) < 1.01
    sampler.record(10**12)
    assert sampler.stat().bucket_edges[-1] == 10**12


def test_small_integers_have_a_bucket_each() -> None:
    sampler = series()
    for value in (0, 0, 0, 1, 2, 2):
        sampler.record(value)
    stat = sampler.stat(exact=True)
    assert stat.bucket_edges[0] == 0
    assert stat.percentiles["p50"] == 0
    assert sum(stat.bucket_counts) == 6


def test_the_fixed_grid_can_be_subtracted_between_two_snapshots() -> None:
    sampler = series()
    sampler.record_many(np.array([1_000, 5_000_000], np.int64))
    before = full_grid(sampler.stat())
    sampler.record_many(np.array([5_000_000, 10**14], np.int64))
    grown = [b - a for a, b in zip(before, full_grid(sampler.stat()), strict=True)]
    assert sum(grown) == 2
    assert grown[-1] == 1, "what lies beyond the grid is in its last bucket"


def full_grid(stat: SeriesStat) -> list[int]:
    counts = [0] * (len(GRIDS["ns"]) - 1)
    counts[stat.grid_first : stat.grid_first + len(stat.grid_counts)] = stat.grid_counts
    return counts


def test_values_beyond_the_range_are_clamped_in_the_histogram_alone(caplog: pytest.LogCaptureFixture) -> None:
    sampler = series()
    for value in (5, HIGHEST_TRACKABLE + 1, 2 * HIGHEST_TRACKABLE):
        sampler.record(value)
        sampler.fold()
    stat = sampler.stat()
    assert stat.n_clamped == 2
    assert (stat.min, stat.max, stat.total) == (5, 2 * HIGHEST_TRACKABLE, 5 + 3 * HIGHEST_TRACKABLE + 1)
    assert stat.percentiles["p99"] <= HIGHEST_TRACKABLE * 1.001
    assert sampler.stat(exact=True).percentiles["p99"] == 2 * HIGHEST_TRACKABLE
    assert len(caplog.records) == 1


def test_a_total_beyond_64_bits_still_travels() -> None:
    sampler = series()
    for _ in range(4):
        sampler.record(2**62)
    stat = sampler.stat(exact=True)
    assert stat.total == 2.0**64
    assert stat.percentiles["p50"] == 2**62
    assert stat.std_dev == 0.0


# Series: exact figures.


@given(st.lists(st.integers(0, 2**62), min_size=2, max_size=100), st.integers(1, 7))
def test_exact_figures_are_exact_whatever_is_spilled(values: list[int], bound: int) -> None:
    sampler = series(max_values_in_memory=bound)
    for start in range(0, len(values), 3):
        for value in values[start : start + 3]:
            sampler.record(value)
        sampler.fold()
    stat = sampler.stat(exact=True)
    assert stat.exact
    for name, share in PERCENTILES:
        assert stat.percentiles[name] == exact_percentile([*values], share)
    assert stat.mean == sum(values) / len(values)
    n, total, squares = len(values), sum(values), sum(v * v for v in values)
    assert stat.std_dev == math.sqrt((n * squares - total * total) / (n * (n - 1)))


def test_the_variance_of_a_narrow_distribution_far_from_zero_is_right() -> None:
    generator = np.random.default_rng(5)
    noise = generator.normal(0, 100, 10_000)
    whole = series()
    whole.record_many(10_000_000_000 + noise.astype(np.int64))
    assert whole.stat().std_dev == pytest.approx(float(noise.astype(np.int64).std(ddof=1)), rel=1e-12)
    # In floats, in many pieces: a naive sum of squares gives 0.0 here.
    seconds = series(integer=False)
    values = 10.0 + noise * 1e-9
    for part in np.array_split(values, 50):
        seconds.record_many(part)
        seconds.fold()
    assert seconds.stat().std_dev == pytest.approx(statistics.stdev(values.tolist()), rel=1e-6)


@settings(deadline=None)
@given(st.lists(st.floats(0, 1e6, allow_nan=False), min_size=1, max_size=100))
def test_exact_percentiles_of_floats_are_observed_values(values: list[float]) -> None:
    sampler = series(integer=False, max_values_in_memory=5)
    for value in values:
        sampler.record(value)
    stat = sampler.stat(exact=True)
    for name, share in PERCENTILES:
        assert stat.percentiles[name] == exact_percentile(values, share)
    assert sum(stat.bucket_counts) == len(values)


def test_memory_is_bounded_and_the_rest_is_on_disk(tmp_path: Path) -> None:
    registry = MetricsRegistry(max_values_in_memory=1000, spill_directory=tmp_path)
    samplers = [registry.register_series("s", {"i": str(i)}) for i in range(3)]
    rng = np.random.default_rng(2)
    truth = [rng.integers(0, 10**10, 20_000) for _ in samplers]
    for start in range(0, 20_000, 500):
        for sampler, values in zip(samplers, truth, strict=True):
            sampler.record_many(values[start : start + 500])
            sampler.fold()
            assert registry._store.n_in_memory <= 1000
    assert registry._store.n_spilled > 50_000
    assert list(tmp_path.iterdir()) == [], "the file has no name, so nothing is left by a killed process"
    for sampler, values in zip(samplers, truth, strict=True):
        stat = sampler.stat(exact=True)
        assert stat.exact
        assert stat.percentiles["p99"] == exact_percentile(values.tolist(), SHARES["p99"])
    registry.close()


def test_when_values_cannot_be_spilled_the_histogram_remains_and_says_so(tmp_path: Path) -> None:
    registry = MetricsRegistry(max_values_in_memory=10, spill_directory=tmp_path / "missing")
    sampler = registry.register_series("s")
    sampler.record_many(np.arange(1000, dtype=np.int64))
    stat = sampler.stat(exact=True)
    assert not stat.exact
    assert (stat.count, stat.total) == (1000, 499_500)
    assert stat.percentiles["p50"] == 499


def test_a_series_takes_its_exact_figures_from_the_series_that_keep_the_values() -> None:
    registry = MetricsRegistry()
    total = registry.register_series("total", keep_values=False)
    truth: list[int] = []
    for worker in range(3):
        part = registry.register_series("part", {"worker": str(worker)}, listed=False)
        total.exact_sources.append(part)
        values = np.arange(worker, 1000, 7, dtype=np.int64)
        truth += values.tolist()
        part.record_many(values)
        total.record_many(values)
    stats = registry.stats(exact=True)
    assert [stat.name for stat in stats] == ["total"]
    assert isinstance(stats[0], SeriesStat)
    assert stats[0].exact
    assert stats[0].percentiles["p90"] == exact_percentile([*truth], SHARES["p90"])


def test_stats_leave_out_what_never_happened() -> None:
    registry = MetricsRegistry()
    registry.register_counter("never")
    registry.register_series("nothing")
    counter = registry.register_counter("once")
    counter.increment()
    assert registry.stats(now=1.0) == [CounterStat("once", 1)]


def test_recording_is_an_append() -> None:
    sampler = series()
    for value in range(10):
        sampler.record(value)
    assert sampler.count == 0
    assert sampler._buffer == array("q", range(10))
    sampler.fold()
    assert (len(sampler._buffer), sampler.count) == (0, 10)


def test_samplers_are_reached_by_name_and_labels() -> None:
    registry = MetricsRegistry()
    counter, series = registry.register_counter("n", {"op": "put"}), registry.register_series("t")
    registry.increment("n", 3, {"op": "put"})
    registry.record("t", 7)
    assert (counter.value, series.stat().total) == (3, 7)
    with pytest.raises(KeyError):
        registry.increment("n")
    with pytest.raises(ValueError, match="does not count"):
        registry.increment("t")
    with pytest.raises(ValueError, match="takes no values"):
        registry.record("n", 1, {"op": "put"})
