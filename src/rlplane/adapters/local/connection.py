"""A client's connection to its controller: a channel per thread, and a socket that says that it lives.

Each thread that calls has a channel of its own, so a claim that waits in one thread holds up no other. The
kernel closes the sockets of a process that dies, so each side notices the other's death at once.
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
from typing import Any, NoReturn

from rlplane.adapters.local import wire
from rlplane.adapters.local.planedir import PlaneDir, remove_if_dead
from rlplane.adapters.local.server import _ABANDON, _HELLO, _LEASE, _WELCOME, BYE, MAGIC, MAX_MESSAGE
from rlplane.adapters.local.stream import LONGEST, Inbox, message
from rlplane.errors import ClientClosedError, InvalidRequestError, PlaneConnectionError

__all__ = ["Connection"]

_CONNECT_TIMEOUT_S = 10.0
_LONGEST_WAIT_S = 3600.0  # at once: a socket takes no timeout of years
_PIECE = 256 * 1024
_DYING_S = 1.0


class Connection:
    """Requests and answers between this process and the controller in ``directory``."""

    def __init__(self, directory: PlaneDir, *, bootstrap: bool, ack_timeout_s: float) -> None:
        self.directory = directory
        self._ack_timeout_s = ack_timeout_s
        self._numbers = itertools.count(1)
        self._local = threading.local()
        self._channels: weakref.WeakSet[_Channel] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._unsent: deque[int] = deque()
        self._abandoned: deque[int] = deque()
        self.closed = False
        self._alive = self._say_hello(bootstrap)
        _connections.add(self)

    def request(self, request: Any, *, waits_s: float = 0.0) -> Any:
        """Send a request and return its answer; a failure is raised.

        ``waits_s`` is how long the controller may take because it waits for somebody else; beyond that it
        has ``ack_timeout_ms``. If the caller is interrupted, the controller is told to forget the request.
        """
        answer = self.exchange(request, waits_s=waits_s)
        if isinstance(answer, wire.Failure):
            raise wire.error_of(answer)
        return answer

    def exchange(self, request: Any, *, waits_s: float = 0.0) -> wire.Answer:
        """Like :meth:`request`, with a failure returned as it is."""
        channel = self._channel()
        number = next(self._numbers)
        released, abandoned = _take_all(self._unsent), _take_all(self._abandoned)
        envelope = wire.Envelope(self.owner, request, released, abandoned)
        try:
            with channel.lock:
                if self.closed:
                    raise ClientClosedError("the client was closed")
                self._send(channel, message(number, _encoded(envelope)))
                return self._receive(channel, number, waits_s)
        except BaseException:
            # Ctrl-C, or a controller that does not answer: what comes later must not be lost unseen.
            channel.close()
            self._unsent.extend(released)
            self._abandoned.extend(abandoned)
            self._abandon(number)
            raise

    def _abandon(self, number: int) -> None:
        try:
            self._alive.send(_ABANDON.pack(number), socket.MSG_DONTWAIT)
        except BlockingIOError:
            self._abandoned.append(number)
        except OSError:
            pass  # the controller is gone, and the request with it

    def release(self, lease: int) -> None:
        """Give a lease back. Called by finalizers, from any thread: it must not block."""
        try:
            self._alive.send(_LEASE.pack(lease), socket.MSG_DONTWAIT)
        except BlockingIOError:
            self._unsent.append(lease)
        except OSError:
            pass  # the controller is gone, and the lease with it

    def close(self) -> None:
        """Say goodbye and close; a call that waits in another thread ends with an error."""
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
        with contextlib.suppress(OSError):
            self._alive.send(BYE, socket.MSG_DONTWAIT)
        self._alive.close()

    def forget(self) -> None:
        """In a forked child: let go of everything that is the parent's, without telling anybody."""
        self.closed = True
        with contextlib.suppress(OSError):
            self._alive.close()
        for channel in list(self._channels):
            channel.close()

    def _say_hello(self, bootstrap: bool) -> socket.socket:
        alive = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            _connect(alive, self.directory.alive)
            alive.send(_HELLO.pack(MAGIC, os.getpid(), bootstrap))
            _, self.owner = _WELCOME.unpack(alive.recv(64))
        except Exception as error:
            alive.close()
            raise PlaneConnectionError(
                f"cannot connect to the plane at {self.directory.address}: {error or 'it does not answer'}"
            ) from error
        alive.setblocking(False)
        return alive

    def _channel(self) -> _Channel:
        channel: _Channel | None = getattr(self._local, "channel", None)
        if channel is None or channel.closed:
            try:
                channel = _Channel(self.directory.control)
            except (ConnectionError, FileNotFoundError):
                self._raise_gone()
            except OSError as error:
                raise PlaneConnectionError(
                    f"cannot open a socket to the controller at {self.directory.address}: {error}"
                ) from error
            self._local.channel = channel
            with self._lock:
                self._channels.add(channel)
        return channel

    def _send(self, channel: _Channel, data: bytes) -> None:
        try:
            channel.send(data, min(self._ack_timeout_s, _LONGEST_WAIT_S))
        except TimeoutError:
            self._raise_silent(self._ack_timeout_s)
        except OSError:
            self._raise_gone()

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
            except (EOFError, OSError):
                self._raise_gone()
            for answered, body in messages:
                if answered == number:
                    return wire.answer_decoder.decode(body)
            left = deadline - time.monotonic()

    def _raise_silent(self, patience: float) -> NoReturn:
        raise PlaneConnectionError(
            f"the controller at {self.directory.address} has not answered for {patience:.1f} s"
        )

    def _raise_gone(self) -> NoReturn:
        if self.closed:
            raise ClientClosedError("the client was closed while the call was waiting")
        remove_if_dead(self.directory.path, _DYING_S)
        raise PlaneConnectionError(f"the controller at {self.directory.address} has ended or died")


class _Channel:
    """A thread's socket. It goes when the thread's locals do."""

    def __init__(self, path: str) -> None:
        self._pid = os.getpid()
        self.closed = True
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            _connect(self._socket, path)
        except BaseException:
            self._socket.close()
            raise
        self.closed = False
        self._socket.settimeout(0)
        self._answered = select.poll()
        self._answered.register(self._socket, select.POLLIN)
        self._inbox = Inbox(LONGEST)
        self._piece = memoryview(bytearray(_PIECE))
        # Held during a call: close() in another thread then only interrupts it.
        self.lock = threading.Lock()

    def send(self, data: bytes, timeout_s: float) -> None:
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
        # Not a blocking read: that one also wakes up when the controller has taken the request.
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
            # A child that was forked meanwhile may have the socket too; the controller is to see its end.
            self.interrupt()
        self._socket.close()

    def __del__(self) -> None:
        self.close()


def _connect(to: socket.socket, path: str) -> None:
    to.settimeout(_CONNECT_TIMEOUT_S)
    deadline = time.monotonic() + _CONNECT_TIMEOUT_S
    while True:
        try:
            return to.connect(path)
        except BlockingIOError:
            # More are knocking than the kernel keeps waiting.
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _encoded(envelope: wire.Envelope) -> bytes:
    try:
        body = wire.encode(envelope)
    except (OverflowError, TypeError, ValueError) as error:
        raise InvalidRequestError(f"the request cannot be sent: {error}") from error
    if len(body) > MAX_MESSAGE:
        raise InvalidRequestError(
            f"the ids and tags of this call take {len(body):,} bytes, and {MAX_MESSAGE:,} are the most; "
            "divide it into several"
        )
    return body


def _take_all(numbers: deque[int]) -> list[int]:
    taken: list[int] = []
    while numbers:
        with contextlib.suppress(IndexError):
            taken.append(numbers.popleft())
    return taken


_connections: weakref.WeakSet[Connection] = weakref.WeakSet()


def _forget_all() -> None:
    for connection in list(_connections):
        connection.forget()


os.register_at_fork(after_in_child=_forget_all)
