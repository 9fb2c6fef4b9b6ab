"""Queues of samples that are ready for a task: row by row, or in whole groups.

A queue knows rows only. Rows are offered when they become ready, discarded when they are claimed
elsewhere or cleared, and taken from the front. Both kinds cost the rows that they touch, never the
rows that they hold.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["GroupQueue", "ReadyQueue", "RowQueue"]

Rows = NDArray[np.int64]
Match = Callable[[int], bool]


class RowTable(Protocol):
    """What a queue needs to know of the partition's rows."""

    size: int
    serial: NDArray[np.int64]
    groups: NDArray[Any]


class ReadyQueue(ABC):
    """What both kinds can do. ``ready`` is the number of rows that can be taken."""

    def __init__(self, table: RowTable) -> None:
        self.ready = 0
        self._table = table
        self._counted: dict[object, tuple[int, int]] = {}

    def touched(self) -> None:
        """Say that rows or their tags have changed, so that conditions must be looked at again."""
        self._counted.clear()

    def count(self, enough: int, match: Match | None, asker: object) -> int:
        """How many rows ``take`` would give, counted up to ``enough``."""
        if match is None:
            return min(self.ready, enough)
        # A waiting claim asks again after every write; most writes do not concern it.
        known = self._counted.get(asker)
        if known is None or known[0] != enough:
            known = self._counted[asker] = (enough, self._count_matching(enough, match))
        return known[1]

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
    def take(self, count: int, match: Match | None) -> Rows:
        """Remove and return up to ``count`` rows from the front, of those that match."""

    @abstractmethod
    def grow(self, size: int) -> None:
        """Make room for rows up to ``size``."""

    @abstractmethod
    def _count_matching(self, enough: int, match: Match) -> int: ...


class RowQueue(ReadyQueue):
    """Rows one by one, kept as the chunks in which they came.

    Removing a row only clears its bit; the chunk is filtered when it comes to the front. A row that
    came back while an old entry of it is still in a chunk is there twice, and the first one counts.
    """

    def __init__(self, table: RowTable) -> None:
        super().__init__(table)
        self._queued = np.zeros(table.size, bool)
        self._chunks: deque[tuple[Rows, NDArray[np.int64]]] = deque()
        self._held = 0

    def grow(self, size: int) -> None:
        queued = np.zeros(size, bool)
        queued[: len(self._queued)] = self._queued
        self._queued = queued

    def offer(self, rows: Rows) -> None:
        rows = rows[~self._queued[rows]]
        if len(rows):
            self._add(rows, self._chunks.append)

    def restore(self, rows: Rows) -> None:
        if len(rows):
            self._add(rows, self._chunks.appendleft)
        self.touched()

    def discard(self, rows: Rows) -> None:
        gone = rows[self._queued[rows]]
        if len(gone):
            self._queued[gone] = False
            self.ready -= len(gone)
            self.touched()
            if self._held > 2 * self.ready + 4096:
                self._compact()

    def take(self, count: int, match: Match | None) -> Rows:
        taken: list[Rows] = []
        skipped: list[tuple[Rows, NDArray[np.int64]]] = []
        while count and self._chunks:
            rows, serials = self._chunks.popleft()
            if len(rows) > 4 * count + 256:
                # A look at a piece of a large chunk, so that a claim costs the batch; slices are views.
                piece = 4 * count + 256
                self._chunks.appendleft((rows[piece:], serials[piece:]))
                rows, serials = rows[:piece], serials[:piece]
            self._held -= len(rows)
            valid = self._valid(rows, serials)
            if match is None:
                chosen = valid[:count]
                rest = valid[count:]
            else:
                chosen, rest = _split(valid, count, match)
            if len(rest):
                skipped.append((rest, self._table.serial[rest]))
                self._held += len(rest)
            if len(chosen):
                # At once, so that an old entry of the same row further back is not taken again.
                self._queued[chosen] = False
                taken.append(chosen)
                count -= len(chosen)
        self._chunks.extendleft(reversed(skipped))
        if not taken:
            return np.empty(0, np.int64)
        rows = taken[0] if len(taken) == 1 else np.concatenate(taken)
        self.ready -= len(rows)
        self.touched()
        return rows

    def _count_matching(self, enough: int, match: Match) -> int:
        found = 0
        seen: set[int] = set()
        for rows, serials in self._chunks:
            for row in self._valid(rows, serials).tolist():
                if row not in seen and match(row):
                    seen.add(row)
                    found += 1
                    if found == enough:
                        return found
        return found

    def _add(self, rows: Rows, place: Callable[[tuple[Rows, NDArray[np.int64]]], None]) -> None:
        self._queued[rows] = True
        self.ready += len(rows)
        self._held += len(rows)
        place((rows, self._table.serial[rows]))

    def _valid(self, rows: Rows, serials: NDArray[np.int64]) -> Rows:
        valid: Rows = rows[self._queued[rows] & (self._table.serial[rows] == serials)]
        return valid

    def _compact(self) -> None:
        kept = [self._valid(rows, serials) for rows, serials in self._chunks]
        rows = np.concatenate(kept)
        _, first = np.unique(rows, return_index=True)
        rows = rows[np.sort(first)]
        self._chunks = deque([(rows, self._table.serial[rows])])
        self._held = len(rows)


def _split(rows: Rows, count: int, match: Match) -> tuple[Rows, Rows]:
    """The first ``count`` rows that match, and all the others."""
    chosen = np.zeros(len(rows), bool)
    for place, row in enumerate(rows.tolist()):
        if match(row):
            chosen[place] = True
            count -= 1
            if not count:
                break
    return rows[chosen], rows[~chosen]


class _Group:
    """A whole group that waits to be taken."""

    __slots__ = ("rows", "whole")

    def __init__(self, rows: list[int]) -> None:
        self.rows = rows
        self.whole = True


class GroupQueue(ReadyQueue):
    """Whole groups only: members gather until there are ``group_size``, then join the queue together."""

    def __init__(self, table: RowTable, group_size: int) -> None:
        super().__init__(table)
        self._group_size = group_size
        self._gathering: dict[str, dict[int, None]] = {}
        self._groups: deque[_Group] = deque()
        self._group_of: dict[int, _Group] = {}

    def grow(self, size: int) -> None:
        """Nothing to do: groups are kept by row in dictionaries."""

    def offer(self, rows: Rows) -> None:
        known, size = self._group_of, self._group_size
        names, numbers = self._table.groups[rows].tolist(), rows.tolist()
        for at in range(0, len(numbers), size):
            few, name = numbers[at : at + size], names[at]
            # Members of a group mostly come together.
            together = names[at : at + size].count(name) == size and name not in self._gathering
            if together and known.keys().isdisjoint(few) and len(set(few)) == size:
                self._join(few, self._groups.append)
                continue
            for row, name in zip(few, names[at : at + size], strict=True):
                if row not in known:
                    self._gather(row, name, self._groups.append)

    def restore(self, rows: Rows) -> None:
        # Back to front, so that groups made whole end up in the order in which they were claimed.
        whole: list[_Group] = []
        self._gather_again(rows.tolist(), whole.append)
        self._groups.extendleft(reversed(whole))
        self.touched()

    def _gather_again(self, rows: list[int], place: Callable[[_Group], None]) -> None:
        """Gather rows that were ready before, ahead of those that are gathering now."""
        later: dict[str, dict[int, None]] = {}
        for row in rows:
            name = self._table.groups[row]
            if name not in later:
                later[name] = self._gathering.pop(name, {})
            self._gather(row, name, place)
        for name, members in later.items():
            for row in members:
                self._gather(row, name, place)

    def _gather(self, row: int, name: str, place: Callable[[_Group], None]) -> None:
        members = self._gathering.get(name)
        if members is None:
            members = self._gathering[name] = {}
        members[row] = None
        if len(members) == self._group_size:
            del self._gathering[name]
            self._join(list(members), place)

    def _join(self, rows: list[int], place: Callable[[_Group], None]) -> None:
        group = _Group(rows)
        place(group)
        self._group_of.update(dict.fromkeys(rows, group))
        self.ready += self._group_size

    def discard(self, rows: Rows) -> None:
        going = dict.fromkeys(rows.tolist())
        names = self._table.groups[rows].tolist()
        if self._group_of.keys().isdisjoint(going) and self._gathering.keys().isdisjoint(names):
            return
        broken: dict[_Group, None] = {}
        for row in going:
            group = self._group_of.get(row)
            if group is not None:
                broken[group] = None
                continue
            members = self._gathering.get(self._table.groups[row])
            if members is not None:
                members.pop(row, None)
                if not members:
                    del self._gathering[self._table.groups[row]]
        for group in broken:
            self._leave(group)
        # The others of broken groups wait for another member, all at once so that they keep their order;
        # mostly there are none.
        others = [row for group in broken for row in group.rows if row not in going]
        if others:
            self._gather_again(others, self._groups.append)
        if len(rows):
            self.touched()
            if len(self._groups) > 2 * self.ready + 4096:
                self._groups = deque(group for group in self._groups if group.whole)

    def take(self, count: int, match: Match | None) -> Rows:
        taken: list[int] = []
        skipped: list[_Group] = []
        while count - len(taken) >= self._group_size and self._groups:
            group = self._groups.popleft()
            if not group.whole:
                continue
            if match is None or all(map(match, group.rows)):
                self._leave(group)
                taken.extend(group.rows)
            else:
                skipped.append(group)
        self._groups.extendleft(reversed(skipped))
        if taken:
            self.touched()
        return np.array(taken, np.int64)

    def _leave(self, group: _Group) -> None:
        group.whole = False
        for row in group.rows:
            del self._group_of[row]
        self.ready -= self._group_size

    def _count_matching(self, enough: int, match: Match) -> int:
        found = 0
        for group in self._groups:
            if group.whole and all(map(match, group.rows)):
                found += self._group_size
                if found >= enough:
                    break
        return found
