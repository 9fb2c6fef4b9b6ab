"""What a queue of ready samples does, done with lists: a model for the tests of the real ones."""

from __future__ import annotations

from typing import Any


class ListOfRows:
    """Rows in a list: new ones go to the end, returned ones to the front."""

    def __init__(self) -> None:
        self.rows: list[Any] = []

    def offer(self, rows: list[Any], groups: dict[Any, str]) -> None:
        self.rows += [row for row in rows if row not in self.rows]

    def restore(self, rows: list[Any], groups: dict[Any, str]) -> None:
        self.rows = rows + self.rows

    def discard(self, rows: list[Any], groups: dict[Any, str]) -> None:
        self.rows = [row for row in self.rows if row not in rows]

    def fitting(self, match: set[Any] | None) -> list[Any]:
        return [row for row in self.rows if match is None or row in match]

    def take(self, count: int, match: set[Any] | None) -> list[Any]:
        taken = self.fitting(match)[:count]
        self.rows = [row for row in self.rows if row not in taken]
        return taken

    def room(self, match: set[Any] | None) -> int:
        return len(self.fitting(match))

    def waiting(self) -> set[Any]:
        return set(self.rows)


class ListOfGroups:
    """Whole groups in a list, and the members that wait for the others of theirs."""

    def __init__(self, size: int, kept: dict[str, int] | None = None) -> None:
        self.size = size
        self.kept = {} if kept is None else kept
        self.whole: list[list[Any]] = []
        self.gathering: dict[str, list[Any]] = {}

    def offer(self, rows: list[Any], groups: dict[Any, str]) -> None:
        for row in rows:
            if row not in self.waiting():
                self.whole += self._gather(groups[row], [row])

    def restore(self, rows: list[Any], groups: dict[Any, str]) -> None:
        whole = self._gather_ahead(rows, groups)
        # A group comes back with the first of its members.
        whole.sort(key=lambda group: min(rows.index(row) if row in rows else len(rows) for row in group))
        self.whole = whole + self.whole

    def look_again(self, name: str, groups: dict[Any, str]) -> None:
        """The task keeps more or fewer members of a group than it did: who is whole, and who waits again?"""
        needed = self.size - self.kept.get(name, 0)
        broken = [group for group in self.whole if groups[group[0]] == name and len(group) < needed]
        self.whole = [group for group in self.whole if group not in broken]
        self.whole += self._gather_ahead([row for group in broken for row in group], groups)
        if len(self.gathering.get(name, ())) >= needed:
            self.whole.append(self.gathering.pop(name))

    def discard(self, rows: list[Any], groups: dict[Any, str]) -> None:
        for members in self.gathering.values():
            members[:] = [row for row in members if row not in rows]
        found = [next((group for group in self.whole if row in group), []) for row in rows]
        broken = [group for place, group in enumerate(found) if group and group not in found[:place]]
        self.whole = [group for group in self.whole if group not in broken]
        left = [row for group in broken for row in group if row not in rows]
        self.whole += self._gather_ahead(left, groups)

    def fitting(self, match: set[Any] | None) -> list[Any]:
        return [row for group in self.whole if match is None or match >= set(group) for row in group]

    def take(self, count: int, match: set[Any] | None) -> list[Any]:
        fitting = [group for group in self.whole if match is None or match >= set(group)]
        taken = [row for group in fitting[: count // self.size] for row in group]
        self.whole = [group for group in self.whole if group[0] not in taken]
        return taken

    def room(self, match: set[Any] | None) -> int:
        """What a batch has of it: a group of which the task keeps some members counts as a whole one."""
        return self.size * sum(match is None or match >= set(group) for group in self.whole)

    def waiting(self) -> set[Any]:
        return {row for group in [*self.whole, *self.gathering.values()] for row in group}

    def _gather_ahead(self, rows: list[Any], groups: dict[Any, str]) -> list[list[Any]]:
        """Gather rows that were ready before those who still gather."""
        names = dict.fromkeys(groups[row] for row in rows)
        later = [(name, row) for name in names for row in self.gathering.pop(name, [])]
        ahead = [(groups[row], row) for row in rows]
        return [made for name, row in ahead + later for made in self._gather(name, [row])]

    def _gather(self, name: str, rows: list[Any]) -> list[list[Any]]:
        made = []
        for row in rows:
            members = self.gathering.setdefault(name, [])
            members.append(row)
            if len(members) == self.size - self.kept.get(name, 0):
                made.append(self.gathering.pop(name))
        return made


class PrioritisedGroups(ListOfGroups):
    """The group of which a member has the highest tag comes first, and of equal ones that which would anyway.
    The list itself is in the order of those."""

    def __init__(self, size: int, tags: dict[Any, int]) -> None:
        super().__init__(size)
        self.tags = tags

    def fitting(self, match: set[Any] | None) -> list[Any]:
        groups = sorted(self.whole, key=lambda group: -max(self.tags[row] for row in group))
        return [row for group in groups if match is None or match >= set(group) for row in group]

    def take(self, count: int, match: set[Any] | None) -> list[Any]:
        taken = self.fitting(match)[: count // self.size * self.size]
        self.whole = [group for group in self.whole if group[0] not in taken]
        return taken
