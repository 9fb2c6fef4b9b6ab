"""``EventPublisherService``: what a worker sends its events with, at about a microsecond each.

Telemetry may lose a measurement, never delay an operation: :meth:`EventPublisherService.record` appends to a
bounded queue and returns. When the queue is full the new event is dropped and counted. A thread sends what
has gathered, by count or after ``flush_interval_s``; an aggregator that is slow, stopped or gone fills the
queue and nothing else. Whatever cannot be encoded is dropped and counted too, and never ends the service.

Use::

    publisher = publisher_from_environment(role="rollout")   # None when RLPLANE_METRICS_ADDRESS is not set
    if publisher is not None:
        publisher.record(OpRecord("put", "rollouts", 8, 4096, wall_ns, start_ns, thread_id=get_ident()))
        ...
        publisher.close()                                     # flushes, says goodbye

A service survives ``fork``: the child gets an empty queue, its own thread and socket, and a worker id of its
own. Any thread, and a signal handler, may record.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import zmq

from rlplane.errors import ConfigError, PlaneConnectionError
from rlplane.metrics.background import BackgroundThread, call_after_fork
from rlplane.metrics.events import (
    EventBatch,
    EventRecord,
    EventRecordCodec,
    OpRecord,
    SingleEvent,
    WorkerGoodbye,
    WorkerHello,
    pack_ops,
)
from rlplane.transport import Pattern, ZmqMessagePublisher, check_address
from rlplane.transport.curve import without_secret

__all__ = [
    "METRICS_ADDRESS_VARIABLE",
    "OFF",
    "Connection",
    "EventPublisherService",
    "FindAddress",
    "publisher_from_environment",
]

METRICS_ADDRESS_VARIABLE = "RLPLANE_METRICS_ADDRESS"
FindAddress = Callable[[], str | None]
OFF = "off"
"""The address that says that there shall be no aggregator."""

logger = logging.getLogger(__name__)

# Idle workers send an empty batch this often, so that "last seen" means alive.
_HEARTBEAT_S = 1.0


class EventPublisherService:
    """Sends a worker's events to the aggregator.

    Args:
        address: The aggregator's events address; or what finds it, which is asked by :meth:`find`.
        worker: The worker's name; ``host:pid`` by default. Give each process its own.
        role: Free text that viewers show, such as ``rollout``.
        max_queue: Events that may wait. Beyond it the newest are dropped.
        flush_interval_s: The longest that an event waits while the aggregator keeps up; at most 0.1.
        flush_count: Send as soon as this many have gathered.
        thread: A thread that already works for the caller, and on which the caller uses :meth:`connect`; by
            default the service starts its own.
    """

    def __init__(
        self,
        address: str | FindAddress,
        worker: str | None = None,
        *,
        role: str = "",
        max_queue: int = 65_536,
        flush_interval_s: float = 0.1,
        flush_count: int = 512,
        thread: BackgroundThread | None = None,
    ) -> None:
        if not callable(address):
            check_address(address, allow_remote=True)
        if not 0 < flush_interval_s <= 0.1:
            raise ConfigError(f"flush_interval_s is {flush_interval_s}; it must be above 0 and at most 0.1")
        if max_queue < 1 or flush_count < 1:
            raise ConfigError(f"max_queue ({max_queue}) and flush_count ({flush_count}) must be at least 1")
        for name, text in (("worker", worker or ""), ("role", role)):
            if not _is_encodable(text):
                raise ConfigError(f"{name} is {text!r}, which is not valid Unicode")
        self.address = address
        self.host = socket.gethostname()
        self._given_name = worker
        self.worker = worker or f"{self.host}:{os.getpid()}"
        self.role = role
        self._max_queue = max_queue
        self._flush_interval_s = flush_interval_s
        self._flush_count = flush_count
        self._begin()
        self._thread = thread or BackgroundThread("rlplane-event-publisher", self._publish, self)
        call_after_fork(self)

    def _begin(self) -> None:
        self.pid = os.getpid()
        self._queue: deque[EventRecord] = deque()
        # A count that is exact between threads and safe in a signal handler: next() is one atomic step.
        self._drops = itertools.count()
        self._drop_reads = 0
        self._reading = threading.Lock()
        self._n_refused = 0
        self._seq = 0
        self._ended = False

    def after_fork(self) -> None:
        """Start from nothing in a forked child, under a name of its own."""
        self._begin()
        named = self._given_name is not None
        self.worker = f"{self.worker}/{self.pid}" if named else f"{self.host}:{self.pid}"

    def find(self) -> bool:
        """Whether it is known where the aggregator is; asks, if it is not."""
        if callable(self.address):
            try:
                found = self.address()
            except Exception as error:
                logger.debug("the aggregator is not found yet: %r", error)
                found = None
            if found is not None:
                check_address(found, allow_remote=True)
                self.address = found
        return not callable(self.address)

    def record(self, event: EventRecord) -> None:
        """Queue an event. Never waits and never raises; a full queue drops it and counts it."""
        waiting = self._queue
        size = len(waiting)
        if size >= self._max_queue or self._ended:
            next(self._drops)
            return
        waiting.append(event)
        if self._thread.asleep or size + 1 == self._flush_count:
            self._thread.wake()

    @property
    def n_waiting(self) -> int:
        """Events that have not been packed for sending."""
        return len(self._queue)

    @property
    def n_dropped(self) -> int:
        """Events lost in this process: the queue was full, the service ended, or the event malformed."""
        # Reading takes a number too: subtract the numbers taken by reading.
        with self._reading:
            self._drop_reads += 1
            return next(self._drops) - (self._drop_reads - 1) + self._n_refused

    def close(self, timeout: float = 2.0) -> None:
        """Send what is queued, for at most ``timeout`` seconds, then release the socket. Idempotent."""
        if not self._thread.closing:
            self._thread.close(timeout)
        self._ended = True

    def _publish(self) -> Iterator[float | None]:
        """What a service with a thread of its own does there."""
        thread = self._thread
        with self.connect() as connection:
            while connection is not None:
                closing = thread.closing
                all_sent = connection.send_due(everything=closing)
                if closing and (all_sent or time.monotonic() >= thread.deadline):
                    connection.say_goodbye(thread.deadline)
                    return
                thread.asleep = not self._queue
                yield connection.rest_s()

    @contextlib.contextmanager
    def connect(self) -> Iterator[Connection | None]:
        """The connection, for use on this thread alone; None if it cannot be made, which is logged."""
        context: zmq.Context[Any] = zmq.Context()
        publisher: ZmqMessagePublisher[EventBatch] | None = None
        try:
            try:
                if callable(self.address):
                    raise PlaneConnectionError("nobody knows where the aggregator is")
                publisher = ZmqMessagePublisher(
                    EventRecordCodec(),
                    self.address,
                    pattern=Pattern.COLLECT,
                    sndhwm=64,
                    linger=0,
                    context=context,
                )
            except Exception:
                logger.warning(
                    "worker %s sends no metrics: cannot connect to %s",
                    self.worker,
                    "the aggregator" if callable(self.address) else without_secret(self.address),
                    exc_info=True,
                )
                self._ended = True
                yield None
            else:
                self._queue.appendleft(WorkerHello(time.time_ns(), self.role))
                yield Connection(self, publisher)
        finally:
            self._ended = True
            if publisher is not None:
                publisher.close()
            context.term()

    def _next_batch(self) -> EventBatch:
        ops: list[OpRecord] = []
        events: list[SingleEvent] = []
        waiting = self._queue
        for _ in range(min(len(waiting), self._flush_count)):
            event = waiting.popleft()
            if type(event) is OpRecord:
                ops.append(event)
            elif isinstance(event, SingleEvent):
                events.append(event)
            else:
                self._n_refused += 1  # What is no event is not one for the aggregator to stumble over.
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

    def _drop_unencodable(self, batch: EventBatch) -> None:
        """Leave in ``batch`` what can be encoded, and count the rest as dropped."""
        before = len(batch)
        batch.events = [event for event in batch.events if _is_encodable(event)]
        if not _is_encodable(batch.ops):
            batch.ops = None
        self._n_refused += before - len(batch)
        batch.n_dropped = self.n_dropped


class Connection:
    """The sending end of a service. One batch at a time is on its way to the socket."""

    def __init__(self, service: EventPublisherService, publisher: ZmqMessagePublisher[EventBatch]) -> None:
        self._service = service
        self._publisher = publisher
        self._unsent: EventBatch | None = None
        self._last_sent = 0.0

    def send_due(self, *, everything: bool = False) -> bool:
        """Send what is due, or ``everything``; whether nothing is left that the socket did not accept."""
        while True:
            if self._unsent is None:
                if not self._is_due(everything):
                    return True
                self._unsent = self._service._next_batch()
            if not self._send(self._unsent):
                return False
            self._unsent, self._last_sent = None, time.monotonic()

    @property
    def n_waiting(self) -> int:
        """Events that wait to be sent."""
        return self._service.n_waiting

    def rest_s(self) -> float:
        """How long there is nothing to do, if nothing more is recorded."""
        if self._unsent is not None or self.n_waiting:
            return self._service._flush_interval_s
        return max(0.0, self._last_sent + _HEARTBEAT_S - time.monotonic())

    def say_goodbye(self, deadline: float) -> None:
        """Send the last event, unless others had to be left behind; the socket has until ``deadline``."""
        service = self._service
        service._ended = True
        if self._unsent is None:
            service._queue.append(WorkerGoodbye(time.time_ns()))
            while service._queue and self._send(service._next_batch()):
                pass
        self._publisher.set_linger(max(0, int((deadline - time.monotonic()) * 1000)))

    def _is_due(self, everything: bool) -> bool:
        service = self._service
        waiting, since = len(service._queue), time.monotonic() - self._last_sent
        if waiting and (everything or since >= service._flush_interval_s):
            return True
        return waiting >= service._flush_count or since >= _HEARTBEAT_S

    def _send(self, batch: EventBatch) -> bool:
        try:
            return self._publisher.publish(batch)
        except Exception:
            # One event that msgpack cannot carry: keep the others.
            self._service._drop_unencodable(batch)
        try:
            return self._publisher.publish(batch)
        except Exception as error:
            logger.debug("a batch of %d events could not be sent: %r", len(batch), error)
            self._service._n_refused += len(batch)
            return True


def publisher_from_environment(worker: str | None = None, *, role: str = "") -> EventPublisherService | None:
    """Return a service for the aggregator that ``RLPLANE_METRICS_ADDRESS`` names, or None without one."""
    address = os.environ.get(METRICS_ADDRESS_VARIABLE, "")
    return EventPublisherService(address, worker, role=role) if address not in ("", OFF) else None


def _is_encodable(value: object) -> bool:
    try:
        msgspec.msgpack.encode(value)
    except Exception:
        return False
    return True
