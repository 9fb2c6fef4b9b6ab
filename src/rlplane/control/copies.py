"""``Copies``: columns of a partition as they are at one moment, copied a slice at a time.

Whoever is about to change a row that is not copied yet lets it be copied first, so others go on meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol
from weakref import ref

import numpy as np
from numpy.typing import NDArray

from rlplane.control.turns import Rows, Turns

# Copied in some milliseconds, into memory that the system has to find first.
_ROWS_AT_ONCE = 32_768

Read = Callable[[Rows | slice], NDArray[Any]]


class CopiedTable(Protocol):
    """What has to be known of the partition's rows."""

    size: int
    savers: list[ref[Copies]]


class Copies:
    """All columns are named before the first slice. The table knows this for as long as it is not over, and
    somebody needs it."""

    def __init__(self, table: CopiedTable) -> None:
        self._table = table
        self._size = table.size
        self._at = 0
        self._is_left = np.ones(self._size, bool)
        self._columns: list[tuple[Read, NDArray[Any]]] = []
        self._turns: list[tuple[Turns, Turns]] = []
        table.savers.append(ref(self, table.savers.remove))

    def column(self, owner: object, name: str) -> NDArray[Any]:
        """A copy of a column, which is there when all slices are. It is read by its name, because it moves
        when it grows."""
        return self.column_read_by(lambda rows: getattr(owner, name)[rows])

    def column_read_by(self, read: Read) -> NDArray[Any]:
        """The same for what is read in another way."""
        copy = np.empty(self._size, read(slice(0)).dtype)
        self._columns.append((read, copy))
        return copy

    def turns(self, turns: Turns) -> Turns:
        """The same for the pieces of rows that grow."""
        copy = Turns(self._size)
        if turns:  # a row that gets its first one later has none here
            self._turns.append((turns, copy))
        return copy

    def keep(self, rows: Rows) -> None:
        """These rows are about to be changed."""
        rows = rows[rows < self._size]
        rows = rows[self._is_left[rows]]
        if len(rows):
            rows = np.unique(rows)
            for read, copy in self._columns:
                copy[rows] = read(rows)
            self._copy_turns(rows)
            self._is_left[rows] = False

    def copy_some(self) -> bool:
        """Go on; True when all is copied."""
        some = slice(self._at, min(self._at + _ROWS_AT_ONCE, self._size))
        are_left = self._is_left[some]
        if are_left.all():
            for read, copy in self._columns:
                copy[some] = read(some)
            self._copy_turns(np.arange(some.start, some.stop))
            are_left[:] = False
        else:
            self.keep(self._at + np.flatnonzero(are_left))
        self._at = some.stop
        if self._at < self._size:
            return False
        savers: list[ref[Copies]] = self._table.savers
        savers[:] = [saver for saver in savers if saver() is not self]
        return True

    def _copy_turns(self, rows: Rows) -> None:
        for turns, copy in self._turns:
            places, (blocks, positions) = turns.of(rows)
            copy.add_in_order(rows[places], blocks, positions)
