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

NO_TICKET = -1
_NO_TICKET = np.array(NO_TICKET)  # a comparison with an array takes half the time
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
        self.places = np.full(size, NO_TICKET, np.int64)  # by row, where its ticket is in the columns below
        # The version at which a row was claimed for generation, unless it had to be admitted: then it never
        # becomes too old.
        self.begun = np.full(size, NEVER, np.int64)
        self.evicted: Counter[str] = Counter()
        self.closed_short: Counter[str] = Counter()
        self.reported: deque[tuple[str, dict[str, Any]]] = deque(maxlen=_REPORTED)
        self._next_ticket = 0
        self._free: list[int] = []
        # Of the tickets from _oldest on: the row that got it (with groups, one of them), how many others have
        # it, whether it is done with (trained, or without a prompt; all older ones are), and its place. The
        # last entry is never that of a ticket: it is where NO_TICKET leads to.
        self._oldest = 0
        self._row = np.zeros(64, np.int64)
        self._others = np.zeros(64, np.int64)
        self._done = np.zeros(64, bool)
        self._numbers = np.arange(64)
        self._first_open = 0  # all earlier tickets are done with
        self._has_groups = False

    @property
    def admitted(self) -> int:
        """How many prompts have a ticket, or had one and were trained."""
        return self._next_ticket - len(self._free)

    def tickets(self, rows: Rows | slice) -> Rows:
        """The ticket of each of these rows."""
        places = self.places[rows]
        return np.where(places == NO_TICKET, NO_TICKET, places + self._oldest)

    def grow(self, size: int) -> None:
        """Make room for rows up to ``size``."""
        self.places = grown(self.places, size, NO_TICKET)
        self.begun = grown(self.begun, size, NEVER)

    def begin(self, rows: Rows) -> None:
        """Rows were claimed for generation, by a policy that admits all."""
        self.is_used = True
        self.begun[rows] = self.version

    def admit(self, rows: Rows, prompts: Rows | None = None) -> None:
        """Give each prompt a ticket, if it has none. ``prompts`` has for each row the number (from 0 on) of
        its prompt; without, each row is one."""
        self.is_used = True
        heads = rows if prompts is None else rows[np.unique(prompts, return_index=True)[1]]
        is_fresh = self.places[heads] == _NO_TICKET
        fresh = heads[is_fresh]
        if not len(fresh):
            return
        places = self._issue(len(fresh))
        self._row[places] = fresh
        if prompts is None:
            self.places[fresh] = places
        else:
            self._has_groups = True
            of_prompt = np.full(len(heads), NO_TICKET)
            of_prompt[is_fresh] = places
            of_row = of_prompt[prompts]
            self.places[rows[of_row != NO_TICKET]] = of_row[of_row != NO_TICKET]
            self._others[places] = np.bincount(prompts)[is_fresh] - 1

    def _issue(self, count: int) -> Rows:
        """The places of the next tickets, those that came back first, in order."""
        again = [heapq.heappop(self._free) for _ in range(min(count, len(self._free)))] if self._free else []
        first_new = self._next_ticket
        self._next_ticket += count - len(again)
        self._make_room(again[0] if again else first_new)
        new = self._numbers[first_new - self._oldest : self._next_ticket - self._oldest]
        if not again:
            return new
        self._first_open = min(self._first_open, again[0])
        places = np.array(again, np.int64) - self._oldest
        self._others[places], self._done[places] = 0, False
        return np.concatenate((places, new))

    def train(self, rows: Rows) -> None:
        """Rows were claimed for training."""
        self._done[self.places[rows]] = True

    def untrain(self, rows: Rows) -> None:
        """Rows that were claimed for training came back."""
        places = self._places_of(rows)
        if len(places):
            self._done[places] = False
            self._first_open = min(self._first_open, int(places.min()) + self._oldest)

    def _places_of(self, rows: Rows | slice) -> Rows:
        places = self.places[rows]
        found: Rows = places[places != NO_TICKET]
        return found

    def remove(self, rows: Rows, *, reuse: bool) -> None:
        """Rows are gone. ``reuse``: a ticket that was never trained may be given to another prompt."""
        places = self._places_of(rows)
        self.places[rows], self.begun[rows] = NO_TICKET, NEVER
        if not len(places):
            return
        places, counts = np.unique(places, return_counts=True)
        self._others[places] -= counts
        gone = places[self._others[places] < 0]
        if reuse:
            for ticket in (gone[~self._done[gone]] + self._oldest).tolist():
                heapq.heappush(self._free, ticket)
        self._done[gone] = True

    def _make_room(self, first: int) -> None:
        """Have an entry for every ticket that was given out and is not done with, or is not before the
        ``first``."""
        length = self._next_ticket - self._oldest
        if length < len(self._row):
            return
        in_use = self._places_of(slice(None))
        done = int(in_use.min()) if len(in_use) else len(self._row)
        done = min([done, first - self._oldest, *(ticket - self._oldest for ticket in self._free[:1])])
        # So large that moving the places of all rows costs little for each ticket.
        size = max(64, 2 * (length - done), len(self.places))
        self._done[NO_TICKET] = False  # from here on it is that of a ticket
        self._row, self._others, self._done = (
            grown(column[done:], size, 0) for column in (self._row, self._others, self._done)
        )
        self.places[self.places != NO_TICKET] -= done
        self._oldest += done
        self._numbers = np.arange(size)

    def current_step(self, batch: int) -> int:
        """The first step that has a prompt which is still to be trained."""
        at, end = max(self._first_open - self._oldest, 0), self._next_ticket - self._oldest
        if at < end and self._done[at]:
            at += int(self._done[at:end].argmin())  # the first, if there is one
            at = end if self._done[at] else at
        self._first_open = at + self._oldest
        return self._first_open // batch

    def rows_of_step(self, step: int, batch: int) -> Rows:
        """The live rows that have the tickets of a step, in no order."""
        if self._has_groups:
            every = np.arange(len(self.places))
            return every[self.are_of_step(every, step, batch)]
        first = step * batch - self._oldest
        of_step = slice(max(first, 0), max(first + batch, 0))
        rows = self._row[of_step]
        live: Rows = rows[self.places[rows] == self._numbers[of_step]]
        return live

    def are_of_step(self, rows: Rows, step: int, batch: int) -> NDArray[np.bool_]:
        """For each row, whether it has a ticket of a step."""
        places, first = self.places[rows], step * batch - self._oldest
        found: NDArray[np.bool_] = (places >= max(first, 0)) & (places < first + batch)
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
        tickets, begun = self.tickets(rows), self.begun[rows]
        is_trained = np.zeros(len(self._done), bool)
        is_trained[self._places_of(slice(None))] = True
        is_trained &= self._done
        with_ticket, with_begin = np.flatnonzero(tickets != NO_TICKET), np.flatnonzero(begun != NEVER)
        return SavedFlow(
            self.version,
            self._next_ticket,
            list(self._free),
            dict(zip(with_ticket.tolist(), tickets[with_ticket].tolist(), strict=True)),
            (np.flatnonzero(is_trained) + self._oldest).tolist(),
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
        self.begun[rows[list(saved.begun)]] = list(saved.begun.values())
        live = np.array(list(saved.tickets.values()), np.int64)
        known = [*live.tolist(), *saved.trained, *self._free]
        self._first_open = self._oldest = min([self._next_ticket, *known])
        if max(known, default=-1) >= self._next_ticket or self._next_ticket - self._oldest > _MOST_TICKETS:
            raise ValueError(f"its tickets are not {_MOST_TICKETS} at most, below {self._next_ticket}")
        self._make_room(self._oldest)
        self.places[rows[list(saved.tickets)]] = live - self._oldest
        self._row[live - self._oldest] = rows[list(saved.tickets)]
        given_out = self._next_ticket - self._oldest
        counts = np.bincount(live - self._oldest, minlength=given_out)
        self._others[:given_out] = counts - 1
        self._has_groups = bool((counts > 1).any())
        self._done[:given_out] = counts == 0
        self._done[np.array(saved.trained, np.int64) - self._oldest] = True
        self.evicted, self.closed_short = Counter(saved.evicted), Counter(saved.closed_short)
        self.reported.extend(saved.reported)
