"""``SortedRows``: very many rows in an order, sorted some at a time while they are read."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlplane.control.ordered_rows import Run, take_first
from rlplane.control.queues import Rows

_SORTED_AT_ONCE = 1 << 16  # in some milliseconds


class SortedRows:
    """Rows by their keys, and of equal ones those first that come first. First all parts are sorted, each by
    itself, and then as much of them is merged as is asked for: to merge all of a million takes long."""

    def __init__(self, keys: NDArray[np.float64], rows: Rows) -> None:
        numbers = np.arange(len(rows))
        self._unsorted = Run(keys, numbers, numbers, rows)
        self._runs: list[Run] = []
        self._front: Rows = np.empty(0, np.int64)

    def sort_some(self) -> bool:
        """Sort some more of them; True if all parts are sorted."""
        if len(self._unsorted.rows):
            self._runs.append(Run.merged([self._unsorted.cut(0, _SORTED_AT_ONCE)]))
            self._unsorted = self._unsorted.cut(_SORTED_AT_ONCE)
        return not len(self._unsorted.rows)

    def next_rows(self, count: int) -> Rows:
        """The next rows in order, so many if there are."""
        while not self.sort_some():
            pass
        while len(self._front) < count and self._runs:
            first, self._runs = take_first(self._runs, count)
            self._front = np.concatenate((self._front, first.rows))
        rows, self._front = self._front[:count], self._front[count:]
        return rows
