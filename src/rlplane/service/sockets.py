"""Addresses of a control service, and the sockets behind them: ``unix:///path`` and ``tcp://host:port``."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
import weakref

from rlplane.errors import PlaneConnectionError

MAX_MESSAGE = 256 * 2**20
"""The longest request. Ids and tags of a call are in one message."""

_CONNECT_TIMEOUT_S = 10.0
_BACKLOG = 1024
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
# How long a host may be silent before it is taken for gone: probes from 10 s on, every 5 s, four of them.
_KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 30_000}


def listen(address: str) -> tuple[socket.socket, str]:
    """A listening socket, and its address with the port that it got."""
    kind, target = _parsed(address)
    if isinstance(target, str):
        listener = socket.socket(kind, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        listener.bind(target)
        os.chmod(target, 0o600)
        listener.listen(_BACKLOG)
        return listener, address
    host, _ = target
    listener = socket.create_server(target, family=kind, backlog=_BACKLOG)
    port = listener.getsockname()[1]
    return listener, f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def connect(address: str) -> socket.socket:
    """A blocking socket that is connected to a service. Raises ``OSError``."""
    kind, target = _parsed(address)
    connected = socket.socket(kind, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    _connected.add(connected)
    connected.settimeout(_CONNECT_TIMEOUT_S)
    deadline = time.monotonic() + _CONNECT_TIMEOUT_S
    try:
        while True:
            try:
                connected.connect(target)
                break
            except BlockingIOError:
                # More clients are connecting than the kernel keeps waiting on a Unix socket.
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
        check_peer(connected)
        prepare_tcp(connected)
    except BaseException:
        connected.close()
        raise
    return connected


def check_peer(connected: socket.socket) -> None:
    """Refuse a Unix socket whose other end belongs to another user. Raises ``PermissionError``."""
    if connected.family != socket.AF_UNIX:
        return
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(credentials)
    if uid not in (os.getuid(), 0):
        raise PermissionError(f"the other end belongs to user {uid}, this process to user {os.getuid()}")


def prepare_tcp(connected: socket.socket) -> None:
    """Send small messages at once, and notice within half a minute that a host has gone without a word."""
    if connected.family == socket.AF_UNIX:
        return
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE.items():
        option = getattr(socket, name, None)
        if option is not None:
            with contextlib.suppress(OSError):
                connected.setsockopt(socket.IPPROTO_TCP, option, value)


def _parsed(address: str) -> tuple[socket.AddressFamily, str | tuple[str, int]]:
    if address.startswith("unix://"):
        return socket.AF_UNIX, address.removeprefix("unix://")
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if not address.startswith("tcp://") or not host or not port.isdecimal():
        raise PlaneConnectionError(
            f"{address!r} is not the address of a control service; one looks like tcp://10.0.0.1:7001"
        )
    host = host.strip("[]")
    return (socket.AF_INET6 if ":" in host else socket.AF_INET), (host, int(port))


_connected: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _close_all() -> None:
    for connected in list(_connected):
        connected.close()


# All are the parent's, those too that a thread of it is about to introduce: if the child held one open, the
# service would not notice the death of the parent.
os.register_at_fork(after_in_child=_close_all)
