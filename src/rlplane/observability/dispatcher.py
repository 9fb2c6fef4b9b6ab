"""One queue and one thread between an operation and whoever is told about it.

All that an operation waits for is :meth:`TelemetryDispatcher.put`, which appends it to a queue. A thread
takes the operations in the order in which they ended, adds them up (``accounting.py``), and tells the three
kinds of consumers: the callback, the sinks, and the aggregator, to which the same thread sends. A callback
and a sink are code of others that may block, so each has a buffer and a thread to block in
(``rlplane.sinks.isolated``).

Whoever asks for a snapshot processes what is queued at once, on its own thread. So does an operation that
finds the queue long, because the thread has fallen behind: the queue stays short, and nothing goes uncounted.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from rlplane.metrics.background import BackgroundThread, call_after_fork
from rlplane.metrics.event_publisher import EventPublisherService, FindAddress
from rlplane.metrics.events import EventRecord, FieldBytes, LogRecord, StepRecord
from rlplane.observability.accounting import Accounting
from rlplane.observability.operation import AddedBytes, DataPlaneEvent, Operation, sink_record, step_values
from rlplane.sinks import SinkSpec, build_sink, describe_spec
from rlplane.sinks.isolated import IsolatedConsumer

if TYPE_CHECKING:
    from rlplane.observability.engine_monitor import EngineMonitor

logger = logging.getLogger("rlplane.observability")

# An operation that finds this many others in the queue processes them by itself.
_LONG_QUEUE = 4096
# The thread looks this often while there is something to do, and sleeps when there was nothing for a while:
# an operation that has to wake it pays for that.
_PAUSE_S = 0.02
_LOOKS_BEFORE_SLEEP = 50
_KEYS_BETWEEN_PAUSES = 64
# A job's processes may start in any order, and on a cluster not all at once.
_LOOK_FOR_AGGREGATOR_S = 120.0
_PAUSE_BETWEEN_SEARCHES_S = 0.5


class TelemetryDispatcher:
    """Takes operations, adds them up, and tells the consumers. Knows no client, so it keeps none alive.

    Args:
        on_event: The callback.
        sinks: The sinks, as in the config.
        metrics_address: Where the aggregator is, or what finds it; None if there is none.
        role: What this client is to the job.
        track_partitions: Partitions whose samples are followed one by one (``"*"``: all).
    """

    def __init__(
        self,
        on_event: Callable[[DataPlaneEvent], None] | None,
        sinks: Sequence[SinkSpec],
        metrics_address: str | FindAddress | None,
        role: str,
        track_partitions: Sequence[str],
    ) -> None:
        self.on_event = on_event
        self.sink_specs = list(sinks)
        self._tracked = frozenset(track_partitions)
        self._monitor: EngineMonitor | None = None
        self._thread = BackgroundThread("rlplane-telemetry", self._work, self)
        self.publisher = (
            EventPublisherService(metrics_address, role=role, thread=self._thread)
            if metrics_address
            else None
        )
        self._begin()
        self._build_sinks()
        call_after_fork(self)

    def _begin(self) -> None:
        self.process_info = {"host": socket.gethostname(), "pid": os.getpid()}
        self.accounting = Accounting(self.is_tracked, self.warn)
        self.lock = threading.RLock()
        self.stopped = threading.Event()
        self._operations: deque[Operation] = deque()
        self._warned: set[tuple[str, str]] = set()
        self._thread_names: dict[int, str] = {}
        self._begun = False
        self._inline = self.on_event if _only_appends(self.on_event) else None
        self._callback: IsolatedConsumer | None = None
        if self.on_event is not None and self._inline is None:
            name = f"callback {getattr(self.on_event, '__qualname__', repr(self.on_event))}"
            self._callback = IsolatedConsumer(name, self.on_event, one_by_one=True)
        self._sinks: list[IsolatedConsumer] = []
        self._sinks_to_build = self.sink_specs

    def _build_sinks(self) -> None:
        specs, self._sinks_to_build = self._sinks_to_build, []
        with contextlib.ExitStack() as undo:
            for spec in specs:
                sink = build_sink(spec)
                undo.callback(sink.close)
                self._sinks.append(IsolatedConsumer(f"sink {describe_spec(spec)}", sink.write, sink.close))
            undo.pop_all()
        self.to_sinks("session", event="started")

    def accompany(self, monitor: EngineMonitor) -> None:
        """Start ``monitor`` with the first operation; it ends when ``stopped`` is set."""
        self._monitor = monitor

    def after_fork(self) -> None:
        """Begin anew in a forked child: what the parent put, the parent counts.

        Sinks that were described by name are opened again with the child's first operation. Others stay with
        the parent, whose files and threads they use.
        """
        self.sink_specs = [spec for spec in self.sink_specs if isinstance(spec, (str, Mapping))]
        self._begin()
        if self._monitor is not None:
            self._monitor.after_fork()

    def is_tracked(self, partition_id: str) -> bool:
        """Whether the aggregator follows the samples of a partition one by one."""
        return self.publisher is not None and (partition_id in self._tracked or "*" in self._tracked)

    # What comes in.

    def put(self, operation: Operation) -> None:
        """Queue one operation. This is all that an operation waits for."""
        operations = self._operations
        operations.append(operation)
        if self._inline is not None:
            self.process()
            if not self._begun:
                self._wake()
        elif self._thread.asleep:
            self._wake()
        elif len(operations) > _LONG_QUEUE:
            self.process()

    def _wake(self) -> None:
        if self.stopped.is_set():
            self._operations.clear()
            return
        self._begin_threads()

    def _begin_threads(self) -> None:
        self._thread.wake()
        if not self._begun:
            with self.lock, contextlib.suppress(RuntimeError):  # The interpreter is ending.
                if not self._begun and self._monitor is not None:
                    self._monitor.start()
                self._begun = True

    def process(self, *, with_pauses: bool = False) -> None:
        """Add up and hand on all that is queued; ``with_pauses``, in which operations can go on."""
        operations = self._operations
        if not operations:
            # Another thread may be at work on what was queued before: wait for it.
            with self.lock:
                return
        with self.lock:
            if self._sinks_to_build:
                self._build_sinks_after_fork()
            epoch = time.time() - time.perf_counter()
            events: list[DataPlaneEvent] = []
            records: list[dict[str, Any]] = []
            keys = 0
            for _ in range(len(operations)):
                try:
                    operation = operations.popleft()
                except IndexError:  # A signal handler on this thread processed in between.
                    break
                try:
                    self._process_one(operation, epoch, events, records)
                except Exception as error:
                    self.accounting.counts["unmeasured"] += 1
                    what = (operation.op, operation.partition_id)
                    self.warn("unmeasured", "", f"an operation could not be measured: {what}: {error!r}")
                keys += operation.n_keys
                if with_pauses and keys >= _KEYS_BETWEEN_PAUSES:
                    # A caller that has just got its answer waits for the interpreter's lock, which this
                    # thread would otherwise keep for up to 5 ms.
                    time.sleep(0)
                    keys = 0
            if self._callback is not None:
                self._callback.offer(events)
            for sink in self._sinks:
                sink.offer(records)

    def _process_one(
        self,
        operation: Operation,
        epoch: float,
        events: list[DataPlaneEvent],
        records: list[dict[str, Any]],
    ) -> None:
        step = self.accounting.apply(operation, epoch)
        if step is not None:
            self.to_aggregator(step)
        if isinstance(operation.effect, AddedBytes):
            return
        if self._inline is not None:
            self._inline(operation.event())
        elif self._callback is not None:
            events.append(operation.event())
        if self.publisher is not None or self._sinks:
            record = operation.record(epoch)
            self.to_aggregator(record)
            if self._sinks:
                name = self._thread_name(operation.thread_id)
                records.append(sink_record(record, name, self.process_info, operation.field_bytes))

    # What goes out.

    def to_sinks(self, kind: str, **content: Any) -> None:
        """Give every sink a record that is not an operation."""
        if self._sinks:
            record = {"kind": kind, "time": time.time(), **self.process_info, **content}
            for sink in self._sinks:
                sink.offer([record])

    def to_aggregator(self, event: EventRecord) -> None:
        """Give the aggregator an event, if there is an aggregator."""
        publisher = self.publisher
        if publisher is not None:
            publisher.record(event)

    def send_field_bytes(self) -> None:
        """Tell the aggregator how many bytes were written to each field since the last time."""
        with self.lock:
            self.process()
            written, self.accounting.field_bytes = self.accounting.field_bytes, {}
        for partition_id, sizes in written.items():
            self.to_aggregator(FieldBytes(partition_id, sizes))

    def finish_step(self, record: StepRecord) -> None:
        """Tell of a training step that has ended, after all operations so far."""
        self.process()
        self.to_aggregator(record)
        self._begin_threads()
        if record.step is None:
            self.to_sinks("log", step=None, values={f"log/{k}": v for k, v in record.scalars.items()})
        else:
            self.to_sinks("step", step=record.step, values=step_values(record))

    @property
    def has_sinks(self) -> bool:
        return bool(self._sinks)

    def warn(self, topic: str, partition_id: str, message: str) -> None:
        """Log a warning once for each topic and partition, and show it to the viewers."""
        key = (topic, partition_id)
        if key in self._warned or len(self._warned) > 1000:
            return
        self._warned.add(key)
        # On another thread: a log handler that blocks must not hold up an operation.
        with contextlib.suppress(RuntimeError):
            threading.Thread(target=logger.warning, args=("%s", message), daemon=True).start()
        self.to_aggregator(LogRecord("warning", message, time.time_ns()))

    def snapshot(self) -> dict[str, Any]:
        """Totals, what is outstanding, and how the measuring itself goes."""
        with self.lock:
            self.process()
            accounting, publisher = self.accounting, self.publisher
            return {
                **asdict(accounting.outstanding.stats),
                "keys_outstanding": accounting.outstanding.keys(),
                **accounting.counts,
                "reconciled_keys": accounting.reconciled["keys"],
                "reconciled_bytes": accounting.reconciled["bytes"],
                "ops": accounting.counters.totals(),
                "callback": self._callback.state() if self._callback is not None else None,
                "sinks": {sink.name: sink.state() for sink in self._sinks},
                "events_dropped": publisher.n_dropped if publisher is not None else 0,
            }

    def flush(self, timeout_s: float) -> bool:
        """Wait until the callback and the sinks have had everything so far."""
        self.process()
        until = time.monotonic() + timeout_s
        return all(consumer.flush(max(until - time.monotonic(), 0)) for consumer in self._isolated())

    def close(self, timeout_s: float = 2.0) -> None:
        """Hand on what is there and end the threads, within about ``timeout_s`` each. Idempotent."""
        with self.lock:
            if self.stopped.is_set():
                return
            self.process()
            self.stopped.set()
        for consumer in self._isolated():
            consumer.close(timeout_s)
        self._thread.close(timeout_s)

    def _isolated(self) -> list[IsolatedConsumer]:
        return self._sinks if self._callback is None else [*self._sinks, self._callback]

    def _work(self) -> Iterator[float | None]:
        thread, looks = self._thread, 0
        yield from self._find_aggregator()
        connecting = self.publisher.connect() if self.publisher is not None else contextlib.nullcontext()
        with connecting as aggregator:
            while True:
                closing = thread.closing
                if self._operations:
                    looks = 0
                    self.process(with_pauses=True)
                all_sent = aggregator is None or aggregator.send_due(everything=closing)
                if closing and (all_sent or time.monotonic() >= thread.deadline):
                    if aggregator is not None:
                        aggregator.say_goodbye(thread.deadline)
                    return
                looks += 1
                if closing or looks < _LOOKS_BEFORE_SLEEP:
                    yield _PAUSE_S
                    continue
                # While events wait to be sent, the thread looks again soon: nobody has to wake it.
                thread.asleep = aggregator is None or not aggregator.n_waiting
                # An operation may have come since the last look, and have found the thread awake.
                if not self._operations:
                    yield None if aggregator is None else aggregator.rest_s()

    def _find_aggregator(self) -> Iterator[float]:
        """Look for the aggregator until it is found; operations go on meanwhile. It may not have started yet,
        or there may be none."""
        publisher, give_up = self.publisher, time.monotonic() + _LOOK_FOR_AGGREGATOR_S
        while publisher is not None and not publisher.find():
            if self._thread.closing or time.monotonic() > give_up:
                logger.warning("no aggregator was found: rlplane top and dash will not see this process")
                self.publisher = publisher = None
                return
            self.process(with_pauses=True)
            yield _PAUSE_BETWEEN_SEARCHES_S

    def _build_sinks_after_fork(self) -> None:
        try:
            self._build_sinks()
        except Exception as error:
            self.warn("sinks", "", f"sinks could not be opened in the forked process: {error!r}")

    def _thread_name(self, ident: int) -> str:
        name = self._thread_names.get(ident)
        if name is None:
            if len(self._thread_names) > 4096:
                self._thread_names.clear()
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            name = self._thread_names[ident] = names.get(ident, str(ident))
        return name


def _only_appends(callback: Any) -> bool:
    """Whether it only appends to a container, cannot block, and so can be called at once."""
    owner, name = getattr(callback, "__self__", None), getattr(callback, "__name__", "")
    return (type(owner) in (list, deque) and name == "append") or (
        type(owner) is SimpleQueue and name == "put"
    )
