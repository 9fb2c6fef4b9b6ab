"""The latest snapshot as Prometheus metrics: ``/metrics`` on the aggregator and on ``rlplane dash``.

Nothing is counted here: each scrape reads one snapshot. Names are ``rlplane_<noun>_<unit>[_total]`` in base
units. Labels are op, partition, task, field, state, kind, reason and the names of logged numbers, all of
which are bounded; never a sample id, a worker or a run in a name that is kept per series.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from rlplane.errors import MissingExtraError
from rlplane.metrics.snapshot import GRIDS, MetricsSnapshot, SeriesStat, SessionState
from rlplane.sinks.metrics_http import MetricsHttpServer

__all__ = ["SnapshotCollector", "render", "start_http"]

GetSnapshot = Callable[[], MetricsSnapshot | None]


class _Counter(NamedTuple):
    name: str
    help: str
    labels: tuple[str, ...] = ()


class _Histogram(NamedTuple):
    name: str
    help: str
    labels: tuple[str, ...] = ()
    lowest: float = 0.0  # In the series' own unit: what lies below counts in the first bucket.


_COUNTERS: dict[str, _Counter] = {
    "ops": _Counter("rlplane_operations", "Finished operations.", ("op", "partition")),
    "op_keys": _Counter("rlplane_operation_samples", "Samples that operations touched.", ("op", "partition")),
    "op_bytes": _Counter("rlplane_operation_bytes", "Bytes that operations moved.", ("op", "partition")),
    "op_failures": _Counter(
        "rlplane_operation_failures", "Operations that raised, timeouts aside.", ("op", "partition")
    ),
    "op_timeouts": _Counter(
        "rlplane_operation_timeouts",
        "Operations that timed out; a claim because too little was there.",
        ("op", "partition"),
    ),
    "claim_keys": _Counter("rlplane_claimed_samples", "Samples that claims returned.", ("partition", "task")),
    "field_bytes": _Counter(
        "rlplane_field_bytes", "Bytes written, of a tree by leaf.", ("partition", "field")
    ),
    "rows_checked": _Counter(
        "rlplane_rows_checked", "Rows compared with what was written.", ("partition", "field")
    ),
    "rows_unchecked": _Counter(
        "rlplane_rows_unchecked", "Rows read with nothing to compare with.", ("partition", "field")
    ),
    "rows_mismatched": _Counter(
        "rlplane_rows_mismatched", "Rows whose bytes were not those written.", ("partition", "field")
    ),
    "samples_written": _Counter(
        "rlplane_samples_written", "Samples seen for the first time.", ("partition",)
    ),
    "samples_claimed": _Counter("rlplane_samples_claimed", "First claims by a task.", ("partition", "task")),
    "samples_reclaimed": _Counter(
        "rlplane_samples_reclaimed",
        "Claims of a sample that the task had claimed before.",
        ("partition", "task"),
    ),
    "samples_cleared": _Counter("rlplane_samples_cleared", "Samples cleared.", ("partition",)),
    "tracked_samples_failed": _Counter("rlplane_samples_failed", "Samples that failed.", ("partition",)),
    "transfers": _Counter("rlplane_transfers", "Transfers that succeeded."),
    "transfer_bytes": _Counter("rlplane_transfer_bytes", "Bytes of transfers that succeeded."),
    "events": _Counter("rlplane_metrics_events", "Events that reached the aggregator."),
    "events_dropped": _Counter("rlplane_metrics_events_dropped", "Events dropped by full worker queues."),
    "batches_lost": _Counter("rlplane_metrics_batches_lost", "Gaps in the workers' batch numbers."),
    "bad_frames": _Counter("rlplane_metrics_bad_frames", "Frames that could not be read."),
    "values_refused": _Counter("rlplane_metrics_values_refused", "Values that were not numbers to count."),
    "samples_untracked": _Counter("rlplane_metrics_samples_untracked", "Steps of samples beyond the bound."),
    "trigger_failures": _Counter("rlplane_metrics_trigger_failures", "Triggers that raised."),
    "session_errors": _Counter("rlplane_session_errors", "Errors that the job reported."),
}
# The three failure counters of the transfer statistics, by the label `kind` of the snapshot.
_TRANSFER_FAILURES = {
    "transfer": _Counter("rlplane_failed_transfers", "Transfers that failed."),
    "notification": _Counter("rlplane_failed_notifications", "Completions that could not be announced."),
    "expired": _Counter("rlplane_expired_requests", "Claims that expired or were given back."),
}
_HISTOGRAMS: dict[str, _Histogram] = {
    "op_latency": _Histogram(
        "rlplane_operation_duration_seconds", "Time of operations, without waiting for others.", ("op",)
    ),
    "op_wait": _Histogram(
        "rlplane_operation_wait_seconds",
        "How long those waited that had to: claims for samples, puts for room.",
        ("op", "partition", "task"),
        lowest=1e6,
    ),
    "written_to_claimed": _Histogram(
        "rlplane_sample_claim_delay_seconds", "From write to first claim.", ("partition", "task"), lowest=1e6
    ),
    "written_to_cleared": _Histogram(
        "rlplane_sample_life_seconds", "From write to clear.", ("partition",), lowest=1e6
    ),
    "staleness": _Histogram(
        "rlplane_sample_staleness_versions", "Weight versions behind at the claim.", ("partition", "task")
    ),
    "transfer_duration": _Histogram("rlplane_transfer_duration_seconds", "Time to move the bytes."),
    "transfer_post_duration": _Histogram(
        "rlplane_transfer_post_duration_seconds", "Time to post a transfer."
    ),
    "transfer_size": _Histogram("rlplane_transfer_size_bytes", "Bytes per transfer."),
    "transfer_descriptors": _Histogram("rlplane_transfer_descriptors_count", "Descriptors per transfer."),
}
_GAUGES: dict[str, _Counter] = {
    "bytes_held": _Counter("rlplane_held_bytes", "Bytes held, in all partitions."),
    "samples_held": _Counter("rlplane_held_samples", "Samples held, in all partitions."),
    "weight_version": _Counter("rlplane_weight_version", "The newest weight version."),
    "partition_samples": _Counter("rlplane_partition_samples", "Samples held.", ("partition",)),
    "partition_bytes": _Counter("rlplane_partition_bytes", "Bytes held.", ("partition",)),
    "partition_never_cleared": _Counter(
        "rlplane_partition_never_cleared_samples", "Samples left when the run ended.", ("partition",)
    ),
    "partition_capacity_samples": _Counter(
        "rlplane_partition_capacity_samples", "Samples that fit.", ("partition",)
    ),
    "partition_capacity_bytes": _Counter(
        "rlplane_partition_capacity_bytes", "Bytes that fit.", ("partition",)
    ),
    "partition_oldest_age_seconds": _Counter(
        "rlplane_partition_oldest_age_seconds", "Age of the oldest sample.", ("partition",)
    ),
    "task_ready": _Counter(
        "rlplane_task_ready_samples",
        "Samples that satisfy the claim that waits, or was made last.",
        ("partition", "task"),
    ),
    "task_wanted": _Counter(
        "rlplane_task_wanted_samples", "Samples that this claim wants.", ("partition", "task")
    ),
    "task_claimed": _Counter("rlplane_task_claimed_samples", "Live samples claimed.", ("partition", "task")),
    "task_waiting": _Counter("rlplane_task_waiting_claims", "Claims that wait.", ("partition", "task")),
}
# Numbers of the flow policy. What only grows is a counter, though the engine's report is where it comes from.
_FLOW_GAUGES: dict[str, _Counter] = {
    "flow_version": _Counter("rlplane_flow_weight_version", "The weight version.", ("partition",)),
    "flow_max_staleness": _Counter("rlplane_flow_max_staleness_versions", "The bound.", ("partition",)),
    "flow_waiting": _Counter(
        "rlplane_flow_waiting_prompts", "Prompts that wait for admission.", ("partition",)
    ),
}
_FLOW_COUNTERS: dict[str, _Counter] = {
    "flow_admitted": _Counter("rlplane_flow_admitted_prompts", "Prompts admitted.", ("partition",)),
    "flow_evicted": _Counter(
        "rlplane_flow_evicted_samples", "Samples evicted or given up.", ("partition", "reason")
    ),
    "flow_closed_short": _Counter(
        "rlplane_flow_short_groups", "Groups closed short.", ("partition", "reason")
    ),
}
_PEAKS = {
    "bytes_held": ("rlplane_held_peak_bytes", "The most bytes held."),
    "samples_held": ("rlplane_held_peak_samples", "The most samples held."),
}
# Of the training steps that were marked, by operation. Each is a sum that only grows; what is left over would
# not be one, because of rounding.
_STEP_PARTS = {
    "count": _Counter("rlplane_step_operations", "Operations in training steps.", ("op",)),
    "seconds": _Counter("rlplane_step_plane_seconds", "Time of steps in the plane.", ("op",)),
    "waiting_s": _Counter("rlplane_step_waiting_seconds", "Of it, for samples or room.", ("op",)),
    "round_trips_s": _Counter("rlplane_step_round_trips_seconds", "Of it, for the service.", ("op",)),
    "bytes_s": _Counter("rlplane_step_bytes_seconds", "Of it, for moving bytes.", ("op",)),
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
            family = core.CounterMetricFamily(counter.name, counter.help, labels=counter.labels)
            stats = list(snapshot.counters(source))
            for stat in stats:
                family.add_metric(_values(counter.labels, stat.labels), float(stat.value))
            if not stats and not counter.labels:
                family.add_metric([], 0.0)  # So that an alert on a rate has something to start from.
            yield family
        for kind, counter in _TRANSFER_FAILURES.items():
            value = snapshot.total("transfer_failures", kind=kind)
            yield core.CounterMetricFamily(counter.name, counter.help, value=float(value))

    def _gauges(self, core: Any, snapshot: MetricsSnapshot) -> Iterator[Any]:
        kinds = {**_GAUGES, **_FLOW_GAUGES, **_FLOW_COUNTERS}
        families = {
            source: (core.CounterMetricFamily if source in _FLOW_COUNTERS else core.GaugeMetricFamily)(
                kind.name, kind.help, labels=kind.labels
            )
            for source, kind in kinds.items()
        }
        for stat in snapshot.gauges():
            gauge = kinds.get(stat.name)
            if gauge is not None:
                families[stat.name].add_metric(_values(gauge.labels, stat.labels), float(stat.value))
            if stat.name in _PEAKS and stat.peak is not None:
                name, text = _PEAKS[stat.name]
                yield core.GaugeMetricFamily(name, text, value=float(stat.peak))
        yield from families.values()

    def _histograms(self, core: Any, snapshot: MetricsSnapshot) -> Iterator[Any]:
        for source, histogram in _HISTOGRAMS.items():
            family = core.HistogramMetricFamily(histogram.name, histogram.help, labels=histogram.labels)
            for stat in snapshot.series(source):
                if stat.count and stat.grid_counts:
                    scale = 1e-9 if stat.unit == "ns" else 1.0
                    family.add_metric(
                        _values(histogram.labels, stat.labels),
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
            family = core.CounterMetricFamily(counter.name, counter.help, labels=counter.labels)
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


def _values(names: Iterable[str], labels: dict[str, str]) -> list[str]:
    return [labels.get(name, "") for name in names]


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
