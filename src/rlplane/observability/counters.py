"""Counts and times by operation: since the beginning, and in the present interval."""

from __future__ import annotations

from collections import deque

from rlplane.observability.operation import Operation

# How many of the last times of an interval its percentiles are taken from.
_KEPT = 2048
_WAITING_OPS = ("claim_meta", "put")
_TOTALS = ("count", "errors", "timeouts", "keys", "bytes", "wall_s", "waited_s")


class OperationCounters:
    """Sums per operation."""

    def __init__(self) -> None:
        self._all: dict[str, _Sums] = {}
        self._recent: dict[str, _Sums] = {}

    def add(self, operation: Operation) -> None:
        """Count one operation; keys and bytes only if it succeeded."""
        op, good = operation.op, operation.status == "ok"
        # Waiting for others says nothing about how quick an operation is.
        wall_s = max(operation.ended - operation.began - operation.waited_s, 0.0)
        for sums in (self._all, self._recent):
            entry = sums.get(op)
            if entry is None:
                entry = sums[op] = _Sums(deque(maxlen=_KEPT) if sums is self._recent else None)
            entry.count += 1
            entry.wall_s += wall_s
            entry.waited_s += operation.waited_s
            if good:
                entry.keys += operation.n_keys
                entry.bytes += operation.n_bytes
            elif operation.found_nothing:
                entry.timeouts += 1
            else:
                entry.errors += 1
            if entry.walls is not None:
                entry.walls.append(wall_s)

    def totals(self) -> dict[str, dict[str, float]]:
        """By operation: ``count``, ``errors``, ``timeouts``, ``keys``, ``bytes``, ``wall_s``,
        ``waited_s``."""
        return {op: {name: getattr(sums, name) for name in _TOTALS} for op, sums in self._all.items()}

    def end_interval(self, elapsed_s: float) -> dict[str, float]:
        """Rates and times since the last call, named ``put/ops_per_s`` and so on."""
        recent, self._recent = self._recent, {}
        values: dict[str, float] = {}
        for op, sums in recent.items():
            walls = sorted(sums.walls or ())
            values[f"{op}/ops_per_s"] = sums.count / elapsed_s
            values[f"{op}/mb_per_s"] = sums.bytes / 2**20 / elapsed_s
            values[f"{op}/keys_per_s"] = sums.keys / elapsed_s
            values[f"{op}/errors"] = sums.errors
            if op in _WAITING_OPS:
                values[f"{op}/timeouts"] = sums.timeouts
                values[f"{op}/waiting_s_per_s"] = sums.waited_s / elapsed_s
            values[f"{op}/mean_ms"] = sums.wall_s / sums.count * 1e3
            for percent in (50, 90, 99):
                values[f"{op}/p{percent}_ms"] = _rank(walls, percent / 100) * 1e3
        return values


class _Sums:
    __slots__ = ("bytes", "count", "errors", "keys", "timeouts", "waited_s", "wall_s", "walls")

    def __init__(self, walls: deque[float] | None) -> None:
        self.count = self.errors = self.timeouts = self.keys = self.bytes = 0
        self.wall_s = self.waited_s = 0.0
        self.walls = walls


def _rank(ordered: list[float], share: float) -> float:
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0
