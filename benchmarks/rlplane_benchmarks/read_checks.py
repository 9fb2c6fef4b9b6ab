"""Whether an engine gave back what it was given, noted for every read of a run."""

from __future__ import annotations

from rlplane_benchmarks.results import Check

__all__ = ["ReadChecks"]

_FAULTS_KEPT = 5


class ReadChecks:
    """The reads of one participant."""

    def __init__(self, participant: str) -> None:
        self._participant = participant
        self._reads = 0
        self._wrong: list[str] = []

    def add(self, where: str, wrong: str | None, reads: int = 1) -> None:
        """Note reads that were compared with what was written, and what was wrong with one, if anything."""
        self._reads += reads
        if wrong and len(self._wrong) < _FAULTS_KEPT:
            self._wrong.append(f"{where}: {wrong}")

    def result(self, failure: str | None = None) -> Check:
        return Check(self._participant, self._reads, self._wrong, failure)
