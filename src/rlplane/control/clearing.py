"""``Clearing``: a clear of many samples, a slice at a time, between which its owner does other things."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from rlplane.control.fields import Rows
from rlplane.control.partition import Partition
from rlplane.control.samples import NO_ROWS

# Cleared in about ten milliseconds. A number and not a time: a journal that is repeated has the same slices.
_SAMPLES_AT_ONCE = 8192
_ARRAYS_AT_ONCE = 2
_LARGE = 65_536  # rows of a partition that takes some time to free


class Clearing:
    """Which samples of a partition are to be cleared, how far that has come, and how many there were."""

    __slots__ = ("_arrays", "_at", "_before", "_columns", "_ids", "_remains", "_rows", "count", "partition")

    def __init__(self, partition: Partition, which: Sequence[str] | Rows) -> None:
        """``which`` are ids, or rows that are live now."""
        self.partition = partition
        self._rows: Rows = which if isinstance(which, np.ndarray) else NO_ROWS
        # The last is the next, so that names go with their slice: to free a million at once takes long.
        self._ids = [] if isinstance(which, np.ndarray) else list(reversed(which))
        self._before = partition.table.next_serial
        self.count = self._at = 0
        self._remains: list[dict[Any, Any] | deque[Any] | list[Any]] = []
        self._columns: list[dict[str, Any]] = []
        self._arrays: list[Any] = []

    @classmethod
    def of_all(cls, partition: Partition) -> Self:
        """Everything in a partition that nobody can name any more. Its queues need not be kept up meanwhile,
        and what is in them goes in slices too: to free a million things takes long."""
        clearing = cls(partition, np.flatnonzero(partition.table.serial >= 0))
        is_large = partition.table.size > _LARGE
        clearing._columns = [partition.columns, partition.tasks] if is_large else []
        if is_large:
            clearing._remains += partition.table.contents()
        for task in partition.tasks.values():
            if is_large:
                clearing._remains += [part for queue in task.queues.values() for part in queue.contents()]
            task.queues = {}
        return clearing

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to be cleared."""
        is_cleared = self._at >= len(self._rows) and not self._ids
        return is_cleared and not (self._remains or self._columns or self._arrays)

    def next_rows(self) -> Rows:
        """The rows of the next slice, of those that are there."""
        if self._ids:
            some = self._ids[: -_SAMPLES_AT_ONCE - 1 : -1]
            del self._ids[-_SAMPLES_AT_ONCE:]
            rows = self.partition.live_rows(some)
        else:
            if self._at >= len(self._rows):
                self._free_some()
            rows = self._rows[self._at : self._at + _SAMPLES_AT_ONCE]
            self._at += len(rows)
            serials = self.partition.table.serial[rows]
            rows = rows[(serials >= 0) & (serials < self._before)]  # others may have got the row since
        self.count += len(rows)
        return rows

    def _free_some(self) -> None:
        if not self._remains:
            # Columns, each of many pages.
            if self._arrays:
                del self._arrays[-_ARRAYS_AT_ONCE:]
            elif self._columns and self._columns[-1]:
                _, column = self._columns[-1].popitem()
                self._arrays = [getattr(column, name) for name in column.__slots__]
            else:
                del self._columns[-1:]
            return
        left = _SAMPLES_AT_ONCE
        while self._remains and left:
            part = self._remains[-1]
            some = min(len(part), left)
            free = part.popitem if isinstance(part, dict) else part.pop
            for _ in range(some):
                free()
            left -= some
            if not part:
                del self._remains[-1]
