"""``Turns``: the earlier pieces of rows that were written turn by turn."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlplane.control.arrays import filled, grown

Rows = NDArray[np.int64]
BlockRows = tuple[NDArray[np.int64], NDArray[np.int32]]
"""Rows of blocks: the block of each, and its position there."""

_NONE = -1
_MOST_NEW = 2**15  # so that a small append never waits until memory for very many is there


class Turns:
    """For each row of a field a chain of pieces, from the last to the first.

    They are in columns and not in a list for each row, so that very many rows can get a piece at one moment.
    """

    __slots__ = ("_before", "_block", "_free", "_last", "_position", "_size", "_unused", "count")

    def __init__(self, size: int) -> None:
        self.count = 0
        self._size = size
        self._last: Rows | None = None  # by row, the number of its last piece; None until there is one
        self._unused = 0  # from here on numbers were never used
        # By the number of a piece: that of the one before it in its row, its block, and its position there.
        self._before = np.empty(0, np.int64)
        self._block = np.empty(0, np.int64)
        self._position = np.empty(0, np.int32)
        # Numbers that were used. As many of them as are not in use are free.
        self._free = np.empty(0, np.int64)

    def __bool__(self) -> bool:
        return self.count > 0

    def grow(self, size: int) -> None:
        """Make room for rows up to ``size``."""
        self._size = size
        if self._last is not None:
            self._last = grown(self._last, size, _NONE)

    def make_room(self, count: int) -> None:
        """Have memory for so many more pieces, before they come all at once."""
        self._begin()
        before, needed = len(self._block), self.count + count
        if needed > before:
            self._grow(needed)
            for column in (self._before, self._block, self._position):
                column[before:] = 0  # or it would be there when it is written to

    def _begin(self) -> Rows:
        if self._last is None:
            self._last = filled(self._size, np.int64, _NONE)
        return self._last

    def add(self, rows: Rows, blocks: int | Rows, positions: NDArray[np.int32]) -> None:
        """Rows, each of which is named once, go on in a block."""
        last = self._begin()
        numbers = self._new_numbers(len(rows))
        self._before[numbers] = last[rows]
        self._block[numbers] = blocks
        self._position[numbers] = positions
        last[rows] = numbers
        self.count += len(rows)

    def add_in_order(self, rows: Rows, blocks: Rows, positions: NDArray[np.int32]) -> None:
        """The same for rows that are named as often as they have pieces, the first first."""
        order = np.argsort(rows, kind="stable")
        rows, blocks, positions = rows[order], blocks[order], positions[order]
        begins = np.flatnonzero(np.diff(rows, prepend=_NONE))
        which = np.arange(len(rows)) - np.repeat(begins, np.diff(begins, append=len(rows)))
        for turn in range(int(which.max(initial=_NONE)) + 1):
            at = np.flatnonzero(which == turn)
            self.add(rows[at], blocks[at], positions[at])

    def have(self, rows: Rows) -> NDArray[np.bool_]:
        """For each row, whether it has a piece."""
        if self._last is None:
            return np.zeros(len(rows), bool)
        has: NDArray[np.bool_] = self._last[rows] != _NONE
        return has

    def last_blocks(self, rows: Rows) -> list[int]:
        """The blocks with the last pieces of rows, each once."""
        if self._last is None:
            return []
        last = self._last[rows]
        blocks = self._block[last[last != _NONE]]
        blocks = blocks[np.diff(blocks, prepend=_NONE) != 0]  # what came together is of one block
        found: list[int] = np.unique(blocks).tolist()
        return found

    def of(self, rows: Rows) -> tuple[Rows, BlockRows]:
        """The pieces of rows, the first of each first: at which place in ``rows`` its row is, and where it
        is."""
        places, numbers = self._chains(rows)
        return places, (self._block[numbers], self._position[numbers])

    def forget(self, rows: Rows) -> BlockRows:
        """Drop the pieces of rows, each of which is named once; return where they were."""
        if self._last is None:
            return np.empty(0, np.int64), np.empty(0, np.int32)
        _, numbers = self._chains(rows)
        self._last[rows] = _NONE
        free = self._unused - self.count
        if free + len(numbers) > len(self._free):
            self._free = grown(self._free, len(self._block), 0)
        self._free[free : free + len(numbers)] = numbers
        self.count -= len(numbers)
        return self._block[numbers], self._position[numbers]

    def _chains(self, rows: Rows) -> tuple[Rows, Rows]:
        if self._last is None:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        numbers = self._last[rows]
        places = np.flatnonzero(numbers != _NONE)
        numbers = numbers[places]
        found = [(places, numbers)]
        while True:
            numbers = self._before[numbers]
            has_more = numbers != _NONE
            places, numbers = places[has_more], numbers[has_more]
            if not len(places):
                break
            found.append((places, numbers))
        if len(found) == 1:
            return found[0]
        # The first pieces before the last, and then row by row.
        places = np.concatenate([some for some, _ in reversed(found)])
        order = np.argsort(places, kind="stable")
        return places[order], np.concatenate([some for _, some in reversed(found)])[order]

    def _new_numbers(self, count: int) -> Rows:
        free = self._unused - self.count
        again = min(free, count)
        used = self._free[free - again : free].copy()
        if again == count:
            return used
        end = self._unused + count - again
        if end > len(self._block):
            self._grow(end)
        new = np.arange(self._unused, end)
        self._unused = end
        return np.concatenate((used, new)) if again else new

    def _grow(self, needed: int) -> None:
        size = max(needed, len(self._block) + min(len(self._block), _MOST_NEW))
        self._before, self._block = grown(self._before, size, 0), grown(self._block, size, 0)
        self._position = grown(self._position, size, 0)
