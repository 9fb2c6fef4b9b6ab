"""Counts and times by operation: since the beginning, and since they were last taken for the sinks."""

from __future__ import annotations

from collections import deque

__all__ = ["Tally"]

# How many of the last times of an interval its percentiles are taken from.
_KEPT = 2048


class Tally:
    """Sums per operation."""

    def __init__(self) -> None:
        self._all: dict[str, _Sums] = {}
        self._recent: dict[str, _Sums] = {}

    def add(self, op: str, n_keys: int, n_bytes: int, wall_s: float, good: bool) -> None:
        """Count one operation; keys and bytes only if it succeeded."""
        for sums in (self._all, self._recent):
            entry = sums.get(op)
            if entry is None:
                entry = sums[op] = _Sums(deque(maxlen=_KEPT) if sums is self._recent else None)
            entry.count += 1
            entry.wall_s += wall_s
            if good:
                entry.keys += n_keys
                entry.bytes += n_bytes
            else:
                entry.errors += 1
            if entry.walls is not None:
                entry.walls.append(wall_s)

    def totals(self) -> dict[str, dict[str, float]]:
        """By operation: ``count``, ``errors``, ``keys``, ``bytes``, ``wall_s``."""
        return {
            op: {
                "count": sums.count,
                "errors": sums.errors,
                "keys": sums.keys,
                "bytes": sums.bytes,
                "wall_s": sums.wall_s,
            }
            for op, sums in self._all.items()
        }

    def take(self, elapsed_s: float) -> dict[str, float]:
        """Rates and times since the last take, named ``put/ops_per_s`` and so on."""
        recent, self._recent = self._recent, {}
        values: dict[str, float] = {}
        for op, sums in recent.items():
            walls = sorted(sums.walls or ())
            values[f"{op}/ops_per_s"] = sums.count / elapsed_s
            values[f"{op}/mb_per_s"] = sums.bytes / 2**20 / elapsed_s
            values[f"{op}/keys_per_s"] = sums.keys / elapsed_s
            values[f"{op}/errors"] = sums.errors
            values[f"{op}/mean_ms"] = sums.wall_s / sums.count * 1e3
            values[f"{op}/p50_ms"] = _rank(walls, 0.50) * 1e3
            values[f"{op}/p90_ms"] = _rank(walls, 0.90) * 1e3
            values[f"{op}/p99_ms"] = _rank(walls, 0.99) * 1e3
        return values


class _Sums:
    __slots__ = ("bytes", "count", "errors", "keys", "wall_s", "walls")

    def __init__(self, walls: deque[float] | None) -> None:
        self.count = self.errors = self.keys = self.bytes = 0
        self.wall_s = 0.0
        self.walls = walls


def _rank(ordered: list[float], share: float) -> float:
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0
