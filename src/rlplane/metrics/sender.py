"""The worker's side: hand over events in about a microsecond, send them from a background thread.

Telemetry may lose a measurement, never delay an operation: :meth:`EventSender.record` appends to a bounded
queue and returns. When the queue is full the new event is dropped and counted. A thread takes what has
gathered, by count or after ``flush_interval_s``, and sends it; an aggregator that is slow, stopped or gone
fills the queue and nothing else.

Use::

    sender = sender_from_environment(role="rollout")   # None when RLPLANE_METRICS_ADDRESS is not set
    if sender is not None:
        sender.record(OpRecord("put", "rollouts", 8, 4096, wall_ns, start_ns, thread_id=get_ident()))
        ...
        sender.close()                                  # flushes, says goodbye

A sender survives ``fork``: the child gets an empty queue, its own thread and socket, and a worker id of its
own. Any thread, and a signal handler, may record.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import multiprocessing.util
import os
import queue
import socket
import threading
import time
import weakref
from collections import deque
from typing import Any

import msgspec
import zmq

from rlplane.errors import ConfigError
from rlplane.metrics.events import (
    Event,
    EventBatch,
    EventBatchCodec,
    OpRecord,
    WorkerGoodbye,
    WorkerHello,
    pack_ops,
)
from rlplane.transport import Pattern, ZmqMessagePublisher, check_address

__all__ = ["METRICS_ADDRESS_VARIABLE", "EventSender", "sender_from_environment"]

METRICS_ADDRESS_VARIABLE = "RLPLANE_METRICS_ADDRESS"

logger = logging.getLogger(__name__)

# Idle workers send an empty batch this often, so that "last seen" means alive.
_HEARTBEAT_S = 1.0


class EventSender:
    """Sends a worker's events to the aggregator.

    Args:
        address: The aggregator's events address.
        worker: The worker's name; ``host:pid`` by default. Give each process its own.
        role: Free text that viewers show, such as ``rollout``.
        max_queue: Events that may wait. Beyond it the newest are dropped.
        flush_interval_s: The longest that an event waits while the aggregator keeps up; at most 0.1.
        flush_count: Send as soon as this many have gathered.
    """

    def __init__(
        self,
        address: str,
        worker: str | None = None,
        *,
        role: str = "",
        max_queue: int = 65_536,
        flush_interval_s: float = 0.1,
        flush_count: int = 512,
    ) -> None:
        check_address(address, allow_remote=True)
        if not 0 < flush_interval_s <= 0.1:
            raise ConfigError(f"flush_interval_s is {flush_interval_s}; it must be above 0 and at most 0.1")
        if max_queue < 1 or flush_count < 1:
            raise ConfigError(f"max_queue ({max_queue}) and flush_count ({flush_count}) must be at least 1")
        self.address = address
        self.host = socket.gethostname()
        self.worker = worker or f"{self.host}:{os.getpid()}"
        self._named = worker is not None
        self.role = role
        self._max_queue = max_queue
        self._flush_interval_s = flush_interval_s
        self._flush_count = flush_count
        self._begin()
        _SENDERS.add(self)

    def _begin(self) -> None:
        """Start from nothing: also what a forked child does."""
        self.pid = os.getpid()
        self._queue: deque[OpRecord | Event] = deque()
        # A count that is exact between threads and safe in a signal handler: next() is one atomic step.
        self._drops = itertools.count()
        self._drop_reads = 0
        self._n_refused = 0
        self._seq = 0
        # SimpleQueue.put may be called from a signal handler, which no Event or Condition allows.
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._closing = False
        self._closed = False
        self._close_by = 0.0

    def record(self, event: OpRecord | Event) -> None:
        """Queue an event. Never waits and never raises; a full queue drops it and counts it."""
        waiting = self._queue
        size = len(waiting)
        if size >= self._max_queue or self._closed:
            next(self._drops)
            return
        waiting.append(event)
        if size + 1 == self._flush_count:
            self._wake.put(None)
        if self._thread is None:
            self._start()

    @property
    def n_waiting(self) -> int:
        """Events that have not been packed for sending."""
        return len(self._queue)

    @property
    def n_dropped(self) -> int:
        """Events lost in this process: the queue was full, the sender closed, or the event malformed."""
        # Reading takes a number too: subtract the numbers taken by reading.
        with self._starting:
            self._drop_reads += 1
            return next(self._drops) - (self._drop_reads - 1) + self._n_refused

    def close(self, timeout: float = 2.0) -> None:
        """Send what is queued, for at most ``timeout`` seconds, then release the socket. Idempotent."""
        with self._starting:
            if self._closing:
                return
            self._closing = True
            self._close_by = time.monotonic() + timeout
            thread = self._thread
            if thread is None:
                self._closed = True
                return
        self._wake.put(None)
        thread.join(timeout + 0.5)
        self._closed = True

    def _start(self) -> None:
        # Not blocking: whoever loses the race, or is a signal handler inside it, leaves it to the other.
        if not self._starting.acquire(blocking=False):
            return
        try:
            if self._thread is None and not self._closing:
                thread = threading.Thread(target=self._run, name="rlplane-metrics-sender", daemon=True)
                thread.start()
                self._thread = thread
                _close_at_exit(self)
        except RuntimeError:  # The interpreter is ending and starts no threads: the event is lost.
            self._closed = True
        finally:
            self._starting.release()

    # From here on: the background thread.

    def _run(self) -> None:
        context: zmq.Context[Any] = zmq.Context()
        publisher: ZmqMessagePublisher[EventBatch] | None = None
        try:
            publisher = ZmqMessagePublisher(
                EventBatchCodec(),
                self.address,
                pattern=Pattern.COLLECT,
                sndhwm=64,
                linger=0,
                context=context,
            )
            self._serve(publisher)
        except Exception:
            logger.warning(
                "metrics of worker %s stop: cannot send to %s", self.worker, self.address, exc_info=True
            )
        finally:
            self._closed = True
            if publisher is not None:
                publisher.close()
            context.term()

    def _serve(self, publisher: ZmqMessagePublisher[EventBatch]) -> None:
        self._queue.appendleft(WorkerHello(time.time_ns(), self.role))
        unsent: EventBatch | None = None
        last_sent = 0.0
        while True:
            with contextlib.suppress(queue.Empty):
                self._wake.get(timeout=self._flush_interval_s)
            closing = self._closing
            while True:
                now = time.monotonic()
                if unsent is None:
                    if not self._queue and now - last_sent < _HEARTBEAT_S:
                        break
                    unsent = self._take_batch()
                if not self._send(publisher, unsent):
                    break
                unsent, last_sent = None, now
            if closing and (unsent is None or time.monotonic() >= self._close_by):
                self._say_goodbye(publisher, unsent)
                return

    def _take_batch(self) -> EventBatch:
        ops: list[OpRecord] = []
        events: list[Event] = []
        waiting = self._queue
        for _ in range(min(len(waiting), max(self._flush_count, 1))):
            event = waiting.popleft()
            if type(event) is OpRecord:
                ops.append(event)
            else:
                events.append(event)  # type: ignore[arg-type]
        columns, refused = pack_ops(ops) if ops else (None, 0)
        self._n_refused += refused
        self._seq += 1
        return EventBatch(
            worker=self.worker,
            pid=self.pid,
            host=self.host,
            seq=self._seq,
            sent_ns=time.time_ns(),
            n_dropped=self.n_dropped,
            ops=columns,
            events=events,
        )

    def _send(self, publisher: ZmqMessagePublisher[EventBatch], batch: EventBatch) -> bool:
        try:
            return publisher.publish(batch)
        except (TypeError, ValueError, OverflowError):
            # One event that msgpack cannot carry: keep the others.
            kept = [event for event in batch.events if _can_travel(event)]
            self._n_refused += len(batch.events) - len(kept)
            batch.events = kept
            return publisher.publish(batch)

    def _say_goodbye(self, publisher: ZmqMessagePublisher[EventBatch], unsent: EventBatch | None) -> None:
        if unsent is None:
            self._queue.append(WorkerGoodbye(time.time_ns()))
            self._send(publisher, self._take_batch())
        left_ms = max(0, int((self._close_by - time.monotonic()) * 1000))
        publisher.set_linger(left_ms)


def sender_from_environment(worker: str | None = None, *, role: str = "") -> EventSender | None:
    """Return a sender for the aggregator that ``RLPLANE_METRICS_ADDRESS`` names, or None without one."""
    address = os.environ.get(METRICS_ADDRESS_VARIABLE, "")
    return EventSender(address, worker, role=role) if address else None


def _can_travel(event: Event) -> bool:
    try:
        msgspec.msgpack.encode(event)
    except (TypeError, ValueError, OverflowError):
        return False
    return True


_SENDERS: weakref.WeakSet[EventSender] = weakref.WeakSet()


def _close_at_exit(sender: EventSender) -> None:
    reference = weakref.ref(sender)

    def close() -> None:
        alive = reference()
        # A forked child inherits the parent's registration: the pid says whose it is.
        if alive is not None and alive.pid == os.getpid():
            alive.close(timeout=1.0)

    atexit.register(close)
    # Children of multiprocessing end without atexit, but run its finalizers.
    multiprocessing.util.Finalize(None, close, exitpriority=10)


def _after_fork_in_child() -> None:
    for sender in list(_SENDERS):
        sender._begin()
        sender.worker = f"{sender.worker}/{sender.pid}" if sender._named else f"{sender.host}:{sender.pid}"


os.register_at_fork(after_in_child=_after_fork_in_child)
