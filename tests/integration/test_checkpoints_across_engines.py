"""One format of checkpoints: what any engine has saved, every engine loads."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict
from tests.integration.conftest import cluster_config

from rlplane.config import load_config
from rlplane.factory import build_data_plane_client

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

ENGINES = ["memory", "shm", "simple", "mooncake_cpu"]
COUNT = 200
IDS = [f"s{row}" for row in range(COUNT)]
OBJECTS = ["text", None, {"k": [1, 2]}, 7, b"\x00", 1.5]
FIELDS = ["wide", "half", "ragged", "object", "enum"]


@pytest.fixture(scope="module")
def planes(ray_cluster, tmp_path_factory):
    """``planes(engine)`` is the plane of that engine, and the checkpoint that was made of it at first."""
    made = {}

    def start(engine):
        if engine not in made:
            local = {"memory": "local", "shm": "shm"}
            config = load_config(local[engine]) if engine in local else cluster_config(engine)
            client = build_data_plane_client(config)
            folder = str(tmp_path_factory.mktemp(engine) / "plane")
            made[engine] = client, folder
            fill(client)
            client.save_checkpoint(folder, metadata={"saved on": engine})
        return made[engine]

    yield start
    for client, _ in made.values():
        client.close()


def wide(rows):
    """Rows of 4 KB, so that the column is several chunks of a store that is cut into chunks."""
    return torch.arange(1024, dtype=torch.float32) + 1000 * torch.tensor(rows, dtype=torch.float32)[:, None]


def ragged_row(row):
    return torch.arange(row % 7, dtype=torch.int64) * row


def fill(plane):
    plane.register_partition(
        "flow", FIELDS, COUNT + 10, ["train", "score"], enums={"enum": ["up", "down", "sideways"]}
    )
    rows = list(range(COUNT))
    columns = {
        "wide": wide(rows),
        "half": torch.tensor(rows, dtype=torch.bfloat16),
        "ragged": torch.nested.as_nested_tensor([ragged_row(row) for row in rows], layout=torch.jagged),
        "object": NonTensorStack(*[OBJECTS[row % len(OBJECTS)] for row in rows]),
        "enum": NonTensorStack(*[["up", "down", "sideways"][row % 3] for row in rows]),
    }
    tags = [{"version": row, "array": np.arange(row % 5)} for row in rows]
    plane.put_samples(IDS, "flow", TensorDict(columns, batch_size=[COUNT]), tags)
    # Written anew, out of order: the rows of one field are in several blocks.
    plane.put_samples(["s5", "s3"], "flow", TensorDict({"wide": wide([50, 30])}, batch_size=[2]))
    plane.put_samples(["s200"], "flow", TensorDict({"half": torch.ones(1).bfloat16()}, batch_size=[1]))
    plane.clear_samples(["s4"], "flow")
    assert plane.claim_meta("flow", "train", ["wide"], 2).sample_ids == ["s0", "s1"]
    plane.register_partition("groups", ["x"], 6, ["train"], grpo_group_size=2)
    for ids in (["a_g0", "b_g0"], ["b_g1", "c_g0", "c_g1"]):
        fields = TensorDict({"x": torch.arange(float(len(ids)))}, batch_size=[len(ids)])
        plane.put_samples(ids, "groups", fields, [{"of": sample_id} for sample_id in ids])
    assert plane.claim_meta("groups", "train", ["x"], 2).sample_ids == ["b_g0", "b_g1"]
    plane.register_partition("empty", ["z"], 0, ["train"])


def check(plane):
    kept = [sample_id for sample_id in IDS if sample_id != "s4"]
    assert plane.list_sample_ids("flow") == [*kept, "s200"]
    chosen = [row for row in reversed(range(COUNT)) if row != 4]
    got = plane.get_samples([f"s{row}" for row in chosen], "flow", FIELDS)
    assert torch.equal(got["wide"], wide([{5: 50, 3: 30}.get(row, row) for row in chosen]))
    assert torch.equal(got["half"], torch.tensor(chosen, dtype=torch.bfloat16))
    assert [row.tolist() for row in got["ragged"].unbind()] == [ragged_row(row).tolist() for row in chosen]
    assert list(got["object"]) == [OBJECTS[row % len(OBJECTS)] for row in chosen]
    assert list(got["enum"]) == [["up", "down", "sideways"][row % 3] for row in chosen]
    meta = plane.claim_meta("flow", "score", ["ragged"], COUNT - 1)
    assert meta.sample_ids == kept
    assert [tag["version"] for tag in meta.tags] == [int(sample_id[1:]) for sample_id in kept]
    assert np.array_equal(meta.tags[3]["array"], np.arange(3))
    # The cursors stayed, and so did the count of what was written, by which the partition knows its end.
    assert plane.claim_meta("flow", "train", ["wide"], 2).sample_ids == ["s2", "s3"]
    assert plane.partition_status("flow")["written"] == COUNT + 1
    # A group that was not whole is completed now, and comes behind the one that was.
    plane.put_samples(["a_g1"], "groups", TensorDict({"x": torch.ones(1)}, batch_size=[1]))
    meta = plane.claim_meta("groups", "train", ["x"], 4)
    assert meta.sample_ids == ["c_g0", "c_g1", "a_g0", "a_g1"]
    assert meta.tags == [{"of": "c_g0"}, {"of": "c_g1"}, {"of": "a_g0"}, {}]
    assert plane.check_consumption_status("empty", ["train"]) is False


@pytest.mark.parametrize("loader", ENGINES)
@pytest.mark.parametrize("saver", ENGINES)
def test_each_engine_loads_what_any_engine_saved(planes, saver, loader):
    _, folder = planes(saver)
    plane, _ = planes(loader)
    plane.register_partition("old", ["q"], 1, ["t"])
    plane.put_samples(["gone"], "old", TensorDict({"q": torch.ones(1)}, batch_size=[1]))
    assert plane.load_checkpoint(folder) == {"saved on": saver}
    with pytest.raises(KeyError):
        plane.list_sample_ids("old")
    check(plane)
    plane.load_checkpoint(folder, release_claims=True)
    assert plane.claim_meta("flow", "train", ["wide"], 3).sample_ids == ["s0", "s1", "s2"]
    assert plane.claim_meta("groups", "train", ["x"], 4).sample_ids == ["b_g0", "b_g1", "c_g0", "c_g1"]
    plane.clear_samples(plane.list_sample_ids("flow"), "flow")
    plane.clear_samples(plane.list_sample_ids("groups"), "groups")
    assert plane.partition_status("flow")["bytes"] == 0
