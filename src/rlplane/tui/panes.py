"""The tables of ``rlplane top``: which columns they have, and what stands out in them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from rlplane.metrics.snapshot import (
    LogLine,
    MetricsSnapshot,
    PartitionStat,
    SampleAge,
    TaskStat,
    WorkerStat,
)
from rlplane.tui.live_table import Column, LiveTable
from rlplane.tui.sparks import bar, spark
from rlplane.viewing.flow import fill_of
from rlplane.viewing.operations import by_operation
from rlplane.viewing.units import (
    format_age,
    format_bytes,
    format_count,
    format_duration,
    format_ns,
    format_percent,
)

SPARK_WIDTH = 24

Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class OpRow:
    """One operation over all partitions; latencies in ns over the whole run, without ``wait``: the mean time
    that those waited for samples or for room that had to."""

    op: str
    rate: float
    bytes_rate: float
    count: int
    failures: int
    timeouts: int
    p50: float | None
    p90: float | None
    p99: float | None
    recent: Sequence[float]
    wait: float | None = None


class WorkerRow(NamedTuple):
    """A worker, and how long ago it was last seen."""

    stat: WorkerStat
    seen_s: float


def op_rows(snapshot: MetricsSnapshot, recent: Mapping[str, deque[float]]) -> list[OpRow]:
    """The operations of a snapshot, the most frequent first."""
    rows = []
    for figures in by_operation(snapshot):
        percentiles = figures.latency.percentiles if figures.latency is not None else {}
        rows.append(
            OpRow(
                figures.op,
                figures.rates["count"],
                figures.rates["bytes"],
                figures.counts["count"],
                figures.counts["failures"],
                figures.counts["timeouts"],
                percentiles.get("p50"),
                percentiles.get("p90"),
                percentiles.get("p99"),
                list(recent.get(figures.op, ())),
                figures.waited_s / figures.waits * 1e9 if figures.waits else None,
            )
        )
    return rows


def worker_rows(snapshot: MetricsSnapshot) -> list[WorkerRow]:
    return [
        WorkerRow(worker, max(0.0, (snapshot.time_ns - worker.last_seen_ns) / 1e9))
        for worker in snapshot.workers
    ]


def _count(title: str, width: int, value: Callable[[Row], int | None], style: str) -> Column[Row]:
    """A count that stands out, unless it is 0."""
    return Column(title, width, value, format_count, style=lambda row: style if value(row) else "dim")


def op_table() -> LiveTable[OpRow]:
    return LiveTable(
        [
            Column("operation", 12, lambda row: row.op, left=True),
            Column("ops/s", 8, lambda row: row.rate, format_count),
            Column(
                "last seconds",
                SPARK_WIDTH,
                lambda row: row.rate,
                style=lambda row: "line",
                shows=lambda row: spark(row.recent, SPARK_WIDTH),
            ),
            Column("bytes/s", 10, lambda row: row.bytes_rate, format_bytes),
            Column("p50", 8, lambda row: row.p50, format_ns),
            Column("p90", 8, lambda row: row.p90, format_ns),
            Column("p99", 8, lambda row: row.p99, format_ns),
            Column("count", 8, lambda row: row.count, format_count),
            Column("waited", 8, lambda row: row.wait, format_ns),
            _count("failed", 7, lambda row: row.failures, "bad"),
            Column(
                "timeouts",
                8,
                lambda row: row.timeouts,
                format_count,
                # A claim that finds nothing in time is nothing bad.
                style=lambda row: "warn" if row.timeouts and row.op != "claim_meta" else "dim",
            ),
        ],
        key=lambda row: row.op,
        sort="count",
        empty="no operation has finished yet",
        id="ops",
    )


def _fill_text(share: float | None) -> str:
    return "" if share is None else f"{bar(share, 8)} {format_percent(share):>4}"


def _fill_style(part: PartitionStat) -> str:
    share = fill_of(part) or 0.0
    return "bad" if share > 0.9 else "warn" if share > 0.7 else "line"


def _waiting(part: PartitionStat) -> int | None:
    known = [task.waiting for task in part.tasks if task.waiting is not None]
    return sum(known) if known else None


def _tasks_text(part: PartitionStat) -> str:
    """``name ready/claimed/waiting`` for each task."""
    return "  ".join(
        f"{task.task} {format_count(task.ready)}/{format_count(task.claimed)}/{format_count(task.waiting)}"
        for task in part.tasks
    )


def partition_table() -> LiveTable[PartitionStat]:
    def if_known(name: str, form: Callable[[int | None], str]) -> Callable[[PartitionStat], str]:
        return lambda part: form(getattr(part, name) if part.known else None)

    def if_tracked(name: str) -> Callable[[PartitionStat], str]:
        return lambda part: format_count(getattr(part, name) if part.tracked else None)

    return LiveTable(
        [
            Column("partition", 14, lambda part: part.partition, left=True),
            Column("samples", 8, lambda part: part.samples, shows=if_known("samples", format_count)),
            Column("bytes", 9, lambda part: part.bytes, shows=if_known("bytes", format_bytes)),
            Column("full", 13, fill_of, _fill_text, style=_fill_style),
            Column("waiting", 7, _waiting, format_count),
            Column("oldest", 8, lambda part: part.oldest_age_s, format_duration),
            Column("written", 8, lambda part: part.written, shows=if_tracked("written")),
            Column("cleared", 8, lambda part: part.cleared, shows=if_tracked("cleared")),
            Column("each task: ready/claimed/waiting", 46, _tasks_text, left=True),
        ],
        key=lambda part: part.partition,
        sort="samples",
        empty="no partition has been seen yet",
        id="partitions",
    )


def task_table() -> LiveTable[tuple[TaskStat, float, float | None, float | None, float | None]]:
    """One partition's tasks: the stat, claims per second, delay p50 and p99 in ns, staleness p90."""
    return LiveTable(
        [
            Column("task", 16, lambda row: row[0].task, left=True),
            Column("ready", 9, lambda row: row[0].ready, format_count),
            Column("claimed", 9, lambda row: row[0].claimed, format_count),
            _count("waiting", 9, lambda row: row[0].waiting, "warn"),
            Column("claims/s", 9, lambda row: row[1], format_count),
            Column("delay p50", 10, lambda row: row[2], format_ns),
            Column("delay p99", 10, lambda row: row[3], format_ns),
            Column("stale p90", 9, lambda row: row[4], format_count),
        ],
        key=lambda row: row[0].task,
        empty="this partition has no consumer task",
        id="tasks",
    )


def worker_table() -> LiveTable[WorkerRow]:
    return LiveTable(
        [
            Column("worker", 18, lambda row: row.stat.worker, left=True),
            Column("role", 10, lambda row: row.stat.role, left=True),
            Column("host", 12, lambda row: row.stat.host, left=True),
            Column("pid", 8, lambda row: row.stat.pid),
            Column(
                "state",
                7,
                lambda row: row.stat.state,
                style=lambda row: {"silent": "bad", "gone": "dim"}.get(row.stat.state, ""),
            ),
            Column("ops/s", 8, lambda row: row.stat.rate, format_count),
            Column("bytes/s", 10, lambda row: row.stat.bytes_rate, format_bytes),
            Column("ops", 8, lambda row: row.stat.ops, format_count),
            _count("errors", 7, lambda row: row.stat.failures, "bad"),
            _count("dropped", 7, lambda row: row.stat.dropped, "warn"),
            Column("last seen", 9, lambda row: row.seen_s, format_age),
        ],
        key=lambda row: row.stat.worker,
        sort="ops/s",
        empty="no worker has been seen yet",
        id="workers",
    )


def sample_table() -> LiveTable[SampleAge]:
    return LiveTable(
        [
            Column("sample", 24, lambda sample: sample.sample_id, left=True),
            Column("partition", 16, lambda sample: sample.partition, left=True),
            Column("age", 9, lambda sample: sample.age_s, format_duration),
            Column("written by", 18, lambda sample: sample.worker, left=True),
            Column(
                "claimed by",
                28,
                lambda sample: len(sample.claimed_by),
                left=True,
                shows=lambda sample: ", ".join(sample.claimed_by) or "–",
            ),
            Column(
                "version", 8, lambda sample: sample.weight_version, lambda it: "–" if it is None else str(it)
            ),
            Column(
                "failed",
                6,
                lambda sample: sample.failed,
                lambda failed: "yes" if failed else "",
                style=lambda sample: "bad",
            ),
        ],
        key=lambda sample: f"{sample.partition}\0{sample.sample_id}",
        sort="age",
        empty="no tracked sample is in flight (observability.track_partitions says which are tracked)",
        id="samples",
    )


def log_table() -> LiveTable[LogLine]:
    def clock(time_ns: int) -> str:
        return time.strftime("%H:%M:%S", time.localtime(time_ns / 1e9))

    def message(line: LogLine) -> str:
        return f"{line.message} ({line.count} times)" if line.count > 1 else line.message

    def level(line: LogLine) -> str:
        return "bad" if line.level == "error" else "warn"

    return LiveTable(
        [
            Column("time", 9, lambda line: line.time_ns, clock),
            Column("level", 8, lambda line: line.level, style=level),
            Column("worker", 18, lambda line: line.worker, lambda worker: worker or "aggregator"),
            Column("message", 60, lambda line: line.message, left=True, style=level, shows=message),
        ],
        key=lambda line: f"{line.time_ns}{line.worker}{line.message}",
        sort="time",
        empty="no errors, no warnings",
        id="log",
    )
