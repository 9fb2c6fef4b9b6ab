"""``Staging``: a put of very many samples, made ready some at a time, between which its owner does other
things. Nobody sees anything of it before it is written, and then all at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from rlplane.control.fields import Rows
from rlplane.control.names import Names
from rlplane.control.requests import Put
from rlplane.control.rules import group_of, own_group_size
from rlplane.errors import InvalidRequestError

if TYPE_CHECKING:
    from rlplane.control.partition import Partition
    from rlplane.control.tag_index import TagIndex

# Made ready in some milliseconds. A number and not a time: a journal that is repeated has the same slices.
_SAMPLES_AT_ONCE = 4096
_FREED_AT_ONCE = 65_536


class Staging:
    """What is done of a put before it is written: its new samples have rows, which have no serial number yet
    and so are nobody's, with their tags; those that exist have been found, and their tags merged.

    Others go on meanwhile. Which samples they touch is noted, and these are looked at again.
    """

    def __init__(self, partition: Partition, put: Put) -> None:
        # Not the put itself, which knows this: the service frees what is dropped without a garbage collector.
        self.partition, self._ids, self._given, self._now = partition, put.ids, put.tags, put.now
        self.rows = np.full(len(put.ids), -1, np.int64)
        self.sizes: dict[str, int] = {}  # of new groups that have one of their own
        self._is_new = np.zeros(len(put.ids), bool)
        self._names = Names()  # of new samples
        self._tags = np.empty(len(put.ids), object)  # those of samples that exist, as they will be
        self._replaced: list[dict[str, Any]] = []  # the tags that they had
        self._at = 0
        self._seen = Names()
        self._beginnings = partition.groups.beginnings
        self._growing = [] if put.finishes else list(put.blocks)  # fields that get a turn
        self._touched: set[str] = set()
        # An index that comes later gets the new samples when they are there.
        self._indexes: list[TagIndex] = list(partition.looking.indexes.values())
        partition.table.watchers.append(self._touched)

    @property
    def is_over(self) -> bool:
        """Whether all of it is ready."""
        return self._at >= len(self._ids)

    @property
    def new(self) -> int:
        """How many of its samples are new."""
        return len(self._names)

    @property
    def known_rows(self) -> Rows:
        """The rows of the samples that exist."""
        known: Rows = self.rows[~self._is_new]
        return known

    def new_ids(self) -> list[str]:
        """The ids of the new samples."""
        return [sample_id for sample_id in self._ids if sample_id in self._names]

    def make_some_ready(self) -> None:
        """Go on with it; raises if the put cannot be written."""
        self._follow_registration()
        ids = self._ids[self._at : self._at + _SAMPLES_AT_ONCE]
        tags = None if self._given is None else self._given[self._at : self._at + _SAMPLES_AT_ONCE]
        is_seen = any(row is not None for row in self._seen.find(ids))
        if is_seen or "" in ids or len(set(ids)) < len(ids):
            raise InvalidRequestError("the ids of a commit are not distinct, non-empty strings")
        self._seen.add(ids, range(len(ids)))
        table = self.partition.table
        table.rows.move(_SAMPLES_AT_ONCE)  # of a put before this one
        known = table.rows.find(ids)
        new = [at for at, row in enumerate(known) if row is None]
        if new:
            self._add([self._at + at for at in new])
        for at, row in enumerate(known) if len(new) < len(ids) else ():
            if row is not None:
                self.rows[self._at + at] = row
                if tags is not None:
                    self._tags[self._at + at] = table.tags[row] | tags[at] if tags[at] else table.tags[row]
        self._at += len(ids)
        for name in self._growing:
            if name in table.columns:
                table.columns[name].turns.make_room(self._at)
        if self.is_over:
            self._seen = Names()

    def catch_up(self) -> None:
        """Look again at what others have touched since, before the put is written."""
        self._follow_registration()
        table = self.partition.table
        if not self._touched:
            return
        for at, sample_id in enumerate(self._ids):
            if sample_id not in self._touched:
                continue
            row = table.rows.get(sample_id)
            if row is None:
                if not self._is_new[at]:
                    self._add([at])
                continue
            if self._is_new[at]:
                self._remove(np.array([self._names[sample_id]]))
                self._names.remove([sample_id])
                self._is_new[at] = False
            self.rows[at] = row
            if self._given is not None:
                self._tags[at] = table.tags[row] | self._given[at]
        self._touched.clear()

    def _follow_registration(self) -> None:
        """Its new samples may have to be in groups, or not any more."""
        partition = self.partition
        if partition.groups.beginnings != self._beginnings:
            self._beginnings = partition.groups.beginnings
            fresh = np.flatnonzero(self._is_new)
            partition.table.groups[self.rows[fresh]] = self._groups_of(fresh.tolist())
            partition.groups.stage(self.rows[fresh])

    def publish(self) -> tuple[Rows, Rows]:
        """Let its samples be there; return the rows of all, and of the new ones."""
        table = self.partition.table
        self._stop_watching()
        for touched in table.watchers:
            touched.update(self._ids)
        fresh = self.rows[self._is_new]
        table.make_live(self._names, fresh, self._now)
        if self._given is not None:
            known = self.known_rows
            table.about_to_change(known)
            new_tags = self._tags[~self._is_new]
            # Those of before stay with it: to free very many takes long.
            self._replaced = table.tags[known].tolist()
            table.tags[known] = new_tags
        for index in self.partition.looking.indexes.values():
            if all(index is not known for known in self._indexes):
                self.partition.looking.add_to(index, fresh)
        return self.rows, fresh

    def free_some(self) -> bool:
        """After it was written: drop some of what it was made of; True when all is gone. The put may not be
        used any more."""
        for values in (self._ids, self._given or [], self._replaced):
            if values:
                del values[-_FREED_AT_ONCE:]
                return False
        return True

    def undo(self) -> None:
        """It will not be written."""
        self._stop_watching()
        self._remove(self.rows[self._is_new])

    def _add(self, places: list[int]) -> None:
        """Make rows for new samples."""
        ids = [self._ids[at] for at in places]
        tags = None if self._given is None else [self._given[at] for at in places]
        groups = self._groups_of(places)
        rows = self.partition.stage(ids, tags, groups)
        self.rows[places], self._is_new[places] = rows, True
        self._names.add(ids, rows)
        self.partition.looking.get_ready(np.array(rows, np.int64), self._indexes)

    def _groups_of(self, places: list[int]) -> list[str | None]:
        if not self.partition.spec.group_size:
            return [None] * len(places)
        groups: list[str | None] = []
        for at in places:
            sample_id, tags = self._ids[at], None if self._given is None else self._given[at]
            group = group_of(sample_id, tags)
            groups.append(group)
            if tags and "group_size" in tags and (size := own_group_size(sample_id, tags)) is not None:
                self.sizes[group] = size
        return groups

    def _remove(self, rows: Rows) -> None:
        self.partition.looking.remove(rows)
        self.partition.groups.unstage(rows)
        self.partition.table.unstage(rows)

    def _stop_watching(self) -> None:
        watchers: list[Any] = self.partition.table.watchers
        watchers[:] = [touched for touched in watchers if touched is not self._touched]
