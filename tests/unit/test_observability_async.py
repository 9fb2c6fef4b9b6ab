"""The asyncio client with every operation measured: the same promises, and the events of the blocking one."""

from __future__ import annotations

import asyncio
import pickle
import uuid
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import rlplane
from rlplane.observability.async_client import AsyncMetricsDataPlaneClient
from rlplane.testing import checks, run_check
from rlplane.testing.async_adapter import BlockingClient, loop_in_thread

NEEDS_A_DEVICE = "what_is_on_a_device_is_moved_to_the_host"


def measured(callback, **keys):
    cfg = rlplane.load_config("local", {"controller_address": f"measured-{uuid.uuid4().hex}", **keys})
    cfg["observability"] = {"enabled": True, "callback": callback}
    return cfg


class MeasuredAsyncPlanes:
    """Every client gets a plane of its own; all of them live on one event loop."""

    def __init__(self):
        self.loop = loop_in_thread()
        self.configs = {}

    def client(self, **config):
        return self._open(measured([].append, **config), bootstrap=True)

    def worker(self, client):
        return self._open(self.configs[client], bootstrap=False)

    def _open(self, cfg, *, bootstrap):
        client = BlockingClient(rlplane.build_async_data_plane_client(cfg, bootstrap=bootstrap), self.loop)
        assert isinstance(client.asynchronous, AsyncMetricsDataPlaneClient)
        self.configs[client] = cfg
        return client


PLANES = MeasuredAsyncPlanes()


@pytest.mark.parametrize("check", checks(), ids=str)
def test_the_measured_asyncio_client_keeps_the_promise_that(check):
    outcome = run_check(check, PLANES)
    assert outcome.result == "kept" or check.name == NEEDS_A_DEVICE


class Sink:
    """Keeps every record."""

    def __init__(self):
        self.records = []

    def write(self, records):
        self.records += records

    def close(self):
        pass


def rows(count):
    return TensorDict({"x": torch.ones(count, 4)}, batch_size=[count])


# On a busy machine the blocking client waits for its put, in the thread of the loop.
@pytest.mark.filterwarnings("ignore:put_samples waits in a thread that runs an event loop:RuntimeWarning")
async def test_operations_give_the_events_of_the_blocking_client():
    seen: list[Any] = []
    expected: list[Any] = []

    async def operate(call, client):
        await call(client.register_partition("p", ["x"], 4, ["train"]))
        await call(client.put_samples(["a", "b"], "p", rows(2), [{"v": 1}, {"v": 2}]))
        meta = await call(client.claim_meta("p", "train", ["x"], 1, blocking=False))
        await call(client.get_data(meta))
        await call(client.get_samples(["b"], "p", ["x"]))
        await call(client.check_consumption_status("p", ["train"]))
        await call(client.list_sample_ids("p"))
        await call(client.partition_status("p"))
        assert client.bytes_outstanding_by_partition() == {"p": 32}
        await call(client.clear_samples(["a", "b"], "p"))
        assert client.bytes_outstanding_by_partition() == {}
        await call(client.close())

    async def at_once(result):
        return result

    async def awaited(coroutine):
        return await coroutine

    await operate(at_once, rlplane.build_data_plane_client(measured(expected.append)))
    client: Any = rlplane.build_async_data_plane_client(measured(seen.append))
    await operate(awaited, client)
    shown = ("op", "partition_id", "n_keys", "n_bytes", "status")
    assert [[event[key] for key in shown] for event in seen] == [
        [event[key] for key in shown] for event in expected
    ]
    assert not client.transfer_stats.is_empty()


async def test_a_timeout_and_a_cancellation_are_recorded_as_what_they_are():
    sink = Sink()
    cfg = measured([].append)
    cfg["observability"]["sinks"] = [sink]
    measuring: Any = rlplane.build_async_data_plane_client(cfg)
    async with measuring as client:
        await client.register_partition("p", ["x"], 4, ["train"])
        with pytest.raises(TimeoutError):
            await client.claim_meta("p", "train", ["x"], 1, timeout_s=0.01)
        claim = asyncio.create_task(client.claim_meta("p", "train", ["x"], 1))
        await asyncio.sleep(0.01)
        claim.cancel()
        with pytest.raises(asyncio.CancelledError):
            await claim
        with pytest.raises(KeyError):
            await client.get_samples(["a"], "p", ["x"])
        assert await client.flush()
    failed = [record for record in sink.records if record["kind"] == "op" and record["status"] != "ok"]
    assert [(record["op"], record["status"], record["error"]) for record in failed] == [
        ("claim_meta", "timeout", "ClaimTimeoutError"),
        ("claim_meta", "error", "CancelledError"),
        ("get", "error", "MissingDataError"),
    ]


async def test_it_pickles_where_its_engine_does():
    cfg = rlplane.load_config("shm")
    cfg["observability"] = {"enabled": True, "callback": print, "role": "rollout"}
    async with rlplane.build_async_data_plane_client(cfg) as client:
        await client.register_partition("p", ["x"], 4, ["train"])
        await client.put_samples(["a"], "p", rows(1))
        copy = pickle.loads(pickle.dumps(client))
        assert await copy.list_sample_ids("p") == ["a"]
        assert copy.bytes_outstanding_by_partition() == {}
        await copy.close()
        assert await client.list_sample_ids("p") == ["a"]
