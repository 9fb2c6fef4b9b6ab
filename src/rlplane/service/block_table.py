"""``BlockTable``: which blocks are in which places, and which places are still needed.

A block is one field of one write, and a place has the blocks of one write. A place is needed for as long as a
sample needs one of its blocks, or somebody has a lease on it; then it goes back to the storage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import partial

import numpy as np

from rlplane.control.requests import Effects
from rlplane.service.dead_rows import DeadRows
from rlplane.storage.places import Layout, Place, StorageHost

Block = tuple[int, int, Layout]
"""The number of its place, where it begins in there, and what its bytes mean."""


class BlockTable:
    """The blocks and places of a plane. The storage is named by each call, because a service that is started
    again has another one."""

    def __init__(self) -> None:
        self.blocks: dict[int, Block] = {}
        self.places: dict[int, Place] = {}
        self.references: dict[int, int] = {}  # by place: its blocks, and the leases on it
        self._leased: dict[int, int] = {}  # by place, how many leases
        self._dead_rows = DeadRows()
        # While the plane is frozen, no place that was there then is recycled: the highest number of those,
        # for each time that it was frozen, and the places that are to be freed afterwards.
        self._frozen: Counter[int] = Counter()
        self._to_free: list[Place] = []
        self._newest_place = -1
        # Places that a client may hold a lease on which has not come back yet, after a recovery.
        self._kept: set[int] = set()
        self.next_number = 0  # of a block: those from here on are still to come

    def new_number(self) -> int:
        """A number for a block."""
        number, self.next_number = self.next_number, self.next_number + 1
        return number

    def add(
        self, place: Place, fields: Iterable[str], layouts: Iterable[Layout], sizes: Iterable[int]
    ) -> dict[str, int]:
        """The blocks of a write are in a place, one behind the other; return their numbers."""
        added = {}
        start, number = 0, self.next_number
        for field, layout, size in zip(fields, layouts, sizes, strict=True):
            added[field] = number
            self.blocks[number] = (place.number, start, layout)
            start += size
            number += 1
        self.next_number = number
        self.put_in(place, len(added))
        return added

    def put_in(self, place: Place, blocks: int) -> None:
        """A place has so many blocks."""
        self.places[place.number] = place
        self.references[place.number] = blocks
        self._newest_place = max(self._newest_place, place.number)

    def lease(self, numbers: Iterable[int]) -> tuple[list[Place], dict[int, Block]]:
        """Keep the places of blocks from being recycled, until :meth:`unlease`. Return the places, and where
        the blocks are, with the index of the place instead of its number."""
        order: dict[int, int] = {}
        located = {}
        for number in numbers:
            place, start, layout = self.blocks[number]
            located[number] = (order.setdefault(place, len(order)), start, layout)
        for place in order:
            self.references[place] += 1
            self._leased[place] = self._leased.get(place, 0) + 1
        return [self.places[place] for place in order], located

    def unlease(self, places: Iterable[int], storage: StorageHost) -> None:
        """A reader of these places needs them no longer."""
        for place in places:
            left = self._leased[place] - 1
            if left:
                self._leased[place] = left
            else:
                del self._leased[place]
        self._drop_references(places, storage)
        for place in self._dead_rows.of(places):
            self._give_back_rows(place, storage)

    def freeze(self) -> int:
        """Keep all places that there are from being recycled, until :meth:`thaw` gets what this returns."""
        self._frozen[self._newest_place] += 1
        return self._newest_place

    def thaw(self, mark: int, storage: StorageHost) -> None:
        """What was frozen is needed no longer."""
        self._frozen[mark] -= 1
        self._frozen += Counter()  # drops what is zero
        freed = [place for place in self._to_free if not self._is_frozen(place.number)]
        self._to_free = [place for place in self._to_free if self._is_frozen(place.number)]
        for place in freed:
            storage.free(place)
        for number in self._dead_rows:
            self._give_back_rows(number, storage)

    def _is_frozen(self, number: int) -> bool:
        return bool(self._frozen) and number <= max(self._frozen)

    def forget(self, numbers: Iterable[int], storage: StorageHost) -> None:
        """Nobody needs these blocks any more, and nobody knows of any row of them."""
        self._drop_references([self.blocks.pop(number)[0] for number in numbers], storage)

    def drop(self, effects: Effects, storage: StorageHost) -> None:
        """Free the places that nobody needs any more, and of the others the rows that nobody needs."""
        gone = [self.blocks.pop(block) for block in effects.freed]
        self._drop_references([place for place, _, _ in gone], storage)
        changed = []
        for place, start, layout in gone:
            if place in self.places:
                self._dead_rows.add_block(place, start, layout)
                changed.append(place)
        for blocks, positions in effects.dropped:
            order = np.argsort(blocks, kind="stable")
            numbers, firsts = np.unique(blocks[order], return_index=True)
            for block, rows in zip(numbers.tolist(), np.split(positions[order], firsts[1:]), strict=True):
                if block in self.blocks:
                    place, start, layout = self.blocks[block]
                    self._dead_rows.add(place, start, layout, rows)
                    changed.append(place)
        for place in self._dead_rows.of(changed):
            self._give_back_rows(place, storage)

    def _give_back_rows(self, number: int, storage: StorageHost) -> None:
        """Give dead rows of a place back to the storage, unless somebody may be reading it."""
        if number in self._leased or number in self._kept or self._is_frozen(number):
            return
        place = self.places[number]
        storage.give_back(place, self._dead_rows.stretches(number, partial(storage.read_numbers, place)))

    def _drop_references(self, places: Iterable[int], storage: StorageHost) -> None:
        for number in places:
            left = self.references[number] - 1
            if left:
                self.references[number] = left
            else:
                del self.references[number]
                self._dead_rows.forget(number)
                place = self.places.pop(number)
                if self._is_frozen(number):
                    self._to_free.append(place)
                elif number not in self._kept:
                    storage.free(place)

    # After a recovery

    def keep(self, in_use: set[int], leases: Iterable[list[int]]) -> None:
        """These leases of before are gone, until their clients say that they hold them. Until all have, none
        of the places ``in_use`` is freed."""
        self._kept = in_use
        self._leased.clear()
        self._frozen.clear()
        self._to_free.clear()
        for places in leases:
            for number in places:
                self.references[number] -= 1
        for number in [number for number, count in self.references.items() if not count]:
            del self.references[number], self.places[number]
            self._dead_rows.forget(number)

    def lease_again(self, numbers: Iterable[int], in_use: Mapping[int, Place]) -> list[int]:
        """A client of before holds a lease on these places; return those of them that there are."""
        known = [number for number in numbers if number in in_use]
        for number in known:
            self.places.setdefault(number, in_use[number])
            self.references[number] = self.references.get(number, 0) + 1
            self._leased[number] = self._leased.get(number, 0) + 1
        return known

    def stop_keeping(self, storage: StorageHost) -> None:
        """All clients of before have said what they hold."""
        self._kept = set()
        for place in self._dead_rows:
            self._give_back_rows(place, storage)
