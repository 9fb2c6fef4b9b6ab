"""Saves and loads of which the state comes and goes in pieces, so that others are served between them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from rlplane.adapters import checkpoint
from rlplane.adapters.link import Link
from rlplane.config import load_config
from rlplane.control import clearing, loading
from rlplane.control.loading import StateLoader
from rlplane.errors import CheckpointError
from rlplane.factory import build_data_plane_client
from rlplane.service import checkpoints
from rlplane.service import protocol as wire
from rlplane.service.checkpoints import Checkpoints

SAMPLES = 300


@pytest.mark.parametrize("restarts", [0, 2])
def test_a_save_in_pieces_is_the_plane_at_one_point_of_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restarts: int
) -> None:
    """A service that was started again does not know what it had frozen: it is frozen anew."""
    monkeypatch.setattr(checkpoints, "_PIECE_BYTES", 1000)
    next_piece, request = Checkpoints.next_piece, Link.request
    ids = [f"s{number}" for number in range(SAMPLES)]
    plane: Any = build_data_plane_client(load_config("local"))
    calls = 0

    def next_piece_or_nothing(saves: Checkpoints, held: Any, lease: int) -> tuple[bytes, bool]:
        nonlocal calls
        calls += 1
        if calls in [3, 5][:restarts]:
            saves.frozen.clear()
        return next_piece(saves, held, lease)

    def served_between(link: Link, asked: Any, kind: Any, **more: Any) -> Any:
        if isinstance(asked, wire.FrozenPiece) and calls == 7:
            plane.clear_samples(ids[:100], "p")  # the save began before
        return request(link, asked, kind, **more)

    monkeypatch.setattr(Checkpoints, "next_piece", next_piece_or_nothing)
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
    monkeypatch.setattr(checkpoints, "_PIECE_BYTES", 1000)
    with build_data_plane_client(load_config("local")) as plane:
        some: Any = plane
        some.register_partition("p", ["x"], SAMPLES, ["t"])
        data = TensorDict({"x": torch.arange(SAMPLES)}, batch_size=[SAMPLES])
        some.put_samples([f"s{number}" for number in range(SAMPLES)], "p", data)
        (tmp_path / "file").touch()
        with pytest.raises(CheckpointError):
            some.save_checkpoint(str(tmp_path / "file" / "below"))
        assert some.service_status()["leases"] == 0


def test_a_load_in_pieces_is_seen_when_all_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "_SAMPLES_AT_ONCE", 40)
    monkeypatch.setattr(clearing, "_SAMPLES_AT_ONCE", 40)
    monkeypatch.setattr(checkpoint, "_BLOCKS_AT_ONCE", 3)
    ids = [f"s{number}" for number in range(SAMPLES)]
    plane: Any = build_data_plane_client(load_config("local"))
    pieces: list[int] = []
    add, request = StateLoader.add, Link.request

    def counted(loader: StateLoader, data: bytes) -> None:
        before = loader._state.live
        add(loader, data)
        pieces.append(loader._state.live - before)

    def served_between(link: Link, asked: Any, kind: Any, **more: Any) -> Any:
        if isinstance(asked, wire.RestorePiece):
            assert plane.list_sample_ids("other") == ids[:100]
            assert plane.service_status()["partitions"] == ["other"]
        return request(link, asked, kind, **more)

    with plane:
        plane.register_partition("p", ["x"], SAMPLES, ["t"])
        for at in range(0, SAMPLES, 50):
            data = TensorDict({"x": torch.arange(at, at + 50)}, batch_size=[50])
            plane.put_samples(ids[at : at + 50], "p", data, tags=[{"v": number} for number in range(50)])
        plane.save_checkpoint(str(tmp_path / "saved"))
        plane.drop_partition("p")
        plane.register_partition("other", ["x"], SAMPLES, ["t"])
        plane.put_samples(ids[:100], "other", TensorDict({"x": torch.arange(100)}, batch_size=[100]))
        monkeypatch.setattr(StateLoader, "add", counted)
        monkeypatch.setattr(Link, "request", served_between)
        plane.load_checkpoint(str(tmp_path / "saved"))
        assert pieces == [40] * 7 + [20]
        status = plane.service_status()
        assert status["samples"] == SAMPLES and status["partitions"] == ["p"]
        meta = plane.claim_meta("p", "t", ["x"], SAMPLES)
        assert meta.sample_ids == ids
        assert plane.get_data(meta)["x"].tolist() == list(range(SAMPLES))


def test_a_load_that_is_refused_in_the_middle_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "_SAMPLES_AT_ONCE", 40)
    ids = [f"s{number}" for number in range(100)]
    data = TensorDict({"x": torch.arange(100)}, batch_size=[100])
    with build_data_plane_client(load_config("local")) as plane:
        some: Any = plane
        some.register_partition("p", ["x"], 100, ["t"])
        some.put_samples(ids, "p", data)
        some.save_checkpoint(str(tmp_path / "saved"))
    with build_data_plane_client(load_config("local", {"storage_capacity": 50})) as small:
        some = small
        some.register_partition("kept", ["x"], 1, ["t"])
        some.put_samples(ids[:1], "kept", data[:1])
        with pytest.raises(CheckpointError, match="storage_capacity is 50"):
            some.load_checkpoint(str(tmp_path / "saved"))
        status = some.service_status()
        assert status["partitions"] == ["kept"]
        assert some.list_sample_ids("kept") == ids[:1]
