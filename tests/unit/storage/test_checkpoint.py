"""Checkpoints of the local engines: consistent, atomic, checked, and each reads the other's."""

from __future__ import annotations

import os
import random
import threading

import numpy as np
import pytest
import torch
from safetensors import safe_open
from tensordict import NonTensorData, NonTensorStack, TensorDict

from rlplane.config import load_config
from rlplane.control.dump import SCHEMA_VERSION
from rlplane.errors import CheckpointError
from rlplane.factory import build_data_plane_client
from rlplane.storage import checkpoint
from rlplane.storage.checkpoint import FILE_NAME
from rlplane.testing.expectations import is_same

ENGINES = ["local", "shm"]


@pytest.fixture
def make():
    clients = []

    def build(engine, **config):
        clients.append(build_data_plane_client(load_config(engine, config)))
        return clients[-1]

    yield build
    for client in clients:
        client.close()


def fill(plane):
    plane.register_partition("flow", ["a", "n", "o", "e"], 6, ["train", "score"], enums={"e": ["up", "down"]})
    ragged = torch.nested.nested_tensor([torch.arange(size + 1.0) for size in range(4)], layout=torch.jagged)
    data = TensorDict(
        {
            "a": torch.arange(8, dtype=torch.bfloat16).view(4, 2),
            "n": ragged,
            "o": NonTensorStack("x", None, {"k": [1, 2]}, 7),
            "e": NonTensorStack("up", "down", "up", "up"),
        },
        batch_size=[4],
    )
    tags = [{"version": row, "array": np.arange(row)} for row in range(4)]
    plane.put_samples([f"s{row}" for row in range(4)], "flow", data, tags)
    plane.put_samples(
        ["s4"], "flow", TensorDict({"a": torch.ones(1, 2, dtype=torch.bfloat16)}, batch_size=[1])
    )
    plane.register_partition("empty", ["z"], 0, ["train"])
    assert plane.claim_meta("flow", "train", ["a"], 2).sample_ids == ["s0", "s1"]


def trees():
    image = torch.arange(6000, dtype=torch.bfloat16).view(60, 100)
    return [{"image": image, "n": [torch.tensor(row), "text"]} for row in range(3)]


@pytest.mark.parametrize("source", ENGINES)
@pytest.mark.parametrize("target", ENGINES)
def test_trees_and_shared_tensors_are_in_a_checkpoint(make, tmp_path, source, target):
    rows = trees()
    column = NonTensorStack(*[NonTensorData(row, batch_size=[]) for row in rows])
    ragged = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 4), torch.ones(3, 1)])
    plane = make(source)
    plane.register_partition("flow", ["t", "r"], 3, ["train"])
    plane.put_samples(["a", "b", "c"], "flow", TensorDict({"t": column, "r": ragged}, batch_size=[3]))
    held = plane.partition_status("flow")["bytes"]
    plane.save_checkpoint(str(tmp_path))
    other = make(target)
    other.load_checkpoint(str(tmp_path))
    got = other.get_samples(["c", "a"], "flow", ["t", "r", "t.n.0"])
    assert is_same(got.get("t").tolist(), [rows[2], rows[0]])
    assert is_same(got.get("t.n.0").tolist(), [torch.tensor(2), torch.tensor(0)])
    assert [tuple(row.shape) for row in got["r"].unbind()] == [(3, 1), (2, 3)]
    assert other.partition_status("flow")["bytes"] == held


def check(plane):
    assert plane.list_sample_ids("flow") == ["s0", "s1", "s2", "s3", "s4"]
    got = plane.get_samples(["s3", "s1"], "flow", ["a", "n", "o", "e"])
    assert torch.equal(got["a"], torch.tensor([[6, 7], [2, 3]], dtype=torch.bfloat16))
    assert [row.tolist() for row in got["n"].unbind()] == [[0, 1, 2, 3], [0, 1]]
    assert list(got["o"]) == [7, None] and list(got["e"]) == ["up", "down"]
    meta = plane.claim_meta("flow", "score", ["a", "n"], 4, timeout_s=20)
    assert meta.sample_ids == ["s0", "s1", "s2", "s3"]
    assert [tag["version"] for tag in meta.tags] == [0, 1, 2, 3]
    assert np.array_equal(meta.tags[3]["array"], np.arange(3))
    # The cursor stayed, and so did the count of what was written.
    assert plane.claim_meta("flow", "train", ["a"], 2, timeout_s=20).sample_ids == ["s2", "s3"]
    assert plane.partition_status("flow")["written"] == 5
    assert plane.check_consumption_status("empty", ["train"]) is False


@pytest.mark.parametrize("loader", ENGINES)
@pytest.mark.parametrize("saver", ENGINES)
def test_each_engine_loads_what_the_other_saved(make, tmp_path, saver, loader):
    first = make(saver)
    fill(first)
    first.save_checkpoint(str(tmp_path / "plane"))
    second = make(loader, controller_address="second") if loader == "local" else make(loader)
    second.register_partition("old", ["q"], 1, ["t"])
    second.put_samples(["gone"], "old", TensorDict({"q": torch.ones(1)}, batch_size=[1]))
    second.load_checkpoint(str(tmp_path / "plane"))
    with pytest.raises(KeyError):
        second.list_sample_ids("old")
    check(second)
    second.clear_samples(None, "flow")
    assert second.partition_status("flow")["bytes"] == 0


@pytest.mark.parametrize("engine", ENGINES)
def test_unfinished_claims_can_be_handed_out_again(make, tmp_path, engine):
    plane = make(engine)
    fill(plane)
    done = TensorDict({"done": torch.ones(1)}, batch_size=[1])
    with pytest.warns(UserWarning, match="not declared"):
        plane.put_samples(["s0"], "flow", done)
    plane.save_checkpoint(str(tmp_path / "plane"))
    plane.load_checkpoint(str(tmp_path / "plane"), release_claims=True)
    assert plane.claim_meta("flow", "train", ["a"], 4, timeout_s=20).sample_ids == ["s1", "s2", "s3", "s4"]


@pytest.mark.parametrize("engine", ENGINES)
def test_the_columns_can_be_read_with_safetensors(make, tmp_path, engine):
    plane = make(engine)
    fill(plane)
    plane.save_checkpoint(str(tmp_path / "plane"))
    with safe_open(tmp_path / "plane" / FILE_NAME, "pt") as file:
        names = [name for name in file.keys() if name.startswith("flow/a/")]  # noqa: SIM118
        rows = torch.cat([file.get_tensor(name) for name in sorted(names)])
        assert file.metadata()["schema_version"] == str(SCHEMA_VERSION)
    assert rows.dtype is torch.bfloat16 and rows.shape == (5, 2)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_torn_or_altered_file_is_refused_and_the_plane_stays(make, tmp_path, engine):
    plane = make(engine)
    fill(plane)
    folder = str(tmp_path / "plane")
    plane.save_checkpoint(folder)
    path = tmp_path / "plane" / FILE_NAME
    whole = path.read_bytes()
    chance = random.Random(5)
    damaged = [whole[:cut] for cut in [0, 4, 8, 100, len(whole) // 2, len(whole) - 1]] + [whole + b"x"]
    for _ in range(40):
        place = chance.randrange(len(whole))
        flipped = bytes([whole[place] ^ (1 << chance.randrange(8))])
        damaged.append(whole[:place] + flipped + whole[place + 1 :])
    for content in damaged:
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"refused|cannot read"):
            plane.load_checkpoint(folder)
    with pytest.raises(CheckpointError, match="cannot read"):
        plane.load_checkpoint(str(tmp_path / "none"))
    check(plane)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_file_of_another_version_is_refused_with_both_versions(make, tmp_path, engine, monkeypatch):
    plane = make(engine)
    fill(plane)
    monkeypatch.setattr(checkpoint, "SCHEMA_VERSION", 99)
    plane.save_checkpoint(str(tmp_path / "plane"))
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match=f"schema version 99; this rlplane reads {SCHEMA_VERSION}"):
        plane.load_checkpoint(str(tmp_path / "plane"))


def test_a_checkpoint_that_cannot_be_written_leaves_the_old_one(make, tmp_path, monkeypatch):
    plane = make("local")
    fill(plane)
    folder = tmp_path / "plane"
    plane.save_checkpoint(str(folder))
    before = (folder / FILE_NAME).read_bytes()
    with pytest.raises(CheckpointError, match="cannot write"):
        plane.save_checkpoint(str(folder / FILE_NAME / "below-a-file"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(CheckpointError, match=r"cannot write .*: No space left"):
            plane.save_checkpoint(str(folder))
    assert (folder / FILE_NAME).read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["plane"]
    assert [entry.name for entry in folder.iterdir()] == [FILE_NAME]


def full(*_):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("engine", ENGINES)
def test_what_the_user_saves_along_comes_back(make, tmp_path, engine):
    plane = make(engine)
    fill(plane)
    folder = str(tmp_path / "plane")
    metadata = {"step": 7, "seeds": [1, 2], "note": "üü", "nested": {"lr": 0.1, "none": None}}
    plane.save_checkpoint(folder, metadata=metadata)
    assert plane.load_checkpoint(folder) == metadata
    with pytest.raises(CheckpointError, match="metadata must be what JSON can hold"):
        plane.save_checkpoint(folder, metadata={"tensor": torch.ones(1)})
    plane.save_checkpoint(folder)
    assert plane.load_checkpoint(folder) == {}


@pytest.mark.parametrize("engine", ENGINES)
def test_a_checkpoint_is_consistent_while_producers_and_consumers_go_on(make, tmp_path, engine):
    """Every batch is written in one put, so a checkpoint has all of its rows and fields or none."""
    plane = make(engine)
    plane.register_partition("flow", ["a", "b"], 10**9, ["train"])
    stop = threading.Event()

    def produce():
        number = 0
        while not stop.is_set():
            ids = [f"{number}-{row}" for row in range(16)]
            values = torch.full((16, 64), number)
            plane.put_samples(ids, "flow", TensorDict({"a": values, "b": -values}, batch_size=[16]))
            number += 1

    def consume():
        while not stop.is_set():
            meta = plane.claim_meta("flow", "train", ["a"], 16, blocking=False)
            if meta.size:
                plane.clear_samples(meta.sample_ids, "flow")

    threads = [threading.Thread(target=produce), threading.Thread(target=consume)]
    for thread in threads:
        thread.start()
    paths = [tmp_path / str(number) for number in range(8)]
    for path in paths:
        plane.save_checkpoint(str(path))
    stop.set()
    for thread in threads:
        thread.join(20)
    for path in paths:
        plane.load_checkpoint(str(path))
        ids = plane.list_sample_ids("flow")
        assert len(ids) % 16 == 0
        if ids:
            got = plane.get_samples(ids, "flow", ["a", "b"])
            wanted = torch.tensor([int(sample_id.split("-")[0]) for sample_id in ids])
            assert torch.equal(got["a"][:, 0], wanted) and torch.equal(got["b"], -got["a"])
