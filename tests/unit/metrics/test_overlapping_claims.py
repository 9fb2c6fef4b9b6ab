"""A claim that ends before the put that woke it has returned."""

from rlplane.metrics.events import SampleEvent
from rlplane.metrics.metrics_table import MetricsTable
from rlplane.metrics.registry import MetricsRegistry
from rlplane.metrics.sample_lifecycle import SampleLifecycle
from rlplane.metrics.snapshot import SeriesStat, TimelinePoint


def waits_of(*claimed_ns: int) -> tuple[int, int, float | None]:
    registry = MetricsRegistry()
    lifecycle = SampleLifecycle(registry, MetricsTable(), TimelinePoint(0.0, 0.0))
    second = 1_000_000_000
    ids = [f"s{number}" for number in range(len(claimed_ns))]
    lifecycle.add_event(
        SampleEvent(kind="written", partition_id="p", sample_ids=ids, time_ns=100 * second), "w"
    )
    for sample, moment in zip(ids, claimed_ns, strict=True):
        claim = SampleEvent(
            kind="claimed", partition_id="p", sample_ids=[sample], time_ns=100 * second + moment, task="t"
        )
        lifecycle.add_event(claim, "w")
    (series,) = (
        stat
        for stat in registry.stats()
        if isinstance(stat, SeriesStat) and stat.name == "written_to_claimed"
    )
    return series.count, series.n_refused, series.max


def test_a_claim_that_overlaps_its_put_waited_for_nothing() -> None:
    assert waits_of(-300_000, 0, 5_000) == (3, 0, 5_000)


def test_a_clock_that_is_seconds_off_is_still_refused() -> None:
    assert waits_of(-5_000_000_000, 7) == (1, 1, 7)
