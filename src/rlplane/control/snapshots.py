"""``Snapshot``: the ids and tags of very many samples as they were at one moment, read some at a time.

To make lists of a million names and tags takes longer than others should wait. So whoever asks for very many
gets columns of a snapshot, which are read a slice at a time. Before a row that is not read yet is changed or
removed, the snapshot is told, and keeps what it had.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, overload
from weakref import ref

import numpy as np
from numpy.typing import NDArray

from rlplane.control.queues import Rows
from rlplane.control.sorted_rows import SortedRows

_MANY = 65_536  # of more than these, to make lists takes more than some ten milliseconds


class ReadTable(Protocol):
    """What has to be known of the partition's rows."""

    size: int
    ids: NDArray[Any]
    tags: NDArray[Any]
    serial: NDArray[np.int64]
    readers: list[ref[Snapshot]]


def ids_of(table: ReadTable, rows: Rows) -> Sequence[str]:
    """The ids of rows as they are now."""
    if len(rows) <= _MANY:
        few: list[str] = table.ids[rows].tolist()
        return few
    return Snapshot(table, rows, "ids").columns[0]


def ids_and_tags_of(table: ReadTable, rows: Rows) -> tuple[Sequence[str], Sequence[dict[str, Any]]]:
    """The ids and tags of rows as they are now."""
    if len(rows) <= _MANY:
        return table.ids[rows].tolist(), table.tags[rows].tolist()
    ids, tags = Snapshot(table, rows, "ids", "tags").columns
    return ids, tags


def identity_of(table: ReadTable, rows: Rows) -> dict[str, Sequence[Any]]:
    """The ids, serial numbers and tags of rows as they are now."""
    if len(rows) <= _MANY:
        found = [column[rows].tolist() for column in (table.ids, table.serial, table.tags)]
    else:
        found = Snapshot(table, rows, "ids", "serial", "tags").columns
    return dict(zip(("ids", "numbers", "tags"), found, strict=True))


def first_ids_and_tags_of(
    table: ReadTable, rows: Rows, keys: NDArray[np.float64], count: int
) -> tuple[Sequence[str], Sequence[dict[str, Any]]]:
    """The ids and tags as they are now of the first rows by their keys, and of equal ones by their order."""
    if count <= _MANY:
        if not count:
            return [], []
        if count < len(rows):
            near = keys <= np.partition(keys, count - 1)[count - 1]
            keys, rows = keys[near], rows[near]
        return ids_and_tags_of(table, rows[np.argsort(keys, kind="stable")][:count])
    ids, tags = Snapshot(table, rows, "ids", "tags", in_order=SortedRows(keys, rows), count=count).columns
    return ids, tags


class Snapshot:
    """What rows have at one moment, or the first ``count`` of them in an order. The table knows it for as
    long as somebody has one of its columns."""

    def __init__(
        self,
        table: ReadTable,
        rows: Rows,
        *names: str,
        in_order: SortedRows | None = None,
        count: int | None = None,
    ) -> None:
        """``names`` are those of columns that a row keeps until the table says otherwise."""
        self._table, self._rows, self._names, self._in_order = table, rows, names, in_order
        self._count = len(rows) if count is None else count
        self._lists: list[list[Any]] = [[] for _ in names]
        self._at = 0
        self._is_unread = np.zeros(table.size, bool)
        self._is_unread[rows] = True
        self._kept: dict[int, tuple[Any, ...]] = {}  # of rows that are not what they were
        table.readers.append(ref(self, table.readers.remove))

    @property
    def columns(self) -> list[SampleColumn]:
        """The columns in the order in which they were asked for."""
        return [SampleColumn(self, which) for which in range(len(self._lists))]

    def _values(self, rows: Rows) -> list[list[Any]]:
        return [getattr(self._table, name)[rows].tolist() for name in self._names]

    def __len__(self) -> int:
        return self._count

    def get_ready(self) -> bool:
        """Do some of what has to be done before it is read; True when nothing is left of that."""
        return self._in_order is None or self._in_order.sort_some()

    def keep(self, rows: Rows) -> None:
        """These rows are about to be changed or removed."""
        rows = rows[rows < len(self._is_unread)]
        rows = rows[self._is_unread[rows]]
        if len(rows):
            for row, *values in zip(rows.tolist(), *self._values(rows), strict=True):
                self._kept.setdefault(row, tuple(values))  # or it is another sample's by now

    def read(self, which: int, end: int) -> list[Any]:
        """A column, at least up to ``end``."""
        if end > self._at:
            if self._in_order is None:
                rows = self._rows[self._at : end]
            else:
                rows = self._in_order.next_rows(end - self._at)
            for values, more in zip(self._lists, self._values(rows), strict=True):
                values += more
            if self._kept:
                for at in np.flatnonzero(np.isin(rows, list(self._kept))).tolist():
                    kept = self._kept.pop(int(rows[at]))
                    for values, value in zip(self._lists, kept, strict=True):
                        values[self._at + at] = value
            self._is_unread[rows] = False
            self._at += len(rows)
            if self._at == self._count:
                self._is_unread = np.empty(0, bool)
        return self._lists[which]


class SampleColumn(Sequence[Any]):
    """A column of a snapshot. A slice of it is a list, and reads no more than it has to."""

    __slots__ = ("_snapshot", "_which")

    def __init__(self, snapshot: Snapshot, which: int) -> None:
        self._snapshot, self._which = snapshot, which

    def __len__(self) -> int:
        return len(self._snapshot)

    def get_ready(self) -> bool:
        """See :meth:`Snapshot.get_ready`."""
        return self._snapshot.get_ready()

    @overload
    def __getitem__(self, at: int) -> Any: ...
    @overload
    def __getitem__(self, at: slice) -> list[Any]: ...
    def __getitem__(self, at: int | slice) -> Any:
        end = len(self)
        if isinstance(at, slice):
            end = at.indices(end)[1]
        return self._snapshot.read(self._which, end)[at]

    def __iter__(self) -> Iterator[Any]:
        return iter(self[:])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self[:] == other[:]

    def __hash__(self) -> int:
        return id(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return _read, (self[:],)  # a dump has what was read


def _read(values: list[Any]) -> list[Any]:
    return values
