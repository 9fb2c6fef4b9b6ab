"""What random histories of a partition have in common."""

from __future__ import annotations

import itertools
from typing import Any

from tests.unit.control import at_once

from rlplane.control.requests import Batch, Claim
from rlplane.control.rules import PartitionSpec
from rlplane.control.state import ControlState

OWNER = 7


class History:
    """A partition with the fields x and y and the task t, to which things happen."""

    def __init__(self, group_size: int | None) -> None:
        self.group_size = group_size
        self.state = ControlState()
        self.state.register(PartitionSpec.checked("p", ["x", "y"], 0, ["t"], group_size))
        self.blocks = itertools.count()

    def claim(
        self, fields: tuple[str, ...], order: str | None, size: int, max_uses: int = 1, **how: Any
    ) -> list[str]:
        size *= self.group_size or 1
        claim = Claim("p", "t", fields, size, order=order, max_uses=max_uses, owner=OWNER, **how)
        ((_, batch), *_) = self.state.claim(claim, blocking=False).answers
        assert isinstance(batch, Batch)
        return list(batch.ids)

    def unclaim(self, ids: list[str]) -> None:
        at_once.unclaim(self.state, "p", "t", ids, OWNER)

    def clear(self, ids: list[str]) -> None:
        at_once.clear(self.state, "p", ids)


def tag_values(ids: list[str], tags: list[int] | None) -> list[dict[str, Any]] | None:
    """Tags for all of these samples, from a few values of the tag v."""
    return None if tags is None else [{"v": tags[at % len(tags)]} for at in range(len(ids))]
