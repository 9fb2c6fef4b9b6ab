"""``Marking``: very many samples that somebody else chose for a task, found a slice at a time and marked as
claimed at one moment, all or none."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlplane.control.cursors import TaskCursor
from rlplane.control.partition import Partition
from rlplane.control.requests import NOBODY

# Found in some milliseconds. A number and not a time: a journal that is repeated has the same slices.
_SAMPLES_AT_ONCE = 8192


class Marking:
    """Which samples are to be marked, and how far that has come. One that is gone, claimed or named twice
    ends it, and then none is marked."""

    __slots__ = ("_ids", "_rows", "_serials", "cursor", "is_marked", "is_over", "partition")

    def __init__(self, partition: Partition, task: TaskCursor, ids: Sequence[str] | None) -> None:
        self.partition, self.cursor = partition, task
        self.is_over = self.is_marked = False
        # The last are found first, and go with their slice: to free very many names at once takes long.
        self._ids = [] if ids is None else list(ids)
        self._rows = np.zeros(len(self._ids), np.int64) if ids is not None else partition.live_rows(None)
        self._serials = partition.table.serial[self._rows]

    def mark_some(self, *, is_there: bool) -> None:
        """Go on, unless the partition is not there any more; the last slice marks what was found."""
        if not is_there or self.partition.tasks.get(self.cursor.name) is not self.cursor:
            self.is_over = True
        elif self._ids:
            self._find_some()
        if not self._ids and not self.is_over:
            self.is_over = True
            self._mark()

    def _find_some(self) -> None:
        table, some = self.partition.table, self._ids[-_SAMPLES_AT_ONCE:]
        del self._ids[-_SAMPLES_AT_ONCE:]
        rows = np.array([-1 if row is None else row for row in table.rows.find(some)], np.int64)
        at = slice(len(self._ids), len(self._ids) + len(rows))
        self._rows[at], self._serials[at] = rows, table.serial[rows]
        self.is_over = bool((rows < 0).any())

    def _mark(self) -> None:
        table, cursor, rows = self.partition.table, self.cursor, self._rows
        named = np.zeros(table.size, bool)
        named[rows] = True
        # Others were served since they were found.
        if (
            (table.serial[rows] != self._serials).any()
            or cursor.claimed[rows].any()
            or np.count_nonzero(named) < len(rows)
        ):
            return
        if table.spec.group_size and len(rows) > _SAMPLES_AT_ONCE and not cursor.waiting:
            # To take so many out of their groups takes long. The next claim gathers them anew, in slices.
            cursor.queues.clear()
        table.about_to_differ(rows)
        cursor.take(rows, NOBODY)
        self.is_marked = True
