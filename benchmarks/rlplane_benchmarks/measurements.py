"""The values that a run has measured so far."""

from __future__ import annotations

from collections import defaultdict

from rlplane_benchmarks.results import Series

__all__ = ["Measurements"]


class Measurements:
    """Values by part, workload, participant and operation. ``sizes`` has the bytes of each batch."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, str, str, str], list[float]] = defaultdict(list)
        self.sizes: dict[str, int] = {}

    def add(self, part: str, workload: str, participant: str, op: str, *values: float) -> None:
        self._values[part, workload, participant, op].extend(values)

    def series(self) -> list[Series]:
        """What was measured, in the order in which it was first measured."""
        return [
            Series.of(
                *key,
                values,
                unit="cycles/s" if key[0] == "clients" else "share" if key[3] == "held" else "s",
                nbytes=self.sizes.get(key[1], 0) if key[0] in ("data", "images") else 0,
            )
            for key, values in self._values.items()
            if values
        ]
