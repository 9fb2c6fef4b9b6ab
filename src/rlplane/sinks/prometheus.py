"""The latest snapshot as Prometheus metrics: ``/metrics`` on the aggregator and on ``rlplane dash``.

Nothing is counted here: each scrape reads one snapshot. Names are ``rlplane_<noun>_<unit>[_total]`` in base
units. Labels are op, partition, task, field, state, kind, reason and the names of logged numbers, all of
which are bounded; never a sample id, a worker or a run in a name that is kept per series.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from rlplane.errors import MissingExtraError
from rlplane.metrics.snapshot import GRIDS, MetricsSnapshot, SeriesStat, SessionState
from rlplane.sinks.metrics_http import MetricsHttpServer

GetSnapshot = Callable[[], MetricsSnapshot | None]


class _Family(NamedTuple):
    """One metric; its labels are some of those of what it is made from. Of a histogram, what lies below
    ``lowest``, in the series' own unit, counts in the first bucket."""

    name: str
    labels: str
    help: str
    lowest: float = 0.0

    def made(self, kind: Any) -> Any:
        return kind(self.name, self.help, labels=self.labels.split())

    def values(self, labels: dict[str, str]) -> list[str]:
        return [labels.get(name, "") for name in self.labels.split()]


_COUNTERS = {
    "ops": _Family("rlplane_operations", "op partition", "Finished operations."),
    "op_keys": _Family("rlplane_operation_samples", "op partition", "Samples that operations touched."),
    "op_bytes": _Family("rlplane_operation_bytes", "op partition", "Bytes that operations moved."),
    "op_failures": _Family(
        "rlplane_operation_failures", "op partition", "Operations that raised, timeouts aside."
    ),
    "op_timeouts": _Family(
        "rlplane_operation_timeouts",
        "op partition",
        "Operations that timed out; a claim because too little was there.",
    ),
    "claim_keys": _Family("rlplane_claimed_samples", "partition task", "Samples that claims returned."),
    "field_bytes": _Family("rlplane_field_bytes", "partition field", "Bytes written, of a tree by leaf."),
    "rows_checked": _Family(
        "rlplane_rows_checked", "partition field", "Rows compared with what was written."
    ),
    "rows_unchecked": _Family(
        "rlplane_rows_unchecked", "partition field", "Rows read with nothing to compare with."
    ),
    "rows_mismatched": _Family(
        "rlplane_rows_mismatched", "partition field", "Rows whose bytes were not those written."
    ),
    "samples_written": _Family("rlplane_samples_written", "partition", "Samples seen for the first time."),
    "samples_claimed": _Family("rlplane_samples_claimed", "partition task", "First claims by a task."),
    "samples_reclaimed": _Family(
        "rlplane_samples_reclaimed", "partition task", "Claims of a sample that the task had claimed before."
    ),
    "samples_cleared": _Family("rlplane_samples_cleared", "partition", "Samples cleared."),
    "tracked_samples_failed": _Family("rlplane_samples_failed", "partition", "Samples that failed."),
    "transfers": _Family("rlplane_transfers", "", "Transfers that succeeded."),
    "transfer_bytes": _Family("rlplane_transfer_bytes", "", "Bytes of transfers that succeeded."),
    "events": _Family("rlplane_metrics_events", "", "Events that reached the aggregator."),
    "events_dropped": _Family("rlplane_metrics_events_dropped", "", "Events dropped by full worker queues."),
    "batches_lost": _Family("rlplane_metrics_batches_lost", "", "Gaps in the workers' batch numbers."),
    "bad_frames": _Family("rlplane_metrics_bad_frames", "", "Frames that could not be read."),
    "values_refused": _Family("rlplane_metrics_values_refused", "", "Values that were not numbers to count."),
    "samples_untracked": _Family(
        "rlplane_metrics_samples_untracked", "", "Steps of samples beyond the bound."
    ),
    "trigger_failures": _Family("rlplane_metrics_trigger_failures", "", "Triggers that raised."),
    "session_errors": _Family("rlplane_session_errors", "", "Errors that the job reported."),
}
# The three failure counters of the transfer statistics, by the label `kind` of the snapshot.
_TRANSFER_FAILURES = {
    "transfer": _Family("rlplane_failed_transfers", "", "Transfers that failed."),
    "notification": _Family("rlplane_failed_notifications", "", "Completions that could not be announced."),
    "expired": _Family("rlplane_expired_requests", "", "Claims that expired or were given back."),
}
_HISTOGRAMS = {
    "op_latency": _Family(
        "rlplane_operation_duration_seconds", "op", "Time of operations, without waiting for others."
    ),
    "op_wait": _Family(
        "rlplane_operation_wait_seconds",
        "op partition task",
        "How long those waited that had to: claims for samples, puts for room.",
        1e6,
    ),
    "written_to_claimed": _Family(
        "rlplane_sample_claim_delay_seconds", "partition task", "From write to first claim.", 1e6
    ),
    "written_to_cleared": _Family("rlplane_sample_life_seconds", "partition", "From write to clear.", 1e6),
    "staleness": _Family(
        "rlplane_sample_staleness_versions", "partition task", "Weight versions behind at the claim."
    ),
    "transfer_duration": _Family("rlplane_transfer_duration_seconds", "", "Time to move the bytes."),
    "transfer_post_duration": _Family(
        "rlplane_transfer_post_duration_seconds", "", "Time to post a transfer."
    ),
    "transfer_size": _Family("rlplane_transfer_size_bytes", "", "Bytes per transfer."),
    "transfer_descriptors": _Family("rlplane_transfer_descriptors_count", "", "Descriptors per transfer."),
}
_GAUGES = {
    "bytes_held": _Family("rlplane_held_bytes", "", "Bytes held, in all partitions."),
    "samples_held": _Family("rlplane_held_samples", "", "Samples held, in all partitions."),
    "weight_version": _Family("rlplane_weight_version", "", "The newest weight version."),
    "partition_samples": _Family("rlplane_partition_samples", "partition", "Samples held."),
    "partition_bytes": _Family("rlplane_partition_bytes", "partition", "Bytes held."),
    "partition_never_cleared": _Family(
        "rlplane_partition_never_cleared_samples", "partition", "Samples left when the run ended."
    ),
    "partition_capacity_samples": _Family(
        "rlplane_partition_capacity_samples", "partition", "Samples that fit."
    ),
    "partition_capacity_bytes": _Family("rlplane_partition_capacity_bytes", "partition", "Bytes that fit."),
    "partition_oldest_age_seconds": _Family(
        "rlplane_partition_oldest_age_seconds", "partition", "Age of the oldest sample."
    ),
    "task_ready": _Family(
        "rlplane_task_ready_samples",
        "partition task",
        "Samples that satisfy the claim that waits, or was made last.",
    ),
    "task_wanted": _Family("rlplane_task_wanted_samples", "partition task", "Samples that this claim wants."),
    "task_claimed": _Family("rlplane_task_claimed_samples", "partition task", "Live samples claimed."),
    "task_waiting": _Family("rlplane_task_waiting_claims", "partition task", "Claims that wait."),
    "flow_version": _Family("rlplane_flow_weight_version", "partition", "The weight version."),
    "flow_max_staleness": _Family("rlplane_flow_max_staleness_versions", "partition", "The bound."),
    "flow_waiting": _Family("rlplane_flow_waiting_prompts", "partition", "Prompts that wait for admission."),
}
# Numbers of the flow policy that only grow: counters, though the engine's report is where they come from.
_FLOW_COUNTERS = {
    "flow_admitted": _Family("rlplane_flow_admitted_prompts", "partition", "Prompts admitted."),
    "flow_evicted": _Family(
        "rlplane_flow_evicted_samples", "partition reason", "Samples evicted or given up."
    ),
    "flow_closed_short": _Family("rlplane_flow_short_groups", "partition reason", "Groups closed short."),
}
_PEAKS = {
    "bytes_held": ("rlplane_held_peak_bytes", "The most bytes held."),
    "samples_held": ("rlplane_held_peak_samples", "The most samples held."),
}
# Of the training steps that were marked, by operation. Each is a sum that only grows; what is left over would
# not be one, because of rounding.
_STEP_PARTS = {
    "count": _Family("rlplane_step_operations", "op", "Operations in training steps."),
    "seconds": _Family("rlplane_step_plane_seconds", "op", "Time of steps in the plane."),
    "waiting_s": _Family("rlplane_step_waiting_seconds", "op", "Of it, for samples or room."),
    "round_trips_s": _Family("rlplane_step_round_trips_seconds", "op", "Of it, for the service."),
    "bytes_s": _Family("rlplane_step_bytes_seconds", "op", "Of it, for moving bytes."),
}
# More names than this are not shown: the newest stay.
_MOST_LOGGED = 200
_WORKER_STATES = ("alive", "silent", "gone")
# Of the grid's six steps per decade these three: 28 buckets for times are plenty for a quantile.
_TIME_STEPS = ("1", "2", "5")  # The first digit of 1, 2.5 and 5.


class SnapshotCollector:
    """A collector for ``prometheus_client``: one method, no state.

    Args:
        get_snapshot: Returns the snapshot to show, or None while there is none.
    """

    def __init__(self, get_snapshot: GetSnapshot) -> None:
        self._get_snapshot = get_snapshot

    def collect(self) -> Iterator[Any]:
        """The metric families of the latest snapshot."""
        core = _core()
        snapshot = self._get_snapshot()
        yield core.GaugeMetricFamily(
            "rlplane_up", "Whether there is a snapshot.", value=float(snapshot is not None)
        )
        if snapshot is None:
            return
        yield from self._run(core, snapshot)
        yield from self._counters(core, snapshot)
        yield from self._gauges(core, snapshot)
        yield from self._histograms(core, snapshot)
        yield from self._steps(core, snapshot)

    def _run(self, core: Any, snapshot: MetricsSnapshot) -> Iterator[Any]:
        info = core.InfoMetricFamily("rlplane_run", "The run that is shown.")
        info.add_metric([], {"run_id": snapshot.run_id, "host": snapshot.host})
        yield info
        state = core.GaugeMetricFamily("rlplane_run_state", "1 for the run's state.", labels=["state"])
        for candidate in SessionState:
            state.add_metric([candidate.value], float(candidate is snapshot.state))
        yield state
        for name, text, value in (
            ("rlplane_run_elapsed_seconds", "How long the run has lasted.", snapshot.elapsed_s),
            ("rlplane_snapshot_timestamp_seconds", "When the snapshot was taken.", snapshot.time_ns / 1e9),
            ("rlplane_in_flight_samples", "Tracked samples written and not cleared.", snapshot.n_in_flight),
        ):
            yield core.GaugeMetricFamily(name, text, value=float(value))
        workers = core.GaugeMetricFamily("rlplane_workers", "Worker processes by state.", labels=["state"])
        for name in _WORKER_STATES:
            workers.add_metric([name], float(sum(worker.state == name for worker in snapshot.workers)))
        yield workers

    def _counters(self, core: Any, snapshot: MetricsSnapshot) -> Iterator[Any]:
        for source, counter in _COUNTERS.items():
            family = counter.made(core.CounterMetricFamily)
            stats = list(snapshot.counters(source))
            for stat in stats:
                family.add_metric(counter.values(stat.labels), float(stat.value))
            if not stats and not counter.labels:
                family.add_metric([], 0.0)  # So that an alert on a rate has something to start from.
            yield family
        for kind, counter in _TRANSFER_FAILURES.items():
            value = snapshot.total("transfer_failures", kind=kind)
            yield core.CounterMetricFamily(counter.name, counter.help, value=float(value))

    def _gauges(self, core: Any, snapshot: MetricsSnapshot) -> Iterator[Any]:
        known = {**_GAUGES, **_FLOW_COUNTERS}
        families = {source: one.made(core.GaugeMetricFamily) for source, one in _GAUGES.items()}
        families |= {source: one.made(core.CounterMetricFamily) for source, one in _FLOW_COUNTERS.items()}
        for stat in snapshot.gauges():
            if stat.name in known:
                families[stat.name].add_metric(known[stat.name].values(stat.labels), float(stat.value))
            if stat.name in _PEAKS and stat.peak is not None:
                name, text = _PEAKS[stat.name]
                yield core.GaugeMetricFamily(name, text, value=float(stat.peak))
        yield from families.values()

    def _histograms(self, core: Any, snapshot: MetricsSnapshot) -> Iterator[Any]:
        for source, histogram in _HISTOGRAMS.items():
            family = histogram.made(core.HistogramMetricFamily)
            for stat in snapshot.series(source):
                if stat.count and stat.grid_counts:
                    scale = 1e-9 if stat.unit == "ns" else 1.0
                    family.add_metric(
                        histogram.values(stat.labels),
                        list(_buckets(stat, histogram.lowest)),
                        stat.total * scale,
                    )
            yield family

    def _steps(self, core: Any, snapshot: MetricsSnapshot) -> Iterator[Any]:
        totals = snapshot.step_totals
        for name, text, value in (
            ("rlplane_steps", "Training steps that were marked.", totals.count),
            ("rlplane_step_seconds", "Time of training steps.", totals.seconds),
            ("rlplane_step_tokens", "Tokens of training steps.", totals.tokens),
        ):
            yield core.CounterMetricFamily(name, text, value=float(value))
        for part, counter in _STEP_PARTS.items():
            family = counter.made(core.CounterMetricFamily)
            for op in totals.ops:
                family.add_metric([op.op], float(getattr(op, part)))
            yield family
        number = core.GaugeMetricFamily("rlplane_step_number", "The number of the last training step.")
        numbers = [stat.step for stat in snapshot.steps if stat.step is not None]
        if numbers:
            number.add_metric([], float(numbers[-1]))
        yield number
        logged: dict[str, float] = {}
        for stat in snapshot.steps:
            for name, value in stat.scalars.items():
                logged.pop(name, None)  # So that the newest come last.
                logged[name] = value
        family = core.GaugeMetricFamily("rlplane_logged_value", "The last of client.log.", labels=["name"])
        for name in sorted(list(logged)[-_MOST_LOGGED:]):
            family.add_metric([name], logged[name])
        yield family


def _buckets(stat: SeriesStat, lowest: float) -> Iterator[tuple[str, float]]:
    """Cumulative counts up to each bound, the last one being infinity."""
    edges, counts, below = GRIDS[stat.unit], stat.grid_counts, 0
    for position, high in enumerate(edges[1:]):
        offset = position - stat.grid_first
        if 0 <= offset < len(counts):
            below += counts[offset]
        if high < lowest or position == len(edges) - 2:  # The last bucket holds all that is larger.
            continue
        if stat.unit == "ns":
            if f"{high:e}"[0] in _TIME_STEPS and not f"{high:e}".startswith("1.5"):
                yield f"{high * 1e-9:.9g}", below
        elif stat.unit == "versions":
            yield f"{high - 1:g}", below  # Whole numbers: below `high` is at most one less.
        else:
            yield f"{high:g}", below
    yield "+Inf", stat.count


def render(get_snapshot: GetSnapshot, accept: str = "") -> tuple[bytes, str]:
    """The exposition that a scraper with this Accept header wants, and its content type."""
    client = _client()
    registry = client.CollectorRegistry(auto_describe=False)
    registry.register(SnapshotCollector(get_snapshot))
    encode, content_type = client.exposition.choose_encoder(accept)
    return encode(registry), content_type


def start_http(port: int, get_snapshot: GetSnapshot, token: str | None = None) -> MetricsHttpServer:
    """Serve ``/metrics`` on this machine from a background thread; port 0 picks a free one.

    Raises:
        MissingExtraError: ``prometheus_client`` is not installed.
        PlaneConnectionError: The port cannot be had.
    """
    _client()
    return MetricsHttpServer(port, lambda accept: render(get_snapshot, accept), token)


def _client() -> Any:
    try:
        import prometheus_client
        import prometheus_client.exposition
    except ImportError as error:
        raise MissingExtraError(
            "Prometheus metrics need the package 'prometheus_client', which is not installed:"
            " pip install 'rlplane[prometheus]'"
        ) from error
    return prometheus_client


def _core() -> Any:
    _client()
    import prometheus_client.core

    return prometheus_client.core
