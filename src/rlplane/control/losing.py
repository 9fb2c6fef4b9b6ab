"""``Losing``: samples that have lost bytes, found and given up some rows at a time."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from rlplane.control.fields import Rows
from rlplane.control.partition import Partition
from rlplane.control.requests import LostRows


class Losing:
    """Which rows of which blocks are lost, which partitions are still to be looked at, and how many samples
    were found. New samples have nothing in these blocks, so a partition may change meanwhile."""

    __slots__ = ("_at", "_partitions", "count", "lost")

    def __init__(self, partitions: Iterable[Partition], lost: LostRows) -> None:
        self._partitions = list(partitions) if lost else []
        self.lost, self.count, self._at = lost, 0, 0

    @property
    def is_over(self) -> bool:
        """Whether everything was looked at."""
        return not self._partitions

    def next_rows(self, most: int) -> tuple[Partition, Rows]:
        """Some live rows of a partition that were not looked at yet."""
        partition = self._partitions[0]
        rows = np.arange(self._at, min(self._at + most, partition.table.size))
        self._at += most
        if self._at >= partition.table.size:
            del self._partitions[0]
            self._at = 0
        return partition, rows[partition.table.serial[rows] >= 0]
