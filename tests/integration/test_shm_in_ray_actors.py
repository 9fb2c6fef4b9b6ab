"""The shared-memory client inside Ray actors of the same host: pickled in, connected there, cleaned up."""

from __future__ import annotations

import pytest
import ray
import torch
from tensordict import TensorDict

from rlplane.config import load_config
from rlplane.factory import build_data_plane_client

pytestmark = pytest.mark.cluster


class Stage:
    """Becomes an actor that holds a client which was pickled into it."""

    def __init__(self, plane):
        self.plane = plane

    def produce(self, name, count):
        ids = [f"{name}-{row}" for row in range(count)]
        data = TensorDict({"x": torch.arange(count * 1000).view(count, 1000)}, batch_size=[count])
        self.plane.put_samples(ids, "flow", data)
        return ids

    def consume(self, count):
        meta = self.plane.claim_meta("flow", "train", ["x"], count, timeout_s=60)
        total = int(self.plane.get_data(meta)["x"].sum())
        self.plane.clear_samples(meta.sample_ids, "flow")
        return meta.sample_ids, total


def test_ray_actors_of_one_host_share_a_plane(ray_cluster):
    plane = build_data_plane_client(load_config("shm"))
    plane.register_partition("flow", ["x"], 10**9, ["train"])
    actor = ray.remote(num_cpus=0)(Stage)
    producer, consumer = actor.remote(plane), actor.remote(plane)
    waiting = consumer.consume.remote(64)
    produced = ray.get(producer.produce.remote("a", 64), timeout=300)
    assert ray.get(waiting, timeout=300) == (produced, sum(range(64_000)))
    # A killed actor gives its memory back.
    ray.get(producer.produce.remote("b", 8), timeout=300)
    for dead in (producer, consumer):
        ray.kill(dead)
    assert plane.claim_meta("flow", "train", ["x"], 8).size == 8
    plane.close()
