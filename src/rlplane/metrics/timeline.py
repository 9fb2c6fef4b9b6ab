"""How the run went over time, in a bounded number of points.

A point is added per tick. When there are too many, neighbours are merged two by two: a long run is seen
coarser, never cut off.
"""

from __future__ import annotations

from msgspec import structs

from rlplane.metrics.snapshot import MAX_TIMELINE, TimelinePoint

_NOT_SUMMED = {"elapsed_s", "seconds", "samples_held", "bytes_held"}
_SUMMED = tuple(name for name in TimelinePoint.__struct_fields__ if name not in _NOT_SUMMED)


class Timeline:
    """Points in order of time, each the sum of what happened in its interval."""

    def __init__(self, limit: int = MAX_TIMELINE) -> None:
        self._limit = limit
        self._points: list[TimelinePoint] = []
        self._totals = TimelinePoint(0.0, 0.0)
        self._width_s = 0.0

    def add(self, elapsed_s: float, totals: TimelinePoint) -> None:
        """Note the run's totals at ``elapsed_s``; the point is their growth since the last call."""
        before = self._totals
        width = elapsed_s - before.elapsed_s
        if width <= 0:
            return
        growth = {name: getattr(totals, name) - getattr(before, name) for name in _SUMMED}
        point = TimelinePoint(
            elapsed_s=before.elapsed_s,
            seconds=width,
            samples_held=totals.samples_held,
            bytes_held=totals.bytes_held,
            **growth,
        )
        self._totals = structs.replace(totals, elapsed_s=elapsed_s)
        # After a merge, points fill up to the new width before the next one begins.
        if self._points and self._points[-1].seconds < 0.75 * self._width_s:
            self._points[-1] = _merged(self._points[-1], point)
        else:
            self._points.append(point)
        if len(self._points) > self._limit:
            pairs = zip(self._points[0::2], self._points[1::2], strict=False)
            rest = self._points[len(self._points) // 2 * 2 :]
            self._points = [_merged(first, second) for first, second in pairs] + rest
            self._width_s = self._points[0].seconds

    def continue_from(self, points: list[TimelinePoint], totals: TimelinePoint) -> None:
        """Begin after ``points``, at the end of which the run had these totals."""
        self._points, self._totals = list(points), totals
        self._width_s = min((point.seconds for point in points[:-1]), default=0.0)

    def points(self) -> list[TimelinePoint]:
        return list(self._points)


def _merged(first: TimelinePoint, second: TimelinePoint) -> TimelinePoint:
    return TimelinePoint(
        elapsed_s=first.elapsed_s,
        seconds=first.seconds + second.seconds,
        samples_held=second.samples_held,
        bytes_held=second.bytes_held,
        **{name: getattr(first, name) + getattr(second, name) for name in _SUMMED},
    )
