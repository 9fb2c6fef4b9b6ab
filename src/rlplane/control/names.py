"""``Names``: the row of each sample of a partition, by its id."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

_MOVED_AT_ONCE = 1024


class Names(Mapping[str, int]):
    """A dictionary to which very many names can be added at once in no time: they stay in one of their own,
    and are moved to the others some at a time. Names are in order of birth until then."""

    __slots__ = ("_apart", "_is_mixed", "_rows")

    def __init__(self) -> None:
        self._rows: dict[str, int] = {}
        self._apart: list[dict[str, int]] = []
        self._is_mixed = False

    @property
    def by_birth(self) -> Collection[int] | None:
        """All rows in the order in which they were added, if that is known."""
        return None if self._is_mixed else self._rows.values()

    def in_order(self) -> list[str] | None:
        """All names in the order in which they were added, if that is known."""
        return None if self._is_mixed else list(self._rows)

    def find(self, ids: Iterable[str]) -> list[int | None]:
        """The row of each, None for those that are not there."""
        if not self._apart:
            return list(map(self._rows.get, ids))
        ids = list(ids)
        found = list(map(self._rows.get, ids))
        for names in self._apart:
            found = [names.get(i) if row is None else row for i, row in zip(ids, found, strict=True)]
        return found

    def add(self, ids: Iterable[str], rows: Iterable[int]) -> None:
        """Names that are not there yet."""
        self._rows.update(zip(ids, rows, strict=True))
        if self._apart:
            self.move(_MOVED_AT_ONCE)

    def add_many(self, names: dict[str, int]) -> None:
        """The same, with a dictionary that becomes ours."""
        self._apart.append(names)
        self._is_mixed = True

    def move(self, most: int) -> None:
        """Move some of what was added in no time to the others."""
        while self._apart and most > 0:
            names = self._apart[0]
            some = [names.popitem() for _ in range(min(most, len(names)))]
            self._rows.update(some)
            most -= len(some)
            if not names:
                del self._apart[0]

    def remove(self, ids: Sequence[str]) -> None:
        """Forget names that are there."""
        if not self._apart:
            for sample_id in ids:
                del self._rows[sample_id]
            return
        for sample_id in ids:
            if self._rows.pop(sample_id, None) is None:
                for names in self._apart:
                    names.pop(sample_id, None)
        self._apart = [names for names in self._apart if names]

    def __len__(self) -> int:
        return len(self._rows) + sum(map(len, self._apart)) if self._apart else len(self._rows)

    def __contains__(self, sample_id: object) -> bool:
        return sample_id in self._rows or any(sample_id in names for names in self._apart)

    def __getitem__(self, sample_id: str) -> int:
        row = self._rows.get(sample_id)
        if row is None:
            for names in self._apart:
                if sample_id in names:
                    return names[sample_id]
            raise KeyError(sample_id)
        return row

    def __iter__(self) -> Iterator[str]:
        yield from self._rows
        for names in self._apart:
            yield from names
