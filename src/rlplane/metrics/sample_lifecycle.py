"""Samples and partitions in numbers: what the table's triggers count, and what engines report.

Held samples and bytes come from the sample events, until an engine reports the partition's status: from
then on the engine is believed, because it also knows what untracked clients do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec
import numpy as np

from rlplane.metrics.events import PartitionStatus, SampleEvent
from rlplane.metrics.metrics_table import LifecycleStep, MetricsTable, SampleRow
from rlplane.metrics.operations import LabelSet
from rlplane.metrics.registry import CounterSampler, MetricsRegistry, SeriesSampler
from rlplane.metrics.snapshot import (
    MAX_FIELDS,
    MAX_FINISHED,
    MAX_OLDEST,
    MAX_OLDEST_AT_END,
    MAX_PARTITIONS,
    MAX_TASKS,
    OTHER,
    PartitionStat,
    SampleAge,
    TaskStat,
    TimelinePoint,
)

TRACKED_SAMPLES_FAILED = "tracked_samples_failed"


class WorkerSamples:
    """What one worker did to samples. ``in_flight`` counts those it wrote that are not cleared."""

    def __init__(self, registry: MetricsRegistry, worker: str) -> None:
        self.written = self.claimed = self.cleared = self.failed = self.in_flight = 0
        labels = {"worker": worker}

        def series(name: str, unit: str = "ns") -> SeriesSampler:
            return registry.register_series(f"worker_{name}", labels, unit=unit, figures=2, listed=False)

        self.written_to_claimed = series("written_to_claimed")
        self.written_to_cleared = series("written_to_cleared")
        self.staleness = series("staleness", "versions")


class _Task:
    """One task of one partition. ``in_flight`` counts claimed samples that are not cleared."""

    def __init__(self, registry: MetricsRegistry, partition: str, task: str) -> None:
        labels = {"partition": partition, "task": task}
        self.in_flight = 0
        self.claimed = registry.register_counter("samples_claimed", labels)
        self.reclaimed = registry.register_counter("samples_reclaimed", labels)
        self.latency = registry.register_series("written_to_claimed", labels)
        self.staleness = registry.register_series("staleness", labels, unit="versions")


@dataclass
class _Partition:
    """One partition's label, its counters and what it holds."""

    label: str
    written: CounterSampler
    cleared: CounterSampler
    failed: CounterSampler
    latency: SeriesSampler
    tasks: dict[str, _Task] = field(default_factory=dict)
    task_labels: LabelSet = field(default_factory=lambda: LabelSet(MAX_TASKS))
    samples: int = 0
    bytes: int = 0
    peak_samples: int = 0
    peak_bytes: int = 0
    in_flight: int = 0
    tracked: bool = False
    status: PartitionStatus | None = None


class SampleLifecycle:
    """Counts the steps of samples, and keeps what partitions hold; what they add up to goes into
    ``totals``."""

    def __init__(self, registry: MetricsRegistry, table: MetricsTable, totals: TimelinePoint) -> None:
        self._registry = registry
        self._table = table
        self._labels = LabelSet(MAX_PARTITIONS)
        self._partitions: dict[str, _Partition] = {}
        self._workers: dict[str, WorkerSamples] = {}
        self._newest_version: int | None = None
        self._field_labels: dict[str, LabelSet] = {}
        self._field_counters: dict[tuple[str, str, str], CounterSampler] = {}
        self._bytes_held = registry.register_gauge("bytes_held")
        self._samples_held = registry.register_gauge("samples_held")
        self._weight_version = registry.register_gauge("weight_version")
        self._totals = totals
        table.add_trigger("written", self._on_written)
        table.add_trigger("claimed", self._on_claimed)
        table.add_trigger("reclaimed", self._on_reclaimed)
        table.add_trigger("cleared", self._on_cleared)
        table.add_trigger("failed", self._on_failed)

    # What goes in.

    def add_event(self, record: SampleEvent, worker: str) -> None:
        """Count an event of ``worker`` (its label)."""
        for version in record.weight_versions or ():
            if version is not None:
                self.note_version(version)
        samples, size = self._table.held(record.partition_id)
        self._table.apply(record, worker)
        now_samples, now_size = self._table.held(record.partition_id)
        partition = self._partition(record.partition_id)
        partition.tracked = True
        if partition.status is None:
            grown = partition.samples + now_samples - samples, partition.bytes + now_size - size
            self._set_held(partition, *grown)

    def add_field_counts(self, counted: str, partition_id: str, counts: Mapping[str, int]) -> None:
        """Add to the counters named ``counted`` of the fields of a partition."""
        partition = self._labels.label(partition_id)
        names = self._field_labels.setdefault(partition, LabelSet(MAX_FIELDS))
        for name, count in counts.items():
            key = (counted, partition, names.label(name))
            counter = self._field_counters.get(key)
            if counter is None:
                labels = {"partition": key[1], "field": key[2]}
                counter = self._field_counters[key] = self._registry.register_counter(counted, labels)
            counter.increment(count)

    def set_status(self, status: PartitionStatus) -> None:
        """Believe an engine's report, unless a newer one is there."""
        partition = self._partition(status.partition_id)
        if partition.label == OTHER:
            return  # Reports replace each other, and OTHER is many partitions.
        if partition.status is None or partition.status.time_ns <= status.time_ns:
            partition.status = status
            self._set_held(partition, status.samples, status.bytes)

    def note_version(self, version: int) -> None:
        """Note a weight version that exists."""
        if self._newest_version is None or version > self._newest_version:
            self._newest_version = version
            self._weight_version.set(version)

    def _set_held(self, partition: _Partition, samples: int, size: int) -> None:
        totals = self._totals
        totals.samples_held += samples - partition.samples
        totals.bytes_held += size - partition.bytes
        partition.samples, partition.bytes = samples, size
        partition.peak_samples = max(partition.peak_samples, samples)
        partition.peak_bytes = max(partition.peak_bytes, size)
        self._samples_held.set(totals.samples_held)
        self._bytes_held.set(totals.bytes_held)

    # The triggers.

    def _on_written(self, step: LifecycleStep) -> None:
        partition, worker = self._partition(step.partition_id), self.worker(step.worker)
        count = len(step.rows)
        partition.written.increment(count)
        partition.in_flight += count
        worker.written += count
        worker.in_flight += count
        self._totals.written += count

    def _on_claimed(self, step: LifecycleStep) -> None:
        partition, worker = self._partition(step.partition_id), self.worker(step.worker)
        task = self._task(partition, step.task or "")
        count = len(step.rows)
        task.claimed.increment(count)
        task.in_flight += count
        worker.claimed += count
        self._totals.claimed += count
        waits = _waits(step)
        task.latency.record_many(waits)
        worker.written_to_claimed.record_many(waits)
        newest = self._newest_version
        known = [row.weight_version for row in step.rows if row.weight_version is not None]
        if known and newest is not None:
            stale = [newest - version for version in known]
            versions = np.array(stale, np.int64)
            task.staleness.record_many(versions)
            worker.staleness.record_many(versions)
            self._totals.stale_sum += sum(stale)
            self._totals.stale_count += len(stale)

    def _on_reclaimed(self, step: LifecycleStep) -> None:
        self._task(self._partition(step.partition_id), step.task or "").reclaimed.increment(len(step.rows))

    def _on_cleared(self, step: LifecycleStep) -> None:
        partition, worker = self._partition(step.partition_id), self.worker(step.worker)
        count = len(step.rows)
        partition.cleared.increment(count)
        partition.in_flight -= count
        worker.cleared += count
        self._totals.cleared += count
        waits = _waits(step)
        partition.latency.record_many(waits)
        worker.written_to_cleared.record_many(waits)
        for row in step.rows:
            self.worker(row.worker).in_flight -= 1
            for name in row.claims:
                self._task(partition, name).in_flight -= 1

    def _on_failed(self, step: LifecycleStep) -> None:
        self._partition(step.partition_id).failed.increment(len(step.rows))
        self.worker(step.worker).failed += len(step.rows)

    # What comes out.

    def worker(self, label: str) -> WorkerSamples:
        """What a worker did; zeros for one that did nothing."""
        found = self._workers.get(label)
        if found is None:
            found = self._workers[label] = WorkerSamples(self._registry, label)
        return found

    def partition_stats(self, now_ns: int, final: bool, others: list[str]) -> list[PartitionStat]:
        """Every partition with its tasks; of those of ``others`` that nobody tracks or reports, the name."""
        found = [self._partition_stat(partition, now_ns, final) for partition in self._partitions.values()]
        return found + [
            PartitionStat(label, tracked=False) for label in others if label not in self._partitions
        ]

    def _partition_stat(self, partition: _Partition, now_ns: int, final: bool) -> PartitionStat:
        status = partition.status
        if status is not None:
            age = status.oldest_age_s
            if age is not None:
                age += max(0.0, (now_ns - status.time_ns) / 1e9)
        else:
            first = self._table.oldest_in(partition.label)
            age = None if first is None else max(0.0, (now_ns - (first.written_ns or now_ns)) / 1e9)
        return PartitionStat(
            partition=partition.label,
            samples=partition.samples,
            bytes=partition.bytes,
            peak_samples=partition.peak_samples,
            peak_bytes=partition.peak_bytes,
            capacity_samples=None if status is None else status.capacity_samples,
            capacity_bytes=None if status is None else status.capacity_bytes,
            oldest_age_s=age,
            reported=status is not None,
            written=partition.written.value,
            claimed=sum(task.claimed.value for task in partition.tasks.values()),
            cleared=partition.cleared.value,
            failed=partition.failed.value,
            never_cleared=_never_cleared(partition) if final else 0,
            tasks=_task_stats(partition),
            tracked=partition.tracked,
            flow=None if status is None else status.flow,
        )

    def oldest(self, now_ns: int, final: bool) -> list[SampleAge]:
        """The oldest samples in flight; at the end of a run more of them."""
        return [_age(row, now_ns) for row in self._table.oldest(MAX_OLDEST_AT_END if final else MAX_OLDEST)]

    def finished(self, now_ns: int) -> list[SampleAge]:
        """The samples that were cleared last."""
        return [_age(row, now_ns) for row in self._table.last_cleared(MAX_FINISHED)]

    def _partition(self, name: str) -> _Partition:
        label = self._labels.label(name)
        found = self._partitions.get(label)
        if found is None:
            labels = {"partition": label}
            counter = self._registry.register_counter
            found = self._partitions[label] = _Partition(
                label,
                counter("samples_written", labels),
                counter("samples_cleared", labels),
                counter(TRACKED_SAMPLES_FAILED, labels),
                self._registry.register_series("written_to_cleared", labels),
            )
        return found

    def _task(self, partition: _Partition, name: str) -> _Task:
        label = partition.task_labels.label(name)
        found = partition.tasks.get(label)
        if found is None:
            found = partition.tasks[label] = _Task(self._registry, partition.label, label)
        return found


def _age(row: SampleRow, now_ns: int) -> SampleAge:
    written_ns = row.written_ns or now_ns
    return SampleAge(
        sample_id=row.sample_id,
        partition=row.partition_id,
        age_s=max(0.0, ((row.cleared_ns or now_ns) - written_ns) / 1e9),
        written_ns=written_ns,
        worker=row.worker,
        weight_version=row.weight_version,
        claimed_by=list(row.claims),
        failed=row.failed,
        claimed_ns=[time_ns for time_ns, _ in row.claims.values()],
        cleared_ns=row.cleared_ns,
    )


# A claim may end before the put that woke it has returned, so its wait is a little below zero: that is none.
_OVERLAP_NS = 1_000_000_000


def _waits(step: LifecycleStep) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """From write to step. Clocks of two machines may disagree: its series refuses a wait far below zero."""
    waits = np.array(
        [moment - (row.written_ns or 0) for moment, row in zip(step.times_ns, step.rows, strict=True)],
        np.int64,
    )
    waits[(waits < 0) & (waits > -_OVERLAP_NS)] = 0
    return waits


def _never_cleared(partition: _Partition) -> int:
    """What the plane evicted was not cleared by anybody, and is not held any more."""
    return partition.in_flight if partition.status is None else min(partition.in_flight, partition.samples)


def _task_stats(partition: _Partition) -> list[TaskStat]:
    if partition.status is not None:
        return [
            TaskStat(name, **msgspec.structs.asdict(task)) for name, task in partition.status.tasks.items()
        ]
    # Without an engine's report: what is in flight and not claimed by the task may be claimed by it.
    return [
        TaskStat(name, max(0, partition.in_flight - task.in_flight), task.in_flight)
        for name, task in partition.tasks.items()
    ]
