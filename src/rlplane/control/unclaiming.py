"""``Unclaiming``: claims of many samples that end, a slice at a time, between which its owner does other
things."""

from __future__ import annotations

from collections.abc import Sequence

from rlplane.control.cursors import TaskCursor
from rlplane.control.fields import Rows
from rlplane.control.partition import Partition
from rlplane.control.samples import NO_ROWS

# Given back in about ten milliseconds. A number and not a time: a journal that is repeated has the same
# slices.
_SAMPLES_AT_ONCE = 4096


class Unclaiming:
    """Which samples a client gives back, or keeps for good (``is_finished``), and how far that has come. The
    last come first: each slice goes to the front of the queue, where the samples are as they were claimed."""

    __slots__ = ("_at", "_before", "_ids", "_owner", "cursor", "is_finished", "partition")

    def __init__(
        self, partition: Partition, task: TaskCursor, ids: Sequence[str], owner: int, *, is_finished: bool
    ) -> None:
        self.partition, self.cursor, self.is_finished = partition, task, is_finished
        self._ids, self._owner, self._at = ids, owner, len(ids)
        self._before = task.claims  # what is claimed meanwhile is not given back

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to be given back."""
        return self._at <= 0

    def next_rows(self) -> Rows:
        """The rows of the next slice, as far as the client still holds them."""
        end, self._at = self._at, max(self._at - _SAMPLES_AT_ONCE, 0)
        task = self.cursor
        if self.partition.tasks.get(task.name) is not task:
            return NO_ROWS  # removed by a new registration
        rows = self.partition.live_rows(self._ids[self._at : end])
        held: Rows = rows[(task.owner[rows] == self._owner) & (task.sequence[rows] < self._before)]
        return held
