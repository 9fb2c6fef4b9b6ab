"""``transfer_queue.native``: programs that speak TransferQueue and ours share samples."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import NonTensorStack, TensorDict
from tests.integration.conftest import cluster_config
from tests.warm_workers import WarmProcess

from rlplane import build_data_plane_client
from rlplane.adapters.transfer_queue.native import NativeTQDataPlaneClient
from rlplane.errors import MissingDataError, PlaneConnectionError, UnsupportedOperationError
from rlplane.testing import PromiseCheck, checks, run_check

pytestmark = pytest.mark.cluster
PLAIN = Path(__file__).with_name("plain_transfer_queue.py")
KEYS = ["a", "b", "c"]


def native_config(backend: str, **keys: Any) -> Any:
    config = {"transfer_queue.native": True, "local_buffer_size": 64 << 20, **keys}
    return cluster_config(backend, **config)


class PlainProgram:
    """A process that speaks TransferQueue."""

    def __init__(self, ray_address: str) -> None:
        self._process = WarmProcess(
            [sys.executable, str(PLAIN)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "RAY_ADDRESS": ray_address},
        )

    def __call__(self, command: str, **given: Any) -> Any:
        assert self._process.stdin and self._process.stdout
        print(json.dumps({"command": command, **given}), file=self._process.stdin, flush=True)
        for line in self._process.stdout:
            if line.startswith('{"answer"'):
                return json.loads(line)["answer"]
        raise AssertionError(f"the plain program ended in {command!r}")

    def end(self) -> None:
        if self._process.poll() is None:
            self._process.communicate(timeout=300)


@pytest.fixture
def plain(ray_cluster: str) -> Iterator[PlainProgram]:
    program = PlainProgram(ray_cluster)
    yield program
    program.end()


@pytest.mark.parametrize("backend", ["simple", "mooncake_cpu"])
def test_a_plain_program_and_ours_work_on_the_same_samples(backend, plain):
    if backend == "simple":
        plain("start")  # and we join it
    client = build_data_plane_client(native_config(backend))
    try:
        assert isinstance(client, NativeTQDataPlaneClient)
        if backend == "mooncake_cpu":
            plain("join")
        client.register_partition("train", ["tokens", "grid", "score", "text", "reward"], 3, ["reward"])

        # They produce, we consume, and write a column of our own.
        plain("put", keys=KEYS, partition="train", lengths=[3, 1, 2], tags=[{"n": n} for n in range(3)])
        meta = client.claim_meta("train", "reward", ["tokens", "score"], 3, timeout_s=60)
        rows = dict(zip(meta.sample_ids, meta.tags or [], strict=True))
        assert rows == {"a": {"n": 0}, "b": {"n": 1}, "c": {"n": 2}}
        data = client.get_samples(KEYS, "train", ["tokens", "grid", "score", "text"])
        assert [row.tolist() for row in data["tokens"].unbind()] == [[0, 1, 2], [0], [0, 1]]
        assert data["grid"].shape == (3, 2, 3)
        assert data["score"].tolist() == [0.0, 0.5, 1.0]
        assert list(data["text"]) == KEYS
        assert client.check_consumption_status("train", ["reward"])
        client.put_samples(KEYS, "train", TensorDict({"reward": torch.ones(3, 2)}, 3), [{"done": True}] * 3)

        # We produce, they consume.
        assert plain("get", keys=KEYS, partition="train", fields=["reward"]) == {"reward": [[1.0, 1.0]] * 3}
        assert plain("list", partition="train")["b"] == {"n": 1, "done": True}
        columns = {"score": torch.tensor([5.0]), "text": NonTensorStack("new"), "grid": torch.zeros(1, 2, 3)}
        client.put_samples(["d"], "train", TensorDict(columns, batch_size=1), [{"n": 3}])
        assert plain("get", keys=["d"], partition="train", fields=["text"]) == {"text": ["new"]}

        # What is missing is named, on whatever side it was cleared.
        with pytest.raises(MissingDataError, match="'gone'"):
            client.get_samples(["a", "gone"], "train", ["score"])
        with pytest.raises(MissingDataError, match="not written"):
            client.get_samples(["a", "d"], "train", ["tokens"])
        client.clear_samples(["a", "b", "c"], "train")
        assert list(plain("list", partition="train")) == ["d"]
    finally:
        if backend == "mooncake_cpu":
            plain.end()  # its client of Mooncake would look for the master for long
        client.close()
    if backend == "simple":
        assert list(plain("list", partition="train")) == ["d"], "our close has ended a queue that is not ours"
        plain("close")


@pytest.fixture(scope="module", params=["simple", "mooncake_cpu"])
def queue(request: pytest.FixtureRequest, ray_cluster: str) -> Iterator[NativeTQDataPlaneClient]:
    """A TransferQueue that we have started, on each of its storages in turn."""
    owner = NativeTQDataPlaneClient(native_config(request.param))
    yield owner
    owner.close()


class NativePlanes:
    """Clients of one TransferQueue, for the conformance suite."""

    time_scale = 2.0

    def __init__(self, owner: NativeTQDataPlaneClient) -> None:
        self._owner = owner

    def client(self) -> NativeTQDataPlaneClient:
        # TransferQueue hands samples out by index. This uses up the indexes that earlier checks have cleared,
        # so that those of the next samples ascend.
        self._owner._client().get_meta(["x"], 64, "used up", mode="insert")
        return NativeTQDataPlaneClient(self._owner._cfg)

    def worker(self) -> NativeTQDataPlaneClient:
        return NativeTQDataPlaneClient(self._owner._cfg, bootstrap=False)


@pytest.mark.parametrize("check", checks(), ids=lambda check: check.name)
def test_the_contract_is_kept_or_the_limit_is_declared(queue, check: PromiseCheck):
    run_check(check, NativePlanes(queue))


def test_what_transfer_queue_has_no_word_for_is_refused(queue):
    with pytest.raises(UnsupportedOperationError, match="grpo_group_size"):
        queue.register_partition("p", ["x"], 1, ["t"], grpo_group_size=4)
    with pytest.raises(UnsupportedOperationError, match="where"):
        queue.claim_meta("p", "t", ["x"], 1, where={"v": 1})


def test_without_a_queue_there_is_nothing_to_join(ray_cluster, queue):
    queue.close()
    with pytest.raises(PlaneConnectionError, match="no TransferQueue runs"):
        NativeTQDataPlaneClient(native_config("simple", ack_timeout_ms=100), bootstrap=False)
