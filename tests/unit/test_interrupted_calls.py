"""Ctrl-C between an answer and the call that has asked for it: what the answer gave is given back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from rlplane import build_data_plane_client, load_config
from rlplane.service import protocol as wire


@pytest.fixture(params=["local", "shm"])
def plane(request: pytest.FixtureRequest) -> Iterator[Any]:
    with build_data_plane_client(load_config(request.param)) as client:
        client.register_partition("p", ["x"], 8, ["t"])
        client.put_samples(["a", "b"], "p", TensorDict({"x": torch.arange(8).view(2, 4)}, batch_size=[2]))
        yield client


def interrupt_after(plane: Any, kind: type[wire.Answer], monkeypatch: pytest.MonkeyPatch) -> None:
    """The next answer of that kind comes, and Ctrl-C with it."""
    connection = plane._link().connection
    exchange = connection.exchange

    def interrupted(request: wire.Request, **how: Any) -> wire.Answer:
        answer: wire.Answer = exchange(request, **how)
        if isinstance(answer, kind):
            monkeypatch.undo()
            raise KeyboardInterrupt
        return answer

    monkeypatch.setattr(connection, "exchange", interrupted)


def test_a_read_that_is_interrupted_keeps_no_lease(plane: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt_after(plane, wire.Located, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        plane.get_samples(["a", "b"], "p", ["x"])
    assert plane.service_status()["leases"] == 0
    assert plane.get_samples(["b"], "p", ["x"])["x"].tolist() == [[4, 5, 6, 7]]


def test_a_put_that_is_interrupted_keeps_no_room(plane: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = plane.service_status()["reserved"]
    large = TensorDict({"x": torch.zeros(2, 1 << 20)}, batch_size=[2])  # for which there is no spare room
    interrupt_after(plane, wire.Reserved, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        plane.put_samples(["c", "d"], "p", large)
    assert plane.service_status()["reserved"] <= before
    assert sorted(plane.list_sample_ids("p")) == ["a", "b"]


def test_a_claim_that_is_interrupted_has_claimed_nothing(plane: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt_after(plane, wire.Claimed, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        plane.claim_meta("p", "t", ["x"], 2)
    assert plane.claim_meta("p", "t", ["x"], 2, timeout_s=5.0).sample_ids == ["a", "b"]
