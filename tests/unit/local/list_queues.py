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

    def waiting(self) -> set[Any]:
        return set(self.rows)


class ListOfGroups:
    """Whole groups in a list, and the members that wait for the others of theirs."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.whole: list[list[Any]] = []
        self.gathering: dict[str, list[Any]] = {}

    def offer(self, rows: list[Any], groups: dict[Any, str]) -> None:
        for row in rows:
            if row not in self.waiting():
                self.whole += self._gather(groups[row], [row])

    def restore(self, rows: list[Any], groups: dict[Any, str]) -> None:
        names = dict.fromkeys(groups[row] for row in rows)
        gathering = [(name, row) for name in names for row in self.gathering.pop(name, [])]
        # What returns was ready before those who still gather.
        returned = [(groups[row], row) for row in rows] + gathering
        self.whole = [group for name, row in returned for group in self._gather(name, [row])] + self.whole

    def discard(self, rows: list[Any], groups: dict[Any, str]) -> None:
        for row in rows:
            name = groups[row]
            broken = next((group for group in self.whole if row in group), None)
            if broken is not None:
                self.whole.remove(broken)
                left = [other for other in broken if other != row]
                self.whole += self._gather(name, left + self.gathering.pop(name, []))
            elif row in self.gathering.get(name, []):
                self.gathering[name].remove(row)

    def fitting(self, match: set[Any] | None) -> list[Any]:
        return [row for group in self.whole if match is None or match >= set(group) for row in group]

    def take(self, count: int, match: set[Any] | None) -> list[Any]:
        taken = self.fitting(match)[: count // self.size * self.size]
        self.whole = [group for group in self.whole if group[0] not in taken]
        return taken

    def waiting(self) -> set[Any]:
        return {row for group in [*self.whole, *self.gathering.values()] for row in group}

    def _gather(self, name: str, rows: list[Any]) -> list[list[Any]]:
        made = []
        for row in rows:
            members = self.gathering.setdefault(name, [])
            members.append(row)
            if len(members) == self.size:
                made.append(self.gathering.pop(name))
        return made
