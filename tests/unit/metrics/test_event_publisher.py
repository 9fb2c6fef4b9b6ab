"""The worker's side: it never waits, counts what it drops, and survives a fork."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlplane.errors import ConfigError
from rlplane.metrics.background import BackgroundThread
from rlplane.metrics.event_publisher import (
    METRICS_ADDRESS_VARIABLE,
    EventPublisherService,
    publisher_from_environment,
)
from rlplane.metrics.events import (
    EventBatch,
    EventRecordCodec,
    LogRecord,
    OpRecord,
    SampleEvent,
    SessionEvent,
    WorkerGoodbye,
    WorkerHello,
)
from rlplane.transport import Pattern, ZmqMessageSubscriber

Collector = ZmqMessageSubscriber[EventBatch]


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/events"


@pytest.fixture
def collector(address: str) -> Iterator[Collector]:
    with ZmqMessageSubscriber(EventRecordCodec(), address, pattern=Pattern.COLLECT) as made:
        yield made


def op(wall_ns: int = 1) -> OpRecord:
    return OpRecord("put", "p", 1, 1, wall_ns, 0)


def receive_until_goodbye(collector: Collector, workers: int = 1) -> list[EventBatch]:
    batches: list[EventBatch] = []
    left = workers
    while left:
        batch = collector.receive(20.0)
        assert batch is not None, f"{left} workers never said goodbye"
        batches.append(batch)
        left -= sum(isinstance(event, WorkerGoodbye) for event in batch.events)
    return batches


def walls(batches: list[EventBatch]) -> list[int]:
    return [record.wall_ns for batch in batches for record in batch.op_records()]


def test_everything_arrives_in_order_between_hello_and_goodbye(address: str, collector: Collector) -> None:
    sender = EventPublisherService(address, "w0", role="rollout", flush_count=64)
    for number in range(1000):
        sender.record(op(number))
    sender.close()
    batches = receive_until_goodbye(collector)
    assert walls(batches) == list(range(1000))
    assert isinstance(batches[0].events[0], WorkerHello)
    assert batches[0].events[0].role == "rollout"
    assert [batch.seq for batch in batches] == list(range(1, len(batches) + 1))
    assert {(batch.worker, batch.pid) for batch in batches} == {("w0", os.getpid())}
    assert sender.n_dropped == 0


def test_a_single_event_does_not_wait_for_others(address: str, collector: Collector) -> None:
    sender = EventPublisherService(address)
    sender.record(op(7))
    seen: list[int] = []
    while not seen:
        batch = collector.receive(20.0)
        assert batch is not None
        seen = walls([batch])
    assert seen == [7]
    sender.close()


def test_an_idle_worker_still_shows_that_it_lives(address: str, collector: Collector) -> None:
    sender = EventPublisherService(address)
    sender.record(op())
    empty: EventBatch | None = None
    while empty is None or len(empty):
        empty = collector.receive(20.0)
        assert empty is not None, "no heartbeat came"
    sender.close()


def test_without_an_aggregator_the_newest_events_are_dropped_and_counted(address: str) -> None:
    sender = EventPublisherService(address, max_queue=100, flush_count=10)
    # ZeroMQ's own queue takes 64 batches first; then ours fills up.
    for number in range(5000):
        sender.record(op(number))
    assert sender.n_waiting <= 101
    dropped = sender.n_dropped
    assert dropped >= 5000 - 64 * 10 - 102
    with ZmqMessageSubscriber(EventRecordCodec(), address, pattern=Pattern.COLLECT) as collector:
        sender.close(timeout=20.0)
        batches = receive_until_goodbye(collector)
    got = walls(batches)
    assert got[:99] == list(range(99)), "the oldest are kept (the hello has a place too)"
    assert len(got) == 5000 - dropped
    assert batches[-1].n_dropped == dropped
    assert sender.n_dropped == dropped


def test_closing_without_an_aggregator_ends_at_the_timeout(address: str) -> None:
    sender = EventPublisherService(address)
    sender.record(op())
    sender.close(timeout=0.1)
    sender.close(timeout=0.1)
    before = sender.n_dropped
    sender.record(op())
    assert sender.n_dropped == before + 1, "what comes after the end is dropped and counted"


def test_many_threads_lose_nothing(address: str, collector: Collector) -> None:
    sender = EventPublisherService(address)

    def work(start: int) -> None:
        for number in range(start, start + 2000):
            sender.record(op(number))

    threads = [threading.Thread(target=work, args=(index * 2000,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sender.close(timeout=20.0)
    assert sorted(walls(receive_until_goodbye(collector))) == list(range(16_000))


def test_drops_of_many_threads_add_up_exactly(address: str) -> None:
    owner = EventPublisherService(address)  # Not used, and so without a thread.
    nobody = BackgroundThread("takes nothing", lambda: iter(()), owner)
    sender = EventPublisherService(address, max_queue=1, thread=nobody)

    def work() -> None:
        for _ in range(5000):
            sender.record(op())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # Two threads may pass the bound together; none is lost between queue and count.
    assert sender.n_dropped + sender.n_waiting == 20_000
    assert sender.n_dropped + sender.n_waiting == 20_000, "reading does not change it"


def test_a_forked_child_sends_by_itself_and_only_its_own(address: str, collector: Collector) -> None:
    sender = EventPublisherService(address, "w0", flush_interval_s=0.1)
    sender.record(op(1))
    time.sleep(0)  # The parent's thread may or may not have taken it; the child must not send it either way.
    child = os.fork()
    if child == 0:
        sender.record(op(2))
        sender.close(timeout=20.0)
        os._exit(0)
    sender.record(op(3))
    sender.close(timeout=20.0)
    batches = receive_until_goodbye(collector, workers=2)
    assert os.waitpid(child, 0)[1] == 0
    assert sorted(walls([b for b in batches if b.worker == "w0"])) == [1, 3]
    assert walls([b for b in batches if b.worker == f"w0/{child}"]) == [2]
    assert {b.pid for b in batches} == {os.getpid(), child}


def test_a_signal_handler_may_record(address: str, collector: Collector) -> None:
    sender = EventPublisherService(address, flush_count=1)
    former = signal.signal(signal.SIGUSR1, lambda *_: sender.record(op(0)))
    try:
        for number in range(1, 200):
            sender.record(op(number))
            os.kill(os.getpid(), signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, former)
    sender.close(timeout=20.0)
    assert len(walls(receive_until_goodbye(collector))) == 398


def test_events_that_cannot_travel_are_dropped_one_by_one(address: str, collector: Collector) -> None:
    sender = EventPublisherService(address)
    sender.record(OpRecord("put", "p", "many", 1, 1, 1))  # type: ignore[arg-type]
    sender.record(SampleEvent(kind="written", partition_id="p", sample_ids=[object()], time_ns=1))  # type: ignore[list-item]
    sender.record(SessionEvent("ERROR", 2**70, "too large"))
    sender.record(op(5))
    sender.record(SessionEvent("STARTED", 1))
    sender.close(timeout=20.0)
    batches = receive_until_goodbye(collector)
    assert walls(batches) == [5]
    assert [e for b in batches for e in b.events if isinstance(e, SessionEvent)] == [
        SessionEvent("STARTED", 1)
    ]
    assert sender.n_dropped == 3


NOT_UNICODE = "\udc80"


@pytest.mark.parametrize(
    "malformed",
    [
        OpRecord(NOT_UNICODE, "p", 1, 1, 1, 1),
        OpRecord("put", NOT_UNICODE, 1, 1, 1, 1),
        OpRecord("put", "p", 1, 1, 1, 1, task=NOT_UNICODE),
        OpRecord("put", "p", 1, 1, 1, 1, "error", 0, None, "KeyError", NOT_UNICODE),
        OpRecord("put", "p", 1, 1, 1, 1, "error", 0, None, NOT_UNICODE, "message"),
        SampleEvent(kind="written", partition_id="p", sample_ids=[NOT_UNICODE], time_ns=1),
        LogRecord("warning", NOT_UNICODE, 1),
        None,
        7,
    ],
    ids=repr,
)
def test_whatever_cannot_be_encoded_is_dropped_and_counted_and_ends_nothing(
    address: str, collector: Collector, malformed: object
) -> None:
    sender = EventPublisherService(address)
    for number in range(100):
        sender.record(malformed if number == 5 else op(number))  # type: ignore[arg-type]
    sender.close(timeout=20.0)
    batches = receive_until_goodbye(collector)
    assert walls(batches) == [number for number in range(100) if number != 5]
    assert batches[-1].n_dropped == sender.n_dropped == 1


@pytest.mark.parametrize("option", ["worker", "role"])
def test_a_name_that_is_not_valid_unicode_is_refused_at_the_start(address: str, option: str) -> None:
    with pytest.raises(ConfigError, match="not valid Unicode"):
        EventPublisherService(address, **{option: NOT_UNICODE})  # type: ignore[arg-type]


FORGETFUL = """
import sys
from rlplane.metrics.events import OpRecord
from rlplane.metrics.background import BackgroundThread
from rlplane.metrics.event_publisher import EventPublisherService
sender = EventPublisherService(sys.argv[1])
for number in range(50):
    sender.record(OpRecord("put", "p", 1, 1, number, 0))
"""


def test_a_process_that_forgets_to_close_loses_nothing(address: str, collector: Collector) -> None:
    subprocess.run([sys.executable, "-c", FORGETFUL, address], check=True, timeout=300)
    assert walls(receive_until_goodbye(collector)) == list(range(50))


def record_one(address: str) -> None:
    EventPublisherService(address, "child").record(op(9))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_multiprocessing_child_that_forgets_to_close_loses_nothing(
    address: str, collector: Collector, method: str
) -> None:
    context: Any = multiprocessing.get_context(method)
    process = context.Process(target=record_one, args=(address,))
    process.start()
    assert walls(receive_until_goodbye(collector)) == [9]
    process.join(120)
    assert process.exitcode == 0


def test_the_environment_names_the_aggregator(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(METRICS_ADDRESS_VARIABLE, raising=False)
    assert publisher_from_environment() is None
    monkeypatch.setenv(METRICS_ADDRESS_VARIABLE, address)
    sender = publisher_from_environment("w1", role="trainer")
    assert sender is not None
    assert (sender.address, sender.worker, sender.role) == (address, "w1", "trainer")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"flush_interval_s": 0.5}, "at most 0.1"),
        ({"max_queue": 0}, "at least 1"),
        ({"flush_count": 0}, "at least 1"),
    ],
)
def test_options_that_break_the_promises_are_refused(
    address: str, options: dict[str, float], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        EventPublisherService(address, **options)  # type: ignore[arg-type]
