"""A plane that saves itself every few seconds."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from rlplane.adapters.checkpoint import latest_checkpoint
from rlplane.config import load_config
from rlplane.factory import build_data_plane_client


def test_a_plane_saves_itself_keeps_the_newest_and_stops_when_it_is_closed(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    table = {"dir": str(saved), "every_s": 0.05, "keep": 2}
    plane: Any = build_data_plane_client(load_config("local", {"checkpoint": table}))
    with plane:
        plane.register_partition("p", ["x"], 9, ["t"])
        plane.put_samples(["a"], "p", TensorDict({"x": torch.arange(3)[None]}, batch_size=[1]))
        deadline = time.monotonic() + 30
        while (newest := latest_checkpoint(saved)) is None or newest.name < "checkpoint-00000004":
            assert time.monotonic() < deadline
            time.sleep(0.01)
    left = sorted(path.name for path in saved.iterdir())
    assert len(left) <= 3 and len([name for name in left if not name.startswith(".")]) == 2
    time.sleep(0.2)
    assert sorted(path.name for path in saved.iterdir()) == left
    with build_data_plane_client(load_config("local")) as again:
        metadata = again.load_checkpoint(str(latest_checkpoint(saved)))
        assert again.get_samples(["a"], "p", ["x"])["x"].tolist() == [[0, 1, 2]]
        assert metadata["time"] <= time.time()


def test_a_directory_that_cannot_be_written_does_not_stop_the_plane(tmp_path: Path, caplog: Any) -> None:
    (tmp_path / "file").touch()
    table = {"dir": str(tmp_path / "file" / "below"), "every_s": 0.02, "keep": 1}
    with build_data_plane_client(load_config("local", {"checkpoint": table})) as plane:
        deadline = time.monotonic() + 30
        while "no checkpoint was saved" not in caplog.text:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        plane.register_partition("p", ["x"], 9, ["t"])


def test_what_others_have_saved_into_the_same_directory_is_left_alone(tmp_path: Path, caplog: Any) -> None:
    """Hugging Face's trainer calls its checkpoints checkpoint-500, for example."""
    for name in ("checkpoint-500", "checkpoint-best", "checkpoint-00000007-of-mine"):
        (tmp_path / name).mkdir()
    table = {"dir": str(tmp_path), "every_s": 0.02, "keep": 1}
    with build_data_plane_client(load_config("local", {"checkpoint": table})):
        deadline = time.monotonic() + 30
        while not (tmp_path / "checkpoint-00000003").exists():
            assert time.monotonic() < deadline, caplog.text
            time.sleep(0.01)
    left = {path.name for path in tmp_path.iterdir() if not path.name.startswith(".")}
    assert left > {"checkpoint-500", "checkpoint-best", "checkpoint-00000007-of-mine"}
    newest = latest_checkpoint(tmp_path)
    assert newest is not None and left - {newest.name} == {
        "checkpoint-500",
        "checkpoint-best",
        "checkpoint-00000007-of-mine",
    }
