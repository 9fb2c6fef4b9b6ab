"""Messages from other machines: who has the secret gets in, and nobody else."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import msgspec
import pytest
import zmq

from rlplane.errors import ConfigError
from rlplane.transport import (
    MessageCodec,
    Pattern,
    ZmqMessagePublisher,
    ZmqMessageSubscriber,
    check_address,
    make_topic,
)
from rlplane.transport.curve import Address, prepare_client, without_secret


class Text(MessageCodec[str]):
    topic = make_topic("text")

    def encode(self, item: str) -> tuple[bytes, bytes]:
        return self.topic, msgspec.msgpack.encode(item)

    def decode(self, payload: bytes) -> str:
        return msgspec.msgpack.decode(payload, type=str)

    def on_decode_error(self, payload: bytes, exc: Exception) -> str | None:
        return None


@pytest.fixture
def collector(tmp_path: Path) -> Iterator[ZmqMessageSubscriber[str]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    subscriber = ZmqMessageSubscriber(Text(), f"ipc://{tmp_path}/s", pattern=Pattern.COLLECT, context=context)
    with closing(subscriber):
        yield subscriber
    context.term()


def publisher(address: str) -> ZmqMessagePublisher[str]:
    return ZmqMessagePublisher(Text(), address, pattern=Pattern.COLLECT, linger=0)


def test_messages_come_in_by_the_encrypted_door_and_still_by_the_other(
    collector: ZmqMessageSubscriber[str],
) -> None:
    remote = collector.listen_encrypted("127.0.0.1")
    check_address(remote)
    with closing(publisher(remote)) as far, closing(publisher(collector.address)) as near:
        far.publish("from another machine")
        assert collector.receive(60) == "from another machine"
        near.publish("from this one")
        assert collector.receive(60) == "from this one"


def test_nobody_gets_in_without_both_keys(collector: ZmqMessageSubscriber[str]) -> None:
    right = Address.parse(collector.listen_encrypted("127.0.0.1"))
    other_public, other_secret = zmq.curve_keypair()
    strangers = [
        f"tcp://{right.place}",
        str(right._replace(client_secret=other_secret)),
        str(right._replace(server_public=other_public)),
    ]
    with zmq.Context() as context, ExitStack() as stack:
        welcomes = [stack.enter_context(context.socket(zmq.PAIR)) for _ in strangers]
        for number, (address, welcome) in enumerate(zip(strangers, welcomes, strict=True)):
            stranger = stack.enter_context(context.socket(zmq.PUSH))
            stranger.setsockopt(zmq.LINGER, 0)
            stranger.monitor(f"inproc://{number}", zmq.EVENT_HANDSHAKE_SUCCEEDED)
            welcome.connect(f"inproc://{number}")
            stranger.connect(prepare_client(stranger, address))
            stranger.send(b"let me in", zmq.NOBLOCK)
        with closing(publisher(str(right))) as known:
            known.publish("from a friend")
            assert collector.receive(60) == "from a friend"
        # The strangers have had the same time, and more attempts than one.
        assert collector.receive(1) is None and collector.n_decode_errors == 0
        assert not any(welcome.poll(200) for welcome in welcomes)


def test_a_broadcast_reaches_those_who_have_both_keys_and_nobody_else(tmp_path: Path) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sender = ZmqMessagePublisher(Text(), f"ipc://{tmp_path}/b", resend_last=True, linger=0, context=context)
    right = Address.parse(sender.listen_encrypted("127.0.0.1"))
    _, other_secret = zmq.curve_keypair()
    addresses = [f"tcp://{right.place}", str(right._replace(client_secret=other_secret))]
    with (
        closing(sender),
        closing(ZmqMessageSubscriber(Text(), addresses[0])) as plain,
        closing(ZmqMessageSubscriber(Text(), addresses[1])) as stranger,
        closing(ZmqMessageSubscriber(Text(), str(right))) as far,
        closing(ZmqMessageSubscriber(Text(), sender.address)) as near,
    ):
        assert sender.wait_for_subscribers(2, 60)
        sender.publish("news")
        assert far.receive(60) == near.receive(60) == "news"
        # The strangers have had the same time, and more attempts than one.
        assert plain.receive(1) is None and stranger.receive(1) is None and sender.n_subscribers == 2
    context.term()


def test_what_travels_cannot_be_read_on_the_way(collector: ZmqMessageSubscriber[str]) -> None:
    right = Address.parse(collector.listen_encrypted("127.0.0.1"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        place = f"127.0.0.1:{listener.getsockname()[1]}"
        with closing(publisher(str(right._replace(place=place)))) as sender:
            sender.publish("a secret of the job")
            target = ("127.0.0.1", int(right.place.rpartition(":")[2]))
            with listener.accept()[0] as line, socket.create_connection(target) as onward:
                seen = relay(line, onward, collector)
    assert b"a secret of the job" not in seen and len(seen) > 100
    assert right.server_public not in seen and right.client_secret not in seen


def relay(line: socket.socket, onward: socket.socket, collector: ZmqMessageSubscriber[str]) -> bytes:
    """Pass on what both say until the message has arrived; all that was said."""
    seen = b""
    for end in (line, onward):
        end.settimeout(0.05)
    for _ in range(1200):
        for one, other in ((line, onward), (onward, line)):
            try:
                said = one.recv(65536)
            except TimeoutError:
                continue
            seen += said
            other.sendall(said)
        if collector.receive(0) == "a secret of the job":
            return seen
    raise AssertionError("the message did not arrive")


def test_an_address_is_shown_without_its_secret() -> None:
    public, secret = zmq.curve_keypair()
    address = str(Address(public, secret, "10.0.0.1:5555"))
    assert Address.parse(address) == (public, secret, "10.0.0.1:5555")
    assert without_secret(address) == "curve://…@10.0.0.1:5555"
    assert without_secret("tcp://127.0.0.1:1") == "tcp://127.0.0.1:1"
    with pytest.raises(ConfigError) as caught:
        check_address(address.replace("10.0.0.1:5555", "nowhere"))
    assert address[8:40] not in str(caught.value)
