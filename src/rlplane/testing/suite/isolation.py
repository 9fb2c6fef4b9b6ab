"""Who sees a change: nobody but the one who made it, until it is written."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from rlplane.interfaces import KVBatchMeta
from rlplane.testing.expectations import equal, has_column, jagged, objects, rows_of
from rlplane.testing.plane_under_test import PartitionUnderTest, PlaneUnderTest
from rlplane.testing.promises import promise

OWN = "The caller may change what it got: nobody else sees it."
VALID = (
    "What it got stays valid after a clear, and after a later write of the same field it still has the "
    "old values."
)
TOGETHER = "All or nothing: fields, tags and readiness of all rows appear together, or none do."
FIELDS = ["dense", "flat", "nested", "object"]
IDS = ["a", "b", "c"]


@promise(OWN)
def a_reader_that_changes_what_it_got_changes_nothing_for_others(plane: PlaneUnderTest) -> None:
    part = _written(plane)
    first, second = part.get(IDS, FIELDS), part.get(IDS, FIELDS)
    scattered = part.get(["c", "a"], FIELDS)
    _scribble(first)
    _scribble(scattered)
    _is_as_written("another reader's batch", second)
    _is_as_written("a later read", part.get(IDS, FIELDS))
    meta = KVBatchMeta(part.name, None, IDS, fields=FIELDS)
    _scribble(part.client.get_data(meta))
    _is_as_written("a read after get_data", part.client.get_data(meta))


@promise(OWN)
def a_reader_that_changes_what_it_got_changes_nothing_for_another_client(plane: PlaneUnderTest) -> None:
    part = _written(plane)
    other = part.on(plane.worker())
    mine, theirs = part.get(IDS, FIELDS), other.get(IDS, FIELDS)
    _scribble(mine)
    _is_as_written("another client's batch", theirs)
    _is_as_written("another client's later read", other.get(IDS, FIELDS))


@promise("Writing a field again replaces it.", TOGETHER)
def a_writer_that_changes_what_it_wrote_changes_nothing(plane: PlaneUnderTest) -> None:
    part = plane.partition(fields=FIELDS)
    columns = TensorDict(_columns(), [3])
    tags: list[dict[str, Any]] = [{"v": [i]} for i in range(3)]
    receipt = part.put(IDS, columns, tags)
    _scribble(columns)
    for tag in tags:
        tag["v"].append("changed")
        tag["w"] = "new"
    for tag in receipt.tags or []:
        tag["v"].append("changed in the receipt")
    _is_as_written("a read", part.get(IDS, FIELDS))
    equal("the tags", part.claim_ready(required=FIELDS).tags, [{"v": [i]} for i in range(3)])


@promise(OWN)
def a_claim_owns_its_tags(plane: PlaneUnderTest) -> None:
    part = plane.partition(tasks=["train", "eval"])
    part.put("ab", {"x": torch.zeros(2)}, [{"v": [1]}, {"v": [2]}])
    for tag in part.claim_ready().tags or []:
        tag["v"].append("changed")
        tag["w"] = "new"
    equal("the tags in another claim", part.claim_ready(task="eval").tags, [{"v": [1]}, {"v": [2]}])


@promise(VALID)
def what_was_read_stays_valid_after_a_clear(plane: PlaneUnderTest) -> None:
    part = _written(plane)
    batch = part.get(IDS, FIELDS)
    row = part.get(["b"], FIELDS).get("nested")
    part.clear(IDS)
    _write_over(part, ["d", "e", "f"])
    _is_as_written("a batch that was read before the clear", batch)
    equal("a row that was read before the clear", rows_of(row)[0], _rows()["nested"][1])


@promise(VALID)
def what_was_read_keeps_the_old_values_after_a_later_write(plane: PlaneUnderTest) -> None:
    part = _written(plane)
    batch = part.get(IDS, FIELDS)
    _write_over(part, IDS)
    _is_as_written("a batch that was read before the write", batch)
    now = part.get(IDS, FIELDS)
    has_column("a read after the write", now, "dense", [torch.full((4,), 77.0)] * 3, "dense")
    has_column("a read after the write", now, "object", ["other"] * 3, "objects")
    _scribble(batch)
    has_column("a read after that", part.get(IDS, FIELDS), "flat", [torch.tensor(77)] * 3, "dense")


def _rows() -> dict[str, list[Any]]:
    return {
        "dense": list(torch.arange(12, dtype=torch.float32).reshape(3, 4)),
        "flat": list(torch.arange(3)),
        "nested": [torch.arange(n, dtype=torch.float32) + 1 for n in (2, 5, 1)],
        "object": [{"list": [1, 2], "array": np.arange(3)}, ["x"], "text"],
    }


def _columns() -> dict[str, Any]:
    rows = _rows()
    return {
        "dense": torch.stack(rows["dense"]),
        "flat": torch.stack(rows["flat"]),
        "nested": jagged(rows["nested"]),
        "object": objects(rows["object"]),
    }


def _written(plane: PlaneUnderTest) -> PartitionUnderTest:
    part = plane.partition(fields=FIELDS)
    part.put(IDS, _columns())
    return part


def _write_over(part: PartitionUnderTest, ids: list[str]) -> None:
    part.put(
        ids,
        {
            "dense": torch.full((3, 4), 77.0),
            "flat": torch.full((3,), 77),
            "nested": jagged([torch.full((n,), 77.0) for n in (2, 5, 1)]),
            "object": objects(["other"] * 3),
        },
    )


def _scribble(batch: TensorDict) -> None:
    batch.get("dense").fill_(-1)
    batch.get("flat").zero_().sub_(9)
    for row in rows_of(batch.get("nested")):
        row.fill_(-1)
    for row in rows_of(batch.get("object")):
        if isinstance(row, dict):
            row["list"].append("changed")
            row["array"][:] = -1
            row["new"] = 1
        elif isinstance(row, list):
            row.clear()


def _is_as_written(what: str, batch: TensorDict) -> None:
    layouts = {"dense": "dense", "flat": "dense", "nested": "jagged", "object": "objects"}
    for field, rows in _rows().items():
        has_column(what, batch, field, rows, layouts[field])
