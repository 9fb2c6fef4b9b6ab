"""The measuring client: its events, its sums, and that the operation is the engine's in every case."""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

import rlplane.observability as observability
from rlplane.adapters.local.memory import MemoryDataPlaneClient
from rlplane.config import load_config
from rlplane.errors import ClaimTimeoutError, ClientClosedError, ConfigError, UnsupportedOperationError
from rlplane.factory import build_data_plane_client
from rlplane.interfaces import DataPlaneClient, KVBatchMeta
from rlplane.observability import (
    DataPlaneEvent,
    MetricsDataPlaneClient,
    log_event,
    wrap_with_observability,
)
from rlplane.observability.sizes import object_bytes
from rlplane.transfer_stats import TransferRecord

SIX_KEYS = {"op", "partition_id", "n_keys", "n_bytes", "wall_ms", "status"}


def memory_client(name: str = "observed") -> MemoryDataPlaneClient:
    return MemoryDataPlaneClient(load_config("local", {"controller_address": name}), bootstrap=True)


def batch(ids: list[str], width: int = 4) -> TensorDict:
    return TensorDict({"x": torch.zeros(len(ids), width)}, batch_size=[len(ids)])


def wait_for(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        threading.Event().wait(0.005)


@pytest.fixture
def events() -> list[DataPlaneEvent]:
    return []


@pytest.fixture
def client(events: list[DataPlaneEvent]) -> Iterator[MetricsDataPlaneClient]:
    client = MetricsDataPlaneClient(memory_client(), on_event=events.append)
    client.register_partition("p", ["x", "y", "text"], 100, ["train"])
    yield client
    client.close()


def test_every_operation_gives_one_event_with_its_tag(
    client: MetricsDataPlaneClient, events: list[DataPlaneEvent]
) -> None:
    client.put_samples(["a", "b"], "p", batch(["a", "b"]))
    meta = client.claim_meta("p", "train", ["x"], 2)
    client.get_data(meta)
    client.get_samples(["a"], "p", ["x"])
    client.check_consumption_status("p", ["train"])
    client.list_sample_ids("p")
    client.partition_status("p")
    client.clear_samples(["a"], "p")
    client.clear_samples(None, "p")
    client.close()
    assert [(event["op"], event["n_keys"], event["n_bytes"]) for event in events] == [
        ("register", 0, 0),
        ("put", 2, 32),
        ("claim_meta", 2, 0),
        ("get_data", 2, 32),
        ("get", 1, 16),
        ("check_consumption_status", 0, 0),
        ("list_sample_ids", 0, 0),
        ("partition_status", 0, 0),
        ("clear", 1, 0),
        ("clear", 1, 0),
        ("close", 0, 0),
    ]
    assert all(set(event) == SIX_KEYS for event in events)
    assert all(event["status"] == "ok" and event["wall_ms"] >= 0 for event in events)
    assert {event["partition_id"] for event in events} == {"p", ""}


def test_a_failed_operation_raises_the_engines_error_and_says_whether_it_was_a_timeout(
    client: MetricsDataPlaneClient, events: list[DataPlaneEvent]
) -> None:
    with pytest.raises(KeyError, match="nobody"):
        client.get_samples(["nobody"], "p", ["x"])
    with pytest.raises(ClaimTimeoutError):
        client.claim_meta("p", "train", ["x"], 2, timeout_s=0.0)
    with pytest.raises(ValueError, match="a"):
        client.put_samples(["a", "a"], "p", batch(["a", "a"]))
    assert [event["status"] for event in events[1:]] == ["error", "timeout", "error"]
    snapshot = client.snapshot()
    assert (snapshot["failed_ops"], snapshot["claim_timeouts"]) == (2, 1)
    assert snapshot["bytes_outstanding"] == snapshot["total_bytes"] == 0


def test_snapshot_has_totals_and_what_is_held(client: MetricsDataPlaneClient) -> None:
    client.put_samples(["a", "b"], "p", batch(["a", "b"]))
    client.put_samples(["c"], "p", batch(["c"], width=10))
    client.clear_samples(["a"], "p")
    snapshot = client.snapshot()
    assert snapshot["total_ops"] == 4
    assert snapshot["total_bytes"] == 72
    assert snapshot["total_keys"] == 4
    assert snapshot["bytes_outstanding"] == 56
    assert snapshot["peak_bytes_outstanding"] == 72
    assert snapshot["keys_outstanding"] == 2
    assert snapshot["max_bytes_per_key_seen"] == 40
    assert snapshot["last_put_bytes_per_key"] == 40
    assert snapshot["ops"]["put"]["count"] == 2
    assert client.bytes_outstanding_by_partition() == {"p": 56}


def test_a_field_that_is_written_again_replaces_its_bytes(client: MetricsDataPlaneClient) -> None:
    client.put_samples(["a", "b"], "p", batch(["a", "b"]))
    client.put_samples(["b"], "p", batch(["b"], width=1))
    assert client.bytes_outstanding_by_partition() == {"p": 20}
    more = TensorDict({"x": torch.zeros(1, 2), "y": torch.zeros(1, 3)}, batch_size=[1])
    client.put_samples(["a"], "p", more)
    assert client.bytes_outstanding_by_partition() == {"p": 24}
    client.clear_samples(["a", "b"], "p")
    assert client.bytes_outstanding_by_partition() == {}


def test_a_failed_clear_changes_nothing(
    client: MetricsDataPlaneClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.put_samples(["a"], "p", batch(["a"]))

    def broken(*_: object) -> None:
        raise ConnectionError("the controller is gone")

    monkeypatch.setattr(client.inner, "clear_samples", broken)
    for ids in (["a"], None):
        with pytest.raises(ConnectionError):
            client.clear_samples(ids, "p")
    assert client.snapshot()["bytes_outstanding"] == 16


SHARED = torch.zeros(1000)


@pytest.mark.parametrize(
    ("value", "size"),
    [
        (torch.zeros(2, 3, dtype=torch.int16), 12),
        (torch.zeros(2), 8),
        (torch.zeros(2, 0), 0),
        (torch.zeros(1, 3).expand(2, 3), 24),
        (torch.zeros(10, 3)[::5], 24),
        (torch.nested.nested_tensor([torch.zeros(3), torch.zeros(5)], layout=torch.jagged), 32),
        (torch.nested.nested_tensor([torch.zeros(3, 2), torch.zeros(0, 2)], layout=torch.jagged), 24),
        (torch.nested.nested_tensor([torch.zeros(3), torch.zeros(5)]), 32),
        (torch.nested.nested_tensor([torch.zeros(3, 2), torch.zeros(1, 2)]), 32),
        (torch.nested.nested_tensor_from_jagged(torch.zeros(100), torch.tensor([10, 12, 15])), 20),
        (
            torch.nested.nested_tensor_from_jagged(
                torch.zeros(100), torch.tensor([0, 50, 100]), torch.tensor([3, 4])
            ),
            28,
        ),
        (NonTensorStack("abc", "ä"), 5),
        (NonTensorStack({"k": [1, 2.0]}, None), 18),
        (NonTensorData(["ab", b"xyz"], batch_size=[2]), 5),
        (np.array([{"a": 1}, "four"], dtype=object), 13),
        (NonTensorStack(np.zeros(3), np.zeros((2, 2), dtype=np.int8)), 28),
        (NonTensorStack({"k": SHARED}, {"k": [SHARED]}), 4002),
        (NonTensorStack({"k": SHARED}, {"k": SHARED[:500]}), 6002),
        (TensorDict({"k": torch.zeros(2, 5), "o": NonTensorStack("ab", "c")}, batch_size=[2]), 43),
    ],
)
def test_the_size_of_a_column_is_that_of_its_data(value: Any, size: int) -> None:
    fields = TensorDict({"x": value}, batch_size=[2])
    assert observability._td_bytes(fields) == size
    assert observability._td_bytes(None) == 0


def test_objects_that_nothing_is_known_about_have_their_pickled_size() -> None:
    value = {1, 2, 3}
    assert object_bytes(value) == len(pickle.dumps(value, protocol=5))
    assert object_bytes(threading.Lock()) > 0
    assert object_bytes(np.float32(1)) == 4
    assert object_bytes((True, None, "x", 7)) == 11


def test_a_small_view_of_a_large_storage_is_counted(client: MetricsDataPlaneClient) -> None:
    large = torch.zeros(1000, 1000)
    client.put_samples(["a"], "p", TensorDict({"x": large[:1]}, batch_size=[1]))
    values = torch.nested.nested_tensor_from_jagged(large[0], torch.tensor([0, 5]))
    client.put_samples(["b"], "p", TensorDict({"x": values}, batch_size=[1]))
    client.put_samples(["c"], "p", batch(["c"]))
    snapshot = client.snapshot()
    assert snapshot["large_storage_views"] == 2
    assert snapshot["bytes_outstanding"] == 4000 + 20 + 16


def test_an_object_that_is_changed_after_the_put_counts_as_it_was(client: MetricsDataPlaneClient) -> None:
    row: dict[str, Any] = {"a": 1}
    client.put_samples(["a"], "p", TensorDict({"text": NonTensorStack(row)}, batch_size=[1]))
    row["b"] = "x" * 1000
    assert client.snapshot()["bytes_outstanding"] == 9


def test_a_jump_in_bytes_per_key_is_flagged(
    client: MetricsDataPlaneClient, caplog: pytest.LogCaptureFixture
) -> None:
    for width in (4, 6, 8, 7):
        client.put_samples(["a"], "p", batch(["a"], width))
    client.put_samples(["a"], "p", TensorDict({"y": torch.zeros(1, 500)}, batch_size=[1]))
    assert client.snapshot()["bytes_per_key_jumps"] == 0
    client.put_samples(["b"], "p", batch(["b"], width=100))
    assert client.snapshot()["bytes_per_key_jumps"] == 1
    wait_for(lambda: "400 bytes per key" in caplog.text)


def test_samples_that_another_process_cleared_are_taken_off(client: MetricsDataPlaneClient) -> None:
    client.put_samples(["a", "b", "c"], "p", batch(["a", "b", "c"]))
    client.inner.clear_samples(["b"], "p")
    assert client.snapshot()["bytes_outstanding"] == 48
    client.reconcile()
    snapshot = client.snapshot()
    assert snapshot["bytes_outstanding"] == 32
    assert (snapshot["reconciled_keys"], snapshot["reconciled_bytes"]) == (1, 16)
    status = client.inner.partition_status("p")
    assert snapshot["engine"]["p"] == {
        "samples": 2,
        "bytes": status["bytes"],
        "difference": status["bytes"] - 32,
    }


def test_reconciling_happens_by_itself(client: MetricsDataPlaneClient) -> None:
    client.put_samples(["a", "b"], "p", batch(["a", "b"]))
    client.inner.clear_samples(["a", "b"], "p")
    wait_for(lambda: client.snapshot()["bytes_outstanding"] == 0)


def test_a_sample_that_is_put_while_the_engine_is_asked_is_still_counted(
    client: MetricsDataPlaneClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.put_samples(["a"], "p", batch(["a"]))
    listing = client.inner.list_sample_ids

    def slow_listing(partition_id: str) -> list[str]:
        found = listing(partition_id)
        client.put_samples(["late"], "p", batch(["late"]))
        return found

    monkeypatch.setattr(client.inner, "list_sample_ids", slow_listing)
    client.reconcile()
    assert client.snapshot()["bytes_outstanding"] == 32


def test_loading_a_checkpoint_sets_outstanding_bytes_to_zero(
    client: MetricsDataPlaneClient, events: list[DataPlaneEvent], tmp_path: Path
) -> None:
    client.save_checkpoint(str(tmp_path / "empty"))
    client.put_samples(["a"], "p", batch(["a"]))
    client.load_checkpoint(str(tmp_path / "empty"), release_claims=True)
    assert [event["op"] for event in events[-3:]] == ["save_checkpoint", "put", "load_checkpoint"]
    assert client.snapshot()["bytes_outstanding"] == 0


def test_many_threads_at_once_add_up_exactly(client: MetricsDataPlaneClient) -> None:
    def work(name: int) -> None:
        for step in range(40):
            ids = [f"{name}-{step}-{row}" for row in range(5)]
            client.put_samples(ids, "p", batch(ids))
            client.clear_samples(ids[:2], "p")

    threads = [threading.Thread(target=work, args=(name,)) for name in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    snapshot = client.snapshot()
    assert snapshot["total_ops"] == 1 + 6 * 40 * 2
    assert snapshot["total_bytes"] == 6 * 40 * 5 * 16
    assert snapshot["bytes_outstanding"] == 6 * 40 * 3 * 16
    assert snapshot["keys_outstanding"] == 6 * 40 * 3


def test_the_documented_private_methods_count_bytes(
    client: MetricsDataPlaneClient, events: list[DataPlaneEvent]
) -> None:
    client._record_put("q", ["a", "b", "c"], 100)
    client._record_put("q", ["a"], 50)
    assert client.bytes_outstanding_by_partition() == {"q": 150}
    client._record_clear("q", ["b"])
    assert client.bytes_outstanding_by_partition() == {"q": 117}
    client._record_clear("q", None)
    assert client.bytes_outstanding_by_partition()["q"] == 0
    assert client._run("mine", "q", lambda: KVBatchMeta("q", None, ["a", "b"]), n_keys=7).size == 2
    assert (events[-1]["op"], events[-1]["n_keys"]) == ("mine", 2)
    client._emit("other", "q", 3, 4, time.perf_counter() - 1.0, "error")
    assert (events[-1]["n_keys"], events[-1]["n_bytes"], events[-1]["status"]) == (3, 4, "error")
    assert events[-1]["wall_ms"] >= 1000


def test_what_the_engine_lacks_it_lacks_behind_the_wrapper_too(client: MetricsDataPlaneClient) -> None:
    class Minimal(MemoryDataPlaneClient):
        save_checkpoint = DataPlaneClient.save_checkpoint
        partition_status = DataPlaneClient.partition_status
        list_sample_ids = DataPlaneClient.list_sample_ids

    inner = Minimal(load_config("local", {"controller_address": "minimal"}), bootstrap=True)
    with MetricsDataPlaneClient(inner) as wrapped:
        with pytest.raises(UnsupportedOperationError, match="Minimal"):
            wrapped.save_checkpoint("x")
        wrapped.register_partition("p", ["x"], 1, [])
        wrapped.put_samples(["a"], "p", batch(["a"]))
        wrapped.reconcile()
        assert wrapped.snapshot()["bytes_outstanding"] == 16


def test_an_engine_written_for_the_plain_contract_gets_no_arguments_it_does_not_know() -> None:
    class Plain(MemoryDataPlaneClient):
        def put_samples(self, sample_ids, partition_id, fields=None, tags=None):  # type: ignore[override]
            return super().put_samples(sample_ids, partition_id, fields, tags)

        def claim_meta(  # type: ignore[override]
            self,
            partition_id,
            task_name,
            required_fields,
            batch_size,
            dp_rank=None,
            blocking=True,
            timeout_s=60.0,
        ):
            return super().claim_meta(
                partition_id, task_name, required_fields, batch_size, dp_rank, blocking, timeout_s
            )

    inner = Plain(load_config("local", {"controller_address": "plain"}), bootstrap=True)
    with MetricsDataPlaneClient(inner) as wrapped:
        wrapped.register_partition("p", ["x"], 1, ["t"])
        wrapped.put_samples(["a"], "p", batch(["a"]))
        assert wrapped.claim_meta("p", "t", ["x"], 1).sample_ids == ["a"]
        with pytest.raises(TypeError, match="where"):
            wrapped.claim_meta("p", "t", ["x"], 1, where={"k": 1})
        with pytest.raises(TypeError, match="timeout_s"):
            wrapped.put_samples(["a"], "p", batch(["a"]), timeout_s=1.0)


def test_the_wrapper_is_transparent_for_what_the_engine_has_beyond_the_contract() -> None:
    inner = memory_client("transparent")
    inner.favourite = "blue"  # type: ignore[attr-defined]
    with MetricsDataPlaneClient(inner) as wrapped:
        assert wrapped.favourite == "blue"
        assert wrapped.inner is inner
        assert "MemoryDataPlaneClient" in repr(wrapped)
        with pytest.raises(AttributeError):
            _ = wrapped.nothing_like_it


def test_close_is_idempotent_and_later_calls_fail_as_the_engine_says(client: MetricsDataPlaneClient) -> None:
    client.close()
    client.close()
    with pytest.raises(ClientClosedError):
        client.put_samples(["a"], "p", batch(["a"]))
    assert client.snapshot()["ops"]["close"]["count"] == 1


def test_the_accounting_does_not_keep_the_data_alive(client: MetricsDataPlaneClient) -> None:
    freed = threading.Event()
    data = np.zeros((2, 1000))

    class Owner(np.ndarray):
        def __del__(self) -> None:
            freed.set()

    fields = TensorDict({"x": torch.from_numpy(data.view(Owner))}, batch_size=[2])
    client.put_samples(["a", "b"], "p", fields)
    del fields, data
    assert freed.is_set()


def test_partitions_and_field_sets_that_come_and_go_do_not_pile_up(client: MetricsDataPlaneClient) -> None:
    outstanding = client._dispatcher.accounting.outstanding
    for step in range(3000):
        client._record_put(f"step-{step}", ["a"], 10)
        client._record_clear(f"step-{step}", None)
    assert len(outstanding._partitions) <= 1025
    assert client.snapshot()["bytes_outstanding"] == 0


def test_closing_does_not_wait_for_an_engine_that_does_not_answer(
    client: MetricsDataPlaneClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, answer = threading.Event(), threading.Event()

    def stuck(partition_id: str) -> dict[str, Any]:
        asked.set()
        answer.wait()
        raise ConnectionError("gone")

    monkeypatch.setattr(client.inner, "partition_status", stuck)
    client.put_samples(["a"], "p", batch(["a"]))
    assert asked.wait(20)
    assert client.snapshot()["bytes_outstanding"] == 16
    client.close()
    answer.set()


# How it is switched on.


def test_the_factory_wraps_when_observability_is_enabled(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="rlplane.observability")
    client = build_data_plane_client(load_config("local", {"observability.enabled": True}))
    assert isinstance(client, MetricsDataPlaneClient)
    client.register_partition("p", ["x"], 1, ["t"])
    client.close()
    lines = [record.getMessage() for record in caplog.records if "data_plane op=" in record.getMessage()]
    assert [line.split()[1] for line in lines] == ["op=register", "op=close"]


def test_without_enabled_the_client_is_returned_as_it_is() -> None:
    inner = memory_client("off")
    assert wrap_with_observability(inner, {}) is inner
    assert wrap_with_observability(inner, {"observability": {"enabled": False}}) is inner
    inner.close()


def test_a_configured_callback_replaces_the_log(events: list[DataPlaneEvent]) -> None:
    inner = memory_client("callback")
    client = wrap_with_observability(inner, {"observability": {"enabled": True, "callback": events.append}})
    client.close()
    assert [event["op"] for event in events] == ["close"]


def test_a_sink_that_cannot_start_is_an_error_at_start(tmp_path: Any) -> None:
    (tmp_path / "file").write_text("")
    inner = memory_client("bad-sink")
    for sink in (
        "nonsense",
        {"kind": "jsonl"},
        {"kind": "jsonl", "path": str(tmp_path / "file" / "x.jsonl")},
        7,
    ):
        with pytest.raises(ConfigError, match="sink"):
            wrap_with_observability(inner, {"observability": {"enabled": True, "sinks": [sink]}})
    inner.close()


def test_sinks_that_did_start_are_closed_when_a_later_one_cannot() -> None:
    class Closable:
        closed = False

        def write(self, records: Any) -> None:
            pass

        def close(self) -> None:
            self.closed = True

    first, inner = Closable(), memory_client("half-started")
    with pytest.raises(ConfigError):
        MetricsDataPlaneClient(inner, sinks=[first, "nonsense"])
    assert first.closed
    inner.close()


def test_log_event_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    log_event(
        {"op": "put", "partition_id": "p", "n_keys": 2, "n_bytes": 32, "wall_ms": 1.23456, "status": "ok"}
    )
    assert caplog.messages == ["data_plane op=put partition=p keys=2 bytes=32 wall_ms=1.235 status=ok"]


# Copies and forks.


class Picklable(MemoryDataPlaneClient):
    def __reduce__(self) -> tuple[Any, ...]:
        return memory_client, ("unpickled",)


module_level_events: deque[DataPlaneEvent] = deque()


def remember(event: DataPlaneEvent) -> None:
    module_level_events.append(event)


def test_it_pickles_if_its_inner_does_and_starts_at_zero() -> None:
    inner = Picklable(load_config("local", {"controller_address": "pickled"}), bootstrap=True)
    original = MetricsDataPlaneClient(inner, remember, sinks=["logging"], track_partitions=["p"])
    original.register_partition("p", ["x"], 1, ["t"])
    original.put_samples(["a"], "p", batch(["a"]))
    copy = pickle.loads(pickle.dumps(original))
    assert copy.snapshot()["total_ops"] == 0
    assert copy._options == original._options
    copy.register_partition("q", ["x"], 1, ["t"])
    copy.close()
    original.close()
    assert [event["partition_id"] for event in module_level_events if event["partition_id"] == "q"] == ["q"]


def test_a_callback_that_does_not_pickle_is_left_out_and_said(caplog: pytest.LogCaptureFixture) -> None:
    inner = Picklable(load_config("local", {"controller_address": "pickled-2"}), bootstrap=True)
    original = MetricsDataPlaneClient(inner, lambda event: None)
    copy = pickle.loads(pickle.dumps(original))
    assert "does not pickle" in caplog.text
    assert copy.snapshot()["callback"] is None
    copy.close()
    original.close()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_child_measures_by_itself(tmp_path: Any) -> None:
    path = tmp_path / "events.jsonl"
    client = MetricsDataPlaneClient(
        memory_client("forked"), lambda event: None, sinks=[{"kind": "jsonl", "path": str(path)}]
    )
    client.register_partition("p", ["x"], 1, ["t"])
    client.put_samples(["a"], "p", batch(["a"]))
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:  # pragma: no cover - the child is not measured
        try:
            client._record_put("p", ["b"], 7)
            client._emit("child", "p", 1, 7, time.perf_counter(), "ok")
            flushed = client.flush()
            snapshot = client.snapshot()
            os.write(writer, f"{snapshot['bytes_outstanding']} {snapshot['total_ops']} {flushed}".encode())
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(reader, 100) == b"7 1 True"
    assert client.snapshot()["bytes_outstanding"] == 16
    client.close()
    text = path.read_text()
    assert f'"pid":{pid}' in text and f'"pid":{os.getpid()}' in text


def test_events_of_a_process_that_ends_without_close_are_written(tmp_path: Any) -> None:
    path = tmp_path / "events.jsonl"
    process = multiprocessing.get_context("spawn").Process(target=_put_and_leave, args=(str(path),))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert path.read_text().count('"kind":"op"') == 2


def _put_and_leave(path: str) -> None:
    client = MetricsDataPlaneClient(memory_client("left"), sinks=[{"kind": "jsonl", "path": path}])
    client.register_partition("p", ["x"], 1, ["t"])
    client.put_samples(["a"], "p", batch(["a"]))


# Transfers.


def test_the_engines_transfers_are_taken_over_summed_up_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="rlplane.observability")
    inner = memory_client("transfers")
    client = MetricsDataPlaneClient(inner, transfer_log_interval_s=0.05)
    client.register_partition("p", ["x"], 1, ["t"])
    inner.transfer_stats.record_transfer(TransferRecord(2**20, 2, 0.001, 0.01))
    wait_for(lambda: "TransferStats over the last" in caplog.text)
    inner.transfer_stats.record_failed_transfer()
    assert client.transfer_stats.num_successful_transfers == 1
    snapshot = client.snapshot()
    assert snapshot["transfers"]["Num successful transfers"] == 1
    assert snapshot["transfers"]["Num failed transfers"] == 1
    assert inner.transfer_stats.is_empty()
    client.close()


def test_the_transfer_log_is_silent_when_nothing_happened(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="rlplane.observability")
    inner = memory_client("silent")
    client = MetricsDataPlaneClient(inner, transfer_log_interval_s=0.01)
    client._monitor.log_transfers(10)
    client.close()
    assert "TransferStats" not in caplog.text
