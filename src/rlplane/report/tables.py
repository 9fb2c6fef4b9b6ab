"""The tables of a report, as cells of text: what a terminal and a page both show."""

from __future__ import annotations

from dataclasses import dataclass

from rlplane.metrics.snapshot import SeriesStat
from rlplane.report.model import Report
from rlplane.viewing.units import (
    format_bytes,
    format_duration,
    format_full_count,
    format_ns,
    format_reasons,
    format_share,
    format_value,
)

_WAITS = "op_wait"


@dataclass(frozen=True)
class Table:
    """A titled table; every row has one cell per column."""

    title: str
    columns: list[str]
    rows: list[list[str]]

    def is_numeric(self, column: int) -> bool:
        """Whether a column holds numbers, which are set to the right."""
        cells = [row[column] for row in self.rows]
        return bool(cells) and all(cell == "–" or cell[:1].isdigit() for cell in cells)


def tables(report: Report) -> list[Table]:
    """The tables that have a row."""
    parts = (_steps, _ops, _waits, _flows, _partitions, _fields, _policies, _tasks, _series)
    made = (part(report) for part in (*parts, _workers, _worker_ops, _oldest))
    return [table for table in made if table.rows]


def _counts(*values: float | None) -> list[str]:
    return [format_full_count(value) for value in values]


def _times(series: SeriesStat | None, *names: str) -> list[str]:
    """Some percentiles of a series in ns, and its maximum."""
    if series is None:
        return [format_ns(None)] * (len(names) + 1)
    return [*(format_ns(series.percentiles.get(name)) for name in names), format_ns(series.max)]


def _ops(report: Report) -> Table:
    columns = ["op", "count", "per s", "bytes", "bytes/s", "failed", "timeouts"]
    names = ["p50", "p90", "p99", "p99.9"]
    rows = [
        [
            op.op,
            *_counts(op.count, op.ops_per_s),
            format_bytes(op.bytes),
            format_bytes(op.bytes_per_s),
            *_counts(op.failures, op.timeouts),
            *_times(op.latency, *names),
        ]
        for op in report.ops
    ]
    return Table("Operations", [*columns, *names, "max"], rows)


def _steps(report: Report) -> Table:
    totals = report.step_totals
    seconds, count = totals.seconds or 1.0, totals.count or 1
    parts = ("seconds", "waiting_s", "round_trips_s", "bytes_s")
    rows = [
        [
            op.op,
            format_full_count(op.count / count),
            *(format_share(getattr(op, part) / seconds) for part in parts),
        ]
        for op in totals.ops
    ]
    columns = ["op", "calls per step", "share of the step", "waiting", "round trips", "bytes"]
    return Table("Training steps: time in the plane", columns, rows)


def _waits(report: Report) -> Table:
    rows = [
        [
            series.labels.get("op", ""),
            series.labels.get("partition", "") or "–",
            series.labels.get("task", "") or "–",
            format_full_count(series.count),
            format_duration(series.total / 1e9),
            *_times(series, "p50", "p90", "p99"),
        ]
        for series in report.series
        if series.name == _WAITS
    ]
    columns = ["op", "partition", "task", "waited", "in all", "p50", "p90", "p99", "max"]
    return Table("Waiting (claims for samples, puts for room; not part of the latency)", columns, rows)


def _flows(report: Report) -> Table:
    return Table(
        "Throughput by op and partition",
        ["op", "partition", "count", "keys", "per s", "bytes/s", "failed", "timeouts"],
        [
            [
                flow.op,
                flow.partition or "–",
                *_counts(flow.count, flow.keys, flow.ops_per_s),
                format_bytes(flow.bytes_per_s),
                *_counts(flow.failures, flow.timeouts),
            ]
            for flow in report.flows
        ],
    )


def _partitions(report: Report) -> Table:
    return Table(
        "Partitions",
        ["partition", "samples", "peak", "bytes", "peak", "written", "cleared", "failed", "never cleared"],
        [
            [
                part.partition,
                *(format_full_count(n if part.known else None) for n in (part.samples, part.peak_samples)),
                *(format_bytes(n if part.known else None) for n in (part.bytes, part.peak_bytes)),
                *(
                    format_full_count(n if part.tracked else None)
                    for n in (part.written, part.cleared, part.failed, part.never_cleared)
                ),
            ]
            for part in report.partitions
        ],
    )


def _fields(report: Report) -> Table:
    rows = [[total.partition, total.field, format_bytes(total.bytes)] for total in report.fields]
    return Table("Bytes written by field, of trees by leaf", ["partition", "field", "bytes"], rows)


def _policies(report: Report) -> Table:
    columns = ["partition", "policy", "version", "bound", "admitted", "waiting for admission"]
    rows = [
        [
            part.partition,
            part.flow.policy or "–",
            *_counts(part.flow.version, part.flow.max_staleness, part.flow.admitted, part.flow.waiting),
            format_reasons(part.flow.evicted),
            format_reasons(part.flow.closed_short),
        ]
        for part in report.partitions
        if part.flow is not None
    ]
    return Table("Flow control", [*columns, "evicted", "groups closed short"], rows)


def _tasks(report: Report) -> Table:
    rows = [
        [part.partition, task.task, *_counts(task.ready, task.claimed, task.waiting)]
        for part in report.partitions
        for task in part.tasks
    ]
    return Table("Tasks", ["partition", "task", "ready", "claimed", "waiting"], rows)


def _series(report: Report) -> Table:
    rows = []
    for series in report.series:
        if series.name == _WAITS:
            continue
        percentiles = series.percentiles
        values = (series.mean, *(percentiles.get(name) for name in ("p50", "p90", "p99")), series.max)
        rows.append(
            [
                series.name.replace("_", " "),
                " / ".join(series.labels.values()) or "–",
                format_full_count(series.count),
                *(format_value(value, series.unit) for value in values),
            ]
        )
    return Table("Samples and transfers", ["what", "of", "count", "mean", "p50", "p90", "p99", "max"], rows)


def _workers(report: Report) -> Table:
    columns = ["worker", "role", "pid", "state", "ops", "bytes", "failed", "timeouts", "dropped"]
    rows = [
        [
            worker.worker,
            worker.role or "–",
            str(worker.pid),
            worker.state,
            format_full_count(worker.ops),
            format_bytes(worker.bytes),
            *_counts(worker.failures, worker.timeouts, worker.dropped, worker.never_cleared),
            *_counts(worker.staleness.mean if worker.staleness is not None else None),
        ]
        for worker in sorted(report.workers, key=lambda worker: worker.worker)
    ]
    return Table("Workers", [*columns, "never cleared", "staleness"], rows)


def _worker_ops(report: Report) -> Table:
    rows = []
    for worker in sorted(report.workers, key=lambda worker: worker.worker):
        for op in worker.by_op:
            latency = op.latency
            values = (
                (latency.p50, latency.p90, latency.p99, latency.max) if latency is not None else [None] * 4
            )
            rows.append(
                [
                    worker.worker,
                    op.op,
                    *_counts(op.count, op.keys, op.failures, op.timeouts),
                    format_bytes(op.bytes),
                    *(format_ns(value) for value in values),
                ]
            )
    columns = ["worker", "op", "count", "keys", "failed", "timeouts", "bytes", "p50", "p90", "p99", "max"]
    return Table("Operations by worker", columns, rows)


def _oldest(report: Report) -> Table:
    title = "Samples never cleared (oldest first)" if report.state.is_final else "Oldest samples in flight"
    return Table(
        title,
        ["sample", "partition", "age", "written by", "claimed by", "weight version"],
        [
            [
                row.sample_id,
                row.partition,
                format_duration(row.age_s),
                row.worker,
                ", ".join(row.claimed_by) or "–",
                "–" if row.weight_version is None else str(row.weight_version),
            ]
            for row in report.oldest
        ],
    )
