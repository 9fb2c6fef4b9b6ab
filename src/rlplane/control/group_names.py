"""``GroupNames``: the groups that samples get when a partition is registered with groups, known before."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplane.control.arrays import grown
from rlplane.control.fields import Rows
from rlplane.control.rules import group_of
from rlplane.control.samples import SampleTable
from rlplane.errors import InvalidRequestError


class GroupNames:
    """The group of each row, each worked out once: that of its first write, or else what its id and tags say.
    What is known is kept until the tags change or the sample is cleared, so it can be worked out ahead."""

    def __init__(self, table: SampleTable) -> None:
        self._table = table
        self._names = np.empty(table.size, object)
        self._is_known = np.zeros(table.size, bool)

    def __call__(self, rows: Rows) -> NDArray[Any]:
        """The group of each row; raises if one belongs to none."""
        table = self._table
        if len(self._names) < table.size:
            self._names = grown(self._names, table.size, None)
            self._is_known = grown(self._is_known, table.size, False)
        unknown = rows[~self._is_known[rows]]
        if len(unknown):
            samples = (column[unknown].tolist() for column in (table.groups, table.ids, table.tags))
            names = [name or group_of(i, tags) for name, i, tags in zip(*samples, strict=True)]
            self._names[unknown], self._is_known[unknown] = names, True
        found: NDArray[Any] = self._names[rows]
        return found

    def learn(self, rows: Rows) -> int:
        """Work out what is not known yet; whoever asks for a sample that belongs to no group is told."""
        try:
            return len(self(rows))
        except InvalidRequestError:
            return 0

    def forget(self, rows: Rows) -> None:
        """The tags of these rows have changed, or are gone."""
        rows = rows[rows < len(self._names)]
        self._names[rows], self._is_known[rows] = None, False
