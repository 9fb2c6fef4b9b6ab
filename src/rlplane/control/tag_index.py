"""``TagIndex``: the rows of a partition by the value of one tag, for questions that come again and again.

It gives candidates, never answers: whoever asks checks the whole condition on what comes out. So values that
are equal to each other (1, 1.0 and True) may share an entry, and those that no dictionary takes (lists) are
candidates always.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rlplane.control.rules import compile_where


class TagIndex:
    """Rows by the value of one tag. A row without the tag is not in it."""

    def __init__(self, tag: str) -> None:
        self.tag = tag
        self.is_whole = False  # whether the rows that were there before it are in it
        self._rows: dict[Any, dict[int, None]] = {}
        self._unhashable: dict[int, None] = {}
        self._value: dict[int, Any] = {}

    def set(self, rows: Iterable[int], tags: Iterable[Mapping[str, Any]]) -> None:
        """Take in what the tags of these rows are now."""
        for row, of_row in zip(rows, tags, strict=True):
            if self.tag not in of_row:
                continue
            value = of_row[self.tag]
            if row in self._value:
                if self._value[row] is value:
                    continue
                self._take_out(row)
            self._value[row] = value
            self._home(value)[row] = None

    def remove(self, rows: Iterable[int]) -> None:
        """Forget rows."""
        for row in rows:
            if row in self._value:
                self._take_out(row)

    def candidates(self, condition: Any) -> Iterator[int]:
        """Rows whose value may meet the condition; all that do are among them."""
        yield from self._unhashable
        if not isinstance(condition, Mapping):
            yield from self._equal_to(condition)
            return
        test = compile_where({self.tag: condition})
        assert test is not None
        # Each value is looked at once, however many rows have it.
        for value, rows in self._rows.items():
            if test({self.tag: value}):
                yield from rows

    def _equal_to(self, value: Any) -> Iterable[int]:
        try:
            return self._rows.get(value, ())
        except TypeError:
            return ()

    def _home(self, value: Any) -> dict[int, None]:
        try:
            return self._rows.setdefault(value, {})
        except TypeError:
            return self._unhashable

    def _take_out(self, row: int) -> None:
        value = self._value.pop(row)
        home = self._home(value)
        home.pop(row, None)
        if not home and home is not self._unhashable:
            self._rows.pop(value, None)
