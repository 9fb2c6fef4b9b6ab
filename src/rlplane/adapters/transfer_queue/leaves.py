"""Document 002's functions on the leaves of a TensorDict, for talking to TransferQueue in its own form."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from tensordict import TensorDict
from torch import Tensor

from rlplane.errors import DataPlaneError


def _assert_no_key_loss(src_dict: Mapping[str, Any], new_td: TensorDict, fn: str) -> None:
    """Refuse a TensorDict that has lost columns of the dict it was built from.

    TensorDict's constructor has dropped ``NonTensorStack`` and ``NonTensorData`` leaves in the past.
    """
    lost = sorted(set(src_dict) - set(new_td.keys()))
    if lost:
        raise DataPlaneError(f"{fn}: TensorDict dropped the fields {lost} of {sorted(src_dict)}")


def _promote_1d_leaves(td: TensorDict) -> TensorDict:
    """Unsqueeze ``(N,)`` leaves to ``(N, 1)``, so that every row has a dimension; others pass through."""
    columns = {
        name: leaf.unsqueeze(-1) if isinstance(leaf, Tensor) and _is_scalar_column(leaf) else leaf
        for name, leaf in td.items()
    }
    promoted = TensorDict(columns, batch_size=td.batch_size)
    _assert_no_key_loss(columns, promoted, "_promote_1d_leaves")
    return promoted


def _from_wire(td: TensorDict, promoted: Collection[str] | None = None) -> TensorDict:
    """Inverse of :func:`_promote_1d_leaves`: squeeze the trailing 1 of ``(N, 1)`` leaves.

    ``promoted`` names the leaves that were unsqueezed, because a caller's own ``(N, 1)`` looks the same;
    None takes every leaf of that shape.
    """
    columns = {}
    for name, leaf in td.items():
        narrow = isinstance(leaf, Tensor) and not leaf.is_nested and leaf.dim() == 2 and leaf.shape[1] == 1
        chosen = narrow if promoted is None else name in promoted
        columns[name] = leaf.squeeze(-1) if chosen and narrow else leaf
    squeezed = TensorDict(columns, batch_size=td.batch_size)
    _assert_no_key_loss(columns, squeezed, "_from_wire")
    return squeezed


def _is_scalar_column(leaf: Tensor) -> bool:
    return not leaf.is_nested and leaf.dim() == 1
