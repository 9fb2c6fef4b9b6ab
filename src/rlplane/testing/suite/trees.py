"""Rows that are trees of tensors and objects, of any shape and dtype, read whole or by a leaf."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, TensorDict

from rlplane.testing.expectations import (
    equal,
    expect,
    has_column,
    has_columns,
    objects,
    refuses,
    rows_of,
    strided,
)
from rlplane.testing.plane_under_test import PlaneUnderTest
from rlplane.testing.promises import promise

promise = partial(promise, feature="trees")

TREES = (
    "Objects in columns may be trees: dicts and lists that hold tensors of any dtype and shape, at any depth."
)
ONCE = "A tensor that several rows of one put hold is stored once, and the bytes held say so."
LEAVES = (
    "A field of trees may be read by its leaves: `mm.pixel_values` is what the row's `mm` has at "
    "`pixel_values`, and `turns.0` the first entry of a list, as objects, one per row."
)
EVERY_DIMENSION = (
    "Rows that differ beyond the first dimension come back as a nested tensor in the strided layout."
)
DTYPES = (torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.uint8, torch.bool, torch.int64)


@promise(TREES)
def trees_come_back_equal_with_tensors_as_tensors(plane: PlaneUnderTest) -> None:
    part = plane.partition()
    rows = _rows()
    ids = [f"row-{i}" for i in range(len(rows))]
    part.put(ids, {"x": objects(rows)})
    has_column("a read", part.get(ids[::-1]), "x", rows[::-1], "objects")
    has_column("a read of one row", part.get(ids[1:2]), "x", rows[1:2], "objects")


@promise(TREES, "A nested `TensorDict` is one dict per row.")
def every_form_of_a_column_of_trees_is_one_tree_per_row(plane: PlaneUnderTest) -> None:
    rows = [{"a": torch.arange(3), "b": {"c": "x"}}, {"a": torch.arange(3, 6), "b": {"c": "y"}}]
    array = np.empty(2, dtype=object)
    array[:] = rows
    text = TensorDict({"c": objects(["x", "y"])}, [2])
    columns = {
        "a NonTensorStack": objects(rows),
        "NonTensorData with a list": NonTensorData(list(rows), batch_size=[2]),
        "a numpy array": array,
        "a nested TensorDict": TensorDict({"a": torch.arange(6).view(2, 3), "b": text}, [2]),
    }
    part = plane.partition(fields=list(columns))
    part.put("ab", TensorDict(columns, [2]))
    has_columns("a read", part.get("ba", columns), dict.fromkeys(columns, rows[::-1]), "objects")


@promise(TREES)
def trees_and_plain_objects_of_several_writes_are_read_together(plane: PlaneUnderTest) -> None:
    part = plane.partition()
    part.put("ab", {"x": objects([{"t": torch.ones(2, 3)}, "text"])})
    part.put("c", {"x": objects([None])})
    part.put("b", {"x": objects([[torch.zeros(1, dtype=torch.bfloat16)]])})
    rows = [None, [torch.zeros(1, dtype=torch.bfloat16)], {"t": torch.ones(2, 3)}, None]
    has_column("a read", part.get("cbac"), "x", rows, "objects")


@promise(TREES)
def large_trees_are_read_row_by_row(plane: PlaneUnderTest) -> None:
    part = plane.partition()
    rows = [{"image": torch.full((n, 1000), n, dtype=torch.int32), "size": n} for n in range(1, 200, 20)]
    ids = [f"row-{i}" for i in range(len(rows))]
    part.put(ids, {"x": objects(rows)})
    for at in (9, 0, 4):
        has_column("a read", part.get([ids[at]]), "x", [rows[at]], "objects")
    has_column("a read", part.get([ids[8], ids[2]]), "x", [rows[8], rows[2]], "objects")


@promise(TREES, "The caller may change what it got: nobody else sees it.")
def a_tree_that_was_read_belongs_to_the_reader(plane: PlaneUnderTest) -> None:
    part = plane.partition()
    mine = {"t": torch.zeros(100_000), "n": np.zeros(1000)}
    part.put("a", {"x": objects([mine])})
    mine["t"] += 1  # type: ignore[operator]
    first = rows_of(part.get("a").get("x"))[0]
    first["t"] += 2
    first["n"] += 2
    again = rows_of(part.get("a").get("x"))[0]
    equal("the tensor of a second read", float(again["t"].sum()), 0.0)
    equal("the array of a second read", float(again["n"].sum()), 0.0)
    part.clear("a")
    equal("the tensor of the first read after a clear", float(first["t"].sum()), 200_000.0)


@promise(ONCE)
def a_tensor_that_rows_share_is_read_from_each_of_them(plane: PlaneUnderTest) -> None:
    part = plane.partition()
    image = torch.arange(300_000, dtype=torch.int32).view(3, 100_000)
    rows: list[Any] = [{"image": image, "own": torch.tensor([i])} for i in range(8)]
    ids = [f"row-{i}" for i in range(8)]
    part.put(ids, {"x": objects(rows)})
    has_column("a read", part.get([ids[6]]), "x", [rows[6]], "objects")
    part.clear(ids[:7])
    has_column("a read after the others are gone", part.get([ids[7]]), "x", [rows[7]], "objects")


@promise(ONCE, method="partition_status")
def a_tensor_that_rows_share_is_held_once(plane: PlaneUnderTest) -> None:
    part = plane.partition()
    image = torch.zeros(400, 1000, dtype=torch.bfloat16)
    rows = [{"image": image, "own": torch.tensor([i])} for i in range(8)]
    part.put([f"row-{i}" for i in range(8)], {"x": objects(rows)})
    held = part.status()["bytes"]
    limit = 1.05 * image.nbytes
    expect(
        image.nbytes <= held <= limit, f"{held} bytes are held for a shared tensor of {image.nbytes} bytes"
    )


@promise(LEAVES)
def a_leaf_is_read_alone(plane: PlaneUnderTest) -> None:
    part = plane.partition(fields=["mm", "mm.flat"])
    rows: list[Any] = [
        {"pixel_values": torch.full((n, 5), n), "turns": [torch.tensor([n]), "text"], "deep": {"a": [n]}}
        for n in range(3)
    ]
    part.put("abc", {"mm": objects(rows), "mm.flat": torch.arange(3)})
    names = ["mm.pixel_values", "mm.turns.0", "mm.turns", "mm.deep.a", "mm.flat", "mm"]
    batch = part.get("ca", names)
    equal("the fields", list(batch.keys()), names)
    two = [rows[2], rows[0]]
    leaves = {
        "mm.pixel_values": [row["pixel_values"] for row in two],
        "mm.turns.0": [row["turns"][0] for row in two],
        "mm.turns": [row["turns"] for row in two],
        "mm.deep.a": [row["deep"]["a"] for row in two],
        "mm": two,
    }
    has_columns("a read", batch, leaves, "objects")
    has_column("a read", batch, "mm.flat", [torch.tensor(2), torch.tensor(0)], "dense")


@promise(LEAVES, "A row that has nothing there: `KeyError`.")
def a_leaf_that_a_row_does_not_have_is_an_error(plane: PlaneUnderTest) -> None:
    part = plane.partition(fields=["mm"])
    part.put("ab", {"mm": objects([{"image": torch.ones(2)}, {"video": None}])})
    refuses(
        KeyError, "reading mm.image of a row without it", part.get, "ab", ["mm.image"], mentions=["image"]
    )
    refuses(KeyError, "reading mm. of rows without an empty key", part.get, "ab", ["mm."], mentions=["mm."])
    refuses(KeyError, "reading a leaf of an unknown field", part.get, "ab", ["nn.image"], mentions=["nn"])


@promise(EVERY_DIMENSION)
def nested_rows_may_differ_in_every_dimension(plane: PlaneUnderTest) -> None:
    part = plane.partition()
    rows = [torch.arange(6).view(2, 3), torch.arange(4).view(1, 4), torch.zeros(0, 2, dtype=torch.int64)]
    part.put("abc", {"x": strided(rows)})
    has_column("a read", part.get("cab"), "x", [rows[2], rows[0], rows[1]], "nested in the strided layout")


@promise(EVERY_DIMENSION)
def dense_rows_of_different_shapes_are_read_together(plane: PlaneUnderTest) -> None:
    part = plane.partition()
    small, large = torch.arange(12).view(2, 2, 3), torch.arange(40).view(2, 4, 5)
    part.put("ab", {"x": small})
    part.put("cd", {"x": large})
    rows = [large[1], small[0]]
    has_column("a read", part.get("da"), "x", rows, "nested in the strided layout")


def _rows() -> list[Any]:
    return [
        {
            "pixel_values": torch.arange(12).view(3, 4).to(dtype),
            "grid": torch.tensor([[1, i, 2]]),
            "video": None,
        }
        for i, dtype in enumerate(DTYPES)
    ] + [
        torch.arange(4.0),
        torch.tensor(3),
        [torch.zeros(0, 3), {"deep": [torch.ones(1, 1, 1, 1), "text", 1.5, b"b", True]}],
        {
            "array": np.arange(5000, dtype=np.float32),
            "small": np.arange(3),
            "transposed": torch.arange(6).view(2, 3).T,
        },
        {},
        None,
    ]
