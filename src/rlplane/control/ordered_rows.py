"""A queue of samples, one by one, that is not first come, first served: rows by a number.

Rows are kept in sorted *runs*. Some of the first rows are the *front*, from which a claim takes a slice. What
comes is sorted by itself and becomes a run, or goes into the front where it belongs. Runs of about equal
length are merged, so there are few of them, and a row is moved O(log n) times; numpy does all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from rlplane.control.arrays import filled, grown
from rlplane.control.conditions import Look
from rlplane.control.queues import Match, Rows, RowTable, SingleRows, piece_for

_PIECE, _LARGEST_PIECE = 256, 4096
_FRONT = 8192
# Merging two runs to one of this length takes some ten milliseconds, in which nobody else is served.
_LONGEST_MERGED = 1 << 17
_SORTED_AHEAD = 1 << 14
_DISCARDED_AT_ONCE = 1 << 14
_COMPACTED_AT_ONCE = 1 << 17
# All that is there when a queue is made is sorted in parts, and these are not merged at once.
_LONGEST_SORTED = 1 << 16
# The stamp of a row that is not in the queue: zero, because memory that is not written to takes no time.
_ABSENT = 0
# What comes is numbered from here on, and what comes back downwards from the same below zero. Between them is
# what was there before the queue was made.
_FIRST_NUMBER = 1 << 62


Keys = Callable[[Rows], NDArray[np.float64]]
"""The key of each row: the lowest comes first."""


class Run(NamedTuple):
    """Entries in the order of their keys, and of equal ones in the order of their numbers. An entry is valid
    if its row has the same stamp."""

    keys: NDArray[np.float64]
    numbers: NDArray[np.int64]
    stamps: NDArray[np.int64]
    rows: Rows

    @classmethod
    def merged(cls, runs: list[Self]) -> Self:
        """The entries of several runs, or of such as are not in order, in order."""
        if len(runs) == 1:
            keys, numbers, stamps, rows = runs[0]
        else:
            keys, numbers, stamps, rows = map(np.concatenate, zip(*runs, strict=True))
        if _are_in_order(keys, numbers):
            return cls(keys, numbers, stamps, rows)
        # A stable sort is fast for what is sorted in parts, and keeps equal keys in order that are so.
        order = np.argsort(keys, kind=None if len(runs) == 1 else "stable")
        if not _are_in_order(keys[order], numbers[order]):
            order = np.lexsort((numbers, keys))
        return cls(keys[order], numbers[order], stamps[order], rows[order])

    def cut(self, start: int, end: int | None = None) -> Self:
        """The entries from ``start`` to ``end``; nothing is copied."""
        keys, numbers, stamps, rows = self
        return type(self)(keys[start:end], numbers[start:end], stamps[start:end], rows[start:end])

    def chosen(self, which: NDArray[np.bool_]) -> Self:
        """Some of the entries."""
        keys, numbers, stamps, rows = self
        return type(self)(keys[which], numbers[which], stamps[which], rows[which])

    def place_of(self, key: float, number: int) -> int:
        """How many entries come before one with this key and number."""
        first, last = np.searchsorted(self.keys, key, "left"), np.searchsorted(self.keys, key, "right")
        return int(first + np.searchsorted(self.numbers[first:last], number))


_NOTHING = Run(np.empty(0), *(np.empty(0, np.int64) for _ in range(3)))


def take_first(runs: list[Run], least: int) -> tuple[Run, list[Run]]:
    """The first entries of all runs in order, mostly at least so many, and what is left of the runs."""
    each = least * 2 // len(runs) + 1
    heads = [run.cut(0, each) for run in runs]
    # Of a run that goes on, nothing is known that comes after the end of its head.
    ends = [
        (float(head.keys[-1]), int(head.numbers[-1]))
        for head, run in zip(heads, runs, strict=True)
        if len(run.rows) > each
    ]
    if ends:
        key, number = min(ends)
        places = [head.place_of(key, number + 1) for head in heads]
    else:
        places = [len(head.rows) for head in heads]
    taken = [head.cut(0, place) for head, place in zip(heads, places, strict=True) if place]
    left = [run.cut(place) for run, place in zip(runs, places, strict=True) if place < len(run.rows)]
    return Run.merged(taken), left


def _are_in_order(keys: NDArray[np.float64], numbers: NDArray[np.int64]) -> bool:
    later, earlier = keys[1:], keys[:-1]
    ascends = later > earlier
    if ascends.all():
        return True
    return bool((ascends | ((later == earlier) & (numbers[1:] > numbers[:-1]))).all())


class Numbering(Protocol):
    """How samples are given numbers; a dump has it, so it is no function."""

    def keys(self, ids: Sequence[str], tags: Sequence[Mapping[str, Any]]) -> NDArray[np.float64]:
        """The number of each."""


class KnownKeys:
    """A number for each sample that follows from its tags, as the key in an order does, each worked out once:
    what is known is kept until the tags change or the sample is cleared. So they can be worked out ahead, a
    few at a time."""

    def __init__(self, table: RowTable, numbering: Numbering) -> None:
        self._table, self._numbering = table, numbering
        self._keys = filled(table.size, np.float64, np.nan)

    def __call__(self, rows: Rows) -> NDArray[np.float64]:
        """The key of each row."""
        if len(self._keys) < self._table.size:
            self._keys = grown(self._keys, self._table.size, np.nan)
        keys = self._keys[rows]
        unknown = np.isnan(keys)
        if unknown.any():
            new = rows[unknown]
            keys[unknown] = self._numbering.keys(
                self._table.ids[new].tolist(), self._table.tags[new].tolist()
            )
            self._keys[new] = keys[unknown]
        return keys

    def forget(self, rows: Rows) -> None:
        """The tags of these rows have changed, or are gone."""
        self._keys[rows[rows < len(self._keys)]] = np.nan


class LongFront(Look):
    """Sorts the first rows of a queue before a claim of very many takes them, some at a time."""

    def __init__(self, queue: OrderedRowQueue, count: int) -> None:
        self._queue, self._count = queue, count

    def __call__(self, is_over: Callable[[], bool]) -> bool:
        """See :class:`~rlplane.control.conditions.Look`."""
        while not (is_done := self._queue.lengthen_front(self._count)):
            if is_over():
                break
        return is_done


class MatchingFront(Look):
    """The same before a claim with a condition, which looks at rows in their order until it has enough."""

    def __init__(self, queue: OrderedRowQueue, match: Match, count: int) -> None:
        self._queue, self._match, self._left = queue, match, count
        self._at = 0

    def __call__(self, is_over: Callable[[], bool]) -> bool:
        """See :class:`~rlplane.control.conditions.Look`."""
        while self._left > 0:
            # Others may have taken some of it meanwhile; what is passed over then is left to the claim.
            rows, seen = self._queue.front_from(self._at)
            if not seen:
                return True
            self._at += seen
            self._left -= int(np.count_nonzero(self._match(rows)))
            if is_over():
                break
        return self._left <= 0


class OrderedRowQueue(SingleRows):
    """Samples in another order than that in which they became ready.

    Of samples with equal keys the first comes first, or for ``lifo``, where all are equal, the last. One
    whose key has changed comes where it would have come with that key from the beginning.
    """

    def __init__(self, table: RowTable, keys: Keys | None) -> None:
        """Without keys, the newest comes first."""
        super().__init__(table)
        self._known_keys = keys
        self._key = filled(table.size, np.float64, 0)
        self._number = filled(table.size, np.int64, 0)
        self._stamp = filled(table.size, np.int64, _ABSENT)
        self._front = _NOTHING
        self._runs: list[Run] = []  # none of their entries comes before one of the front
        self._count = _FIRST_NUMBER
        self._stamps = _ABSENT + 1
        self._compacted = 0

    def grow(self, size: int) -> None:
        self._key, self._number = grown(self._key, size, 0), grown(self._number, size, 0)
        self._stamp = grown(self._stamp, size, _ABSENT)

    def offer(self, rows: Rows) -> None:
        known = self._stamp[rows] != _ABSENT
        if known.any():
            self._move(rows[known])
            rows = rows[~known]
        if len(rows):
            numbers = np.arange(self._count + 1, self._count + 1 + len(rows))
            if self._known_keys is None:
                rows, numbers = rows[::-1], -numbers[::-1]  # in order
            self._add(rows, numbers)

    def restore(self, rows: Rows) -> None:
        if len(rows):
            # The first of them comes before everything else that has its key.
            self._add(rows, np.arange(-self._count - len(rows), -self._count))

    def fill(self, rows: Rows, numbers: NDArray[np.int64]) -> None:
        """Take in rows that were ready before the queue was made, unless they are in already. The numbers say
        in which order they became ready; those that came back to the front have a negative one."""
        absent = self._stamp[rows] == _ABSENT
        if absent.any():
            rows, numbers = rows[absent], numbers[absent]
            self._add(rows, numbers if self._known_keys is not None else -np.abs(numbers))

    def _add(self, rows: Rows, numbers: NDArray[np.int64]) -> None:
        self._count += len(rows)
        self.ready += len(rows)
        self._number[rows] = numbers
        self._push(rows, self._keys(rows), numbers)
        self._note_added(rows)

    def _move(self, rows: Rows) -> None:
        """Look at the keys again: the tags that they are made of may have changed."""
        if self._known_keys is not None:
            keys = self._known_keys(rows)
            moved = keys != self._key[rows]
            if moved.any():
                rows = rows[moved]
                self._push(rows, keys[moved], self._number[rows])

    def _keys(self, rows: Rows) -> NDArray[np.float64]:
        if self._known_keys is None:
            return self._number[rows].astype(np.float64)
        return self._known_keys(rows)

    def _push(self, rows: Rows, keys: NDArray[np.float64], numbers: NDArray[np.int64]) -> None:
        if len(rows) > _LONGEST_SORTED:
            for at in range(0, len(rows), _LONGEST_SORTED):
                some = slice(at, at + _LONGEST_SORTED)
                self._push(rows[some], keys[some], numbers[some])
            return
        stamps = np.arange(self._stamps, self._stamps + len(rows))
        self._stamps += len(rows)
        self._stamp[rows], self._key[rows] = stamps, keys
        run = Run.merged([Run(keys, numbers, stamps, rows)])
        if len(self._front.rows):
            before = run.place_of(self._front.keys[-1], self._front.numbers[-1])
            if before:
                self._front = Run.merged([run.cut(0, before), self._front])
                run = run.cut(before)
                if len(self._front.rows) > 4 * _FRONT:
                    self._add_run(self._front.cut(_FRONT))
                    self._front = self._front.cut(0, _FRONT)
        self._add_run(run)

    def _add_run(self, run: Run) -> None:
        if not len(run.rows):
            return
        self._runs.append(run)
        while len(self._runs) > 1:
            last, before = len(self._runs[-1].rows), len(self._runs[-2].rows)
            if before > 2 * last or before + last > _LONGEST_MERGED or last == _LONGEST_SORTED:
                break
            self._runs[-2:] = [Run.merged(self._runs[-2:])]

    def lengthen_front(self, wanted: int) -> bool:
        """Sort some more rows, unless so many are sorted already, or all; whether they are now. What is taken
        in which order does not change."""
        if len(self._front.rows) < wanted and self._runs:
            self._lengthen_front(_SORTED_AHEAD)
        return len(self._front.rows) >= wanted or not self._runs

    def front_from(self, at: int) -> tuple[Rows, int]:
        """Some of the rows after the first ``at`` entries, which are sorted if they are not yet, and how many
        entries those are; 0: there are no more."""
        while not self.lengthen_front(at + 1):
            pass
        piece = self._front.cut(at, at + _PIECE)
        return piece.rows[self._are_valid(piece)], len(piece.rows)

    def _lengthen_front(self, least: int) -> None:
        """Move the first entries of all runs, mostly at least so many, to the end of the front."""
        first, self._runs = take_first(self._runs, max(least, _FRONT))
        self._front = Run.merged([self._front, first]) if len(self._front.rows) else first

    def discard(self, rows: Rows) -> None:
        # In parts that fit into the caches.
        for at in range(0, len(rows), _DISCARDED_AT_ONCE):
            self._discard(rows[at : at + _DISCARDED_AT_ONCE])
        left = _COMPACTED_AT_ONCE
        while left > 0 and self._held > 2 * self.ready + 4096:
            left -= self._compact_some()

    def _discard(self, rows: Rows) -> None:
        gone = self._queued(rows)
        if len(gone):
            self._note_gone(gone)
            self._stamp[gone] = _ABSENT
            self.ready -= len(gone)

    @property
    def _held(self) -> int:
        return len(self._front.rows) + sum(len(run.rows) for run in self._runs)

    def _compact_some(self) -> int:
        """Drop what is not valid any more of the front or of one run, another one each time, because to look
        at all of a million takes long; return how many entries were looked at."""
        self._compacted = (self._compacted + 1) % (len(self._runs) + 1)
        at = self._compacted - 1
        before = self._front if at < 0 else self._runs[at]
        after = before.chosen(self._are_valid(before))
        if at < 0:
            self._front = after
        else:
            self._runs[at : at + 1] = [after] if len(after.rows) else []
        return max(len(before.rows), 1)

    def pop(self, count: int, match: Match | None) -> Rows:
        taken: list[Rows] = []
        skipped: list[Run] = []
        size = count if match is None else piece_for(count)
        while count:
            if not len(self._front.rows):
                if not self._runs:
                    break
                self._lengthen_front(size)
            front = self._front
            piece = front.rows[:size]
            is_open = self._stamp[piece] == front.stamps[:size]
            places = is_open.nonzero()[0]
            if match is not None:
                places = places[match(piece[places])]
            places = places[:count]
            # Up to the last one that is taken, or to the end of the piece.
            end = int(places[-1]) + 1 if len(places) == count else len(piece)
            self._front = front.cut(end)
            if match is not None:
                is_open[places] = False
                skipped.append(front.cut(0, end).chosen(is_open[:end]))
            if len(places):
                taken.append(piece[places])
                count -= len(places)
            longer = max(size, min(2 * size, _LARGEST_PIECE))
            size = longer if match is None else piece_for(count, size)
        if skipped:
            self._front = Run.merged([*skipped, self._front])
        if not taken:
            return np.empty(0, np.int64)
        rows = taken[0] if len(taken) == 1 else np.concatenate(taken)
        self._stamp[rows] = _ABSENT
        self.ready -= len(rows)
        self._note_gone(rows)
        return rows

    def among(self, rows: Rows) -> Rows:
        rows = self._queued(rows)
        found: Rows = rows[np.lexsort((self._number[rows], self._key[rows]))]
        return found

    def in_order(self) -> Iterator[Rows]:
        size, at = _PIECE, 0
        while True:
            if at >= len(self._front.rows):
                if not self._runs:
                    return
                self._lengthen_front(size)
            piece = self._front.cut(at, at + size)
            yield piece.rows[self._are_valid(piece)]
            at += len(piece.rows)
            size = min(2 * size, _LARGEST_PIECE)

    def withdraw(self, rows: Rows) -> None:
        self._note_gone(self._queued(rows))

    def readmit(self, rows: Rows) -> None:
        self._note_added(self._queued(rows))

    def candidates(self) -> tuple[Rows, int]:
        return np.concatenate([self._front.rows, *(run.rows for run in self._runs)]), 1

    def _are_valid(self, run: Run) -> NDArray[np.bool_]:
        valid: NDArray[np.bool_] = self._stamp[run.rows] == run.stamps
        return valid

    def _queued(self, rows: Rows) -> Rows:
        """Those of these rows that are in the queue."""
        queued: Rows = rows[self._stamp[rows] != _ABSENT]
        return queued
