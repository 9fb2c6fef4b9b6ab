"""``MetricsTable``: one row per sample in flight, from its first write to its clear, and triggers on every
step.

Workers flush on their own time, so the steps of one sample arrive in any order: a claim may come before the
write it belongs to, even a clear may. A row therefore fills up as its steps arrive, and a row that is
finished is remembered for a while, so that what comes late completes it instead of starting a row that nobody
finishes. When an id is used again, the times in the records decide which of its lifecycles a step belongs to.

A trigger is called once per kind of step and record. It may return an awaitable; those run as tasks that
the table keeps, counts and can cancel. One that raises is counted and logged, and stops nothing.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from rlplane.metrics.events import SampleEvent

StepKind: TypeAlias = Literal["written", "claimed", "reclaimed", "cleared", "failed"]

logger = logging.getLogger(__name__)

_EMPTIED_REMEMBERED = 1000


@dataclass(slots=True, eq=False)
class SampleRow:
    """What is known about one lifecycle of a sample. ``written_ns`` is None until its write has arrived."""

    partition_id: str
    sample_id: str
    written_ns: int | None = None
    cleared_ns: int | None = None
    cleared_by: str = ""
    last_clear_ns: int = 0
    failed_by: str = ""
    worker: str = ""
    weight_version: int | None = None
    n_bytes: int = 0
    failed: bool = False
    claims: dict[str, tuple[int, str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LifecycleStep:
    """Rows that made the same step. ``worker`` is who made it; ``times_ns`` has one time per row."""

    kind: StepKind
    partition_id: str
    task: str | None
    worker: str
    rows: list[SampleRow]
    times_ns: list[int]


EmitTrigger: TypeAlias = Callable[[LifecycleStep], Awaitable[None] | None]


class MetricsTable:
    """Rows of samples in flight.

    Args:
        max_rows: Rows kept at once. Samples beyond it are not followed, and counted in ``n_untracked``.
        max_finished: Finished rows that are remembered for what arrives late.
    """

    def __init__(self, max_rows: int = 1_000_000, max_finished: int = 100_000) -> None:
        self._max_rows = max_rows
        self._max_finished = max_finished
        self._rows: dict[str, dict[str, SampleRow]] = {}
        self._n_rows = 0
        self._finished: OrderedDict[tuple[str, str], SampleRow] = OrderedDict()
        self._emptied: dict[str, tuple[int, str]] = {}
        self._held: dict[str, list[int]] = {}
        self._triggers: dict[StepKind, list[EmitTrigger]] = {}
        self._in_flight_tasks: set[asyncio.Future[None]] = set()
        self._n_in_flight = 0
        self._steps: dict[tuple[StepKind, str | None, str], tuple[list[SampleRow], list[int]]] = {}
        self.n_untracked = 0
        self.n_trigger_failures = 0

    # What is there.

    @property
    def n_in_flight(self) -> int:
        """Samples written and not cleared."""
        return self._n_in_flight

    def held(self, partition_id: str) -> tuple[int, int]:
        """Samples in flight in a partition, and their bytes."""
        samples, size = self._held.get(partition_id, (0, 0))
        return samples, size

    def in_flight(self) -> Iterator[SampleRow]:
        """The rows in flight, roughly in the order in which they were written."""
        return itertools.chain.from_iterable(map(self._in_flight_in, self._rows))

    def _in_flight_in(self, partition_id: str) -> Iterator[SampleRow]:
        rows = self._rows.get(partition_id, {}).values()
        return (row for row in rows if row.written_ns is not None)

    def oldest_in(self, partition_id: str) -> SampleRow | None:
        """The oldest row in flight of a partition, by order of arrival."""
        return next(self._in_flight_in(partition_id), None)

    def oldest(self, count: int) -> list[SampleRow]:
        """The ``count`` oldest rows in flight, oldest first."""
        # Rows of a partition are nearly in order of time: a few more than asked for are enough to sort.
        first = (itertools.islice(self._in_flight_in(name), 4 * count) for name in self._rows)
        candidates = itertools.chain.from_iterable(first)
        return heapq.nsmallest(count, candidates, key=lambda row: row.written_ns or 0)

    def last_cleared(self, count: int) -> list[SampleRow]:
        """The rows that were cleared last, latest first."""
        known = (row for row in reversed(self._finished.values()) if row.written_ns is not None)
        return list(itertools.islice(known, count))

    # What happens.

    def add_trigger(self, kind: StepKind, trigger: EmitTrigger) -> None:
        """Call ``trigger`` with every step of that kind."""
        self._triggers.setdefault(kind, []).append(trigger)

    def apply(self, record: SampleEvent, worker: str) -> None:
        """Apply one event of ``worker``; triggers have run, or have been started, when it returns."""
        partition, time_ns = record.partition_id, record.time_ns
        if record.kind == "written":
            self._apply_written(record, worker)
        elif record.kind == "claimed":
            for sample_id, version in zip(record.sample_ids, _versions(record), strict=True):
                self._claim(partition, sample_id, time_ns, record.task or "", worker, version)
        elif record.kind == "cleared":
            ids = record.sample_ids
            if record.everything:
                self._emptied[partition] = (time_ns, worker)
                if len(self._emptied) > _EMPTIED_REMEMBERED:
                    del self._emptied[next(iter(self._emptied))]
                ids = [
                    row.sample_id
                    for row in self._rows.get(partition, {}).values()
                    if row.written_ns is not None and row.written_ns <= time_ns
                ]
            for sample_id in ids:
                self._clear(partition, sample_id, time_ns, worker)
        else:
            for sample_id in record.sample_ids:
                self._fail(partition, sample_id, time_ns, worker)
        steps, self._steps = self._steps, {}
        for (kind, task, by), (rows, times) in steps.items():
            self._fire(LifecycleStep(kind, partition, task, by, rows, times))

    def _apply_written(self, record: SampleEvent, worker: str) -> None:
        ids = record.sample_ids
        share, rest = divmod(record.n_bytes, len(ids)) if ids else (0, 0)
        for position, (sample_id, version) in enumerate(zip(ids, _versions(record), strict=True)):
            size = share + (1 if position < rest else 0)
            self._write(record, sample_id, version, size, worker)

    def _write(
        self, record: SampleEvent, sample_id: str, version: int | None, size: int, worker: str
    ) -> None:
        partition, time_ns = record.partition_id, record.time_ns
        row = self._rows.get(partition, {}).get(sample_id)
        if row is None:
            row = self._row_to_write(partition, sample_id, record.start_ns or time_ns)
            if row is None:
                return
        elif row.written_ns is not None:
            self._grow(row, size)
            if row.weight_version is None:
                row.weight_version = version
            return
        row.written_ns, row.worker = time_ns, worker
        row.weight_version = version if version is not None else row.weight_version
        self._step("written", None, worker, row, time_ns)
        if row.cleared_ns is None:
            self._n_in_flight += 1
            self._held.setdefault(partition, [0, 0])[0] += 1
            self._grow(row, size)
        for task, (claimed_ns, claimer) in row.claims.items():
            self._step("claimed", task, claimer, row, claimed_ns)
        if row.failed:
            self._step("failed", None, row.failed_by, row, time_ns)
        if row.cleared_ns is not None:
            self._step("cleared", None, row.cleared_by, row, row.cleared_ns)

    def _row_to_write(self, partition: str, sample_id: str, start_ns: int) -> SampleRow | None:
        """The row for a write of a sample that is not in flight; None if the write changes nothing."""
        former = self._finished.get((partition, sample_id))
        if former is not None and former.cleared_ns is not None:
            if start_ns <= former.cleared_ns:
                # That lifecycle is over: this is its write, late, or only one more column of it.
                return former if former.written_ns is None else None
            if start_ns <= former.last_clear_ns:
                # A second lifecycle, whose clear has been here already.
                return self._over(partition, sample_id, former.last_clear_ns, former.cleared_by)
        emptied_ns, emptied_by = self._emptied.get(partition, (0, ""))
        if start_ns <= emptied_ns:
            return self._over(partition, sample_id, emptied_ns, emptied_by)
        return self._new_row(partition, sample_id)

    def _over(self, partition: str, sample_id: str, cleared_ns: int, cleared_by: str) -> SampleRow:
        """A row of which the clear came before the write."""
        row = SampleRow(partition, sample_id)
        row.cleared_ns, row.last_clear_ns, row.cleared_by = cleared_ns, cleared_ns, cleared_by
        self._remember(row)
        return row

    def _grow(self, row: SampleRow, size: int) -> None:
        row.n_bytes += size
        self._held[row.partition_id][1] += size

    def _claim(
        self, partition: str, sample_id: str, time_ns: int, task: str, worker: str, version: int | None
    ) -> None:
        row = self._find(partition, sample_id, time_ns)
        if row is None:
            return
        if row.weight_version is None:
            row.weight_version = version
        known = row.claims.get(task)
        if known is None:
            row.claims[task] = (time_ns, worker)
            if row.written_ns is not None:
                self._step("claimed", task, worker, row, time_ns)
        elif known != (time_ns, worker) and row.written_ns is not None:
            self._step("reclaimed", task, worker, row, time_ns)

    def _clear(self, partition: str, sample_id: str, time_ns: int, worker: str) -> None:
        key = (partition, sample_id)
        row = self._rows.get(partition, {}).get(sample_id)
        if row is None:
            former = self._finished.get(key)
            if former is None:
                former = SampleRow(partition, sample_id)
                former.cleared_ns = time_ns
                self._remember(former)
            if time_ns > former.last_clear_ns:
                former.last_clear_ns, former.cleared_by = time_ns, worker
            return
        if row.written_ns is not None and time_ns < row.written_ns and key in self._finished:
            return  # The late clear of the id's former lifecycle.
        del self._rows[partition][sample_id]
        if not self._rows[partition]:
            del self._rows[partition]  # Names of partitions may be new in every step of a run.
        self._n_rows -= 1
        row.cleared_ns, row.last_clear_ns, row.cleared_by = time_ns, time_ns, worker
        self._remember(row)
        if row.written_ns is not None:
            self._n_in_flight -= 1
            held = self._held[partition]
            held[0] -= 1
            held[1] -= row.n_bytes
            if not held[0]:
                del self._held[partition]
            self._step("cleared", None, worker, row, time_ns)

    def _fail(self, partition: str, sample_id: str, time_ns: int, worker: str) -> None:
        # A failure that is noticed after the clear still belongs to that lifecycle.
        row = self._find(partition, sample_id, 0)
        if row is None or row.failed:
            return
        row.failed, row.failed_by = True, worker
        if row.written_ns is not None:
            self._step("failed", None, worker, row, time_ns)

    def _find(self, partition: str, sample_id: str, time_ns: int) -> SampleRow | None:
        """The row of that lifecycle, in flight or finished; a new one if the write has not arrived."""
        row = self._rows.get(partition, {}).get(sample_id)
        if row is not None:
            return row
        former = self._finished.get((partition, sample_id))
        if former is not None and time_ns <= (former.cleared_ns or 0):
            return former
        return self._new_row(partition, sample_id)

    def _new_row(self, partition: str, sample_id: str) -> SampleRow | None:
        if self._n_rows >= self._max_rows:
            self.n_untracked += 1
            return None
        row = SampleRow(partition, sample_id)
        self._rows.setdefault(partition, {})[sample_id] = row
        self._n_rows += 1
        return row

    def _remember(self, row: SampleRow) -> None:
        key = (row.partition_id, row.sample_id)
        self._finished.pop(key, None)
        self._finished[key] = row
        if len(self._finished) > self._max_finished:
            self._finished.popitem(last=False)

    # Triggers and their tasks.

    def _step(self, kind: StepKind, task: str | None, worker: str, row: SampleRow, time_ns: int) -> None:
        rows, times = self._steps.setdefault((kind, task, worker), ([], []))
        rows.append(row)
        times.append(time_ns)

    def _fire(self, step: LifecycleStep) -> None:
        for trigger in self._triggers.get(step.kind, ()):
            try:
                result = trigger(step)
                if result is not None:
                    self._follow(result)
            except Exception:
                self._count_failure(step.kind)

    def _follow(self, awaitable: Awaitable[None]) -> None:
        task = asyncio.ensure_future(awaitable)
        self._in_flight_tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Future[None]) -> None:
        self._in_flight_tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._count_failure("async", task.exception())

    def _count_failure(self, kind: str, exc: BaseException | None = None) -> None:
        self.n_trigger_failures += 1
        if self.n_trigger_failures == 1:
            logger.warning("a %r trigger failed; further ones are only counted", kind, exc_info=exc or True)

    @property
    def in_flight_tasks_count(self) -> int:
        """Tasks of async triggers that have not ended."""
        return len(self._in_flight_tasks)

    async def drain_tasks(self, timeout_s: float | None) -> int:
        """Wait for the pending tasks, at most ``timeout_s`` (None: for ever); how many are left."""
        if self._in_flight_tasks:
            await asyncio.wait(set(self._in_flight_tasks), timeout=timeout_s)
        return self.in_flight_tasks_count

    def cancel_all_tasks(self) -> int:
        """Cancel the pending tasks; how many there were."""
        pending = [task for task in self._in_flight_tasks if not task.done()]
        for task in pending:
            task.cancel()
        return len(pending)


def _versions(record: SampleEvent) -> list[int | None]:
    """One weight version per sample, None where it is not known."""
    versions, count = record.weight_versions, len(record.sample_ids)
    return versions if versions is not None and len(versions) == count else [None] * count
