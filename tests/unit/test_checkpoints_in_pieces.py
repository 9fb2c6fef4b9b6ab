"""A save of which the state comes in pieces, so that others are served between them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from rlplane.adapters.link import Link
from rlplane.config import load_config
from rlplane.errors import CheckpointError
from rlplane.factory import build_data_plane_client
from rlplane.service import core
from rlplane.service import protocol as wire

SAMPLES = 300


@pytest.mark.parametrize("restarts", [0, 2])
def test_a_save_in_pieces_is_the_plane_at_one_point_of_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restarts: int
) -> None:
    """A service that was started again does not know what it had frozen: it is frozen anew."""
    monkeypatch.setattr(core, "_PIECE_BYTES", 1000)
    next_piece, request = core.ControlService._next_piece, Link.request
    ids = [f"s{number}" for number in range(SAMPLES)]
    plane: Any = build_data_plane_client(load_config("local"))
    calls = 0

    def next_piece_or_nothing(service: core.ControlService, held: Any, lease: int) -> tuple[bytes, bool]:
        nonlocal calls
        calls += 1
        if calls in [3, 5][:restarts]:
            service._frozen.clear()
        return next_piece(service, held, lease)

    def served_between(link: Link, asked: Any, kind: Any, **more: Any) -> Any:
        if isinstance(asked, wire.FrozenPiece) and calls == 7:
            plane.clear_samples(ids[:100], "p")  # the save began before
        return request(link, asked, kind, **more)

    monkeypatch.setattr(core.ControlService, "_next_piece", next_piece_or_nothing)
    monkeypatch.setattr(Link, "request", served_between)
    with plane:
        plane.register_partition("p", ["x"], SAMPLES, ["t"])
        data = TensorDict({"x": torch.arange(SAMPLES)}, batch_size=[SAMPLES])
        plane.put_samples(ids, "p", data, tags=[{"v": number} for number in range(SAMPLES)])
        plane.save_checkpoint(str(tmp_path / "saved"))
        assert calls > 8 and plane.service_status()["leases"] == 0
        assert plane.partition_status("p")["samples"] == SAMPLES - 100
    with build_data_plane_client(load_config("local")) as again:
        again.load_checkpoint(str(tmp_path / "saved"))
        meta = again.claim_meta("p", "t", ["x"], SAMPLES)
        assert meta.sample_ids == ids
        assert again.get_data(meta)["x"].tolist() == list(range(SAMPLES))


def test_a_save_that_fails_in_the_middle_leaves_no_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core, "_PIECE_BYTES", 1000)
    with build_data_plane_client(load_config("local")) as plane:
        some: Any = plane
        some.register_partition("p", ["x"], SAMPLES, ["t"])
        data = TensorDict({"x": torch.arange(SAMPLES)}, batch_size=[SAMPLES])
        some.put_samples([f"s{number}" for number in range(SAMPLES)], "p", data)
        (tmp_path / "file").touch()
        with pytest.raises(CheckpointError):
            some.save_checkpoint(str(tmp_path / "file" / "below"))
        assert some.service_status()["leases"] == 0
