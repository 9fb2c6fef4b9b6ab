"""Which bytes of shared memory are whose: segments, and the places in them.

Pure bookkeeping, owned by the control service. The limit is one of memory, not of addresses: whoever wants a
place gets one as long as the places together stay within it. Pages that were used before are used again
where they fit, because writing into pages that exist is several times faster than making them; where they
do not, they are given back to the machine, and others are made elsewhere. Each client has a home segment and
gets its memory there if it can: those pages are mapped into it already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from rlplane.storage.places import Place
from rlplane.storage.shm.segment import PAGE, Segment, page_stretches

__all__ = ["PAGE", "Arena"]

_NOBODY = -1
# So many addresses has a segment, if no more are needed for one place. Many times the limit, so that a few
# samples that stay for long do not use a segment up; but those of a thousand segments must fit into the
# 128 TiB that a process has.
_TIMES_THE_LIMIT = 16
_MOST_ADDRESSES = 64 * 2**30


class Arena:
    """At most ``limit`` bytes, in segments that ``create`` (number, size) and ``destroy`` (number) make and
    remove, and whose pages ``discard`` (number, start, size) gives back."""

    def __init__(
        self,
        limit: int,
        create: Callable[[int, int], None],
        destroy: Callable[[int], None],
        discard: Callable[[int, int, int], None],
        *,
        segment_size: int | None = None,
    ) -> None:
        self.limit = limit // PAGE * PAGE
        default = min(_TIMES_THE_LIMIT * self.limit, max(self.limit, _MOST_ADDRESSES))
        self._segment_size = pages(segment_size or default)
        self._create, self._destroy, self._discard = create, destroy, discard
        self._segments: dict[int, Segment] = {}
        self._homes: dict[int, list[Segment]] = {}
        self._next_segment = 0
        self._next_place = 1
        # Of places of which parts were given back: which pages those are.
        self._given_back: dict[int, NDArray[np.bool_]] = {}
        self.used = 0
        self.cached = 0  # the bytes of pages that may exist and are in no place

    def adopt(
        self,
        segments: Mapping[int, int],
        places: Iterable[Place],
        last_place: int,
        data: Mapping[int, Iterable[tuple[int, int]]],
        given_back: Mapping[int, Iterable[tuple[int, int]]],
    ) -> None:
        """Take over segments (with their sizes) of an arena of before, in which these places are in use but
        for the parts that were given back, and of which these stretches (start, size) have pages."""
        by_segment: dict[int, list[Place]] = {number: [] for number in segments}
        for place in places:
            by_segment[place.at[0]].append(place)
        for number, size in segments.items():
            segment = self._segments[number] = Segment(number, size, _NOBODY, 0.0)
            self._homes.setdefault(_NOBODY, []).append(segment)
            mine = by_segment[number]
            for place in mine:
                for start, length in given_back.get(place.number, ()):
                    self._note_given_back(place)[start // PAGE : (start + length) // PAGE] = True
            held = [stretch for place in mine for stretch in self._held(place)]
            segment.adopt(held, data.get(number, ()))
            for place in mine:
                if place.at[2]:
                    for start, length in self._held(place):
                        segment.note_backed(start, length)
            self.used += segment.used
            self.cached += segment.cached
        # A segment is made for a place, and its number is never above that of the place: those that are gone
        # had lower ones than these. A client may still have the file of such a segment mapped.
        self._next_segment = self._next_place = max(last_place, *segments, 0) + 1

    def untouched(self) -> list[tuple[int, int, int]]:
        """What is free and has no pages, as far as is known (number, start, size)."""
        return [
            (segment.number, start, size)
            for segment in self._segments.values()
            for start, size in segment.untouched()
        ]

    def allocate(self, nbytes: int, owner: int, now: float) -> Place | None:
        """A place of at least ``nbytes``, or None when there is no room. May raise ``OSError``."""
        size = pages(nbytes)
        if self.used + size > self.limit:
            return None
        segment, start = self._find(size, owner, now)
        cached = segment.cached
        is_backed = segment.take(start, size)
        self.used += size
        self.cached += segment.cached - cached
        self.drop_cached(self.used + self.cached - self.limit)
        number, self._next_place = self._next_place, self._next_place + 1
        return Place(number, size, (segment.number, start, int(is_backed)))

    def free(self, place: Place, now: float) -> None:
        """Take a place back."""
        segment = self._segments.get(place.at[0])
        if segment is not None:  # it may have gone, if all of the place was given back before
            for start, size in self._held(place):
                self._put_back(segment, start, size)
                if not place.at[2]:
                    # It was never committed, so nobody knows which of its pages were made.
                    for unknown, length in segment.drop_unbacked(start, size):
                        self._discard(segment.number, unknown, length)
                        self.cached -= length
            if not segment.used:
                segment.idle_since = now
        self._given_back.pop(place.number, None)

    def shrink(self, place: Place, nbytes: int) -> Place:
        """Take the end of a place back, beyond ``nbytes``, and note that it has its pages."""
        size = pages(nbytes)
        number, start, _ = place.at
        segment = self._segments[number]
        if not place.at[2]:
            # A client makes all of them before it writes.
            segment.note_backed(start, place.size)
        if size < place.size:
            self._put_back(segment, start + size, place.size - size)
        return Place(place.number, size, (number, start, 1))

    def give_back_part(self, place: Place, stretches: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """Take the whole pages of parts (start, stop) of a place back; returns those (start, size) that were
        not taken before."""
        dead = np.zeros(place.size // PAGE, bool)
        for begin, end in stretches:
            dead[-(-begin // PAGE) : end // PAGE] = True
        if place.number in self._given_back:
            dead &= ~self._given_back[place.number]
        given = page_stretches(np.flatnonzero(dead))
        number, start, _ = place.at
        for begin, size in given:
            self._put_back(self._segments[number], start + begin, size)
            self._note_given_back(place)[begin // PAGE : (begin + size) // PAGE] = True
        return given

    def _note_given_back(self, place: Place) -> NDArray[np.bool_]:
        return self._given_back.setdefault(place.number, np.zeros(place.size // PAGE, bool))

    def _held(self, place: Place) -> list[tuple[int, int]]:
        """The stretches of a segment that a place still has."""
        given = self._given_back.get(place.number)
        if given is None:
            return [(place.at[1], place.size)]
        return [(place.at[1] + begin, size) for begin, size in page_stretches(np.flatnonzero(~given))]

    def _put_back(self, segment: Segment, start: int, size: int) -> None:
        segment.put_back(start, size)
        self.used -= size
        self.cached += size

    def leave_home(self, owner: int) -> None:
        """A client is gone: its segments are anybody's."""
        for segment in self._homes.pop(owner, []):
            self._move(segment, _NOBODY)

    def give_back(self, idle_before: float) -> list[int]:
        """Remove segments that nobody has used since ``idle_before``; return their numbers."""
        idle = [s for s in self._segments.values() if not s.used and s.idle_since < idle_before]
        for segment in idle:
            del self._segments[segment.number]
            self.cached -= segment.cached
            self._homes[segment.home].remove(segment)
            self._destroy(segment.number)
        return [segment.number for segment in idle]

    def describe(self) -> dict[str, int]:
        """Sizes for people. ``total`` is what the arena has of the machine's memory at most."""
        return {
            "limit": self.limit,
            "total": self.used + self.cached,
            "used": self.used,
            "segments": len(self._segments),
            "backed": sum(segment.backed for segment in self._segments.values()),
        }

    def _find(self, size: int, owner: int, now: float) -> tuple[Segment, int]:
        """Where a place can be: where pages exist, if possible, and in a segment of its owner."""
        mine, free = self._homes.get(owner, []), self._homes.get(_NOBODY, [])
        warm = self._cached_in(mine, size) or self._cached_in(free, size)
        if warm is None and self.used + self.cached + size > self.limit:
            # New pages would cost others that exist.
            warm = self._cached_in(self._segments.values(), size)
        if warm is None:
            fresh = next((s for s in [*mine, *free] if s.find(size) is not None), None)
            warm = fresh or self._new_segment(size, owner, now)
        if warm.home == _NOBODY:
            self._move(warm, owner)
        start = warm.find(size)
        assert start is not None
        return warm, start

    @staticmethod
    def _cached_in(segments: Iterable[Segment], size: int) -> Segment | None:
        for segment in segments:
            if segment.cached >= size:
                start = segment.find(size)
                if start is not None and segment.is_cached(start, size):
                    return segment
        return None

    def _new_segment(self, size: int, owner: int, now: float) -> Segment:
        number, length = self._next_segment, max(size, self._segment_size)
        self._create(number, length)
        self._next_segment += 1
        segment = self._segments[number] = Segment(number, length, owner, now)
        self._homes.setdefault(owner, []).append(segment)
        return segment

    def drop_cached(self, nbytes: int) -> None:
        """Give so many bytes of pages that are in no place back to the machine, if there are."""
        if nbytes <= 0:
            return
        # The largest first, so that few have to be asked.
        for segment in sorted(self._segments.values(), key=lambda segment: -segment.cached):
            for start, size in segment.drop_cached(nbytes):
                self._discard(segment.number, start, size)
                nbytes -= size
                self.cached -= size
            if nbytes <= 0:
                return

    def _move(self, segment: Segment, home: int) -> None:
        if segment in self._homes.get(segment.home, ()):
            self._homes[segment.home].remove(segment)
        segment.home = home
        self._homes.setdefault(home, []).append(segment)


def pages(nbytes: int) -> int:
    """``nbytes`` rounded up to whole pages, at least one."""
    return max(-(-nbytes // PAGE), 1) * PAGE
