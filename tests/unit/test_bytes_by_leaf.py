"""The bytes of a tree are told by leaf."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tensordict import NonTensorStack, TensorDict

import rlplane
from rlplane.metrics.events import EventBatch, FieldBytes
from rlplane.metrics.run_state import RunState
from rlplane.metrics.snapshot import SessionState
from rlplane.observability.sizes import measure, note
from rlplane.report import Report, render_text


def trees() -> TensorDict:
    image = torch.zeros(4, 8, dtype=torch.bfloat16)
    rows = [
        {"pixels": image, "grid": [torch.zeros(3), torch.zeros(5)], "note": "é"},
        {"pixels": image, "video": None},
    ]
    return TensorDict({"x": torch.zeros(2, 3), "mm": NonTensorStack(*rows)}, [2])


EXPECTED = {"x": 24, "mm.pixels": 64, "mm.grid": 32, "mm.note": 2, "mm.video": 1}


def test_a_trees_bytes_are_counted_by_leaf_and_what_rows_share_once() -> None:
    columns, _ = measure(note(trees()), 2)
    assert {leaf: size for column in columns for leaf, size in column.by_leaf().items()} == EXPECTED
    keys = sum(map(len, ["pixels", "grid", "note", "pixels", "video"]))
    assert [column.total for column in columns] == [24, 64 + 32 + 2 + 1 + keys]


def test_a_nested_tensordict_is_a_tree_too() -> None:
    inner = TensorDict({"a": torch.zeros(2, 4), "b": torch.zeros(2, 1, dtype=torch.int64)}, [2])
    (column,), _ = measure(note(TensorDict({"t": inner}, [2])), 2)
    assert column.by_leaf() == {"t.a": 32, "t.b": 16}


def test_the_jsonl_has_the_bytes_of_a_put_by_leaf(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    cfg = rlplane.load_config("local", {"observability.enabled": True})
    cfg["observability"]["sinks"] = [{"kind": "jsonl", "path": str(path)}]
    with rlplane.build_data_plane_client(cfg) as client:
        client.register_partition("p", ["x", "mm"], 2, ["train"])
        client.put_samples(["a", "b"], "p", trees())
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    (put,) = [line for line in lines if line.get("op") == "put"]
    assert put["field_bytes"] == EXPECTED


def test_the_run_adds_them_up() -> None:
    state = RunState("run")
    events = [FieldBytes("p", {"x": 24, "mm.pixels": 64}), FieldBytes("p", {"x": 6})]
    state.add_batch(EventBatch(worker="w", pid=1, host="h", seq=1, sent_ns=0, events=list(events)))
    snapshot = state.snapshot(SessionState.COMPLETE)
    state.close()
    assert snapshot.total("field_bytes", partition="p", field="x") == 30
    rows = [line.split() for line in render_text(Report.from_snapshot(snapshot)).splitlines()]
    assert ["p", "mm.pixels", "64", "B"] in rows
