"""Who is alive: every client holds a connection to the control actor, and the kernel says when it ends.

Heartbeats would have to choose between noticing late and taking a busy process for a dead one. A connection
ends when its process does, however it dies. A connection that breaks although the process lives is made
anew by the client, within ``grace_s``.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable

__all__ = ["Lifeline", "Watcher"]

_NUMBER = struct.Struct("!q")
_GOODBYE = -1


class Watcher:
    """The control actor's side: calls ``dead(owner)`` once for every client that went without a goodbye."""

    def __init__(self, ip: str, dead: Callable[[int], None], grace_s: float) -> None:
        self._dead, self._grace = dead, grace_s
        family = socket.AF_INET6 if ":" in ip else socket.AF_INET
        self._server = socket.create_server((ip, 0), family=family)
        self.address: tuple[str, int] = (ip, int(self._server.getsockname()[1]))
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, int] = {}
        self._missing: dict[int, float] = {}
        self._closed = False
        threading.Thread(target=self._run, name="rlplane-liveness", daemon=True).start()

    def forget(self, owner: int) -> None:
        """A client that has left on purpose: the end of its connection means nothing."""
        with self._lock:
            self._missing.pop(owner, None)
            for connection, other in self._connections.items():
                if other == owner:
                    self._connections[connection] = _GOODBYE

    def close(self) -> None:
        """Stop listening."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._server.close()

    def _run(self) -> None:
        while not self._closed:
            with self._lock:
                soonest = min(self._missing.values(), default=None)
            wait = 0.5 if soonest is None else max(0.0, min(0.5, soonest - time.monotonic()))
            try:
                events = self._selector.select(wait)
            except (OSError, ValueError):
                return
            for key, _ in events:
                if key.fileobj is self._server:
                    self._accept()
                else:
                    assert isinstance(key.fileobj, socket.socket)
                    self._read(key.fileobj)
            self._bury()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._server.accept()
            connection.settimeout(2.0)
            _keep_alive(connection)
            self._selector.register(connection, selectors.EVENT_READ)

    def _read(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(_NUMBER.size, socket.MSG_WAITALL)
        except OSError:
            data = b""
        with self._lock:
            if len(data) == _NUMBER.size:
                (owner,) = _NUMBER.unpack(data)
                self._connections[connection] = owner
                self._missing.pop(owner, None)
                return
            owner = self._connections.pop(connection, _GOODBYE)
            if owner != _GOODBYE and owner not in self._connections.values():
                self._missing[owner] = time.monotonic() + self._grace
        self._selector.unregister(connection)
        connection.close()

    def _bury(self) -> None:
        now = time.monotonic()
        with self._lock:
            gone = [owner for owner, deadline in self._missing.items() if deadline <= now]
            for owner in gone:
                del self._missing[owner]
        for owner in gone:
            self._dead(owner)


class Lifeline:
    """A client's side: holds the connection, and makes it anew when it breaks."""

    def __init__(self, address: tuple[str, int], owner: int) -> None:
        self._address, self._owner = address, owner
        self._closed = threading.Event()
        self._connection = self._connect()
        threading.Thread(target=self._hold, name="rlplane-lifeline", daemon=True).start()

    def close(self) -> None:
        """Let go."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _connect(self) -> socket.socket:
        connection = socket.create_connection(self._address, timeout=5.0)
        _keep_alive(connection)
        connection.settimeout(None)
        connection.sendall(_NUMBER.pack(self._owner))
        return connection

    def _hold(self) -> None:
        while not self._closed.is_set():
            with contextlib.suppress(OSError):
                # Nothing is ever sent to a client: this returns when the connection ends.
                self._connection.recv(1)
            if self._closed.is_set():
                return
            try:
                self._connection.close()
                self._connection = self._connect()
            except OSError:
                # The control actor is gone; calls to it say so. There is nobody to show life to.
                return


def _keep_alive(connection: socket.socket) -> None:
    """Notice within half a minute that a host has gone without closing its connections."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        option = getattr(socket, name, None)
        if option is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
