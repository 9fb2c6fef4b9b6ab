"""The control service of a cluster may die or stand still, and nothing that it has said is lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tests.integration.conftest import cluster_config

from rlplane.errors import PlaneConnectionError
from rlplane.factory import build_data_plane_client


def batch(ids: list[str], value: int) -> TensorDict:
    return TensorDict({"x": torch.full((len(ids), 64), value)}, batch_size=[len(ids)])


@pytest.fixture
def clients(ray_cluster: str) -> Iterator[tuple[Any, Any]]:
    """A bootstrap client that is patient, and a worker that is not."""
    config = cluster_config("simple")
    with build_data_plane_client(config) as client:
        client.register_partition("p", ["x"], 10**6, ["t"])
        impatient: Any = {**config, "ack_timeout_ms": 1000}
        with build_data_plane_client(impatient, bootstrap=False) as worker:
            worker.partition_status("p")
            yield client, worker


def test_a_service_that_is_killed_comes_back_with_samples_claims_and_clients(
    clients: tuple[Any, Any],
) -> None:
    client, _ = clients
    client.put_samples(["a", "b"], "p", batch(["a", "b"], 1))
    assert client.claim_meta("p", "t", ["x"], 1).sample_ids == ["a"]
    for step in range(2):
        os.kill(client.service_status()["pid"], signal.SIGKILL)
        client.put_samples([f"c{step}"], "p", batch(["c"], step))
        assert (client.get_samples(["a", "b"], "p", ["x"])["x"] == 1).all()
    assert client.claim_meta("p", "t", ["x"], 9, blocking=False).sample_ids == ["b", "c0", "c1"]


def test_a_service_that_stands_still_leaves_no_claim_and_no_put_behind(clients: tuple[Any, Any]) -> None:
    client, worker = clients
    client.put_samples(["a", "b"], "p", batch(["a", "b"], 1))
    pid = client.service_status()["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(PlaneConnectionError):
            worker.claim_meta("p", "t", ["x"], 2, blocking=False)
        with pytest.raises(PlaneConnectionError):
            worker.put_samples(["lost"], "p", batch(["lost"], 2), timeout_s=0.5)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert client.claim_meta("p", "t", ["x"], 2, timeout_s=30).sample_ids == ["a", "b"]
    assert client.list_sample_ids("p") == ["a", "b"]
