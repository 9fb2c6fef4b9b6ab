"""The control service inside the process of its clients: a lock instead of a socket.

Requests and answers are encoded all the same. So a client's tags are copied, and what can be sent is the
same on every engine.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # without the enums of signal, which take ten times as long
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
from rlplane.service.long_answers import CopiedAnswer, is_long_answer
from rlplane.service.stall import LookAhead, look_ahead
from rlplane.service.unseen import Unseen
from rlplane.storage.places import StorageHost

Listener: TypeAlias = Callable[[int, bytes | CopiedAnswer | None], None]

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
            look = self.look_for(envelope)
            while look is not None and not self.look_on(look):
                time.sleep(_LET_OTHERS_S)
            self.handle(request, envelope)
            self.finish_work()
            while not answer.ready.is_set():
                left = self.next_deadline() - time.monotonic()
                answer.ready.wait(min(max(left, 0.0), threading.TIMEOUT_MAX))
                if not answer.ready.is_set():
                    self._call(self._service.expire)
            while answer.long is not None and not self.copy_some(answer.long):
                time.sleep(_LET_OTHERS_S)
        except BaseException:
            self.abandon(request.client, request.number)
            raise
        finally:
            with self._lock:
                del self._waiting[request]
        return wire.answer_decoder.decode(answer.body) if answer.long is None else answer.long.answer

    def abandon(self, client: int, number: int) -> None:
        """Undo what a request was given."""
        self._call(lambda: self._service.abandon(client, number))
        self.finish_work()

    def listen(self, client: int, listener: Listener) -> None:
        """From now on, ``listener(number, body)`` is called with the answers to what this client asks without
        waiting, in their order and in any thread; with one that is still to be copied, if it is long, and
        with None when the plane has ended."""
        with self._lock:
            self._listeners[client] = listener
            if self.closed:
                listener(0, None)

    # What takes long, of which whoever asks does a slice at a time. The lock is free between two.

    def look_for(self, envelope: wire.Envelope) -> LookAhead | None:
        """What has to be looked at before a request is handled."""
        with self._lock:
            return look_ahead(self._service.state, envelope.request)

    def look_on(self, look: LookAhead) -> bool:
        """Look at some more; True when the request can be handled."""
        with self._lock:
            return look()

    def handle(self, request: PendingRequest, envelope: wire.Envelope) -> None:
        """Handle a request, or begin to. Whoever waits for the answer gets it, or the client's listener."""
        self._call(lambda: self._service.handle(request, envelope))

    @property
    def has_work(self) -> bool:
        """Whether something was begun."""
        return self._service.has_work

    def go_on(self) -> None:
        """Do the next slice of what was begun, whoever began it."""
        self._call(self._do_a_slice)

    def finish_work(self) -> None:
        """Do all of it."""
        while self.has_work:
            self.go_on()
            time.sleep(_LET_OTHERS_S)

    def copy_some(self, answer: CopiedAnswer) -> bool:
        """Copy some more of a long answer; True when all of it is."""
        is_done = False

        def copy() -> None:
            nonlocal is_done
            is_done = answer.copy_some()

        self._call(copy)
        return is_done

    def _do_a_slice(self) -> None:
        if self._service.has_work:  # another thread may have done the last one
            self._service.go_on()

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
        self.finish_work()

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
        body = CopiedAnswer(answer) if is_long_answer(answer) else wire.encode(answer)
        if waiting is not None:
            waiting.give(body)
        elif request.client in self._listeners:
            self._listeners[request.client](request.number, body)


class _Uninterrupted:
    """Inside, Ctrl-C waits: it would leave the state half changed. A service in a process of its own has no
    such callers."""

    __slots__ = ("_came", "_handler")

    def __enter__(self) -> None:
        self._came: list[tuple[int, FrameType | None]] = []
        self._handler = None
        if threading.get_ident() == threading.main_thread().ident:  # others are never interrupted
            handler = _signal.getsignal(signal.SIGINT)
            if callable(handler):
                self._handler = handler
                _signal.signal(signal.SIGINT, lambda number, frame: self._came.append((number, frame)))

    def __exit__(self, *error: object) -> None:
        if self._handler is not None:
            _signal.signal(signal.SIGINT, self._handler)
            if self._came:
                self._handler(*self._came[0])


class _Answer:
    """The answer to one request, once it is there; a long one is copied by whoever waits for it."""

    __slots__ = ("body", "long", "ready")

    def __init__(self) -> None:
        self.ready = _Flag()
        self.body = b""
        self.long: CopiedAnswer | None = None

    def give(self, body: bytes | CopiedAnswer) -> None:
        if self.ready.is_set():
            return
        if isinstance(body, CopiedAnswer):
            self.long = body
        else:
            self.body = body
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
        self.unseen = Unseen()
        self.client = service.connect()
        self.closed = False

    def exchange(self, request: wire.Request, *, waits_s: float = 0.0) -> wire.Answer:
        """See :class:`~rlplane.service.connection.Connection`."""
        if self.closed:
            raise ClientClosedError("the client was closed")
        number = self.unseen.number = next(self._numbers)
        envelope = wire.envelope_decoder.decode(encoded(wire.Envelope(request)))
        # A channel of its own for every request: nothing is ever undone but by its own number.
        answer = self._service.exchange(PendingRequest(self.client, number, number), envelope)
        if isinstance(answer, wire.Failure):
            self._check_open("the client was closed while the call was waiting")
        elif isinstance(answer, wire.Located):
            self.unseen.leases.append(answer.lease)
        return answer

    def abandon(self, number: int) -> None:
        """See :class:`~rlplane.service.connection.Connection`."""
        if not self.closed and not self._service.closed:
            self._service.abandon(self.client, number)

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
    """Requests of an event loop to a :class:`LocalService`, any number of them at once. Of what takes long
    the loop does a slice in each of its turns.

    See :class:`~rlplane.service.async_connection.AsyncChannel`.
    """

    def __init__(self, service: LocalService, client: int, loop: asyncio.AbstractEventLoop) -> None:
        self._service, self._client, self._loop = service, client, loop
        self._thread, self._pid = threading.get_ident(), os.getpid()
        self._channel = -1 - client  # those of calls that block are above
        # Requests before which the service has to look at much.
        self._looking: deque[tuple[LookAhead, PendingRequest, wire.Envelope]] = deque()
        self._has_turn = False
        # Whoever completes a request adds its answer, in any thread; the loop takes them in the same order.
        self._arrived: deque[tuple[int, bytes | CopiedAnswer | None]] = deque()
        self._is_copying = False
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_at = float("inf")
        self._on_answer: Callable[[int, bytes | wire.Answer], None] = lambda number, body: None
        self._on_end: Callable[[], None] = lambda: None

    def start(
        self, on_answer: Callable[[int, bytes | wire.Answer], None], on_end: Callable[[], None]
    ) -> None:
        """See :class:`~rlplane.service.async_connection.AsyncChannel`."""
        self._on_answer, self._on_end = on_answer, on_end
        self._service.listen(self._client, self._add)

    def send(self, number: int, body: bytes) -> None:
        """See :class:`~rlplane.service.async_connection.AsyncChannel`."""
        if self._service.closed:
            self._add(0, None)
            return
        request = PendingRequest(self._client, number, self._channel)
        envelope = wire.envelope_decoder.decode(body)
        if isinstance(envelope.request, wire.Withdraw):
            # Of these none is answered any more, so none may be begun.
            ended = envelope.request.numbers
            self._looking = deque(item for item in self._looking if item[1].number not in ended)
        look = self._service.look_for(envelope)
        if look is not None and not self._service.look_on(look):
            self._looking.append((look, request, envelope))
            self._ask_for_turn()
        else:
            self._handle(request, envelope)

    def close(self) -> None:
        """See :class:`~rlplane.service.async_connection.AsyncChannel`."""
        self._on_end = lambda: None
        if self._alarm is not None:
            self._alarm.cancel()
        self._end()

    def forget(self) -> None:
        """See :class:`~rlplane.service.async_connection.AsyncChannel`."""
        if self._pid == os.getpid() and not self._service.closed:
            self._service.hang_up(self._channel)
            self._end()

    def _end(self) -> None:
        """The loop has no more turns for us, and what was begun is done to its end."""
        self._looking.clear()
        if self._pid == os.getpid() and not self._service.closed:
            self._service.finish_work()

    def _handle(self, request: PendingRequest, envelope: wire.Envelope) -> None:
        self._service.handle(request, envelope)
        self._set_alarm(self._service.next_deadline())
        if self._service.has_work:
            self._ask_for_turn()

    def _ask_for_turn(self) -> None:
        if not self._has_turn:
            self._has_turn = True
            self._loop.call_soon(self._take_turn)

    def _take_turn(self) -> None:
        self._has_turn = False
        if self._service.closed:
            return
        if self._looking:
            look, request, envelope = self._looking.popleft()
            if self._service.look_on(look):
                self._handle(request, envelope)
            else:
                self._looking.append((look, request, envelope))
        if self._service.has_work:
            self._service.go_on()
        if self._looking or self._service.has_work:
            self._ask_for_turn()

    def _add(self, number: int, body: bytes | CopiedAnswer | None) -> None:
        self._arrived.append((number, body))
        with contextlib.suppress(RuntimeError):  # the loop has ended
            if threading.get_ident() == self._thread:
                self._loop.call_soon(self._hand_over)
            elif len(self._arrived) == 1:
                # Other threads come here one at a time: if there was something before, the loop knows.
                self._loop.call_soon_threadsafe(self._hand_over)

    def _hand_over(self) -> None:
        while self._arrived and not self._is_copying:
            number, body = self._arrived[0]
            if isinstance(body, CopiedAnswer):
                self._is_copying = True  # and what has come after it waits
                self._copy_on(number, body)
                return
            self._arrived.popleft()
            if body is None:
                self._on_end()
            else:
                self._on_answer(number, body)

    def _copy_on(self, number: int, answer: CopiedAnswer) -> None:
        if not self._service.copy_some(answer):
            self._loop.call_soon(self._copy_on, number, answer)
            return
        self._is_copying = False
        self._arrived.popleft()
        self._on_answer(number, answer.answer)
        self._hand_over()

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
