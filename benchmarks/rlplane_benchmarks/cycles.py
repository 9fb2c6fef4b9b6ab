"""A loop of put, claim, read and clear, which clients run at the same time to load an engine.

Nothing here imports torch: the process of the bench itself needs these names, and no tensors.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, NamedTuple

__all__ = ["CyclesDone", "check_rows", "run_cycles"]

_CLAIM_TIMEOUT_S = 60.0


class CyclesDone(NamedTuple):
    """What a client did between two points in time."""

    counted: int
    """Cycles that ended within the measured time."""
    total: int
    """All cycles, with those of the warm-up."""
    wrong: str | None
    """What was wrong with a read, or None."""

    @classmethod
    def sum(cls, clients: Iterable[CyclesDone]) -> CyclesDone:
        """What several clients did in all, with the first fault that one of them found."""
        counted, total, wrong = zip(*clients, strict=True)
        return cls(sum(counted), sum(total), next(filter(None, wrong), None))


def run_cycles(
    store: Any,
    partition: str,
    rows: int,
    first_number: int,
    begin: float,
    start: float,
    end: float,
    *,
    alone: bool = False,
) -> CyclesDone:
    """Work from ``begin`` to ``end``; cycles that end after ``start`` count.

    Every read is checked. With ``alone`` no other client uses the partition, so that a claim has to return
    the very rows that this cycle wrote; otherwise it may return rows of any client.

    The three times are those of ``time.perf_counter``, which all processes of a machine share. Each row has a
    number of its own, from ``first_number`` on.
    """
    time.sleep(max(begin - time.perf_counter(), 0))
    counted = total = 0
    wrong = None
    while time.perf_counter() < end:
        first = first_number + total * rows
        wrong = _cycle(store, partition, range(first, first + rows), alone) or wrong
        total += 1
        counted += start <= time.perf_counter() <= end
    return CyclesDone(counted, total, wrong)


def _cycle(store: Any, partition: str, numbers: range, alone: bool) -> str | None:
    store.put_tiny(partition, numbers, store.tiny(numbers))
    claimed = store.claim(partition, len(numbers), _CLAIM_TIMEOUT_S)
    rows = store.read_tiny(partition, claimed)
    wrong = check_rows(rows, numbers if alone else None)
    store.clear_tiny(partition, claimed)
    return wrong


def check_rows(rows: Any, numbers: range | None) -> str | None:
    """What is wrong with rows, which have to be those of ``numbers`` if it is given, in whatever order."""
    from rlplane_benchmarks.participants.store import check_tiny

    wrong = check_tiny(rows)
    if wrong or numbers is None:
        return wrong
    if len(rows) != len(numbers):
        return f"{len(rows)} rows came back instead of {len(numbers)}"
    if sorted(rows[:, 0].tolist()) != list(numbers):
        return "other rows came back than were written"
    return None
