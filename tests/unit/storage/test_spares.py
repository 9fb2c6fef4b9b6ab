"""The spare place between a real client and its service: taken unasked, and never a revoked one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from rlplane.config import load_config
from rlplane.factory import build_data_plane_client
from rlplane.service import protocol as wire

MB = 2**20


@pytest.fixture
def plane() -> Iterator[Any]:
    client = build_data_plane_client(load_config("shm", {"global_segment_size": 64 * MB}))
    client.register_partition("flow", ["x"], 10**9, ["train"])
    yield client
    client.close()


def put(client: Any, sample_id: str, nbytes: int) -> None:
    data = TensorDict({"x": torch.ones(1, nbytes, dtype=torch.uint8)}, batch_size=[1])
    client.put_samples([sample_id], "flow", data)


def test_the_next_put_uses_the_spare_that_came_with_the_last(plane: Any) -> None:
    put(plane, "a", MB)
    before = plane.service_status()
    assert before["reserved"] >= MB
    put(plane, "b", MB)
    # One request for the put, one to ask for the figures.
    assert plane.service_status()["requests"] == before["requests"] + 2


def test_a_spare_that_was_exchanged_is_not_taken_by_a_thread_that_has_not_heard(plane: Any) -> None:
    link = plane._link()
    put(plane, "a", MB)
    old = link.spare
    put(plane, "b", 4 * MB)
    put(plane, "c", 4 * MB)
    new = link.spare
    assert old is not None and new is not None and new.number != old.number
    link.spare = old
    assert link.take_spare(1000) is None, "its bytes may belong to somebody else by now"
    link.spare = new
    assert link.take_spare(1000) == new
    assert link.take_spare(1000) is None
    link.request(wire.Unreserve(new.number), wire.Done)
    assert plane.service_status()["reserved"] == 0


def test_a_put_as_large_as_the_arena_is_not_held_up_by_the_clients_own_spare(plane: Any) -> None:
    put(plane, "a", 8 * MB)
    plane.clear_samples(["a"], "flow")
    assert plane.service_status()["reserved"] >= 8 * MB
    data = TensorDict({"x": torch.ones(1, 63 * MB, dtype=torch.uint8)}, batch_size=[1])
    plane.put_samples(["b"], "flow", data, timeout_s=0.0)
    assert plane.list_sample_ids("flow") == ["b"]
