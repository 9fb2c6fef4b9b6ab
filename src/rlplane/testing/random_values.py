"""What the random operations are made of: names, tags, conditions and rows, as hypothesis strategies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from tensordict import TensorDict

from rlplane.testing.expectations import jagged, objects

FIELDS = ("scalar", "tokens", "payload")
REQUIRED: tuple[tuple[str, ...], ...] = ((), ("scalar",), ("tokens",), ("scalar", "tokens"), FIELDS)
TASKS = ("train", "rollout", "extra")
ORDERS = ("lifo", "priority:v")
GROUP_SIZE = 2
GROUPS = ("p0", "p1", "p2")
IDS = {"plain": [f"s{i}" for i in range(7)], "grouped": [f"{p}_g{j}" for p in GROUPS for j in range(2)]}


class Row(NamedTuple):
    """What the model keeps of a row."""

    kind: str  # "dense", "nested" or "object"
    value: Any


flows = st.sampled_from(["plain", "grouped"])
field_names = st.lists(st.sampled_from(FIELDS), unique=True, min_size=1, max_size=3)
no_fields: st.SearchStrategy[list[str]] = st.just([])
written_fields = st.one_of(
    st.just(["scalar"]), st.just(["tokens"]), st.just(list(FIELDS)), field_names, no_fields
)
task_lists = st.one_of(
    st.just(list(TASKS[:2])), st.lists(st.sampled_from(TASKS), unique=True, min_size=1, max_size=3)
)
tag_dicts = st.fixed_dictionaries(
    {},
    optional={
        "v": st.integers(0, 3),
        "w": st.sampled_from(["x", "y", 1]),
        "input_lengths": st.integers(0, 9),
    },
)
ages = st.sampled_from([0, 1, 2, None])
some_conditions = st.fixed_dictionaries(
    {},
    optional={
        "v": st.one_of(
            st.integers(0, 3),
            st.dictionaries(
                st.sampled_from(["==", "!=", "<", "<=", ">", ">="]), st.integers(0, 3), min_size=1, max_size=2
            ),
            st.fixed_dictionaries({"in": st.lists(st.integers(0, 3), max_size=3)}),
            st.fixed_dictionaries({"not in": st.lists(st.integers(0, 3), max_size=3)}),
        ),
        "w": st.one_of(st.sampled_from(["x", "y", 1]), st.fixed_dictionaries({"<": st.just("y")})),
    },
)
no_condition: st.SearchStrategy[dict[str, Any]] = st.just({})
conditions = st.one_of(no_condition, no_condition, some_conditions)
plain_claims: st.SearchStrategy[dict[str, Any]] = st.just({})
claim_options = st.one_of(
    plain_claims,
    st.fixed_dictionaries({"where": some_conditions}),
    st.fixed_dictionaries({"order": st.sampled_from(ORDERS)}),
    st.fixed_dictionaries({"max_tokens": st.integers(5, 25)}),
    st.fixed_dictionaries({"max_uses": st.integers(2, 3)}),
    st.fixed_dictionaries({"max_uses": st.integers(2, 3), "repeat_where": some_conditions}),
    st.fixed_dictionaries(
        {},
        optional={
            "where": some_conditions,
            "order": st.sampled_from(ORDERS),
            "max_tokens": st.integers(1, 20),
            "max_uses": st.integers(2, 3),
        },
    ),
)
windows = st.builds(
    lambda age, freshest: {"kind": "windowed", "max_staleness": age, "freshest_first": freshest},
    st.integers(0, 2),
    st.booleans(),
)
gates = st.builds(
    lambda kind, age, size: {"kind": kind, "max_staleness": age, "batch": size},
    st.sampled_from(["ready_first", "weight_fifo", "in_order"]),
    st.integers(0, 1),
    st.integers(1, 3),
)
policies: st.SearchStrategy[dict[str, Any] | None] = st.one_of(st.none(), windows, gates)
payloads = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-5, 5), st.text(max_size=3), st.binary(max_size=3)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=2), st.dictionaries(st.text(max_size=2), inner, max_size=2)
    ),
    max_leaves=4,
)
with_tensors = st.builds(
    lambda length, dtype, inner: {
        "tensor": torch.arange(length).to(dtype),
        "inner": [inner, torch.ones(1, 2)],
    },
    st.integers(0, 40),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64]),
    payloads,
)


def column(name: str, count: int, trees: bool) -> st.SearchStrategy[list[Row]]:
    """Rows of one column of one write. With ``trees``, objects may have tensors in them."""
    if name == "payload":
        rows = st.one_of(payloads, with_tensors) if trees else payloads
        return st.lists(rows.map(lambda value: Row("object", value)), min_size=count, max_size=count)
    number = st.integers(-100, 100)
    if name == "scalar":
        return st.lists(number.map(lambda n: Row("dense", torch.tensor(n))), min_size=count, max_size=count)
    dtype = st.sampled_from([torch.float32, torch.float32, torch.float32, torch.bfloat16])
    dense_lengths = st.integers(0, 3).map(lambda n: ("dense", [n] * count))
    nested_lengths = st.lists(st.integers(0, 4), min_size=count, max_size=count).map(lambda n: ("nested", n))
    return st.builds(
        lambda start, dtype, kind_and_lengths: [
            Row(kind_and_lengths[0], (torch.arange(length) + start + index).to(dtype))
            for index, length in enumerate(kind_and_lengths[1])
        ],
        number,
        dtype,
        st.one_of(dense_lengths, nested_lengths),
    )


def batch(columns: Mapping[str, Sequence[Row]], count: int) -> TensorDict:
    """The rows of a write as it is given to the plane."""
    made = {}
    for name, rows in columns.items():
        values = [row.value for row in rows]
        build = {"object": objects, "nested": jagged, "dense": torch.stack}[rows[0].kind]
        made[name] = build(values)  # type: ignore[operator]
    return TensorDict(made, [count])


def dtypes(rows: Sequence[Row]) -> set[torch.dtype]:
    """The dtypes of rows, of which only those of one dtype can be read together."""
    return {row.value.dtype for row in rows if isinstance(row.value, torch.Tensor)}


def layout(rows: Sequence[Row]) -> str:
    """How rows come back when they are read together."""
    if rows[0].kind == "object":
        return "objects"
    alike = all(row.kind == "dense" for row in rows) and len({row.value.shape for row in rows}) == 1
    return "dense" if alike else "jagged"
