"""``Leaving``: what a client held that is gone, given back a slice at a time, between which its owner does
other things."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from rlplane.control.cursors import TaskCursor
from rlplane.control.fields import Rows
from rlplane.control.partition import Partition
from rlplane.control.requests import LEAVING
from rlplane.control.samples import rows_by_birth

# Given back in about ten milliseconds. A number and not a time: a journal that is repeated has the same
# slices.
_SAMPLES_AT_ONCE = 4096


class Leaving:
    """Which samples come back, how many they were, and how far that has come. The last come first: each slice
    goes to the front of the queue, where the samples are as they were claimed."""

    __slots__ = ("_held", "count")

    def __init__(self, partitions: Iterable[Partition], owner: int) -> None:
        self._held: list[tuple[Partition, TaskCursor, Rows]] = []
        self.count = 0
        for partition in partitions:
            for task in partition.tasks.values():
                is_held = task.owner == owner
                if is_held.any():
                    rows = rows_by_birth(np.where(is_held, task.sequence, -1))  # of the claims
                    partition.cursors.begin_return(task, rows)
                    self._held.append((partition, task, rows))
                    self.count += len(rows)

    @property
    def is_over(self) -> bool:
        """Whether everything is back."""
        return not self._held

    def next_rows(self) -> Iterator[tuple[Partition, TaskCursor, Rows]]:
        """The rows of the next slice that are still to come back, by task."""
        left = _SAMPLES_AT_ONCE
        while self._held and left:
            partition, task, rows = self._held[0]
            some, rest = rows[-left:], rows[:-left]
            left -= len(some)
            if partition.tasks.get(task.name) is task:  # or a new registration has removed it
                yield partition, task, some[task.owner[some] == LEAVING]
            if len(rest):
                self._held[0] = (partition, task, rest)
            else:
                del self._held[0]
                task.end_return()
