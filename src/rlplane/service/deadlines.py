"""``Deadlines``: until when requests wait."""

from __future__ import annotations

import heapq
from collections.abc import Collection

from rlplane.service.clients import PendingRequest

_MANY = 1024


class Deadlines:
    """A heap of requests by the end of their time. One that was answered in time stays in it until it is its
    turn, or they are many."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, PendingRequest]] = []
        self.first = float("inf")  # when the first is due
        self._most = _MANY
        self._ticks = 0

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, request: PendingRequest, due: float) -> None:
        """A request waits until then."""
        self._ticks += 1
        heapq.heappush(self._heap, (due, self._ticks, request))
        self._note_first()

    def pop(self) -> PendingRequest:
        """The request that is due first."""
        request = heapq.heappop(self._heap)[2]
        self._note_first()
        return request

    @property
    def are_many(self) -> bool:
        """Whether it is time to :meth:`keep` only those that wait."""
        return len(self._heap) > self._most

    def keep(self, waiting: Collection[object]) -> None:
        """Drop the requests that do not wait any more, if they are most."""
        if len(self._heap) > 4 * len(waiting):
            self._heap = [entry for entry in self._heap if entry[2] in waiting]
            heapq.heapify(self._heap)
            self._note_first()
        self._most = _MANY + 2 * len(self._heap)

    def move_clock(self, seconds: float) -> None:
        """They were set by another clock, which this one is ahead of by so much."""
        self._heap = [(due + seconds, tick, request) for due, tick, request in self._heap]
        self._note_first()

    def _note_first(self) -> None:
        self.first = self._heap[0][0] if self._heap else float("inf")
