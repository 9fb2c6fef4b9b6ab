"""One thread serves everybody: how long it was busy with one thing, and how it is kept from being so."""

from __future__ import annotations

import time
from collections.abc import Iterator

from rlplane.control.conditions import Look

__all__ = ["LookAhead", "LoopStall"]

_WINDOW_S = 10.0
_SLICE_S = 0.01


class LookAhead:
    """Looks that come before a request, in slices of time: call it until it returns True."""

    def __init__(self, looks: Iterator[Look]) -> None:
        self._looks = looks
        self._look: Look | None = None

    def __call__(self) -> bool:
        end = time.perf_counter() + _SLICE_S

        def is_over() -> bool:
            return time.perf_counter() >= end

        while True:
            if self._look is None:
                self._look = next(self._looks, None)
                if self._look is None:
                    return True
            if not self._look(is_over):
                return False
            self._look = None


class LoopStall:
    """The longest stall ever, and the longest of the last ten to twenty seconds."""

    def __init__(self) -> None:
        self._longest = self._now = self._before = 0.0
        self._window = 0.0

    def record(self, seconds: float, now: float) -> None:
        """The loop was busy for so long, until ``now``."""
        if now >= self._window + _WINDOW_S:
            self._before = self._now if now < self._window + 2 * _WINDOW_S else 0.0
            self._now, self._window = 0.0, now
        if seconds > self._now:
            self._now = seconds
            self._longest = max(self._longest, seconds)

    def describe(self) -> dict[str, float]:
        """In milliseconds, for people."""
        recent = max(self._now, self._before)
        return {"max": round(1e3 * self._longest, 3), "recent": round(1e3 * recent, 3)}
