"""What Python objects may travel in columns and tags, and that they come back equal."""

from __future__ import annotations

import fractions
from functools import partial
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, TensorDict

from rlplane.testing.expectations import equal, has_column, has_columns, has_samples, objects
from rlplane.testing.plane_under_test import PlaneUnderTest
from rlplane.testing.promises import promise

promise = partial(promise, feature="objects")

FORMS = (
    "objects, as a `NonTensorStack`, or as `NonTensorData` that holds a list, a tuple, an object array or a "
    "`<U` array with one entry per row."
)
KINDS = (
    "Objects in columns and tags: None, bool, int, float, str, bytes, list, dict with string keys, and numpy "
    "arrays and scalars."
)
EQUAL = "Objects come back equal, as a `NonTensorStack`."


@promise(FORMS, EQUAL)
def every_form_of_an_object_column_is_one_object_per_row(plane: PlaneUnderTest) -> None:
    rows = [{"turns": [1, 2]}, ["a", None], "text"]
    array = np.empty(3, dtype=object)
    array[:] = rows
    columns = {
        "a NonTensorStack": objects(rows),
        "NonTensorData with a list": NonTensorData(list(rows), batch_size=[3]),
        "NonTensorData with an array": NonTensorData(array, batch_size=[3]),
        "a numpy array": array,
    }
    _come_back(plane, columns, rows)


@promise(FORMS, EQUAL)
def every_form_of_a_text_column_is_one_text_per_row(plane: PlaneUnderTest) -> None:
    rows = ["abc", "d", "efghijk"]
    columns = {
        "a NonTensorStack": objects(rows),
        "NonTensorData with a list": NonTensorData(list(rows), batch_size=[3]),
        "NonTensorData with a tuple": NonTensorData(tuple(rows), batch_size=[3]),
        "NonTensorData with an object array": NonTensorData(np.array(rows, object), batch_size=[3]),
        "NonTensorData with a <U array": NonTensorData(np.array(rows), batch_size=[3]),
        "a <U array": np.array(rows),
    }
    _come_back(plane, columns, rows)


@promise(KINDS, EQUAL)
def objects_of_every_kind_come_back_equal(plane: PlaneUnderTest) -> None:
    part = plane.partition()
    values = _values()
    ids = [f"row-{i}" for i in range(len(values))]
    part.put(ids, {"x": objects(values)})
    has_column("a read", part.get(ids), "x", values, "objects")
    part.put(["nested"], {"x": objects([{"all": values}])})
    has_column("a read", part.get(["nested"]), "x", [{"all": values}], "objects")


@promise(KINDS)
def tags_of_every_kind_come_back_equal(plane: PlaneUnderTest) -> None:
    part = plane.partition()
    values = _values()
    ids = [f"row-{i}" for i in range(len(values))]
    part.put(ids, {"x": torch.zeros(len(ids))}, [{"v": value} for value in values])
    has_samples("a claim", part.claim_ready(), ids, [{"v": value} for value in values])


@promise("A tuple comes back as a list.")
def a_tuple_comes_back_as_a_list(plane: PlaneUnderTest) -> None:
    part = plane.partition()
    part.put("ab", {"x": objects([(1, ("two",)), {"pair": (3, 4)}])}, [{"v": (1, 2)}, {"v": [(3,)]}])
    has_column("a read", part.get("ab"), "x", [[1, ["two"]], {"pair": [3, 4]}], "objects")
    equal("tags", part.claim_ready().tags, [{"v": [1, 2]}, {"v": [[3]]}])


@promise(EQUAL)
def objects_of_several_writes_are_read_together(plane: PlaneUnderTest) -> None:
    part = plane.partition()
    part.put("ab", {"x": objects(["a", 1])})
    part.put("c", {"x": objects([[None]])})
    part.put("b", {"x": objects([{"new": True}])})
    rows = [[None], {"new": True}, "a", [None]]
    has_column("a read", part.get("cbac"), "x", rows, "objects")


@promise("Anything else: `TypeError` that names the field, unless the config says `allow_pickle: true`.")
def anything_travels_when_pickle_is_allowed(plane: PlaneUnderTest) -> None:
    part = plane.partition(client=plane.configured(allow_pickle=True))
    values: list[Any] = [fractions.Fraction(1, 3), {1, 2}, {1: "one"}, [complex(1, 2), "plain"]]
    part.put("abcd", {"x": objects(values)}, [{"v": value} for value in values])
    has_column("a read", part.get("dcba"), "x", values[::-1], "objects")
    equal("tags", part.claim_ready().tags, [{"v": value} for value in values])


def _come_back(plane: PlaneUnderTest, columns: dict[str, Any], rows: list[Any]) -> None:
    """Each of the columns must be read as these three rows."""
    part = plane.partition(fields=list(columns))
    part.put("abc", TensorDict(columns, [3]))
    wanted = {name: [rows[2], rows[0], rows[1]] for name in columns}
    has_columns("a read", part.get("cab", columns), wanted, "objects")
    has_columns("a read of one row", part.get("b", columns), dict.fromkeys(columns, rows[1:2]), "objects")


def _values() -> list[Any]:
    return [
        None,
        True,
        False,
        0,
        -1,
        2**63 - 1,
        -(2**63),
        1.5,
        float("inf"),
        "",
        "naïve 😀",
        b"",
        b"\x00\xff",
        [],
        [1, "a", [None, [True]]],
        {},
        {"a": {"b": [1, 2.0]}, "": b"x"},
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.array([], dtype=np.int16),
        np.array([True, False]),
        np.arange(8)[::2],
        np.array(["ab", "c"]),
        np.float32(1.5),
        np.int64(7),
        np.bool_(True),
        {"array": np.array([1, 2, 3], dtype=np.uint8), "list": [np.zeros(2)]},
    ]
