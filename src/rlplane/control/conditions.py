"""``Conditions``: which rows of a partition satisfy the conditions that claims and questions have.

A row's tags are looked at once per condition, however many ask and however often: what was found is kept
until the tags change or the sample is cleared. A long look can be cut into pieces (:class:`Look`), between
which the owner of the state does other things. Nothing here changes what anybody is answered, only how long
it takes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from rlplane.control.arrays import filled, grown
from rlplane.control.rules import Condition

Rows = NDArray[np.int64]

_UNKNOWN, _YES, _NO = 0, 1, 2
# What is known takes a byte per row and condition. So much of it is kept.
_MOST_BYTES = 64 * 2**20
_FEWEST = 16
# Looked at between two looks at the clock: an "in" of thousands of lists takes milliseconds for these.
_ROWS_AT_ONCE = 256


class TagTable(Protocol):
    """What has to be known of the partition's rows."""

    size: int
    serial: NDArray[np.int64]
    tags: NDArray[Any]


class Matches:
    """One condition, and what is known of it, row by row."""

    __slots__ = ("_condition", "_known", "_table")

    def __init__(self, table: TagTable, condition: Condition) -> None:
        self._table, self._condition = table, condition
        self._known = filled(table.size, np.int8, _UNKNOWN)

    def __call__(self, rows: Rows) -> NDArray[np.bool_]:
        """For each row, whether it satisfies the condition."""
        if len(self._known) < self._table.size:
            self._known = grown(self._known, self._table.size, _UNKNOWN)
        known = self._known[rows]
        unknown = rows[known == _UNKNOWN]
        if len(unknown):
            condition = self._condition
            self._known[unknown] = [
                _YES if condition(tags) else _NO for tags in self._table.tags[unknown].tolist()
            ]
            known = self._known[rows]
        found: NDArray[np.bool_] = known == _YES
        return found

    def forget(self, rows: Rows) -> None:
        """The tags of these rows have changed, or are gone."""
        self._known[rows[rows < len(self._known)]] = _UNKNOWN


class Conditions:
    """The conditions that were asked for, the last ones of them."""

    def __init__(self, table: TagTable) -> None:
        self._table = table
        self._matches: dict[object, Matches] = {}

    def get(self, key: object, condition: Condition) -> Matches:
        """What is known of a condition; equal ones have equal keys."""
        known = self._matches.pop(key, None)
        if known is None:
            known = Matches(self._table, condition)
            while len(self._matches) >= max(_FEWEST, _MOST_BYTES // self._table.size):
                del self._matches[next(iter(self._matches))]
        self._matches[key] = known  # the last one is the one that was used last
        return known

    def forget(self, rows: Rows) -> None:
        """The tags of these rows have changed, or are gone."""
        for matches in self._matches.values():
            matches.forget(rows)

    def __getstate__(self) -> dict[str, Any]:
        # Conditions are functions; a dump goes without, and they are asked for again.
        return {**vars(self), "_matches": {}}


class Look:
    """A look at many rows, a few at a time: call it until it returns True. It is good for as long as one
    likes, because a row that has gone meanwhile is passed over, and one that has come back is looked at as it
    is now."""

    def __init__(
        self, table: TagTable, rows: Rows, see: Callable[[Rows], int], enough: float, at_once: int = 1
    ) -> None:
        """``see`` looks at rows and says how many it was looking for; ``enough`` of those end the look.
        ``at_once`` rows belong together."""
        self._table, self._rows, self._see, self._left = table, rows, see, enough
        self._piece = -(-_ROWS_AT_ONCE // at_once) * at_once
        self._at = 0

    def __call__(self, is_over: Callable[[], bool]) -> bool:
        """Go on until the time is over; True when there is nothing left to look at."""
        while self._at < len(self._rows) and self._left > 0:
            rows = self._rows[self._at : self._at + self._piece]
            self._at += self._piece
            self._left -= self._see(rows[self._table.serial[rows] >= 0])
            if is_over():
                break
        return self._at >= len(self._rows) or self._left <= 0


class Pause(Look):
    """Nothing to look at: between two things that take their time, so that others are served."""

    def __init__(self) -> None:
        self._was_called = False

    def __call__(self, is_over: Callable[[], bool]) -> bool:
        """See :class:`Look`."""
        was_called, self._was_called = self._was_called, True
        return was_called or not is_over()


def key_of(where: object) -> object:
    """Equal for conditions that are the same."""
    try:
        return msgspec.msgpack.encode(where)
    except (TypeError, ValueError, OverflowError):
        return object()  # values that only a caller in this process can give: equal to nothing else
