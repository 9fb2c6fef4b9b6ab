"""``Unclaiming``: claims of many samples that end, a slice at a time, between which its owner does other
things."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import numpy as np

from rlplane.control.cursors import TaskCursor
from rlplane.control.fields import Rows
from rlplane.control.partition import Partition
from rlplane.control.samples import NO_ROWS, rows_by_birth

# Given back in about ten milliseconds. A number and not a time: a journal that is repeated has the same
# slices.
_SAMPLES_AT_ONCE = 4096


class Unclaiming:
    """Which samples a client gives back, or keeps for good (``is_finished``), and how far that has come. The
    last come first: each slice goes to the front of the queue, where the samples are as they were claimed."""

    __slots__ = ("_at", "_before", "_owner", "_which", "cursor", "is_finished", "partition")

    def __init__(
        self,
        partition: Partition,
        task: TaskCursor,
        which: Sequence[str] | Rows,
        owner: int | None,
        *,
        is_finished: bool = False,
    ) -> None:
        """``which`` are ids, or rows that are claimed now. Without an ``owner``, whoever claimed them."""
        self.partition, self.cursor, self.is_finished = partition, task, is_finished
        self._which, self._owner, self._at = which, owner, len(which)
        self._before = task.claims  # what is claimed meanwhile is not given back

    @classmethod
    def of_all(cls, partition: Partition, task: TaskCursor, ids: Sequence[str] | None) -> Self:
        """All that a task has claimed, of these samples or of all there are, whoever claimed it."""
        if ids is None:
            rows = rows_by_birth(np.where(task.claimed, task.sequence, -1))  # of the claim
        else:
            rows = partition.live_rows(ids)
            rows = rows[task.claimed[rows]]
            rows = rows[np.argsort(task.sequence[rows])]
        return cls(partition, task, rows, None)

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to be given back."""
        return self._at <= 0

    def next_rows(self) -> Rows:
        """The rows of the next slice, as far as they are still claimed, and by that client."""
        end, self._at = self._at, max(self._at - _SAMPLES_AT_ONCE, 0)
        task = self.cursor
        if self.partition.tasks.get(task.name) is not task:
            return NO_ROWS  # removed by a new registration
        some = self._which[self._at : end]
        rows = some if isinstance(some, np.ndarray) else self.partition.live_rows(some)
        are_held = task.claimed[rows] if self._owner is None else task.owner[rows] == self._owner
        held: Rows = rows[are_held & (task.sequence[rows] < self._before)]
        return held
