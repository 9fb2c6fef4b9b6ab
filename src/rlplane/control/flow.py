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
_PIECE = 512
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
        # Of the tickets from _oldest on: how many live rows have each, one of them, and whether it was
        # trained. All older ones are done with.
        self._oldest = 0
        self._rows = np.zeros(64, np.int64)
        self._row = np.zeros(64, np.int64)
        self._trained = np.zeros(64, bool)
        self._first_open = 0  # no earlier ticket has still to be trained

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
        tickets = self._issue(len(fresh))
        places = tickets - self._oldest
        self._row[places] = fresh
        if prompts is None:
            self.tickets[fresh] = tickets
            self._rows[places] = 1
        else:
            of_prompt = np.full(len(heads), NO_TICKET)
            of_prompt[is_fresh] = tickets
            of_row = of_prompt[prompts]
            self.tickets[rows[of_row != NO_TICKET]] = of_row[of_row != NO_TICKET]
            self._rows[places] = np.bincount(prompts)[is_fresh]

    def _issue(self, count: int) -> Rows:
        """The next tickets: those that came back first, in order."""
        again = [heapq.heappop(self._free) for _ in range(min(count, len(self._free)))]
        first_new = self._next_ticket
        self._next_ticket += count - len(again)
        new = np.arange(first_new, self._next_ticket)
        self._make_room(again[0] if again else first_new)
        if not again:
            return new
        self._first_open = min(self._first_open, again[0])
        return np.concatenate((np.array(again, np.int64), new))

    def train(self, rows: Rows) -> None:
        """Rows were claimed for training."""
        self._trained[self._tickets_of(rows) - self._oldest] = True

    def untrain(self, rows: Rows) -> None:
        """Rows that were claimed for training came back."""
        tickets = self._tickets_of(rows)
        if len(tickets):
            self._trained[tickets - self._oldest] = False
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
            for ticket in (gone[~self._trained[gone]] + self._oldest).tolist():
                heapq.heappush(self._free, ticket)
        self._trained[gone] = False

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
        self._rows, self._row, self._trained = (
            grown(column[done:], size, 0) for column in (self._rows, self._row, self._trained)
        )
        self._oldest += done

    def current_step(self, batch: int) -> int:
        """The first step that has a prompt which is still to be trained."""
        at = max(self._first_open, self._oldest)
        # Mostly it is the one that it was.
        is_known = (
            at < self._next_ticket and self._rows[at - self._oldest] and not self._trained[at - self._oldest]
        )
        while at < self._next_ticket and not is_known:
            piece = slice(at - self._oldest, min(at + _PIECE, self._next_ticket) - self._oldest)
            found = np.flatnonzero((self._rows[piece] > 0) & ~self._trained[piece])
            if len(found):
                at += int(found[0])
                break
            at += _PIECE
        self._first_open = min(at, self._next_ticket)
        return self._first_open // batch

    def rows_of_step(self, step: int, batch: int) -> Rows:
        """The live rows that have the tickets of a step, in no order."""
        first = max(step * batch - self._oldest, 0)
        last = max(min((step + 1) * batch, self._next_ticket) - self._oldest, 0)
        rows = self._rows[first:last]
        one_of_each: Rows = self._row[first:last][rows > 0]
        if int(rows.sum()) == len(one_of_each) and self.are_of_step(one_of_each, step, batch).all():
            return one_of_each
        # Of a group there are several, or the one that was known has gone.
        every = np.arange(len(self.tickets))
        return every[self.are_of_step(every, step, batch)]

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
            (np.flatnonzero(self._trained) + self._oldest).tolist(),
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
        self._trained[np.array(saved.trained, np.int64) - self._oldest] = True
        self.evicted, self.closed_short = Counter(saved.evicted), Counter(saved.closed_short)
        self.reported.extend(saved.reported)
