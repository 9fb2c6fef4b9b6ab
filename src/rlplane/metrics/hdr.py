"""A histogram in the HDR layout, filled and read with array operations.

The layout is that of HdrHistogram: for ``figures`` significant decimal figures, each power of two is split
into equal slots, so that the relative width of a slot is bounded and a slot's number follows from the value's
bits. Only the span of slots that has been seen is kept in memory: a latency that varies by a factor of a
thousand needs 10 × 1024 counters, not the layout's 33,000.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

HIGHEST_TRACKABLE = 3_600_000_000_000  # An hour in nanoseconds.

Int64Array = npt.NDArray[np.int64]


class HdrCounts:
    """Counts of integers from 0 to :data:`HIGHEST_TRACKABLE`; larger ones are the caller's to clamp."""

    __slots__ = ("_counts", "_first", "_half_bits", "total")

    def __init__(self, figures: int = 3) -> None:
        if not 1 <= figures <= 5:
            raise ValueError(f"{figures} significant figures; 1 to 5 are possible")
        # The smallest power of two that resolves 1 in 2 * 10**figures; half of it is new in each octave.
        self._half_bits = int(2 * 10**figures - 1).bit_length() - 1
        self._first = 0
        self._counts: Int64Array = np.zeros(0, np.int64)
        self.total = 0

    def slots(self, values: Int64Array) -> Int64Array:
        """The slot of each value."""
        # frexp's exponent is the bit length, exactly, for integers below 2**53.
        octave = np.frexp(values.astype(np.float64))[1].astype(np.int64) - (self._half_bits + 1)
        np.maximum(octave, 0, out=octave)
        return (octave << self._half_bits) + (values >> octave)

    def bounds(self, slots: Int64Array) -> tuple[Int64Array, Int64Array]:
        """The lowest and the highest value of each slot."""
        octave = np.maximum((slots >> self._half_bits) - 1, 0)
        lowest = (slots - (octave << self._half_bits)) << octave
        return lowest, lowest + (np.int64(1) << octave) - 1

    def add(self, values: Int64Array, lowest: int, highest: int) -> None:
        """Count the values; the caller knows their span."""
        low, high = self._slot(lowest), self._slot(highest)
        self._cover(low, high)
        added = np.bincount(self.slots(values) - low)
        self._counts[low - self._first : low - self._first + added.size] += added
        self.total += values.size

    def _slot(self, value: int) -> int:
        octave = max(0, value.bit_length() - (self._half_bits + 1))
        return (octave << self._half_bits) + (value >> octave)

    def _cover(self, low: int, high: int) -> None:
        size = self._counts.size
        if size and low >= self._first and high < self._first + size:
            return
        step = 1 << self._half_bits
        new_first = (min(low, self._first) if size else low) // step * step
        new_end = (max(high, self._first + size - 1) if size else high) // step * step + step
        grown = np.zeros(new_end - new_first, np.int64)
        if size:
            grown[self._first - new_first : self._first - new_first + size] = self._counts
        self._first, self._counts = new_first, grown

    def cumulative(self) -> Int64Array:
        """How many values lie below each slot, and below the end: computed once for the readers below."""
        below = np.zeros(self._counts.size + 1, np.int64)
        np.cumsum(self._counts, out=below[1:])
        return below

    def values_at(self, ranks: Int64Array, cumulative: Int64Array) -> Int64Array:
        """The highest value of the slot in which the value of each rank (from 1) lies."""
        return self.bounds(np.searchsorted(cumulative, ranks, side="left") + (self._first - 1))[1]

    def place(self, edges: npt.NDArray[np.float64], scale: float = 1.0) -> Int64Array:
        """The slots in which edges, in steps of ``scale``, lie; the same for all counts of this layout."""
        # Nothing is counted above the highest value, so an edge may as well be just beyond it.
        steps = np.minimum(np.ceil(edges / scale), 2.0 * HIGHEST_TRACKABLE)
        return self.slots(steps.astype(np.int64))

    def counts_between(self, places: Int64Array, cumulative: Int64Array) -> Int64Array:
        """The counts below the first edge, between each two, and from the last one on.

        A slot that an edge divides counts, whole, above it. Work is per edge and not per slot: there are a
        few dozen edges, and thousands of slots.
        """
        inside = np.minimum(np.maximum(places - self._first, 0), self._counts.size)
        under = np.zeros(places.size + 2, np.int64)
        under[1:-1] = cumulative[inside]
        under[-1] = self.total
        return under[1:] - under[:-1]
