"""A finished run's operations as a Chrome trace, from the aggregator's ``events.jsonl`` or a sink's files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from rlplane.metrics.event_logger import read_event_log
from rlplane.metrics.events import WorkerHello
from rlplane.sinks.jsonl import read_records, record_files
from rlplane.sinks.trace import write_trace

EVENTS_NAME = "events.jsonl"


def find_records(run: Path) -> list[Path]:
    """The files of a run that have its operations, oldest first; if the aggregator's is there, only that."""
    if run.is_file():
        return record_files(run)
    if (run / EVENTS_NAME).is_file():
        return [run / EVENTS_NAME]
    return [file for path in sorted(run.glob("*.jsonl")) for file in record_files(path)]


def write_run_trace(sources: list[Path], out: Path) -> int:
    """Write the trace of what :func:`find_records` found; returns how many operations it has."""
    from_aggregator = [path for path in sources if _is_from_aggregator(path)]
    if not from_aggregator:
        return write_trace(read_records(*sources), out)
    return write_trace((record for path in from_aggregator for record in _records(path)), out)


def _is_from_aggregator(path: Path) -> bool:
    with path.open("rb") as file:
        first = file.readline()
    try:
        line = msgspec.json.decode(first)
    except msgspec.DecodeError:
        return False
    return isinstance(line, dict) and line.get("type") == "batch"


def _records(path: Path) -> Iterator[dict[str, Any]]:
    """The operations in the form of a sink's records. A worker is named by its role, if it has one."""
    names: dict[str, str] = {}
    for batch in read_event_log(path):
        for event in batch.events:
            if isinstance(event, WorkerHello) and event.role:
                names[batch.worker] = f"{event.role} · {batch.worker}"
        for op in batch.op_records():
            yield {
                **msgspec.structs.asdict(op),
                "kind": "op",
                "host": names.get(batch.worker, batch.worker),
                "thread": f"thread {op.thread_id}",
                "error": op.error_class,
            }
