"""``Looking``: questions about the samples of a partition that change nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplane.control.conditions import Conditions, Look, Matches, Pause, key_of
from rlplane.control.fields import Rows
from rlplane.control.group_names import GroupNames
from rlplane.control.ordered_rows import Keys, KnownKeys
from rlplane.control.policies import Order, TokenCounts
from rlplane.control.requests import Batch, Claim
from rlplane.control.rules import compile_where
from rlplane.control.samples import SampleTable
from rlplane.control.snapshots import first_ids_and_tags_of, ids_and_tags_of
from rlplane.control.tag_index import TagIndex
from rlplane.control.versions import KnownVersions

# Keys take eight bytes per row and order.
_MOST_ORDERS = 16


class Looking:
    """Which samples match, by tags that are indexed as soon as they are asked for."""

    def __init__(self, table: SampleTable) -> None:
        self._table = table
        self.conditions = Conditions(table)
        self.indexes: dict[str, TagIndex] = {}
        self._keys: dict[str, KnownKeys] = {}
        self._tokens: KnownKeys | None = None
        self.versions: KnownVersions | None = None  # for a policy that goes by them
        self.group_names: GroupNames | None = None  # for a registration that is about to come

    def keep_versions(self, tag: str | None) -> None:
        """Know the versions of samples by this tag from now on; None: nobody asks for them."""
        if tag is None:
            self.versions = None
        elif self.versions is None or self.versions.tag != tag:
            self.versions = KnownVersions(self._table, tag)

    def tagged(self, rows: Rows, again: Rows) -> None:
        """These rows have got tags, those of them that come ``again`` other ones than they had."""
        if len(again):
            self.conditions.forget(again)
            for keys in self._known:
                keys.forget(again)
            if self.versions is not None:
                self.versions.forget(again)
            if self.group_names is not None:
                self.group_names.forget(again)
        if self.versions is not None:
            self.versions(rows)
        for index in self.indexes.values():
            self.add_to(index, rows)

    def get_ready(self, rows: Rows, indexes: Iterable[TagIndex]) -> None:
        """Take in rows that will be there soon, with the tags that they have."""
        for keys in self._known:
            keys(rows)
        if self.versions is not None:
            self.versions(rows)
        for index in indexes:
            self.add_to(index, rows)

    def remove(self, rows: Rows) -> None:
        """Forget rows."""
        self.conditions.forget(rows)
        for keys in self._known:
            keys.forget(rows)
        if self.versions is not None:
            self.versions.forget(rows)
        if self.group_names is not None:
            self.group_names.forget(rows)
        for index in self.indexes.values():
            index.remove(rows.tolist())

    @property
    def _known(self) -> list[KnownKeys]:
        return [*self._keys.values(), *([] if self._tokens is None else [self._tokens])]

    def tokens(self, rows: Rows) -> NDArray[np.float64]:
        """How many tokens each row has; infinitely many if its tags do not say."""
        if self._tokens is None:
            self._tokens = KnownKeys(self._table, TokenCounts())
        return self._tokens(rows)

    def keys(self, order: Order) -> Keys | None:
        """What samples are sorted by in an order; None if that is their age."""
        return None if order.kind == "lifo" else OrderKeys(self, order)

    def known_keys(self, order: Order) -> KnownKeys:
        """What is known of these."""
        known = self._keys.pop(order.text, None) or KnownKeys(self._table, order)
        self._keys[order.text] = known  # the last one is the one that was used last
        if len(self._keys) > _MOST_ORDERS:
            del self._keys[next(iter(self._keys))]
        return known

    def look_at_keys(self, order: Order) -> Iterator[Look]:
        """Looks at what samples are sorted by, before they are."""
        keys = self.keys(order)
        if keys is not None:
            yield Pause()  # what is new takes memory from the system, which takes time
            yield Look(self._table, self._table.live_rows(None), lambda rows: 0 * len(keys(rows)), math.inf)

    def repeats(self, claim: Claim) -> Matches | None:
        """Which rows a claim lets be claimed again."""
        if claim.repeats is None:
            return None
        return self.conditions.get(key_of(claim.repeat_where), claim.repeats)

    def tag_index(self, tag: str) -> TagIndex:
        """The index of a tag, made when it is first asked for."""
        index = self.indexes.setdefault(tag, TagIndex(tag))
        if not index.is_whole:
            self.add_to(index, self._table.live_rows(None))
            index.is_whole = True
        return index

    def matching(self, where: Mapping[str, Any]) -> Rows:
        """The live rows that match, in no order. A tag that is asked for a value is indexed from then on."""
        rows, matches = self._candidates(where)
        matching: Rows = rows[matches(rows)]
        return matching

    def look_for(self, where: Mapping[str, Any] | None, order: Order) -> Iterator[Look]:
        """Looks at the tags that :meth:`matching` and :meth:`peek` will ask about, one after the other."""
        if where:
            yield from self._look_for_matching(where)
        if order.kind != "fifo":
            yield from self.look_at_keys(order)

    def look_at_groups(self) -> Iterator[Look]:
        """Looks at which groups samples belong to, before the partition has groups."""
        names = self.group_names = self.group_names or GroupNames(self._table)
        yield Pause()
        yield Look(self._table, self._table.live_rows(None), names.learn, math.inf)

    def _look_for_matching(self, where: Mapping[str, Any]) -> Iterator[Look]:
        tag = _tag_with_value(where)
        if tag is not None and not (index := self.indexes.setdefault(tag, TagIndex(tag))).is_whole:
            table = self._table
            yield Look(table, table.live_rows(None), lambda rows: self.add_to(index, rows), math.inf)
            index.is_whole = True
        rows, matches = self._candidates(where)
        yield Look(self._table, rows, lambda rows: int(matches(rows).sum()), math.inf)

    def _candidates(self, where: Mapping[str, Any]) -> tuple[Rows, Matches]:
        condition, tag = compile_where(where), _tag_with_value(where)
        assert condition is not None
        rows = self._table.live_rows(None) if tag is None else self.candidates(tag, where[tag])
        return rows, self.conditions.get(key_of(where), condition)

    def candidates(self, tag: str, condition: Any) -> Rows:
        """Live rows whose tag may meet a condition; all that do are among them."""
        rows = np.fromiter(self.tag_index(tag).candidates(condition), np.int64)
        live: Rows = rows[self._table.serial[rows] >= 0]
        return live

    def add_to(self, index: TagIndex, rows: Rows) -> int:
        """Take rows into an index; return how many."""
        index.set(rows.tolist(), self._table.tags[rows].tolist())
        return len(rows)

    def peek(
        self, where: Mapping[str, Any] | None, fields: Sequence[str], limit: int | None, order: Order
    ) -> Batch:
        """Ids and tags of what is there and matches, in order."""
        table = self._table
        rows = self.matching(where) if where else table.live_rows(None)
        for name in fields:
            rows = rows[table.column(name).block[rows] >= 0]
        serials = table.serial[rows]
        if not (serials[1:] > serials[:-1]).all():
            rows = rows[np.argsort(serials)]
        if order.kind == "lifo":
            rows = rows[::-1]
        elif order.kind != "fifo":
            keys = self.keys(order)
            assert keys is not None
            count = len(rows[:limit])
            return Batch(*first_ids_and_tags_of(table, rows, keys(rows), count))
        rows = rows[:limit]
        return Batch(*ids_and_tags_of(table, rows))


class OrderKeys:
    """What samples are sorted by in an order. Who keeps this does not keep what is known, which is told of
    tags that change only until others are asked for more often."""

    __slots__ = ("_looking", "_order")

    def __init__(self, looking: Looking, order: Order) -> None:
        self._looking, self._order = looking, order

    def __call__(self, rows: Rows) -> NDArray[np.float64]:
        """The key of each row."""
        return self._looking.known_keys(self._order)(rows)


def _tag_with_value(where: Mapping[str, Any]) -> str | None:
    """A tag of a condition that must have a certain value."""
    return next((tag for tag, condition in where.items() if not isinstance(condition, Mapping)), None)
