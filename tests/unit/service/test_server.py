"""The service behind a socket, Unix-domain and TCP: who may connect, who has died, and what is malformed."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rlplane.control.rules import PartitionSpec
from rlplane.errors import ClientClosedError, PlaneConnectionError
from rlplane.service import connection as connection_module
from rlplane.service import protocol as wire
from rlplane.service import server as server_module
from rlplane.service.connection import SocketConnection
from rlplane.service.framing import Inbox, message
from rlplane.service.journal import Journal
from rlplane.service.lifeline import Lifeline
from rlplane.service.questions import status_of
from rlplane.service.recovery import recover
from rlplane.service.server import Server
from rlplane.service.sockets import connect, listen
from rlplane.storage.keyed import KeyedHost
from rlplane.storage.places import Layout

SPEC = PartitionSpec.checked("p", ["x"], 10**6, ["t"])


class RunningServer:
    """A server in a thread of its own."""

    def __init__(self, address: str, **options: Any) -> None:
        listener, self.address = listen(address)
        self.token = options.get("token", "")
        self.server = Server(10**6, KeyedHost(2**30, lambda place: True), listener, **options)
        self._thread = threading.Thread(target=self.server.run)
        self._thread.start()
        self._connections: list[SocketConnection] = []

    def client(self, **options: Any) -> SocketConnection:
        options = {"token": self.token, "ack_timeout_s": 20.0, **options}
        self._connections.append(SocketConnection(self.address, **options))
        return self._connections[-1]

    def raw(self, hello: wire.Hello | None = None) -> socket.socket:
        """A bare socket, which has introduced itself with ``hello``."""
        raw = connect(self.address)
        raw.settimeout(20)
        if hello is not None:
            raw.sendall(message(0, wire.encode(hello)))
        return raw

    def in_loop(self, function: Callable[[], Any]) -> Any:
        """What ``function`` returns when the loop calls it, after all that was sent before."""
        found: list[Any] = []
        called = threading.Event()

        def call() -> None:
            found.append(function())
            called.set()

        self.server.call_soon(call)
        assert called.wait(20)
        return found[0]

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = self.in_loop(lambda: status_of(self.server.service))
        return status

    def waiting(self) -> int:
        return len(self.in_loop(self.server.service.state.waiting))

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Inside, the service does nothing: as if its process were stopped."""
        stopped, go_on = threading.Event(), threading.Event()

        def stop() -> None:
            stopped.set()
            go_on.wait(60)

        self.server.call_soon(stop)
        assert stopped.wait(20)
        try:
            yield
        finally:
            go_on.set()

    def join(self) -> None:
        self._thread.join(20)
        assert not self._thread.is_alive() and self.server.wait_closed(0)

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        self.server.stop()
        self.join()


@pytest.fixture(params=["unix", "tcp"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"unix://{tmp_path}/control" if request.param == "unix" else "tcp://127.0.0.1:0"


@pytest.fixture
def plane(address: str) -> Iterator[RunningServer]:
    running = RunningServer(address, token="secret" if address.startswith("tcp") else "")
    yield running
    running.close()


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.002)


def put(connection: SocketConnection, *ids: str) -> wire.Answer:
    """Write a field that takes no bytes worth mentioning."""
    reserved = connection.exchange(wire.Reserve(64, 0.0))
    assert isinstance(reserved, wire.Reserved)
    layout = Layout("dense", "torch.uint8", (), len(ids), len(ids))
    number = reserved.place.number
    return connection.exchange(wire.Commit("p", 1, list(ids), ["x"], [layout], number, 64, 0.0))


def claim(size: int = 1, *, blocking: bool = True) -> wire.ClaimRequest:
    return wire.ClaimRequest("p", "t", ["x"], size, blocking, 600.0)


def ids_of(answer: wire.Answer) -> list[str]:
    assert isinstance(answer, wire.Claimed), answer
    return answer.ids


def in_thread(function: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Call in a thread; what it returned or raised is in the list when the thread has ended."""
    outcome: list[Any] = []

    def call() -> None:
        try:
            outcome.append(function())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    return thread, outcome


def read_answer(raw: socket.socket) -> tuple[int, Any]:
    inbox = Inbox(2**20)
    while True:
        piece = raw.recv(4096)
        assert piece, "the service hung up"
        for number, body in inbox.messages(memoryview(piece)):
            return number, wire.answer_decoder.decode(body)


def is_hung_up(raw: socket.socket) -> bool:
    """Wait until the service has closed the connection."""
    with contextlib.suppress(ConnectionResetError):
        while raw.recv(4096):
            pass
    return True


# Requests


def test_requests_of_several_clients_and_threads_are_answered(plane: RunningServer) -> None:
    first, second = plane.client(), plane.client()
    assert first.client != second.client
    assert first.exchange(wire.Register(SPEC)) == wire.Done()
    calls = [in_thread(partial(put, first, f"s{n}")) for n in range(8)]
    for thread, outcome in calls:
        thread.join(20)
        assert isinstance(outcome[0], wire.Done)
    listed = second.exchange(wire.ListIds("p"))
    assert isinstance(listed, wire.Done) and sorted(listed.value) == [f"s{n}" for n in range(8)]
    assert plane.status()["clients"] == 2


def test_a_claim_that_waits_is_answered_by_the_write_and_holds_up_nobody(plane: RunningServer) -> None:
    reader, writer = plane.client(), plane.client()
    reader.exchange(wire.Register(SPEC))
    thread, outcome = in_thread(lambda: reader.exchange(claim(2), waits_s=600))
    wait_until(lambda: plane.waiting() == 1)
    assert reader.exchange(wire.ListIds("p")) == wire.Done([])
    put(writer, "a")
    assert plane.waiting() == 1
    put(writer, "b")
    thread.join(20)
    assert ids_of(outcome[0]) == ["a", "b"]


def test_messages_that_no_socket_holds_at_once_arrive(plane: RunningServer) -> None:
    connection = plane.client()
    connection.exchange(wire.Register(SPEC))
    ids = [f"{number:02000}" for number in range(2_000)]
    tags: list[dict[str, Any]] = [{"n": number} for number in range(2_000)]
    assert connection.exchange(wire.Commit("p", 1, ids, [], [], None, 0, 0.0, tags)) == wire.Done()
    assert connection.exchange(wire.ListIds("p")) == wire.Done(ids)


def test_requests_whose_answers_are_not_read_wait_and_none_is_lost(plane: RunningServer) -> None:
    connection = plane.client()
    connection.exchange(wire.Register(SPEC))
    ids = [f"{number:0100}" for number in range(1000)]
    connection.exchange(wire.Commit("p", 1, ids, [], [], None, 0, 0.0, [{}] * 1000))
    hello = wire.Hello(
        wire.PROTOCOL_VERSION, plane.token, client=connection.client, secret=connection._secret
    )
    ask = wire.encode(wire.Envelope(wire.ListIds("p")))
    with plane.raw(hello) as raw:
        before = plane.status()["requests"]
        raw.sendall(b"".join(message(number, ask) for number in range(2000)))
        for _ in range(3):
            plane.status()
        assert plane.status()["requests"] - before < 1000, "answers of 100 KB each would fill its memory"
        inbox = Inbox(2**20)
        answered: list[int] = []
        while len(answered) < 2000:
            for number, body in inbox.messages(memoryview(raw.recv(2**20))):
                assert wire.answer_decoder.decode(body) == wire.Done(ids)
                answered.append(number)
    assert answered == list(range(2000))


# Who may connect


def test_a_wrong_token_is_refused_with_an_error_and_counted(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    running = RunningServer(address, token="secret")
    try:
        with caplog.at_level(logging.DEBUG):
            for wrong in ("", "wrong", "secret "):
                with pytest.raises(PlaneConnectionError, match="the token is wrong") as refused:
                    running.client(token=wrong)
                assert "secret" not in str(refused.value)
        assert running.server.service.refused == 3
        assert running.status()["clients"] == 0
        assert running.client().exchange(wire.Register(SPEC)) == wire.Done()
        warnings = [record for record in caplog.records if "refused" in record.getMessage()]
        assert len(warnings) == 1, "the others are only counted"
        assert "secret" not in caplog.text
    finally:
        running.close()


def test_another_version_of_the_protocol_is_told_both_versions(plane: RunningServer) -> None:
    with plane.raw(wire.Hello(wire.PROTOCOL_VERSION + 1, plane.token)) as raw:
        number, answer = read_answer(raw)
        assert number == 0 and answer.kind == "PlaneConnectionError"
        assert f"version {wire.PROTOCOL_VERSION + 1} of the protocol" in answer.message
        assert f"the service version {wire.PROTOCOL_VERSION}" in answer.message
        assert is_hung_up(raw)
    assert plane.server.service.refused == 1


@pytest.mark.parametrize("fault", ["another secret", "no secret", "another client", "a client that is gone"])
def test_a_channel_has_to_prove_whose_it_is(plane: RunningServer, fault: str) -> None:
    connection, other = plane.client(), plane.client()
    if fault == "another secret":
        connection._secret = other._secret
    elif fault == "no secret":
        connection._secret = ""
    elif fault == "another client":
        connection.client = 10**6
    else:
        other.close()
        connection.client, connection._secret = other.client, other._secret
    wait_until(lambda: plane.status()["clients"] == (1 if other.closed else 2))
    with pytest.raises(PlaneConnectionError, match="is not connected to this service"):
        connection.exchange(wire.Register(SPEC))
    assert plane.server.service.refused == 1


def test_a_connection_that_never_introduces_itself_is_closed(
    plane: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "_MUST_INTRODUCE_ITSELF_S", 0.3)
    connection = plane.client()
    with plane.raw() as silent, plane.raw() as stutterer:
        stutterer.sendall(message(0, b"rubbish"))
        assert is_hung_up(silent) and is_hung_up(stutterer)
    assert connection.exchange(wire.Register(SPEC)) == wire.Done(), "one that has is not"


def test_a_plane_where_nobody_answers_is_a_connection_error(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "_ANSWER_TIMEOUT_S", 0.2)
    listener, bound = listen(address)
    with listener, pytest.raises(PlaneConnectionError, match="cannot connect to the plane at"):
        SocketConnection(bound, ack_timeout_s=1.0)
    with pytest.raises(PlaneConnectionError, match="cannot connect to the plane at"):
        SocketConnection(bound, ack_timeout_s=1.0)


@pytest.mark.parametrize("wrong", ["ftp://host:1", "tcp://host", "tcp://:1", "tcp://host:port", "host:1", ""])
def test_what_is_not_an_address_is_refused_with_one_that_is(wrong: str) -> None:
    with pytest.raises(PlaneConnectionError, match="one looks like tcp://"):
        SocketConnection(wrong, ack_timeout_s=1.0)


# Malformed messages


def enter(plane: RunningServer, entrance: str) -> socket.socket:
    if entrance == "unknown":
        return plane.raw()
    hello = wire.Hello(wire.PROTOCOL_VERSION, plane.token)
    if entrance == "channel":
        mine = plane.client()
        hello = wire.Hello(wire.PROTOCOL_VERSION, plane.token, client=mine.client, secret=mine._secret)
    return plane.raw(hello)


@pytest.mark.parametrize("entrance", ["unknown", "lifeline", "channel"])
def test_malformed_messages_are_counted_and_the_connection_goes_on(
    plane: RunningServer, entrance: str, caplog: pytest.LogCaptureFixture
) -> None:
    with enter(plane, entrance) as raw, caplog.at_level(logging.WARNING):
        wait_until(lambda: plane.status()["clients"] == (0 if entrance == "unknown" else 1))
        for body in (b"", b"rubbish", b"\xc1", wire.encode(["Nothing"]), wire.encode([[[]]])):
            raw.sendall(message(1, body))
        wait_until(lambda: plane.server.service.malformed == 5)
        # And now something right.
        if entrance == "unknown":
            raw.sendall(message(0, wire.encode(wire.Hello(wire.PROTOCOL_VERSION, plane.token))))
            assert isinstance(read_answer(raw)[1], wire.Welcome)
        elif entrance == "lifeline":
            raw.sendall(message(0, wire.encode(wire.Goodbye())))
            wait_until(lambda: plane.status()["clients"] == 0)
        else:
            raw.sendall(message(7, wire.encode(wire.Envelope(wire.Register(SPEC)))))
            assert read_answer(raw) == (7, wire.Done())
    assert len([r for r in caplog.records if "malformed" in r.getMessage()]) == 1


@pytest.mark.parametrize("entrance", ["unknown", "lifeline", "channel"])
def test_a_header_that_announces_too_much_ends_the_connection(plane: RunningServer, entrance: str) -> None:
    with enter(plane, entrance) as raw:
        raw.sendall((257 * 2**20).to_bytes(4, "little") + bytes(100))
        assert is_hung_up(raw)
    assert plane.server.service.malformed == 1
    # Of a lifeline, that is its client's death; of a channel it is not.
    assert plane.status()["clients"] == (1 if entrance == "channel" else 0)
    assert plane.client().exchange(wire.Register(SPEC)) == wire.Done()


def test_a_message_in_single_bytes_is_a_message(plane: RunningServer) -> None:
    with plane.raw() as raw:
        for byte in message(0, wire.encode(wire.Hello(wire.PROTOCOL_VERSION, plane.token))):
            raw.sendall(bytes([byte]))
        assert isinstance(read_answer(raw)[1], wire.Welcome)


# Deaths and closes


@pytest.mark.parametrize("died", [True, False])
def test_the_claims_of_a_client_that_dies_or_closes_are_handed_out_again(
    plane: RunningServer, died: bool
) -> None:
    worker, other = plane.client(), plane.client()
    other.exchange(wire.Register(SPEC))
    put(other, "a", "b")
    assert ids_of(worker.exchange(claim())) == ["a"]
    # Forgetting closes the sockets and says nothing, as the kernel does for a process that dies.
    worker.forget() if died else worker.close()
    wait_until(lambda: plane.status()["clients"] == 1)
    assert ids_of(other.exchange(claim(2, blocking=False))) == ["a", "b"]


def test_a_channel_that_ends_is_not_the_end_of_its_client(plane: RunningServer) -> None:
    worker, other = plane.client(), plane.client()
    other.exchange(wire.Register(SPEC))
    put(other, "a", "b")
    thread, outcome = in_thread(lambda: worker.exchange(claim()))
    thread.join(20)
    del thread  # and with it its channel
    assert ids_of(outcome[0]) == ["a"]
    worker._local.channel = None
    assert ids_of(worker.exchange(claim())) == ["b"]
    assert plane.status()["clients"] == 2


def test_closing_ends_the_calls_that_wait_in_other_threads(plane: RunningServer) -> None:
    worker, other = plane.client(), plane.client()
    other.exchange(wire.Register(SPEC))
    thread, outcome = in_thread(lambda: worker.exchange(claim(), waits_s=600))
    wait_until(lambda: plane.waiting() == 1)
    worker.close()
    thread.join(20)
    assert isinstance(outcome[0], ClientClosedError)
    wait_until(lambda: plane.waiting() == 0 and plane.status()["clients"] == 1)
    with pytest.raises(ClientClosedError):
        worker.exchange(wire.ListIds("p"))
    put(other, "a")
    assert ids_of(other.exchange(claim(blocking=False))) == ["a"]


@pytest.mark.parametrize("when", ["while it waits", "when it has been answered", "before it is sent"])
def test_a_claim_whose_caller_was_interrupted_takes_nothing(
    plane: RunningServer, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    worker, other = plane.client(), plane.client()
    other.exchange(wire.Register(SPEC))
    send, receive = SocketConnection._send, SocketConnection._receive

    def interrupted_send(self: SocketConnection, *args: Any) -> None:
        if self is worker and when == "before it is sent":
            raise KeyboardInterrupt
        send(self, *args)

    def interrupted_receive(self: SocketConnection, *args: Any) -> wire.Answer:
        if self is not worker:
            return receive(self, *args)
        if when == "when it has been answered":
            put(other, "a")
            receive(self, *args)
        wait_until(lambda: plane.waiting() == (0 if when == "when it has been answered" else 1))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(SocketConnection, "_send", interrupted_send)
        patch.setattr(SocketConnection, "_receive", interrupted_receive)
        with pytest.raises(KeyboardInterrupt):
            worker.exchange(claim())
    wait_until(lambda: plane.waiting() == 0)
    if when != "when it has been answered":
        put(other, "a")
    # The client goes on, and its next claim in the same thread gets what the lost one would have got.
    assert ids_of(worker.exchange(claim(), waits_s=20)) == ["a"]


def test_the_end_of_the_service_is_told_to_those_who_wait_and_noticed_once(plane: RunningServer) -> None:
    ended: list[bool] = []
    worker = plane.client(on_end=lambda: ended.append(True))
    worker.exchange(wire.Register(SPEC))
    thread, outcome = in_thread(lambda: worker.exchange(claim(), waits_s=600))
    wait_until(lambda: plane.waiting() == 1)
    plane.server.stop()
    thread.join(20)
    assert isinstance(outcome[0], PlaneConnectionError) and "has ended or died" in str(outcome[0])
    assert ended == [True]
    with pytest.raises(PlaneConnectionError, match="has ended or died"):
        worker.exchange(wire.ListIds("p"))


def test_a_service_that_does_not_answer_in_time_is_a_connection_error(plane: RunningServer) -> None:
    worker = plane.client()
    worker.exchange(wire.Register(SPEC))
    put(worker, "a")
    worker._ack_timeout_s = 0.2
    with plane.stopped(), pytest.raises(PlaneConnectionError, match=r"has not answered for 0\.2 s"):
        worker.exchange(claim())
    # The request was abandoned: what it would have been given is still there.
    worker._ack_timeout_s = 20.0
    assert ids_of(worker.exchange(claim(blocking=False))) == ["a"]


@pytest.mark.parametrize("how", ["shutdown", "death"])
def test_the_plane_ends_with_its_bootstrap_client(address: str, how: str) -> None:
    running = RunningServer(address, needs_bootstrap=True)
    worker, bootstrap = running.client(), running.client(bootstrap=True)
    refused = worker.exchange(wire.Shutdown())
    assert isinstance(refused, wire.Failure) and refused.kind == "InvalidRequestError"
    if how == "shutdown":
        assert bootstrap.exchange(wire.Shutdown()) == wire.Done()
    else:
        bootstrap.forget()
    running.join()


def test_the_plane_goes_on_when_its_bootstrap_client_says_goodbye(plane: RunningServer) -> None:
    plane.client(bootstrap=True).close()
    assert plane.client().exchange(wire.Register(SPEC)) == wire.Done()


def test_a_service_whose_bootstrap_client_never_comes_ends(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "_BOOTSTRAP_MUST_CONNECT_S", 0.1)
    RunningServer(address, needs_bootstrap=True).join()


def test_a_service_whose_journal_was_lost_ends_too_if_its_bootstrap_client_never_comes(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "_BOOTSTRAP_MUST_CONNECT_S", 0.1)
    recovered = recover(tmp_path, 10**6, 2**30)
    plane = RunningServer(address, needs_bootstrap=True, journal=Journal(tmp_path), recovered=recovered)
    try:
        plane.join()
    finally:
        plane.server.stop()


# Leases


def more_than_fit(plane: RunningServer) -> int:
    """How many notices no socket of this kind holds, if nobody reads them."""
    return 5_000 if plane.address.startswith("unix") else 300_000


def test_leases_that_are_released_while_the_service_is_stopped_arrive_although_the_client_stays_idle(
    plane: RunningServer,
) -> None:
    reader, other = plane.client(), plane.client()
    other.exchange(wire.Register(SPEC))
    put(other, "a")
    leases = []
    for _ in range(3000):
        located = reader.exchange(wire.Locate("p", ["a"], ["x"]))
        assert isinstance(located, wire.Located)
        leases.append(located.lease)
    assert plane.status()["leases"] == 3000
    with plane.stopped():
        # Releasing one twice is harmless, so that more can be sent than are held.
        for number in range(more_than_fit(plane)):
            reader.release(leases[number % 3000])
        assert reader._lifeline._released, "the socket has taken all of them"
    wait_until(lambda: plane.status()["leases"] == 0)
    wait_until(lambda: not reader._lifeline._released)
    assert plane.server.service.malformed == 0
    assert plane.status()["clients"] == 2
    # The lifeline is still one: its end is noticed.
    reader.close()
    wait_until(lambda: plane.status()["clients"] == 1)


def test_a_goodbye_arrives_although_the_lifeline_is_full(
    plane: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    worker, other = plane.client(), plane.client()
    other.exchange(wire.Register(SPEC))
    put(other, "a", "b")
    assert ids_of(worker.exchange(claim())) == ["a"]
    with plane.stopped():
        for lease in range(more_than_fit(plane)):
            worker.release(10**6 + lease)
        closing = threading.Thread(target=worker.close)
        closing.start()
        closing.join(0.5)
    closing.join(20)
    wait_until(lambda: plane.status()["clients"] == 1)
    assert "client 0 closed; 1 claimed samples are handed out again" in caplog.text, "it has not died"
    assert ids_of(other.exchange(claim(2, blocking=False))) == ["a", "b"]


def test_leases_that_did_not_go_out_are_sent_along_with_the_next_request_or_the_goodbye(
    plane: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, other = plane.client(), plane.client(), plane.client()
    other.exchange(wire.Register(SPEC))
    put(other, "a")
    monkeypatch.setattr(Lifeline, "_flush", lambda self: None)
    for reader in (first, second):
        located = reader.exchange(wire.Locate("p", ["a"], ["x"]))
        assert isinstance(located, wire.Located)
        with monkeypatch.context() as patch:
            patch.setattr(Lifeline, "_send", lambda self, notice: False)
            reader.release(located.lease)
    assert plane.status()["leases"] == 2
    first.exchange(wire.ListIds("p"))
    assert plane.status()["leases"] == 1
    second.close()
    wait_until(lambda: plane.status()["leases"] == 0)


@pytest.mark.parametrize("moment", ["before it says what it holds", "after it has said what it holds"])
def test_a_lease_that_is_dropped_while_its_client_reconnects_comes_back(
    monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    plane = RunningServer("tcp://127.0.0.1:0", token="secret", reconnect_timeout_s=600)
    try:
        reader, other = plane.client(reconnect_timeout_s=600), plane.client()
        other.exchange(wire.Register(SPEC))
        put(other, "a")
        located = reader.exchange(wire.Locate("p", ["a"], ["x"]))
        assert isinstance(located, wire.Located)
        has_said = threading.Event()
        read_one = connection_module._read_one

        def read(connected: socket.socket) -> wire.Answer:
            has_said.set()
            return read_one(connected)

        monkeypatch.setattr(connection_module, "_read_one", read)
        with plane.stopped():
            with reader._reconnecting:
                reader._lifeline._socket.shutdown(socket.SHUT_RDWR)
                if moment.startswith("before"):
                    reader.release(located.lease)
            assert has_said.wait(20)
            if moment.startswith("after"):
                reader.release(located.lease)
        wait_until(lambda: reader.life == 1 and reader._lifeline.is_alive())
        wait_until(lambda: plane.status()["leases"] == 0)
        assert plane.status()["clients"] == 2
    finally:
        plane.close()


def test_a_child_that_was_forked_while_its_parent_reconnected_does_not_keep_it_alive(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane = RunningServer(address, journal=Journal(tmp_path), reconnect_timeout_s=600)
    child = None
    try:
        other = plane.client()
        has_said, has_forked = threading.Event(), threading.Event()
        read_one = connection_module._read_one

        def read(connected: socket.socket) -> wire.Answer:
            has_said.set()
            assert has_forked.wait(20)
            return read_one(connected)

        monkeypatch.setattr(connection_module, "_read_one", read)
        connecting = threading.Thread(target=plane.client)
        connecting.start()
        assert has_said.wait(20)
        child = os.fork()
        if not child:
            time.sleep(60)
            os._exit(0)
        has_forked.set()
        connecting.join(20)
        assert plane.status()["clients"] == 2
        dying = plane._connections.pop()
        assert dying is not other
        os.close(dying._lifeline._socket.detach())  # as the kernel does it
        wait_until(lambda: plane.status()["clients"] == 1)
    finally:
        if child:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        plane.close()


def test_answers_are_not_remembered_for_as_long_as_another_call_waits(address: str, tmp_path: Path) -> None:
    plane = RunningServer(address, journal=Journal(tmp_path))
    client = plane.client()
    client.exchange(wire.Register(SPEC))
    waiting = threading.Thread(target=client.exchange, args=(claim(101),), kwargs={"waits_s": 600})
    waiting.start()
    wait_until(lambda: plane.waiting() == 1)
    for number in range(100):
        put(client, f"s{number}")
    remembered = plane.in_loop(lambda: len(plane.server.service.clients[client.client].answers))
    assert remembered < 5
    put(client, "the last one")
    waiting.join(60)
    plane.close()


def test_a_plane_that_is_closed_tells_its_clients_not_to_wait_for_it(address: str, tmp_path: Path) -> None:
    plane = RunningServer(address, journal=Journal(tmp_path), reconnect_timeout_s=600)
    client = plane.client(reconnect_timeout_s=600)
    client.exchange(wire.Register(SPEC))
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            client.exchange(claim(), waits_s=600)
        except PlaneConnectionError as error:
            errors.append(error)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    wait_until(lambda: plane.waiting() == 1)
    plane.server.stop()
    plane.join()
    waiting.join(60)
    assert errors and not client.closed
    client.close()
