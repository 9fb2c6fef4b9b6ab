"""A callback may raise, block or be slow: it is counted, and the operation is not touched."""

from __future__ import annotations

import logging
import threading
from collections import deque
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from rlplane.adapters.local.memory import MemoryDataPlaneClient
from rlplane.config import load_config
from rlplane.observability import DataPlaneEvent, MetricsDataPlaneClient
from rlplane.sinks.isolated import IsolatedConsumer


@pytest.fixture
def inner(request):
    cfg = load_config("local", {"controller_address": request.node.name})
    client = MemoryDataPlaneClient(cfg, bootstrap=True)
    client.register_partition("p", ["x"], 10, ["t"])
    yield client
    client.close()


def put(client, *ids):
    client.put_samples(list(ids), "p", TensorDict({"x": torch.zeros(len(ids), 4)}, batch_size=[len(ids)]))


def test_a_python_callback_gets_every_event_in_order(inner):
    seen: list[DataPlaneEvent] = []
    client = MetricsDataPlaneClient(inner, lambda event: seen.append(event))
    for index in range(100):
        put(client, f"s{index}")
    assert client.flush()
    assert [event["op"] for event in seen] == ["put"] * 100
    client.close()
    assert seen[-1]["op"] == "close"


@pytest.mark.parametrize("container", [list, deque, SimpleQueue])
def test_a_callback_that_only_appends_has_the_event_when_the_operation_returns(inner, container):
    seen = container()
    client = MetricsDataPlaneClient(inner, seen.put if container is SimpleQueue else seen.append)
    put(client, "a")
    assert (seen.get_nowait() if container is SimpleQueue else seen[0])["op"] == "put"
    client.close()


def test_a_callback_that_raises_is_counted_logged_once_and_switched_off(inner, caplog):
    calls = []

    def boom(event):
        calls.append(event)
        raise RuntimeError("no thanks")

    client = MetricsDataPlaneClient(inner, boom)
    for index in range(30):
        put(client, f"s{index}")
    assert client.flush()
    state = client.snapshot()["callback"]
    assert state["failures"] == len(calls) == 10
    assert state["dropped"] == 20
    assert state["enabled"] is False
    assert len([r for r in caplog.records if "logged once" in r.getMessage()]) == 1
    assert client.snapshot()["total_ops"] == 30
    client.close()
    assert len(calls) == 10


def test_a_callback_that_fails_now_and_then_stays_on(inner):
    calls = []

    def moody(event):
        calls.append(event)
        if len(calls) % 3:
            raise ValueError("not today")

    client = MetricsDataPlaneClient(inner, moody)
    for index in range(60):
        put(client, f"s{index}")
    assert client.flush()
    state = client.snapshot()["callback"]
    assert state["enabled"] and state["failures"] == 40 and state["delivered"] == 20
    client.close()


def test_even_a_system_exit_of_the_callback_stays_its_own(inner):
    def leave(event):
        raise SystemExit(3)

    client = MetricsDataPlaneClient(inner, leave)
    put(client, "a")
    assert client.flush()
    assert client.snapshot()["callback"]["failures"] == 1
    client.close()


def test_a_callback_that_blocks_for_ever_holds_up_no_operation(inner):
    entered, release = threading.Event(), threading.Event()

    def block(event):
        entered.set()
        release.wait()

    client = MetricsDataPlaneClient(inner, block)
    put(client, "a")
    assert entered.wait(10)
    for index in range(200):
        put(client, f"s{index}")
    assert client.snapshot()["total_ops"] == 201
    assert client.snapshot()["bytes_outstanding"] == 201 * 16
    assert not client.flush(timeout_s=0.01)
    release.set()
    assert client.flush()
    client.close()


def test_a_callback_may_use_the_client(inner):
    seen = []

    def curious(event):
        seen.append(client.snapshot()["total_ops"])

    client = MetricsDataPlaneClient(inner, curious)
    put(client, "a")
    assert client.flush()
    assert seen == [1]
    client.close()


# The consumer by itself.


def test_an_isolated_consumer_whose_queue_is_full_drops_the_newest_and_counts_them(caplog):
    gate, seen = threading.Event(), []

    def deliver(items):
        gate.wait()
        seen.extend(items)

    consumer = IsolatedConsumer("test", deliver, max_queue=5, max_batch=5)
    consumer.offer([0])
    while consumer.state()["waiting"]:  # Until the thread has taken the first one.
        threading.Event().wait(0.001)
    consumer.offer(list(range(1, 20)))
    consumer.offer([99])
    assert consumer.dropped == 15
    gate.set()
    assert consumer.flush(10)
    assert seen == [0, 1, 2, 3, 4, 5]
    consumer.close()


def test_an_isolated_consumer_that_is_stuck_is_switched_off_with_a_warning(caplog):
    caplog.set_level(logging.WARNING)
    entered, release = threading.Event(), threading.Event()

    def deliver(items):
        entered.set()
        release.wait()

    consumer = IsolatedConsumer("a stuck one", deliver, stuck_after_s=0.0)
    consumer.offer([1])
    assert entered.wait(10)
    threading.Event().wait(0.002)
    consumer.offer([2])
    assert not consumer.enabled
    assert consumer.flush(10)
    while "a stuck one is switched off" not in caplog.text:
        threading.Event().wait(0.001)
    consumer.close(timeout_s=60)  # Returns at once: there is nothing to wait for.
    release.set()


def test_a_log_handler_that_is_stuck_does_not_hold_up_whoever_offers():
    entered, release = threading.Event(), threading.Event()

    class Stuck(logging.Handler):
        def emit(self, record):
            entered.set()
            release.wait()

    logger = logging.getLogger("rlplane.sinks.isolated")
    handler = Stuck()
    logger.addHandler(handler)
    try:
        consumer = IsolatedConsumer("logs", lambda items: logger.warning("delivering"), stuck_after_s=0.0)
        consumer.offer([1])
        assert entered.wait(10)
        threading.Event().wait(0.002)
        consumer.offer([2])
        assert not consumer.enabled
    finally:
        release.set()
        logger.removeHandler(handler)


def test_closing_an_isolated_consumer_delivers_the_rest_and_closes_it():
    seen: list[Any] = []
    consumer = IsolatedConsumer("test", seen.extend, lambda: seen.append("closed"))
    consumer.offer([1, 2])
    consumer.close()
    consumer.close()
    consumer.offer([3])
    assert seen == [1, 2, "closed"]
    assert consumer.dropped == 1


def test_a_close_that_fails_is_logged_and_nothing_more(caplog):
    def broken():
        raise OSError("disk full")

    consumer = IsolatedConsumer("test", lambda items: None, broken)
    consumer.close()
    assert "could not be closed" in caplog.text
