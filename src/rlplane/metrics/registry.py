"""The numbers of a run: counters, gauges and series, by name and labels.

Recording a value is an append. What costs something happens at the tick, on arrays: values that make no
sense are refused one by one and counted, the others are added to exact totals and to the histogram from which
the live percentiles come. At the end the percentiles come from the values themselves.

Not thread-safe: the aggregator's loop owns it.
"""

from __future__ import annotations

import logging
import math
import time
from array import array
from collections import deque
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rlplane.errors import InvalidRequestError
from rlplane.metrics.hdr import HIGHEST_TRACKABLE, HdrCounts
from rlplane.metrics.snapshot import (
    GRIDS,
    PERCENTILES,
    CounterStat,
    GaugeStat,
    SeriesStat,
    SeriesSummary,
    Stat,
)
from rlplane.metrics.values import (
    DEFAULT_MAX_IN_MEMORY,
    ValueLog,
    ValueStore,
    count_below,
    order_statistics,
)

N_BUCKETS = 32
RATE_WINDOW_S = 3.0
_GRID_EDGES = {unit: np.array(edges, np.float64) for unit, edges in GRIDS.items()}

Int64Array = npt.NDArray[np.int64]
Float64Array = npt.NDArray[np.float64]
Labels = tuple[tuple[str, str], ...]

logger = logging.getLogger(__name__)


class MetricsRegistry:
    """Holds every sampler once.

    Args:
        max_values_in_memory: Raw values kept in memory for the exact figures, of all series together.
        spill_directory: Where those beyond it go.
    """

    def __init__(
        self,
        *,
        max_values_in_memory: int = DEFAULT_MAX_IN_MEMORY,
        spill_directory: Path | None = None,
    ) -> None:
        self._store = ValueStore(max_values_in_memory, spill_directory)
        self._kinds: dict[str, type] = {}
        self._samplers: dict[tuple[str, Labels], CounterSampler | GaugeSampler | SeriesSampler] = {}

    def register_counter(self, name: str, labels: Mapping[str, str] | None = None) -> CounterSampler:
        """Make a counter. ``ValueError`` if the name is taken by another kind, or with these labels."""
        sampler = CounterSampler(name, labels or {})
        self._add(sampler)
        return sampler

    def register_gauge(self, name: str, labels: Mapping[str, str] | None = None) -> GaugeSampler:
        """Make a gauge; as :meth:`register_counter`."""
        sampler = GaugeSampler(name, labels or {})
        self._add(sampler)
        return sampler

    def register_series(
        self,
        name: str,
        labels: Mapping[str, str] | None = None,
        *,
        unit: str = "ns",
        integer: bool = True,
        figures: int = 3,
        keep_values: bool = True,
        listed: bool = True,
    ) -> SeriesSampler:
        """Make a series; as :meth:`register_counter`.

        Args:
            unit: What a value counts.
            integer: Whether values are integers. Floats have a resolution of 1e-9.
            figures: Significant figures of the live percentiles.
            keep_values: Keep the values for exact figures at the end. Without, give it ``exact_sources``.
            listed: Whether :meth:`stats` has it.
        """
        log = self._store.new_log() if keep_values else None
        sampler = SeriesSampler(name, labels or {}, unit, integer, figures, log, listed)
        self._add(sampler)
        return sampler

    def record(self, name: str, value: float, labels: Mapping[str, str] | None = None) -> None:
        """Append a value to a series. ``KeyError`` if there is none of that name and labels."""
        sampler = self._samplers[name, tuple(sorted((labels or {}).items()))]
        if not isinstance(sampler, SeriesSampler):
            raise InvalidRequestError(f"metric {name!r} is a {type(sampler).__name__} and takes no values")
        sampler.record(value)

    def increment(self, name: str, by: int = 1, labels: Mapping[str, str] | None = None) -> None:
        """Add to a counter. ``KeyError`` if there is none of that name and labels."""
        sampler = self._samplers[name, tuple(sorted((labels or {}).items()))]
        if not isinstance(sampler, CounterSampler):
            raise InvalidRequestError(f"metric {name!r} is a {type(sampler).__name__} and does not count")
        sampler.increment(by)

    def _add(self, sampler: CounterSampler | GaugeSampler | SeriesSampler) -> None:
        name, labels = sampler.name, tuple(sorted(sampler.labels.items()))
        kind = self._kinds.setdefault(name, type(sampler))
        if kind is not type(sampler):
            raise InvalidRequestError(f"metric {name!r} is already registered as a {kind.__name__}")
        if (name, labels) in self._samplers:
            raise InvalidRequestError(f"metric {name!r} with labels {dict(labels)} is already registered")
        self._samplers[name, labels] = sampler

    @property
    def n_refused(self) -> int:
        """Values that were refused, over all listed samplers."""
        refused = 0
        for sampler in self._samplers.values():
            if isinstance(sampler, SeriesSampler):
                if not sampler.listed:
                    continue  # One worker's share of a series that is listed: counted there.
                sampler.fold()
            refused += sampler.n_refused
        return refused

    def stats(self, *, exact: bool = False, now: float | None = None) -> list[Stat]:
        """Every listed sampler's state; counters and series without a value are left out."""
        moment = time.monotonic() if now is None else now
        found: list[Stat] = []
        for sampler in self._samplers.values():
            if isinstance(sampler, SeriesSampler):
                if sampler.listed and (stat := sampler.stat(exact=exact)).count:
                    found.append(stat)
            elif isinstance(sampler, CounterSampler):
                if sampler.value:
                    found.append(sampler.stat(moment))
            else:
                found.append(sampler.stat())
        return found

    def close(self) -> None:
        """Release the spill file."""
        self._store.close()


class CounterSampler:
    """A number that only grows."""

    __slots__ = ("_marks", "labels", "n_refused", "name", "value")

    def __init__(self, name: str, labels: Mapping[str, str]) -> None:
        self.name = name
        self.labels = dict(labels)
        self.value = 0
        self.n_refused = 0
        self._marks: deque[tuple[float, int]] = deque()

    def increment(self, by: int = 1) -> None:
        """Add ``by``; what is negative or no integer is refused and counted."""
        if type(by) is not int or by < 0:
            self.n_refused += 1
            return
        self.value += by

    def rate(self, now: float) -> float:
        """Growth per second over the last seconds; asking is what moves the window."""
        marks = self._marks
        marks.append((now, self.value))
        # The last mark before the window stays: the rate is over at least the window once there is one.
        while len(marks) > 2 and marks[1][0] <= now - RATE_WINDOW_S:
            marks.popleft()
        since, before = marks[0]
        return (self.value - before) / (now - since) if now > since else 0.0

    def stat(self, now: float) -> CounterStat:
        return CounterStat(self.name, self.value, self.labels, self.rate(now))


class GaugeSampler:
    """A number that goes up and down."""

    __slots__ = ("labels", "n_refused", "name", "peak", "value")

    def __init__(self, name: str, labels: Mapping[str, str]) -> None:
        self.name = name
        self.labels = dict(labels)
        self.value: float = 0
        self.peak: float = 0
        self.n_refused = 0

    def set(self, value: float) -> None:
        """Replace the value; what is not finite is refused and counted."""
        if not math.isfinite(value):
            self.n_refused += 1
            return
        self.value = value
        self.peak = max(self.peak, value)

    def stat(self) -> GaugeStat:
        return GaugeStat(self.name, self.value, self.labels, self.peak)


class SeriesSampler:
    """The distribution of a value."""

    # Floats are counted in the histogram in steps of this size.
    RESOLUTION = 1e-9

    def __init__(
        self,
        name: str,
        labels: Mapping[str, str],
        unit: str,
        integer: bool,
        figures: int,
        log: ValueLog | None,
        listed: bool,
    ) -> None:
        self.name = name
        self.labels = dict(labels)
        self.unit = unit
        self.integer = integer
        self.listed = listed
        self.count = 0
        self.min: float | None = None
        self.max: float | None = None
        self.n_clamped = 0
        self.exact_sources: list[SeriesSampler] = []
        self.n_refused = 0
        self._log = log
        self._histogram = HdrCounts(figures)
        self._sum = 0
        self._sum_squares = 0
        self._mean = 0.0
        self._m2 = 0.0
        self._warned = False
        self._cached: SeriesStat | None = None
        self._grid_places: Int64Array | None = None
        self._span: tuple[float, float] | None = None
        self._edges: Float64Array = np.zeros(0)
        self._edge_places: Int64Array = np.zeros(0, np.int64)
        self._arrays: list[npt.NDArray[np.generic]] = []
        self._buffer: array[int] | array[float] = self._new_buffer()

    def _new_buffer(self) -> array[int] | array[float]:
        return array("q") if self.integer else array("d")

    def record(self, value: float) -> None:
        """Append a value."""
        try:
            self._buffer.append(value)  # type: ignore[arg-type]  # A float into integers raises, as it should.
        except (TypeError, OverflowError):
            self.n_refused += 1

    def record_many(self, values: npt.NDArray[np.generic]) -> None:
        """Append an array of values; the caller must not change it afterwards."""
        self._arrays.append(values)

    def fold(self) -> None:
        """Bring what was recorded into totals and histogram."""
        if self._buffer:
            self.record_many(np.frombuffer(self._buffer, np.int64 if self.integer else np.float64))
            self._buffer = self._new_buffer()
        if not self._arrays:
            return
        arrays, self._arrays = self._arrays, []
        self._cached = None
        if self.integer:
            self._absorb_integers([self._sound_integers(values) for values in arrays])
        else:
            self._absorb_floats([self._sound_floats(values) for values in arrays])

    def _sound_integers(self, values: npt.NDArray[np.generic]) -> Int64Array:
        if values.dtype == np.int64:
            sound: Int64Array = values  # type: ignore[assignment]
        elif values.dtype.kind in "iu":
            fits = values <= np.iinfo(np.int64).max  # type: ignore[operator]
            sound = values[fits].astype(np.int64)
        else:
            sound = np.zeros(0, np.int64)
        self.n_refused += values.size - sound.size
        return sound

    def _sound_floats(self, values: npt.NDArray[np.generic]) -> Float64Array:
        if values.dtype.kind not in "iuf":
            self.n_refused += values.size
            return np.zeros(0)
        floats = values.astype(np.float64)
        sound: Float64Array = floats[np.isfinite(floats) & (floats >= 0)]
        self.n_refused += values.size - sound.size
        return sound + 0.0  # Turns -0.0 into 0.0, whose bits sort.

    def _absorb_integers(self, arrays: list[Int64Array]) -> None:
        values = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
        if not values.size:
            return
        low, high = int(values.min()), int(values.max())
        if low < 0:
            sound = values[values >= 0]
            self.n_refused += values.size - sound.size
            self._absorb_integers([sound])
            return
        self._note_span(low, high)
        self._sum += _exact_sum(values, high)
        self._sum_squares += _exact_sum_of_squares(values, high)
        self.count += values.size
        self._count_in_histogram(values, low, high)
        if self._log is not None:
            self._log.append(values)

    def _absorb_floats(self, arrays: list[Float64Array]) -> None:
        values = np.concatenate(arrays)
        if not values.size:
            return
        self._note_span(float(values.min()), float(values.max()))
        # Chan's merge of two sets' means and squared deviations: stable where sums of squares are not.
        size, mean = values.size, float(values.mean())
        delta, count = mean - self._mean, self.count + size
        self._m2 += float(np.square(values - mean).sum()) + delta * delta * self.count * size / count
        self._mean += delta * size / count
        self.count = count
        steps = np.minimum(values / self.RESOLUTION, float(HIGHEST_TRACKABLE) * 2).astype(np.int64)
        self._count_in_histogram(steps, int(steps.min()), int(steps.max()))
        if self._log is not None:
            self._log.append(values.view(np.int64))

    def _note_span(self, low: float, high: float) -> None:
        self.min = low if self.min is None else min(self.min, low)
        self.max = high if self.max is None else max(self.max, high)

    def _count_in_histogram(self, steps: Int64Array, low: int, high: int) -> None:
        if high > HIGHEST_TRACKABLE:
            self.n_clamped += int((steps > HIGHEST_TRACKABLE).sum())
            steps = np.minimum(steps, HIGHEST_TRACKABLE)
            if not self._warned:
                self._warned = True
                text = "series %s %s has values above %d: live percentiles show that at most"
                logger.warning(text, self.name, self.labels, HIGHEST_TRACKABLE)
        self._histogram.add(steps, min(low, HIGHEST_TRACKABLE), min(high, HIGHEST_TRACKABLE))

    @property
    def total(self) -> float:
        """The sum: exact for integers."""
        return self._sum if self.integer else self._mean * self.count

    @property
    def mean(self) -> float:
        return (self._sum / self.count if self.integer else self._mean) if self.count else 0.0

    @property
    def std_dev(self) -> float:
        """The sample standard deviation: exact sums for integers, merged deviations for floats."""
        n = self.count
        if n < 2:
            return 0.0
        if self.integer:
            return math.sqrt((n * self._sum_squares - self._sum * self._sum) / (n * (n - 1)))
        return math.sqrt(self._m2 / (n - 1))

    def stat(self, *, exact: bool = False) -> SeriesStat:
        """The distribution; with ``exact`` from all values, if all of them are there."""
        self.fold()
        if not self.count or self.min is None or self.max is None:
            return SeriesStat(self.name, 0, self.labels, self.unit, n_refused=self.n_refused)
        if self._cached is not None and not exact and self._cached.n_refused == self.n_refused:
            return self._cached
        parts = self._exact_parts() if exact else None
        if self._span != (self.min, self.max):
            # Kept, because the extremes of a long series hardly ever change.
            self._span = (self.min, self.max)
            self._edges = _edges(self.min, self.max, self._scale, self.integer)
            self._edge_places = self._histogram.place(self._edges[1:-1], self._scale)
        edges = self._edges
        cumulative = self._histogram.cumulative()
        if parts is None:
            percentiles = self._live_percentiles(cumulative, self.min, self.max)
            counts = self._histogram.counts_between(self._edge_places, cumulative)
        else:
            percentiles = self._exact_percentiles(parts)
            counts = self._exact_counts(parts, edges)
        self._cached = SeriesStat(
            self.name,
            self.count,
            self.labels,
            self.unit,
            _for_wire(self.total),
            _for_wire(self.min),
            _for_wire(self.max),
            self.mean,
            self.std_dev,
            dict(zip((name for name, _ in PERCENTILES), percentiles, strict=True)),
            edges.tolist(),
            counts.tolist(),
            self.n_clamped,
            self.n_refused,
            parts is not None,
            *self._grid(cumulative),
        )
        return self._cached

    @property
    def _scale(self) -> float:
        return 1.0 if self.integer else self.RESOLUTION

    def _grid(self, cumulative: Int64Array) -> tuple[int, list[int]]:
        """The first filled bucket of the unit's fixed grid, and the counts up to the last filled one."""
        edges = _GRID_EDGES.get(self.unit)
        if edges is None or not self.listed:
            return 0, []
        if self._grid_places is None:
            self._grid_places = self._histogram.place(edges[1:-1], self._scale)
        counts = self._histogram.counts_between(self._grid_places, cumulative)
        filled = np.flatnonzero(counts)
        first, last = int(filled[0]), int(filled[-1])
        return first, counts[first : last + 1].tolist()

    def summary(self, *, exact: bool = False) -> SeriesSummary | None:
        """The distribution in short; None without a value."""
        stat = self.stat(exact=exact)
        if not stat.count or stat.mean is None or stat.max is None:
            return None
        p = stat.percentiles
        return SeriesSummary(stat.count, stat.mean, p["p50"], p["p90"], p["p99"], stat.max, stat.exact)

    def _ranks(self) -> Int64Array:
        # Ceiling division in Python integers: the rank of a percentile must not depend on rounding.
        return np.array([max(1, -(-self.count * share // 100_000)) for _, share in PERCENTILES], np.int64)

    def _live_percentiles(self, cumulative: Int64Array, low: float, high: float) -> list[float]:
        found = self._histogram.values_at(self._ranks(), cumulative)
        scaled = found if self.integer else found * self._scale
        # What lies beyond the observed span is only the width of a slot.
        return list(np.minimum(np.maximum(scaled, low), high).tolist())

    def _exact_percentiles(self, parts: list[Int64Array]) -> list[float]:
        keys = order_statistics(parts, self._ranks().tolist())
        if self.integer:
            return [_for_wire(key) for key in keys]
        return [float(value) for value in np.array(keys, np.int64).view(np.float64)]

    def _exact_counts(self, parts: list[Int64Array], edges: Float64Array) -> Int64Array:
        inner = edges[1:-1]
        if self.integer:
            # The largest float below 2**63: above it the conversion would wrap around.
            keys = np.minimum(np.ceil(inner), 9.2e18).astype(np.int64)
        else:
            keys = np.ascontiguousarray(inner).view(np.int64)
        below = count_below(parts, keys)
        return np.diff(np.concatenate(([0], below, [self.count])))

    def _exact_parts(self) -> list[Int64Array] | None:
        """Sorted parts with every value, or None if some are gone."""
        logs = [self._log] if self._log is not None else []
        for source in self.exact_sources:
            source.fold()
            if source._log is not None:
                logs.append(source._log)
        if any(log.lost for log in logs):
            return None
        try:
            parts = [part for log in logs for part in log.sorted_parts()]
        except (OSError, ValueError) as exc:
            logger.warning("the exact percentiles of %s are given up: %s", self.name, exc)
            return None
        return parts if sum(part.size for part in parts) == self.count else None


def _edges(low: float, high: float, shift: float, integer: bool) -> Float64Array:
    """Log-spaced edges from ``low`` to ``high``: fewer where the span has no room for so many integers.

    Values are shifted by the smallest one that counts, so that a span from 0 has a logarithm.
    """
    span = high - low
    if span <= 0:
        return np.array([low, high], np.float64)
    bins = int(min(N_BUCKETS, span)) if integer else N_BUCKETS
    steps = _STEPS if bins == N_BUCKETS else np.linspace(0.0, 1.0, bins + 1)
    # log1p and expm1 of the ratio keep their digits where high is only a little above low.
    growth = math.log1p(span / (low + shift))
    edges: Float64Array = low + (low + shift) * np.expm1(growth * steps)
    np.minimum(edges, high, out=edges)
    edges[0], edges[-1] = low, high
    return np.maximum.accumulate(edges)


_STEPS = np.linspace(0.0, 1.0, N_BUCKETS + 1)


def _exact_sum(values: Int64Array, highest: int) -> int:
    if highest * values.size < 1 << 63:
        return int(values.sum())
    # Halves of 32 bits: their sums cannot overflow, whatever the values are.
    high = int((values >> 32).sum())
    low = int((values & 0xFFFF_FFFF).sum())
    return (high << 32) + low


_SQUARES_PER_STEP = 1 << 20


def _exact_sum_of_squares(values: Int64Array, highest: int) -> int:
    """Σ v² without overflow: at once if it fits, else by halves of 21 bits, and the rarest one by one."""
    if highest * highest * values.size < 1 << 63:
        return int(values @ values)
    total = 0
    for start in range(0, values.size, _SQUARES_PER_STEP):
        part = values[start : start + _SQUARES_PER_STEP]
        if highest >= 1 << 42:
            large = part >= 1 << 42
            total += sum(value * value for value in part[large].tolist())
            part = part[~large]
        high, low = part >> 21, part & 0x1F_FFFF
        total += (int(high @ high) << 42) + (int(high @ low) << 22) + int(low @ low)
    return total


def _for_wire(value: float) -> float:
    """An integer beyond 64 bits cannot travel in msgpack: send it as a float."""
    return float(value) if isinstance(value, int) and value >= 1 << 63 else value
