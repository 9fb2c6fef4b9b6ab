"""``Names``: the row of each sample of a partition, by its id."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

_MOVED_AT_ONCE = 1024
# A dictionary that grows beyond this is copied, which takes twenty milliseconds, and twice as long each time
# that it has become twice as large.
_LARGEST = 340_000


class Names(Mapping[str, int]):
    """A dictionary that never takes long to grow, however large it is, and to which very many names can be
    added at once in no time.

    It consists of several: one takes the names that come, and is put beside the others when it is large. Very
    many names that come at once stay in one of their own; if that is small, they are moved to the others some
    at a time. Names are in order of birth until then."""

    __slots__ = ("_apart", "_is_mixed", "_large", "_rows")

    def __init__(self) -> None:
        self._rows: dict[str, int] = {}
        self._large: list[dict[str, int]] = []
        self._apart: list[dict[str, int]] = []  # to be moved
        self._is_mixed = False

    @property
    def by_birth(self) -> Collection[int] | None:
        """All rows in the order in which they were added, if that is known and they are not very many."""
        return None if self._is_mixed or self._large else self._rows.values()

    @property
    def first(self) -> int | None:
        """The row that was added first, if that is known."""
        if self._is_mixed:
            return None
        return next((row for names in (*self._large, self._rows) for row in names.values()), None)

    def find(self, ids: Iterable[str]) -> list[int | None]:
        """The row of each, None for those that are not there."""
        if not self._large and not self._apart:
            return list(map(self._rows.get, ids))
        ids = list(ids)
        parts = (self._rows, *self._large, *self._apart)
        # What is asked for together mostly came together.
        first = next((names for names in parts if ids and ids[0] in names), self._rows)
        found = list(map(first.get, ids))
        for names in parts:
            missing = found.count(None)
            if not missing:
                break
            if missing == len(ids):
                found = list(map(names.get, ids))
            elif names is not first:
                found = [names.get(i) if row is None else row for i, row in zip(ids, found, strict=True)]
        return found

    def add(self, ids: Sequence[str], rows: Iterable[int]) -> None:
        """Names that are not there yet."""
        if len(self._rows) + len(ids) > _LARGEST:
            self._begin_another()
        self._rows.update(zip(ids, rows, strict=True))
        if self._apart:
            self.move(_MOVED_AT_ONCE)

    def add_many(self, names: Names) -> None:
        """The same, with names that become ours."""
        self._is_mixed = True
        for some in (*names._large, *names._apart, names._rows):
            (self._large if len(some) >= _LARGEST // 4 else self._apart).append(some)

    def move(self, most: int) -> None:
        """Move some of what was added in no time to the others."""
        while self._apart and most > 0:
            names = self._apart[0]
            some = [names.popitem() for _ in range(min(most, len(names)))]
            if len(self._rows) + len(some) > _LARGEST:
                self._begin_another()
            self._rows.update(some)
            most -= len(some)
            if not names:
                del self._apart[0]

    def _begin_another(self) -> None:
        if self._rows:
            self._large.append(self._rows)
            self._rows = {}

    def remove(self, ids: Sequence[str]) -> None:
        """Forget names that are there."""
        if not self._large and not self._apart:
            for sample_id in ids:
                del self._rows[sample_id]
            return
        others = (*self._large, *self._apart)
        for sample_id in ids:
            if self._rows.pop(sample_id, None) is None:
                for names in others:
                    if names.pop(sample_id, None) is not None:
                        break
        self._apart = [names for names in self._apart if names]
        small = [names for names in self._large if len(names) < _LARGEST // 16]
        if small:
            # Or there would be ever more of them, each with a few names.
            self._large = [names for names in self._large if len(names) >= _LARGEST // 16]
            self._apart += [names for names in small if names]
            self._is_mixed |= bool(self._apart)

    def __len__(self) -> int:
        if not self._large and not self._apart:
            return len(self._rows)
        return len(self._rows) + sum(map(len, self._large)) + sum(map(len, self._apart))

    def __contains__(self, sample_id: object) -> bool:
        return sample_id in self._rows or any(sample_id in names for names in (*self._large, *self._apart))

    def __getitem__(self, sample_id: str) -> int:
        row = self._rows.get(sample_id)
        if row is None:
            for names in (*self._large, *self._apart):
                if sample_id in names:
                    return names[sample_id]
            raise KeyError(sample_id)
        return row

    def __iter__(self) -> Iterator[str]:
        for names in (*self._large, self._rows, *self._apart):
            yield from names
