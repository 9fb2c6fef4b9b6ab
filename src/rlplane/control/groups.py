"""A queue of whole groups: members gather until their group is complete, then they are handed out
together.

Most groups have the size of the partition. Others have one of their own: because they declared it, because
they were closed before they had all their members, or because the task keeps some of the members already
(their worker died in the middle) and only the others are to be handed out again. A claim counts a group that
is smaller as one of full size, so that a batch has as many groups as it always has.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from rlplane.control.queues import Match, ReadyQueue, Rows, RowTable

if TYPE_CHECKING:
    from rlplane.control.making import GroupsInMaking


_NONE: Mapping[str, int] = MappingProxyType({})
# How many groups are looked at together: few at first, because most claims find theirs at the front.
_FEW_GROUPS, _MANY_GROUPS = 32, 512


class Group:
    """A whole group that waits to be taken."""

    __slots__ = ("room", "rows", "whole")

    def __init__(self, rows: list[int], room: int) -> None:
        self.rows, self.room = rows, room
        self.whole = True


class GroupQueue(ReadyQueue):
    """Whole groups only: members gather until there are ``group_size``, then join the queue together."""

    def __init__(
        self,
        table: RowTable,
        group_size: int,
        sizes: Mapping[str, int] = _NONE,
        kept: Mapping[str, int] = _NONE,
    ) -> None:
        """``sizes`` has the groups with a size of their own, ``kept`` how many members the task keeps. Both
        are read whenever they are needed, and may change meanwhile."""
        super().__init__(table)
        self.making: GroupsInMaking | None = None  # what brings it what was ready before, until it is whole
        self.group_size = group_size
        self._sizes, self._kept = sizes, kept
        self._room = 0  # what the groups take of a batch
        self._gathering: dict[str, dict[int, None]] = {}
        self._groups: deque[Group] = deque()
        self._group_of: dict[int, Group] = {}

    def __getstate__(self) -> dict[str, Any]:
        # One that is not whole is made anew.
        return {**super().__getstate__(), "making": None}

    def make_of(self, making: GroupsInMaking) -> None:
        """It is whole when that is done."""
        self.is_whole, self.making = False, making

    def missing(self, rows: Rows) -> Rows:
        """Those of these rows that are not in it."""
        members = zip(rows.tolist(), self._table.groups[rows].tolist(), strict=True)
        gathering, known = self._gathering, self._group_of
        missing = [row for row, name in members if row not in known and row not in gathering.get(name, ())]
        return np.array(missing, np.int64)

    def grow(self, size: int) -> None:
        """Nothing to do: groups are kept by row in dictionaries."""

    def offer(self, rows: Rows) -> None:
        known, size = self._group_of, self.group_size
        names, numbers = self._table.groups[rows].tolist(), rows.tolist()
        for at in range(0, len(numbers), size):
            few, name = numbers[at : at + size], names[at]
            # Members of a group mostly come together.
            together = names[at : at + size].count(name) == size and name not in self._gathering
            if (
                together
                and (not (self._sizes or self._kept) or self._needed(name) == size)
                and known.keys().isdisjoint(few)
                and len(set(few)) == size
            ):
                self._join(few, self._groups.append)
                continue
            for row, name in zip(few, names[at : at + size], strict=True):
                if row not in known:
                    self._gather(row, name, self._groups.append)

    def move(self, rows: Rows) -> None:
        """The tags of rows have changed."""

    def restore(self, rows: Rows) -> None:
        # Back to front, so that groups made whole end up in the order in which they were claimed.
        whole: list[Group] = []
        self._gather_again(rows.tolist(), whole.append)
        self._groups.extendleft(reversed(whole))

    def _gather_again(self, rows: list[int], place: Callable[[Group], None]) -> None:
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

    def _gather(self, row: int, name: str, place: Callable[[Group], None]) -> None:
        members = self._gathering.get(name)
        if members is None:
            members = self._gathering[name] = {}
        members[row] = None
        if len(members) >= self._needed(name):
            del self._gathering[name]
            self._join(list(members), place)

    def _join(self, rows: list[int], place: Callable[[Group], None]) -> None:
        group = Group(rows, max(len(rows), self.group_size))
        place(group)
        self._group_of.update(dict.fromkeys(rows, group))
        self.ready += len(rows)
        self._room += group.room
        self._note_added([group])

    def _needed(self, name: str) -> int:
        return self._sizes.get(name, self.group_size) - self._kept.get(name, 0)

    def look_again(self, name: str, members: Sequence[int]) -> None:
        if self.making is not None:
            self.making.is_spoiled = True
            return
        needed = self._needed(name)
        broken = [group for group in self._groups_of(members) if len(group.rows) < needed]
        self._leave(broken)
        self._gather_again([row for group in broken for row in group.rows], self._groups.append)
        gathering = self._gathering.get(name)
        if gathering is not None and len(gathering) >= needed:
            del self._gathering[name]
            self._join(list(gathering), self._groups.append)
        self.touched()

    @property
    def _room_for_all(self) -> int:
        return self._room

    def withdraw(self, rows: Rows) -> None:
        if self._counted:
            self._note_gone(self._groups_of(rows.tolist()))

    def readmit(self, rows: Rows) -> None:
        if self._counted:
            self._note_added(self._groups_of(rows.tolist()))

    def _groups_of(self, rows: Sequence[int]) -> list[Group]:
        found = (self._group_of.get(row) for row in rows)
        return list(dict.fromkeys(group for group in found if group is not None))

    def candidates(self) -> tuple[Rows, int]:
        whole = filter(attrgetter("whole"), self._in_about_this_order())
        rows = itertools.chain.from_iterable(map(attrgetter("rows"), whole))
        return np.fromiter(rows, np.int64), self.group_size

    def contents(self) -> list[dict[Any, Any] | deque[Any] | list[Any]]:
        return [self._group_of, self._gathering, self._groups]

    def _in_about_this_order(self) -> Iterable[Group]:
        return self._groups

    def _joined(self, parts: list[list[Group]]) -> list[Group]:
        return list(itertools.chain.from_iterable(parts))

    def _room_in(self, units: list[Group], match: Match) -> int:
        return sum(group.room for group in _matching(units, match))

    def room_of(self, unit: list[int]) -> int:
        return max(len(unit), self.group_size)

    def discard(self, rows: Rows) -> None:
        going = dict.fromkeys(rows.tolist())
        names = self._table.groups[rows].tolist()
        if self._group_of.keys().isdisjoint(going) and self._gathering.keys().isdisjoint(names):
            return
        broken: dict[Group, None] = {}
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
        self._leave(list(broken))
        # The others of broken groups wait for another member, all at once so that they keep their order;
        # mostly there are none.
        others = [row for group in broken for row in group.rows if row not in going]
        if others:
            self._gather_again(others, self._groups.append)
        if len(self._groups) > 2 * self.ready + 4096:
            self._remove_broken()

    def _remove_broken(self) -> None:
        self._groups = deque(group for group in self._groups if group.whole)

    def pop(self, count: int, match: Match | None) -> Rows:
        taken: list[Group] = []
        skipped: list[Group] = []
        at_once = 1 if match is None else _FEW_GROUPS
        while count >= self.group_size and self._groups:
            groups = [self._groups.popleft() for _ in range(min(at_once, len(self._groups)))]
            groups = [group for group in groups if group.whole]
            fitting = None if match is None else set(_matching(groups, match))
            for group in groups:
                if fitting is not None and group not in fitting:
                    skipped.append(group)
                elif group.room > count:
                    skipped.append(group)  # it does not fit any more, and neither does what comes after it
                    count = 0
                else:
                    count -= group.room
                    taken.append(group)
            if match is not None:
                at_once = min(2 * at_once, _MANY_GROUPS)
        self._groups.extendleft(reversed(skipped))
        self._leave(taken)
        return np.array([row for group in taken for row in group.rows], np.int64)

    def _leave(self, groups: list[Group]) -> None:
        if groups:
            self._note_gone(groups)
        for group in groups:
            group.whole = False
            for row in group.rows:
                del self._group_of[row]
            self.ready -= len(group.rows)
            self._room -= group.room

    def units(self, match: Match | None) -> Iterator[list[int]]:
        at_once = _FEW_GROUPS
        groups = iter(self._groups)
        while piece := list(itertools.islice(groups, at_once)):
            whole = [group for group in piece if group.whole]
            yield from (group.rows for group in (whole if match is None else _matching(whole, match)))
            at_once = min(2 * at_once, _MANY_GROUPS)


def _matching(groups: list[Group], match: Match) -> list[Group]:
    """Those of which all members match."""
    if not groups:
        return []
    starts = np.cumsum([0, *(len(group.rows) for group in groups[:-1])])
    members = match(np.array([row for group in groups for row in group.rows], np.int64))
    whole = np.logical_and.reduceat(members, starts).tolist()
    return [group for group, matches in zip(groups, whole, strict=True) if matches]
