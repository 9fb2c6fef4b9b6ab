"""The control service inside the process of its clients: a lock instead of a socket.

Requests and answers are encoded all the same. So a client's tags are copied, and what can be sent is the
same on every engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from types import FrameType
from typing import TypeAlias

from rlplane.errors import ClientClosedError, DataPlaneError, PlaneConnectionError
from rlplane.service import protocol as wire
from rlplane.service.clients import PendingRequest
from rlplane.service.connection import encoded
from rlplane.service.core import ControlService
from rlplane.service.long_answers import LongAnswer, is_long_answer
from rlplane.service.stall import look_ahead
from rlplane.storage.places import StorageHost

Listener: TypeAlias = Callable[[int, bytes | None], None]

_LOOK_S = 0.1
_LONGEST_ALARM_S = 3600.0
# Between two slices of something long: whoever waits for the lock gets it, and not the thread that had it.
_LET_OTHERS_S = 1e-4


class LocalService:
    """A control service that the threads of one process share."""

    def __init__(self, capacity: int, storage: StorageHost, *, reserve_for_live: float = 0.0) -> None:
        self._lock = threading.RLock()
        self._service = ControlService(capacity, storage, self._deliver, reserve_for_live=reserve_for_live)
        self._storage = storage
        self._waiting: dict[PendingRequest, _Answer] = {}
        self._listeners: dict[int, Listener] = {}
        self._clients = itertools.count()
        self._released: list[tuple[int, int]] = []
        self._caller: int | None = None
        self.closed = False

    def connect(self) -> int:
        """A new client's number."""
        with self._lock:
            client = next(self._clients)
            self._service.connect(client)
            return client

    def exchange(self, request: PendingRequest, envelope: wire.Envelope) -> wire.Answer:
        """Handle a request and wait for its answer; an interrupt undoes what it was given."""
        answer = _Answer()
        with self._lock:
            if self.closed:
                raise PlaneConnectionError("the plane was closed by its bootstrap client")
            self._waiting[request] = answer
        try:
            self._look_ahead(envelope)
            self._call(lambda: self._service.handle(request, envelope))
            self._go_on()
            while not answer.ready.is_set():
                left = self.next_deadline() - time.monotonic()
                answer.ready.wait(min(max(left, 0.0), threading.TIMEOUT_MAX))
                if not answer.ready.is_set():
                    self._call(self._service.expire)
            body = answer.body if answer.long is None else self._encode(answer.long)
        except BaseException:
            self._call(lambda: self._service.abandon(request.client, request.number))
            self._go_on()
            raise
        finally:
            with self._lock:
                del self._waiting[request]
        return wire.answer_decoder.decode(body)

    def listen(self, client: int, listener: Listener) -> None:
        """From now on, ``listener(number, body)`` is called with the answers to what this client posts, in
        their order and in any thread; with None for the body when the plane has ended."""
        with self._lock:
            self._listeners[client] = listener
            if self.closed:
                listener(0, None)

    def post(self, request: PendingRequest, envelope: wire.Envelope) -> None:
        """Handle a request whose answer goes to the client's listener."""
        self._look_ahead(envelope)
        self._call(lambda: self._service.handle(request, envelope))
        self._go_on()

    def hang_up(self, channel: int) -> None:
        """Nobody reads the answers of this channel any more."""
        self._call(lambda: self._service.hang_up(channel))

    def expire(self) -> float:
        """Answer what has waited for too long, and say when the next one will have."""
        self._call(self._service.expire)
        return self.next_deadline()

    def next_deadline(self) -> float:
        """When to look for what has waited for too long, by ``time.monotonic``."""
        due = self._service.next_deadline()
        if self._service.state.has_clocks or self._service.is_short_of_room:
            # A request of another thread can bring it nearer.
            due = min(due, time.monotonic() + _LOOK_S)
        return due

    def release(self, client: int, lease: int) -> None:
        """Give a lease back; a finalizer that runs in the middle of a request leaves it to that request."""
        self._released.append((client, lease))
        if self._caller != threading.get_ident():
            self._call(lambda: None)

    def disconnect(self, client: int) -> None:
        """A client closes."""
        self._listeners.pop(client, None)
        self._call(lambda: self._service.disconnect(client, died=False))

    def close(self) -> None:
        """The plane ends; whoever waits is told."""
        with self._lock:
            self.closed = True
            for answer in self._waiting.values():
                gone = PlaneConnectionError("the plane was closed by its bootstrap client")
                answer.give(wire.encode(wire.failure_of(gone)))
            for listener in self._listeners.values():
                listener(0, None)
            self._storage.close()

    def _look_ahead(self, envelope: wire.Envelope) -> None:
        with self._lock:
            look = look_ahead(self._service.state, envelope.request)
        while look is not None:
            with self._lock:  # it is free between two looks
                if look():
                    return
            time.sleep(_LET_OTHERS_S)

    def _go_on(self) -> None:
        """Do what was begun, whoever began it."""
        while self._service.has_work:
            self._call(self._do_a_slice)
            time.sleep(_LET_OTHERS_S)

    def _encode(self, answer: LongAnswer) -> memoryview:
        """An answer of very many samples, encoded in slices."""
        is_done = False

        def encode_some() -> None:
            nonlocal is_done
            is_done = answer.encode_some()

        while not is_done:
            self._call(encode_some)
            time.sleep(_LET_OTHERS_S)
        return answer.body()

    def _do_a_slice(self) -> None:
        if self._service.has_work:  # another thread may have done the last one
            self._service.go_on()

    def _call(self, function: Callable[[], None]) -> None:
        with self._lock, _Uninterrupted():
            started = time.monotonic()
            self._service.now, self._service.wall = started, time.time()
            self._caller = threading.get_ident()
            try:
                function()
                while self._released:
                    self._service.release(*self._released.pop())
            finally:
                self._caller = None
                now = time.monotonic()
                self._service.stall.record(now - started, now)

    def _deliver(self, request: PendingRequest, answer: wire.Answer) -> None:
        waiting = self._waiting.get(request)
        if waiting is not None and is_long_answer(answer):
            waiting.give_long(LongAnswer(request.number, answer))
        elif waiting is not None:
            waiting.give(wire.encode(answer))
        elif request.client in self._listeners:
            self._listeners[request.client](request.number, wire.encode(answer))


class _Uninterrupted:
    """Inside, Ctrl-C waits: it would leave the state half changed. A service in a process of its own has no
    such callers."""

    __slots__ = ("_came", "_handler")

    def __enter__(self) -> None:
        self._came: list[tuple[int, FrameType | None]] = []
        self._handler = None
        if threading.get_ident() == threading.main_thread().ident:  # others are never interrupted
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler):
                self._handler = handler
                signal.signal(signal.SIGINT, lambda number, frame: self._came.append((number, frame)))

    def __exit__(self, *error: object) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
            if self._came:
                self._handler(*self._came[0])


class _Answer:
    """The answer to one request, once it is there; a long one is encoded by whoever waits for it."""

    __slots__ = ("body", "long", "ready")

    def __init__(self) -> None:
        self.ready = _Flag()
        self.body = b""
        self.long: LongAnswer | None = None

    def give(self, body: bytes) -> None:
        if not self.ready.is_set():
            self.body = body
            self.ready.set()

    def give_long(self, answer: LongAnswer) -> None:
        if not self.ready.is_set():
            self.long = answer
            self.ready.set()


class _Flag:
    """An ``Event`` that one thread waits for, and that is set once. Of a real one an interrupt while it is
    waited for can keep the lock, and whoever sets it hangs."""

    def __init__(self) -> None:
        self._is_set = False
        self._unset = threading.Lock()
        self._unset.acquire()

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        self._unset.release()

    def wait(self, timeout: float) -> bool:
        return self._is_set or self._unset.acquire(timeout=timeout)


class InProcessConnection:
    """A client's connection to a :class:`LocalService`."""

    def __init__(self, service: LocalService) -> None:
        self._service = service
        self._numbers = itertools.count(1)
        self.life = 0
        self.client = service.connect()
        self.closed = False

    def exchange(self, request: wire.Request, *, waits_s: float = 0.0) -> wire.Answer:
        """See :class:`~rlplane.service.connection.Connection`."""
        if self.closed:
            raise ClientClosedError("the client was closed")
        number = next(self._numbers)
        envelope = wire.envelope_decoder.decode(encoded(wire.Envelope(request)))
        # A channel of its own for every request: nothing is ever undone but by its own number.
        answer = self._service.exchange(PendingRequest(self.client, number, number), envelope)
        if isinstance(answer, wire.Failure):
            self._check_open("the client was closed while the call was waiting")
        return answer

    def next_number(self) -> int:
        """A number for a request that goes over an :class:`InProcessChannel`."""
        return next(self._numbers)

    def open_channel(self, loop: asyncio.AbstractEventLoop) -> InProcessChannel:
        """See :class:`~rlplane.service.async_connection.AsyncChannel`."""
        self._check_open("the client was closed")
        return InProcessChannel(self._service, self.client, loop)

    def gone(self) -> DataPlaneError:
        """What a call ends with when the plane has ended."""
        if self.closed:
            return ClientClosedError("the client was closed while the call was waiting")
        return PlaneConnectionError("the plane was closed by its bootstrap client")

    def take_read(self) -> list[int]:
        """See :class:`~rlplane.service.async_connection.Owner`."""
        return []

    def note_read(self, number: int) -> None:
        """See :class:`~rlplane.service.async_connection.Owner`: this service never starts again."""

    def hold(self, lease: int, places: Iterable[int], life: int) -> bool:
        """See :class:`~rlplane.service.connection.Connection`: this service never starts again."""
        return True

    def has_lease(self, answer: wire.Answer, life: int) -> bool:
        """See :class:`~rlplane.service.async_connection.Owner`."""
        return True

    def release(self, lease: int) -> None:
        """See :class:`~rlplane.service.connection.Connection`."""
        if not self.closed and not self._service.closed:
            self._service.release(self.client, lease)

    def close(self) -> None:
        """See :class:`~rlplane.service.connection.Connection`."""
        if not self.closed:
            self.closed = True
            if not self._service.closed:
                self._service.disconnect(self.client)

    def _check_open(self, otherwise: str) -> None:
        if self.closed:
            raise ClientClosedError(otherwise)


class InProcessChannel:
    """Requests of an event loop to a :class:`LocalService`, any number of them at once.

    See :class:`~rlplane.service.async_connection.AsyncChannel`.
    """

    def __init__(self, service: LocalService, client: int, loop: asyncio.AbstractEventLoop) -> None:
        self._service, self._client, self._loop = service, client, loop
        self._thread, self._pid = threading.get_ident(), os.getpid()
        self._channel = -1 - client  # those of calls that block are above
        # Whoever completes a request adds its answer, in any thread; the loop takes them in the same order.
        self._arrived: deque[tuple[int, bytes | None]] = deque()
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_at = float("inf")
        self._on_answer: Callable[[int, bytes], None] = lambda number, body: None
        self._on_end: Callable[[], None] = lambda: None

    def start(self, on_answer: Callable[[int, bytes], None], on_end: Callable[[], None]) -> None:
        """See :class:`~rlplane.service.async_connection.AsyncChannel`."""
        self._on_answer, self._on_end = on_answer, on_end
        self._service.listen(self._client, self._add)

    def send(self, number: int, body: bytes) -> None:
        """See :class:`~rlplane.service.async_connection.AsyncChannel`."""
        if self._service.closed:
            self._add(0, None)
            return
        self._service.post(
            PendingRequest(self._client, number, self._channel), wire.envelope_decoder.decode(body)
        )
        self._set_alarm(self._service.next_deadline())

    def close(self) -> None:
        """See :class:`~rlplane.service.async_connection.AsyncChannel`."""
        self._on_end = lambda: None
        if self._alarm is not None:
            self._alarm.cancel()

    def forget(self) -> None:
        """See :class:`~rlplane.service.async_connection.AsyncChannel`."""
        if self._pid == os.getpid() and not self._service.closed:
            self._service.hang_up(self._channel)

    def _add(self, number: int, body: bytes | None) -> None:
        self._arrived.append((number, body))
        with contextlib.suppress(RuntimeError):  # the loop has ended
            if threading.get_ident() == self._thread:
                self._loop.call_soon(self._hand_over)
            elif len(self._arrived) == 1:
                # Other threads come here one at a time: if there was something before, the loop knows.
                self._loop.call_soon_threadsafe(self._hand_over)

    def _hand_over(self) -> None:
        while self._arrived:
            number, body = self._arrived.popleft()
            if body is None:
                self._on_end()
            else:
                self._on_answer(number, body)

    def _set_alarm(self, due: float) -> None:
        """Requests of other clients are answered in time by whoever waits for them; ours by the loop."""
        if due >= self._alarm_at:
            return
        if self._alarm is not None:
            self._alarm.cancel()
        wait = min(max(due - time.monotonic(), 0.0), _LONGEST_ALARM_S)
        self._alarm_at, self._alarm = due, self._loop.call_later(wait, self._expire)

    def _expire(self) -> None:
        self._alarm_at, self._alarm = float("inf"), None
        if not self._service.closed:
            self._set_alarm(self._service.expire())
