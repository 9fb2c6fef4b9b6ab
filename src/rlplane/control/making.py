"""``GroupsInMaking``: a queue of groups that gets what was ready before it, or what came with a put of very
many, a slice at a time."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from rlplane.control.conditions import Look
from rlplane.control.fields import Rows
from rlplane.control.groups import GroupQueue
from rlplane.control.samples import STAMP_BITS

if TYPE_CHECKING:
    from rlplane.control.cursors import Cursors, QueueKey, TaskCursor

_ROWS_AT_ONCE = 2048


class GroupsInMaking(Look):
    """The queue is there meanwhile, and rows leave it as they leave any other. Those that become ready or
    come back come to it later, by their stamps, as they would if it was made then. When it changes how many
    members a group has, it has to be made anew."""

    def __init__(
        self, cursors: Cursors, task: TaskCursor, key: QueueKey, queue: GroupQueue, rows: Rows
    ) -> None:
        """``rows`` are live, and those of them that are ready are still to come to the queue."""
        self._cursors, self._task, self._key, self._required = cursors, task, key, key[0]
        # The queue knows this, and what is dropped is freed without a garbage collector.
        self._queue, self._group_size = weakref.ref(queue), queue.group_size
        self._touched: list[Rows] = []
        self._begin(cursors.ready(task, self._required, rows))
        self.is_spoiled = False

    def _begin(self, rows: Rows) -> None:
        """These are to come next. What happens to them from now on is seen by their stamps."""
        self._unsorted: Rows | None = rows
        self._slices: deque[tuple[Rows, bool]] = deque()
        self._later = (self._cursors.table.events + 1) << STAMP_BITS

    def _line_up(self, rows: Rows) -> None:
        size = -(-_ROWS_AT_ONCE // self._group_size) * self._group_size
        # What came back together goes to the front together.
        self._slices = deque(
            (some, is_return)
            for piece, is_return in self._cursors.in_line(self._task, self._required, rows)
            for some in ([piece] if is_return else np.split(piece, range(size, len(piece), size)))
        )

    def touch(self, rows: Rows) -> None:
        """Rows have become ready, or come back, or have other tags."""
        queue = self._queue()
        if queue is not None:
            queue.move(rows)
        self._touched.append(rows)

    def __call__(self, is_over: Callable[[], bool]) -> bool:
        """Go on until the time is over; True when the queue is whole, or will never be."""
        cursors, task, queue = self._cursors, self._task, self._queue()
        is_wanted = cursors.tasks.get(task.name) is task and task.queues.get(self._key) is queue
        if queue is None or self.is_spoiled or not is_wanted:
            if is_wanted and queue is not None:
                del task.queues[self._key]
            return True
        while self._unsorted is not None or self._slices or self._touched:
            if self._unsorted is not None:
                rows, self._unsorted = self._unsorted, None
                self._line_up(rows)
            elif self._slices:
                rows, is_return = self._slices.popleft()
                rows = self._ready(rows, is_later=False)
                if is_return:
                    queue.restore(rows)
                else:
                    queue.offer(rows)
            else:
                touched, self._touched = self._touched, []
                self._begin(self._ready(np.unique(np.concatenate(touched)), is_later=True))
            if is_over() and (self._unsorted is not None or self._slices or self._touched):
                return False
        queue.is_whole, queue.making = True, None
        return True

    def _ready(self, rows: Rows, *, is_later: bool) -> Rows:
        """Those that are ready now, and have been since before the queue was begun, or since later."""
        cursors, task = self._cursors, self._task
        rows = rows[cursors.table.serial[rows] >= 0]
        rows = cursors.ready(task, self._required, rows)
        stamps, _ = cursors.since(task, self._required, rows)
        found: Rows = rows[(stamps >= self._later) == is_later]
        return found
