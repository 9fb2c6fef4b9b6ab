"""The journal: operations note themselves in one append, and a background thread works out what they mean.

An operation's path is ``note``: a tuple is appended to a deque. Everything else (the books, the events
for the callback and the sinks, the records for the aggregator) happens when the journal is folded, by the
thread or by whoever asks for a snapshot, in the order in which the operations ended. Should the thread
fall behind, the operations fold by themselves, so that the journal stays short and the books complete.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import multiprocessing.util
import os
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from queue import SimpleQueue
from typing import Any, Literal, Protocol, TypedDict

from rlplane.metrics.events import Event, LogRecord, OpRecord, SampleLife
from rlplane.metrics.sender import EventSender
from rlplane.observability.books import JUMP_FACTOR, Books
from rlplane.observability.sizes import settle
from rlplane.observability.tally import Tally
from rlplane.sinks import SinkSpec, build_sink, describe_spec
from rlplane.sinks.outlet import Outlet

__all__ = ["ADD", "CLAIM", "CLEAR", "NOTHING", "PUT", "RESET", "DataPlaneEvent", "EventStatus", "Journal"]

logger = logging.getLogger("rlplane.observability")

EventStatus = Literal["ok", "error"]


class DataPlaneEvent(TypedDict):
    """What the callback gets: one operation."""

    op: str
    partition_id: str
    n_keys: int
    n_bytes: int
    wall_ms: float
    status: EventStatus


# What an operation does to the books; the payload that goes with it is said where it is applied.
NOTHING, PUT, CLEAR, CLAIM, ADD, RESET = range(6)

# An operation that finds this many others waiting to be folded does it by itself.
_FOLD_AT = 4096
# The thread looks this often while there is something to do, and sleeps when there was nothing for a while:
# an operation that has to wake it pays for that.
_REST_S = 0.02
_LOOKS_BEFORE_SLEEP = 50
_KEYS_BETWEEN_PAUSES = 64
_MANY_PARTITIONS = 4096

Entry = tuple[str, str, int, int, float, float, str, int, str | None, tuple[str, str] | None, int, Any]


class Journal:
    """Takes notes, keeps the books, and hands measurements on. Knows no client, so it keeps none alive."""

    def __init__(
        self,
        on_event: Callable[[DataPlaneEvent], None] | None,
        sinks: Sequence[SinkSpec],
        sender: EventSender | None,
        track_partitions: Sequence[str],
    ) -> None:
        self.on_event = on_event
        self.sink_specs = list(sinks)
        self.sender = sender
        self.tracked = frozenset(track_partitions)
        self.companion: Companion | None = None
        self._begin()
        self._build_sinks()
        _JOURNALS.add(self)

    def _begin(self) -> None:
        """Start from nothing: also what a forked child does."""
        self.pid, self.host = os.getpid(), socket.gethostname()
        self.books = Books()
        self.tally = Tally()
        self.lock = threading.RLock()
        self._entries: deque[Entry] = deque()
        self._asleep = True
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self.stopped = threading.Event()
        self._hooked = False
        self.number = 0
        self.counts = {"failed_ops": 0, "bytes_per_key_jumps": 0, "large_storage_views": 0, "unmeasured": 0}
        self.reconciled = {"keys": 0, "bytes": 0}
        self._warned: set[tuple[str, str]] = set()
        self._thread_names: dict[int, str] = {}
        self._inline = self.on_event if _cannot_block(self.on_event) else None
        self._callback: Outlet | None = None
        if self.on_event is not None and self._inline is None:
            name = f"callback {getattr(self.on_event, '__qualname__', repr(self.on_event))}"
            self._callback = Outlet(name, self.on_event, one_by_one=True)
        self._sinks: list[Outlet] = []
        self._sinks_to_build = self.sink_specs
        self.touched: dict[str, float] = {}

    def _build_sinks(self) -> None:
        specs, self._sinks_to_build = self._sinks_to_build, []
        with contextlib.ExitStack() as undo:
            for spec in specs:
                sink = build_sink(spec)
                undo.callback(sink.close)
                self._sinks.append(Outlet(f"sink {describe_spec(spec)}", sink.write, sink.close))
            undo.pop_all()
        started = {"kind": "session", "event": "started", "time": time.time()}
        self.to_sinks([{**started, "host": self.host, "pid": self.pid}])

    def note(self, entry: Entry) -> None:
        """Append one operation. This is all that an operation waits for."""
        entries = self._entries
        entries.append(entry)
        if self._inline is not None:
            self.fold()
            if self._thread is None:
                self._wake_up()
        elif self._asleep:
            self._wake_up()
        elif len(entries) > _FOLD_AT:
            self.fold()

    def fold(self, *, politely: bool = False) -> None:
        """Work out all that has been noted so far; ``politely``, with pauses that let operations go on."""
        entries = self._entries
        if not entries:
            # Another thread may be at work on what was noted before: wait for it.
            with self.lock:
                return
        with self.lock:
            if self._sinks_to_build:
                self._build_sinks_after_fork()
            out = _Out(time.time() - time.perf_counter())
            keys = 0
            for _ in range(len(entries)):
                try:
                    entry = entries.popleft()
                except IndexError:  # A signal handler on this thread folded in between.
                    break
                try:
                    self._apply(entry, out)
                except Exception as error:
                    self.counts["unmeasured"] += 1
                    self.warn("unmeasured", "", f"an operation could not be measured: {entry[:3]}: {error!r}")
                keys += entry[2]
                if politely and keys >= _KEYS_BETWEEN_PAUSES:
                    # Whoever has just got its answer waits for the interpreter's lock, which we would keep
                    # for up to 5 ms.
                    time.sleep(0)
                    keys = 0
            if self._callback is not None:
                self._callback.offer(out.events)
            self.to_sinks(out.records)

    def snapshot(self) -> dict[str, Any]:
        """Totals, what is held, and how the measuring itself goes."""
        with self.lock:
            self.fold()
            dropped = self.sender.n_dropped if self.sender is not None else 0
            return {
                **asdict(self.books.stats),
                "keys_outstanding": self.books.keys(),
                **self.counts,
                "reconciled_keys": self.reconciled["keys"],
                "reconciled_bytes": self.reconciled["bytes"],
                "ops": self.tally.totals(),
                "callback": self._callback.state() if self._callback is not None else None,
                "sinks": {outlet.name: outlet.state() for outlet in self._sinks},
                "events_dropped": dropped,
            }

    def flush(self, timeout_s: float) -> bool:
        """Wait until the callback and the sinks have had everything so far."""
        self.fold()
        until = time.monotonic() + timeout_s
        outlets = [*self._sinks, *([self._callback] if self._callback is not None else [])]
        return all(outlet.flush(max(until - time.monotonic(), 0)) for outlet in outlets)

    def close(self, timeout_s: float = 2.0) -> None:
        """Hand on what is there and end the threads, within about ``timeout_s`` each. Idempotent."""
        with self.lock:
            if self.stopped.is_set():
                return
            self.fold()
            self.stopped.set()
        self._wake.set()
        for outlet in (*self._sinks, *([self._callback] if self._callback is not None else [])):
            outlet.close(timeout_s)
        if self.sender is not None:
            self.sender.close(timeout_s)

    @property
    def has_sinks(self) -> bool:
        return bool(self._sinks)

    def to_sinks(self, records: Sequence[dict[str, Any]]) -> None:
        """Give every sink these records."""
        for outlet in self._sinks:
            outlet.offer(records)

    def to_sender(self, event: OpRecord | Event) -> None:
        """Give the aggregator an event, if there is one."""
        if self.sender is not None:
            self.sender.record(event)

    def warn(self, what: str, partition_id: str, message: str) -> None:
        """Log a warning once for each ``what`` and partition, and show it to the viewers."""
        key = (what, partition_id)
        if key in self._warned or len(self._warned) > 1000:
            return
        self._warned.add(key)
        # Not here: a log handler that blocks must not hold up whoever folds.
        with contextlib.suppress(RuntimeError):
            threading.Thread(target=logger.warning, args=("%s", message), daemon=True).start()
        self.to_sender(LogRecord("warning", message, time.time_ns()))

    def is_tracked(self, partition_id: str) -> bool:
        return partition_id in self.tracked or "*" in self.tracked

    def _apply(self, entry: Entry, out: _Out) -> None:
        op, partition, n_keys, n_bytes, began, ended, status, _, task, error, action, payload = entry
        self.number += 1
        books, good = self.books, status == "ok"
        if action == PUT:
            ids, seen, tags = payload
            columns, dragging = settle(seen, len(ids))
            n_bytes = sum([column.total for column in columns])
            if good:
                self.counts["large_storage_views"] += dragging
                if books.put(partition, ids, columns, self.number):
                    self._jumped(partition, n_bytes // len(ids))
            # A put that ran out of time will be tried again: its samples have not failed.
            if self.sender is not None and status != "timeout" and self.is_tracked(partition):
                kind: Literal["written", "failed"] = "written" if good else "failed"
                when = (out.epoch + began, out.epoch + ended)
                self._life(kind, partition, ids, tags, when, n_bytes=n_bytes, error=error)
        elif action == CLEAR:
            if good and self.sender is not None and self.is_tracked(partition):
                # None means what this client wrote, if it wrote anything here.
                ids = books.held_ids(partition) if payload is None else payload
                self._life("cleared", partition, ids, None, (out.epoch + began, out.epoch + ended))
            if good:
                known, _ = books.clear(partition, payload)
                n_keys = known if payload is None else n_keys
        elif action == CLAIM:
            ids, tags = payload
            self._life("claimed", partition, ids, tags, (out.epoch + began, out.epoch + ended), task=task)
        elif action == ADD:
            books.add(partition, payload, n_bytes, self.number)
            return
        elif action == RESET:
            books.clear_everything()
        if partition:
            self.touched[partition] = ended
            if len(self.touched) > _MANY_PARTITIONS:
                self.touched = {partition: ended}
        stats = books.stats
        stats.total_ops += 1
        if good:
            stats.total_keys += n_keys
            stats.total_bytes += n_bytes
        else:
            self.counts["failed_ops"] += 1
        wall = ended - began
        self.tally.add(op, n_keys, n_bytes, wall, good)
        if self.on_event is not None:
            event: DataPlaneEvent = {
                "op": op,
                "partition_id": partition,
                "n_keys": n_keys,
                "n_bytes": n_bytes,
                "wall_ms": wall * 1e3,
                "status": "ok" if good else "error",
            }
            if self._inline is not None:
                self._inline(event)
            else:
                out.events.append(event)
        if self.sender is not None or self._sinks:
            self._hand_on(entry, n_keys, n_bytes, out)

    def _hand_on(self, entry: Entry, n_keys: int, n_bytes: int, out: _Out) -> None:
        op, partition, _, _, began, ended, status, thread, task, error = entry[:10]
        start_ns, wall_ns = int((out.epoch + began) * 1e9), max(int((ended - began) * 1e9), 0)
        name, message = error or (None, None)
        if self.sender is not None:
            record = OpRecord(
                op, partition, n_keys, n_bytes, wall_ns, start_ns, status, thread, task, name, message
            )
            self.sender.record(record)
        if self._sinks:
            out.records.append(
                {
                    "kind": "op",
                    "op": op,
                    "partition_id": partition,
                    "n_keys": n_keys,
                    "n_bytes": n_bytes,
                    "wall_ms": wall_ns / 1e6,
                    "status": status,
                    "start_ns": start_ns,
                    "wall_ns": wall_ns,
                    "host": self.host,
                    "pid": self.pid,
                    "thread_id": thread,
                    "thread": self._thread_name(thread),
                    "task": task,
                    "error": name,
                    "error_message": message,
                }
            )

    def _life(
        self,
        kind: Literal["written", "claimed", "cleared", "failed"],
        partition: str,
        ids: Sequence[str] | None,
        tags: Sequence[dict[str, Any]] | None,
        when: tuple[float, float],
        *,
        task: str | None = None,
        n_bytes: int = 0,
        error: tuple[str, str] | None = None,
    ) -> None:
        versions = None
        if tags and any("weight_version" in tag for tag in tags):
            found = [tag.get("weight_version") for tag in tags]
            versions = [value if type(value) is int else None for value in found]
        self.to_sender(
            SampleLife(
                kind=kind,
                partition_id=partition,
                sample_ids=list(ids or ()),
                time_ns=int(when[1] * 1e9),
                task=task,
                weight_versions=versions,
                n_bytes=n_bytes,
                reason=None if error is None else error[0],
                everything=ids is None,
                start_ns=int(when[0] * 1e9),
            )
        )

    def _jumped(self, partition: str, per_key: int) -> None:
        self.counts["bytes_per_key_jumps"] += 1
        self.warn(
            "jump",
            partition,
            f"a put into partition {partition!r} had {per_key} bytes per key, more than {JUMP_FACTOR} times "
            "the most that its fields had before",
        )

    def _thread_name(self, ident: int) -> str:
        name = self._thread_names.get(ident)
        if name is None:
            if len(self._thread_names) > 4096:
                self._thread_names.clear()
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            name = self._thread_names[ident] = names.get(ident, str(ident))
        return name

    def _wake_up(self) -> None:
        self._asleep = False
        if self.stopped.is_set():
            self._entries.clear()
        elif self._thread is None:
            with self.lock:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="rlplane-journal", daemon=True)
                    with contextlib.suppress(RuntimeError):  # The interpreter is ending.
                        _close_at_exit(self)
                        self._thread.start()
                        if self.companion is not None:
                            self.companion.start()
        self._wake.set()

    def _run(self) -> None:
        while not self.stopped.is_set():
            self._wake.wait()
            self._wake.clear()
            idle = 0
            while idle < _LOOKS_BEFORE_SLEEP and not self.stopped.is_set():
                if self._entries:
                    idle = 0
                    self.fold(politely=True)
                    if not self._hooked:
                        # Once more, after the sender has begun, so that at exit we come before it.
                        self._hooked = True
                        _close_at_exit(self)
                idle += 1
                self.stopped.wait(_REST_S)
            self._asleep = True
            if self._entries:  # Noted after the loop looked and before we said that we sleep.
                self._wake.set()

    def after_fork(self) -> None:
        """Begin anew in a forked child: what the parent wrote is on the parent's books.

        Sinks that were described by name are opened again with the child's first operation. Others stay with
        the parent, whose files and threads they use.
        """
        self.sink_specs = [spec for spec in self.sink_specs if isinstance(spec, (str, Mapping))]
        self._begin()
        if self.companion is not None:
            self.companion.after_fork()

    def _build_sinks_after_fork(self) -> None:
        try:
            self._build_sinks()
        except Exception as error:
            self.warn("sinks", "", f"sinks could not be opened in the forked process: {error!r}")


class Companion(Protocol):
    """What is started together with the journal's thread, and ends when ``stopped`` is set."""

    def start(self) -> None: ...

    def after_fork(self) -> None: ...


class _Out:
    """What one fold hands on."""

    __slots__ = ("epoch", "events", "records")

    def __init__(self, epoch: float) -> None:
        self.epoch = epoch
        self.events: list[DataPlaneEvent] = []
        self.records: list[dict[str, Any]] = []


def _cannot_block(callback: Any) -> bool:
    """Whether it only appends to a container, so that it can be called at once."""
    owner, name = getattr(callback, "__self__", None), getattr(callback, "__name__", "")
    return (type(owner) in (list, deque) and name == "append") or (
        type(owner) is SimpleQueue and name == "put"
    )


_JOURNALS: weakref.WeakSet[Journal] = weakref.WeakSet()


def _close_at_exit(journal: Journal) -> None:
    reference = weakref.ref(journal)

    def close() -> None:
        alive = reference()
        if alive is not None and alive.pid == os.getpid():
            alive.close(timeout_s=1.0)

    atexit.register(close)
    # Children of multiprocessing end without atexit, but run its finalizers; the sender's, with 10, later.
    multiprocessing.util.Finalize(None, close, exitpriority=20)


def _after_fork_in_child() -> None:
    for journal in list(_JOURNALS):
        journal.after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
