"""A client's connection to the control service: a channel per thread, and a lifeline.

Each thread that calls has a channel of its own, so a claim that waits in one thread holds up no other. The
kernel closes the sockets of a process that dies, so each side notices the other's death at once. The same
class speaks over a Unix socket and over TCP.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import NoReturn, Protocol

import msgspec

from rlplane.errors import ClientClosedError, DataPlaneError, InvalidRequestError, PlaneConnectionError
from rlplane.service import protocol as wire
from rlplane.service.framing import LONGEST, Inbox, message
from rlplane.service.lifeline import Lifeline
from rlplane.service.sockets import MAX_MESSAGE, connect
from rlplane.service.unseen import Unseen

__all__ = ["Connection", "RefusedError", "SocketConnection", "encoded"]

_ANSWER_TIMEOUT_S = 10.0
_LONGEST_WAIT_S = 3600.0  # of one poll: a socket takes no timeout of years
_PIECE = 256 * 1024
_RETRY_S = 0.02
_CLOSE_S = 5.0
_ABANDONED_REMEMBERED = 256


class Connection(Protocol):
    """What a client needs of its connection, whether it goes over a socket or stays in the process."""

    client: int
    closed: bool
    life: int  # counts how often a service was told of the leases anew
    unseen: Unseen

    def exchange(self, request: wire.Request, *, waits_s: float = 0.0) -> wire.Answer:
        """Send a request and return its answer, a failure among them.

        ``waits_s`` is how long the service may take because it waits for somebody else. If the caller is
        interrupted, the service is told to undo what the request was given.
        """

    def hold(self, lease: int, places: Iterable[int], life: int) -> bool:
        """Note the places of a lease; False, and it is given back, if the service, which had come back
        ``life`` times when the lease was asked for, may not know of it any more."""

    def release(self, lease: int) -> None:
        """Give a lease back. Called by finalizers, from any thread: it does not block."""

    def abandon(self, number: int) -> None:
        """Whoever made this request does not want what it was given."""

    def close(self) -> None:
        """Say goodbye and close; a call that waits in another thread ends with an error."""


class SocketConnection:
    """Requests and answers between this process and the control service at ``address``.

    Args:
        address: ``unix:///path`` or ``tcp://host:port``.
        token: What proves over TCP that this process belongs to the plane.
        bootstrap: Whether the plane ends when this client dies.
        ack_timeout_s: How long the service may take for an answer that waits for nobody.
        reconnect_timeout_s: How long to look for a service that has gone away; 0 to give up at once.
        find_again: Gives the address and the token of the service after it has gone away: a service that was
            started again may have others. Raises ``OSError`` while there is none.
        on_end: Called when the service is gone for good, for example to remove what it left behind.
    """

    client: int
    _secret: str

    def __init__(
        self,
        address: str,
        *,
        token: str = "",
        bootstrap: bool = False,
        ack_timeout_s: float,
        reconnect_timeout_s: float = 0.0,
        find_again: Callable[[], tuple[str, str]] | None = None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self.address = address
        self.closed = False
        self._token, self._ack_timeout_s, self._on_end = token, ack_timeout_s, on_end
        self._reconnect_timeout_s, self._find_again = reconnect_timeout_s, find_again
        self._bootstrap = bootstrap
        self.life = 0
        self._reconnecting = threading.Lock()
        self._read: deque[int] = deque()  # requests whose answers the service may forget
        self._leases: dict[int, list[int]] = {}
        self.unseen = Unseen()
        # A service that dies may not have heard of these; after its restart it is told again.
        self._abandoned: deque[int] = deque(maxlen=_ABANDONED_REMEMBERED)
        self._numbers = itertools.count(1)
        self._local = threading.local()
        self._channels: weakref.WeakSet[_Channel] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._lifeline = self._introduce()
        _connections.add(self)
        if self._reconnect_timeout_s:
            # A client that computes makes no requests, and would be taken for dead after a restart.
            watch = threading.Thread(
                target=_watch, args=(weakref.ref(self),), name="rlplane-watch", daemon=True
            )
            watch.start()

    def exchange(self, request: wire.Request, *, waits_s: float = 0.0) -> wire.Answer:
        """See :class:`Connection`. If the service goes away meanwhile and comes back, the request is repeated
        under its number: what was done once is not done twice."""
        number = self.unseen.number = next(self._numbers)
        try:
            while True:
                life = self.life
                try:
                    answer = self._attempt(number, request, waits_s)
                    if self.has_lease(answer, life):
                        if isinstance(answer, wire.Located):
                            self.unseen.leases.append(answer.lease)
                        if type(request) in wire.CHANGES:
                            self._read.append(number)
                        return answer
                except _ServiceGoneError as gone:
                    if gone.refusal and self.life == life and self._lifeline.is_alive():
                        raise PlaneConnectionError(gone.refusal) from gone
                    self._reconnect()
        except BaseException:
            # Ctrl-C, or a service that does not answer: what it grants later must not be lost unseen.
            self.abandon(number)
            raise

    def abandon(self, number: int) -> None:
        """See :class:`Connection`."""
        self._abandoned.append(number)
        self._tell(lambda lifeline: lifeline.abandon(number))

    def has_lease(self, answer: wire.Answer, life: int) -> bool:
        """Note the lease that comes with an answer, as :meth:`hold` does."""
        if isinstance(answer, wire.Located):
            return self.hold(answer.lease, [place.number for place in answer.places], life)
        if isinstance(answer, wire.Frozen):
            return self.hold(answer.lease, [], life)  # its places come in pieces
        return True

    def hold(self, lease: int, places: Iterable[int], life: int) -> bool:
        """See :class:`Connection`."""
        self._leases[lease] = list(places)
        if self.life == life:
            return True
        # A service that was started again has been told of the leases meanwhile, perhaps without this one.
        self.release(lease)
        return False

    def _attempt(self, number: int, request: wire.Request, waits_s: float) -> wire.Answer:
        channel = self._channel()
        released, abandoned = self._lifeline.unsent()
        read = self.take_read() if type(request) in wire.CHANGES else []
        try:
            body = encoded(wire.Envelope(request, released, abandoned, read))
            with channel.lock:
                if self.closed:
                    raise ClientClosedError("the client was closed")
                self._send(channel, message(number, body))
                return self._receive(channel, number, waits_s)
        except BaseException:
            channel.close()
            self._tell(lambda lifeline: lifeline.keep_unsent(released, abandoned))
            self._read.extend(read)
            raise

    def _reconnect(self) -> None:
        """Find the service again, or raise. One thread does it for all."""
        deadline = time.monotonic() + self._reconnect_timeout_s
        with self._reconnecting:
            if self.closed:
                raise ClientClosedError("the client was closed while the call was waiting")
            if self._lifeline.is_alive():
                return  # another thread has done it, or only a channel has ended
            if self._lifeline.said_farewell:
                self._reconnect_timeout_s = 0.0
            self._lifeline.stop_sending()
            while self._reconnect_timeout_s and not self.closed:
                try:
                    if self._find_again is not None:
                        self.address, self._token = self._find_again()
                    lifeline = self._introduce(resumes=True)
                except (PlaneConnectionError, OSError) as error:
                    if isinstance(error, RefusedError) or time.monotonic() > deadline:
                        self._reconnect_timeout_s = 0.0
                        break
                    time.sleep(_RETRY_S)
                    continue
                before, self._lifeline = self._lifeline, lifeline
                lifeline.take_over(before)
                before.close()
                return
        if self.closed:
            raise ClientClosedError("the client was closed while the call was waiting")
        self._on_end()
        raise PlaneConnectionError(f"the control service at {self.address} has ended or died")

    def next_number(self) -> int:
        """A number for a request that goes over a channel of somebody else's."""
        return next(self._numbers)

    def take_read(self) -> list[int]:
        """The requests whose answers the service may forget, to be sent along with one that changes
        something."""
        read: list[int] = []
        try:
            while self._read:
                read.append(self._read.popleft())
        except IndexError:
            pass  # another thread has taken it
        return read

    def note_read(self, number: int) -> None:
        """The answer to a request of :meth:`next_number` has been read."""
        self._read.append(number)

    def open_channel(self) -> socket.socket:
        """One more channel, introduced as this client's, for :class:`AsyncConnection`.

        Waits for a service that has gone away to come back. It must know of the client again, or it refuses
        the channel.
        """
        if self.closed:
            raise ClientClosedError("the client was closed")
        deadline = time.monotonic() + self._reconnect_timeout_s
        while True:
            self._reconnect()
            try:
                channel = connect(self.address)
                try:
                    channel.sendall(self._hello())
                except BaseException:
                    channel.close()
                    raise
                return channel
            except OSError as error:
                if time.monotonic() > deadline:
                    raise self.gone() from error
                time.sleep(_RETRY_S)  # it has gone again meanwhile

    def gone(self) -> DataPlaneError:
        """What a call ends with when the service has hung up."""
        if self.closed:
            return ClientClosedError("the client was closed while the call was waiting")
        return PlaneConnectionError(f"the control service at {self.address} has ended or died")

    def release(self, lease: int) -> None:
        """See :class:`Connection`."""
        self._leases.pop(lease, None)
        self._tell(lambda lifeline: lifeline.release(lease))

    def _tell(self, notify: Callable[[Lifeline], None]) -> None:
        lifeline = self._lifeline
        notify(lifeline)
        if lifeline is not self._lifeline:
            self._lifeline.take_over(lifeline)  # another thread has reconnected meanwhile

    def close(self) -> None:
        """See :class:`Connection`."""
        self._wait_for_service()
        with self._lock:
            if self.closed:
                return
            self.closed = True
            channels = list(self._channels)
        busy = []
        for channel in channels:
            if channel.lock.acquire(blocking=False):
                channel.close()
                channel.lock.release()
            else:
                channel.interrupt()
                busy.append(channel)
        for channel in busy:
            # It says that it abandons its request, and goodbye has to come after that.
            if channel.lock.acquire(timeout=1.0):
                channel.lock.release()
        self._lifeline.say_goodbye()

    def _wait_for_service(self) -> None:
        """A service that is being started again would wait for this client, as it does not know that it has
        closed. The thread that watches brings it back."""
        deadline = time.monotonic() + _CLOSE_S
        while (
            self._reconnect_timeout_s
            and not self.closed
            and not self._lifeline.is_alive()
            and time.monotonic() < deadline
        ):
            time.sleep(_RETRY_S)

    def forget(self) -> None:
        """In a forked child: let go of everything that is the parent's, without telling anybody."""
        self.closed = True
        self._lifeline.close()
        for channel in list(self._channels):
            channel.close()

    def __del__(self) -> None:
        # Dropped without close: for the service, this client has died.
        try:
            self._lifeline.close()
        except Exception:  # not contextlib: at the end of the interpreter the module may be gone
            pass

    def _introduce(self, *, resumes: bool = False) -> Lifeline:
        hello = wire.Hello(wire.PROTOCOL_VERSION, self._token, os.getpid(), self._bootstrap)
        if resumes:
            self.life += 1  # before the leases are listed: see has_lease
            hello = msgspec.structs.replace(
                hello,
                client=self.client,
                secret=self._secret,
                resumes=True,
                leases=dict(self._leases),
                abandoned=list(self._abandoned),
            )
        try:
            lifeline = connect(self.address)
            try:
                lifeline.sendall(message(0, wire.encode(hello)))
                lifeline.settimeout(_ANSWER_TIMEOUT_S)
                answer = _read_one(lifeline)
                if isinstance(answer, wire.Failure):
                    raise RefusedError(f"cannot connect to the plane at {self.address}: {answer.message}")
                assert isinstance(answer, wire.Welcome)
            except BaseException:
                lifeline.close()
                raise
        except PlaneConnectionError:
            raise
        except Exception as error:
            raise PlaneConnectionError(
                f"cannot connect to the plane at {self.address}: {error or 'it does not answer'}"
            ) from error
        self.client, self._secret = answer.client, answer.secret
        if not answer.lasting:
            self._reconnect_timeout_s = 0.0
        return Lifeline(lifeline)

    def _channel(self) -> _Channel:
        channel: _Channel | None = getattr(self._local, "channel", None)
        if channel is None or channel.closed:
            if self.closed:
                raise ClientClosedError("the client was closed")
            try:
                channel = _Channel(self.address, self._hello())
            except (ConnectionError, FileNotFoundError) as error:
                raise _ServiceGoneError from error
            except OSError as error:
                raise PlaneConnectionError(
                    f"cannot open a socket to the control service at {self.address}: {error}"
                ) from error
            self._local.channel = channel
            with self._lock:
                self._channels.add(channel)
        return channel

    def _hello(self) -> bytes:
        hello = wire.Hello(
            wire.PROTOCOL_VERSION, self._token, os.getpid(), client=self.client, secret=self._secret
        )
        return message(0, wire.encode(hello))

    def _send(self, channel: _Channel, data: bytes) -> None:
        try:
            channel.send(data, min(self._ack_timeout_s, _LONGEST_WAIT_S))
        except TimeoutError:
            self._raise_silent(self._ack_timeout_s)
        except OSError as error:
            raise _ServiceGoneError from error

    def _receive(self, channel: _Channel, number: int, waits_s: float) -> wire.Answer:
        patience = left = waits_s + self._ack_timeout_s
        deadline = time.monotonic() + patience
        while True:
            if left <= 0:
                self._raise_silent(patience)
            try:
                messages = channel.receive(min(left, _LONGEST_WAIT_S))
            except TimeoutError:
                messages = []
            except (EOFError, OSError) as error:
                raise _ServiceGoneError from error
            for answered, body in messages:
                if answered == number:
                    return wire.answer_decoder.decode(body)
                if answered == 0:
                    # The channel was refused: the service does not know this client, yet or any more.
                    refusal = wire.answer_decoder.decode(body)
                    raise _ServiceGoneError(getattr(refusal, "message", ""))
            left = deadline - time.monotonic()

    def _raise_silent(self, patience: float) -> NoReturn:
        raise PlaneConnectionError(
            f"the control service at {self.address} has not answered for {patience:.1f} s"
        )


def _watch(connection: weakref.ref[SocketConnection]) -> None:
    """Notice that the service is gone, and find it again, while its client does something else."""
    while True:
        watched = connection()
        if watched is None or watched.closed:
            return
        lifeline = watched._lifeline
        del watched  # it may be dropped without close meanwhile
        lifeline.wait_for_end()
        watched = connection()
        if watched is None or watched.closed or lifeline.closed:
            continue
        try:
            watched._reconnect()
        except Exception:
            return  # the next call says so


class _ServiceGoneError(Exception):
    """The connection has ended; ``refusal`` says why, where the service has said so."""

    def __init__(self, refusal: str = "") -> None:
        super().__init__(refusal)
        self.refusal = refusal


class RefusedError(PlaneConnectionError):
    """The service does not want this client."""


class _Channel:
    """A thread's socket. It goes when the thread's locals do."""

    def __init__(self, address: str, hello: bytes) -> None:
        self._pid = os.getpid()
        self.closed = True
        self._socket = connect(address)
        self.closed = False
        self._socket.settimeout(0)
        self._hello = hello
        self._answered = select.poll()
        self._answered.register(self._socket, select.POLLIN)
        self._inbox = Inbox(LONGEST)
        self._piece = memoryview(bytearray(_PIECE))
        # Held during a call: close() in another thread then only interrupts it.
        self.lock = threading.Lock()

    def send(self, data: bytes, timeout_s: float) -> None:
        if self._hello:
            # With the first request, so that a new thread's first call is not two round trips.
            data, self._hello = self._hello + data, b""
        try:
            sent = self._socket.send(data)
        except BlockingIOError:
            sent = 0
        if sent < len(data):
            # A long one: more than the socket holds.
            self._socket.settimeout(timeout_s)
            try:
                self._socket.sendall(memoryview(data)[sent:])
            finally:
                self._socket.settimeout(0)

    def receive(self, timeout_s: float) -> list[tuple[int, memoryview]]:
        # Not a blocking read: that one also wakes up when the service has taken the request.
        if not self._answered.poll(timeout_s * 1000):
            raise TimeoutError
        size = self._socket.recv_into(self._piece)
        if not size:
            raise EOFError
        return self._inbox.messages(self._piece[:size])

    def interrupt(self) -> None:
        """Make the call that waits in another thread end."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        if self._pid == os.getpid():
            # A child that was forked meanwhile may have the socket too; the service is to see its end.
            self.interrupt()
        self._socket.close()

    def __del__(self) -> None:
        try:
            self.close()
        except Exception:  # as above: then the system closes the socket
            pass


def encoded(envelope: wire.Envelope) -> bytes:
    """A request as bytes, or an error that says why it cannot be sent."""
    try:
        body = wire.encode(envelope)
    except (OverflowError, TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"the request cannot be sent: {error}") from error
    if len(body) > MAX_MESSAGE:
        raise InvalidRequestError(
            f"the ids and tags of this call take {len(body):,} bytes, and {MAX_MESSAGE:,} are the most; "
            "divide it into several"
        )
    return body


def _read_one(connected: socket.socket) -> wire.Answer:
    inbox = Inbox(MAX_MESSAGE)
    while True:
        piece = connected.recv(4096)
        if not piece:
            raise ConnectionError("the service hung up")
        for _, body in inbox.messages(memoryview(piece)):
            return wire.answer_decoder.decode(body)


_connections: weakref.WeakSet[SocketConnection] = weakref.WeakSet()


def _forget_all() -> None:
    for connection in list(_connections):
        connection.forget()


os.register_at_fork(after_in_child=_forget_all)
