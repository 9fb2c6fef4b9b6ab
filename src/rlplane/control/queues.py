"""Queues of samples that are ready for a task, row by row; :mod:`rlplane.control.groups` has whole groups.

A queue knows rows only. Rows are offered when they become ready, discarded when they are claimed
elsewhere or cleared, and popped from the front. Both kinds cost the rows that they touch, never the
rows that they hold.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from rlplane.control.arrays import filled, grown

Rows = NDArray[np.int64]
Match = Callable[[Rows], NDArray[np.bool_]]
"""For each row, whether it may be taken."""

# How many rows of a queue are looked at together: few at first, because most claims find theirs at the front.
_PIECE, _LARGEST_PIECE = 256, 4096
_MOST_TOGETHER = 1 << 16  # what fits into the caches
_MOST_ADDED = 1024
# The number of a row that has no entry: zero, because memory that is not written to takes no time.
_ABSENT = 0
# What is put back to the front is numbered downwards from here.
_FIRST_ENTRY = 1 << 62


class Units(NamedTuple):
    """What is handed out together, one after the other: the rows of all, and how many each has."""

    rows: Rows
    lengths: Rows

    @property
    def starts(self) -> Rows:
        """Where each begins."""
        ends: Rows = np.cumsum(self.lengths)
        return ends - self.lengths

    def matching(self, match: Match) -> Units:
        """Those of which all rows match."""
        if not len(self.lengths):
            return self
        chosen = np.logical_and.reduceat(match(self.rows), self.starts)
        return Units(self.rows[np.repeat(chosen, self.lengths)], self.lengths[chosen])


class RowTable(Protocol):
    """What a queue needs to know of the partition's rows."""

    size: int
    ids: NDArray[Any]
    tags: NDArray[Any]
    groups: NDArray[Any]


class ReadyQueue(ABC):
    """What both kinds can do. ``ready`` is the number of rows that can be taken."""

    def __init__(self, table: RowTable) -> None:
        self.ready = 0
        self.is_whole = True  # whether all that was ready when it was made is in it
        self._table = table
        # For each claim how much it wants, how much of that was found, how much of _added is in that, and
        # its condition.
        self._counted: dict[object, tuple[int, int, int, Match]] = {}
        self._added: list[Any] = []

    def __getstate__(self) -> dict[str, Any]:
        # Conditions are functions; what was counted is counted again.
        return {**vars(self), "_counted": {}, "_added": []}

    def touched(self) -> None:
        """Forget what was counted, because it is not known what has changed."""
        self._counted.clear()
        self._added.clear()

    def count(self, enough: int, match: Match | None, asker: object) -> int:
        """How much ``pop`` would give, counted up to ``enough``. An ``asker`` has one condition, and what is
        counted for it is remembered: a claim that waits asks again after every write, and only what was
        written has to be counted. None is not remembered."""
        if match is None:
            return min(self._room_for_all, enough)
        if asker is None:
            return self._count_matching(enough, match)
        wanted, found, seen, _ = self._counted.get(asker, (0, 0, 0, match))
        found = self._count_matching(enough, match) if wanted != enough else found + self._new(match, seen)
        self._counted[asker] = (enough, found, len(self._added), match)
        return min(found, enough)

    def keep_counts(self, askers: Collection[object]) -> None:
        """Forget what was counted for claims that do not wait any more."""
        if self._counted:
            self._counted = {asker: known for asker, known in self._counted.items() if asker in askers}
            if not self._counted:
                self._added.clear()

    @abstractmethod
    def withdraw(self, rows: Rows) -> None:
        """The tags of these rows are about to change; :meth:`readmit` follows."""

    @abstractmethod
    def readmit(self, rows: Rows) -> None:
        """The tags of these rows have changed."""

    @abstractmethod
    def candidates(self) -> tuple[Rows, int]:
        """What is in the queue, about in its order, and how many rows belong together: for a look at the
        tags before a claim is made."""

    def contents(self) -> list[dict[Any, Any] | deque[Any] | list[Any]]:
        """What has an entry for each of very many rows, to be freed some at a time."""
        return []

    @property
    def _room_for_all(self) -> int:
        return self.ready

    @abstractmethod
    def _room_in(self, units: Any, match: Match) -> int:
        """How much of a batch those rows or groups take that match."""

    @abstractmethod
    def _joined(self, parts: list[Any]) -> Any:
        """Rows or groups that came one after the other, as if they had come together."""

    def _new(self, match: Match, seen: int) -> int:
        return self._room_in(self._joined(self._added[seen:]), match) if seen < len(self._added) else 0

    def _note_added(self, units: Any) -> None:
        if self._counted:
            self._added.append(units)
            if len(self._added) > _MOST_ADDED:
                self._note_gone(None)

    def _note_gone(self, units: Any) -> None:
        """Take rows or groups that are about to leave out of what was counted."""
        if not self._counted:
            return
        counted = {}
        for asker, (enough, found, seen, match) in self._counted.items():
            found += self._new(match, seen)
            # A count that was ended because it was enough does not say what is in it.
            if found < enough:
                gone = 0 if units is None else self._room_in(units, match)
                counted[asker] = (enough, found - gone, 0, match)
        self._counted = counted
        self._added.clear()

    @abstractmethod
    def offer(self, rows: Rows) -> None:
        """Append rows that are ready and unclaimed; those that are already in are left alone."""

    @abstractmethod
    def restore(self, rows: Rows) -> None:
        """Put rows that were claimed back to the front, in the order given."""

    @abstractmethod
    def discard(self, rows: Rows) -> None:
        """Remove rows, wherever they are."""

    @abstractmethod
    def pop(self, count: int, match: Match | None) -> Rows:
        """Remove and return up to ``count`` rows from the front, of those that match."""

    def among(self, rows: Rows) -> Rows:
        """Those of these rows that can be taken, in the order of the queue."""
        queued = [units.rows for units in self.pieces(None)]
        found: Rows = np.concatenate([np.empty(0, np.int64), *(some[np.isin(some, rows)] for some in queued)])
        return found

    def take(self, rows: Rows) -> None:
        """Remove rows that are in the queue."""
        self.discard(rows)

    @abstractmethod
    def grow(self, size: int) -> None:
        """Make room for rows up to ``size``."""

    def look_again(self, name: str, members: Sequence[int]) -> None:
        """It has changed how many of the members of a group belong together: perhaps they are whole now, or
        not any more."""
        self.touched()

    @abstractmethod
    def pieces(self, match: Match | None) -> Iterator[Units]:
        """What ``pop`` would give, in its order, some at a time."""

    def rooms(self, units: Units) -> Rows:
        """What each unit takes of a batch."""
        return units.lengths

    def _count_matching(self, enough: int, match: Match) -> int:
        found = 0
        for units in self.pieces(match):
            found += int(self.rooms(units).sum())
            if found >= enough:
                break
        return found


class SingleRows(ReadyQueue):
    """A queue of rows that are handed out one by one."""

    @abstractmethod
    def in_order(self) -> Iterator[Rows]:
        """All rows, some at a time: few at first."""

    def pieces(self, match: Match | None) -> Iterator[Units]:
        for rows in self.in_order():
            chosen = rows if match is None else rows[match(rows)]
            yield Units(chosen, np.ones(len(chosen), np.int64))

    def _joined(self, parts: list[Rows]) -> Rows:
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _room_in(self, units: Rows, match: Match) -> int:
        return int(np.count_nonzero(match(units)))


class RowQueue(SingleRows):
    """Rows one by one, kept as the chunks in which they came.

    Each entry has a number, by which they are in order, and a row knows that of its valid one. Removing a row
    only forgets its number; the chunk is filtered when it comes to the front. So the old entry of a row that
    came back does not count.
    """

    def __init__(self, table: RowTable) -> None:
        super().__init__(table)
        self._entry = filled(table.size, np.int64, _ABSENT)
        self._first_entry = self._next_entry = _FIRST_ENTRY
        self._chunks: deque[tuple[Rows, NDArray[np.int64]]] = deque()
        self._held = 0

    def grow(self, size: int) -> None:
        self._entry = grown(self._entry, size, _ABSENT)

    def offer(self, rows: Rows) -> None:
        rows = rows[self._entry[rows] == _ABSENT]
        if len(rows):
            self._chunks.append(self._added_at(self._next_entry, rows))
            self._next_entry += len(rows)

    def restore(self, rows: Rows) -> None:
        if len(rows):
            self._first_entry -= len(rows)
            self._chunks.appendleft(self._added_at(self._first_entry, rows))

    def discard(self, rows: Rows) -> None:
        self.take(rows[self._entry[rows] != _ABSENT])

    def take(self, rows: Rows) -> None:
        if len(rows):
            self._note_gone(rows)
            self._entry[rows] = _ABSENT
            self.ready -= len(rows)
            if self._held > 2 * self.ready + 4096:
                self._compact()

    def pop(self, count: int, match: Match | None) -> Rows:
        taken: list[Rows] = []
        skipped: list[tuple[Rows, NDArray[np.int64]]] = []
        piece = min(4 * count + _PIECE, _MOST_TOGETHER) if match is None else piece_for(count)
        while count and self._chunks:
            rows, entries = self._chunks.popleft()
            if len(rows) > piece:
                # A look at a piece of a large chunk, so that a claim costs the batch; slices are views.
                self._chunks.appendleft((rows[piece:], entries[piece:]))
                rows, entries = rows[:piece], entries[:piece]
            self._held -= len(rows)
            valid = self._valid(rows, entries)
            if match is None:
                chosen = valid[:count]
                rest = valid[count:]
            else:
                chosen, rest = _split(valid, count, match)
            if len(rest):
                skipped.append((rest, self._entry[rest]))
                self._held += len(rest)
            if len(chosen):
                self._entry[chosen] = _ABSENT
                taken.append(chosen)
                count -= len(chosen)
            longer = max(piece, min(2 * piece, _LARGEST_PIECE))
            piece = longer if match is None else piece_for(count, piece)
        self._chunks.extendleft(reversed(skipped))
        if not taken:
            return np.empty(0, np.int64)
        rows = taken[0] if len(taken) == 1 else np.concatenate(taken)
        self.ready -= len(rows)
        self._note_gone(rows)
        return rows

    def withdraw(self, rows: Rows) -> None:
        self._note_gone(rows[self._entry[rows] != _ABSENT])

    def readmit(self, rows: Rows) -> None:
        self._note_added(rows[self._entry[rows] != _ABSENT])

    def candidates(self) -> tuple[Rows, int]:
        chunks = [rows for rows, _ in self._chunks]
        return (np.concatenate(chunks) if chunks else np.empty(0, np.int64)), 1

    def in_order(self) -> Iterator[Rows]:
        size = _PIECE
        for rows, entries in self._chunks:
            at = 0
            while at < len(rows):
                yield self._valid(rows[at : at + size], entries[at : at + size])
                at += size
                size = min(2 * size, _LARGEST_PIECE)

    def among(self, rows: Rows) -> Rows:
        entries = self._entry[rows]
        order = entries.argsort()
        if len(rows) and entries[order[0]] == _ABSENT:
            order = order[np.count_nonzero(entries == _ABSENT) :]  # what is not in came first
        found: Rows = rows[order]
        return found

    def _added_at(self, first: int, rows: Rows) -> tuple[Rows, NDArray[np.int64]]:
        """A chunk of rows whose entries have the numbers from ``first`` on."""
        entries = np.arange(first, first + len(rows))
        self._entry[rows] = entries
        self.ready += len(rows)
        self._held += len(rows)
        self._note_added(rows)
        return rows, entries

    def _valid(self, rows: Rows, entries: NDArray[np.int64]) -> Rows:
        valid: Rows = rows[self._entry[rows] == entries]
        return valid

    def _compact(self) -> None:
        rows = np.concatenate([self._valid(*chunk) for chunk in self._chunks])
        self._chunks = deque([(rows, self._entry[rows])])
        self._held = len(rows)


def piece_for(count: int, before: int = 0) -> int:
    """How many rows to look at for ``count`` that match, after a piece of so many: of very many not more than
    those, because further rows may not have been looked at ahead."""
    fewest = min(max(4 * count + _PIECE, 2 * before), _LARGEST_PIECE)
    return max(fewest, min(count, _MOST_TOGETHER))


def _split(rows: Rows, count: int, match: Match) -> tuple[Rows, Rows]:
    """The first ``count`` rows that match, and all the others."""
    chosen = np.zeros(len(rows), bool)
    chosen[np.flatnonzero(match(rows))[:count]] = True
    return rows[chosen], rows[~chosen]
