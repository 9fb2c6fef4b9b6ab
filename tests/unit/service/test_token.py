"""A control service over TCP: only who shows its token is let in, and whoever is not is counted."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest

from rlplane.errors import PlaneConnectionError
from rlplane.service import protocol as wire
from rlplane.service.connection import SocketConnection
from rlplane.service.framing import message
from rlplane.service.server import Server
from rlplane.service.sockets import connect, listen
from rlplane.storage.keyed import KeyedHost

TOKEN = "f00d" * 16


@pytest.fixture
def address() -> Iterator[str]:
    listener, found = listen("tcp://127.0.0.1:0")
    server = Server(100, KeyedHost(None, lambda place: True), listener, token=TOKEN)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    yield found
    server.stop()
    assert server.wait_closed(10)
    thread.join(10)


def status(connection: SocketConnection) -> dict[str, int]:
    answer = connection.exchange(wire.ServiceStatus())
    assert isinstance(answer, wire.Done)
    found: dict[str, int] = answer.value
    return found


@pytest.mark.parametrize("wrong", ["", TOKEN[:-1], TOKEN + "0", "0" * 64, "ü"])
def test_a_wrong_token_is_refused_and_counted(
    address: str, wrong: str, caplog: pytest.LogCaptureFixture
) -> None:
    friend = SocketConnection(address, token=TOKEN, ack_timeout_s=10)
    before = status(friend)
    assert before["refused"] == 0 and before["clients"] == 1
    with caplog.at_level(logging.DEBUG, "rlplane"):
        for _ in range(2):
            with pytest.raises(PlaneConnectionError, match="the token is wrong"):
                SocketConnection(address, token=wrong, ack_timeout_s=10)
    after = status(friend)
    assert after["refused"] == 2 and after["clients"] == 1
    assert caplog.text.count("refused a connection") == 1, "a log is not filled by who knocks"
    assert TOKEN not in caplog.text
    friend.close()


def test_a_channel_of_a_client_needs_the_token_and_the_clients_secret(address: str) -> None:
    friend = SocketConnection(address, token=TOKEN, ack_timeout_s=10)
    hellos = [
        wire.Hello(wire.PROTOCOL_VERSION, TOKEN, 1, client=friend.client, secret=""),
        wire.Hello(wire.PROTOCOL_VERSION, TOKEN, 1, client=friend.client + 1, secret=""),
        wire.Hello(wire.PROTOCOL_VERSION, "", 1, client=friend.client, secret=friend._secret),
    ]
    for hello in hellos:
        with connect(address) as stranger:
            stranger.sendall(message(0, wire.encode(hello)))
            answer = b""
            while piece := stranger.recv(4096):
                answer += piece
            assert b"PlaneConnectionError" in answer
    assert status(friend)["refused"] == 3
    friend.close()


def test_a_request_before_the_introduction_is_malformed_and_changes_nothing(address: str) -> None:
    friend = SocketConnection(address, token=TOKEN, ack_timeout_s=10)
    with connect(address) as stranger:
        stranger.sendall(message(1, wire.encode(wire.Envelope(wire.ServiceStatus()))))
        # The next one it is sent is answered, so this one was looked at.
        stranger.sendall(message(0, wire.encode(wire.Hello(wire.PROTOCOL_VERSION, "", 1))))
        while stranger.recv(4096):
            pass
    after = status(friend)
    assert after["malformed"] == 1 and after["refused"] == 1 and after["requests"] == 1
    friend.close()
