"""``FlowState``: what a partition remembers for its flow policy: its version, tickets and evictions.

A prompt that is admitted gets a *ticket*, the lowest number that is free. Tickets ``n * batch`` up to
``(n + 1) * batch`` are those of step ``n``. A prompt that goes before it was trained gives its ticket back,
so that another can have it: a step is never left short by a generation that failed.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

__all__ = ["FlowState", "SavedFlow"]

_REPORTED = 65_536  # evicted samples that are kept for whoever asks; older ones are only counted


class SavedFlow(msgspec.Struct):
    """A flow state as a checkpoint has it; rows are places in the list of samples."""

    version: int = 0
    next_ticket: int = 0
    free: list[int] = []
    tickets: dict[int, int] = {}
    trained: list[int] = []
    begun: dict[int, int] = {}
    evicted: dict[str, int] = {}
    closed_short: dict[str, int] = {}
    reported: list[tuple[str, dict[str, Any]]] = []


class FlowState:
    """The version of a partition, its tickets, and what was evicted and why."""

    def __init__(self) -> None:
        self.version = 0
        self.tickets: dict[int, int] = {}
        self.begun: dict[int, int] = {}  # the version at which a row was claimed for generation
        self.evicted: Counter[str] = Counter()
        self.closed_short: Counter[str] = Counter()
        self.reported: deque[tuple[str, dict[str, Any]]] = deque(maxlen=_REPORTED)
        self._next_ticket = 0
        self._free: list[int] = []
        self._rows: Counter[int] = Counter()  # live rows by ticket
        self._trained: set[int] = set()
        # Tickets that may still have to be trained; those that need not be go when they come to the front.
        self._open: list[int] = []

    @property
    def admitted(self) -> int:
        """How many prompts have a ticket, or had one and were trained."""
        return self._next_ticket - len(self._free)

    def admit(self, prompts: Sequence[Sequence[int]]) -> None:
        """Give each prompt (its rows) a ticket, if it has none."""
        for rows in prompts:
            for row in rows:
                self.begun[row] = self.version
            if rows[0] in self.tickets:
                continue
            if self._free:
                ticket = heapq.heappop(self._free)
            else:
                ticket, self._next_ticket = self._next_ticket, self._next_ticket + 1
            for row in rows:
                self.tickets[row] = ticket
            self._rows[ticket] += len(rows)
            heapq.heappush(self._open, ticket)

    def train(self, rows: Sequence[int]) -> None:
        """Rows were claimed for training."""
        self._trained.update(self.tickets[row] for row in rows if row in self.tickets)

    def untrain(self, rows: Sequence[int]) -> None:
        """Rows that were claimed for training came back."""
        for ticket in {self.tickets[row] for row in rows if row in self.tickets}:
            self._trained.discard(ticket)
            heapq.heappush(self._open, ticket)

    def remove(self, rows: Sequence[int], *, reuse: bool) -> None:
        """Rows are gone. ``reuse``: a ticket that was never trained may be given to another prompt."""
        for row in rows:
            self.begun.pop(row, None)
            ticket = self.tickets.pop(row, None)
            if ticket is None:
                continue
            self._rows[ticket] -= 1
            if self._rows[ticket]:
                continue
            del self._rows[ticket]
            if ticket in self._trained:
                self._trained.discard(ticket)
            elif reuse:
                heapq.heappush(self._free, ticket)

    def current_step(self, batch: int) -> int:
        """The first step that has a prompt which is still to be trained."""
        while self._open and (self._open[0] not in self._rows or self._open[0] in self._trained):
            heapq.heappop(self._open)
        return (self._open[0] if self._open else self._next_ticket) // batch

    def is_issued(self, step: int, batch: int) -> bool:
        """Whether every ticket of a step is with a prompt."""
        return self._next_ticket >= (step + 1) * batch and not any(t // batch <= step for t in self._free)

    def report(self, sample_id: str, tags: Mapping[str, Any], reason: str) -> None:
        """Remember a sample that was evicted, for whoever issues its prompt again."""
        self.evicted[reason] += 1
        self.reported.append((sample_id, {**tags, "evicted": reason}))

    def take_reported(self, limit: int | None) -> list[tuple[str, dict[str, Any]]]:
        """Evicted samples that nobody has been told of yet, the oldest first."""
        count = len(self.reported) if limit is None else min(limit, len(self.reported))
        return [self.reported.popleft() for _ in range(count)]

    def saved(self, places: Mapping[int, int]) -> SavedFlow:
        """For a checkpoint; ``places`` has the place of each row."""
        return SavedFlow(
            self.version,
            self._next_ticket,
            list(self._free),
            {places[row]: ticket for row, ticket in self.tickets.items()},
            sorted(self._trained),
            {places[row]: version for row, version in self.begun.items()},
            dict(self.evicted),
            dict(self.closed_short),
            list(self.reported),
        )

    def load(self, saved: SavedFlow, rows: Sequence[int]) -> None:
        """Take over what a checkpoint has; ``rows`` has the row of each place."""
        self.version, self._next_ticket = saved.version, saved.next_ticket
        self._free = sorted(saved.free)
        self.tickets = {rows[place]: ticket for place, ticket in saved.tickets.items()}
        self._rows = Counter(self.tickets.values())
        self._trained = set(saved.trained)
        self._open = sorted(self._rows.keys() - self._trained)
        self.begun = {rows[place]: version for place, version in saved.begun.items()}
        self.evicted, self.closed_short = Counter(saved.evicted), Counter(saved.closed_short)
        self.reported.extend(saved.reported)
