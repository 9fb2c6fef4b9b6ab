"""``GroupMembers``: which rows belong to a group, how large it is to become, and how long it has waited."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from rlplane.control.fields import Rows
from rlplane.control.samples import SampleTable


class GroupMembers:
    """The groups of a partition. A group ends short by being given a smaller size."""

    def __init__(self, table: SampleTable) -> None:
        self._table = table
        self.sizes: dict[str, int] = {}  # of groups that have a size of their own
        self.closed: dict[str, int] = {}  # of groups that were closed short, the stamp of that
        self.clocks: dict[str, float | None] = {}  # when the first member of a group was finished
        # Known from the first time that any group is asked for.
        self._members: dict[str, dict[int, None]] | None = None

    def of(self, name: str) -> dict[int, None]:
        """The rows of a group."""
        if self._members is None:
            self._members = {}
            self._add(self._table.live_rows(None).tolist())
        return self._members.get(name, {})

    def size_of(self, name: str) -> int:
        """How many members a group is to have."""
        return self.sizes.get(name, self._table.spec.group_size or 1)

    def add(self, rows: Rows, sizes: dict[str, int]) -> None:
        """New samples have come, of groups that say how large they will be."""
        for name, size in sizes.items():
            self.sizes.setdefault(name, size)
        if self._members is not None:
            self._add(rows.tolist())

    def _add(self, rows: list[int]) -> None:
        assert self._members is not None
        for row in rows:
            self._members.setdefault(self._table.groups[row], {})[row] = None

    def remove(self, rows: Rows) -> list[str]:
        """Samples are about to go; return the groups that go with their last members."""
        ended = []
        if self.sizes or self.clocks or self._members is not None:
            for row, name in zip(rows.tolist(), self._table.groups[rows].tolist(), strict=True):
                members = self.of(name)
                members.pop(row, None)
                if not members:
                    assert self._members is not None
                    self._members.pop(name, None)
                    self.sizes.pop(name, None)
                    self.closed.pop(name, None)
                    self.clocks.pop(name, None)
                    ended.append(name)
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

    def overdue(self, clock: float) -> Iterator[str]:
        """The groups that have waited long enough and are not whole; they wait no longer."""
        policy = self._table.spec.flow
        if policy is None or policy.group_timeout_s is None:
            return
        for name, began in list(self.clocks.items()):
            if began is None:
                self.clocks[name] = clock
            elif began + policy.group_timeout_s > clock:
                break
            else:
                del self.clocks[name]
                members = list(self.of(name))
                if members and len(self.finished(members, self.finished_fields)) < self.size_of(name):
                    yield name
