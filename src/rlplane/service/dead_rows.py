"""``DeadRows``: bytes in places that are still needed, which no sample refers to any more.

A put is one place, and its rows are cleared one by one: what the others need stays, and the rest goes back to
the storage, as soon as nobody has a lease on the place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from rlplane.storage.places import Layout

ReadOffsets = Callable[[int, int], NDArray[np.int64]]
"""Numbers that are in a place: where they begin, and how many they are."""

# No storage takes back less than a page.
_PAGE = 4096
_KINDS = ("dense", "jagged", "object")  # those whose rows lie one behind the other


class DeadRows:
    """By place, and by where a block begins in it: which rows are dead; None for all of them."""

    def __init__(self) -> None:
        self._places: dict[int, dict[int, tuple[Layout, NDArray[np.bool_] | None]]] = {}

    def add(self, place: int, start: int, layout: Layout, positions: NDArray[np.int32]) -> None:
        """Rows of a block are dead."""
        if layout.kind not in _KINDS or layout.values_nbytes < _PAGE:
            return
        blocks = self._places.setdefault(place, {})
        _, dead = blocks.get(start, (layout, None))
        if dead is None:
            dead = np.zeros(layout.rows, bool)
            blocks[start] = (layout, dead)
        dead[positions] = True

    def add_block(self, place: int, start: int, layout: Layout) -> None:
        """A whole block is dead."""
        if layout.nbytes >= _PAGE:
            self._places.setdefault(place, {})[start] = (layout, None)

    def forget(self, place: int) -> None:
        """The place is gone as a whole."""
        self._places.pop(place, None)

    def stretches(self, place: int, read: ReadOffsets) -> list[tuple[int, int]]:
        """The bytes of a place that are dead (start, stop), in no order."""
        found: list[tuple[int, int]] = []
        for start, (layout, dead) in self._places.get(place, {}).items():
            if dead is None:
                found.append((start, start + layout.nbytes))
                continue
            ends = _row_ends(layout, start, read)
            if ends is not None:
                edges = ends[np.flatnonzero(np.diff(dead, prepend=False, append=False))]
                first, last = edges[::2], edges[1::2]
                useful = last - first >= _PAGE
                found += zip((start + first[useful]).tolist(), (start + last[useful]).tolist(), strict=True)
        return found

    def __iter__(self) -> Iterator[int]:
        return iter(list(self._places))

    def __contains__(self, place: int) -> bool:
        return place in self._places

    def of(self, places: Iterable[int]) -> list[int]:
        """Those of the places that have dead rows."""
        return [place for place in dict.fromkeys(places) if place in self._places]


def _row_ends(layout: Layout, start: int, read: ReadOffsets) -> NDArray[np.int64] | None:
    """Where the rows of a block begin and end in it; None if that cannot be told."""
    if layout.kind == "dense":
        return np.arange(layout.rows + 1, dtype=np.int64) * (layout.values_nbytes // layout.rows)
    ends = read(start + layout.offsets_at, layout.rows + 1)
    # A client has written them, and nobody has looked since.
    if len(ends) != layout.rows + 1 or ends[0] != 0 or ends[-1] <= 0 or bool((ends[1:] < ends[:-1]).any()):
        return None
    size, rest = divmod(layout.values_nbytes, int(ends[-1]))
    return None if rest else ends * size
