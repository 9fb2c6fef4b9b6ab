"""Which bytes of shared memory are whose: segments, and the extents in them.

Pure bookkeeping, owned by the controller. Segments live long and are reused, because writing into pages
that already exist is several times faster than making them. Each client has a home segment and gets
its memory there as long as there is any, lowest address first: those pages are mapped into it already.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable

import numpy as np

from rlplane.adapters.local.wire import Extent

__all__ = ["PAGE", "Arena"]

PAGE = 4096
_NOBODY = -1
_LARGEST_DEFAULT = 256 * 2**20
_SMALLEST_DEFAULT = 2**20


class _Segment:
    """One file of shared memory. ``free`` holds (offset, size), by offset, never touching each other."""

    def __init__(self, number: int, size: int, home: int, now: float) -> None:
        self.number, self.size, self.home = number, size, home
        self.free: list[tuple[int, int]] = [(0, size)]
        self.used = 0
        self.idle_since = now
        self.backed = np.zeros(size // PAGE, bool)

    def take(self, size: int) -> int | None:
        for place, (offset, room) in enumerate(self.free):
            if room >= size:
                if room == size:
                    del self.free[place]
                else:
                    self.free[place] = (offset + size, room - size)
                self.used += size
                return offset
        return None

    def give(self, offset: int, size: int) -> None:
        self.used -= size
        place = bisect_left(self.free, (offset, 0))
        if place < len(self.free) and self.free[place][0] == offset + size:
            size += self.free.pop(place)[1]
        if place and sum(self.free[place - 1]) == offset:
            offset, before = self.free.pop(place - 1)
            size += before
        insort(self.free, (offset, size))


class Arena:
    """At most ``limit`` bytes in segments that ``create`` and ``destroy`` make and remove."""

    def __init__(
        self,
        limit: int,
        create: Callable[[int, int], None],
        destroy: Callable[[int], None],
        *,
        segment_size: int | None = None,
    ) -> None:
        self.limit = limit // PAGE * PAGE
        default = min(max(limit // 16, _SMALLEST_DEFAULT), _LARGEST_DEFAULT)
        self._segment_size = min(pages(segment_size or default), self.limit)
        self._create, self._destroy = create, destroy
        self._segments: dict[int, _Segment] = {}
        self._homes: dict[int, list[_Segment]] = {}
        self._next_segment = 0
        self._next_extent = 1
        self.total = 0
        self.used = 0

    def allocate(self, nbytes: int, owner: int, now: float) -> Extent | None:
        """An extent of at least ``nbytes``, or None when there is no room. May raise ``OSError``."""
        size = pages(nbytes)
        return (
            self._from(self._homes.get(owner, ()), size)
            or self._from(list(self._homes.get(_NOBODY, ())), size, adopt=owner)
            or self._from_new(size, owner, now)
            or self._from(self._segments.values(), size)
            or (self._give_back_idle(size) and self._from_new(size, owner, now))
            or None
        )

    def free(self, extent: Extent, now: float) -> None:
        """Take an extent back."""
        segment = self._segments[extent.segment]
        segment.give(extent.offset, extent.size)
        self.used -= extent.size
        if not segment.used:
            segment.idle_since = now

    def shrink(self, extent: Extent, nbytes: int) -> Extent:
        """Take the end of an extent back, beyond ``nbytes``, and note that what is kept has its pages."""
        size = pages(nbytes)
        segment = self._segments[extent.segment]
        segment.backed[extent.offset // PAGE : (extent.offset + size) // PAGE] = True
        if size < extent.size:
            segment.give(extent.offset + size, extent.size - size)
            self.used -= extent.size - size
        return Extent(extent.number, extent.segment, extent.offset, size)

    def abandon_home(self, owner: int) -> None:
        """A client is gone: its segments are anybody's."""
        for segment in self._homes.pop(owner, []):
            self._move(segment, _NOBODY)

    def give_back(self, idle_before: float) -> list[int]:
        """Remove segments that nobody has used since ``idle_before``; return their numbers."""
        idle = [s for s in self._segments.values() if not s.used and s.idle_since < idle_before]
        for segment in idle:
            self._remove(segment)
        return [segment.number for segment in idle]

    def describe(self) -> dict[str, int]:
        """Sizes for people."""
        return {
            "limit": self.limit,
            "total": self.total,
            "used": self.used,
            "segments": len(self._segments),
            "backed": sum(int(segment.backed.sum()) for segment in self._segments.values()) * PAGE,
        }

    def _move(self, segment: _Segment, home: int) -> None:
        if segment in self._homes.get(segment.home, ()):
            self._homes[segment.home].remove(segment)
        segment.home = home
        self._homes.setdefault(home, []).append(segment)

    def _from(self, segments: Iterable[_Segment], size: int, adopt: int = _NOBODY) -> Extent | None:
        for segment in segments:
            offset = segment.take(size)
            if offset is not None:
                self.used += size
                if adopt != _NOBODY:
                    self._move(segment, adopt)
                number, self._next_extent = self._next_extent, self._next_extent + 1
                backed = bool(segment.backed[offset // PAGE : (offset + size) // PAGE].all())
                return Extent(number, segment.number, offset, size, backed)
        return None

    def _from_new(self, size: int, owner: int, now: float) -> Extent | None:
        room = self.limit - self.total
        if size > room:
            return None
        length = min(max(size, self._segment_size), room)
        number = self._next_segment
        self._create(number, length)
        self._next_segment += 1
        segment = self._segments[number] = _Segment(number, length, owner, now)
        self._homes.setdefault(owner, []).append(segment)
        self.total += length
        return self._from([segment], size)

    def _give_back_idle(self, size: int) -> bool:
        """Remove idle segments, if that makes room for a new one of ``size``."""
        idle = [segment for segment in self._segments.values() if not segment.used]
        if size > self.limit - self.total + sum(segment.size for segment in idle):
            return False
        for segment in sorted(idle, key=lambda segment: segment.size):
            if self.limit - self.total >= size:
                break
            self._remove(segment)
        return True

    def _remove(self, segment: _Segment) -> None:
        del self._segments[segment.number]
        self._homes[segment.home].remove(segment)
        self.total -= segment.size
        self._destroy(segment.number)


def pages(nbytes: int) -> int:
    """``nbytes`` rounded up to whole pages, at least one."""
    return max(-(-nbytes // PAGE), 1) * PAGE
