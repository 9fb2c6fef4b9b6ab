"""``Advancing``: a new version of a partition. What it makes too old is evicted a slice at a time, between
which its owner does other things, and then the version counts: so nobody is handed out what is too old."""

from __future__ import annotations

from collections.abc import Iterator

from rlplane.control.fields import Rows
from rlplane.control.partition import Partition

# Evicted in some ten milliseconds. A number and not a time: a journal that is repeated has the same slices.
_SAMPLES_AT_ONCE = 4096


class Advancing:
    """Which version a partition is about to have, and whether it has it."""

    __slots__ = ("_version", "is_over", "partition")

    def __init__(self, partition: Partition, version: int) -> None:
        self.partition, self._version = partition, version
        self.is_over = False

    def next_rows(self) -> Iterator[Rows]:
        """The rows of the next slice, which are to be evicted; without any left the version counts."""
        flow, control, left = self.partition.flow, self.partition.flow_control, _SAMPLES_AT_ONCE
        while left > 0 and control.know_versions(left):
            rows = control.next_stale(self._version, left)
            if not len(rows):
                flow.version = max(flow.version, self._version)  # another may have been faster
                self.is_over = True
                return
            yield rows
            left -= len(rows)
