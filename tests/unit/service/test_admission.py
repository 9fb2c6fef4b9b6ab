"""Columns of samples that exist come before new samples, and part of the room is theirs alone."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.service.service_harness import FOREVER, Desk

from rlplane.service import protocol as wire
from rlplane.service.clients import PendingRequest
from rlplane.service.questions import status_of
from rlplane.storage.shm.arena import PAGE

LIMIT = 20
KEPT = 2


@pytest.fixture
def desk() -> Desk:
    return a_desk()


def a_desk(capacity: int = 1000) -> Desk:
    desk = Desk(limit=LIMIT, segment=LIMIT, capacity=capacity, reserve_for_live=KEPT / LIMIT)
    for client in range(3):
        desk.service.connect(client)
    desk.register(fields=["x", "y"])
    return desk


def room_for(desk: Desk, ids: list[str], size: int, *, client: int = 1) -> PendingRequest:
    return desk.post(client, wire.Reserve(size * PAGE, FOREVER, "p", ids))


def put(desk: Desk, ids: list[str], size: int) -> None:
    place = desk.answers[room_for(desk, ids, size, client=0)].place
    assert desk.answers[desk.commit(0, ids, place, size)] == wire.Done()


def test_new_samples_leave_the_share_of_those_that_exist_alone(desk: Desk) -> None:
    put(desk, ["a"], LIMIT - KEPT)
    new = room_for(desk, ["b"], 1)
    assert new not in desk.answers
    column = room_for(desk, ["a"], KEPT)
    assert desk.answers[column].place.size == KEPT * PAGE
    assert new not in desk.answers


def test_a_put_of_old_and_new_samples_is_one_of_new_samples(desk: Desk) -> None:
    put(desk, ["a"], LIMIT - KEPT)
    assert room_for(desk, ["a", "b"], 1) not in desk.answers
    assert room_for(desk, ["c"], 1) not in desk.answers


def test_columns_of_existing_samples_overtake_new_samples_that_wait(desk: Desk) -> None:
    put(desk, ["a"], 4)
    put(desk, ["b"], LIMIT - KEPT - 4)
    new = room_for(desk, ["c"], 4)
    full = room_for(desk, ["b"], KEPT)
    column = room_for(desk, ["b"], 2)
    assert full in desk.answers and column not in desk.answers
    desk.ask(0, wire.Clear("p", ["a"]))
    assert column in desk.answers and new not in desk.answers


def test_a_put_that_waits_for_new_samples_is_served_when_another_has_made_them(desk: Desk) -> None:
    put(desk, ["a"], LIMIT - KEPT - 1)
    place = desk.answers[room_for(desk, ["b"], 1, client=0)].place
    second_column_of_b = room_for(desk, ["b"], 1)
    assert second_column_of_b not in desk.answers
    desk.commit(0, ["b"], place, 1)
    assert second_column_of_b in desk.answers


def test_a_checkpoint_may_use_all_of_the_room(desk: Desk) -> None:
    assert desk.answers[desk.reserve(1, LIMIT)].place.size == LIMIT * PAGE


def test_a_put_larger_than_the_room_for_new_samples_is_taken_by_an_empty_plane(desk: Desk) -> None:
    put(desk, ["a"], 1)
    large = room_for(desk, ["b"], LIMIT - 1)
    assert large not in desk.answers
    desk.ask(0, wire.Clear("p", ["a"]))
    assert desk.answers[large].place.size == (LIMIT - 1) * PAGE


def test_a_small_put_overtakes_a_large_one_after_a_pause_without_clears(desk: Desk) -> None:
    put(desk, ["a"], 10)
    large, small = room_for(desk, ["b"], 12), room_for(desk, ["c"], 1)
    assert small not in desk.answers
    assert desk.service.next_deadline() < 1.0
    desk.pass_time(1.0)
    assert small in desk.answers and large not in desk.answers
    assert desk.service.next_deadline() == FOREVER


def test_a_spare_place_is_taken_back_before_anyone_waits_for_the_share(desk: Desk) -> None:
    place = desk.answers[room_for(desk, ["a"], 8, client=0)].place
    answer = desk.answers[desk.commit(0, ["a"], place, 8, want=8 * PAGE)]
    assert answer.spare is None  # more than half would be in use
    place = desk.answers[room_for(desk, ["b"], 1, client=0)].place
    answer = desk.answers[desk.commit(0, ["b"], place, 1, want=PAGE)]
    assert answer.spare is not None
    assert room_for(desk, ["c"], 9) in desk.answers
    assert status_of(desk.service)["reserved"] == 9 * PAGE


def test_new_samples_that_wait_for_the_capacity_are_overtaken_after_a_pause() -> None:
    desk = a_desk(capacity=4)
    put(desk, ["a", "b", "c"], 1)

    def commit(ids: list[str]) -> PendingRequest:
        place = desk.answers[room_for(desk, ids, 1)].place
        return desk.commit(1, ids, place, 1, timeout_s=5.0)

    large, small = commit(["d", "e"]), commit(["f"])
    assert large not in desk.answers and small not in desk.answers
    desk.pass_time(1.0)
    assert isinstance(desk.answers[small], wire.Done) and large not in desk.answers
    late = commit(["g"])
    desk.pass_time(10.0)
    assert {desk.answers[request].kind for request in (large, late)} == {"CapacityTimeoutError"}


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("new"), st.integers(1, LIMIT)),
        st.tuples(st.just("live"), st.integers(1, LIMIT)),
        st.tuples(st.just("drop"), st.integers(0, 30)),
        st.tuples(st.just("wait"), st.integers(1, 20)),
    ),
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(steps=STEPS)
def test_the_share_is_never_given_to_new_samples_and_nothing_twice(steps: list[tuple[str, int]]) -> None:
    desk = a_desk()
    put(desk, ["live"], 1)
    held: list[int] = []
    new: set[PendingRequest] = set()
    live: set[PendingRequest] = set()
    granted_to_new: list[int] = []

    def hear() -> None:
        for request in [request for request in desk.answers if request in new or request in live]:
            place = desk.answers.pop(request).place
            held.append(place.number)
            if request in new:
                new.remove(request)
                granted_to_new.append(place.size)
            else:
                live.remove(request)

    for kind, number in steps:
        granted_to_new.clear()
        before = desk.used
        if kind == "new":
            new.add(room_for(desk, [f"new-{number}"], number))
        elif kind == "live":
            live.add(room_for(desk, ["live"], number))
        elif kind == "drop" and held:
            desk.ask(1, wire.Unreserve(held.pop(number % len(held))))
        elif kind == "wait":
            desk.pass_time(number / 10)
        hear()
        assert desk.used <= LIMIT * PAGE
        if granted_to_new and kind == "new":
            assert before + granted_to_new[0] <= (LIMIT - KEPT) * PAGE
    # Everything that was given comes back, and then everybody is served: nobody was forgotten.
    desk.ask(0, wire.Clear("p", None))
    for _ in steps:
        while held:
            desk.ask(1, wire.Unreserve(held.pop()))
            hear()
        desk.pass_time(1000.0)
        hear()
    assert not new and not live
