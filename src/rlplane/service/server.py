"""The control service behind a socket: one thread, one loop, over a Unix socket or TCP.

Every client keeps one connection open for as long as it lives, its lifeline: the kernel closes it when the
client dies, so a death is noticed at once and a stopped client is not taken for a dead one. Over TCP, a host
that vanishes is noticed by keep-alive. Requests come over channels, of which a client has one for each of
its threads.

It imports no torch, so that it starts in a fraction of a second.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import secrets
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

import msgspec

from rlplane.errors import PlaneConnectionError
from rlplane.service import protocol as wire
from rlplane.service.clients import PendingRequest
from rlplane.service.core import ControlService
from rlplane.service.forked_dump import ForkedDumps
from rlplane.service.framing import LONGEST, MessageTooLong, message
from rlplane.service.journal import Journal
from rlplane.service.long_answers import LongAnswer, is_long_answer
from rlplane.service.peers import Peer, send_some
from rlplane.service.recovery import About, JournaledHost, Recovered, resume, unreferenced
from rlplane.service.sockets import check_peer, prepare_tcp
from rlplane.service.stall import MAY_LOOK_LONG, look_ahead
from rlplane.storage.places import Place, StorageHost

__all__ = ["Server"]

logger = logging.getLogger(__name__)

_BOOTSTRAP_MUST_CONNECT_S = 30.0
_MUST_INTRODUCE_ITSELF_S = 10.0
_OUT_OF_FILES_S = 0.5
_MAY_HAVE_STOOD_STILL_S = 0.05
_PIECE = 128 * 1024  # read at once from one connection, so that none holds up the others
_TIDY_S = 1.0  # how often an idle service looks for what it can give back
_LOOK_S = 0.1  # how often a busy one looks at what has a time of its own
# How long a client may take to come back whose connection broke while the service lived.
_GRACE_S = 2.0


class Server:
    """Serves one plane until it is told to stop.

    Args:
        capacity: The most samples that may be live.
        storage: The service's half of the storage; closed with the server.
        listener: A bound and listening socket, Unix-domain or TCP.
        token: What a client has to show. Empty where the file system decides who may connect.
        needs_bootstrap: End when the bootstrap client dies, or does not come.
        journal: Where every change is noted before it is answered; None to go without.
        recovered: The service of before, if this one goes on in its place.
        reconnect_timeout_s: How long the clients of before may take to come back.
        reserve_for_live: The share of the bytes that only samples which exist may use.
    """

    def __init__(
        self,
        capacity: int,
        storage: StorageHost,
        listener: socket.socket,
        *,
        token: str = "",
        needs_bootstrap: bool = False,
        journal: Journal | None = None,
        recovered: Recovered | None = None,
        reconnect_timeout_s: float = 0.0,
        reserve_for_live: float = 0.0,
    ) -> None:
        self._journal = journal
        noted = storage if journal is None else JournaledHost(storage, journal, recovered)
        if recovered is None:
            self.service = ControlService(
                capacity, noted, self._send, journal, reserve_for_live=reserve_for_live
            )
        else:
            self.service = recovered.service
            self.service.storage, self.service.journal = noted, journal
            self.service.deliver = self._send
        self._storage, self._listener, self._token = noted, listener, token
        self._epoll = select.epoll()
        listener.setblocking(False)
        self._epoll.register(listener.fileno(), select.EPOLLIN)
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake_fd, select.EPOLLIN)
        self._called: deque[Callable[[], None]] = deque()
        self._dumps = ForkedDumps(self._epoll)
        self.service.checkpoints.dump_apart = self._dumps.start
        # Requests that are handled when enough tags have been looked at, with what looks.
        self._looking: deque[tuple[Callable[[], bool], PendingRequest, wire.Envelope, bytes]] = deque()
        self._busy_since = 0.0
        self._look_at = 0.0
        self._listen_again_at: float | None = None
        self._peers: dict[int, Peer] = {}  # by number, which is never used again
        self._peers_by_fd: dict[int, Peer] = {}
        self._unknown: dict[int, Peer] = {}  # those that have not introduced themselves yet
        self._next_peer = 1 if recovered is None else recovered.next_channel
        self._unsent: list[tuple[Peer, int, wire.Answer]] = []
        self._long_answers: deque[tuple[Peer, LongAnswer]] = deque()
        self._piece = memoryview(bytearray(_PIECE))
        self._secrets: dict[int, str] = {}
        self._next_client = 0
        self._bootstrap: int | None = None
        must_come = needs_bootstrap and (recovered is None or recovered.bootstrap is None)
        self._bootstrap_deadline = time.monotonic() + _BOOTSTRAP_MUST_CONNECT_S if must_come else None
        # Clients whose lifeline is lost and who may come back, with the time at which they are given up.
        self._missing: dict[int, float] = {}
        self._reconnect_timeout_s = reconnect_timeout_s
        self._in_use: dict[int, Place] = {}  # the places of before, until all clients are back
        if recovered is not None:
            self._secrets, self._bootstrap = dict(recovered.secrets), recovered.bootstrap
            self._next_client, self._in_use = recovered.next_client, recovered.places
            self._missing = dict.fromkeys(self._secrets, time.monotonic() + reconnect_timeout_s)
            self.service.set_clock(time.monotonic(), time.time())
            self._finish_recovery()
        self._stopping = False
        self._closed = threading.Event()

    def run(self) -> None:
        """Serve until :meth:`stop`, a shutdown request, or the death of the bootstrap client."""
        service, journal = self.service, self._journal
        self._set_time()
        try:
            while not self._stopping:
                due = service.next_deadline()
                if due <= self._busy_since:
                    self._set_time()
                    self._do(service.expire)
                    due = service.next_deadline()
                idle = _LOOK_S if self._missing else _TIDY_S
                wait = 0.0 if self._has_work else min(due - self._busy_since, idle)
                began = self._busy_since
                events = self._epoll.poll(max(wait, 0.0))
                self._set_time()
                if events and service.now - began > _MAY_HAVE_STOOD_STILL_S:
                    # A process can be stopped with these in its hands. What was abandoned meanwhile must be
                    # among them.
                    events = list((dict(events) | dict(self._epoll.poll(0))).items())
                for fd, event in self._lifelines_first(events):
                    try:
                        self._serve(fd, event)
                    except Exception:
                        logger.exception("the service has a bug, and goes on without this connection")
                        if fd in self._peers_by_fd:
                            self._hang_up(self._peers_by_fd[fd])
                    if self._unsent or (journal is not None and journal.records):
                        self._send_answers()
                    self._note_stall()
                if self._looking:
                    self._do(self._look_on)
                if service.has_work:
                    self._do(self._go_on)
                if self._long_answers:
                    self._encode_on()
                    self._note_stall()
                if not events or service.now >= self._look_at:
                    self._look_at = service.now + _LOOK_S
                    self._look_at_the_clock(is_idle=not events and not self._has_work)
                    self._send_answers()
                    self._note_stall()
        finally:
            if self._stopping:
                self._say_farewell()
            self.close()

    @property
    def _has_work(self) -> bool:
        return bool(self._looking or self._long_answers or self.service.has_work)

    def _say_farewell(self) -> None:
        """Tell the clients that the plane has ended, so that none waits for it to come back."""
        farewell = message(0, wire.encode(wire.failure_of(PlaneConnectionError("the plane was closed"))))
        for peer in self._peers.values():
            if peer.is_lifeline:
                send_some(peer.socket, farewell)

    def stop(self) -> None:
        """Make :meth:`run` return. Safe in a signal handler and in other threads."""
        self._stopping = True
        with contextlib.suppress(OSError, ValueError):
            os.eventfd_write(self._wake_fd, 1)

    def call_soon(self, function: Callable[[], None]) -> None:
        """Have ``function`` called in the loop. For other threads."""
        self._called.append(function)
        with contextlib.suppress(OSError, ValueError):
            os.eventfd_write(self._wake_fd, 1)

    def wait_closed(self, timeout_s: float) -> bool:
        """Wait until the loop has ended, in another thread."""
        return self._closed.wait(timeout_s)

    def close(self) -> None:
        """Give up the sockets, and the storage with everything in it."""
        for peer in self._peers.values():
            peer.socket.close()
        for known in (self._peers, self._peers_by_fd, self._unknown):
            known.clear()
        self._listener.close()
        self._dumps.close()
        self._epoll.close()
        os.close(self._wake_fd)
        self._wake_fd = -1
        self._storage.close()
        self._closed.set()

    def _lifelines_first(self, events: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """After a pause of the service, what was abandoned meanwhile must be known before it is done."""
        if len(events) < 2:
            return events
        peers = self._peers_by_fd
        return sorted(events, key=lambda event: event[0] not in peers or not peers[event[0]].is_lifeline)

    def _set_time(self) -> None:
        service = self.service
        self._busy_since = service.state.now = time.monotonic()
        service.wall = time.time()

    def _do(self, what: Callable[[], None]) -> None:
        what()
        self._send_answers()
        self._note_stall()

    def _note_stall(self) -> None:
        now = time.monotonic()
        self.service.stall.record(now - self._busy_since, now)
        self._busy_since = now

    def _look_at_the_clock(self, *, is_idle: bool) -> None:
        now = self.service.now
        if is_idle:
            self._storage.tidy(now)
        if self._listen_again_at is not None and now >= self._listen_again_at:
            self._listen_again_at = None
            self._epoll.register(self._listener.fileno(), select.EPOLLIN)
        if self._bootstrap_deadline is not None and now > self._bootstrap_deadline:
            logger.error("the bootstrap client never connected; ending")
            self._stopping = True
        for client in [client for client, due in self._missing.items() if due <= now]:
            self._give_up_client(client)
        if self._journal is not None and isinstance(self._storage, JournaledHost):
            self._journal.tidy()
            if self._journal.is_long:
                self._send_answers()
                self._journal.compact((tuple(self._about(self._storage)), self.service.dump()))
        for peer in list(self._unknown.values()):
            if now - peer.accepted > _MUST_INTRODUCE_ITSELF_S:
                self._hang_up(peer)

    def _serve(self, fd: int, event: int) -> None:
        peer = self._peers_by_fd.get(fd)
        if peer is not None:
            if event & select.EPOLLOUT:
                self._flush(peer)
            if event & ~select.EPOLLOUT:
                self._receive(peer)
        elif fd == self._listener.fileno():
            self._accept()
        elif fd == self._wake_fd:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(fd)
            while self._called:
                self._called.popleft()()
        elif fd in self._dumps:
            self._dumps.finish(fd)

    # Connections

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            logger.error("cannot accept a client: %s", error)
            # The connection stays in the kernel's queue: look again when a file may have been closed.
            self._epoll.unregister(self._listener.fileno())
            self._listen_again_at = self.service.now + _OUT_OF_FILES_S
            return
        try:
            check_peer(accepted)
        except PermissionError as error:
            self.service.refused += 1
            logger.warning("refused a connection: %s", error)
            accepted.close()
            return
        accepted.setblocking(False)
        prepare_tcp(accepted)
        peer = Peer(self._next_peer, accepted, self.service.now)
        self._next_peer += 1
        self._peers[peer.number] = self._peers_by_fd[accepted.fileno()] = self._unknown[peer.number] = peer
        self._epoll.register(accepted.fileno(), select.EPOLLIN)

    def _receive(self, peer: Peer) -> None:
        # One piece: if there is more, epoll says so again, after the others had their turn.
        try:
            size = peer.socket.recv_into(self._piece)
        except BlockingIOError:
            return
        except OSError:
            size = 0
        if not size:
            self._hang_up(peer)
            return
        try:
            messages = peer.inbox.messages(self._piece[:size])
        except MessageTooLong as error:
            self._count_malformed(error)
            self._hang_up(peer)
            return
        for number, body in messages:
            if peer.has_to_wait:
                # These are views of what is read into next.
                peer.unserved.append((number, memoryview(bytes(body))))
            else:
                self._serve_message(peer, number, body)

    def _serve_message(self, peer: Peer, number: int, body: memoryview) -> None:
        if peer.number not in self._peers:
            return  # it was hung up on
        try:
            self._message(peer, number, body)
        except (ValueError, msgspec.MsgspecError, RecursionError) as error:
            self._count_malformed(error)
        self._send_answers()

    def _message(self, peer: Peer, number: int, body: memoryview) -> None:
        if peer.client is None:
            self._introduce(peer, number, wire.hello_decoder.decode(body))
        elif not peer.is_lifeline:
            raw = bytes(body)
            self._request(peer, number, wire.envelope_decoder.decode(raw), raw)
        else:
            match wire.notice_decoder.decode(body):
                case wire.Release(lease):
                    self.service.release(peer.client, lease)
                case wire.Abandon(abandoned):
                    # The request may still be on its way through one of the client's channels. The service
                    # remembers the number, and does not do it when it arrives.
                    self.service.abandon(peer.client, abandoned)
                case wire.Goodbye():
                    self._end_client(peer, died=False)

    def _introduce(self, peer: Peer, number: int, hello: wire.Hello) -> None:
        problem = None
        if hello.version != wire.PROTOCOL_VERSION:
            problem = (
                f"this client speaks version {hello.version} of the protocol, the service version "
                f"{wire.PROTOCOL_VERSION}: install the same rlplane on both sides"
            )
        elif not hmac.compare_digest(hello.token.encode(), self._token.encode()):
            problem = "the token is wrong: this client does not belong to the plane"
        elif hello.resumes and hello.client not in self._secrets:
            problem = f"client {hello.client} was given up by this service, or has never been one"
        elif hello.client is not None and not self._is_secret_of(hello.client, hello.secret):
            problem = f"client {hello.client} is not connected to this service"
        if problem is not None:
            self._refuse(peer, number, problem)
            return
        if hello.client is not None:
            del self._unknown[peer.number]
            peer.client = hello.client
            if hello.resumes:
                self._resume(peer, number, hello)
            return
        client, self._next_client = self._next_client, self._next_client + 1
        secret = secrets.token_hex(16)
        try:
            self.service.connect(client, secret, bootstrap=hello.bootstrap)
        except OSError as error:
            self._refuse(peer, number, f"the control service cannot take one more client: {error}")
            return
        del self._unknown[peer.number]
        peer.client, peer.is_lifeline, self._secrets[client] = client, True, secret
        if hello.bootstrap:
            self._bootstrap, self._bootstrap_deadline = client, None
        logger.info("client %d connected (pid %d)", client, hello.pid)
        self._unsent.append((peer, number, self._welcome(client)))

    def _refuse(self, peer: Peer, number: int, problem: str) -> None:
        self.service.refused += 1
        if self.service.refused == 1:
            logger.warning("refused a connection (%s); further ones are only counted", problem)
        self._send_answer(peer, number, wire.failure_of(PlaneConnectionError(problem)))
        self._hang_up(peer)

    def _resume(self, peer: Peer, number: int, hello: wire.Hello) -> None:
        """A client of before is there again."""
        client = peer.client
        assert client is not None
        lifelines = [each for each in self._peers.values() if each.client == client and each.is_lifeline]
        for other in lifelines:
            # Its end has noticed sooner than this one that the connection is broken.
            other.is_lifeline = False
            self._hang_up(other)
        peer.is_lifeline = True
        self._missing.pop(client, None)
        in_use = self._still_in_use() if self._in_use else {}
        resume(self.service, client, hello.leases, hello.abandoned, in_use)
        logger.info("client %d is back (pid %d)", client, hello.pid)
        self._unsent.append((peer, number, self._welcome(client)))
        self._finish_recovery()

    def _welcome(self, client: int) -> wire.Welcome:
        # Over a network, a connection can be lost although the service lives.
        may_come_back = self._journal is not None or self._listener.family != socket.AF_UNIX
        return wire.Welcome(client, self._secrets[client], may_come_back and self._reconnect_timeout_s > 0)

    def _finish_recovery(self) -> None:
        """When all clients of before are back or given up: what none of them holds is free."""
        if self._missing or not self._in_use:
            return
        self.service.table.stop_keeping(self.service.storage)
        for place in unreferenced(self.service, self._still_in_use()):
            self._storage.free(place)
        self._in_use = {}
        self.service.room_came_free()

    def _still_in_use(self) -> dict[int, Place]:
        """The places of before that were not freed since, as they are now: a commit has made some shorter."""
        assert isinstance(self._storage, JournaledHost)
        now = self._storage.in_use
        return {number: now[number] for number in self._in_use if number in now}

    def _about(self, noted: JournaledHost) -> About:
        return About(
            self._secrets,
            self._bootstrap,
            self._next_client,
            self._next_peer,
            noted.in_use,
            noted.last_place,
            noted.given_back,
        )

    def _give_up_client(self, client: int) -> None:
        del self._missing[client]
        self._secrets.pop(client, None)
        self.service.disconnect(client, died=True)
        self._finish_recovery()
        if client == self._bootstrap:
            logger.warning("the bootstrap client did not come back; ending the plane")
            self._stopping = True

    def _is_secret_of(self, client: int, secret: str) -> bool:
        known = self._secrets.get(client)
        return known is not None and hmac.compare_digest(known.encode(), secret.encode())

    def _end_client(self, peer: Peer, *, died: bool) -> None:
        client = peer.client
        assert client is not None
        peer.is_lifeline = False
        self._hang_up(peer)
        if died and peer.socket.family != socket.AF_UNIX and self._reconnect_timeout_s:
            # Over a network a connection can end although both sides live. A dead process does not come back.
            self._missing[client] = self.service.now + min(self._reconnect_timeout_s, _GRACE_S)
            return
        self._secrets.pop(client, None)
        self.service.disconnect(client, died=died)
        if client == self._bootstrap and died:
            logger.warning("the bootstrap client died; ending the plane")
            self._stopping = True

    def _hang_up(self, peer: Peer) -> None:
        if peer.is_lifeline:
            self._end_client(peer, died=True)
            return
        if self._peers.pop(peer.number, None) is None:
            return
        self._unknown.pop(peer.number, None)
        self._long_answers = deque(item for item in self._long_answers if item[0] is not peer)
        del self._peers_by_fd[peer.socket.fileno()]
        self._epoll.unregister(peer.socket.fileno())
        peer.socket.close()
        if peer.client is not None:
            self.service.hang_up(peer.number)

    # Requests

    def _request(self, peer: Peer, number: int, envelope: wire.Envelope, body: bytes) -> None:
        assert peer.client is not None
        request = PendingRequest(peer.client, number, peer.number)
        if isinstance(envelope.request, wire.Shutdown) and peer.client == self._bootstrap:
            self._send(request, wire.Done())
            self._stopping = True
            return
        if self._looking and isinstance(envelope.request, wire.Withdraw):
            # Of these none is answered any more, so none may be begun.
            ended = {(peer.client, number) for number in envelope.request.numbers}
            self._looking = deque(
                item for item in self._looking if (item[1].client, item[1].number) not in ended
            )
        if type(envelope.request) in MAY_LOOK_LONG:
            look = look_ahead(self.service.state, envelope.request)
            if look is not None and not look():
                self._looking.append((look, request, envelope, body))
                return
        self._handle(request, envelope, body)

    def _look_on(self) -> None:
        """Look at some more samples for a request with a condition, and handle it when all are known."""
        look, request, envelope, body = self._looking.popleft()
        if request.channel not in self._peers:
            return  # nobody reads the answer
        if look():
            self._handle(request, envelope, body)
        else:
            self._looking.append((look, request, envelope, body))

    def _handle(self, request: PendingRequest, envelope: wire.Envelope, body: bytes) -> None:
        try:
            self.service.handle(request, envelope, body)
        except Exception as error:
            logger.exception("a %s request failed", type(envelope.request).__name__)
            self._send(request, wire.Failure("", f"{type(error).__name__}: {error}"))

    def _go_on(self) -> None:
        try:
            self.service.go_on()
        except Exception:
            logger.exception("a long request failed")

    def _count_malformed(self, error: Exception) -> None:
        self.service.malformed += 1
        if self.service.malformed == 1:
            logger.warning("ignored a malformed message (%s); further ones are only counted", error)

    # Answers

    def _send(self, request: PendingRequest, answer: wire.Answer) -> None:
        peer = self._peers.get(request.channel)
        if peer is not None:
            self._unsent.append((peer, request.number, answer))

    def _send_answers(self) -> None:
        """Between inputs: write the journal, and then say what is in it."""
        if self._journal is not None:
            self._journal.flush()
        answers, self._unsent = self._unsent, []
        for peer, number, answer in answers:
            self._send_answer(peer, number, answer)

    def _send_answer(self, peer: Peer, number: int, answer: wire.Answer) -> None:
        if peer.number not in self._peers:
            return  # it has hung up meanwhile
        if is_long_answer(answer):
            peer.long_answers += 1
            self._long_answers.append((peer, LongAnswer(number, answer)))
            return
        body = wire.encode(answer)
        if len(body) > LONGEST:
            body = wire.encode(
                wire.Failure("", f"the answer has {len(body)} bytes, which is too much for one")
            )
        self._send_message(peer, message(number, body))

    def _encode_on(self) -> None:
        """Encode some more of a long answer, and send it when that is done."""
        peer, answer = self._long_answers.popleft()
        if not answer.encode_some():
            self._long_answers.append((peer, answer))
            return
        peer.long_answers -= 1
        self._send_message(peer, answer.message())
        self._serve_held_up(peer)

    def _send_message(self, peer: Peer, data: bytes | bytearray) -> None:
        if peer.unsent:
            peer.unsent += data
            return
        sent = send_some(peer.socket, data)
        if sent < len(data):
            peer.unsent = data if isinstance(data, bytearray) else bytearray(data)
            del peer.unsent[:sent]
            # As long as a client does not read its answers, no further requests are read from it.
            self._epoll.modify(peer.socket.fileno(), select.EPOLLOUT)

    def _flush(self, peer: Peer) -> None:
        del peer.unsent[: send_some(peer.socket, peer.unsent)]
        self._serve_held_up(peer)
        if not peer.unsent and peer.number in self._peers:
            self._epoll.modify(peer.socket.fileno(), select.EPOLLIN)

    def _serve_held_up(self, peer: Peer) -> None:
        while peer.unserved and not peer.has_to_wait:
            self._serve_message(peer, *peer.unserved.popleft())
