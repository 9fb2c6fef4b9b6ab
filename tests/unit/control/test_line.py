"""Who gets room next: nobody is held up for ever, and nobody starves."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from rlplane.control.line import FIRST_PATIENCE_S, WaitingLine

CAPACITY = 100
LONGEST_HOLD_S = 3.0
STEP_S = 0.25


@dataclass(eq=False)
class Wish:
    size: int
    first: bool = False


def rank(wish: Wish) -> int:
    return 0 if wish.first else 1


class Room:
    """Room that is given out through a line, by a clock that the test moves."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.capacity, self.used, self.now = capacity, 0, 0.0
        self.line: WaitingLine[Wish] = WaitingLine()
        self.served: list[Wish] = []

    def wish(self, size: int, *, first: bool = False) -> Wish:
        wish = Wish(size, first)
        self.line.append(wish, self.now)
        self.serve()
        return wish

    def give_back(self, size: int) -> None:
        self.used -= size
        self.serve()

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        if self.line.due <= self.now:
            self.serve()

    def serve(self) -> None:
        self.line.serve(self.now, lambda: self.capacity - self.used, self._admit, rank)

    def _admit(self, wish: Wish) -> bool:
        if self.used + wish.size > self.capacity:
            return False
        self.used += wish.size
        self.served.append(wish)
        return True


def test_what_is_given_back_adds_up_for_the_first_in_line() -> None:
    room = Room()
    room.wish(100)
    large, small = room.wish(60), room.wish(10)
    for _ in range(5):
        room.give_back(10)
        room.pass_time(FIRST_PATIENCE_S / 2)
    assert large not in room.served and small not in room.served
    room.give_back(10)
    assert large in room.served and small not in room.served


def test_one_that_fits_overtakes_when_nothing_is_given_back_for_a_while() -> None:
    room = Room()
    room.wish(90)
    large, small, too_large = room.wish(60), room.wish(5), room.wish(20)
    assert small not in room.served
    assert room.line.due == FIRST_PATIENCE_S
    room.pass_time(FIRST_PATIENCE_S)
    assert small in room.served and large not in room.served and too_large not in room.served
    assert room.line.due == float("inf")
    late = room.wish(5)
    assert late in room.served, "nothing was given back since, and it fits"


def test_each_pause_in_which_one_is_overtaken_makes_it_twice_as_patient() -> None:
    room = Room()
    room.wish(90)
    room.wish(60)
    for patience in (FIRST_PATIENCE_S, 2 * FIRST_PATIENCE_S, 4 * FIRST_PATIENCE_S):
        room.wish(10)
        room.pass_time(patience)
        small = room.served[-1]
        assert small.size == 10
        room.give_back(10)
        assert room.line.due == float("inf"), "nobody is held up"
        held_up = room.wish(10)
        assert room.line.due == room.now + 2 * patience
        room.line.remove(held_up)


def test_a_rank_that_changes_is_noticed_without_more_room() -> None:
    line: WaitingLine[Wish] = WaitingLine()
    wish = Wish(10)
    line.append(wish, 0.0)
    for _ in range(2):
        line.serve(0.0, lambda: 5, lambda wish: wish.first, rank)
    assert list(line) == [wish]
    wish.first = True
    line.serve(0.0, lambda: 5, lambda wish: wish.first, rank)
    assert not line


def test_the_first_rank_goes_first_whenever_it_came() -> None:
    room = Room()
    room.wish(100)
    new, live = room.wish(10), room.wish(10, first=True)
    room.give_back(10)
    assert live in room.served and new not in room.served


def test_when_the_first_in_line_leaves_the_next_is_tried() -> None:
    room = Room()
    room.wish(90)
    large, small = room.wish(60), room.wish(10)
    room.line.remove(large)
    room.serve()
    assert small in room.served and not room.line


@settings(max_examples=60, deadline=None)
@given(
    large=st.integers(20, CAPACITY),
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=12),
    holds=st.lists(st.floats(STEP_S, LONGEST_HOLD_S), min_size=1, max_size=12),
    per_step=st.integers(1, 4),
)
def test_a_large_one_is_served_however_many_small_ones_keep_coming(
    large: int, sizes: list[int], holds: list[float], per_step: int
) -> None:
    room, hold, size = Room(), itertools.cycle(holds), itertools.cycle(sizes)
    ends: list[tuple[float, int]] = []
    known = 0
    wish: Wish | None = None
    for step in range(1600):
        for _ in range(per_step):
            room.wish(next(size))
        if step == 40:
            wish = room.wish(large)
        ends += [(room.now + next(hold), served.size) for served in room.served[known:]]
        known = len(room.served)
        assert room.used == sum(held for _, held in ends) <= CAPACITY
        if wish in room.served:
            return
        over = [end for end in ends if end[0] <= room.now]
        ends = [end for end in ends if end[0] > room.now]
        for _, held in over:
            room.give_back(held)
        ends += [(room.now + next(hold), served.size) for served in room.served[known:]]
        known = len(room.served)
        room.pass_time(STEP_S)
        ends += [(room.now + next(hold), served.size) for served in room.served[known:]]
        known = len(room.served)
    raise AssertionError(f"{large} of {CAPACITY} was not served within {room.now:.0f} s")


@settings(max_examples=100, deadline=None)
@given(waiting=st.lists(st.integers(1, CAPACITY), min_size=1, max_size=20), used=st.integers(1, CAPACITY))
def test_whoever_fits_is_served_although_nothing_is_ever_given_back(waiting: list[int], used: int) -> None:
    room = Room()
    room.wish(used)
    wishes = [room.wish(size) for size in waiting]
    room.pass_time(FIRST_PATIENCE_S)
    left = CAPACITY - room.used
    assert all(wish.size > left for wish in wishes if wish not in room.served)
