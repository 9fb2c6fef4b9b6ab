"""What reaches the aggregator: operations, the lives of tracked samples, transfers, the engine's counts."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from rlplane.adapters.local.memory import MemoryDataPlaneClient
from rlplane.config import load_config
from rlplane.metrics.events import (
    EventBatch,
    EventRecordCodec,
    LogRecord,
    OpRecord,
    PartitionStatus,
    SampleEvent,
    TransferRecord,
    WorkerGoodbye,
    WorkerHello,
)
from rlplane.observability import MetricsDataPlaneClient, wrap_with_observability
from rlplane.transfer_stats import TransferRecord as Transfer
from rlplane.transport import Pattern, ZmqMessageSubscriber


@pytest.fixture
def aggregator(tmp_path):
    """The aggregator's socket, without the aggregator."""
    address = f"ipc://{tmp_path}/events"
    with ZmqMessageSubscriber(EventRecordCodec(), address, pattern=Pattern.COLLECT, bind=True) as subscriber:
        yield subscriber


def received(subscriber, until) -> tuple[list[OpRecord], list[Any]]:
    """All that arrives until ``until(ops, events)`` is true."""
    ops: list[OpRecord] = []
    events: list[Any] = []
    deadline = time.monotonic() + 30
    while not until(ops, events):
        assert time.monotonic() < deadline, (ops, events)
        batch: EventBatch | None = subscriber.receive(timeout_s=0.2)
        if batch is not None:
            ops += batch.op_records()
            events += batch.events
    return ops, events


def said_goodbye(ops, events) -> bool:
    return any(isinstance(event, WorkerGoodbye) for event in events)


@pytest.fixture
def inner(request):
    return MemoryDataPlaneClient(
        load_config("local", {"controller_address": request.node.name}), bootstrap=True
    )


def put(client, ids, **kwargs):
    fields = TensorDict({"x": torch.zeros(len(ids), 4)}, batch_size=[len(ids)])
    return client.put_samples(ids, "p", fields, **kwargs)


def test_operations_arrive_with_sizes_times_tasks_and_errors(aggregator, inner):
    client = MetricsDataPlaneClient(inner, metrics_address=aggregator.address, role="trainer")
    before = time.time_ns()
    client.register_partition("p", ["x"], 2, ["train"])
    put(client, ["a", "b"])
    client.claim_meta("p", "train", ["x"], 2)
    with pytest.raises(TimeoutError):
        client.claim_meta("p", "train", ["x"], 2, timeout_s=0.0)
    with pytest.raises(KeyError):
        client.get_samples(["nobody"], "p", ["x"])
    client.close()
    ops, events = received(aggregator, said_goodbye)
    assert isinstance(events[0], WorkerHello) and events[0].role == "trainer"
    assert [(op.op, op.n_keys, op.n_bytes, op.status) for op in ops] == [
        ("register", 0, 0, "ok"),
        ("put", 2, 32, "ok"),
        ("claim_meta", 2, 0, "ok"),
        ("claim_meta", 0, 0, "timeout"),
        ("get", 1, 0, "error"),
        ("close", 0, 0, "ok"),
    ]
    assert ops[2].task == ops[3].task == "train"
    assert ops[4].error_class == "MissingDataError" and "nobody" in (ops[4].error_message or "")
    assert all(before - 1e9 < op.start_ns < time.time_ns() and op.wall_ns >= 0 for op in ops)
    assert not any(isinstance(event, SampleEvent) for event in events)


def test_the_lives_of_tracked_samples_arrive(aggregator, inner):
    client = MetricsDataPlaneClient(inner, metrics_address=aggregator.address, track_partitions=["p"])
    client.register_partition("p", ["x"], 2, ["train"])
    client.register_partition("other", ["x"], 2, ["train"])
    put(client, ["a", "b"], tags=[{"weight_version": 3}, {}])
    client.put_samples(["z"], "other", TensorDict({"x": torch.zeros(1)}, batch_size=[1]))
    client.claim_meta("p", "train", ["x"], 2)
    with pytest.raises(ValueError, match="c"):
        put(client, ["c", "c"])
    client.clear_samples(["a"], "p")
    client.clear_samples(None, "p")
    client.close()
    _, events = received(aggregator, said_goodbye)
    lives = [event for event in events if isinstance(event, SampleEvent)]
    assert [(life.kind, life.sample_ids, life.everything) for life in lives] == [
        ("written", ["a", "b"], False),
        ("claimed", ["a", "b"], False),
        ("failed", ["c", "c"], False),
        ("cleared", ["a"], False),
        ("cleared", ["b"], False),  # None: what this client wrote
    ]
    assert all(0 < life.start_ns <= life.time_ns for life in lives)
    assert lives[0].weight_versions == lives[1].weight_versions == [3, None]
    assert lives[0].n_bytes == 32
    assert lives[1].task == "train"
    assert lives[2].reason == "InvalidRequestError"
    assert {life.partition_id for life in lives} == {"p"}


def test_the_engines_counts_arrive_by_themselves_with_the_capacity(aggregator, inner):
    cfg = {
        "storage_capacity": 77,
        "global_segment_size": 1 << 20,
        "observability": {
            "enabled": True,
            "metrics_address": aggregator.address,
            "callback": [].append,
        },
    }
    client = wrap_with_observability(inner, cfg)
    client.register_partition("p", ["x"], 3, ["train"])
    put(client, ["a", "b", "c"])
    client.claim_meta("p", "train", ["x"], 1)
    _, events = received(aggregator, lambda ops, events: any(isinstance(e, PartitionStatus) for e in events))
    (status,) = [event for event in events if isinstance(event, PartitionStatus)]
    assert (status.partition_id, status.samples, status.capacity_samples) == ("p", 3, 77)
    assert status.capacity_bytes == inner.partition_status("p").get("capacity_bytes", 1 << 20)
    assert (status.tasks["train"].ready, status.tasks["train"].claimed) == (2, 1)
    client.close()


def test_transfers_and_warnings_arrive(aggregator, inner):
    client = MetricsDataPlaneClient(inner, metrics_address=aggregator.address)
    client.register_partition("p", ["x"], 3, ["train"])
    put(client, ["a"])
    client.put_samples(["b"], "p", TensorDict({"x": torch.zeros(1, 100)}, batch_size=[1]))
    inner.transfer_stats.record_transfer(Transfer(4096, 2, 0.001, 0.002))
    client.close()
    _, events = received(aggregator, said_goodbye)
    (report,) = [event for event in events if isinstance(event, TransferRecord)]
    assert report.data["bytes_transferred"][2:] == [4096], "after those of the two puts"
    (warning,) = [event for event in events if isinstance(event, LogRecord)]
    assert "400 bytes per key" in warning.message


def test_the_address_may_come_from_the_environment(aggregator, inner, monkeypatch):
    monkeypatch.setenv("RLPLANE_METRICS_ADDRESS", aggregator.address)
    client = wrap_with_observability(inner, {"observability": {"enabled": True, "callback": [].append}})
    client.close()
    ops, _ = received(aggregator, said_goodbye)
    assert [op.op for op in ops] == ["close"]


def test_nobody_at_the_address_disturbs_nothing(inner, tmp_path):
    client = MetricsDataPlaneClient(inner, metrics_address=f"ipc://{tmp_path}/nobody", track_partitions=["*"])
    client.register_partition("p", ["x"], 3, ["train"])
    put(client, ["a"])
    assert client.snapshot()["bytes_outstanding"] == 16
    client.close()


def test_clearing_what_others_wrote_says_everything(aggregator, inner):
    client = MetricsDataPlaneClient(inner, metrics_address=aggregator.address, track_partitions=["p"])
    client.register_partition("p", ["x"], 2, ["train"])
    put(inner, ["a"])
    client.clear_samples(None, "p")
    client.close()
    _, events = received(aggregator, said_goodbye)
    lives = [event for event in events if isinstance(event, SampleEvent)]
    assert [(life.kind, life.sample_ids, life.everything) for life in lives] == [("cleared", [], True)]


def test_the_last_counts_of_the_engine_are_those_at_the_end(aggregator, inner):
    client = MetricsDataPlaneClient(inner, metrics_address=aggregator.address)
    client.register_partition("p", ["x"], 2, ["train"])
    put(client, ["a", "b"])
    client.clear_samples(["a", "b"], "p")
    client.close()  # long before the watcher looks for the first time
    _, events = received(aggregator, said_goodbye)
    statuses = [event for event in events if isinstance(event, PartitionStatus)]
    assert statuses
    assert (statuses[-1].samples, statuses[-1].bytes) == (0, 0)


def test_a_name_that_is_not_valid_unicode_costs_its_own_event_and_no_other(aggregator, inner):
    client = MetricsDataPlaneClient(inner, metrics_address=aggregator.address, track_partitions=["*"])
    client.register_partition("p", ["x"], 2, ["train"])
    for number in range(100):
        put(client, [f"s{number}"])
        if number == 5:
            with pytest.raises(ValueError, match="surrogates not allowed"):
                client.claim_meta("no\udc80", "train", ["x"], 1)
            with pytest.raises(ValueError, match="not valid Unicode"):
                client.get_samples(["no\udc80"], "p", ["x"])
    client.close()
    ops, _ = received(aggregator, said_goodbye)
    assert [op.op for op in ops].count("put") == 100
    (get,) = [op for op in ops if op.op == "get"]
    assert "no\\udc80" in (get.error_message or "")
    assert client.snapshot()["events_dropped"] == 1


def test_an_address_that_cannot_be_connected_to_leaves_callback_and_operations_alone(inner, tmp_path):
    seen: list[str] = []
    address = f"ipc://{tmp_path}/{'x' * 200}"  # Longer than the path of a socket may be.
    client = MetricsDataPlaneClient(inner, lambda event: seen.append(event["op"]), metrics_address=address)
    client.register_partition("p", ["x"], 2, ["train"])
    deadline = time.monotonic() + 30
    for number in range(80):  # For longer than it takes the thread to go to sleep.
        put(client, [f"s{number}"])
        time.sleep(0.02)
    while len(seen) < 81:
        assert time.monotonic() < deadline, len(seen)
        time.sleep(0.01)
    client.close()
    assert client.snapshot()["events_dropped"] > 0
