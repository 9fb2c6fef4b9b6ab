"""One file of shared memory: which of its addresses are free, and which of its pages exist.

Addresses are not memory: a segment has many times more of them than will ever have pages at once. So there
are always neighbouring addresses for a place, and the pages behind them need not be neighbours.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

PAGE = 4096


class Segment:
    """Free stretches of addresses are found by their size and by their ends, never by walking over them.

    A page is *touched* once a place with it was handed out: it may exist. It is *backed* when a client has
    said so by its commit: it does exist. A page that is touched and free is *cached*: a place with it costs
    nothing, and until then it is memory that nobody uses.
    """

    def __init__(self, number: int, size: int, home: int, now: float) -> None:
        self.number, self.size, self.home = number, size, home
        self.idle_since = now
        self.used = 0
        self.cached = 0  # in bytes, like everything but the bits
        self._free: dict[int, int] = {}  # size by start
        self._ends: dict[int, int] = {}  # start by end
        self._starts: dict[int, dict[int, None]] = {}  # starts by size, the last that was freed last
        self._sizes: list[int] = []  # that there are
        # Bits of pages. Mostly all below an address are touched, and nobody has to look at the bits.
        self._touched = self._backed = np.zeros(0, bool)
        self._high = 0  # nothing from here on was ever handed out
        self._untouched = 0  # pages below
        if size:
            self._add(0, size)

    def find(self, size: int) -> int | None:
        """The start of the smallest free stretch that is large enough; of equal ones, of the last freed."""
        place = bisect_left(self._sizes, size)
        return None if place == len(self._sizes) else next(reversed(self._starts[self._sizes[place]]))

    def is_cached(self, start: int, size: int) -> bool:
        """Whether all of its pages may exist."""
        if start + size > self._high:
            return False
        return not self._untouched or bool(self._touched[_pages(start, size)].all())

    def take(self, start: int, size: int) -> bool:
        """Hand out the beginning of a free stretch; says whether all of its pages exist."""
        room = self._remove(start)
        if room > size:
            self._add(start + size, room - size)
        self.used += size
        known = start + size <= self._high and not self._untouched
        self.cached -= size if known else self._touch(start, size)
        return int(np.count_nonzero(self._backed[_pages(start, size)])) == size // PAGE

    def put_back(self, start: int, size: int) -> None:
        """Take addresses back, with their pages."""
        self.used -= size
        self.cached += size
        before = self._ends.get(start)
        if before is not None:
            size += self._remove(before)
            start = before
        if start + size in self._free:
            size += self._remove(start + size)
        self._add(start, size)

    def note_backed(self, start: int, size: int) -> None:
        """These pages exist."""
        self._backed[_pages(start, size)] = True

    def drop_cached(self, most: int) -> list[tuple[int, int]]:
        """Forget up to about ``most`` bytes of cached pages; returns where they are (start, size)."""
        cached = np.zeros(self._high // PAGE, bool)
        for start, size in self._free.items():
            cached[_pages(start, size)] = True
        cached &= self._touched[: len(cached)]
        return self._drop(np.flatnonzero(cached)[most // -PAGE :])

    def drop_unbacked(self, start: int, size: int) -> list[tuple[int, int]]:
        """Forget those cached pages of a stretch that are not known to exist; returns where they are."""
        first = start // PAGE
        return self._drop(first + np.flatnonzero(~self._backed[_pages(start, size)]))

    def _drop(self, pages: NDArray[np.intp]) -> list[tuple[int, int]]:
        self._touched[pages] = self._backed[pages] = False
        self._untouched += len(pages)
        self.cached -= PAGE * len(pages)
        return page_stretches(pages)

    def adopt(self, places: Iterable[tuple[int, int]], data: Iterable[tuple[int, int]]) -> None:
        """Begin with these places (start, size) in use, and with these stretches of pages in existence."""
        for start in list(self._free):
            self._remove(start)
        end = 0
        for start, size in [*sorted(places), (self.size, 0)]:
            if start > end:
                self._add(end, start - end)
            end = start + size
            if size:
                self.used += size
                self._touch(start, size)
        for start, size in data:
            self._touch(start, size)
        self.cached = PAGE * int(np.count_nonzero(self._touched)) - self.used

    def untouched(self) -> list[tuple[int, int]]:
        """Free stretches of pages that do not exist, as far as is known."""
        gaps = page_stretches(np.flatnonzero(~self._touched[: self._high // PAGE]))
        return [*gaps, (self._high, self.size - self._high)] if self._high < self.size else gaps

    @property
    def free(self) -> list[tuple[int, int]]:
        """All free stretches (start, size), for tests and for a recovery."""
        return sorted(self._free.items())

    @property
    def backed(self) -> int:
        """The bytes of pages that are known to exist."""
        return PAGE * int(np.count_nonzero(self._backed))

    def _add(self, start: int, size: int) -> None:
        self._free[start], self._ends[start + size] = size, start
        starts = self._starts.get(size)
        if starts is None:
            starts = self._starts[size] = {}
            insort(self._sizes, size)
        starts[start] = None

    def _remove(self, start: int) -> int:
        size = self._free.pop(start)
        del self._ends[start + size], self._starts[size][start]
        if not self._starts[size]:
            del self._starts[size], self._sizes[bisect_left(self._sizes, size)]
        return size

    def _touch(self, start: int, size: int) -> int:
        """Note that these pages may exist from now on; returns how many bytes of them did before."""
        pages, end = _pages(start, size), start + size
        if pages.stop > len(self._touched):
            length = min(max(2 * len(self._touched), pages.stop, 256), self.size // PAGE)
            self._touched, self._backed = _longer(self._touched, length), _longer(self._backed, length)
        before = PAGE * int(np.count_nonzero(self._touched[pages]))
        self._touched[pages] = True
        below = max(min(end, self._high) - start, 0)
        self._untouched -= (below - before) // PAGE
        if end > self._high:
            self._untouched += max(start - self._high, 0) // PAGE
            self._high = end
        return before


def _pages(start: int, size: int) -> slice:
    return slice(start // PAGE, (start + size) // PAGE)


def page_stretches(pages: NDArray[np.intp]) -> list[tuple[int, int]]:
    """Pages in ascending order, as stretches (start, size)."""
    begins = np.flatnonzero(np.diff(pages, prepend=-2) != 1)
    lengths = np.diff(begins, append=len(pages))
    starts = (pages[begins] * PAGE).tolist()
    return list(zip(starts, (lengths * PAGE).tolist(), strict=True))


def _longer(bits: NDArray[np.bool_], length: int) -> NDArray[np.bool_]:
    longer = np.zeros(length, bool)
    longer[: len(bits)] = bits
    return longer
