"""Publisher and subscriber over ZeroMQ: delivery, faults in the codec, and the ready checks."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import pytest
import zmq

from rlplane.errors import ConfigError, InvalidRequestError, PlaneConnectionError
from rlplane.transport import (
    TOPIC_FRAME_SIZE,
    Pattern,
    ZmqMessagePublisher,
    ZmqMessageSubscriber,
    check_address,
    make_topic,
)

TOPIC = make_topic("test")


class TextCodec:
    """Text; ``bad`` decides what happens to payloads that are not UTF-8."""

    def __init__(self, bad: str = "drop") -> None:
        self.bad = bad

    def encode(self, item: str) -> tuple[bytes, bytes]:
        return TOPIC, item.encode("utf-8", "surrogateescape")

    def decode(self, payload: bytes) -> str:
        if payload == b"bug":
            raise KeyError("no decoder library raises this")
        return payload.decode()

    def on_decode_error(self, payload: bytes, exc: Exception) -> str | None:
        if self.bad == "raise":
            raise exc
        return None if self.bad == "drop" else f"substitute for {payload!r}"


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/socket"


def broadcast(address: str, **options: object) -> ZmqMessagePublisher[str]:
    return ZmqMessagePublisher(TextCodec(), address, **options)  # type: ignore[arg-type]


def subscribe(address: str, codec: TextCodec | None = None, **options: object) -> ZmqMessageSubscriber[str]:
    return ZmqMessageSubscriber(codec or TextCodec(), address, **options)  # type: ignore[arg-type]


def test_nothing_is_lost_once_the_publisher_has_seen_its_subscribers(address: str) -> None:
    with broadcast(address, sndhwm=0) as publisher, subscribe(address) as one, subscribe(address) as two:
        assert publisher.wait_for_subscribers(2, 10.0)
        for number in range(200):
            publisher.publish(str(number))
        for subscriber in (one, two):
            assert [subscriber.receive(10.0) for _ in range(200)] == [str(n) for n in range(200)]


def test_waiting_for_subscribers_that_never_come_ends_at_the_deadline(address: str) -> None:
    with broadcast(address) as publisher:
        assert not publisher.wait_for_subscribers(1, 0.05)


def test_a_late_subscriber_gets_the_last_message_at_once(address: str) -> None:
    async def run() -> str | None:
        with broadcast(address, resend_last=True) as publisher:
            publisher.attach(asyncio.get_running_loop())
            publisher.publish("early")
            publisher.publish("last")
            with subscribe(address) as late:
                # Nothing is published any more: only the subscription can bring the message.
                return await asyncio.to_thread(late.receive, 10.0)

    assert asyncio.run(run()) == "last"


def test_the_publisher_knows_how_many_are_subscribed(address: str) -> None:
    with broadcast(address) as publisher:
        one = subscribe(address)
        with subscribe(address):
            assert publisher.wait_for_subscribers(2, 10.0)
            one.close()
            deadline = time.monotonic() + 10
            while publisher.n_subscribers != 1 and time.monotonic() < deadline:
                time.sleep(0.01)
            assert publisher.n_subscribers == 1


def test_conflation_keeps_only_the_latest_message(address: str) -> None:
    with broadcast(address, sndhwm=0) as publisher, subscribe(address, conflate=True) as subscriber:
        assert publisher.wait_for_subscribers(1, 10.0)
        for number in range(50):
            publisher.publish(str(number))
        seen: list[str] = []
        while not seen or seen[-1] != "49":
            message = subscriber.receive(10.0)
            assert message is not None
            seen.append(message)
        assert len(seen) < 50


def test_a_message_with_a_deadline_reaches_a_subscriber_that_was_full(tmp_path: Path) -> None:
    # inproc has no kernel buffers: two messages fill it.
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with (
        broadcast("inproc://x", sndhwm=1, context=context) as publisher,
        subscribe("inproc://x", rcvhwm=1, context=context) as slow,
        subscribe("inproc://x", rcvhwm=0, context=context) as quick,
    ):
        assert publisher.wait_for_subscribers(2, 10.0)
        for number in range(10):
            publisher.publish(f"tick {number}")
        got: list[str | None] = []

        def read() -> None:
            while not got or got[-1] != "final":
                got.append(slow.receive(10.0))

        reader = threading.Thread(target=read)
        # The reader begins only while the publisher is at it: it polls, so starting first would be a race.
        threading.Timer(0.1, reader.start).start()
        assert publisher.publish("final", deliver_within_s=0.5) is False, "it cannot know"
        reader.join(10)
        assert got[-1] == "final"
        assert got[:2] == ["tick 0", "tick 1"]
        # The slow one took nothing from the quick one.
        assert [quick.receive(10.0) for _ in range(11)] == [*(f"tick {n}" for n in range(10)), "final"]
    context.term()


def test_what_is_collected_waits_for_the_subscriber_to_come(address: str) -> None:
    with ZmqMessagePublisher(TextCodec(), address, pattern=Pattern.COLLECT) as early:
        assert all(early.publish(str(number)) for number in range(10))
        with subscribe(address, pattern=Pattern.COLLECT) as collector:
            assert [collector.receive(10.0) for _ in range(10)] == [str(n) for n in range(10)]


def test_a_collecting_publisher_whose_queue_is_full_says_so_and_does_not_wait(address: str) -> None:
    with ZmqMessagePublisher(TextCodec(), address, pattern=Pattern.COLLECT, sndhwm=3, linger=0) as alone:
        assert [alone.publish("x") for _ in range(5)] == [True, True, True, False, False]


@pytest.mark.parametrize("fault", [b"\xff\xfe", b"bug"])
def test_a_frame_that_cannot_be_decoded_is_the_codecs_to_judge(address: str, fault: bytes) -> None:
    with broadcast(address) as publisher:
        for bad, expected in (("drop", ["good"]), ("substitute", [f"substitute for {fault!r}", "good"])):
            with subscribe(address, TextCodec(bad)) as subscriber:
                assert publisher.wait_for_subscribers(1, 10.0)
                publisher._send_frame(TOPIC + fault, None)
                publisher.publish("good")
                assert [subscriber.receive(10.0) for _ in expected] == expected
                assert subscriber.n_decode_errors == 1
                assert subscriber.n_received == 2
            while publisher.n_subscribers:
                time.sleep(0.01)


def test_what_the_codec_raises_again_reaches_the_caller_and_the_next_message_comes(address: str) -> None:
    with broadcast(address) as publisher, subscribe(address, TextCodec("raise")) as subscriber:
        assert publisher.wait_for_subscribers(1, 10.0)
        publisher._send_frame(TOPIC + b"bug", None)
        publisher.publish("good")
        with pytest.raises(KeyError):
            subscriber.receive(10.0)
        assert subscriber.receive(10.0) == "good"


def test_a_frame_too_short_for_a_topic_is_a_decode_error(address: str) -> None:
    with broadcast(address) as publisher, subscribe(address, TextCodec("substitute")) as subscriber:
        assert publisher.wait_for_subscribers(1, 10.0)
        publisher._send_frame(b"short", None)
        assert subscriber.receive(10.0) == "substitute for b''"


async def test_a_loops_reader_gets_everything_although_a_handler_fails(address: str) -> None:
    loop = asyncio.get_running_loop()
    seen: list[str] = []
    errors: list[Exception] = []
    done = asyncio.Event()

    def handle(message: str) -> None:
        if message == "7":
            raise RuntimeError("one bad message")
        seen.append(message)
        if message == "999":
            done.set()

    with subscribe(address, pattern=Pattern.COLLECT, rcvhwm=10_000) as collector:
        collector.attach(loop, handle, errors.append)

        def send() -> None:
            with ZmqMessagePublisher(TextCodec(), address, pattern=Pattern.COLLECT, sndhwm=0) as publisher:
                for number in range(1000):
                    publisher.publish(str(number))

        await asyncio.to_thread(send)
        await asyncio.wait_for(done.wait(), 10)
    assert seen == [str(n) for n in range(1000) if n != 7]
    assert [str(error) for error in errors] == ["one bad message"]


def test_a_topic_has_exactly_the_size_of_the_frames_head(address: str) -> None:
    assert len(make_topic("a")) == TOPIC_FRAME_SIZE
    with pytest.raises(InvalidRequestError, match="17 bytes"):
        make_topic("x" * 17)

    class ShortTopic(TextCodec):
        def encode(self, item: str) -> tuple[bytes, bytes]:
            return b"short", item.encode()

    with (
        ZmqMessagePublisher(ShortTopic(), address) as publisher,
        pytest.raises(InvalidRequestError, match="5 bytes; it must be 16"),
    ):
        publisher.publish("x")


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:5000", "tcp://*:5000", "tcp://10.0.0.1:5000"])
def test_an_address_that_other_machines_reach_must_be_asked_for(address: str) -> None:
    with pytest.raises(ConfigError, match="other machines"):
        check_address(address)
    check_address(address, allow_remote=True)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:*", "tcp://localhost:1", "tcp://[::1]:1", "ipc:///x"])
def test_loopback_and_unix_sockets_are_fine(address: str) -> None:
    check_address(address)


@pytest.mark.parametrize("address", ["", "ipc://", "http://127.0.0.1:1", "127.0.0.1:5000"])
def test_a_malformed_address_is_refused_with_what_would_be_right(address: str) -> None:
    with pytest.raises(ConfigError, match="must be ipc://PATH"):
        check_address(address)


def test_an_address_in_use_is_named_in_the_error() -> None:
    with broadcast("tcp://127.0.0.1:*") as publisher:
        assert publisher.address.startswith("tcp://127.0.0.1:")
        with pytest.raises(PlaneConnectionError, match=f"cannot bind '{publisher.address}'"):
            broadcast(publisher.address)


def test_closing_twice_is_fine(address: str) -> None:
    publisher, subscriber = broadcast(address), subscribe(address)
    for _ in range(2):
        publisher.close()
        subscriber.close()


def test_a_unix_sockets_file_goes_with_its_socket_but_not_with_a_later_one(
    address: str, tmp_path: Path
) -> None:
    first = broadcast(address)
    (tmp_path / "socket").unlink()
    second = broadcast(address)
    first.close()
    assert (tmp_path / "socket").exists()
    second.close()
    assert not (tmp_path / "socket").exists()
