"""The events of a run as JSON lines, and the way back: the same figures, computed offline.

A batch is a line of ``"type": "batch"`` that says who sent it, and then one line per event. Lines are in the
order of arrival, which is the order in which the aggregator counted them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, TypeAlias

import msgspec

from rlplane.metrics.events import EventBatch, OpRecord, SingleEvent, pack_ops
from rlplane.metrics.run_state import RunState
from rlplane.metrics.snapshot import MetricsSnapshot, SessionState

__all__ = ["EventLoggerService", "read_event_log", "snapshot_from_event_log"]

logger = logging.getLogger(__name__)


class BatchLine(msgspec.Struct, tag="batch"):
    """The line that begins a batch."""

    worker: str
    pid: int
    host: str
    seq: int
    sent_ns: int
    n_dropped: int


_Line: TypeAlias = BatchLine | OpRecord | SingleEvent


class EventLoggerService:
    """Appends batches to a file. When the disk fails it stops, with one warning: the run goes on."""

    def __init__(self, path: Path, *, append: bool = False) -> None:
        self.path = path
        self.failed = False
        self._encoder = msgspec.json.Encoder()
        self._file: BinaryIO | None = path.open("ab" if append else "wb")

    def write(self, batch: EventBatch) -> None:
        """Append a batch."""
        if self._file is None:
            return
        head = BatchLine(batch.worker, batch.pid, batch.host, batch.seq, batch.sent_ns, batch.n_dropped)
        lines: list[_Line] = [head, *batch.op_records(), *batch.events]
        try:
            self._file.write(b"".join(self._encoder.encode(line) + b"\n" for line in lines))
        except OSError as exc:
            self._give_up(exc)

    def flush(self) -> None:
        """Bring what was written to the file, so that whoever follows it sees whole lines soon."""
        if self._file is not None:
            try:
                self._file.flush()
            except OSError as exc:
                self._give_up(exc)

    def _give_up(self, exc: OSError) -> None:
        logger.warning("the events are no longer written to %s: %s", self.path, exc)
        self.failed = True
        self.close()

    def close(self) -> None:
        """Close the file. Idempotent."""
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as exc:
                self.failed = True
                logger.warning("the last events are not in %s: %s", self.path, exc)


def read_event_log(path: Path) -> Iterator[EventBatch]:
    """The batches of an event log. A last line that a crash cut off is passed over.

    Raises ``ValueError`` for any other line that cannot be read.
    """
    decoder = msgspec.json.Decoder(_Line)
    head: BatchLine | None = None
    ops: list[OpRecord] = []
    events: list[SingleEvent] = []
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            try:
                line = decoder.decode(text)
            except msgspec.DecodeError as exc:
                if not text.endswith(b"\n"):
                    break
                raise ValueError(f"{path}, line {number}: {exc}") from exc
            if isinstance(line, BatchLine):
                if head is not None:
                    yield _batch(head, ops, events)
                head, ops, events = line, [], []
            elif isinstance(line, OpRecord):
                ops.append(line)
            else:
                events.append(line)
    if head is not None:
        yield _batch(head, ops, events)


def _batch(head: BatchLine, ops: list[OpRecord], events: list[SingleEvent]) -> EventBatch:
    columns = pack_ops(ops)[0] if ops else None
    return EventBatch(**msgspec.structs.asdict(head), ops=columns, events=events)


def snapshot_from_event_log(path: Path, run_id: str = "offline") -> MetricsSnapshot:
    """Count the events of a log again and return the exact, COMPLETE picture that they give."""
    run_state = RunState(run_id)
    try:
        for batch in read_event_log(path):
            run_state.add_batch(batch)
        return run_state.snapshot(SessionState.COMPLETE, exact=True)
    finally:
        run_state.close()
