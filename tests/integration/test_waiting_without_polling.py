"""Whoever waits is woken: while it waits, the control service is asked for nothing."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from tensordict import TensorDict
from tests.integration.conftest import cluster_config

from rlplane.adapters.local.shm import ShmDataPlaneClient
from rlplane.adapters.transfer_queue import TQDataPlaneClient
from rlplane.config import load_config
from rlplane.factory import build_data_plane_client

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

MB = 1 << 20
WAITS_S = 1.0


def rows(count, width=1):
    data = torch.arange(count * width, dtype=torch.uint8).reshape(count, width)
    return TensorDict({"x": data}, batch_size=[count])


class Call(threading.Thread):
    """A call in a thread of its own."""

    def __init__(self, function, *args, **kwargs):
        super().__init__(daemon=True)
        self.call = lambda: function(*args, **kwargs)
        self.start()

    def run(self):
        try:
            self.outcome = self.call()
        except BaseException as error:
            self.outcome = error

    def result(self):
        self.join(60)
        assert not self.is_alive(), "the call that waits was not woken"
        assert not isinstance(self.outcome, BaseException), self.outcome
        return self.outcome


@pytest.fixture(scope="module", params=["shm", "simple", "mooncake_cpu"])
def planes(request, ray_cluster):
    """The bootstrap client of a small plane, and a worker of it."""
    small = {"global_segment_size": 32 * MB, "storage_capacity": 1000}
    if request.param == "shm":
        first = build_data_plane_client(load_config("shm", small))
        assert isinstance(first, ShmDataPlaneClient)
        address = {"controller_address": first.controller_address}
        second = build_data_plane_client(load_config("shm", address), bootstrap=False)
    else:
        first = TQDataPlaneClient(cluster_config(request.param, **small))
        second = TQDataPlaneClient(first._cfg, bootstrap=False)
    yield first, second
    second.close()
    first.close()


class Requests:
    """Counts the requests that the service has served, beside those of this count."""

    def __init__(self, client):
        self._client, self._own = client, 0
        self._before = client.service_status()["requests"]

    def others(self):
        self._own += 1
        return self._client.service_status()["requests"] - self._before - self._own

    def stay(self, count):
        """There are ``count`` soon, and no more for as long as the call then waits."""
        until(lambda: self.others() >= count)
        time.sleep(WAITS_S)
        assert self.others() == count


def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def test_a_waiting_claim_is_woken_by_the_write_and_asks_only_once(planes):
    first, second = planes
    first.register_partition("claims", ["x"], 100, ["t"])
    requests = Requests(first)
    claim = Call(second.claim_meta, "claims", "t", ["x"], 2, timeout_s=120)
    requests.stay(1)
    assert first.partition_status("claims")["tasks"]["t"]["waiting"] == 1
    first.put_samples(["a", "b"], "claims", rows(2))
    assert claim.result().sample_ids == ["a", "b"]
    first.clear_samples(["a", "b"], "claims")


def test_a_put_that_waits_for_bytes_is_woken_by_the_clear_and_asks_only_once(planes):
    first, second = planes
    first.register_partition("bytes", ["x"], 100, ["t"])
    first.put_samples(["large"], "bytes", rows(1, 24 * MB))
    requests = Requests(first)
    put = Call(second.put_samples, ["next"], "bytes", rows(1, 20 * MB), timeout_s=120)
    requests.stay(2)  # one that looks at the partition, one for the room
    assert put.is_alive() and first.list_sample_ids("bytes") == ["large"]
    first.clear_samples(["large"], "bytes")
    assert put.result().sample_ids == ["next"]
    assert torch.equal(first.get_samples(["next"], "bytes", ["x"])["x"], rows(1, 20 * MB)["x"])
    first.clear_samples(["next"], "bytes")


def test_a_put_that_waits_for_samples_is_woken_by_the_clear_and_asks_only_once(planes):
    first, second = planes
    first.register_partition("samples", ["x"], 10_000, ["t"])
    ids = [f"s{row}" for row in range(1000)]
    first.put_samples(ids, "samples", rows(1000))
    requests = Requests(first)
    put = Call(second.put_samples, ["next"], "samples", rows(1), timeout_s=120)
    requests.stay(3)  # the partition, room for the bytes, and the commit, which waits
    assert put.is_alive() and first.list_sample_ids("samples") == ids
    first.clear_samples(ids[:1], "samples")
    assert put.result().sample_ids == ["next"]
    first.clear_samples([*ids, "next"], "samples")
