"""Publisher and subscriber over ZeroMQ, in two patterns.

``Pattern.BROADCAST`` (XPUB/SUB): every subscriber gets every message, a slow one loses some. XPUB instead of
PUB, because it hears subscriptions: the publisher can wait for its subscribers, and can give a late one the
last message at once.

``Pattern.COLLECT`` (PUSH/PULL): many publishers, one subscriber that binds. A publisher's messages queue
until the subscriber is there, so nothing is lost between start and connection; when the queue is full the
publisher is told so instead of being made to wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

import zmq

from rlplane.errors import ConfigError, PlaneConnectionError
from rlplane.transport import curve
from rlplane.transport.codec import MessageCodec
from rlplane.transport.gate import is_loopback
from rlplane.transport.protocol import MessagePublisher, MessageSubscriber

T = TypeVar("T")

# One call of a loop's reader takes at most this many frames, so that ticks and signals get their turn.
_FRAMES_PER_TURN = 256

# How often a message with a deadline is sent again while a subscriber may be full.
_RESEND_S = 0.02


class Pattern(enum.Enum):
    """Who gets a message: all subscribers, or the one that collects."""

    BROADCAST = "broadcast"
    COLLECT = "collect"


class ZmqMessagePublisher(MessagePublisher[T]):
    """Publishes over ZeroMQ. Use it from one thread.

    Args:
        codec: Turns messages into frames.
        address: ``ipc://…``, ``inproc://…`` or ``tcp://127.0.0.1:port`` (``:*`` picks a port); or what
            ``listen_encrypted`` of the other side returned.
        pattern: Who gets a message.
        bind: Whether this side owns the address; by default BROADCAST does, COLLECT does not.
        sndhwm: Messages that wait for one receiver before it loses the next (or, with COLLECT, before
            :meth:`publish` returns False).
        linger: Milliseconds that :meth:`close` leaves for what is still queued.
        resend_last: Give each new subscriber the last message at once (BROADCAST).
        allow_remote: Permit an address that other machines can reach.
    """

    def __init__(
        self,
        codec: MessageCodec[T],
        address: str,
        *,
        pattern: Pattern = Pattern.BROADCAST,
        bind: bool | None = None,
        sndhwm: int = 16,
        linger: int = 1000,
        resend_last: bool = False,
        allow_remote: bool = False,
        context: zmq.Context[Any] | None = None,
    ) -> None:
        super().__init__(codec)
        self._broadcast = pattern is Pattern.BROADCAST
        self._resend_last = resend_last
        self._last_frame: bytes | None = None
        self._n_subscribers = 0
        self._someone_was_full = False
        self._socket = _Socket(zmq.XPUB if self._broadcast else zmq.PUSH, context)
        raw = self._socket.raw
        raw.setsockopt(zmq.SNDHWM, sndhwm)
        raw.setsockopt(zmq.LINGER, linger)
        if self._broadcast:
            # VERBOSER: hear every subscription and its end, also the second one of the same topic.
            raw.setsockopt(zmq.XPUB_VERBOSER, 1)
            raw.setsockopt(zmq.XPUB_NODROP, 1)  # So that a full subscriber is noticed.
        self._socket.open(address, self._broadcast if bind is None else bind, allow_remote)

    @property
    def address(self) -> str:
        """The address, with the port that was picked."""
        return self._socket.address

    @property
    def n_subscribers(self) -> int:
        """Subscriptions that are open now (BROADCAST)."""
        self.handle_subscriptions()
        return self._n_subscribers

    def _send_frame(self, frame: bytes, deliver_within_s: float | None) -> bool:
        self._last_frame = frame
        if not self._broadcast:
            return self._send_collected(frame, deliver_within_s)
        self._send_to_all(frame)
        self.handle_subscriptions()
        if not self._someone_was_full:
            return True
        # A subscriber that was full gets nothing until it has read, and ZeroMQ does not say when: send again.
        deadline = time.monotonic() + (deliver_within_s or 0.0)
        while time.monotonic() < deadline:
            time.sleep(_RESEND_S)
            self._send_to_all(frame)
        return False

    def _send_to_all(self, frame: bytes) -> None:
        raw = self._socket.raw
        try:
            raw.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            # With NODROP one full subscriber stops the message for all; without, it alone misses it.
            self._someone_was_full = True
            raw.setsockopt(zmq.XPUB_NODROP, 0)
            raw.send(frame, zmq.NOBLOCK)
            raw.setsockopt(zmq.XPUB_NODROP, 1)

    def _send_collected(self, frame: bytes, deliver_within_s: float | None) -> bool:
        raw = self._socket.raw
        if deliver_within_s is not None:
            raw.poll(max(0, int(deliver_within_s * 1000)), zmq.POLLOUT)
        try:
            raw.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def listen_encrypted(self, host: str) -> str:
        """Be reachable at an address of this machine too, for those who have what this returns; see
        :meth:`ZmqMessageSubscriber.listen_encrypted`."""
        return self._socket.listen_encrypted(host)

    def handle_subscriptions(self) -> None:
        """Take note of who came and went; a newcomer gets the last message when ``resend_last`` is on."""
        if not self._broadcast:
            return
        newcomers = 0
        while True:
            try:
                note = self._socket.raw.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            came = note[:1] == b"\x01"
            self._n_subscribers += 1 if came else -1
            newcomers += came
        if newcomers and self._resend_last and self._last_frame is not None:
            # To all, because XPUB cannot address one; a snapshot that arrives twice is the same snapshot.
            self._send_to_all(self._last_frame)

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Serve newcomers from ``loop``, between two messages too."""
        self._socket.attach(loop, self.handle_subscriptions)
        self.handle_subscriptions()

    def wait_for_subscribers(self, count: int, timeout_s: float) -> bool:
        """Wait until ``count`` subscriptions are open: from then on no message is lost to them."""
        deadline = time.monotonic() + timeout_s
        while self.n_subscribers < count:
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self._socket.raw.poll(int(left * 1000) + 1, zmq.POLLIN)
        return True

    def set_linger(self, milliseconds: int) -> None:
        """Change how long :meth:`close` leaves for what is still queued."""
        self._socket.raw.setsockopt(zmq.LINGER, milliseconds)

    def close(self) -> None:
        self._socket.close()


class ZmqMessageSubscriber(MessageSubscriber[T]):
    """Receives over ZeroMQ. Use it from one thread, or from a loop with :meth:`attach`.

    Args:
        codec: Turns frames into messages.
        address: As for the publisher.
        pattern: Must be the publisher's.
        topics: Topics (or prefixes) to receive; all by default (BROADCAST).
        bind: Whether this side owns the address; by default the collector does, a subscriber not.
        rcvhwm: Messages that wait here before the carrier stops reading.
        conflate: Keep only the latest message: right for a viewer, wrong for anything that counts.
        allow_remote: Permit an address that other machines can reach.
    """

    def __init__(
        self,
        codec: MessageCodec[T],
        address: str,
        *,
        pattern: Pattern = Pattern.BROADCAST,
        topics: Sequence[bytes] = (b"",),
        bind: bool | None = None,
        rcvhwm: int = 1000,
        conflate: bool = False,
        allow_remote: bool = False,
        context: zmq.Context[Any] | None = None,
    ) -> None:
        super().__init__(codec)
        collect = pattern is Pattern.COLLECT
        self._loop: asyncio.AbstractEventLoop | None = None
        self._handler: Callable[[T], None] | None = None
        self._on_error: Callable[[Exception], None] | None = None
        self._socket = _Socket(zmq.PULL if collect else zmq.SUB, context)
        raw = self._socket.raw
        raw.setsockopt(zmq.LINGER, 0)
        raw.setsockopt(zmq.RCVHWM, rcvhwm)
        if conflate:
            raw.setsockopt(zmq.CONFLATE, 1)
        if not collect:
            for topic in topics:
                raw.setsockopt(zmq.SUBSCRIBE, topic)
        self._socket.open(address, collect if bind is None else bind, allow_remote)

    @property
    def address(self) -> str:
        """The address, with the port that was picked."""
        return self._socket.address

    def listen_encrypted(self, host: str) -> str:
        """Be reachable at an address of this machine too, for those who have what this returns.

        It is an address for the other side, with a secret in it: without that nobody gets a message in, or
        sees one. One socket of a ZeroMQ context can do this. Raises ``PlaneConnectionError`` when the address
        cannot be had; the others stay.
        """
        return self._socket.listen_encrypted(host)

    def _receive_frame(self, timeout_s: float | None) -> bytes | None:
        raw = self._socket.raw
        if not raw.poll(None if timeout_s is None else int(timeout_s * 1000), zmq.POLLIN):
            return None
        try:
            return raw.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def attach(
        self,
        loop: asyncio.AbstractEventLoop,
        handler: Callable[[T], None],
        on_error: Callable[[Exception], None],
    ) -> None:
        """Give every message to ``handler`` from ``loop``.

        What the codec re-raises and what the handler raises goes to ``on_error``; reading goes on.
        """
        self._loop, self._handler, self._on_error = loop, handler, on_error
        self._socket.attach(loop, self._on_readable)
        loop.call_soon(self._on_readable)

    def receive_available(self, limit: int = _FRAMES_PER_TURN) -> bool:
        """Hand at most ``limit`` waiting frames to the attached handler; whether there may be more."""
        if self._handler is None or self._on_error is None or self._socket.raw.closed:
            return False
        for _ in range(limit):
            try:
                frame = self._socket.raw.recv(zmq.NOBLOCK)
            except zmq.Again:
                return False
            try:
                item = self._decode(frame)
                if item is not None:
                    self._handler(item)
            except Exception as exc:
                self._on_error(exc)
        return True

    def _on_readable(self) -> None:
        # The descriptor signals edges: stop before it is empty, and it may never signal again.
        if self.receive_available() and self._loop is not None:
            self._loop.call_soon(self._on_readable)

    def close(self) -> None:
        self._socket.close()


def check_address(address: str, *, allow_remote: bool = False) -> None:
    """Raise ``ConfigError`` for an address that is malformed, or that other machines could reach unasked."""
    parts = urlsplit(address)
    if parts.scheme in ("ipc", "inproc") and len(address) > len(parts.scheme) + 3:
        return
    if parts.scheme == curve.SCHEME:
        curve.Address.parse(address)
        return
    if parts.scheme != "tcp" or not parts.netloc:
        raise ConfigError(f"address {address!r} must be ipc://PATH, inproc://NAME or tcp://127.0.0.1:PORT")
    host = parts.netloc.rpartition(":")[0].strip("[]")
    if not allow_remote and not is_loopback(host):
        raise ConfigError(
            f"address {address!r} can be reached from other machines; say allow_remote if that is meant"
        )


class _Socket:
    """A ZeroMQ socket with its address, its file and its place in a loop."""

    def __init__(self, kind: int, context: zmq.Context[Any] | None) -> None:
        self.raw: zmq.Socket[bytes] = (context or zmq.Context.instance()).socket(kind)
        self.address = ""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._file: tuple[str, int] | None = None
        self._doorman: curve.Doorman | None = None

    @property
    def _fd(self) -> int:
        return cast(int, self.raw.getsockopt(zmq.FD))

    def attach(self, loop: asyncio.AbstractEventLoop, on_readable: Callable[[], None]) -> None:
        self._loop = loop
        loop.add_reader(self._fd, on_readable)

    def open(self, address: str, bind: bool, allow_remote: bool) -> None:
        try:
            check_address(address, allow_remote=allow_remote or not bind)
            if bind:
                self.raw.bind(address)
                self.address = self.raw.getsockopt_string(zmq.LAST_ENDPOINT)
                self._file = _socket_file(self.address)
            else:
                self.raw.connect(curve.prepare_client(self.raw, address))
                self.address = address
        except zmq.ZMQError as exc:
            self.close()
            verb = "bind" if bind else "connect to"
            raise PlaneConnectionError(f"cannot {verb} {curve.without_secret(address)!r}: {exc}") from exc
        except BaseException:
            self.close()
            raise

    def listen_encrypted(self, host: str) -> str:
        try:
            self._doorman = curve.Doorman(self.raw)
            return self._doorman.bind(host)
        except zmq.ZMQError as exc:
            raise PlaneConnectionError(f"cannot listen on {host}: {exc}") from exc

    def close(self) -> None:
        if not self.raw.closed:
            if self._loop is not None:
                self._loop.remove_reader(self._fd)
            self.raw.close()
            if self._doorman is not None:
                self._doorman.close()
            # libzmq leaves the file; whoever has bound the address since has made another one.
            if self._file is not None and _socket_file(self.address) == self._file:
                with contextlib.suppress(OSError):
                    os.unlink(self._file[0])


def _socket_file(address: str) -> tuple[str, int] | None:
    """The file of a Unix socket and its inode; None if it has none."""
    path = address.removeprefix("ipc://")
    try:
        return (path, os.stat(path).st_ino) if path != address else None
    except OSError:
        return None
