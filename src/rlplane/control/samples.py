"""``SampleTable``: the samples of a partition by row, with their tags, groups and fields, and who wrote them.

A row is reused after a clear; its serial number is not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any
from weakref import ref

import numpy as np
from numpy.typing import NDArray

from rlplane.control.arrays import filled, grown
from rlplane.control.copies import Copies
from rlplane.control.fields import BlockRows, FieldIndex, Pieces, Rows, pieces_of
from rlplane.control.names import Names
from rlplane.control.requests import Put
from rlplane.control.rules import PartitionSpec
from rlplane.control.snapshots import Snapshot
from rlplane.errors import MissingDataError, SamplesLostError, UnknownFieldError

_MOST_NEW_ROWS = 2**15  # so that one put never waits until memory for very many rows is there
STAMP_BITS = 32  # of the place in an event; the event is above them
_MANY_ROWS = 65_536  # their numbers are in the columns, from which many are read faster than from a dict
_MOST_LOST = 65_536  # names of samples that were lost; who asks for an older one hears that it is not there
NO_ROWS: Rows = np.empty(0, np.int64)
_NO_TAGS: dict[str, Any] = {}  # one for all that have none: tags are replaced, never changed


class SampleTable:
    """What is known of each sample, whoever claims it. Columns have an entry per row."""

    def __init__(self, spec: PartitionSpec) -> None:
        self.spec = spec
        self.written = 0
        self.finished = False  # nobody writes new samples any more
        self.rows = Names()
        self.watchers: list[set[str]] = []  # each gets the ids of samples that are touched
        self.readers: list[ref[Snapshot]] = []  # what is not read yet of these is not to be changed unseen
        self.savers: list[ref[Copies]] = []  # the same for what is being saved
        self.size = 64
        self.ids = np.empty(self.size, object)
        self.tags = np.empty(self.size, object)
        self.groups = np.empty(self.size, object)
        self.serial = np.full(self.size, -1, np.int64)
        self.born = np.zeros(self.size, np.float64)
        self.stamp = np.zeros(self.size, np.int64)  # of the first write
        self.events = 0  # what happened so far that has a stamp
        self.next_serial = 0
        self.lost_ids: dict[str, None] = {}  # evicted because they were lost, for whoever asks for them
        self.columns = {name: FieldIndex(self.size, True) for name in spec.fields}
        self._free: list[int] = []  # rows that were used
        self._unused = 0  # from here on rows were never used
        # Who wrote what: a bit per writer and row, because a sample can have several writers.
        self._writers: dict[int, int] = {}
        self._written_bits: list[NDArray[np.uint64]] = []

    # Which rows

    def live_rows(self, ids: Sequence[str] | None) -> Rows:
        """The rows of those ids that are there, in the order asked (in order of birth for None)."""
        if ids is None:
            rows = self.rows.by_birth
            if rows is None or len(rows) > _MANY_ROWS:
                return rows_by_birth(self.serial)
            return np.fromiter(rows, np.int64, len(rows))
        found = [row for row in self.rows.find(dict.fromkeys(ids)) if row is not None]
        return np.array(found, np.int64)

    def oldest(self) -> int:
        """The row of the sample that was born first, of those that are there."""
        first = self.rows.first
        if first is not None:
            return first
        live = np.flatnonzero(self.serial >= 0)
        return int(live[self.serial[live].argmin()])

    def rows_numbered(self, numbers: Sequence[int]) -> Rows:
        """The rows of the samples that have these serial numbers and are there, in the order asked."""
        rows = self.live_rows(None)
        wanted = np.array([number for number in numbers if 0 <= number < self.next_serial], np.int64)
        serials = np.append(self.serial[rows], self.next_serial)  # they ascend with birth
        places = np.searchsorted(serials, wanted)
        found: Rows = rows[places[serials[places] == wanted]]
        return found

    def have(self, rows: Rows, fields: Sequence[str]) -> NDArray[np.bool_]:
        """For each row, whether it has all of these fields, which must be known."""
        has = np.ones(len(rows), bool)
        for name in fields:
            has &= self.columns[name].block[rows] >= 0
        return has

    def column(self, name: str) -> FieldIndex:
        """The field of that name, or ``UnknownFieldError``."""
        column = self.columns.get(name)
        if column is None:
            raise UnknownFieldError(
                f"partition {self.spec.partition_id!r} has no field {name!r}; it has {sorted(self.columns)}"
            )
        return column

    def field_of(self, name: str) -> str:
        """The field that ``name`` is, or is a leaf of: ``mm`` for ``mm.pixel_values``."""
        field = name
        while field not in self.columns and "." in field:
            field = field.rpartition(".")[0]
        # Without a path it would be the whole row.
        return field if field in self.columns and name != field + "." else name

    def locate(self, ids: Sequence[str], fields: Sequence[str]) -> dict[str, Pieces]:
        """Where each field of the samples is."""
        known = self.rows.find(ids)
        if None in known:
            missing = list(dict.fromkeys(i for i, row in zip(ids, known, strict=True) if row is None))
            _refuse_lost([i for i in missing if i in self.lost_ids], ids)
            raise MissingDataError(
                f"partition {self.spec.partition_id!r} does not have {some(missing)} "
                f"({len(missing)} of {len(set(ids))} samples asked for)"
            )
        rows = np.array(known, np.int64)
        places = {}
        for name in fields:
            column = self.columns.get(name) or self.columns.get(self.field_of(name)) or self.column(name)
            blocks = column.block[rows]
            unwritten = blocks < 0
            has_turns = column.turns.have(rows) if column.turns else None
            if has_turns is not None and has_turns.any():
                places[name] = pieces_of(column, rows)
                unwritten &= ~has_turns
            else:
                places[name] = Pieces(blocks, column.position[rows])
            if np.count_nonzero(unwritten):
                missing = list(dict.fromkeys(self.ids[rows[unwritten]].tolist()))
                _refuse_lost([i for i in missing if self.rows[i] in column.lost], ids)
                raise MissingDataError(
                    f"field {name!r} of partition {self.spec.partition_id!r} is not written for "
                    f"{some(missing)} ({len(missing)} of {len(set(ids))} samples asked for)"
                )
        return places

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "readers": [], "savers": []}  # a dump has what they read

    # Changes

    def about_to_change(self, rows: Rows) -> None:
        """The tags of these rows will be others, or the rows will be gone."""
        for reader in self.readers:
            snapshot = reader()
            if snapshot is not None:
                snapshot.keep(rows)

    def about_to_differ(self, rows: Rows) -> None:
        """Anything of these rows will be other than it is: a field, who has claimed them, what they are."""
        for saver in self.savers:
            copies = saver()
            if copies is not None:
                copies.keep(rows)

    def stamps(self, count: int) -> Rows:
        """Stamps for so many samples to which something happens now: (event, place in it). They say in which
        order samples became ready and came back."""
        self.events += 1
        first = self.events << STAMP_BITS
        return np.arange(first, first + count)

    def declare(self, spec: PartitionSpec) -> None:
        """Take a new schema. A field that was ever written stays known; one that was only declared goes with
        its declaration."""
        self.spec = spec
        self.written = 0
        self.finished = False
        kept = {
            name: column for name, column in self.columns.items() if name in spec.fields or column.stamped
        }
        for name, column in kept.items():
            column.declared = name in spec.fields
        declared = {name: kept.get(name) or FieldIndex(self.size, True) for name in spec.fields}
        self.columns = declared | kept

    def add(self, put: Put) -> tuple[Rows, Rows]:
        """The rows of a checked put's samples, made where they are new, with their tags merged; and those
        that are new."""
        ids, tags, known = put.ids, put.tags, put.known
        for touched in self.watchers:
            touched.update(ids)
        new = known.count(None)
        if new == 0:
            rows = np.array(known, np.int64)
            if tags is not None:
                if self.readers:
                    self.about_to_change(rows)
                for row, tag in zip(known, tags, strict=True):
                    if tag:
                        self.tags[row] = self.tags[row] | tag
            return rows, NO_ROWS
        numbers = self._allocate(new)
        rows = fresh = np.array(numbers, np.int64)
        new_ids, new_tags = ids, tags
        if new < len(ids):
            places = [place for place, row in enumerate(known) if row is None]
            new_ids = [ids[place] for place in places]
            rows = np.array([-1 if row is None else row for row in known], np.int64)
            rows[places] = fresh
            if tags is not None:
                new_tags = [tags[place] for place in places]
                if self.readers:
                    self.about_to_change(np.array([row for row in known if row is not None], np.int64))
                for row, tag in zip(known, tags, strict=True):
                    if row is not None and tag:
                        self.tags[row] = self.tags[row] | tag
        self.rows.add(new_ids, numbers)
        self._find_again(new_ids)
        self.ids[fresh] = new_ids
        self.tags[fresh] = _NO_TAGS if new_tags is None else _object_array(new_tags)
        if put.groups:
            self.groups[fresh] = put.groups
        self.serial[fresh] = np.arange(self.next_serial, self.next_serial + new)
        self.next_serial += new
        self.born[fresh] = put.now
        self.written += new
        return rows, fresh

    def stage(
        self, ids: list[str], tags: list[dict[str, Any]] | None, groups: Sequence[str | None]
    ) -> list[int]:
        """Rows for samples that are not there before :meth:`make_live`."""
        numbers = self._allocate(len(ids))
        rows = np.array(numbers, np.int64)
        self.ids[rows] = ids
        self.tags[rows] = _NO_TAGS if tags is None else _object_array(tags)
        self.groups[rows] = groups
        # So that their memory is there when all of them are written at once.
        for column in (self.born, self.stamp, *self._written_bits):
            column[rows] = 0
        for field in self.columns.values():
            field.position[rows] = field.stamp[rows] = 0
        return numbers

    def make_live(self, names: Names, rows: Rows, now: float) -> None:
        """Samples that were staged are there from now on."""
        if self.savers:
            self.about_to_differ(rows)
        self._find_again(names)
        self.rows.add_many(names)
        self.serial[rows] = np.arange(self.next_serial, self.next_serial + len(rows))
        self.next_serial += len(rows)
        self.born[rows] = now
        self.written += len(rows)

    def unstage(self, rows: Rows) -> None:
        """Samples that were staged will never be there."""
        self.ids[rows] = self.tags[rows] = self.groups[rows] = None
        self._free.extend(rows[::-1].tolist())

    def _find_again(self, ids: Iterable[str]) -> None:
        if self.lost_ids:
            for sample_id in ids:
                self.lost_ids.pop(sample_id, None)

    def remove(self, rows: Rows) -> list[BlockRows]:
        """Drop rows; return what they referred to, for each field."""
        if self.readers:
            self.about_to_change(rows)
        gone = [place for column in self.columns.values() for place in column.remove(rows)]
        ids = self.ids[rows].tolist()
        self.rows.remove(ids)
        for touched in self.watchers:
            touched.update(ids)
        self.ids[rows] = self.tags[rows] = self.groups[rows] = None
        self.serial[rows] = -1
        for bits in self._written_bits:
            bits[rows] = 0
        self._free.extend(rows[::-1].tolist())
        return gone

    def note_lost(self, rows: Rows) -> None:
        """Remember the names of samples that are evicted because they were lost."""
        self.lost_ids.update(dict.fromkeys(self.ids[rows].tolist()))
        while len(self.lost_ids) > _MOST_LOST:
            del self.lost_ids[next(iter(self.lost_ids))]

    def _allocate(self, count: int) -> list[int]:
        rows = self._free[: -count - 1 : -1]
        del self._free[len(self._free) - len(rows) :]
        end = self._unused + count - len(rows)
        if end > self.size:
            self._grow(end)
        rows += range(self._unused, end)
        self._unused = end
        if self.savers:
            self.about_to_differ(np.array(rows, np.int64))
        return rows

    def _grow(self, needed: int) -> None:
        self.make_room(max(needed, self.size + min(self.size, _MOST_NEW_ROWS)))

    def make_room(self, size: int) -> None:
        """Have ``size`` rows."""
        self.size = size
        self.ids, self.tags, self.groups = (grown(a, size, None) for a in (self.ids, self.tags, self.groups))
        self.serial, self.born = grown(self.serial, size, -1), grown(self.born, size, 0)
        self.stamp = grown(self.stamp, size, 0)
        self._written_bits = [grown(bits, size, 0) for bits in self._written_bits]
        for column in self.columns.values():
            column.grow(size)

    def contents(self) -> list[list[int]]:
        """What has an entry for each of very many rows that are gone, to be freed some at a time."""
        return [self._free]

    # Writers

    def mark_written(self, rows: Rows, owner: int, *, all_new: bool = False) -> None:
        """An owner has written to these rows, which nobody has written to before if they are ``all_new``."""
        slot = self._writers.get(owner)
        if slot is None:
            taken = set(self._writers.values())
            slot = next(slot for slot in range(len(taken) + 1) if slot not in taken)
            self._writers[owner] = slot
            while len(self._written_bits) <= slot // 64:
                self._written_bits.append(filled(self.size, np.uint64, 0))
        if all_new:
            self._written_bits[slot // 64][rows] = 1 << slot % 64
        else:
            self._written_bits[slot // 64][rows] |= np.uint64(1 << slot % 64)

    def written_by(self, owner: int) -> Rows | None:
        """The live rows that an owner wrote to, by birth; None if it never wrote here."""
        slot = self._writers.get(owner)
        if slot is None:
            return None
        rows = self.live_rows(None)
        mine: Rows = rows[(self._written_bits[slot // 64][rows] >> np.uint64(slot % 64) & np.uint64(1)) != 0]
        return mine

    def forget_writer(self, owner: int) -> None:
        """Free the slot of an owner that is gone."""
        slot = self._writers.pop(owner, None)
        if slot is not None:
            self._written_bits[slot // 64] &= ~np.uint64(1 << slot % 64)


def rows_by_birth(serials: NDArray[np.int64]) -> Rows:
    """The rows that have a serial number, in the order of these."""
    rows = np.flatnonzero(serials >= 0)
    return by_number(rows, serials[rows])


def by_number(rows: Rows, numbers: Rows) -> Rows:
    """Rows in the order of numbers that are all different."""
    if not len(rows):
        return rows
    if (numbers[1:] > numbers[:-1]).all():
        return rows
    first, last = int(numbers.min()), int(numbers.max())
    if last - first > 8 * len(rows):
        return rows[np.argsort(numbers)]
    # Without sorting, because most numbers are there.
    row_of = np.full(last - first + 1, -1, np.int64)
    row_of[numbers - first] = rows
    return row_of[row_of >= 0]


def _refuse_lost(lost: Sequence[str], asked: Sequence[str]) -> None:
    if lost:
        raise SamplesLostError(
            f"a part of the storage has died; lost with it are {len(lost)} of the {len(set(asked))} "
            f"samples asked for: {some(lost)}"
        )


def _object_array(values: list[Any]) -> NDArray[Any]:
    array = np.empty(len(values), object)
    array[:] = values
    return array


def some(names: Sequence[str]) -> str:
    """The first few, for a message."""
    shown = ", ".join(map(repr, names[:3]))
    return shown if len(names) <= 3 else f"{shown}, …"
