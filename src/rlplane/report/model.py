"""What a report says about a run, as a pure function of one snapshot."""

from __future__ import annotations

from typing import Any

import msgspec

from rlplane.metrics.snapshot import (
    OTHER,
    CounterStat,
    GaugeStat,
    LogLine,
    MetricsSnapshot,
    Number,
    PartitionStat,
    SampleAge,
    SeriesStat,
    SessionState,
    StepStat,
    StepTotals,
    TimelinePoint,
    WorkerStat,
)
from rlplane.viewing.operations import OP_COUNTERS, by_operation

REPORT_SCHEMA_VERSION = 1

_AS_IN_THE_SNAPSHOT = (
    *("run_id", "state", "exact", "started_ns", "elapsed_s", "n_pending_tasks", "n_never_cleared"),
    *("partitions", "workers", "oldest", "log", "timeline", "steps", "step_totals"),
)


class Flow(msgspec.Struct, omit_defaults=True):
    """One op in one partition; rates are averages over the run."""

    op: str
    partition: str
    count: int
    keys: int = 0
    bytes: int = 0
    failures: int = 0
    timeouts: int = 0
    ops_per_s: float = 0.0
    bytes_per_s: float = 0.0


class FieldTotal(msgspec.Struct, omit_defaults=True):
    """What was written to one field of one partition, or to one leaf of it."""

    partition: str
    field: str
    bytes: int = 0


class OpSummary(msgspec.Struct, omit_defaults=True):
    """One op over all partitions, with its latency."""

    op: str
    count: int
    keys: int = 0
    bytes: int = 0
    failures: int = 0
    timeouts: int = 0
    ops_per_s: float = 0.0
    bytes_per_s: float = 0.0
    latency: SeriesStat | None = None
    waited_s: float = 0.0


class Report(msgspec.Struct, omit_defaults=True, kw_only=True):
    """The report.

    ``complete`` iff the run ended as COMPLETE, nothing was pending, and every worker's last batch is in it;
    else a warning says why. ``source`` says where the snapshot came from: ``published``, ``file`` or
    ``live``.
    """

    run_id: str
    state: SessionState
    complete: bool
    exact: bool
    # A factory, because a plain default would be left out of the JSON.
    schema_version: int = msgspec.field(default_factory=lambda: REPORT_SCHEMA_VERSION)
    source: str = "published"
    warnings: list[str] = []
    started_ns: int = 0
    elapsed_s: float = 0.0
    n_pending_tasks: int = 0
    n_never_cleared: int = 0
    totals: dict[str, int] = {}
    gauges: dict[str, Number] = {}
    peaks: dict[str, Number] = {}
    ops: list[OpSummary] = []
    flows: list[Flow] = []
    fields: list[FieldTotal] = []
    series: list[SeriesStat] = []
    partitions: list[PartitionStat] = []
    workers: list[WorkerStat] = []
    oldest: list[SampleAge] = []
    log: list[LogLine] = []
    timeline: list[TimelinePoint] = []
    steps: list[StepStat] = []
    step_totals: StepTotals = msgspec.field(default_factory=StepTotals)

    @classmethod
    def from_snapshot(cls, snapshot: MetricsSnapshot, *, source: str = "published") -> Report:
        """Make the report of a snapshot. Depends on nothing else."""
        gauges = [stat for stat in snapshot.metrics if isinstance(stat, GaugeStat)]
        report = cls(
            complete=(
                snapshot.state is SessionState.COMPLETE
                and snapshot.n_pending_tasks == 0
                and not _unfinished_workers(snapshot.workers)
            ),
            source=source,
            totals=_totals(snapshot),
            gauges={stat.name: stat.value for stat in gauges},
            peaks={stat.name: stat.peak for stat in gauges if stat.peak is not None},
            ops=_ops(snapshot),
            flows=_flows(snapshot),
            fields=[
                FieldTotal(stat.labels["partition"], stat.labels["field"], stat.value)
                for stat in sorted(snapshot.counters("field_bytes"), key=lambda stat: -stat.value)
            ],
            series=[
                stat
                for stat in snapshot.metrics
                if isinstance(stat, SeriesStat) and stat.name != "op_latency"
            ],
            **{name: getattr(snapshot, name) for name in _AS_IN_THE_SNAPSHOT},
        )
        report.warnings = _warnings(report)
        return report

    def to_json(self) -> bytes:
        """The report as JSON, with a schema version."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2)

    def figures(self) -> dict[str, Any]:
        """Everything that follows from the events alone: no clock, no rate, no age.

        Two reports of the same events, one counted live and one offline, have equal figures.
        """
        return {
            "totals": self.totals,
            "gauges": {key: value for key, value in self.gauges.items() if key != "workers_alive"},
            "peaks": {key: value for key, value in self.peaks.items() if key != "workers_alive"},
            "ops": [_without_time(op) for op in self.ops],
            "flows": [_without_time(flow) for flow in self.flows],
            "series": [msgspec.to_builtins(series) for series in self.series],
            "partitions": [_without_time(partition) for partition in self.partitions],
            "workers": [_without_time(worker) for worker in self.workers],
            "never_cleared": sorted((row.partition, row.sample_id) for row in self.oldest),
            "n_never_cleared": self.n_never_cleared,
        }


_TIMES = {
    "ops_per_s",
    "bytes_per_s",
    "rate",
    "bytes_rate",
    "first_seen_ns",
    "last_seen_ns",
    "state",
    "oldest_age_s",
}


def _without_time(value: Any) -> Any:
    plain = msgspec.to_builtins(value) if isinstance(value, msgspec.Struct) else value
    if isinstance(plain, dict):
        return {key: _without_time(item) for key, item in plain.items() if key not in _TIMES}
    return [_without_time(item) for item in plain] if isinstance(plain, list) else plain


def _totals(snapshot: MetricsSnapshot) -> dict[str, int]:
    totals: dict[str, int] = {}
    for stat in snapshot.metrics:
        if isinstance(stat, CounterStat):
            totals[stat.name] = totals.get(stat.name, 0) + stat.value
    return totals


def _flows(snapshot: MetricsSnapshot) -> list[Flow]:
    flows: dict[tuple[str, str], Flow] = {}
    for stat in snapshot.metrics:
        field = OP_COUNTERS.get(stat.name)
        if field is not None and isinstance(stat, CounterStat):
            key = (stat.labels.get("op", ""), stat.labels.get("partition", ""))
            flow = flows.setdefault(key, Flow(*key, count=0))
            setattr(flow, field, stat.value)
    for flow in flows.values():
        flow.ops_per_s = _rate(flow.count, snapshot.elapsed_s)
        flow.bytes_per_s = _rate(flow.bytes, snapshot.elapsed_s)
    return sorted(flows.values(), key=lambda flow: (flow.op, flow.partition))


def _ops(snapshot: MetricsSnapshot) -> list[OpSummary]:
    return [
        OpSummary(
            figures.op,
            **figures.counts,
            ops_per_s=_rate(figures.counts["count"], snapshot.elapsed_s),
            bytes_per_s=_rate(figures.counts["bytes"], snapshot.elapsed_s),
            latency=figures.latency,
            waited_s=figures.waited_s,
        )
        for figures in sorted(by_operation(snapshot), key=lambda figures: figures.op)
    ]


def _rate(amount: int, seconds: float) -> float:
    return amount / seconds if seconds > 0 else 0.0


def _unfinished_workers(workers: list[WorkerStat]) -> list[str]:
    """The workers whose last batch never came: they were killed, could not send it, or still run."""
    return [worker.worker for worker in workers if worker.state != "gone" and worker.worker != OTHER]


def _warnings(report: Report) -> list[str]:
    found = []
    if report.state is SessionState.INTERRUPTED:
        found.append("The run was interrupted; what happened after that is not in this report.")
    elif report.state is not SessionState.COMPLETE:
        found.append(f"The run had not ended ({report.state.value}): these are live figures, not final ones.")
    elif report.n_pending_tasks:
        found.append(
            f"The drain timed out with {report.n_pending_tasks} tasks pending: figures may be short."
        )
    if report.state is SessionState.COMPLETE and (unfinished := _unfinished_workers(report.workers)):
        names = ", ".join(unfinished[:3]) + (", …" if len(unfinished) > 3 else "")
        found.append(
            f"The last events of {len(unfinished):,} workers never came ({names}): figures may be short."
        )
    if report.state.is_final and not report.exact:
        found.append("Some percentiles come from a histogram (3 significant figures), not from all values.")
    for name, text in (
        (
            "events_dropped",
            "events were dropped by workers, because a queue was full or they could not be encoded",
        ),
        ("batches_lost", "batches of events were lost on the way"),
        ("bad_frames", "frames could not be read"),
        ("values_refused", "values made no sense and were left out"),
        ("samples_untracked", "steps of samples were not followed, because too many were in flight"),
    ):
        if report.totals.get(name):
            found.append(f"{report.totals[name]:,} {text}.")
    if wrong := report.totals.get("rows_mismatched"):
        of = f"of {report.totals['rows_checked']:,} that were checked"
        found.append(f"{wrong:,} rows {of} came back with other bytes than were written.")
    if report.state.is_final and report.n_never_cleared:
        found.append(f"{report.n_never_cleared:,} samples were never cleared.")
    return found
