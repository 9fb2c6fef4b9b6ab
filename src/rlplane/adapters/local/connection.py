"""A client's connection to its controller: one socket per thread, and one that says that it lives.

ZMQ sockets belong to a thread, so each thread that calls gets its own; a claim that waits in one thread
holds up no other. The plain Unix socket is shared: a process that dies closes it, and a controller that dies
does, so each side notices the other's death at once.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading
import time
import weakref
from collections import deque
from typing import Any

import zmq

from rlplane.adapters.local import wire
from rlplane.adapters.local.planedir import PlaneDir, remove_if_dead
from rlplane.adapters.local.server import _HELLO, _LEASE, _WELCOME, BYE, MAGIC
from rlplane.errors import ClientClosedError, PlaneConnectionError

__all__ = ["Connection"]

_CONNECT_TIMEOUT_S = 10.0


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
        self.closed = False
        self._alive = self._say_hello(bootstrap)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
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
        with channel.lock:
            if self.closed:
                raise ClientClosedError("the client was closed")
            try:
                channel.send(number, wire.Envelope(self.owner, request, self._take_unsent()))
                return self._receive(channel, number, waits_s)
            except BaseException as error:
                # Ctrl-C, or a controller that does not answer: what comes later must not be lost unseen.
                with contextlib.suppress(zmq.ZMQError):
                    channel.send(0, wire.Envelope(self.owner, wire.Abandon(number)))
                channel.close(linger=200)
                if isinstance(error, zmq.ZMQError):
                    raise PlaneConnectionError(f"cannot talk to the controller: {error}") from error
                raise

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
        with contextlib.suppress(OSError):
            self._alive.send(BYE, socket.MSG_DONTWAIT)
        with contextlib.suppress(OSError):
            self._alive.shutdown(socket.SHUT_RDWR)  # wakes the threads that poll it
        idle = [channel for channel in channels if channel.lock.acquire(timeout=1.0)]
        for channel in idle:
            channel.close(linger=0)
            channel.lock.release()
        if len(idle) == len(channels):
            self._context.term()
        self._alive.close()

    def forget(self) -> None:
        """In a forked child: let go of everything that is the parent's, without telling anybody."""
        self.closed = True
        with contextlib.suppress(OSError):
            self._alive.close()

    def _say_hello(self, bootstrap: bool) -> socket.socket:
        alive = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        alive.settimeout(_CONNECT_TIMEOUT_S)
        try:
            alive.connect(self.directory.alive)
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
        if channel is None or channel.socket.closed:
            channel = _Channel(self._context.socket(zmq.DEALER), self.directory.control, self._alive.fileno())
            self._local.channel = channel
            with self._lock:
                self._channels.add(channel)
        return channel

    def _take_unsent(self) -> list[int]:
        released = []
        while self._unsent:
            with contextlib.suppress(IndexError):
                released.append(self._unsent.popleft())
        return released

    def _receive(self, channel: _Channel, number: int, waits_s: float) -> wire.Answer:
        deadline = time.monotonic() + waits_s + self._ack_timeout_s
        while True:
            left = deadline - time.monotonic()
            events = dict(channel.poller.poll(int(max(0, min(left, 3600)) * 1000) + 1))
            if channel.socket in events:
                answered, body = wire.split(channel.socket.recv(zmq.NOBLOCK))
                if answered == number:
                    return wire.answer_decoder.decode(body)
                continue  # the answer to a request that was interrupted
            if events:
                self._raise_gone()
            if left <= 0:
                raise PlaneConnectionError(
                    f"the controller at {self.directory.address} has not answered for "
                    f"{waits_s + self._ack_timeout_s:.1f} s"
                )

    def _raise_gone(self) -> None:
        if self.closed:
            raise ClientClosedError("the client was closed while the call was waiting")
        remove_if_dead(self.directory.path)
        raise PlaneConnectionError(f"the controller at {self.directory.address} has ended or died")


class _Channel:
    """A thread's socket. It goes when the thread's locals do."""

    def __init__(self, socket_: zmq.Socket[bytes], endpoint: str, alive_fd: int) -> None:
        self.socket = socket_
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(endpoint)
        self.poller = zmq.Poller()
        self.poller.register(self.socket, zmq.POLLIN)
        self.poller.register(alive_fd, zmq.POLLIN)
        # Held during a call, so that close() in another thread never touches a socket in use.
        self.lock = threading.Lock()
        self._pid = os.getpid()

    def send(self, number: int, envelope: wire.Envelope) -> None:
        self.socket.send(wire.join(number, envelope), zmq.NOBLOCK)

    def close(self, linger: int) -> None:
        self.socket.close(linger=linger)

    def __del__(self) -> None:
        if self._pid == os.getpid():
            self.close(linger=0)


_connections: weakref.WeakSet[Connection] = weakref.WeakSet()


def _forget_all() -> None:
    for connection in list(_connections):
        connection.forget()


os.register_at_fork(after_in_child=_forget_all)
