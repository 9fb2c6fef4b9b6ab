"""A partition as a flow: who writes, which tasks claim, what is cleared, and which stage holds it up.

Tasks are in the order in which the data passes them: one that needs a field which another task's workers
write comes after it.
"""

from __future__ import annotations

import msgspec

from rlplane.metrics.snapshot import MetricsSnapshot, PartitionStat, TaskStat

PRODUCERS = "producers"
# A backlog of less than this many seconds of work is what any pipeline has between two batches.
_BACKLOG_S = 1.0


class TaskFlow(msgspec.Struct):
    """One consumer task: samples per second that it claims, and what waits before it.

    ``after`` names the tasks whose workers write what it needs, and ``stage`` is its place on the way of the
    data, from 0; tasks of one stage work side by side. ``asks`` says in words what its claims ask for.
    """

    task: str
    rate: float
    ready: int | None
    claimed: int | None
    waiting: int | None
    stage: int = 0
    after: list[str] = []
    asks: str = ""


class FlowPicture(msgspec.Struct):
    """Rates in samples per second; ``tasks`` by stage. ``holdup`` names :data:`PRODUCERS` or a task; None
    when all keep up."""

    partition: str
    write_rate: float | None
    clear_rate: float | None
    samples: int | None
    bytes: int | None
    fill: float | None
    tasks: list[TaskFlow]
    holdup: str | None


def flows(snapshot: MetricsSnapshot) -> list[FlowPicture]:
    """Every partition's flow, the busiest first."""
    written, claimed, cleared = (
        _rates(snapshot, name) for name in ("samples_written", "claim_keys", "samples_cleared")
    )
    found = [_picture(part, written, claimed, cleared) for part in snapshot.partitions]
    return sorted(found, key=lambda flow: (-(flow.write_rate or 0), -(flow.samples or 0), flow.partition))


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
    write_rate = written.get((name, ""), 0.0) if part.tracked else None
    after = _order(part.tasks)
    stages = _stages(after)
    in_order = sorted(part.tasks, key=lambda task: stages[task.task])
    tasks = [
        TaskFlow(
            task.task,
            claimed.get((name, task.task), 0.0),
            task.ready,
            task.claimed,
            task.waiting,
            stages[task.task],
            after[task.task],
            _asks(task),
        )
        for task in in_order
    ]
    return FlowPicture(
        name,
        write_rate,
        cleared.get((name, ""), 0.0) if part.tracked else None,
        part.samples if part.known else None,
        part.bytes if part.known else None,
        fill_of(part),
        tasks,
        _find_holdup(in_order, write_rate or 0.0),
    )


def _order(tasks: list[TaskStat]) -> dict[str, list[str]]:
    """For each task those whose workers write what it needs."""
    # A task does not wait for what it writes itself, whatever else its workers claim for.
    gives = {task.task: set(task.writes) - set(task.fields) for task in tasks}
    return {
        task.task: [other for other, fields in gives.items() if fields & set(task.fields)] for task in tasks
    }


def _stages(after: dict[str, list[str]]) -> dict[str, int]:
    """The stage of each task: one more than the last of those that it comes after."""
    stages = dict.fromkeys(after, 0)
    for _ in after:  # So often and no more, because tasks may wait for each other in a circle.
        for task, others in after.items():
            stages[task] = min(max((stages[other] + 1 for other in others), default=0), len(after) - 1)
    return stages


def _asks(task: TaskStat) -> str:
    fields = f"with {', '.join(task.fields)}" if task.fields else ""
    return f"{fields} where {task.where}".strip() if task.where else fields


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
    # A task whose claims wait is starved by somebody else: what is ready does not make a batch. Of the
    # others, the one before which most samples wait; of several with about as many, the first on the way of
    # the data, because an engine may count all unclaimed samples as ready, and then those behind it show the
    # same.
    slow = [task for task in known if not task.waiting and task.ready]
    largest = max((task.ready or 0 for task in slow), default=0)
    if largest > max(1.0, _BACKLOG_S * write_rate):
        return next(task.task for task in slow if (task.ready or 0) >= 0.8 * largest)
    return PRODUCERS if all(task.starves for task in known) else None
