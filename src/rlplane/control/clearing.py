"""``Clearing``: a clear of many samples, a slice at a time, between which its owner does other things."""

from __future__ import annotations

from collections.abc import Sequence

from rlplane.control.fields import Rows
from rlplane.control.partition import Partition

__all__ = ["Clearing"]

# Cleared in about ten milliseconds. A number and not a time: a journal that is repeated has the same slices.
_SAMPLES_AT_ONCE = 8192


class Clearing:
    """Which samples of a partition are to be cleared, how far that has come, and how many there were."""

    __slots__ = ("_at", "_ids", "count", "partition")

    def __init__(self, partition: Partition, ids: Sequence[str]) -> None:
        self.partition, self._ids = partition, ids
        self.count = self._at = 0

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to be cleared."""
        return self._at >= len(self._ids)

    def next_rows(self) -> Rows:
        """The rows of the next slice, of those that are there."""
        some = self._ids[self._at : self._at + _SAMPLES_AT_ONCE]
        self._at += len(some)
        rows = self.partition.live_rows(some)
        self.count += len(rows)
        return rows
