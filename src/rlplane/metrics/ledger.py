"""Everything that is known about a run: batches of events go in, snapshots come out.

The ledger has no socket and no loop, so the aggregator can run it live, and anyone can run it again from the
recorded events. What it reports at the end depends on the events and their order alone (rates, ages and the
timeline aside, which are about the time of arrival).
"""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import numpy as np

from rlplane.metrics.events import (
    SESSION_ROLE,
    EventBatch,
    LogRecord,
    PartitionStatus,
    SampleLife,
    SessionEvent,
    TransferRecord,
    WeightVersion,
    WorkerGoodbye,
    WorkerHello,
)
from rlplane.metrics.lives import LifeLedger
from rlplane.metrics.operations import LabelSet, OpLedger
from rlplane.metrics.registry import CounterSampler, MetricsRegistry
from rlplane.metrics.snapshot import (
    MAX_LOG_LINES,
    MAX_WORKERS,
    LogLine,
    MetricsSnapshot,
    SessionState,
    TimelinePoint,
    WorkerStat,
)
from rlplane.metrics.table import MetricsTable
from rlplane.metrics.timeline import Timeline
from rlplane.metrics.values import DEFAULT_MAX_IN_MEMORY

__all__ = ["RunLedger"]

# A worker that sends nothing for this long, not even a heartbeat, is shown as silent.
SILENT_AFTER_S = 5.0

_ERRORS_LOGGED_PER_BATCH = 3


class _Worker:
    """What is known about one worker, beside its operations and its samples."""

    __slots__ = (
        "batches_lost",
        "bytes_rate",
        "dropped",
        "dropped_before",
        "first_seen_ns",
        "goodbye",
        "host",
        "label",
        "last_seen_ns",
        "last_seq",
        "pid",
        "role",
    )

    def __init__(self, label: str, now_ns: int) -> None:
        self.label = label
        self.pid = 0
        self.host = ""
        self.role = ""
        self.first_seen_ns = now_ns
        self.last_seen_ns = now_ns
        self.last_seq = 0
        self.batches_lost = 0
        self.dropped = 0
        self.dropped_before = 0
        self.goodbye = False
        self.bytes_rate = CounterSampler("worker_bytes", {})

    def see(self, batch: EventBatch, now_ns: int) -> int:
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


class RunLedger:
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
        self._ops = OpLedger(self.registry)
        self._lives = LifeLedger(self.registry, self.table)
        self._workers: dict[str, _Worker] = {}
        self._worker_labels = LabelSet(MAX_WORKERS)
        self._log: deque[LogLine] = deque(maxlen=MAX_LOG_LINES)
        self._timeline = Timeline()
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
        self._untracked = register("life_untracked")
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

    # What goes in.

    def take(self, batch: EventBatch, now_ns: int | None = None) -> None:
        """Take a worker's batch. One event that cannot be handled does not harm the others."""
        now_ns = time.time_ns() if now_ns is None else now_ns
        label = self._worker_labels.label(batch.worker)
        worker = self._workers.get(label)
        if worker is None:
            worker = self._workers[label] = _Worker(label, now_ns)
        missing = worker.see(batch, now_ns)
        if missing:
            self._lost.increment(missing)
            self.log("warning", f"{missing} batches before number {batch.seq} never arrived", batch.worker)
        self._events.increment(len(batch))
        if batch.ops is not None:
            self._ops.add(batch.ops, label)
            self._log_errors(batch)
        for event in batch.events:
            try:
                self._take_event(event, worker, label)
            except Exception as exc:
                self._refused.increment()
                self.log("warning", f"a {type(event).__name__} was refused: {exc!r}", batch.worker)

    def _log_errors(self, batch: EventBatch) -> None:
        assert batch.ops is not None
        errors = batch.ops.errors
        indices = batch.ops.indices()
        for error in errors[:_ERRORS_LOGGED_PER_BATCH]:
            if 0 <= error.position < len(indices):
                key = batch.ops.keys[int(indices[error.position])]
                level = "warning" if key.status == "timeout" else "error"
                text = f"{key.op} on {key.partition_id}: {error.error_class}: {error.message}"
                self.log(level, text[:500], batch.worker)
        if len(errors) > _ERRORS_LOGGED_PER_BATCH:
            more = len(errors) - _ERRORS_LOGGED_PER_BATCH
            self.log("error", f"and {more} more failed operations", batch.worker)

    def _take_event(self, event: object, worker: _Worker, label: str) -> None:
        if isinstance(event, SampleLife):
            self._lives.take(event, label)
        elif isinstance(event, PartitionStatus):
            self._lives.take_status(event)
        elif isinstance(event, WeightVersion):
            self._lives.note_version(event.version)
        elif isinstance(event, TransferRecord):
            self._take_transfers(event)
        elif isinstance(event, WorkerHello):
            worker.role = event.role or worker.role
            worker.goodbye = False
        elif isinstance(event, WorkerGoodbye):
            worker.goodbye = True
        elif isinstance(event, LogRecord):
            self.log(event.level, event.message[:500], worker.label)
        elif isinstance(event, SessionEvent):
            if event.kind == "ERROR":
                self._session_errors.increment()
                self.log("error", event.message[:500] or "the run reported an error", worker.label)
            if self._on_session is not None:
                self._on_session(event)

    def _take_transfers(self, record: TransferRecord) -> None:
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
        """Add a line to the log that viewers show."""
        self._log.append(LogLine(time.time_ns(), level, message, worker))

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
        self._note_time(elapsed)
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
            n_pending_tasks=self.table.n_pending_tasks if n_pending_tasks is None else n_pending_tasks,
            refresh_hz=refresh_hz,
            host=self._host,
            pid=self._pid,
            metrics=metrics,
            partitions=self._lives.partition_stats(now_ns, state.is_final, self._ops.partitions()),
            workers=workers,
            n_in_flight=self.table.n_in_flight,
            oldest=self._lives.oldest(now_ns, state.is_final),
            log=list(self._log),
            timeline=self._timeline.points(),
            finished=self._lives.finished(now_ns),
        )

    def _note_time(self, elapsed: float) -> None:
        ops, lives = self._ops.totals, self._lives.totals
        self._timeline.add(
            elapsed,
            TimelinePoint(
                elapsed,
                0.0,
                ops=ops.ops,
                keys=ops.keys,
                bytes=ops.bytes,
                failures=ops.failures,
                busy_ns=ops.busy_ns,
                written=lives.written,
                claimed=lives.claimed,
                cleared=lives.cleared,
                stale_sum=lives.stale_sum,
                stale_count=lives.stale_count,
                samples_held=lives.samples_held,
                bytes_held=lives.bytes_held,
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
            life = self._lives.worker(label)
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
                    written=life.written,
                    claimed=life.claimed,
                    cleared=life.cleared,
                    failed=life.failed,
                    never_cleared=life.in_flight,
                    by_op=by_op,
                    written_to_claimed=life.written_to_claimed.summary(exact=exact),
                    written_to_cleared=life.written_to_cleared.summary(exact=exact),
                    staleness=life.staleness.summary(exact=exact),
                )
            )
        return found

    def close(self) -> None:
        """Release what the ledger holds on disk."""
        self.registry.close()
