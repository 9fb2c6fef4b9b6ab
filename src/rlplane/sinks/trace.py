"""``trace``: a Chrome trace of every operation, which opens in Perfetto, made from the records of ``jsonl``.

Each process is a process of the trace, and each of its threads has one track per partition that it worked on.
What is held becomes counters.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from rlplane.atomic_file import write_atomically
from rlplane.errors import ConfigError
from rlplane.sinks import Record
from rlplane.sinks.jsonl import JsonlSink, read_records, record_files


class TraceSink:
    """Records as ``jsonl`` does, beside ``path``, and makes the trace when it is closed.

    If the process dies first, the records are there: ``rlplane trace`` makes a trace of them.

    Args:
        path: The trace's file, which must end in ``.json``. ``{pid}`` and ``{host}`` are replaced.
        max_bytes: The most that is recorded; of a longer run the trace has the end.
    """

    def __init__(self, path: str | os.PathLike[str], *, max_bytes: int = 1 << 30) -> None:
        if not str(path).endswith(".json"):
            raise ConfigError(f"sink trace: the path {str(path)!r} must end in .json")
        self._records = JsonlSink(f"{path}l", max_bytes=max(max_bytes // 4, 1), backups=3)
        self.path = self._records.path.with_suffix(".json")

    def write(self, records: Sequence[Record]) -> None:
        self._records.write(records)

    def close(self) -> None:
        self._records.close()
        write_trace(read_records(*record_files(self._records.path)), self.path)


def write_trace(records: Iterable[Record], path: str | os.PathLike[str]) -> int:
    """Make a trace of records, complete or not at all; returns how many operations it has."""
    operations = 0

    def write(file: BinaryIO) -> None:
        nonlocal operations
        file.write(b'{"displayTimeUnit":"ms","traceEvents":[')
        separator = b"\n"
        for event in trace_events(records):
            file.write(separator + json.dumps(event, separators=(",", ":")).encode())
            separator = b",\n"
            operations += event["ph"] == "X"
        file.write(b"\n]}\n")

    write_atomically(Path(path), write)
    return operations


def trace_events(records: Iterable[Record]) -> Iterator[dict[str, Any]]:
    """Trace events of records, in their order; a process's or track's name comes before its first event."""
    processes: dict[tuple[str, int], int] = {}
    tracks: dict[tuple[int, int, str], int] = {}
    for record in records:
        if record["kind"] not in ("op", "scalars"):
            continue
        origin = (record["host"], record["pid"])
        pid = processes.get(origin)
        if pid is None:
            # The same pid on two hosts is two processes; numbers that are free are found by counting on.
            pid = origin[1]
            while pid in processes.values():
                pid += 1_000_000
            processes[origin] = pid
            yield _name("process_name", pid, 0, f"{origin[0]} pid {origin[1]}")
        if record["kind"] == "scalars":
            yield from _counters(record, pid)
            continue
        key = (pid, record["thread_id"], record["partition_id"])
        track = tracks.get(key)
        if track is None:
            track = tracks[key] = len(tracks) + 1
            label = " · ".join(filter(None, (record["thread"], record["partition_id"])))
            yield _name("thread_name", pid, track, label)
        yield {
            "name": record["op"],
            "cat": record["partition_id"] or "plane",
            "ph": "X",
            "ts": record["start_ns"] / 1e3,
            "dur": record["wall_ns"] / 1e3,
            "pid": pid,
            "tid": track,
            "args": {
                name: record[name]
                for name in ("partition_id", "n_keys", "n_bytes", "status", "task", "error", "error_message")
                if record[name] is not None
            }
            | ({"wait_ms": record["wait_ns"] / 1e6} if record.get("wait_ns") else {}),
        }


def _name(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "ts": 0, "args": {"name": name}}


def _counters(record: Record, pid: int) -> Iterator[dict[str, Any]]:
    for name in ("bytes_outstanding", "keys_outstanding"):
        if name in record["values"]:
            yield {
                "name": name,
                "ph": "C",
                "ts": record["time"] * 1e6,
                "pid": pid,
                "tid": 0,
                "args": {name: record["values"][name]},
            }
