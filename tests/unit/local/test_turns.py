"""Turns: everything asked is served once and in order, whoever was quiet at once, and nobody for ever."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rlplane.adapters.local.turns import IDLE_S, QUIET_PER_CLIENT_S, QUIET_S, TURN_S, Turns

OWNERS = st.integers(0, 5)
CROWD = SEATS = 2


def busy_until_the_turn_is_over(turns, owners, now=0.0):
    """Let clients ask without a pause until their turns are over; the time it is then."""
    for owner in owners:
        assert turns.take(owner, "first", now)
    while now + QUIET_S / 2 < TURN_S:
        now += QUIET_S / 2
        for owner in owners:
            assert turns.take(owner, "another", now)
    return now + QUIET_S / 2


def test_who_is_no_crowd_never_waits():
    turns = Turns(CROWD, SEATS)
    now = 0.0
    for _ in range(100):
        now += QUIET_S / 2
        for owner in range(CROWD):
            assert turns.take(owner, "request", now)
        assert not turns.next(now)


def test_whose_turn_is_over_waits_until_there_is_a_seat_and_then_has_a_whole_turn():
    turns = Turns(CROWD, SEATS)
    now = busy_until_the_turn_is_over(turns, [1, 2, 3, 4])
    for owner in (1, 2):
        assert not turns.take(owner, owner, now)
        assert turns.next(now) == []
    for owner in (3, 4):
        assert not turns.take(owner, owner, now)
        assert turns.next(now) == [owner - 2]
    assert turns.next(now) == []
    began = now
    while (now := now + QUIET_S / 2) < began + TURN_S:
        assert turns.take(1, "another", now) and turns.take(2, "another", now)
    assert not turns.take(1, "one too many", now)


def test_who_was_quiet_is_served_at_once_however_many_are_busy_and_wait():
    turns = Turns(CROWD, SEATS)
    now = busy_until_the_turn_is_over(turns, [1, 2, 3, 4])
    assert not turns.take(1, "request", now)
    assert turns.take(9, "rare", now)
    assert turns.take(4, "after a pause", now + QUIET_S)


def test_of_a_crowd_fewer_are_busy_at_a_time_until_it_is_none_any_more():
    turns = Turns(3, 1)
    now = busy_until_the_turn_is_over(turns, [1, 2, 3, 4])
    for owner in (1, 2, 3):
        assert not turns.take(owner, owner, now)
        assert turns.next(now) == []
    assert not turns.take(4, 4, now)
    assert turns.next(now) == [1]
    assert turns.next(now) == []
    turns.rest(1)
    # Three are no crowd.
    assert [turns.next(now), turns.next(now), turns.next(now)] == [[2], [3], [4]]


def test_clients_that_are_served_at_once_do_not_keep_the_others_in_line():
    """Each of them pauses long enough to be served at once, and together they are always busy."""
    turns = Turns(CROWD, SEATS)
    now = busy_until_the_turn_is_over(turns, [1, 2, 3])
    assert not turns.take(1, "one", now)
    served = []
    for step in range(1000):
        now += IDLE_S / 2
        assert turns.take(100 + step % (3 * round(QUIET_S / IDLE_S)), "now and then", now)
        served += turns.next(now)
    assert served == ["one"]


def test_a_crowd_that_is_slow_to_ask_does_not_pass_for_quiet_clients():
    """So many that each comes to ask only when the time of quiet is over, as when they all use one cache."""
    turns = Turns(CROWD, SEATS)
    many = range(round(2 * QUIET_S / QUIET_PER_CLIENT_S))
    now, waited = 0.0, 0
    for _ in range(20):
        for owner in many:
            now += QUIET_S * 1.5 / len(many)
            waited += not turns.take(owner, "request", now)
    assert waited > len(many)


def test_seats_of_those_who_went_quiet_are_given_to_others():
    turns = Turns(CROWD, SEATS)
    now = busy_until_the_turn_is_over(turns, [1, 2, 3])
    assert not turns.take(3, "three", now)
    assert turns.next(now) == []
    assert turns.next(now + QUIET_S) == ["three"]


def test_when_nobody_asks_anything_the_next_goes_on_at_once():
    turns = Turns(CROWD, SEATS)
    now = busy_until_the_turn_is_over(turns, [1, 2, 3])
    assert not turns.take(3, "three", now)
    assert turns.next(now + IDLE_S, idle=True) == ["three"]


def test_who_waits_for_another_client_gives_its_seat_away():
    turns = Turns(CROWD, SEATS)
    now = busy_until_the_turn_is_over(turns, [1, 2, 3])
    assert not turns.take(3, "three", now)
    turns.rest(1)
    assert turns.next(now) == ["three"]


def test_the_threads_of_a_client_wait_together():
    turns = Turns(CROWD, SEATS)
    now = busy_until_the_turn_is_over(turns, [1, 2, 3])
    assert not turns.take(1, "one thread", now)
    assert not turns.take(1, "another", now)
    assert len(turns) == 1
    turns.rest(2)
    assert turns.next(now) == ["one thread", "another"]


class TurnsAreFair(RuleBasedStateMachine):
    """Against a list of what was asked and not served yet."""

    def __init__(self):
        super().__init__()
        self.turns, self.now, self.asked = Turns(3, 2), 0.0, 0
        self.line = defaultdict(list)  # by owner, in the order in which they began to wait
        self.last = {}
        self.advanced = 0.0

    @rule(owner=OWNERS)
    def ask(self, owner):
        self.asked += 1
        quiet = owner not in self.last or self.now - self.last[owner] >= QUIET_S
        at_once = self.turns.take(owner, self.asked, self.now)
        if at_once:
            assert owner not in self.line
        else:
            assert owner in self.line or not quiet
            if not self.line:
                self.advanced = self.now
            self.line[owner].append(self.asked)
        self.last[owner] = self.now

    @rule(seconds=st.sampled_from([0.0, IDLE_S, QUIET_S / 2, QUIET_S, TURN_S, 2 * TURN_S]))
    def wait(self, seconds):
        self.now += seconds

    @rule(idle=st.booleans())
    def serve(self, idle):
        served = self.turns.next(self.now, idle=idle)
        assert served or not self.line or self.now - self.advanced < TURN_S
        if served:
            self.advanced = self.now
            first = next(iter(self.line))
            assert served == self.line.pop(first)
            self.last[first] = self.now

    @rule(owner=OWNERS)
    def rest(self, owner):
        self.turns.rest(owner)

    @rule(owner=OWNERS)
    def pull(self, owner):
        assert self.turns.pull(owner) == self.line.pop(owner, [])

    @invariant()
    def as_many_wait_as_were_told_to(self):
        assert len(self.turns) == len(self.line)

    def teardown(self):
        # All that waits is served in the end.
        for _ in range(len(self.line)):
            self.now += TURN_S
            self.serve(idle=False)
        assert not self.line and not self.turns


TestTurnsAreFair = TurnsAreFair.TestCase
TestTurnsAreFair.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
