"""Everything that is known about a run: batches of events go in, snapshots come out.

``RunState`` has no socket and no loop, so the aggregator can run it live, and anyone can run it again from
the recorded events. What it reports at the end depends on the events and their order alone (rates, ages and
the timeline aside, which are about the time of arrival).
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from msgspec import structs

from rlplane.metrics.events import (
    SESSION_ROLE,
    STATUS_TIMEOUT,
    EventBatch,
    FieldBytes,
    LogRecord,
    PartitionStatus,
    RowChecks,
    SampleEvent,
    SessionEvent,
    StepRecord,
    TransferRecord,
    WeightVersion,
    WorkerGoodbye,
    WorkerHello,
)
from rlplane.metrics.metrics_table import MetricsTable
from rlplane.metrics.operations import LabelSet, OperationStats
from rlplane.metrics.registry import CounterSampler, MetricsRegistry
from rlplane.metrics.sample_lifecycle import SampleLifecycle
from rlplane.metrics.snapshot import (
    MAX_LOG_LINES,
    MAX_STEPS,
    MAX_WORKERS,
    LogLine,
    MetricsSnapshot,
    SessionState,
    StepOpStat,
    StepStat,
    StepTotals,
    TimelinePoint,
    WorkerStat,
)
from rlplane.metrics.timeline import Timeline
from rlplane.metrics.values import DEFAULT_MAX_IN_MEMORY

# A worker that sends nothing for this long, not even a heartbeat, is shown as silent.
SILENT_AFTER_S = 5.0

_NUMBER = re.compile(r"\d+")


@dataclass(slots=True, eq=False)
class _Worker:
    """What is known about one worker, beside its operations and its samples."""

    label: str
    first_seen_ns: int
    last_seen_ns: int
    pid: int = 0
    host: str = ""
    role: str = ""
    last_seq: int = 0
    batches_lost: int = 0
    dropped: int = 0
    dropped_before: int = 0
    goodbye: bool = False
    bytes_rate: CounterSampler = field(default_factory=lambda: CounterSampler("worker_bytes", {}))

    def note_batch(self, batch: EventBatch, now_ns: int) -> int:
        """Note a batch; how many batches are missing before it."""
        if batch.pid != self.pid:
            # The first process of that name, or the one that replaces it.
            self.pid, self.host = batch.pid, batch.host
            self.last_seq = 0
            self.dropped_before += self.dropped
            self.dropped = 0
            self.goodbye = False
        missing = max(0, batch.seq - self.last_seq - 1)
        self.last_seq = max(self.last_seq, batch.seq)
        self.batches_lost += missing
        self.dropped = max(self.dropped, batch.n_dropped)
        self.last_seen_ns = now_ns
        return missing


class RunState:
    """The state of one run.

    Args:
        run_id: Its name; every snapshot carries it.
        on_session: Gets each session event, after it has been noted.
        spill_directory: Where values beyond ``max_values_in_memory`` go.
        max_rows: Samples that are followed at once.
    """

    def __init__(
        self,
        run_id: str,
        *,
        on_session: Callable[[SessionEvent], None] | None = None,
        spill_directory: Path | None = None,
        max_values_in_memory: int = DEFAULT_MAX_IN_MEMORY,
        max_rows: int = 1_000_000,
    ) -> None:
        self.run_id = run_id
        self._on_session = on_session
        self.registry = MetricsRegistry(
            max_values_in_memory=max_values_in_memory, spill_directory=spill_directory
        )
        self.table = MetricsTable(max_rows=max_rows)
        self._totals = TimelinePoint(0.0, 0.0)
        self._ops = OperationStats(self.registry, self._totals)
        self._samples = SampleLifecycle(self.registry, self.table, self._totals)
        self._workers: dict[str, _Worker] = {}
        self._worker_labels = LabelSet(MAX_WORKERS)
        # By level, worker and text without its numbers; the one said last comes last.
        self._log: dict[tuple[str, str, str], LogLine] = {}
        self._timeline = Timeline()
        self._steps: deque[StepStat] = deque(maxlen=MAX_STEPS)
        self._step_totals = StepTotals()
        self._step_ops: dict[str, StepOpStat] = {}
        self._seq = 0
        self._host, self._pid = socket.gethostname(), os.getpid()
        self.started_ns = time.time_ns()
        self._started = time.monotonic()
        register = self.registry.register_counter
        self._events = register("events")
        self._session_errors = register("session_errors")
        self._lost = register("batches_lost")
        self.bad_frames = register("bad_frames")
        self._dropped = register("events_dropped")
        self._refused = register("values_refused")
        self._untracked = register("samples_untracked")
        self._trigger_failures = register("trigger_failures")
        self._workers_alive = self.registry.register_gauge("workers_alive")
        self._transfers = register("transfers")
        self._transfer_bytes = register("transfer_bytes")
        self._transfer_failures = {
            key: register("transfer_failures", {"kind": kind})
            for key, kind in (
                ("num_failed_transfers", "transfer"),
                ("num_failed_notifications", "notification"),
                ("num_kv_expired_reqs", "expired"),
            )
        }
        series = self.registry.register_series
        self._transfer_series = {
            "transfer_duration": (series("transfer_duration"), 1e9),
            "post_duration": (series("transfer_post_duration"), 1e9),
            "bytes_transferred": (series("transfer_size", unit="bytes"), 1.0),
            "num_descriptors": (series("transfer_descriptors", unit="1"), 1.0),
        }

    def continue_from(self, earlier: MetricsSnapshot, batches: Iterable[EventBatch]) -> None:
        """Begin with what was measured before the run was interrupted: its events, and its time."""
        self.started_ns = earlier.started_ns
        self._started -= earlier.elapsed_s
        on_session, self._on_session = self._on_session, None
        for batch in batches:
            self.add_batch(batch)
        self._on_session = on_session
        self._ops.fold()
        self._timeline.continue_from(
            earlier.timeline, structs.replace(self._totals, elapsed_s=earlier.elapsed_s)
        )

    # What goes in.

    def add_batch(self, batch: EventBatch, now_ns: int | None = None) -> None:
        """Count a worker's batch. One event that cannot be handled does not harm the others."""
        now_ns = time.time_ns() if now_ns is None else now_ns
        label = self._worker_labels.label(batch.worker)
        worker = self._workers.get(label)
        if worker is None:
            worker = self._workers[label] = _Worker(label, now_ns, now_ns)
        missing = worker.note_batch(batch, now_ns)
        if missing:
            self._lost.increment(missing)
            self.log("warning", f"{missing} batches before number {batch.seq} never arrived", batch.worker)
        self._events.increment(len(batch))
        if batch.ops is not None:
            self._ops.add(batch.ops, label)
            self._log_errors(batch)
        for event in batch.events:
            try:
                self._add_event(event, worker, label)
            except Exception as exc:
                self._refused.increment()
                self.log("warning", f"a {type(event).__name__} was refused: {exc!r}", batch.worker)

    def _log_errors(self, batch: EventBatch) -> None:
        assert batch.ops is not None
        indices = batch.ops.indices()
        for error in batch.ops.errors:
            if not 0 <= error.position < len(indices):
                continue
            key = batch.ops.keys[int(indices[error.position])]
            if key.op == "claim_meta" and key.status == STATUS_TIMEOUT:
                continue  # The plane was empty. That is counted, and nothing has gone wrong.
            level = "warning" if key.status == STATUS_TIMEOUT else "error"
            text = f"{key.op} on {key.partition_id}: {error.error_class}: {error.message}"
            self.log(level, text[:500], batch.worker)

    def _add_event(self, event: object, worker: _Worker, label: str) -> None:
        if isinstance(event, SampleEvent):
            self._samples.add_event(event, label)
        elif isinstance(event, PartitionStatus):
            self._samples.set_status(event)
        elif isinstance(event, WeightVersion):
            self._samples.note_version(event.version)
        elif isinstance(event, TransferRecord):
            self._add_transfers(event)
        elif isinstance(event, WorkerHello):
            worker.role = event.role or worker.role
            worker.goodbye = False
        elif isinstance(event, WorkerGoodbye):
            worker.goodbye = True
        elif isinstance(event, FieldBytes):
            self._samples.add_field_counts("field_bytes", event.partition_id, event.written)
        elif isinstance(event, RowChecks):
            for name, counts in (
                ("rows_checked", event.checked),
                ("rows_unchecked", event.unchecked),
                ("rows_mismatched", event.mismatched),
            ):
                self._samples.add_field_counts(name, event.partition_id, counts)
        elif isinstance(event, StepRecord):
            self._add_step(event, label)
        elif isinstance(event, LogRecord):
            self.log(event.level, event.message[:500], worker.label)
        elif isinstance(event, SessionEvent):
            if event.kind == "ERROR":
                self._session_errors.increment()
                self.log("error", event.message[:500] or "the run reported an error", worker.label)
            if self._on_session is not None:
                self._on_session(event)

    def _add_step(self, record: StepRecord, worker: str) -> None:
        ops = record.ops.values()
        self._steps.append(
            StepStat(
                record.step,
                max(0.0, (record.time_ns - self.started_ns) / 1e9),
                worker,
                record.seconds,
                sum(op.seconds for op in ops),
                sum(op.waiting_s for op in ops),
                sum(op.round_trips_s for op in ops),
                sum(op.bytes_s for op in ops),
                record.tokens,
                record.scalars,
            )
        )
        if record.step is None:
            return
        self._step_totals.count += 1
        self._step_totals.seconds += record.seconds
        self._step_totals.tokens += record.tokens
        for name, op in record.ops.items():
            total = self._step_ops.setdefault(name, StepOpStat(name))
            for part in ("count", "seconds", "waiting_s", "round_trips_s", "bytes_s"):
                setattr(total, part, getattr(total, part) + getattr(op, part))

    def _add_transfers(self, record: TransferRecord) -> None:
        beyond = record.beyond_sample
        sizes = np.asarray(record.data.get("bytes_transferred", ()), np.float64)
        count = len(record.data.get("transfer_duration", ())) + int(beyond.get("transfers", 0))
        self._transfers.increment(count)
        moved = sizes[np.isfinite(sizes) & (sizes >= 0)].sum() + beyond.get("bytes_transferred", 0)
        self._transfer_bytes.increment(int(moved))
        for key, counter in self._transfer_failures.items():
            counter.increment(len(record.data.get(key, ())) + int(beyond.get(key, 0)))
        for key, (series, scale) in self._transfer_series.items():
            values = np.asarray(record.data.get(key, ()), np.float64) * scale
            sound = values[np.isfinite(values) & (np.abs(values) < 2**62)]
            self._refused.increment(values.size - sound.size)
            # Seconds come as floats; whole nanoseconds keep the sums exact.
            series.record_many(np.rint(sound).astype(np.int64))

    def log(self, level: str, message: str, worker: str = "") -> None:
        """Add a line to the log that viewers show, or count it once more if only its numbers are new."""
        now_ns, key = time.time_ns(), (level, worker, _NUMBER.sub("#", message))
        line = self._log.pop(key, None) or LogLine(now_ns, level, message, worker, 0, now_ns)
        line.time_ns, line.message, line.count = now_ns, message, line.count + 1
        self._log[key] = line
        if len(self._log) > MAX_LOG_LINES:
            del self._log[next(iter(self._log))]

    # What comes out.

    def snapshot(
        self,
        state: SessionState,
        *,
        exact: bool = False,
        refresh_hz: float = 0.0,
        n_pending_tasks: int | None = None,
    ) -> MetricsSnapshot:
        """The picture now. ``exact`` computes percentiles from all values: for the end of the run."""
        now, now_ns = time.monotonic(), time.time_ns()
        self._ops.fold()
        elapsed = now - self._started
        workers = self._worker_stats(now, now_ns, exact)
        self._dropped.value = sum(w.dropped + w.dropped_before for w in self._workers.values())
        self._untracked.value = self.table.n_untracked
        self._trigger_failures.value = self.table.n_trigger_failures
        self._workers_alive.set(sum(w.state == "alive" for w in workers))
        refused = self._refused.value
        self._refused.value += self.registry.n_refused + self._ops.n_refused
        metrics = self.registry.stats(exact=exact, now=now)
        self._refused.value = refused
        self._timeline.add(elapsed, self._totals)
        self._seq += 1
        return MetricsSnapshot(
            run_id=self.run_id,
            state=state,
            seq=self._seq,
            time_ns=now_ns,
            monotonic_ns=int(now * 1e9),
            started_ns=self.started_ns,
            elapsed_s=elapsed,
            exact=exact and all(getattr(stat, "exact", True) for stat in metrics),
            n_pending_tasks=self.table.in_flight_tasks_count if n_pending_tasks is None else n_pending_tasks,
            refresh_hz=refresh_hz,
            host=self._host,
            pid=self._pid,
            metrics=metrics,
            partitions=self._samples.partition_stats(now_ns, state.is_final, self._ops.partitions()),
            workers=workers,
            n_in_flight=self.table.n_in_flight,
            oldest=self._samples.oldest(now_ns, state.is_final),
            log=[structs.replace(line) for line in self._log.values()],
            timeline=self._timeline.points(),
            finished=self._samples.finished(now_ns),
            steps=list(self._steps),
            step_totals=structs.replace(
                self._step_totals,
                ops=[
                    structs.replace(op) for op in sorted(self._step_ops.values(), key=lambda op: -op.seconds)
                ],
            ),
        )

    def _worker_stats(self, now: float, now_ns: int, exact: bool) -> list[WorkerStat]:
        found = []
        for label, worker in self._workers.items():
            if worker.role == SESSION_ROLE:
                continue
            by_op = self._ops.worker_stats(label, now, exact)
            worker.bytes_rate.value = sum(op.bytes for op in by_op)
            silent = now_ns - worker.last_seen_ns > SILENT_AFTER_S * 1e9
            samples = self._samples.worker(label)
            found.append(
                WorkerStat(
                    worker=label,
                    pid=worker.pid,
                    host=worker.host,
                    role=worker.role,
                    state="gone" if worker.goodbye else "silent" if silent else "alive",
                    first_seen_ns=worker.first_seen_ns,
                    last_seen_ns=worker.last_seen_ns,
                    ops=sum(op.count for op in by_op),
                    keys=sum(op.keys for op in by_op),
                    bytes=worker.bytes_rate.value,
                    failures=sum(op.failures for op in by_op),
                    timeouts=sum(op.timeouts for op in by_op),
                    rate=sum(op.rate for op in by_op),
                    bytes_rate=worker.bytes_rate.rate(now),
                    dropped=worker.dropped + worker.dropped_before,
                    lost_batches=worker.batches_lost,
                    written=samples.written,
                    claimed=samples.claimed,
                    cleared=samples.cleared,
                    failed=samples.failed,
                    never_cleared=samples.in_flight,
                    by_op=by_op,
                    written_to_claimed=samples.written_to_claimed.summary(exact=exact),
                    written_to_cleared=samples.written_to_cleared.summary(exact=exact),
                    staleness=samples.staleness.summary(exact=exact),
                )
            )
        return found

    def close(self) -> None:
        """Release what is on disk."""
        self.registry.close()
