"""A spare place that was taken back before it was used: the client writes anew, and nothing is lost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tests.unit.storage.chunk_stores import ChunkPlane

from rlplane.config import load_config
from rlplane.errors import DataPlaneError
from rlplane.factory import build_data_plane_client

MB = 1 << 20


@pytest.fixture(params=["memory", "chunks"])
def two(request: pytest.FixtureRequest) -> Iterator[tuple[Any, Any, Any]]:
    """Two clients of a plane of 16 MB, and what says which values its store holds."""
    if request.param == "memory":
        sizes = {"global_segment_size": 16 * MB, "reserve_for_live": 0.0}
        config = load_config("local", {**sizes, "controller_address": "revoked"})
        first: Any = build_data_plane_client(config)
        second = build_data_plane_client(config, bootstrap=False)
        held = first._link().storage._buffers
    else:
        plane = ChunkPlane(16 * MB)
        first, second, held = plane.client(), plane.client(), plane.store.values
    first.register_partition("p", ["x"], 1000, ["t"])
    yield first, second, held
    second.close()
    first.close()


def rows(value: int, nbytes: int) -> TensorDict:
    return TensorDict({"x": torch.full((1, nbytes), value, dtype=torch.uint8)}, batch_size=[1])


def test_a_put_into_a_revoked_spare_is_written_anew(two: tuple[Any, Any, Any]) -> None:
    first, second, held = two
    first.put_samples(["a"], "p", rows(1, 2 * MB))
    link = first._link()
    spare = link.spare
    assert spare is not None and spare.size >= 2 * MB
    # It needs what the first client has in reserve, and gets it without that client's knowing.
    second.put_samples(["b"], "p", rows(2, 13 * MB), timeout_s=0.0)
    assert link.spare == spare
    second.clear_samples(["b"], "p")
    requests = first.service_status()["requests"]
    first.put_samples(["c"], "p", rows(3, 2 * MB))
    # A commit that was refused, a look at the partition, a new place, a commit; and the one that asks.
    assert first.service_status()["requests"] == requests + 5
    assert first.list_sample_ids("p") == ["a", "c"]
    got = second.get_samples(["a", "c"], "p", ["x"])["x"]
    assert got[0].eq(1).all() and got[1].eq(3).all()
    first.clear_samples(["a", "c"], "p")
    status = first.service_status()
    assert status["storage"]["used"] == status["reserved"]
    assert len(held) == 0, "what was written to the revoked place is still in the store"


def test_a_write_into_a_revoked_spare_that_fails_half_way_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plane = ChunkPlane(16 * MB)
    first, second = plane.client(), plane.client()
    first.register_partition("p", ["x"], 1000, ["t"])
    first.put_samples(["a"], "p", rows(1, 2 * MB))
    second.put_samples(["b"], "p", rows(2, 13 * MB), timeout_s=0.0)
    before = set(plane.store.values)
    put = plane.store.put

    def interrupted(chunks: Any, buffer: Any, deadline: float) -> None:
        put(chunks[:3], buffer, deadline)
        raise KeyboardInterrupt

    monkeypatch.setattr(plane.store, "put", interrupted)
    with pytest.raises(KeyboardInterrupt):
        first.put_samples(["c"], "p", rows(3, 2 * MB))
    assert set(plane.store.values) == before, "the service does not know that place, so nobody will clear it"


def test_a_revoked_place_that_cannot_be_cleared_does_not_fail_the_put(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plane = ChunkPlane(16 * MB)
    first, second = plane.client(), plane.client()
    first.register_partition("p", ["x"], 1000, ["t"])
    first.put_samples(["a"], "p", rows(1, 2 * MB))
    second.put_samples(["b"], "p", rows(2, 13 * MB), timeout_s=0.0)
    second.clear_samples(["b"], "p")

    def refuse(keys: Any) -> None:
        raise DataPlaneError("the store could not remove a value")

    monkeypatch.setattr(plane.store, "drop", refuse)
    first.put_samples(["c"], "p", rows(3, 2 * MB))
    assert first.get_samples(["c"], "p", ["x"])["x"].eq(3).all()
