"""Document 002's functions on the leaves of a TensorDict: inverse to each other, and no column gets lost."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import NonTensorStack, TensorDict
from torch import Tensor

from rlplane.adapters.transfer_queue import _assert_no_key_loss, _from_wire, _promote_1d_leaves
from rlplane.errors import DataPlaneError


def jagged(*rows: Tensor) -> Tensor:
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)


def test_promoting_and_squeezing_are_inverse_and_leave_the_rest_alone() -> None:
    column = torch.arange(3)
    td = TensorDict(
        {"a": column, "b": torch.zeros(3, 1), "c": jagged(*torch.eye(3)), "d": NonTensorStack("x", "y", "z")},
        batch_size=[3],
    )
    promoted = _promote_1d_leaves(td)
    assert {name: tuple(promoted[name].shape) for name in "ab"} == {"a": (3, 1), "b": (3, 1)}
    assert promoted["c"] is td["c"] and list(promoted["d"]) == ["x", "y", "z"]
    back = _from_wire(promoted, ["a"])
    assert torch.equal(back["a"], column) and back["b"].shape == (3, 1)
    assert _from_wire(promoted)["b"].shape == (3,)
    assert promoted.batch_size == back.batch_size == torch.Size([3])


@given(
    st.integers(0, 5), st.dictionaries(st.text("abc", min_size=1), st.sampled_from([(), (1,), (2,), (2, 1)]))
)
def test_what_was_promoted_comes_back_whatever_the_shapes(
    count: int, shapes: dict[str, tuple[int, ...]]
) -> None:
    columns = {name: torch.rand(count, *shape) for name, shape in shapes.items()}
    td = TensorDict(dict(columns), batch_size=[count])
    promoted = _promote_1d_leaves(td)
    assert all(leaf.dim() >= 2 for leaf in promoted.values())
    back = _from_wire(promoted, [name for name, shape in shapes.items() if shape == ()])
    assert set(back.keys()) == set(columns)
    for name, column in columns.items():
        assert back[name].shape == column.shape and torch.equal(back[name], column)


def test_a_tensordict_that_has_lost_a_column_is_noticed() -> None:
    kept = TensorDict({"a": torch.zeros(2)}, batch_size=[2])
    _assert_no_key_loss({"a": 1}, kept, "somewhere")
    with pytest.raises(DataPlaneError, match=r"somewhere.*\['b'\]"):
        _assert_no_key_loss({"a": 1, "b": 2}, kept, "somewhere")
