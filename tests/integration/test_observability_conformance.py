"""The contract holds with the measuring client around the engines that live in other processes."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from rlplane.config import load_config
from rlplane.factory import build_data_plane_client
from rlplane.observability import MetricsDataPlaneClient
from rlplane.testing import PromiseCheck, checks, run_check

# What a machine without an accelerator cannot show.
NOT_HERE = {"what_is_on_a_device_is_moved_to_the_host"}


class ShmPlanes:
    """One plane for all checks that need nothing special of it."""

    time_scale = 2.0
    backend = "shm"

    def __init__(self):
        self._shared = build_data_plane_client(load_config("shm"))

    def client(self, **config):
        return build_data_plane_client(load_config("shm", config)) if config else self.worker(self._shared)

    def worker(self, client):
        address = {"controller_address": client.controller_address}
        return build_data_plane_client(load_config("shm", address), bootstrap=False)

    def close(self):
        self._shared.close()


class Observed:
    """The planes of another factory, with every client wrapped."""

    def __init__(self, planes):
        self._planes = planes
        self.time_scale = planes.time_scale

    def client(self, **config):
        return MetricsDataPlaneClient(self._planes.client(**config), lambda event: None, sinks=["logging"])

    def worker(self, client):
        return MetricsDataPlaneClient(self._planes.worker(client.inner), lambda event: None)


@pytest.fixture(scope="module")
def shm():
    planes = ShmPlanes()
    yield planes
    planes.close()


@pytest.mark.parametrize("check", checks(), ids=lambda check: check.name)
def test_observed_shared_memory_keeps_the_contract(shm, check: PromiseCheck):
    outcome = run_check(check, Observed(shm))
    assert outcome.result == "kept" or check.name in NOT_HERE, outcome.reason


# One backend: the measuring client sees the adapter, and what is below it is the adapter's affair. With
# Mooncake the adapter passes the suite bare, and the demo runs with every operation measured.
@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.parametrize("cluster", ["simple"], indirect=True)
@pytest.mark.parametrize("check", checks(), ids=lambda check: check.name)
def test_an_observed_cluster_keeps_the_contract(cluster, check: PromiseCheck):
    outcome = run_check(check, Observed(cluster))
    assert outcome.result == "kept" or check.name in NOT_HERE, outcome.reason


def test_the_transfers_of_shared_memory_agree_with_the_bytes_that_were_put_and_got(shm):
    with MetricsDataPlaneClient(shm.client()) as client:
        client.register_partition("transfers", ["x"], 64, ["train"])
        ids = [f"s{row}" for row in range(64)]
        data = torch.arange(64 * 1000).reshape(64, 1000)
        client.put_samples(ids, "transfers", TensorDict({"x": data}, batch_size=[64]))
        client.get_samples(ids[::-1], "transfers", ["x"])
        stats, snapshot = client.transfer_stats, client.snapshot()
        client.clear_samples(ids, "transfers")
    assert stats.num_successful_transfers >= 1
    assert sum(stats.data["bytes_transferred"]) >= data.nbytes
    assert all(value >= 0 for key in ("transfer_duration", "post_duration") for value in stats.data[key])
    assert min(stats.data["num_descriptors"]) >= 1
    assert snapshot["transfers"]["Num failed transfers"] == 0
    assert snapshot["total_bytes"] == 2 * data.nbytes
