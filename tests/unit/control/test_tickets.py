"""The tickets of a flow policy, against dictionaries that do the obvious thing."""

from __future__ import annotations

import heapq
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlplane.control.flow import NO_TICKET, FlowState, SavedFlow

ROWS = 12
BATCH = 3


class Dictionaries:
    """Tickets by row, and what was trained, in dictionaries and sets."""

    def __init__(self) -> None:
        self.tickets: dict[int, int] = {}
        self.trained: set[int] = set()
        self.free: list[int] = []
        self.next = 0

    def admit(self, prompts: list[list[int]]) -> None:
        for rows in prompts:
            if rows[0] not in self.tickets:
                if self.free:
                    ticket = heapq.heappop(self.free)
                else:
                    ticket, self.next = self.next, self.next + 1
                self.tickets.update(dict.fromkeys(rows, ticket))

    def train(self, rows: list[int]) -> None:
        self.trained |= {self.tickets[row] for row in rows if row in self.tickets}

    def untrain(self, rows: list[int]) -> None:
        self.trained -= {self.tickets[row] for row in rows if row in self.tickets}

    def remove(self, rows: list[int], reuse: bool) -> None:
        for row in rows:
            ticket = self.tickets.pop(row, None)
            if ticket is None or ticket in self.tickets.values():
                continue
            if ticket not in self.trained and reuse:
                heapq.heappush(self.free, ticket)
            self.trained.discard(ticket)

    def current_step(self) -> int:
        return min([self.next, *(set(self.tickets.values()) - self.trained)]) // BATCH

    def is_issued(self, step: int) -> bool:
        return self.next >= (step + 1) * BATCH and not any(t // BATCH <= step for t in self.free)


rows_ = st.lists(st.integers(0, ROWS - 1), unique=True, min_size=1, max_size=8)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("admit"), rows_, st.just(0)),
        st.tuples(st.just("admit"), rows_, st.just(0)),
        st.tuples(st.just("train"), rows_, st.just(0)),
        st.tuples(st.just("untrain"), rows_, st.just(0)),
        st.tuples(st.just("remove"), rows_, st.booleans()),
        st.tuples(st.just("reload"), rows_, st.just(0)),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(steps, st.booleans(), st.integers(0, 200))
def test_tickets_are_given_trained_and_reused_as_by_dictionaries(
    steps: list[Any], grouped: bool, begin_at: int
) -> None:
    flow, model = FlowState(ROWS), Dictionaries()
    flow.load(SavedFlow(next_ticket=begin_at), np.empty(0, np.int64))
    model.next = begin_at
    for kind, rows, reuse in steps:
        if kind == "admit":
            # Rows of a group are two neighbours, and all of them are claimed together.
            pairs = [[2 * (row // 2), 2 * (row // 2) + 1] for row in rows] if grouped else [[r] for r in rows]
            prompts = [list(pair) for pair in dict.fromkeys(map(tuple, pairs))]
            prompts = [p for p in prompts if len({model.tickets.get(row) for row in p}) == 1]
            if prompts:
                places = np.repeat(np.arange(len(prompts)), [len(prompt) for prompt in prompts])
                flow.admit(np.concatenate(prompts).astype(np.int64), places if grouped else None)
                model.admit(prompts)
        elif kind == "remove":
            flow.remove(np.array(rows, np.int64), reuse=reuse)
            model.remove(rows, reuse)
        elif kind == "reload":
            saved = msgspec.convert(msgspec.to_builtins(flow.saved(np.arange(ROWS))), SavedFlow, strict=False)
            flow = FlowState(ROWS)
            flow.load(saved, np.arange(ROWS))
        else:
            getattr(flow, kind)(np.array(rows, np.int64))
            getattr(model, kind)(rows)
        known = {
            row: ticket
            for row, ticket in enumerate(flow.tickets(slice(None)).tolist())
            if ticket != NO_TICKET
        }
        assert known == model.tickets
        assert flow.admitted == model.next - len(model.free)
        step = flow.current_step(BATCH)
        assert step == model.current_step()
        for which in (step, step + 1):
            assert flow.is_issued(which, BATCH) == model.is_issued(which)
            of_step = {row for row, ticket in model.tickets.items() if ticket // BATCH == which}
            assert set(flow.rows_of_step(which, BATCH).tolist()) == of_step


def test_what_is_done_with_takes_no_room() -> None:
    flow = FlowState(8)
    rows = np.arange(8)
    for _ in range(1000):
        flow.admit(rows)
        flow.train(rows)
        flow.remove(rows, reuse=True)
    assert flow.admitted == 8000 and len(flow._row) <= 64


@pytest.mark.parametrize(
    "saved",
    [
        SavedFlow(next_ticket=2**40, tickets={0: 1}),
        SavedFlow(next_ticket=1, tickets={0: 1}),
        SavedFlow(next_ticket=1, trained=[1]),
        SavedFlow(next_ticket=1, tickets={0: 2**40}),
    ],
)
def test_tickets_of_a_checkpoint_that_cannot_be_are_refused(saved: SavedFlow) -> None:
    with pytest.raises(ValueError, match="tickets"):
        FlowState(4).load(saved, np.arange(4))
