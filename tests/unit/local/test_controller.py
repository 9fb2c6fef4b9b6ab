"""The controller without sockets: memory for puts, spares, leases, deadlines, and what clients leave."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.unit.local.controller_harness import FOREVER, Desk, layout_of

from rlplane.adapters.local import wire
from rlplane.adapters.local.arena import PAGE, pages
from rlplane.adapters.local.controller import IDLE_SEGMENT_S, Caller
from rlplane.adapters.local.wire import Extent
from rlplane.rules import PartitionSpec


@pytest.fixture
def desk() -> Desk:
    desk = Desk()
    for owner in range(4):
        desk.controller.connect(owner)
    desk.register()
    return desk


# Room


def test_a_reservation_is_as_large_as_asked_and_given_back_when_the_put_fails(desk: Desk) -> None:
    extent = desk.answers[desk.reserve(0, 3)].extent
    assert extent.size == desk.arena.used == 3 * PAGE
    assert desk.ask(0, wire.Unreserve(extent.number)) == wire.Done()
    assert desk.arena.used == 0
    # Of somebody else's extent, or of one that is not reserved any more, there is nothing to give back.
    assert desk.ask(1, wire.Unreserve(extent.number)) == wire.Done()


def test_a_commit_gives_back_what_it_did_not_use(desk: Desk) -> None:
    extent = desk.answers[desk.reserve(0, 4)].extent
    assert desk.answers[desk.commit(0, ["a"], extent, 1)] == wire.Done()
    assert desk.arena.used == PAGE


def test_reservations_that_wait_for_room_are_served_in_order(desk: Desk) -> None:
    desk.put(0, ["a"], 4)
    desk.put(0, ["b"], 12)
    large, small = desk.reserve(1, 6), desk.reserve(2, 1)
    assert large not in desk.answers and small not in desk.answers
    desk.ask(0, wire.Clear("p", ["a"]))
    assert large not in desk.answers and small not in desk.answers
    desk.ask(0, wire.Clear("p", ["b"]))
    assert desk.answers[large].extent.size == 6 * PAGE
    assert desk.answers[small].extent.size == PAGE


def test_a_put_larger_than_the_arena_is_refused_at_once(desk: Desk) -> None:
    answer = desk.answers[desk.reserve(0, 17)]
    assert answer.kind == "CapacityError"
    assert answer.message == "a put of 69,632 bytes can never fit into global_segment_size 65,536"


def test_a_reservation_that_runs_out_of_time_is_told_how_full_it_is(desk: Desk) -> None:
    desk.put(0, ["a"], 16)
    waiting = desk.reserve(1, 2, timeout_s=5.0)
    assert desk.controller.next_deadline() == 5.0
    desk.pass_time(4.9)
    assert waiting not in desk.answers
    desk.pass_time(0.1)
    answer = desk.answers[waiting]
    assert answer.kind == "CapacityTimeoutError"
    assert answer.message.startswith(
        "no room for 8,192 bytes: 65,536 of global_segment_size 65,536 are in use"
    )


@pytest.mark.parametrize("how", ["timeout", "abandon", "close", "death"])
def test_when_the_first_in_line_leaves_the_next_one_moves_up(desk: Desk, how: str) -> None:
    desk.put(0, ["a"], 8)
    large, small = desk.reserve(1, 12, timeout_s=5.0, channel=1), desk.reserve(2, 2)
    assert small not in desk.answers
    if how == "timeout":
        desk.pass_time(5.0)
    elif how == "abandon":
        desk.controller.abandon(large.owner, large.number)
    else:
        desk.controller.disconnect(1, died=how == "death")
    assert desk.answers[small].extent.size == 2 * PAGE


@pytest.mark.parametrize("fault", ["stale", "too much", "duplicates", "unknown", "rest"])
def test_memory_that_a_failed_commit_gives_back_goes_to_who_waits_for_it(desk: Desk, fault: str) -> None:
    extent = desk.answers[desk.reserve(0, 16)].extent
    waiting = desk.reserve(1, 10)
    if fault == "stale":
        answer = desk.answers[desk.commit(0, ["a"], extent, 16, version=0)]
        assert answer.kind == "StaleSpecError"
    elif fault == "too much":
        answer = desk.answers[desk.commit(0, ["a"], extent, 16, used=17 * PAGE)]
        assert answer.kind == "InvalidRequestError"
    elif fault == "duplicates":
        answer = desk.answers[desk.commit(0, ["a", "a"], extent, 16)]
        assert answer.kind == "InvalidRequestError"
    elif fault == "unknown":
        request = wire.Commit("q", 1, ["a"], ["x"], [layout_of(PAGE, 1)], extent.number, PAGE, FOREVER)
        assert desk.ask(0, request).kind == "UnknownPartitionError"
    else:
        assert desk.answers[desk.commit(0, ["a"], extent, 2)] == wire.Done()
    assert desk.answers[waiting].extent.size == 10 * PAGE


def test_shared_memory_that_cannot_be_made_is_the_requests_failure(desk: Desk) -> None:
    def full(number: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    desk.arena._create = full
    answer = desk.answers[desk.reserve(0, 1)]
    assert answer.kind == "CapacityError"
    assert "the controller cannot make shared memory" in answer.message and "No space" in answer.message
    assert desk.arena.used == 0


def test_one_who_waits_is_told_when_shared_memory_cannot_be_made(desk: Desk) -> None:
    def full(number: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    desk.put(0, ["a"], 16)
    waiting, behind = desk.reserve(1, 16), desk.reserve(2, 1)
    desk.arena.give_back(FOREVER)
    desk.arena._create = full
    desk.ask(0, wire.Clear("p", ["a"]))
    assert desk.answers[waiting].extent.size == 16 * PAGE or desk.answers[waiting].kind == "CapacityError"
    assert behind not in desk.answers or desk.answers[behind].extent


# Spares


def test_a_spare_comes_with_the_answer_and_is_used_without_asking(desk: Desk) -> None:
    spare = desk.put(0, ["a"], 1, want=2 * PAGE).spare
    assert spare is not None and spare.size == 2 * PAGE
    assert desk.on_offer == {0: spare.number}
    assert desk.take_spare(0, spare)
    assert desk.answers[desk.commit(0, ["b"], spare, 2)] == wire.Done()
    assert desk.arena.used == 3 * PAGE


def test_a_spare_is_given_only_when_there_is_plenty_and_nobody_waits(desk: Desk) -> None:
    assert desk.put(0, ["a"], 7, want=2 * PAGE).spare is None
    desk.ask(0, wire.Clear("p", None))
    mine = desk.answers[desk.reserve(0, 2)].extent
    desk.reserve(1, 15)
    assert desk.answers[desk.commit(0, ["b"], mine, 2, want=PAGE)].spare is None


def test_a_spare_that_is_too_small_is_exchanged_for_a_larger_one(desk: Desk) -> None:
    first = desk.put(0, ["a"], 1, want=PAGE).spare
    second = desk.put(0, ["b"], 1, want=3 * PAGE).spare
    assert first and second and second.size == 3 * PAGE
    assert desk.put(0, ["c"], 1, want=2 * PAGE).spare is None
    # The old one is no longer the client's, even if an answer with the new one is still under way.
    assert not desk.take_spare(0, first)
    assert desk.take_spare(0, second)


def test_spares_are_taken_back_from_those_who_do_not_use_them(desk: Desk) -> None:
    spare = desk.put(0, ["a"], 1, want=4 * PAGE).spare
    assert spare and desk.answers[desk.reserve(1, 12)].extent.size == 12 * PAGE
    assert desk.on_offer == {} and not desk.take_spare(0, spare)
    answer = desk.answers[desk.commit(0, ["b"], spare, 1)]
    assert answer.kind == "InvalidRequestError" and "is not reserved" in answer.message


def test_a_clients_own_spare_does_not_stand_in_its_way(desk: Desk) -> None:
    assert desk.put(0, ["a"], 1, want=4 * PAGE).spare
    desk.ask(0, wire.Clear("p", None))
    assert desk.answers[desk.reserve(0, 16)].extent.size == 16 * PAGE


def test_a_spare_that_is_in_use_is_not_taken_back(desk: Desk) -> None:
    spare = desk.put(0, ["a"], 1, want=4 * PAGE).spare
    assert spare and desk.take_spare(0, spare)
    waiting = desk.reserve(1, 15)
    assert waiting not in desk.answers
    assert desk.answers[desk.commit(0, ["b"], spare, 1)] == wire.Done()


def test_a_spare_that_was_taken_and_not_written_is_given_back(desk: Desk) -> None:
    spare = desk.put(0, ["a"], 1, want=4 * PAGE).spare
    assert spare and desk.take_spare(0, spare)
    assert desk.ask(0, wire.Unreserve(spare.number)) == wire.Done()
    assert desk.arena.used == PAGE
    assert desk.put(0, ["b"], 1, want=4 * PAGE).spare is not None


def test_a_spare_is_not_used_up_by_a_request_that_names_another_extent(desk: Desk) -> None:
    spare = desk.put(0, ["a"], 1, want=4 * PAGE).spare
    assert spare
    desk.ask(0, wire.Unreserve(spare.number + 50))
    wrong = Extent(spare.number + 50, spare.segment, spare.offset, spare.size)
    assert desk.answers[desk.commit(0, ["b"], wrong)].kind == "InvalidRequestError"
    assert desk.take_spare(0, spare)
    assert desk.answers[desk.commit(0, ["b"], spare)] == wire.Done()


# Commits


def full_of_samples() -> tuple[Desk, wire.Extent]:
    """A plane of two samples that has them, and an extent of three pages for client 1."""
    desk = Desk(capacity=2)
    for owner in (0, 1):
        desk.controller.connect(owner)
    desk.register()
    desk.put(0, ["a", "b"], 1)
    extent = desk.answers[desk.reserve(1, 3)].extent
    return desk, extent


def test_a_commit_that_waits_for_samples_keeps_its_bytes_and_gives_them_back_when_it_gives_up() -> None:
    desk, extent = full_of_samples()
    waiting = desk.commit(1, ["c"], extent, 3, timeout_s=2.0)
    assert waiting not in desk.answers and desk.arena.used == 4 * PAGE
    desk.pass_time(2.0)
    assert desk.answers[waiting].kind == "CapacityTimeoutError"
    assert desk.arena.used == PAGE
    assert desk.ask(0, wire.ListIds("p")).value == ["a", "b"]


def test_a_commit_that_waits_for_samples_is_answered_by_the_clear_with_a_spare() -> None:
    desk, extent = full_of_samples()
    waiting = desk.commit(1, ["c"], extent, 3, want=PAGE)
    desk.ask(0, wire.Clear("p", ["a"]))
    assert desk.answers[waiting].spare.size == PAGE
    assert desk.ask(0, wire.ListIds("p")).value == ["b", "c"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"fields": ["x", "x"]}, "one layout per field"),
        ({"fields": []}, "one layout per field"),
        ({"layouts": [layout_of(2 * PAGE, 2)]}, "do not fit into its extent"),
        ({"layouts": [layout_of(PAGE, 1)]}, "another number of rows"),
        ({"ids": ["a", "a"]}, "not distinct"),
        ({"ids": ["a", ""]}, "not distinct, non-empty"),
        ({"tags": [{}]}, "one tag per id"),
        ({"used": 0}, "0 bytes do not fit into an extent of 4096"),
        ({"used": PAGE + 1}, "4097 bytes do not fit"),
        ({"extent": None}, "needs the extent"),
        ({"extent": 99}, "extent 99 is not reserved for this client"),
    ],
)
def test_a_commit_that_makes_no_sense_is_refused_and_leaves_nothing(
    desk: Desk, changes: dict[str, Any], reason: str
) -> None:
    extent = desk.answers[desk.reserve(0, 1)].extent
    right: dict[str, Any] = {
        "partition_id": "p",
        "version": 1,
        "ids": ["a", "b"],
        "fields": ["x"],
        "layouts": [layout_of(PAGE, 2)],
        "extent": extent.number,
        "used": PAGE,
        "timeout_s": 0.0,
    }
    answer = desk.ask(0, wire.Commit(**(right | changes)))
    assert answer.kind == "InvalidRequestError" and reason in answer.message
    desk.controller.disconnect(0, died=True)
    assert desk.arena.used == 0 and not desk.controller._blocks and not desk.controller._extent_refs
    assert desk.ask(1, wire.ListIds("p")).value == []


def test_an_extent_without_fields_is_given_back(desk: Desk) -> None:
    extent = desk.answers[desk.reserve(0, 2)].extent
    request = wire.Commit("p", 1, ["a"], [], [], extent.number, 1, FOREVER, [{"v": 1}])
    assert desk.ask(0, request) == wire.Done()
    assert desk.arena.used == 0 and desk.ask(0, wire.ListIds("p")).value == ["a"]


# Claims and reads


def test_a_claim_that_waits_is_answered_by_the_write_or_by_the_clock(desk: Desk) -> None:
    first, second = desk.claim(1, 2, blocking=True), desk.claim(2, 1, blocking=True, timeout_s=3.0)
    desk.put(0, ["a"])
    desk.pass_time(3.0)
    answer = desk.answers[second]
    assert (answer.kind, answer.ready) == ("ClaimTimeoutError", 1)
    desk.put(0, ["b"])
    assert desk.answers[first].ids == ["a", "b"]


def test_an_interrupted_claim_gives_back_what_it_was_answered(desk: Desk) -> None:
    desk.put(0, ["a", "b"])
    caller = desk.claim(1, 1, channel=1)
    desk.controller.abandon(caller.owner, caller.number)
    assert desk.claimed(2, 2) == ["a", "b"]


def test_an_interrupted_claim_that_still_waits_is_forgotten(desk: Desk) -> None:
    caller = desk.claim(1, 1, blocking=True, channel=1)
    desk.controller.abandon(caller.owner, caller.number)
    desk.put(0, ["a"])
    assert caller not in desk.answers and desk.claimed(2, 1) == ["a"]


def test_an_interrupted_reservation_or_read_holds_nothing(desk: Desk) -> None:
    desk.put(0, ["a"])
    for request in (wire.Reserve(PAGE, FOREVER), wire.Locate("p", ["a"], ["x"]), wire.Freeze()):
        caller = desk.post(1, request, channel=1)
        assert desk.answers[caller]
        desk.controller.abandon(caller.owner, caller.number)
    desk.ask(0, wire.Clear("p", None))
    assert desk.arena.used == 0


def test_an_answer_that_was_used_is_not_undone_by_a_later_interruption(desk: Desk) -> None:
    reserved = desk.reserve(0, 1, channel=1)
    committed = desk.commit(0, ["a"], desk.answers[reserved].extent, channel=1)
    desk.controller.abandon(committed.owner, committed.number)
    desk.claim(1, 1, channel=2)
    located = desk.post(1, wire.Locate("p", ["a"], ["x"]), channel=2)
    desk.controller.abandon(1, located.number + 1)
    assert desk.claimed(2, 1) == []
    desk.ask(0, wire.Clear("p", None))
    assert desk.arena.used == PAGE, "the read still holds its lease"


def test_what_is_read_is_not_recycled_until_it_is_dropped(desk: Desk) -> None:
    desk.put(0, ["a", "b"], 2)
    located = desk.ask(1, wire.Locate("p", ["b", "a"], ["x"]))
    again = desk.ask(2, wire.Locate("p", ["a"], ["x"]))
    desk.ask(0, wire.Clear("p", None))
    assert desk.arena.used == 2 * PAGE
    desk.controller.release(1, located.lease)
    desk.controller.release(1, located.lease)  # twice is once
    desk.controller.release(2, located.lease)  # and not somebody else's
    assert desk.arena.used == 2 * PAGE
    desk.ask(2, wire.ListIds("p"), released=(again.lease,))
    assert desk.arena.used == 0


def test_a_lease_that_comes_back_makes_room_for_who_waits(desk: Desk) -> None:
    desk.put(0, ["a"], 16)
    located = desk.ask(1, wire.Locate("p", ["a"], ["x"]))
    desk.ask(0, wire.Clear("p", None))
    waiting = desk.reserve(0, 16)
    assert waiting not in desk.answers
    desk.controller.release(1, located.lease)
    assert desk.answers[waiting].extent.size == 16 * PAGE


def test_places_are_told_as_neighbours_when_they_are(desk: Desk) -> None:
    desk.put(0, ["a", "b", "c"])
    located = desk.ask(0, wire.Locate("p", ["b", "c"], ["x"]))
    assert located.places == [wire.Place(2, 0, 1)]
    (index, start, layout) = located.blocks[0]
    assert (index, start, layout.rows) == (0, 0, 3)
    assert desk.ask(0, wire.Locate("p", [], ["x"])).places == [wire.Place(0)]
    scattered = desk.ask(0, wire.Locate("p", ["c", "a", "c"], ["x"])).places[0]
    assert scattered.count == 3 and scattered.positions == b"\2\0\0\0\0\0\0\0\2\0\0\0"


def test_two_fields_of_one_put_share_an_extent(desk: Desk) -> None:
    extent = desk.answers[desk.reserve(0, 2)].extent
    layouts = [layout_of(PAGE, 2), layout_of(PAGE, 2)]
    desk.ask(0, wire.Commit("p", 1, ["a", "b"], ["x", "y"], layouts, extent.number, 2 * PAGE, FOREVER))
    located = desk.ask(1, wire.Locate("p", ["a"], ["y", "x"]))
    assert len(located.extents) == 1
    assert sorted((index, start) for index, start, _ in located.blocks.values()) == [(0, 0), (0, PAGE)]
    # Overwriting one of them does not free what the other still needs.
    desk.put(0, ["a", "b"], 1)
    desk.controller.release(1, located.lease)
    assert desk.arena.used == 3 * PAGE
    desk.ask(0, wire.Clear("p", None))
    assert desk.arena.used == 0


# Clients go


@pytest.mark.parametrize("died", [True, False])
def test_a_client_that_goes_leaves_nothing_behind_but_what_it_wrote(desk: Desk, died: bool) -> None:
    desk.put(0, ["a"], 1)
    desk.put(1, ["b"], 1, want=2 * PAGE)
    desk.reserve(1, 1)
    desk.ask(1, wire.Locate("p", ["a"], ["x"]))
    waiting = desk.claim(1, 5, blocking=True)
    desk.controller.disconnect(1, died=died)
    assert (waiting in desk.answers) is not died
    assert desk.arena.used == 2 * PAGE
    assert desk.ask(0, wire.Status(None)).value["leases"] == 0
    desk.ask(0, wire.Clear("p", ["a", "b"]))
    assert desk.arena.used == 0
    desk.controller.disconnect(1, died=died)  # once is enough


@pytest.mark.parametrize(("died", "left"), [(True, ["a", "b"]), (False, [])])
def test_only_a_dead_clients_claims_are_handed_out_again(desk: Desk, died: bool, left: list[str]) -> None:
    desk.put(0, ["a", "b"])
    desk.claimed(1, 2)
    desk.controller.disconnect(1, died=died)
    assert desk.claimed(2, 2) == left


def test_a_dead_clients_waiting_commit_never_appears() -> None:
    desk = Desk(capacity=1)
    for owner in (0, 1):
        desk.controller.connect(owner)
    desk.register()
    desk.put(0, ["a"])
    extent = desk.answers[desk.reserve(1, 3)].extent
    desk.commit(1, ["b"], extent, 3)
    desk.controller.disconnect(1, died=True)
    desk.ask(0, wire.Clear("p", None))
    assert desk.ask(0, wire.ListIds("p")).value == [] and desk.arena.used == 0


def test_a_client_that_is_not_connected_is_told(desk: Desk) -> None:
    assert desk.ask(9, wire.ListIds("p")).kind == "PlaneConnectionError"
    assert desk.ask(0, wire.Shutdown()).kind == "InvalidRequestError"


# Time


def test_idle_segments_go_back_to_the_machine_after_a_while(desk: Desk) -> None:
    desk.put(0, ["a"], 4)
    desk.put(0, ["b"], 4)
    desk.pass_time(100.0)
    desk.ask(0, wire.Clear("p", ["a"]))
    desk.pass_time(IDLE_SEGMENT_S)
    desk.controller.give_back_idle()
    assert len(desk.segments) == 2
    desk.pass_time(0.1)
    desk.controller.give_back_idle()
    assert len(desk.segments) == 1
    assert desk.ask(0, wire.Locate("p", ["b"], ["x"])).extents[0].segment in desk.segments


def test_deadlines_of_requests_that_were_answered_are_forgotten(desk: Desk) -> None:
    waiting = desk.claim(1, 1, blocking=True, timeout_s=1e12, where={"v": "never"})
    for number in range(1500):
        desk.claim(2, 1, blocking=True, timeout_s=1000.0, where={"v": number})
        desk.commit(0, [f"s{number}"], None, tags=[{"v": number}])
        extent = desk.answers[desk.reserve(0, 1)].extent
        desk.commit(0, [f"s{number}"], extent)
        desk.ask(0, wire.Clear("p", None))
    desk.controller.expire()
    assert len(desk.controller._deadlines) <= 1025
    desk.controller.disconnect(1, died=False)
    assert desk.answers[waiting].kind == "PlaneConnectionError"


# Checkpoints


def test_a_frozen_plane_can_be_restored_and_the_old_memory_is_recycled(desk: Desk) -> None:
    desk.put(0, ["a", "b"], 1)
    desk.claimed(1, 1)
    frozen = desk.ask(0, wire.Freeze())
    desk.ask(0, wire.Clear("p", None))
    desk.put(0, ["c"], 2)
    waiting = desk.claim(2, 5, blocking=True)
    extent = desk.answers[desk.reserve(0, 4)].extent
    blocks = {number: (extent.number, start, layout) for number, (_, start, layout) in frozen.blocks.items()}
    assert desk.ask(0, wire.Restore(frozen.state, [extent.number], blocks)) == wire.Done()
    assert desk.answers[waiting].kind == "PlaneConnectionError"
    desk.controller.release(0, frozen.lease)
    assert desk.ask(0, wire.ListIds("p")).value == ["a", "b"]
    assert desk.claimed(1, 2) == ["b"]
    assert desk.arena.used == PAGE
    desk.ask(0, wire.Clear("p", None))
    assert desk.arena.used == 0


def test_clients_that_knew_the_old_schema_are_told_after_a_restore(desk: Desk) -> None:
    other = Desk()
    other.controller.connect(0)
    other.register(fields=["x", "new"])
    frozen = other.ask(0, wire.Freeze())
    known = desk.ask(1, wire.Describe("p")).version
    assert desk.ask(0, wire.Restore(frozen.state, [], {})) == wire.Done()
    assert desk.answers[desk.commit(1, ["a"], None, version=known)].kind == "StaleSpecError"
    assert desk.ask(1, wire.Describe("p")).spec.fields == ["x", "new"]


@pytest.mark.parametrize("fault", ["bytes", "extent", "home", "beyond", "before", "missing", "unused"])
def test_a_restore_that_makes_no_sense_is_refused_and_changes_nothing(desk: Desk, fault: str) -> None:
    desk.put(0, ["a"], 1)
    frozen = desk.ask(0, wire.Freeze())
    desk.controller.release(0, frozen.lease)
    extent = desk.answers[desk.reserve(0, 1)].extent
    state, extents = frozen.state, [extent.number]
    ((number, (_, start, layout)),) = frozen.blocks.items()
    blocks = {number: (extent.number, start, layout)}
    if fault == "bytes":
        state = state[:-1]
    elif fault == "extent":
        extents = [extent.number, 99]
    elif fault == "home":
        blocks[number] = (99, start, layout)
    elif fault == "beyond":
        blocks[number] = (extent.number, PAGE, layout)
    elif fault == "before":
        blocks[number] = (extent.number, -PAGE, layout)
    elif fault == "missing":
        blocks = {}
    else:
        blocks[number + 100] = (extent.number, start, layout)
    answer = desk.ask(0, wire.Restore(state, extents, blocks))
    assert answer.kind in ("CheckpointError", "InvalidRequestError")
    assert desk.ask(0, wire.ListIds("p")).value == ["a"]
    desk.ask(0, wire.Unreserve(extent.number))
    desk.ask(0, wire.Clear("p", None))
    assert desk.arena.used == 0 and not desk.controller._extent_refs


# Everything at once

OWNERS = 3
IDS = [f"s{number}" for number in range(6)]


class ControllerMachine(RuleBasedStateMachine):
    """Random requests of several clients: memory is counted, and nobody waits for nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.desk = Desk(limit=12, segment=3, capacity=4)
        for owner in range(OWNERS):
            self.desk.controller.connect(owner)
        self.desk.register(num_samples=6)
        # What each client thinks that it has. It may be wrong about its spare, and about nothing else.
        self.waiting: dict[Caller, int] = {}
        self.reserved: dict[int, list[Extent]] = {owner: [] for owner in range(OWNERS)}
        self.spares: dict[int, Extent | None] = dict.fromkeys(range(OWNERS))
        self.leases: dict[int, list[int]] = {owner: [] for owner in range(OWNERS)}

    owners = st.integers(0, OWNERS - 1)
    sizes = st.integers(1, 5)
    some_ids = st.lists(st.sampled_from(IDS), unique=True, min_size=1, max_size=3)
    timeouts = st.sampled_from([2.0, FOREVER])

    @rule(owner=owners, size=st.integers(1, 13), timeout_s=timeouts)
    def reserve(self, owner: int, size: int, timeout_s: float) -> None:
        self._expect(self.desk.reserve(owner, size, timeout_s, channel=owner + 1))

    @rule(
        owner=owners,
        ids=some_ids,
        want=st.integers(0, 4),
        timeout_s=timeouts,
        fault=st.integers(0, 9),
        data=st.data(),
    )
    def commit(
        self, owner: int, ids: list[str], want: int, timeout_s: float, fault: int, data: st.DataObject
    ) -> None:
        spare = self.spares[owner]
        extent: Extent | None = None
        if spare is not None and self.desk.take_spare(owner, spare):
            extent, self.spares[owner] = spare, None
        elif self.reserved[owner]:
            extent = self.reserved[owner].pop()
        size = 1 if extent is None else data.draw(st.integers(1, extent.size // PAGE))
        more: dict[str, Any] = {"timeout_s": timeout_s, "want": want * PAGE, "channel": owner + 1}
        if fault == 0:
            more["version"] = 0
        elif fault == 1 and extent is not None:
            more["used"] = extent.size + 1
        elif fault == 2:
            more["tags"] = [{}] * (len(ids) + 1)
        self._expect(self.desk.commit(owner, ids, extent, size, **more))

    @rule(owner=owners)
    def unreserve(self, owner: int) -> None:
        spare = self.spares[owner]
        if self.reserved[owner]:
            self._expect(self.desk.post(owner, wire.Unreserve(self.reserved[owner].pop().number)))
        elif spare is not None and self.desk.take_spare(owner, spare):
            self.spares[owner] = None
            self._expect(self.desk.post(owner, wire.Unreserve(spare.number)))

    @rule(owner=owners, size=st.integers(1, 3), blocking=st.booleans(), timeout_s=timeouts)
    def claim(self, owner: int, size: int, blocking: bool, timeout_s: float) -> None:
        self._expect(self.desk.claim(owner, size, blocking=blocking, timeout_s=timeout_s, channel=owner + 1))

    @rule(owner=owners, ids=some_ids)
    def read(self, owner: int, ids: list[str]) -> None:
        live = self.desk.ask(owner, wire.ListIds("p")).value
        wanted = [sample_id for sample_id in ids if sample_id in live] or live
        self._expect(self.desk.post(owner, wire.Locate("p", wanted, ["x"]), channel=owner + 1))

    @rule(owner=owners, with_a_request=st.booleans())
    def drop_what_was_read(self, owner: int, with_a_request: bool) -> None:
        if self.leases[owner]:
            lease = self.leases[owner].pop(0)
            if with_a_request:
                self._expect(self.desk.post(owner, wire.ListIds("p"), released=(lease,)))
            else:
                self.desk.controller.release(owner, lease)
                self._hear()

    @rule(owner=owners, ids=st.none() | some_ids)
    def clear(self, owner: int, ids: list[str] | None) -> None:
        self._expect(self.desk.post(owner, wire.Clear("p", ids)))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def interrupt(self, data: st.DataObject) -> None:
        caller = data.draw(st.sampled_from(list(self.waiting)))
        del self.waiting[caller]
        self.desk.controller.abandon(caller.owner, caller.number)
        self._hear()

    @rule(seconds=st.integers(1, 3))
    def time_passes(self, seconds: int) -> None:
        self.desk.pass_time(seconds)
        self._hear()
        self.desk.controller.give_back_idle()
        deadlines = [at for at, _, caller in self.desk.controller._deadlines if caller in self.waiting]
        assert min(deadlines, default=FOREVER) > self.desk.controller.now

    @rule(number=st.integers(0, 6), freeze=st.booleans())
    def register_or_freeze(self, number: int, freeze: bool) -> None:
        spec = PartitionSpec.checked("p", ["x"], number, ["t"])
        self._expect(self.desk.post(0, wire.Freeze() if freeze else wire.Register(spec)))

    @rule(owner=owners, died=st.booleans())
    def a_client_goes_and_another_comes(self, owner: int, died: bool) -> None:
        self.desk.controller.disconnect(owner, died=died)
        gone = [caller for caller in self.waiting if caller.owner == owner]
        if not died:
            # Whoever waits for a sample or for a place is told; one who waits for bytes has closed itself.
            assert all(caller in self.desk.answers for caller in gone if caller.extent or caller.claim)
        for caller in gone:
            del self.waiting[caller]
            self.desk.answers.pop(caller, None)
        self.reserved[owner], self.leases[owner], self.spares[owner] = [], [], None
        self.desk.on_offer.pop(owner, None)
        self.desk.controller.connect(owner)
        self._hear()

    @invariant()
    def memory_is_counted(self) -> None:
        controller, arena = self.desk.controller, self.desk.arena
        held = [extent for owner in controller._owners.values() for extent in owner.reserved.values()]
        spares = [owner.spare for owner in controller._owners.values() if owner.spare is not None]
        assert arena.used == sum(e.size for e in [*held, *spares, *controller._extents.values()])
        assert {e.number for e in held} == {e.number for mine in self.reserved.values() for e in mine}
        references = [home for home, _, _ in controller._blocks.values()]
        leases = [lease for owner in controller._owners.values() for lease in owner.leases.values()]
        counted = Counter([*references, *itertools.chain.from_iterable(leases)])
        assert controller._extent_refs == counted
        assert controller._extents.keys() == counted.keys()
        parked = {block for put in controller.state._waiting_puts for block in put.blocks.values()}
        assert controller._blocks.keys() == controller.state.blocks().keys() | parked

    @invariant()
    def nobody_waits_for_room_that_is_there(self) -> None:
        waiting = self.desk.controller._waiting_room
        if waiting:
            arena, size = self.desk.arena, pages(waiting[0].nbytes)
            assert not self.desk.on_offer, "a spare could be taken back"
            holes = [room for segment in arena._segments.values() for _, room in segment.free]
            idle = sum(segment.size for segment in arena._segments.values() if not segment.used)
            assert max(holes, default=0) < size and arena.limit - arena.total + idle < size

    @invariant()
    def whoever_is_not_answered_is_parked(self) -> None:
        controller = self.desk.controller
        parked = {*controller.state.parked(), *(room.caller for room in controller._waiting_room)}
        assert parked == self.waiting.keys()

    def teardown(self) -> None:
        controller = self.desk.controller
        for owner in range(OWNERS):
            controller.disconnect(owner, died=owner % 2 == 0)
        controller.connect(99)
        self.desk.ask(99, wire.Clear("p", None))
        assert self.desk.arena.used == 0
        assert not controller._blocks and not controller._extents and not controller._extent_refs
        controller.now += 2 * IDLE_SEGMENT_S
        controller.give_back_idle()
        assert not self.desk.segments

    def _expect(self, caller: Caller) -> None:
        self.waiting[caller] = caller.owner
        self._hear()

    def _hear(self) -> None:
        """Every client reads its answers; each is for a request that was waiting."""
        for caller, answer in self.desk.answers.items():
            if caller.number == 0 or caller not in self.waiting:
                continue
            del self.waiting[caller]
            if isinstance(answer, wire.Reserved):
                self.reserved[caller.owner].append(answer.extent)
            elif isinstance(answer, wire.Done) and answer.spare is not None:
                self.spares[caller.owner] = answer.spare
            elif isinstance(answer, (wire.Located, wire.Frozen)):
                self.leases[caller.owner].append(answer.lease)
        self.desk.answers.clear()


TestControllerCountsEverything = ControllerMachine.TestCase
TestControllerCountsEverything.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
