"""Operations, folded by column: counts and bytes by op and partition and by worker, latencies by op, and
apart from those how long they waited for samples or for room, by op, partition and task.

Taking a batch translates its small table of keys and keeps its arrays; :meth:`OperationStats.fold` then
brings all that arrived since the last tick together and groups it with array operations. What a single
operation costs is a few tens of nanoseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from rlplane.metrics.events import STATUS_OK, STATUS_TIMEOUT, ColumnName, OpColumns, OpKey
from rlplane.metrics.registry import CounterSampler, MetricsRegistry, SeriesSampler
from rlplane.metrics.snapshot import (
    MAX_OPS,
    MAX_PARTITIONS,
    MAX_TASKS,
    OTHER,
    SeriesSummary,
    TimelinePoint,
    WorkerOpStat,
)

K = TypeVar("K")
V = TypeVar("V")

Int64Array = npt.NDArray[np.int64]

_OK, _ERROR, _TIMEOUT = 0, 1, 2

# Operations that may wait for a fold before one is made between two ticks.
_MAX_WAITING = 1 << 18

# More than any operation moves: a larger figure is a mistake, and sums of these stay within 64 bits.
_MAX_PLAUSIBLE = 1 << 48

# A worker's own latencies are folded at the tick, but not more often than this: there may be hundreds.
_WORKER_REFRESH_S = 1.0


class LabelSet:
    """The first ``limit`` names keep their own label; all further ones share :data:`OTHER`."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._names: set[str] = set()

    def label(self, name: str) -> str:
        if name in self._names:
            return name
        if len(self._names) >= self._limit:
            return OTHER
        self._names.add(name)
        return name


@dataclass
class _Slot:
    """Exact totals of one combination of labels."""

    ok: int = 0
    failures: int = 0
    timeouts: int = 0
    keys: int = 0
    bytes: int = 0

    @property
    def count(self) -> int:
        return self.ok + self.failures + self.timeouts

    def add(self, statuses: list[int], keys: int, size: int) -> None:
        self.ok += statuses[_OK]
        self.failures += statuses[_ERROR]
        self.timeouts += statuses[_TIMEOUT]
        self.keys += keys
        self.bytes += size


class _PartitionOp(_Slot):
    """One op in one partition, with its counters of the registry."""

    def __init__(self, registry: MetricsRegistry, op: str, partition: str) -> None:
        super().__init__()
        labels = {"op": op, "partition": partition}
        names = ("ops", "op_keys", "op_bytes", "op_failures", "op_timeouts")
        self.counters: list[CounterSampler] = [registry.register_counter(name, labels) for name in names]

    def add(self, statuses: list[int], keys: int, size: int) -> None:
        super().add(statuses, keys, size)
        for counter, by in zip(
            self.counters, (sum(statuses), keys, size, statuses[_ERROR], statuses[_TIMEOUT]), strict=True
        ):
            counter.increment(by)


class _WorkerOp(_Slot):
    """One op of one worker, with its own latencies."""

    def __init__(self, registry: MetricsRegistry, op: str, worker: str) -> None:
        super().__init__()
        labels = {"op": op, "worker": worker}
        self.op = op
        self.latency = registry.register_series("worker_op_latency", labels, figures=2, listed=False)
        self.rate = CounterSampler("worker_ops", labels)
        self.wait_ns = 0
        self._summary: SeriesSummary | None = None
        self._refreshed = 0.0

    def stat(self, now: float, exact: bool) -> WorkerOpStat:
        if exact or now - self._refreshed >= _WORKER_REFRESH_S:
            self._refreshed = now
            self._summary = self.latency.summary(exact=exact)
        self.rate.value = self.count
        rate = self.rate.rate(now)
        return WorkerOpStat(
            self.op,
            self.count,
            self.keys,
            self.bytes,
            self.failures,
            self.timeouts,
            rate,
            self._summary,
            self.wait_ns / 1e9,
        )


class _TaskOp:
    """One op in one partition for one task ("" where there is none): what it claimed, and how it waited."""

    def __init__(self, registry: MetricsRegistry, op: str, partition: str, task: str) -> None:
        self._registry = registry
        self._labels = {"op": op, "partition": partition, **({"task": task} if task else {})}
        self._waits: SeriesSampler | None = None
        of_task = {"partition": partition, "task": task}
        self._claimed = registry.register_counter("claim_keys", of_task) if op == "claim_meta" else None

    def claim(self, keys: int) -> None:
        if self._claimed is not None:
            self._claimed.increment(keys)

    def wait(self, waits: Int64Array) -> None:
        if self._waits is None:  # Most ops never wait.
            self._waits = self._registry.register_series("op_wait", self._labels)
        self._waits.record_many(waits)


class _Numbered(Generic[K, V]):
    """What ``make`` makes of keys, once for each; numbered in the order in which they were first seen."""

    def __init__(self, make: Callable[[K], V]) -> None:
        self._make = make
        self.numbers: dict[K, int] = {}
        self.made: list[V] = []

    def number(self, key: K) -> int:
        found = self.numbers.get(key)
        if found is None:
            self.made.append(self._make(key))
            found = self.numbers[key] = len(self.made) - 1
        return found


class OperationStats:
    """Everything about operations; what they add up to goes into ``totals``."""

    def __init__(self, registry: MetricsRegistry, totals: TimelinePoint) -> None:
        self._registry = registry
        self._totals = totals
        self._op_labels = LabelSet(MAX_OPS)
        self._partition_labels = LabelSet(MAX_PARTITIONS)
        self._task_labels: dict[str, LabelSet] = {}
        self._partition_ops = _Numbered[tuple[str, str], _PartitionOp](
            lambda key: _PartitionOp(registry, *key)
        )
        self._task_ops = _Numbered[tuple[str, str, str], _TaskOp](lambda key: _TaskOp(registry, *key))
        self._worker_ops = _Numbered(self._make_worker_op)
        # The workers keep the values; the sum over them needs no second copy.
        self._latency = _Numbered[str, SeriesSampler](
            lambda op: registry.register_series("op_latency", {"op": op}, keep_values=False)
        )
        self._by_worker: dict[str, list[_WorkerOp]] = {}
        self._op_of_worker_op: list[int] = []
        self._known_keys: dict[tuple[str, OpKey], tuple[int, int, int, int]] = {}
        # What waits for the fold, by batch: what each operation is (as `_translate` says), and its columns.
        self._waiting: list[tuple[Int64Array, ...]] = []
        self._n_waiting = 0
        self.n_refused = 0

    def add(self, columns: OpColumns, worker: str) -> None:
        """Take a batch of ``worker`` (its label)."""
        if not len(columns):
            return
        ids = np.array([self._translate(worker, key) for key in columns.keys], np.int64)
        names: tuple[ColumnName, ...] = ("n_keys", "n_bytes", "wall_ns", "wait_ns")
        self._waiting.append((ids[columns.indices()], *map(columns.column, names)))
        self._n_waiting += len(columns)
        if self._n_waiting >= _MAX_WAITING:
            self.fold()

    def _translate(self, worker: str, key: OpKey) -> tuple[int, int, int, int]:
        """The numbers of its partition op, its worker op, its status and its task op."""
        known = self._known_keys.get((worker, key))
        if known is None:
            op = self._op_labels.label(key.op)
            partition = self._partition_labels.label(key.partition_id)
            status = {STATUS_OK: _OK, STATUS_TIMEOUT: _TIMEOUT}.get(key.status, _ERROR)
            tasks = self._task_labels.setdefault(partition, LabelSet(MAX_TASKS))
            task = tasks.label(key.task) if key.task else ""
            known = (
                self._partition_ops.number((op, partition)),
                self._worker_ops.number((op, worker)),
                status,
                self._task_ops.number((op, partition, task)),
            )
            if len(self._known_keys) >= 1 << 16:  # Only a cache: threads and names may go on for ever.
                self._known_keys.clear()
            self._known_keys[worker, key] = known
        return known

    def _make_worker_op(self, key: tuple[str, str]) -> _WorkerOp:
        op, worker = key
        made = _WorkerOp(self._registry, op, worker)
        op_id = self._latency.number(op)
        self._latency.made[op_id].exact_sources.append(made.latency)
        self._op_of_worker_op.append(op_id)
        self._by_worker.setdefault(worker, []).append(made)
        return made

    def fold(self) -> None:
        """Bring what waits into counters and series."""
        if not self._waiting:
            return
        rows, *columns = (np.concatenate(parts) for parts in zip(*self._waiting, strict=True))
        self._waiting, self._n_waiting = [], 0
        partition_op, worker_op, status, task_op = np.ascontiguousarray(rows.T)
        keys, size, wait = (self._plausible(columns[at]) for at in (0, 1, 3))
        # What is left is how long the operation itself took.
        wall = columns[2] - wait
        _add_up(partition_op, status, keys, size, self._partition_ops.made)
        _add_up(worker_op, status, keys, size, self._worker_ops.made)
        for index, values in _grouped(worker_op, wall):
            self._worker_ops.made[index].latency.record_many(values)
        for index, values in _grouped(np.array(self._op_of_worker_op, np.int64)[worker_op], wall):
            self._latency.made[index].record_many(values)
        for index, values in _grouped(task_op, keys):
            self._task_ops.made[index].claim(int(values.sum()))
        self._fold_waits(task_op, worker_op, wait)
        totals = self._totals
        totals.ops += status.size
        totals.failures += int((status == _ERROR).sum())
        totals.keys += int(keys.sum())
        totals.bytes += int(size.sum())
        # A latency that makes no sense is refused by its series, one by one, and must not count here either.
        sound = wall[(wall >= 0) & (wall < _MAX_PLAUSIBLE)]
        totals.busy_ns += int(sound.sum())

    def _fold_waits(self, task_op: Int64Array, worker_op: Int64Array, wait: Int64Array) -> None:
        (waited,) = np.nonzero(wait)
        if not len(waited):
            return
        self._totals.waits += len(waited)
        self._totals.wait_ns += int(wait[waited].sum())
        for index, values in _grouped(task_op[waited], wait[waited]):
            self._task_ops.made[index].wait(values)
        for index, values in _grouped(worker_op[waited], wait[waited]):
            self._worker_ops.made[index].wait_ns += int(values.sum())

    def _plausible(self, values: Int64Array) -> Int64Array:
        """The values, with 0 for those that no operation can have; they are counted as refused."""
        if values.min() >= 0 and values.max() < _MAX_PLAUSIBLE:
            return values
        bad = (values < 0) | (values >= _MAX_PLAUSIBLE)
        self.n_refused += int(bad.sum())
        return np.where(bad, 0, values)

    def partitions(self) -> list[str]:
        """The labels of the partitions that operations have named."""
        return list(dict.fromkeys(partition for _, partition in self._partition_ops.numbers if partition))

    def worker_stats(self, worker: str, now: float, exact: bool) -> list[WorkerOpStat]:
        """The operations of one worker."""
        return [op.stat(now, exact) for op in self._by_worker.get(worker, ())]


def _add_up(
    ids: Int64Array, status: Int64Array, keys: Int64Array, size: Int64Array, slots: Sequence[_Slot]
) -> None:
    counts = np.bincount(ids * 3 + status, minlength=3 * len(slots)).reshape(-1, 3)
    sums = [_sums(ids, column, len(slots)) for column in (keys, size)]
    for index in np.flatnonzero(counts.any(axis=1)).tolist():
        slots[index].add(counts[index].tolist(), int(sums[0][index]), int(sums[1][index]))


def _sums(ids: Int64Array, values: Int64Array, length: int) -> Int64Array:
    if int(values.max()) * values.size < 1 << 53:
        # bincount adds up in float64, which is exact here.
        return np.bincount(ids, weights=values, minlength=length).astype(np.int64)
    sums = np.zeros(length, np.int64)
    np.add.at(sums, ids, values)
    return sums


def _grouped(ids: Int64Array, values: Int64Array) -> list[tuple[int, Int64Array]]:
    """The values of each id, in their order."""
    if (ids == ids[0]).all():
        return [(int(ids[0]), values)]
    # Sorting 16-bit integers is a radix sort, several times quicker.
    small = ids.astype(np.uint16) if int(ids.max()) < 1 << 16 else ids
    order = np.argsort(small, kind="stable")
    ordered = ids[order]
    starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
    parts = np.split(values[order], starts[1:])
    return list(zip(ordered[starts].tolist(), parts, strict=True))
