"""A partition as a flow: who writes, which tasks claim, what is cleared, and which stage holds it up."""

from __future__ import annotations

import msgspec

from rlplane.metrics.snapshot import MetricsSnapshot, PartitionStat, TaskStat

__all__ = ["PRODUCERS", "FlowPicture", "TaskFlow", "fill_of", "flows", "partition_flow"]

PRODUCERS = "producers"
# A backlog of less than this many seconds of work is what any pipeline has between two batches.
_BACKLOG_S = 1.0


class TaskFlow(msgspec.Struct):
    """One consumer task: samples per second that it claims, and what waits before it."""

    task: str
    rate: float
    ready: int | None
    claimed: int | None
    waiting: int | None


class FlowPicture(msgspec.Struct):
    """Rates in samples per second. ``holdup`` names :data:`PRODUCERS` or a task; None when all keep up."""

    partition: str
    write_rate: float
    clear_rate: float
    samples: int
    bytes: int
    fill: float | None
    tasks: list[TaskFlow]
    holdup: str | None


def flows(snapshot: MetricsSnapshot) -> list[FlowPicture]:
    """Every partition's flow, the busiest first."""
    written, claimed, cleared = (
        _rates(snapshot, name) for name in ("samples_written", "samples_claimed", "samples_cleared")
    )
    found = [_picture(part, written, claimed, cleared) for part in snapshot.partitions]
    return sorted(found, key=lambda flow: (-flow.write_rate, -flow.samples, flow.partition))


def partition_flow(snapshot: MetricsSnapshot, partition: str) -> FlowPicture | None:
    """The flow of one partition, or None when it is not in the snapshot."""
    return next((flow for flow in flows(snapshot) if flow.partition == partition), None)


Rates = dict[tuple[str, str], float]


def _rates(snapshot: MetricsSnapshot, name: str) -> Rates:
    # Over once: looking each partition up by itself would cost partitions × counters.
    rates: Rates = {}
    for stat in snapshot.counters(name):
        key = stat.labels.get("partition", ""), stat.labels.get("task", "")
        rates[key] = rates.get(key, 0.0) + stat.rate
    return rates


def _picture(part: PartitionStat, written: Rates, claimed: Rates, cleared: Rates) -> FlowPicture:
    name = part.partition
    write_rate = written.get((name, ""), 0.0)
    tasks = [
        TaskFlow(task.task, claimed.get((name, task.task), 0.0), task.ready, task.claimed, task.waiting)
        for task in part.tasks
    ]
    return FlowPicture(
        name,
        write_rate,
        cleared.get((name, ""), 0.0),
        part.samples,
        part.bytes,
        fill_of(part),
        tasks,
        _find_holdup(part.tasks, write_rate),
    )


def fill_of(part: PartitionStat) -> float | None:
    """How full a partition is, by samples or by bytes, whichever is fuller; None without a capacity."""
    shares = [
        held / capacity
        for held, capacity in ((part.samples, part.capacity_samples), (part.bytes, part.capacity_bytes))
        if capacity
    ]
    return max(shares) if shares else None


def _find_holdup(tasks: list[TaskStat], write_rate: float) -> str | None:
    known = [task for task in tasks if task.ready is not None]
    if not known:
        return None
    # A task whose claims wait is starved by somebody else. Of the others, the first with about the largest
    # backlog: where an engine counts all unclaimed samples as ready, those behind it show the same backlog.
    slow = [task for task in known if not task.waiting and (task.ready or 0) > 0]
    largest = max((task.ready or 0 for task in slow), default=0)
    if largest > max(1.0, _BACKLOG_S * write_rate):
        return next(task.task for task in slow if (task.ready or 0) >= 0.8 * largest)
    return PRODUCERS if all(task.waiting and not task.ready for task in known) else None
