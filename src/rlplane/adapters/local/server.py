"""The controller process of the shared-memory engine: sockets, files and time around a Controller.

One thread, one loop, Unix-domain sockets. Requests come over channels, of which a client has one for each of
its threads. Beside them every client keeps one more socket open: the kernel closes it when the client dies,
so a death is noticed at once and a stopped client is not taken for a dead one; dropped leases come the same
way, because a finalizer may write to it from any thread.

It imports no torch, so that it starts in a fraction of a second.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import fcntl
import json
import logging
import mmap
import os
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from rlplane.adapters.local import wire
from rlplane.adapters.local.arena import Arena
from rlplane.adapters.local.controller import Caller, Controller
from rlplane.adapters.local.planedir import SPARE_SLOTS, PlaneDir, left_overs, remove_if_dead
from rlplane.adapters.local.stream import LONGEST, Inbox, MessageTooLong, message
from rlplane.adapters.local.turns import CROWD_PER_CORE, IDLE_S, SEATS_PER_CORE, Turns

__all__ = ["Server", "main", "serve"]

logger = logging.getLogger(__name__)

MAX_MESSAGE = 256 * 2**20
_HELLO = struct.Struct("<4sQB")  # magic, pid, whether it is the bootstrap client
_WELCOME = struct.Struct("<4sQ")  # magic, owner number
_LEASE = struct.Struct("<Q")
_ABANDON = struct.Struct("<Qx")  # the number of a request; one byte longer than a lease
MAGIC = b"rlp1"
BYE = b"bye"
_BOOTSTRAP_MUST_CONNECT_S = 30.0
_NO_SPARE = 0
_PIECE = 128 * 1024  # read at once from one channel, so that none holds up the others
_OUT_OF_FILES_S = 0.5


class _Channel:
    """A thread of a client, seen from here."""

    def __init__(self, number: int, socket_: socket.socket) -> None:
        self.number, self.socket = number, socket_
        self.inbox = Inbox(MAX_MESSAGE)
        self.unsent = bytearray()
        self.owner: int | None = None
        self.asked: int | None = None  # the number of the request that is under way


class Server:
    """A plane's controller, until it is told to stop."""

    def __init__(self, cfg: Mapping[str, Any], *, needs_bootstrap: bool = False) -> None:
        for path in left_overs():
            remove_if_dead(path)
        self.dir = PlaneDir.create()
        self._files: dict[int, int] = {}
        arena = Arena(
            int(cfg["global_segment_size"]),
            self._create_segment,
            self._destroy_segment,
            segment_size=cfg.get("segment_size"),
        )
        self.controller = Controller(
            int(cfg["storage_capacity"]), arena, self._send, self._revoke, self._grant
        )
        self._epoll = select.epoll()
        self._control = self._listen(self.dir.control, socket.SOCK_STREAM)
        self._alive = self._listen(self.dir.alive, socket.SOCK_SEQPACKET)
        self._resting: list[tuple[float, socket.socket]] = []
        self._channels: dict[int, _Channel] = {}  # by number; a number is never used again
        self._channels_by_fd: dict[int, _Channel] = {}
        self._next_channel = 1
        self._piece = memoryview(bytearray(_PIECE))
        self._clients: dict[int, tuple[socket.socket, int]] = {}
        self._bootstrap: int | None = None
        self._bootstrap_deadline = time.monotonic() + _BOOTSTRAP_MUST_CONNECT_S if needs_bootstrap else None
        self._next_owner = 0
        self._locks: dict[int, int] = {}
        cores = len(os.sched_getaffinity(0))
        self._turns = Turns[tuple[Caller, wire.Envelope]](CROWD_PER_CORE * cores, SEATS_PER_CORE * cores)
        spares = os.open(self.dir.spares, os.O_RDWR | os.O_CLOEXEC)
        self._spares = memoryview(mmap.mmap(spares, 8 * SPARE_SLOTS)).cast("Q")
        os.close(spares)
        self._stopping = False
        self.malformed = 0

    def run(self) -> None:
        """Serve until :meth:`stop`, a shutdown request, or the death of the bootstrap client."""
        try:
            while not self._stopping:
                self._set_time()
                longest = IDLE_S if self._turns else 1.0
                wait = min(self.controller.next_deadline() - self.controller.now, longest)
                events = self._epoll.poll(max(wait, 0.0))
                self._set_time()
                for fd, event in events:
                    try:
                        self._serve(fd, event)
                    except Exception:
                        logger.exception(
                            "the controller has a bug, and goes on without this client's channel"
                        )
                        self._forget(fd)
                while in_line := self._turns.next(self.controller.now, idle=not events):
                    for caller, envelope in in_line:
                        self._handle_in_turn(caller, envelope)
                self.controller.expire()
                if not events:
                    self.controller.give_back_idle()
                if self._resting:
                    self._listen_again()
                if self._bootstrap_deadline is not None and time.monotonic() > self._bootstrap_deadline:
                    logger.error("the bootstrap client never connected; ending")
                    self._stopping = True
        finally:
            self.close()

    def stop(self) -> None:
        """Make :meth:`run` return. Safe in a signal handler."""
        self._stopping = True

    def close(self) -> None:
        """Give up the sockets and remove the plane's directory."""
        sockets = [client for client, _ in self._clients.values()]
        sockets += [channel.socket for channel in self._channels.values()]
        for open_socket in [*sockets, self._control, self._alive]:
            open_socket.close()
        for known in (self._clients, self._channels, self._channels_by_fd):
            known.clear()
        self._epoll.close()
        for fd in [*self._files.values(), *self._locks.values()]:
            os.close(fd)
        self._files.clear()
        self._locks.clear()
        self.dir.remove()

    def _set_time(self) -> None:
        self.controller.now, self.controller.wall = time.monotonic(), time.time()

    def _serve(self, fd: int, event: int) -> None:
        channel = self._channels_by_fd.get(fd)
        if channel is not None:
            if event & select.EPOLLOUT:
                self._flush(channel)
            if event & ~select.EPOLLOUT:
                self._receive(channel)
        elif fd in self._clients:
            self._hear(fd)
        elif fd == self._control.fileno():
            self._accept(self._control)
        elif fd == self._alive.fileno():
            self._accept(self._alive)

    # Sockets

    def _listen(self, path: str, kind: socket.SocketKind) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, kind | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        listener.bind(path)
        os.chmod(path, 0o600)
        listener.listen(1024)
        self._epoll.register(listener.fileno(), select.EPOLLIN)
        return listener

    def _accept(self, listener: socket.socket) -> None:
        try:
            accepted, _ = listener.accept()
        except OSError as error:
            logger.error("cannot accept a client: %s", error)
            # Who knocks goes on knocking: look again when a file may have been closed.
            self._epoll.unregister(listener.fileno())
            self._resting.append((self.controller.now + _OUT_OF_FILES_S, listener))
            return
        accepted.setblocking(False)
        fd = accepted.fileno()
        if listener is self._alive:
            self._clients[fd] = (accepted, -1)
        else:
            channel = _Channel(self._next_channel, accepted)
            self._next_channel += 1
            self._channels[channel.number] = self._channels_by_fd[fd] = channel
        self._epoll.register(fd, select.EPOLLIN)

    def _listen_again(self) -> None:
        due = [listener for when, listener in self._resting if when <= self.controller.now]
        self._resting = [(when, listener) for when, listener in self._resting if listener not in due]
        for listener in due:
            self._epoll.register(listener.fileno(), select.EPOLLIN)

    # Requests

    def _receive(self, channel: _Channel) -> None:
        # One piece: if there is more, epoll says so again, after the others had their turn.
        try:
            size = channel.socket.recv_into(self._piece)
        except BlockingIOError:
            return
        except OSError:
            size = 0
        if not size:
            self._hang_up(channel)
            return
        try:
            messages = channel.inbox.messages(self._piece[:size])
        except MessageTooLong as error:
            self._count_malformed(error)
            self._hang_up(channel)
            return
        for number, body in messages:
            self._request(channel, number, body)

    def _abandon(self, owner: int, number: int) -> None:
        # The request may still be in its channel. Bounded: no message is longer.
        for channel in [c for c in self._channels.values() if c.owner in (owner, None)]:
            for _ in range(MAX_MESSAGE // _PIECE):
                if channel.number not in self._channels or not _has_more(channel.socket):
                    break
                self._receive(channel)
        for caller, envelope in self._turns.pull(owner):
            self._handle(caller, envelope)
        self.controller.abandon(owner, number)

    def _request(self, channel: _Channel, number: int, body: memoryview) -> None:
        try:
            if channel.asked is not None or channel.unsent:
                raise ValueError("a request while another one is under way")
            envelope = wire.envelope_decoder.decode(body)
        except (ValueError, msgspec.MsgspecError, RecursionError) as error:
            self._count_malformed(error)
            return
        caller = Caller(envelope.owner, number, channel.number)
        channel.owner, channel.asked = envelope.owner, number
        if isinstance(envelope.request, wire.Shutdown) and envelope.owner == self._bootstrap:
            self._send(caller, wire.Done())
            self._stopping = True
            return
        if len(self._locks) <= self._turns.crowd or envelope.owner not in self._locks:
            self._handle(caller, envelope)
        # Claims go by who came first, and only that.
        elif isinstance(envelope.request, wire.ClaimRequest) or self._turns.take(
            envelope.owner, (caller, envelope), self.controller.now
        ):
            self._handle_in_turn(caller, envelope)

    def _handle_in_turn(self, caller: Caller, envelope: wire.Envelope) -> None:
        self._handle(caller, envelope)
        channel = self._channels.get(caller.channel)
        if channel is None or channel.asked is not None:
            self._turns.rest(caller.owner)  # what it waits for is somebody else's request

    def _handle(self, caller: Caller, envelope: wire.Envelope) -> None:
        try:
            self.controller.handle(caller, envelope)
        except Exception as error:
            logger.exception("a %s request failed", type(envelope.request).__name__)
            self._send(caller, wire.Failure("", f"{type(error).__name__}: {error}"))

    def _hang_up(self, channel: _Channel) -> None:
        del self._channels[channel.number], self._channels_by_fd[channel.socket.fileno()]
        self._epoll.unregister(channel.socket.fileno())
        channel.socket.close()

    def _forget(self, fd: int) -> None:
        channel = self._channels_by_fd.get(fd)
        if channel is not None:
            self._hang_up(channel)

    def _count_malformed(self, error: Exception) -> None:
        self.malformed += 1
        if self.malformed == 1:
            logger.warning("ignored a malformed request (%s); further ones are only counted", error)

    def _send(self, caller: Caller, answer: wire.Answer) -> None:
        channel = self._channels.get(caller.channel)
        if channel is None:
            return  # it is gone
        if channel.asked == caller.number:
            channel.asked = None
        body = wire.encode(answer)
        if len(body) > LONGEST:
            body = wire.encode(
                wire.Failure("", f"the answer has {len(body)} bytes, which is too much for one")
            )
        data = message(caller.number, body)
        if channel.unsent:
            channel.unsent += data
            return
        sent = _send_some(channel.socket, data)
        if sent < len(data):
            channel.unsent += data[sent:]
            # Who does not read answers is not asked for more requests.
            self._epoll.modify(channel.socket.fileno(), select.EPOLLOUT)

    def _flush(self, channel: _Channel) -> None:
        del channel.unsent[: _send_some(channel.socket, channel.unsent)]
        if not channel.unsent:
            self._epoll.modify(channel.socket.fileno(), select.EPOLLIN)

    # Clients

    def _hear(self, fd: int) -> None:
        # One message: if there are more, epoll says so again, and that costs less than asking in vain.
        client, owner = self._clients[fd]
        try:
            message = client.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            message = b""
        if owner < 0:
            self._welcome(fd, client, message)
        elif not message or message == BYE:
            self._farewell(fd, died=not message)
        elif len(message) == _LEASE.size:
            self.controller.release(owner, _LEASE.unpack(message)[0])
        elif len(message) == _ABANDON.size:
            self._abandon(owner, _ABANDON.unpack(message)[0])
        else:
            self._count_malformed(ValueError(f"{len(message)} bytes on a client's socket"))

    def _welcome(self, fd: int, client: socket.socket, message: bytes) -> None:
        try:
            magic, pid, is_bootstrap = _HELLO.unpack(message)
            if magic != MAGIC:
                raise ValueError(f"magic {magic!r}")
        except (struct.error, ValueError) as error:
            if message:
                self._count_malformed(error)
            self._drop(fd)
            return
        owner, self._next_owner = self._next_owner, self._next_owner + 1
        try:
            lock = os.open(self.dir.client_lock(owner), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            logger.error("cannot take client %d (pid %d): %s", owner, pid, error)
            self._drop(fd)
            return
        self._locks[owner] = lock
        self._spares[owner % SPARE_SLOTS] = _NO_SPARE
        if is_bootstrap:
            self._bootstrap, self._bootstrap_deadline = owner, None
        self.controller.connect(owner)
        self._clients[fd] = (client, owner)
        logger.info("client %d connected (pid %d)", owner, pid)
        with contextlib.suppress(OSError):
            client.send(_WELCOME.pack(MAGIC, owner))

    def _farewell(self, fd: int, *, died: bool) -> None:
        owner = self._clients[fd][1]
        self._drop(fd)
        self.controller.disconnect(owner, died=died)
        self._turns.rest(owner)
        for caller, envelope in self._turns.pull(owner):
            self._handle(caller, envelope)  # which says that it is not connected any more
        with contextlib.suppress(OSError):
            os.close(self._locks.pop(owner))
            os.unlink(self.dir.client_lock(owner))
        if owner == self._bootstrap and died:
            logger.warning("the bootstrap client died; ending the plane")
            self._stopping = True

    def _drop(self, fd: int) -> None:
        client, _ = self._clients.pop(fd)
        self._epoll.unregister(fd)
        client.close()

    # Spare extents: a client may take its spare without asking, the controller may take it back.

    def _grant(self, owner: int, number: int) -> None:
        # By its number, because a thread of the client may still think of one that was revoked.
        self._spares[owner % SPARE_SLOTS] = number

    def _revoke(self, owner: int) -> bool:
        lock = self._locks.get(owner)
        if lock is None:
            return False
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        try:
            if self._spares[owner % SPARE_SLOTS] == _NO_SPARE:
                return False
            self._spares[owner % SPARE_SLOTS] = _NO_SPARE
            return True
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)

    # Segments

    def _create_segment(self, number: int, size: int) -> None:
        fd = os.open(self.dir.segment(number), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, size)
        except OSError:
            os.close(fd)
            os.unlink(self.dir.segment(number))
            raise
        self._files[number] = fd

    def _destroy_segment(self, number: int) -> None:
        fd = self._files.pop(number)
        # Truncating frees the pages at once, even while clients still have the file mapped.
        with contextlib.suppress(OSError):
            os.ftruncate(fd, 0)
        os.close(fd)
        with contextlib.suppress(OSError):
            os.unlink(self.dir.segment(number))


def _send_some(to: socket.socket, data: bytes | bytearray) -> int:
    """How much of it the socket took: all, if the other end is gone, which is seen when it is read."""
    try:
        return to.send(data)
    except BlockingIOError:
        return 0
    except OSError as error:
        return 0 if error.errno in (errno.ENOBUFS, errno.ENOMEM) else len(data)


def _has_more(channel: socket.socket) -> bool:
    try:
        return bool(channel.recv(1, socket.MSG_PEEK))
    except OSError:
        return False


def serve(cfg: Mapping[str, Any], *, announce: Any = None, needs_bootstrap: bool = False) -> None:
    """Run a controller in this process until SIGTERM or SIGINT; ``announce(address)`` when it is ready."""
    server = Server(cfg, needs_bootstrap=needs_bootstrap)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.stop())
    if announce is not None:
        announce(server.dir.address)
    server.run()


def main() -> None:
    """``python -m rlplane.adapters.local.server``: what the bootstrap client starts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", required=True, help="the resolved config, as JSON")
    parser.add_argument("--ready-fd", type=int, required=True, help="the address is written here")
    options = parser.parse_args()
    logging.basicConfig(level=os.environ.get("RLPLANE_LOG_LEVEL", "WARNING").upper(), stream=sys.stderr)
    # A session of its own. Ctrl-C goes to the group of the clients, and the bootstrap client decides when the
    # plane ends. And Linux shares the cores out among sessions first: as one process among those of its
    # clients, who all wait for it, the controller would get as little as each of them.
    if os.getpgid(0) != os.getpid():
        os.setsid()

    def announce(address: str) -> None:
        os.write(options.ready_fd, address.encode())
        os.close(options.ready_fd)

    serve(json.loads(options.config), announce=announce, needs_bootstrap=True)


if __name__ == "__main__":
    main()
