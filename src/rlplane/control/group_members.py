"""``GroupMembers``: which rows belong to a group, how large it is to become, and how long it has waited."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from rlplane.control.fields import Rows
from rlplane.control.samples import SampleTable


class GroupMembers:
    """The groups of a partition. A group ends short by being given a smaller size."""

    def __init__(self, table: SampleTable) -> None:
        self._table = table
        self.sizes: dict[str, int] = {}  # of groups that have a size of their own
        self.closed: dict[str, int] = {}  # of groups that were closed short, the stamp of that
        self.clocks: dict[str, float | None] = {}  # when the first member of a group was finished
        self._members: dict[str, list[int]] = {}
        self._staged = 0  # how many of these are not live yet
        self.beginnings = 0  # how often all of this was begun anew, by a registration

    def of(self, name: str) -> list[int]:
        """The rows of a group, not to be changed."""
        members = self._members.get(name, [])
        return members if not self._staged else [row for row in members if self._table.serial[row] >= 0]

    def count(self, names: Sequence[str], chosen: Callable[[Rows], NDArray[np.bool_]]) -> list[int]:
        """How many members of each group are chosen."""
        if not names:
            return []
        groups = [self.of(name) for name in names]
        lengths = np.fromiter(map(len, groups), np.int64, len(groups))
        rows = np.fromiter(itertools.chain.from_iterable(groups), np.int64, int(lengths.sum()))
        counts: list[int] = np.add.reduceat(chosen(rows), lengths.cumsum() - lengths, dtype=np.int64).tolist()
        return counts

    def size_of(self, name: str) -> int:
        """How many members a group is to have."""
        return self.sizes.get(name, self._table.spec.group_size or 1)

    def add(self, rows: Rows, sizes: dict[str, int]) -> None:
        """New samples have come, of groups that say how large they will be."""
        if self._table.spec.group_size:
            self._take_in(rows)
            self.expect(sizes)

    def expect(self, sizes: dict[str, int]) -> None:
        """Members have come of groups that say how large they will be."""
        for name, size in sizes.items():
            self.sizes.setdefault(name, size)

    def stage(self, rows: Rows) -> None:
        """Take in samples that will be there soon."""
        if self._table.spec.group_size:
            self._take_in(rows)
            self._staged += len(rows)

    def make_live(self, rows: Rows, sizes: dict[str, int]) -> None:
        """Samples that were staged are there from now on."""
        if self._table.spec.group_size:
            self._staged -= len(rows)
            self.expect(sizes)

    def unstage(self, rows: Rows) -> None:
        """Samples that were staged will never be there."""
        for row, name in zip(rows.tolist(), self._table.groups[rows].tolist(), strict=True):
            members = self._members.get(name, [])
            if row in members:  # not if they were staged before the last registration
                self._staged -= 1
                members.remove(row)
                if not members:
                    del self._members[name]

    def begin(self) -> None:
        """The samples that are there belong to groups from now on, or do not any more. Those that are staged
        are to be staged again."""
        self.beginnings += 1
        self._members, self._staged = {}, 0
        if self._table.spec.group_size:
            self._take_in(self._table.live_rows(None))

    def _take_in(self, rows: Rows) -> None:
        members = self._members
        for row, name in zip(rows.tolist(), self._table.groups[rows].tolist(), strict=True):
            known = members.get(name)
            if known is None:
                members[name] = [row]
            else:
                known.append(row)

    def remove(self, rows: Rows) -> list[str]:
        """Samples are about to go; return the groups that go with their last members."""
        if not self._table.spec.group_size:
            return []
        ended = []
        for row, name in zip(rows.tolist(), self._table.groups[rows].tolist(), strict=True):
            members = self._members[name]
            members.remove(row)
            if not members:
                del self._members[name]
            elif not self._staged or self.of(name):
                continue
            ended.append(name)
            self.sizes.pop(name, None)
            self.closed.pop(name, None)
            self.clocks.pop(name, None)
        return ended

    def finished(self, members: list[int], fields: Sequence[str]) -> list[int]:
        """The members that have ``fields``, or without any, all fields that one of them has."""
        rows = np.array(members, np.int64)
        has = self._table.have(rows, fields)
        if not fields:
            for column in self._table.columns.values():
                written = column.block[rows] >= 0
                if written.any():
                    has &= written
        found: list[int] = rows[has].tolist()
        return found

    @property
    def finished_fields(self) -> list[str]:
        """What a member must have to be finished; a field that nobody knows yet is one that nobody has."""
        policy = self._table.spec.flow
        names = [] if policy is None else policy.finished_fields
        return names if all(name in self._table.columns for name in names) else []

    # How long a group has waited, from its first finished member on

    @property
    def _timeout_s(self) -> float | None:
        policy = self._table.spec.flow
        return policy.group_timeout_s if policy is not None and self._table.spec.group_size else None

    def start_clocks(self, rows: Rows, clock: float) -> None:
        """These rows were written: with the first finished member a group begins to wait."""
        if self._timeout_s is not None:
            for row in self.finished(rows.tolist(), self.finished_fields):
                self.clocks.setdefault(self._table.groups[row], clock)

    def resume_clocks(self) -> None:
        """After a load: the groups that wait begin to wait anew, at the first look at the clock."""
        if self._timeout_s is not None:
            for row in self.finished(self._table.live_rows(None).tolist(), self.finished_fields):
                self.clocks.setdefault(self._table.groups[row], None)

    def next_deadline(self) -> float:
        """When a group has waited long enough, by the clock of the puts."""
        policy = self._table.spec.flow
        if not self.clocks or policy is None or policy.group_timeout_s is None:
            return math.inf
        # Clocks are started one after the other, so the first is the first to end.
        began = next(iter(self.clocks.values()))
        return -math.inf if began is None else began + policy.group_timeout_s
