"""A queue of whole groups: members gather until their group is complete, then they are handed out
together.

Most groups have the size of the partition. Others have one of their own: because they declared it, because
they were closed before they had all their members, or because the task keeps some of the members already
(their worker died in the middle) and only the others are to be handed out again. A claim counts a group that
is smaller as one of full size, so that a batch has as many groups as it always has.

A whole group stands in a queue of rows with its first row, its *leader*; from there each row knows the next.
So numpy does everything that has to do with whole groups, and only those that gather are looked at one by
one.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlplane.control.arrays import filled, grown
from rlplane.control.ordered_rows import Keys, OrderedRowQueue
from rlplane.control.policies import Order
from rlplane.control.queues import Match, ReadyQueue, RowQueue, Rows, RowTable, Units

if TYPE_CHECKING:
    from rlplane.control.making import GroupsInMaking


_FEW = 8  # groups whose members are found faster one by one
_NONE: Mapping[str, int] = MappingProxyType({})


class WholeGroups:
    """Which rows are together. Columns have an entry per row."""

    def __init__(self, size: int) -> None:
        self._leader = filled(size, np.int64, 0)  # plus one, so that zero is none
        self._next = filled(size, np.int64, 0)
        self._length = filled(size, np.int64, 0)  # of the group, where its leader is

    def grow(self, size: int) -> None:
        """Make room for rows up to ``size``."""
        self._leader, self._next = grown(self._leader, size, 0), grown(self._next, size, 0)
        self._length = grown(self._length, size, 0)

    def join(self, groups: Rows) -> None:
        """Make groups of rows; each line is one."""
        leaders = groups[:, 0]
        self._leader[groups] = leaders[:, None] + 1
        self._next[groups[:, :-1]] = groups[:, 1:]
        self._length[leaders] = groups.shape[1]

    def dissolve(self, rows: Rows) -> None:
        """Rows of groups, all of each, are together no longer."""
        self._leader[rows] = 0

    def leader(self, rows: Rows) -> Rows:
        """The leader of the group that each row is in, -1 for none."""
        leaders: Rows = self._leader[rows]
        leaders -= 1
        return leaders

    def of(self, leaders: Rows) -> Units:
        """The groups of these leaders, also those that have just been dissolved."""
        lengths: Rows = self._length[leaders]
        if len(leaders) <= _FEW:
            return Units(self._rows_of_few(leaders.tolist(), lengths.tolist()), lengths)
        units = Units(np.empty(int(lengths.sum()), np.int64), lengths)
        here, places, left = leaders, units.starts, lengths
        while len(here):
            units.rows[places] = here
            goes_on = left > 1
            if not goes_on.all():
                here, places, left = here[goes_on], places[goes_on], left[goes_on]
            here, places, left = self._next[here], places + 1, left - 1
        return units

    def _rows_of_few(self, leaders: list[int], lengths: list[int]) -> Rows:
        rows, follower = [], self._next.item
        for row, length in zip(leaders, lengths, strict=True):
            rows.append(row)
            for _ in range(length - 1):
                row = follower(row)
                rows.append(row)
        return np.array(rows, np.int64)

    def contain(self, rows: Rows) -> bool:
        """Whether a row is in one."""
        return bool(self._leader[rows].any())

    def leaders_of(self, rows: Rows) -> Rows:
        """The leaders of the groups that these rows are in, each once, in the order of the rows."""
        leaders = self.leader(rows)
        found, first = np.unique(leaders[leaders >= 0], return_index=True)
        in_order: Rows = found[np.argsort(first)]
        return in_order


class GroupKeys:
    """By what groups are sorted, of which the leader is given: by the keys of their members."""

    def __init__(self, whole: WholeGroups, order: Order, keys: Keys) -> None:
        self._whole, self._order, self._keys = whole, order, keys

    def __call__(self, leaders: Rows) -> NDArray[np.float64]:
        if self._order.kind == "random":
            return self._keys(leaders)
        units = self._whole.of(leaders)
        return self._order.group_keys(self._keys(units.rows), units.starts)


class GroupQueue(ReadyQueue):
    """Whole groups only: members gather until there are ``group_size``, then join the queue together."""

    def __init__(
        self,
        table: RowTable,
        group_size: int,
        sizes: Mapping[str, int] = _NONE,
        kept: Mapping[str, int] = _NONE,
        order: Order | None = None,
        keys: Keys | None = None,
    ) -> None:
        """``sizes`` has the groups with a size of their own, ``kept`` how many members the task keeps. Both
        are read whenever they are needed, and may change meanwhile. With an ``order`` that is not by age it
        needs the ``keys`` of the samples."""
        super().__init__(table)
        self.making: GroupsInMaking | None = None  # what brings it what was ready before, until it is whole
        self.group_size = group_size
        self._sizes, self._kept = sizes, kept
        self._room = 0  # what the groups take of a batch
        self._others = 0  # how many are of another size
        self._large = 0  # how many of these take more than most
        self._gathering: dict[str, dict[int, None]] = {}
        self._whole = WholeGroups(table.size)
        # The leaders of the groups.
        self.line: RowQueue | OrderedRowQueue
        if order is None:
            self.line = RowQueue(table)
        else:
            self.line = OrderedRowQueue(table, None if keys is None else GroupKeys(self._whole, order, keys))

    def __getstate__(self) -> dict[str, Any]:
        # One that is not whole is made anew.
        return {**super().__getstate__(), "making": None}

    def make_of(self, making: GroupsInMaking) -> None:
        """It is whole when that is done."""
        self.is_whole, self.making = False, making

    def missing(self, rows: Rows) -> Rows:
        """Those of these rows that are not in it."""
        rows = rows[self._whole.leader(rows) < 0]
        if not self._gathering:
            return rows
        members = zip(rows.tolist(), self._table.groups[rows].tolist(), strict=True)
        return np.array([row for row, name in members if row not in self._gathering.get(name, ())], np.int64)

    def grow(self, size: int) -> None:
        self._whole.grow(size)
        self.line.grow(size)

    def contents(self) -> list[dict[Any, Any] | deque[Any] | list[Any]]:
        return [self._gathering]

    # What comes

    def offer(self, rows: Rows) -> None:
        if self._whole.contain(rows):
            known = self._whole.leader(rows) >= 0
            self.move(rows[known])
            rows = rows[~known]
        size, names = self.group_size, self._table.groups[rows].tolist()
        end = len(rows) - len(rows) % size
        groups, firsts = rows[:end].reshape(-1, size), names[:end:size]
        # Members of a group mostly come together.
        together = [names[at : at + size].count(names[at]) == size for at in range(0, end, size)]
        for is_group, some in _runs(together):
            if is_group:
                self._offer_groups(groups[some], firsts[some])
            else:
                self._offer_rows(groups[some].ravel())
        if end < len(rows):
            self._offer_rows(rows[end:])

    def _offer_groups(self, groups: Rows, names: list[str]) -> None:
        """Rows that are together; each line is one group, unless others of its name gather, or it is of
        another size."""
        if not (self._gathering or self._sizes or self._kept):
            self._join(groups)
            return
        size = self.group_size
        simple = [name not in self._gathering and self._needed(name) == size for name in names]
        for is_simple, some in _runs(simple):
            if is_simple:
                self._join(groups[some])
            else:
                self._offer_rows(groups[some].ravel())

    def _offer_rows(self, rows: Rows) -> None:
        whole: list[list[int]] = []
        rows = self.missing(rows)
        for row, name in zip(rows.tolist(), self._table.groups[rows].tolist(), strict=True):
            self._gather(row, name, whole)
        self._join_all(whole)

    def move(self, rows: Rows) -> None:
        """The tags of rows have changed, and where they stand in an order."""
        if isinstance(self.line, OrderedRowQueue):
            self.line.offer(self._whole.leaders_of(rows))

    def restore(self, rows: Rows) -> None:
        numbers = rows.tolist()
        whole = self._gathered_again(numbers)
        # A group comes back with the first of its members, also if others of them have come back before.
        place = {row: at for at, row in enumerate(numbers)}
        whole.sort(key=lambda group: min(place.get(row, len(place)) for row in group))
        self._join_all(whole, at_front=True)

    def _gathered_again(self, rows: list[int]) -> list[list[int]]:
        """Gather rows that were ready before, ahead of those that are gathering now; return the groups that
        are whole."""
        later: dict[str, dict[int, None]] = {}
        whole: list[list[int]] = []
        for row, name in zip(rows, self._table.groups[rows].tolist(), strict=True):
            if name not in later:
                later[name] = self._gathering.pop(name, {})
            self._gather(row, name, whole)
        for name, members in later.items():
            for row in members:
                self._gather(row, name, whole)
        return whole

    def _gather(self, row: int, name: str, whole: list[list[int]]) -> None:
        members = self._gathering.get(name)
        if members is None:
            members = self._gathering[name] = {}
        members[row] = None
        if len(members) >= self._needed(name):
            del self._gathering[name]
            whole.append(list(members))

    def _join_all(self, whole: list[list[int]], *, at_front: bool = False) -> None:
        """Let groups join the queue, each a list of rows."""
        for _, some in itertools.groupby(reversed(whole) if at_front else whole, len):
            groups = list(some)
            self._join(np.array(groups[::-1] if at_front else groups, np.int64), at_front=at_front)

    def _join(self, groups: Rows, *, at_front: bool = False) -> None:
        """Let groups of one size join the queue; each line is one."""
        if not len(groups):
            return
        count, length = groups.shape
        self._whole.join(groups)
        leaders = np.ascontiguousarray(groups[:, 0])
        if at_front:
            self.line.restore(leaders)
        else:
            self.line.offer(leaders)
        self.ready += count * length
        self._room += count * max(length, self.group_size)
        self._others += count * (length != self.group_size)
        self._large += count * (length > self.group_size)
        self._note_added(leaders)

    def _needed(self, name: str) -> int:
        return self._sizes.get(name, self.group_size) - self._kept.get(name, 0)

    # What goes

    def discard(self, rows: Rows) -> None:
        leaders = self._whole.leader(rows)
        is_whole = leaders >= 0
        if self._gathering and not is_whole.all():
            self._stop_gathering(rows[~is_whole])
        going, leaders = rows[is_whole], leaders[is_whole]
        # Groups mostly go as a whole, with their leaders.
        gone = self._leave(going[leaders == going])
        gone += self._leave(self._whole.leaders_of(going))
        if gone > len(going):
            # The others of broken groups wait for another member, all at once so that they keep their order.
            broken, first = np.unique(leaders, return_index=True)
            members = self._whole.of(broken[np.argsort(first)]).rows
            self._join_all(self._gathered_again(members[~np.isin(members, going)].tolist()))

    def _stop_gathering(self, rows: Rows) -> None:
        for row, name in zip(rows.tolist(), self._table.groups[rows].tolist(), strict=True):
            members = self._gathering.get(name)
            if members is not None:
                members.pop(row, None)
                if not members:
                    del self._gathering[name]

    def pop(self, count: int, match: Match | None) -> Rows:
        number = count // self.group_size if not self._large else self._fitting(count, match)
        leaders = self.line.pop(number, None if match is None else self._of_groups(match))
        return self._dissolve(leaders)

    def _fitting(self, count: int, match: Match | None) -> int:
        """How many of the first groups fit into a batch. What comes after one that does not does not."""
        number = 0
        for units in self.pieces(match):
            taken = np.cumsum(self.rooms(units))
            fits = int(np.searchsorted(taken, count, "right"))
            number += fits
            if fits < len(taken):
                break
            count -= int(taken[-1]) if fits else 0
        return number

    def _of_groups(self, match: Match) -> Match:
        """Which leaders have a group of which all members match."""

        def all_match(leaders: Rows) -> NDArray[np.bool_]:
            if not len(leaders):
                return np.empty(0, bool)
            units = self._whole.of(leaders)
            found: NDArray[np.bool_] = np.logical_and.reduceat(match(units.rows), units.starts)
            return found

        return all_match

    def _leave(self, leaders: Rows) -> int:
        """Take groups out of the line; return how many rows they have."""
        self.line.discard(leaders)
        return len(self._dissolve(leaders))

    def _dissolve(self, leaders: Rows) -> Rows:
        """Groups are no longer in the line; return their rows."""
        units = self._whole.of(leaders)
        if len(leaders):
            self._note_gone(leaders)
            self._whole.dissolve(units.rows)
            self.ready -= len(units.rows)
            if self._others:
                rooms = self.rooms(units)
                self._room -= int(rooms.sum())
                self._large -= int(np.count_nonzero(rooms > self.group_size))
                self._others -= int(np.count_nonzero(units.lengths != self.group_size))
            else:
                self._room -= len(units.rows)
        return units.rows

    def look_again(self, name: str, members: Sequence[int]) -> None:
        if self.making is not None:
            self.making.is_spoiled = True
            return
        needed = self._needed(name)
        leaders = self._whole.leaders_of(np.array(members, np.int64))
        broken = leaders[self._whole.of(leaders).lengths < needed]
        if self._leave(broken):
            self._join_all(self._gathered_again(self._whole.of(broken).rows.tolist()))
        gathering = self._gathering.get(name)
        if gathering is not None and len(gathering) >= needed:
            del self._gathering[name]
            self._join_all([list(gathering)])
        self.touched()

    # What is there

    @property
    def _room_for_all(self) -> int:
        return self._room

    def rooms(self, units: Units) -> Rows:
        return np.maximum(units.lengths, self.group_size)

    def withdraw(self, rows: Rows) -> None:
        if self._counted:
            self._note_gone(self._whole.leaders_of(rows))

    def readmit(self, rows: Rows) -> None:
        if self._counted:
            self._note_added(self._whole.leaders_of(rows))

    def candidates(self) -> tuple[Rows, int]:
        leaders, _ = self.line.candidates()
        return self._whole.of(leaders[self._whole.leader(leaders) == leaders]).rows, self.group_size

    def pieces(self, match: Match | None) -> Iterator[Units]:
        for leaders in self.line.in_order():
            units = self._whole.of(leaders)
            yield units if match is None else units.matching(match)

    def _joined(self, parts: list[Rows]) -> Rows:
        return np.concatenate(parts)

    def _room_in(self, units: Rows, match: Match) -> int:
        return int(self.rooms(self._whole.of(units).matching(match)).sum())


def _runs(flags: list[bool]) -> Iterator[tuple[bool, slice]]:
    """Where equal flags follow one another."""
    if flags and flags.count(flags[0]) == len(flags):  # as they mostly do
        yield flags[0], slice(None)
        return
    start = 0
    for flag, some in itertools.groupby(flags):
        end = start + sum(1 for _ in some)
        yield flag, slice(start, end)
        start = end
