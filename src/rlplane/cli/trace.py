"""``rlplane trace``: a run's operations as a trace that opens in Perfetto."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter

from rlplane.cli.options import Json
from rlplane.cli.outcome import CommandError, ExitCode
from rlplane.cli.output import note, write_json
from rlplane.metrics.events import WorkerHello
from rlplane.metrics.journal import read_journal
from rlplane.metrics.publisher import write_atomically
from rlplane.sinks.jsonl import record_files
from rlplane.sinks.trace import trace_events, write_trace

__all__ = ["trace"]

_JOURNAL = "events.jsonl"


def trace(
    run: Path,
    /,
    *,
    out: Annotated[Path, Parameter(name=["--out", "-o"])] = Path("trace.json"),
    as_json: Json = False,
) -> None:
    """Make a trace of a run's operations, by process, thread and partition.

    Parameters
    ----------
    run
        The run's directory (with events.jsonl, or the files of a jsonl sink), or one such file.
    out
        The trace. Open it at ui.perfetto.dev or in chrome://tracing.
    """
    sources = find_records(run)
    if not sources:
        raise CommandError(
            f"{run} has no records of operations: it needs {_JOURNAL} (the aggregator's jsonl option) or the"
            " files of a jsonl sink",
            ExitCode.USAGE,
        )
    journals = [path for path in sources if _is_journal(path)]
    try:
        operations = _write_journals(journals, out) if journals else write_trace(sources, out)
    except OSError as error:
        raise CommandError(f"cannot write {out}: {error.strerror}") from error
    if as_json:
        files = [str(path) for path in journals or sources]
        write_json("trace", {"operations": operations, "out": str(out), "sources": files})
    note(f"wrote {out}: {operations:,} operations; open it at ui.perfetto.dev")


def find_records(run: Path) -> list[Path]:
    """The files of a run that have its operations, oldest first. The journal alone, if it is there."""
    if run.is_file():
        return record_files(run)
    if (run / _JOURNAL).is_file():
        return [run / _JOURNAL]
    return [file for path in sorted(run.glob("*.jsonl")) for file in record_files(path)]


def _is_journal(path: Path) -> bool:
    with path.open("rb") as file:
        first = file.readline()
    try:
        line = msgspec.json.decode(first)
    except msgspec.DecodeError:
        return False
    return isinstance(line, dict) and line.get("type") == "batch"


def _write_journals(paths: list[Path], out: Path) -> int:
    events = list(trace_events(record for path in paths for record in _records(path)))
    content = msgspec.json.encode({"displayTimeUnit": "ms", "traceEvents": events})
    write_atomically(out.absolute(), content)
    return sum(event["ph"] == "X" for event in events)


def _records(path: Path) -> Iterator[dict[str, Any]]:
    """A journal's operations in the form of a sink's records; the worker's name says more than its host."""
    names: dict[str, str] = {}
    for batch in read_journal(path):
        for event in batch.events:
            if isinstance(event, WorkerHello) and event.role:
                names[batch.worker] = f"{event.role} · {batch.worker}"
        for op in batch.op_records():
            yield {
                "kind": "op",
                "host": names.get(batch.worker, batch.worker),
                "pid": batch.pid,
                "thread": f"thread {op.thread_id}",
                "thread_id": op.thread_id,
                "partition_id": op.partition_id,
                "op": op.op,
                "start_ns": op.start_ns,
                "wall_ns": op.wall_ns,
                "n_keys": op.n_keys,
                "n_bytes": op.n_bytes,
                "status": op.status,
                "task": op.task,
                "error": op.error_class,
                "error_message": op.error_message,
            }
