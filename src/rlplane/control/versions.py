"""``KnownVersions``: the versions of samples by row, so that what is too old is found without a look at all
tags."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlplane.control.arrays import filled, grown
from rlplane.control.conditions import Rows, TagTable

_UNKNOWN = np.iinfo(np.int64).max
_NONE = _UNKNOWN - 1  # it has no version, and so is never too old


class KnownVersions:
    """The versions of samples by one tag, each looked up once: what is known is kept until the tags change or
    the sample is cleared."""

    def __init__(self, table: TagTable, tag: str) -> None:
        self.tag, self._table = tag, table
        self._known = filled(table.size, np.int64, _UNKNOWN)

    def __call__(self, rows: Rows) -> NDArray[np.int64]:
        """The version of each row; one that has none has the newest of all."""
        self._grow()
        known = self._known[rows]
        unknown = known == _UNKNOWN
        if unknown.any():
            new, tag = rows[unknown], self.tag
            values = [tags.get(tag) for tags in self._table.tags[new].tolist()]
            known[unknown] = [_version_of(value) for value in values]
            self._known[new] = known[unknown]
        return known

    def learn(self, most: int) -> bool:
        """Look up some versions of live samples; True if all of them are known now."""
        self._grow()
        unknown = np.flatnonzero((self._known == _UNKNOWN) & (self._table.serial >= 0))
        self(unknown[:most])
        return len(unknown) <= most

    def before(self, oldest: int) -> NDArray[np.bool_]:
        """For each row that there is, whether it is known that a live sample is older than that."""
        self._grow()
        return (self._known < oldest) & (self._table.serial >= 0)

    def forget(self, rows: Rows) -> None:
        """The tags of these rows have changed, or are gone."""
        self._known[rows[rows < len(self._known)]] = _UNKNOWN

    def _grow(self) -> None:
        if len(self._known) < self._table.size:
            self._known = grown(self._known, self._table.size, _UNKNOWN)


def _version_of(value: object) -> int:
    return max(min(value, _NONE), -_NONE) if type(value) is int else _NONE
