"""``FlowState``: what a partition remembers for its flow policy: its version, tickets and evictions.

A prompt that is admitted gets a *ticket*, the lowest number that is free. Tickets ``n * batch`` up to
``(n + 1) * batch`` are those of step ``n``. A prompt that goes before it was trained gives its ticket back,
so that another can have it: a step is never left short by a generation that failed.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from rlplane.control.arrays import grown
from rlplane.control.fields import Rows

__all__ = ["NEVER", "NO_TICKET", "FlowState", "SavedFlow"]

NO_TICKET = -1
NEVER = -1
_MOST_TICKETS = 2**26  # from the oldest that is in use to the newest: what a checkpoint may make room for
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

    def __init__(self, size: int) -> None:
        self.version = 0
        self.is_used = False  # whether a row ever got a ticket, or was claimed for generation
        self.tickets = np.full(size, NO_TICKET, np.int64)  # by row
        self.begun = np.full(size, NEVER, np.int64)  # the version at which a row was claimed for generation
        self.evicted: Counter[str] = Counter()
        self.closed_short: Counter[str] = Counter()
        self.reported: deque[tuple[str, dict[str, Any]]] = deque(maxlen=_REPORTED)
        self._next_ticket = 0
        self._free: list[int] = []
        # Of the tickets from _oldest on: how many live rows have each, one of them (the one, unless there
        # are groups), and whether it is open: with a prompt, and still to be trained. All older ones are done
        # with.
        self._oldest = 0
        self._rows = np.zeros(64, np.int64)
        self._row = np.zeros(64, np.int64)
        self._open = np.zeros(64, bool)
        self._first_open = 0  # no earlier ticket is open
        self._has_groups = False

    @property
    def admitted(self) -> int:
        """How many prompts have a ticket, or had one and were trained."""
        return self._next_ticket - len(self._free)

    def grow(self, size: int) -> None:
        """Make room for rows up to ``size``."""
        self.tickets = grown(self.tickets, size, NO_TICKET)
        self.begun = grown(self.begun, size, NEVER)

    def begin(self, rows: Rows) -> None:
        """Rows were claimed for generation."""
        self.is_used = True
        self.begun[rows] = self.version

    def admit(self, rows: Rows, prompts: Rows | None = None) -> None:
        """Give each prompt a ticket, if it has none. ``prompts`` has for each row the number (from 0 on) of
        its prompt; without, each row is one."""
        self.begin(rows)
        heads = rows if prompts is None else rows[np.unique(prompts, return_index=True)[1]]
        is_fresh = self.tickets[heads] == NO_TICKET
        fresh = heads[is_fresh]
        if not len(fresh):
            return
        tickets, places = self._issue(len(fresh))
        self._row[places] = fresh
        self._open[places] = True
        if prompts is None:
            self.tickets[fresh] = tickets
            self._rows[places] = 1
        else:
            self._has_groups = True
            of_prompt = np.full(len(heads), NO_TICKET)
            of_prompt[is_fresh] = tickets
            of_row = of_prompt[prompts]
            self.tickets[rows[of_row != NO_TICKET]] = of_row[of_row != NO_TICKET]
            self._rows[places] = np.bincount(prompts)[is_fresh]

    def _issue(self, count: int) -> tuple[Rows, Rows | slice]:
        """The next tickets, those that came back first, in order; and where they are in the columns."""
        again = [heapq.heappop(self._free) for _ in range(min(count, len(self._free)))] if self._free else []
        first_new = self._next_ticket
        self._next_ticket += count - len(again)
        new = np.arange(first_new, self._next_ticket)
        self._make_room(again[0] if again else first_new)
        if not again:
            return new, slice(first_new - self._oldest, self._next_ticket - self._oldest)
        self._first_open = min(self._first_open, again[0])
        tickets = np.concatenate((np.array(again, np.int64), new))
        return tickets, tickets - self._oldest

    def train(self, rows: Rows) -> None:
        """Rows were claimed for training."""
        tickets = self.tickets[rows]
        self._open[tickets[tickets != NO_TICKET] - self._oldest] = False

    def untrain(self, rows: Rows) -> None:
        """Rows that were claimed for training came back."""
        tickets = self._tickets_of(rows)
        if len(tickets):
            self._open[tickets - self._oldest] = True
            self._first_open = min(self._first_open, int(tickets.min()))

    def _tickets_of(self, rows: Rows) -> Rows:
        tickets = self.tickets[rows]
        found: Rows = tickets[tickets != NO_TICKET]
        return found

    def remove(self, rows: Rows, *, reuse: bool) -> None:
        """Rows are gone. ``reuse``: a ticket that was never trained may be given to another prompt."""
        tickets = self._tickets_of(rows)
        self.tickets[rows], self.begun[rows] = NO_TICKET, NEVER
        if not len(tickets):
            return
        places, counts = np.unique(tickets - self._oldest, return_counts=True)
        self._rows[places] -= counts
        gone = places[self._rows[places] == 0]
        if reuse:
            for ticket in (gone[self._open[gone]] + self._oldest).tolist():
                heapq.heappush(self._free, ticket)
        self._open[gone] = False

    def _make_room(self, first: int) -> None:
        """Have an entry for every ticket that was given out and is not done with, or is not before the
        ``first``."""
        length = self._next_ticket - self._oldest
        if length <= len(self._rows):
            return
        in_use = np.flatnonzero(self._rows)
        done = int(in_use[0]) if len(in_use) else len(self._rows)
        done = min([done, first - self._oldest, *(ticket - self._oldest for ticket in self._free[:1])])
        size = max(64, 2 * (length - done))
        self._rows, self._row, self._open = (
            grown(column[done:], size, 0) for column in (self._rows, self._row, self._open)
        )
        self._oldest += done

    def current_step(self, batch: int) -> int:
        """The first step that has a prompt which is still to be trained."""
        at, end = max(self._first_open - self._oldest, 0), self._next_ticket - self._oldest
        if at < end and not self._open[at]:
            at += int(self._open[at:end].argmax())  # the first, if there is one
            at = at if self._open[at] else end
        self._first_open = at + self._oldest
        return self._first_open // batch

    def rows_of_step(self, step: int, batch: int) -> Rows:
        """The live rows that have the tickets of a step, in no order."""
        if self._has_groups:
            every = np.arange(len(self.tickets))
            return every[self.are_of_step(every, step, batch)]
        first = step * batch - self._oldest
        of_step = slice(max(first, 0), max(first + batch, 0))  # after the last ticket there are no rows
        rows: Rows = self._row[of_step][self._rows[of_step] > 0]
        return rows

    def are_of_step(self, rows: Rows, step: int, batch: int) -> NDArray[np.bool_]:
        """For each row, whether it has a ticket of a step."""
        tickets = self.tickets[rows]
        found: NDArray[np.bool_] = (tickets >= step * batch) & (tickets < (step + 1) * batch)
        return found

    def is_issued(self, step: int, batch: int) -> bool:
        """Whether every ticket of a step is with a prompt."""
        return self._next_ticket >= (step + 1) * batch and not (self._free and self._free[0] // batch <= step)

    def report(self, sample_id: str, tags: Mapping[str, Any], reason: str) -> None:
        """Remember a sample that was evicted, for whoever issues its prompt again."""
        self.evicted[reason] += 1
        self.reported.append((sample_id, {**tags, "evicted": reason}))

    def take_reported(self, limit: int | None) -> list[tuple[str, dict[str, Any]]]:
        """Evicted samples that nobody has been told of yet, the oldest first."""
        count = len(self.reported) if limit is None else min(limit, len(self.reported))
        return [self.reported.popleft() for _ in range(count)]

    def saved(self, rows: Rows) -> SavedFlow:
        """For a checkpoint that has these rows in this order."""
        tickets, begun = self.tickets[rows], self.begun[rows]
        with_ticket, with_begin = np.flatnonzero(tickets != NO_TICKET), np.flatnonzero(begun != NEVER)
        return SavedFlow(
            self.version,
            self._next_ticket,
            list(self._free),
            dict(zip(with_ticket.tolist(), tickets[with_ticket].tolist(), strict=True)),
            (np.flatnonzero((self._rows > 0) & ~self._open) + self._oldest).tolist(),
            dict(zip(with_begin.tolist(), begun[with_begin].tolist(), strict=True)),
            dict(self.evicted),
            dict(self.closed_short),
            list(self.reported),
        )

    def load(self, saved: SavedFlow, rows: Rows) -> None:
        """Take over what a checkpoint has; ``rows`` has the row of each place."""
        self.version, self._next_ticket = saved.version, saved.next_ticket
        self._free = sorted(saved.free)
        self.is_used = bool(saved.tickets or saved.begun)
        self.tickets[rows[list(saved.tickets)]] = list(saved.tickets.values())
        self.begun[rows[list(saved.begun)]] = list(saved.begun.values())
        live = np.array(list(saved.tickets.values()), np.int64)
        known = [*live.tolist(), *saved.trained, *self._free]
        self._first_open = self._oldest = min([self._next_ticket, *known])
        if max(known, default=-1) >= self._next_ticket or self._next_ticket - self._oldest > _MOST_TICKETS:
            raise ValueError(f"its tickets are not {_MOST_TICKETS} at most, below {self._next_ticket}")
        self._make_room(self._oldest)
        np.add.at(self._rows, live - self._oldest, 1)
        self._row[live - self._oldest] = rows[list(saved.tickets)]
        self._has_groups = bool((self._rows > 1).any())
        self._open = self._rows > 0
        self._open[np.array(saved.trained, np.int64) - self._oldest] = False
        self.evicted, self.closed_short = Counter(saved.evicted), Counter(saved.closed_short)
        self.reported.extend(saved.reported)
