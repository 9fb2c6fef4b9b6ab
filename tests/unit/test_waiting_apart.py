"""The time in which an operation waits for others is kept apart from its latency, whatever the engine."""

from __future__ import annotations

import asyncio
import logging
import threading
import uuid
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import rlplane
from rlplane.interfaces import DataPlaneConfig
from rlplane.observability import MetricsDataPlaneClient
from rlplane.observability.async_client import AsyncMetricsDataPlaneClient
from rlplane.sinks import Record
from rlplane.sinks.log import LoggingSink

WAIT_S = 0.2


class Operations:
    """A sink that keeps the records of claims and puts."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def write(self, records: Sequence[Record]) -> None:
        self.records += [record for record in records if record["kind"] == "op"]

    def close(self) -> None: ...

    def of(self, op: str) -> list[Record]:
        return [record for record in self.records if record["op"] == op]


def config(backend: str, sink: Any, **keys: Any) -> DataPlaneConfig:
    name = {"controller_address": f"waits-{uuid.uuid4().hex}"} if backend == "local" else {}
    cfg = rlplane.load_config(backend, {**name, **keys})
    cfg["observability"] = {"enabled": True, "callback": lambda event: None, "sinks": [sink]}
    return cfg


def rows(*ids: str) -> TensorDict:
    return TensorDict({"x": torch.zeros(len(ids), 4)}, [len(ids)])


@pytest.mark.parametrize("backend", ["local", "shm"])
def test_a_claim_that_waits_says_for_how_long(backend: str) -> None:
    sink = Operations()
    client = rlplane.build_data_plane_client(config(backend, sink))
    assert isinstance(client, MetricsDataPlaneClient)
    with client:
        client.register_partition("p", ["x"], 100, ["train"])
        with pytest.raises(TimeoutError):
            client.claim_meta("p", "train", ["x"], 1, timeout_s=WAIT_S)
        client.put_samples(["a"], "p", rows("a"))
        client.claim_meta("p", "train", ["x"], 1)
        snapshot = client.snapshot()
        assert client.flush()
    in_vain, at_once = sink.of("claim_meta")
    assert in_vain["status"] == "timeout"
    assert WAIT_S * 1e3 <= in_vain["wait_ms"] <= in_vain["wall_ms"]
    assert at_once["wait_ms"] == 0 and sink.of("put")[0]["wait_ms"] == 0
    claims = snapshot["ops"]["claim_meta"]
    assert claims["waited_s"] >= WAIT_S and claims["timeouts"] == 1 and claims["errors"] == 0


def test_a_put_that_waits_for_room_says_for_how_long() -> None:
    sink = Operations()
    with rlplane.build_data_plane_client(config("local", sink, storage_capacity=1)) as client:
        assert isinstance(client, MetricsDataPlaneClient)
        client.register_partition("p", ["x"], 100, ["train"])
        client.put_samples(["a"], "p", rows("a"))
        clear = threading.Timer(WAIT_S, client.clear_samples, (["a"], "p"))
        clear.start()
        client.put_samples(["b"], "p", rows("b"))
        clear.join()
        assert client.flush()
    assert sink.of("put")[1]["wait_ms"] > 0


def test_a_task_of_an_event_loop_waits_apart_from_the_others() -> None:
    sink = Operations()

    async def run() -> None:
        client = rlplane.build_async_data_plane_client(config("local", sink))
        assert isinstance(client, AsyncMetricsDataPlaneClient)
        async with client:
            await client.register_partition("p", ["x"], 100, ["train", "eval"])
            waiting = asyncio.create_task(client.claim_meta("p", "train", ["x"], 1))
            while (await client.partition_status("p"))["tasks"]["train"]["waiting"] == 0:
                await asyncio.sleep(0.01)
            await client.claim_meta("p", "eval", ["x"], 1, blocking=False)
            await asyncio.sleep(WAIT_S)
            await client.put_samples(["a"], "p", rows("a"))
            await waiting
            assert await client.flush()

    asyncio.run(run())
    waits = {record["task"]: record["wait_ms"] for record in sink.of("claim_meta")}
    assert waits["train"] >= WAIT_S * 1e3 and waits["eval"] == 0


def test_the_log_has_no_warning_about_a_claim_that_found_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.INFO, "rlplane.events"),
        rlplane.build_data_plane_client(config("local", LoggingSink())) as client,
    ):
        assert isinstance(client, MetricsDataPlaneClient)
        client.register_partition("p", ["x"], 100, ["train"])
        with pytest.raises(TimeoutError):
            client.claim_meta("p", "train", ["x"], 1, timeout_s=0.0)
        with pytest.raises(KeyError):
            client.get_samples(["nobody"], "p", ["x"])
        assert client.flush()
    levels = {record.getMessage().split()[0]: record.levelname for record in caplog.records}
    assert (levels["op=claim_meta"], levels["op=get"]) == ("INFO", "WARNING")
