"""What the control state is asked, and what it answers with.

A :class:`Put` and a :class:`Claim` may have to wait. Each has a ``token``: a handle of the caller's own,
compared by identity, under which the answer comes back. Every call that changes the state returns its
:class:`Effects`: the answers that it completed and the blocks that it freed. Whoever made the call carries
them out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlplane.control.conditions import key_of
from rlplane.control.policies import Order
from rlplane.control.rules import compile_where
from rlplane.errors import DataPlaneError, InvalidRequestError

if TYPE_CHECKING:
    from rlplane.control.cursors import TaskCursor
    from rlplane.control.partition import Partition
    from rlplane.control.staging import Staging

NOBODY = -1
"""The owner of what no client has written or holds."""
LEAVING = -2
"""The owner of what a client held that is gone, until it is back in the queues."""


LostRows = dict[int, NDArray[np.bool_] | None]
"""By block, which of its rows are lost; None for all of them."""


class Put:
    """A write whose bytes are in storage, complete but for the room that it may have to wait for."""

    __slots__ = (
        "appends",
        "blocks",
        "clock",
        "finishes",
        "groups",
        "ids",
        "known",
        "must_exist",
        "nbytes",
        "now",
        "owner",
        "partition_id",
        "sizes",
        "staged",
        "tags",
        "token",
    )

    def __init__(
        self,
        partition_id: str,
        ids: list[str],
        blocks: dict[str, int],
        tags: list[dict[str, Any]] | None = None,
        *,
        nbytes: Sequence[int] = (),
        owner: int = NOBODY,
        now: float = 0.0,
        token: object = None,
        must_exist: bool = False,
        clock: float = 0.0,
        appends: bool = False,
        finishes: bool = True,
    ) -> None:
        """``now`` is the time of day, ``clock`` one that never goes back. One that ``appends`` adds a turn to
        what its rows have in each field, and only one that ``finishes`` makes the fields count as written."""
        self.must_exist, self.clock = must_exist, clock
        self.appends, self.finishes = appends, finishes
        self.partition_id, self.ids, self.blocks, self.tags = partition_id, ids, blocks, tags
        self.nbytes, self.owner, self.now, self.token = nbytes, owner, now, token
        # What the check has found: the row of each sample that exists, and the groups of the others.
        self.known: list[int | None] = []
        self.groups: Sequence[str | None] = ()
        self.sizes: dict[str, int] = {}
        # Of one that was made ready ahead.
        self.staged: Staging | None = None


class Claim:
    """A request for samples that are ready."""

    __slots__ = (
        "batch_size",
        "condition",
        "condition_key",
        "dp_rank",
        "dp_world",
        "fields",
        "max_tokens",
        "max_uses",
        "order",
        "owner",
        "partition_id",
        "repeat_where",
        "repeats",
        "required",
        "split_groups",
        "step",
        "task",
        "token",
        "where",
    )

    def __init__(
        self,
        partition_id: str,
        task: str,
        fields: Iterable[str],
        batch_size: int,
        where: Mapping[str, Any] | None = None,
        *,
        owner: int = NOBODY,
        token: object = None,
        max_tokens: int | None = None,
        order: str | None = None,
        step: str | None = None,
        dp_rank: int = 0,
        dp_world: int = 1,
        max_uses: int = 1,
        repeat_where: Mapping[str, Any] | None = None,
        split_groups: bool = False,
    ) -> None:
        if type(max_uses) is not int or max_uses < 1 or (max_uses > 1 and step is not None):
            raise InvalidRequestError(
                f"max_uses is an integer of at least 1, and 1 for ranks that share a step, not {max_uses!r}"
            )
        self.max_uses, self.repeat_where, self.repeats = max_uses, repeat_where, compile_where(repeat_where)
        self.step, self.dp_rank, self.dp_world, self.split_groups = step, dp_rank, dp_world, split_groups
        self.max_tokens = max_tokens
        self.order = None if order is None or order == "fifo" else Order(order)
        self.partition_id, self.task, self.batch_size = partition_id, task, batch_size
        self.fields = list(fields)
        self.required = tuple(sorted(set(self.fields)))  # without regard to how they were named
        self.where, self.condition = where, compile_where(where)
        # Claims with equal keys have the same condition: what was found out for one serves the others.
        self.condition_key = None if self.condition is None else key_of(where)
        self.owner, self.token = owner, token

    def __reduce__(self) -> tuple[Any, ...]:
        # The condition is a function; it is compiled again.
        named = {
            "owner": self.owner,
            "token": self.token,
            "max_tokens": self.max_tokens,
            "order": None if self.order is None else self.order.text,
            "step": self.step,
            "dp_rank": self.dp_rank,
            "dp_world": self.dp_world,
            "max_uses": self.max_uses,
            "repeat_where": self.repeat_where,
            "split_groups": self.split_groups,
        }
        wanted = (self.partition_id, self.task, self.fields, self.batch_size, self.where)
        return _claim_again, (wanted, named)


class Batch:
    """What a claim was given: ids and tags, row by row; those of very many are read some at a time. The tags
    are the state's own: copy before changing."""

    __slots__ = ("ids", "tags")

    def __init__(self, ids: Sequence[str], tags: Sequence[dict[str, Any]]) -> None:
        self.ids, self.tags = ids, tags


class Effects:
    """What follows from one change of the state.

    Attributes:
        answers: (token, answer) of every request that the change completed, the caller's own among them: a
            :class:`Batch` for a claim, None for a put that was written, or the error that ended either.
        freed: Blocks that no sample refers to any more, and those of puts that will never be written.
        lining_up: (partition, task) whose waiting claims are to be answered by
            :meth:`~rlplane.control.state.ControlState.line_up`.
        dropped: Rows (blocks, positions) that no sample refers to any more; blocks that are freed, and -1 for
            none, are among them.
    """

    __slots__ = ("answers", "dropped", "freed", "lining_up")

    def __init__(self) -> None:
        self.answers: list[tuple[object, Batch | DataPlaneError | None]] = []
        self.freed: list[int] = []
        self.lining_up: list[tuple[Partition, TaskCursor]] = []
        self.dropped: list[tuple[NDArray[np.int64], NDArray[np.int32]]] = []

    def __bool__(self) -> bool:
        return bool(self.answers or self.freed or self.dropped)


def _claim_again(wanted: tuple[Any, ...], named: dict[str, Any]) -> Claim:
    return Claim(*wanted, **named)
