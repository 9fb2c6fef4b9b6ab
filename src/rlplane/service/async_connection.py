"""A client's connection to the control service on an event loop: any number of requests wait at once.

All of them go over one channel, and an answer is known by its number. It belongs to a client that has a
connection of its own, which keeps the lifeline and takes leases back.

Cancelling a call must leave nothing behind. The request is withdrawn: if it still waits, the service forgets
it. If it was answered meanwhile, the answer is on its way here, where nobody waits for it any more, and what
it grants is given back when it arrives. A channel keeps its order, so each grant is undone exactly once,
however close to each other the answer and the cancellation come.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
import weakref
from collections.abc import Callable
from typing import Protocol

from rlplane.errors import ClientClosedError, DataPlaneError, PlaneConnectionError
from rlplane.service import protocol as wire
from rlplane.service.connection import encoded
from rlplane.service.framing import LONGEST, Inbox, message
from rlplane.service.parts import in_parts

_PIECE = 256 * 1024
_PIECES_AT_ONCE = 8  # read before others get their turn on the loop
_LONGEST_TIMER_S = 86_400.0


class AsyncChannel(Protocol):
    """What carries the requests of one event loop to the service, and the answers back."""

    def start(
        self, on_answer: Callable[[int, bytes | wire.Answer], None], on_end: Callable[[], None]
    ) -> None:
        """Call ``on_answer(number, body)`` on the loop with every answer, decoded already or not, in the
        order in which the service gave them, and ``on_end`` when the service has gone."""

    def send(self, number: int, body: bytes) -> None:
        """Send a request. Never waits and never raises: a service that is gone is told by ``on_end``."""

    def close(self) -> None:
        """Let go of the channel."""

    def forget(self) -> None:
        """Let go of it without touching the loop, which has ended or is another process's."""


class Owner(Protocol):
    """The connection of the client that a channel belongs to."""

    closed: bool
    life: int
    """How often the service has come back."""

    def next_number(self) -> int:
        """A number that no other request of the client has."""

    def take_read(self) -> list[int]:
        """Requests whose answers the service may forget."""

    def note_read(self, number: int) -> None:
        """The answer to a request has been read."""

    def has_lease(self, answer: wire.Answer, life: int) -> bool:
        """Note the lease that comes with an answer; False if it comes from an earlier life."""

    def release(self, lease: int) -> None:
        """Give a lease back."""

    def gone(self) -> DataPlaneError:
        """What a call ends with when the service has gone."""


class AsyncConnection:
    """Requests and answers on the running event loop.

    Args:
        owner: The client's connection.
        channel: What carries them.
        ack_timeout_s: How long the service may take for an answer that waits for nobody.
        reopen: Opens a new channel when the service has gone and come back. It blocks until then, and is
            called in a thread. None: a service that is gone does not come back.
    """

    def __init__(
        self,
        owner: Owner,
        channel: AsyncChannel,
        ack_timeout_s: float,
        reopen: Callable[[], AsyncChannel] | None = None,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.ended: DataPlaneError | None = None
        self._is_service_gone = False
        self._life = owner.life
        self._owner, self._channel, self._ack_timeout_s = owner, channel, ack_timeout_s
        self._reopen, self._is_reopening = reopen, False
        # Every request is kept as it was sent until it is answered: a service that comes back gets it again.
        self._sent: dict[int, bytes] = {}
        self._waiting: dict[int, tuple[wire.Request, asyncio.Future[wire.Answer]]] = {}
        # Requests whose callers were cancelled, until the service has said that it knows.
        self._withdrawn: dict[int, wire.Request] = {}
        self._to_withdraw: list[int] = []
        # What was sent to give something back and is not answered yet, with the requests that it withdraws.
        self._undoing: dict[int, list[int]] = {}
        self._settled: asyncio.Future[None] | None = None
        channel.start(self._answered, self._lost)

    async def exchange(self, request: wire.Request, *, waits_s: float = 0.0) -> wire.Answer:
        """Send a request and return its answer, a failure among them. Cancelled, it leaves nothing behind."""
        if self.ended is not None:
            raise self._copy_of_end()
        number = self._owner.next_number()
        body = self._encoded(request)
        future: asyncio.Future[wire.Answer] = self.loop.create_future()
        self._waiting[number] = request, future
        self._send(number, body)
        patience = waits_s + self._ack_timeout_s
        timer = self.loop.call_later(min(patience, _LONGEST_TIMER_S), self._silent, number, patience)
        try:
            return await future
        except BaseException:
            if self._waiting.pop(number, None) is not None:
                self._withdraw(number, request)
            elif future.done() and not future.cancelled() and future.exception() is None:
                # The answer was there, and the cancellation came before the caller had its turn.
                self._undo(request, future.result())
            raise
        finally:
            timer.cancel()

    def post(self, request: wire.Request) -> None:
        """Send a request that gives something back. Nobody waits for its answer but :meth:`close`."""
        self._send_undo(request, [])

    async def close(self) -> None:
        """End the calls that wait with an error, and come back when nothing of them is left with the
        service."""
        if self.ended is None:
            self.ended = ClientClosedError("the client was closed while the call was waiting")
            waiting, self._waiting = self._waiting, {}
            for number, (request, future) in waiting.items():
                self._withdraw(number, request)
                if not future.done():
                    future.set_exception(self._copy_of_end())
            if (self._withdrawn or self._undoing) and not self._is_reopening:
                self._settled = self.loop.create_future()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._settled, self._ack_timeout_s)
        self._channel.close()

    def drop(self) -> None:
        """Let go of the channel at once; for the thread of the loop, or when the loop does not run."""
        self.ended = ClientClosedError("the client was closed")
        self._channel.close()

    def forget(self) -> None:
        """The loop has ended, or this is a forked child: let go of the channel. The service then forgets
        what still waits behind it."""
        self.ended = ClientClosedError("the event loop of this connection has ended")
        self._channel.forget()

    def _answered(self, number: int, body: bytes | wire.Answer) -> None:
        if self._sent.pop(number, None) is not None:
            self._owner.note_read(number)
        waiting = self._waiting.pop(number, None)
        if waiting is not None:
            request, future = waiting
            answer = _decoded(body)
            is_held = self._owner.has_lease(answer, self._life)
            if future.done():  # cancelled, and its caller has not had its turn yet
                self._undo(request, answer)
            elif not is_held:
                # The service has come back meanwhile and does not know of the lease: ask it again.
                self._life = self._owner.life
                self._waiting[number] = waiting
                self._send(number, self._encoded(request))
            else:
                future.set_result(answer)
        elif number in self._withdrawn:
            self._undo(self._withdrawn.pop(number), _decoded(body))
        elif number in self._undoing:
            for withdrawn in self._undoing.pop(number):
                # It was not answered before this, so it never will be.
                self._withdrawn.pop(withdrawn, None)
                self._sent.pop(withdrawn, None)
            self._see_if_settled()
        elif number == 0:  # the channel's introduction was refused
            if self._life == self._owner.life:
                self._channel.close()
                self._give_up(self._owner.gone())
            else:
                self._lost()

    def _lost(self) -> None:
        self._channel.close()
        if self._reopen is not None and self.ended is None:
            if not self._is_reopening:
                self._is_reopening = True
                # Not one of the loop's threads: they may all be waiting for what this client brings.
                threading.Thread(
                    target=self._open_again, args=(self._reopen,), name="rlplane-reopen", daemon=True
                ).start()
            return
        self._give_up(self._owner.gone())

    def _open_again(self, reopen: Callable[[], AsyncChannel]) -> None:
        """In a thread, because it waits."""
        opened: AsyncChannel | Exception
        try:
            opened = reopen()
        except Exception as error:
            opened = error
        try:
            self.loop.call_soon_threadsafe(self._reopened, opened)
        except RuntimeError:  # the loop has ended
            if not isinstance(opened, Exception):
                opened.forget()

    def _reopened(self, opened: AsyncChannel | Exception) -> None:
        self._is_reopening = False
        if isinstance(opened, Exception):
            self._give_up(opened if isinstance(opened, DataPlaneError) else self._owner.gone())
            return
        self._channel = opened
        if self.ended is not None:
            self._channel.close()
            return
        self._life = self._owner.life
        self._channel.start(self._answered, self._lost)
        # What was done is answered as the first time, and what waited waits on.
        for number, body in self._sent.items():
            self._channel.send(number, body)

    def _give_up(self, error: DataPlaneError) -> None:
        self._is_service_gone = True
        if self.ended is None:
            self.ended = error
        self._sent.clear()
        waiting, self._waiting = self._waiting, {}
        for _, future in waiting.values():
            if not future.done():
                future.set_exception(self._copy_of_end())
        self._withdrawn.clear()
        self._undoing.clear()
        self._see_if_settled()

    def _silent(self, number: int, patience: float) -> None:
        waiting = self._waiting.pop(number, None)
        if waiting is None:
            return
        request, future = waiting
        self._withdraw(number, request)
        if not future.done():
            future.set_exception(
                PlaneConnectionError(f"the control service has not answered for {patience:.1f} s")
            )

    def _withdraw(self, number: int, request: wire.Request) -> None:
        self._withdrawn[number] = request
        self._to_withdraw.append(number)
        if len(self._to_withdraw) == 1:
            # All that are cancelled in one turn of the loop go together: it may be thousands.
            try:
                self.loop.call_soon(self._send_withdrawn)
            except RuntimeError:  # the loop has ended
                self._send_withdrawn()

    def _send_withdrawn(self) -> None:
        numbers, self._to_withdraw = self._to_withdraw, []
        if numbers:
            self._send_undo(wire.Withdraw(numbers), numbers)

    def _undo(self, request: wire.Request, answer: wire.Answer) -> None:
        """Give back what a request was given whose caller has gone. What it has written stays."""
        match answer:
            case wire.Claimed(ids) if ids and isinstance(request, wire.ClaimRequest):
                for part in reversed(in_parts(ids)):  # each goes to the front of the queue
                    self.post(wire.Unclaim(request.partition_id, request.task, part))
            case wire.Reserved(place):
                self.post(wire.Unreserve(place.number))
            case wire.Located(lease) | wire.Frozen(lease):
                self._owner.release(lease)
            case wire.Done(_, spare) if spare is not None:
                self.post(wire.Unreserve(spare.number))
            case _:
                pass

    def _send_undo(self, request: wire.Request, withdrawn: list[int]) -> None:
        if self._is_service_gone:
            return  # and everything with it
        number = self._owner.next_number()
        self._undoing[number] = withdrawn
        self._send(number, self._encoded(request))

    def _encoded(self, request: wire.Request) -> bytes:
        read = self._owner.take_read() if type(request) in wire.CHANGES else []
        return encoded(wire.Envelope(request, read=read))

    def _send(self, number: int, body: bytes) -> None:
        if self._to_withdraw:
            # Before anything that comes after the cancellation: that may make room for a withdrawn put.
            self._send_withdrawn()
        self._sent[number] = body
        if not self._is_reopening:
            self._channel.send(number, body)

    def _see_if_settled(self) -> None:
        if self._settled is not None and not self._settled.done() and not (self._withdrawn or self._undoing):
            self._settled.set_result(None)

    def _copy_of_end(self) -> DataPlaneError:
        """One for each caller: an error keeps the frames that it went through."""
        assert self.ended is not None
        return type(self.ended)(self.ended.message)


def _decoded(body: bytes | wire.Answer) -> wire.Answer:
    return wire.answer_decoder.decode(body) if isinstance(body, bytes) else body


class SocketChannel:
    """A connected and introduced socket on an event loop. See :class:`AsyncChannel`."""

    def __init__(self, connected: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
        connected.setblocking(False)
        self._socket, self._loop = connected, loop
        self._inbox = Inbox(LONGEST)
        self._piece = memoryview(bytearray(_PIECE))
        self._unsent = bytearray()
        self._open = True
        self._on_answer: Callable[[int, bytes | wire.Answer], None] = lambda number, body: None
        self._on_end: Callable[[], None] = lambda: None
        _channels.add(self)

    def start(
        self, on_answer: Callable[[int, bytes | wire.Answer], None], on_end: Callable[[], None]
    ) -> None:
        """See :class:`AsyncChannel`."""
        self._on_answer, self._on_end = on_answer, on_end
        self._loop.add_reader(self._socket.fileno(), self._read)

    def send(self, number: int, body: bytes) -> None:
        """See :class:`AsyncChannel`."""
        if not self._open:
            return
        data = message(number, body)
        if self._unsent:
            self._unsent += data
            return
        sent = self._send_some(data)
        if sent < len(data):
            self._unsent += data[sent:]
            self._loop.add_writer(self._socket.fileno(), self._write)

    def close(self) -> None:
        """See :class:`AsyncChannel`."""
        if self._open and not self._loop.is_closed():
            self._loop.remove_reader(self._socket.fileno())
            self._loop.remove_writer(self._socket.fileno())
        self.forget()

    def forget(self) -> None:
        """See :class:`AsyncChannel`."""
        self._open = False
        self._socket.close()

    def _read(self) -> None:
        for _ in range(_PIECES_AT_ONCE):
            if not self._open:
                return
            try:
                size = self._socket.recv_into(self._piece)
            except BlockingIOError:
                return
            except OSError:
                size = 0
            if not size:
                self._on_end()
                return
            for number, body in self._inbox.messages(self._piece[:size]):
                self._on_answer(number, bytes(body))
            if size < _PIECE:
                return

    def _write(self) -> None:
        del self._unsent[: self._send_some(self._unsent)]
        if not self._unsent and self._open:
            self._loop.remove_writer(self._socket.fileno())

    def _send_some(self, data: bytes | bytearray) -> int:
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0
        except OSError:
            return len(data)  # the service has gone, which is noticed when the socket is read


_channels: weakref.WeakSet[SocketChannel] = weakref.WeakSet()


def _forget_all() -> None:
    for channel in list(_channels):
        channel.forget()


# The loop is the parent's, and so is what it waits for: only the child's copy of the socket is closed.
os.register_at_fork(after_in_child=_forget_all)
