"""The control service without sockets: places for puts, spares, leases, deadlines, and what clients leave."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.unit.control.whole_state import dump_state
from tests.unit.service.service_harness import FOREVER, IDLE_SEGMENT_S, Desk, layout_of

from rlplane.control.loading import pieces_of
from rlplane.control.rules import PartitionSpec
from rlplane.service import checkpoints
from rlplane.service import protocol as wire
from rlplane.service.clients import PendingRequest
from rlplane.storage.places import Layout, Place
from rlplane.storage.shm.arena import PAGE, pages


@pytest.fixture
def desk() -> Desk:
    desk = Desk()
    for client in range(4):
        desk.service.connect(client)
    desk.register()
    return desk


# Room


def test_a_reservation_is_as_large_as_asked_and_given_back_when_the_put_fails(desk: Desk) -> None:
    place = desk.answers[desk.reserve(0, 3)].place
    assert place.size == desk.used == 3 * PAGE
    assert desk.ask(0, wire.Unreserve(place.number)) == wire.Done()
    assert desk.used == 0
    # Of somebody else's place, or of one that is not reserved any more, there is nothing to give back.
    assert desk.ask(1, wire.Unreserve(place.number)) == wire.Done()


def test_a_commit_gives_back_what_it_did_not_use(desk: Desk) -> None:
    place = desk.answers[desk.reserve(0, 4)].place
    assert desk.answers[desk.commit(0, ["a"], place, 1)] == wire.Done()
    assert desk.used == PAGE


def test_reservations_that_wait_for_room_are_served_in_order(desk: Desk) -> None:
    desk.put(0, ["a"], 4)
    desk.put(0, ["b"], 12)
    large, small = desk.reserve(1, 6), desk.reserve(2, 1)
    assert large not in desk.answers and small not in desk.answers
    desk.ask(0, wire.Clear("p", ["a"]))
    assert large not in desk.answers and small not in desk.answers
    desk.ask(0, wire.Clear("p", ["b"]))
    assert desk.answers[large].place.size == 6 * PAGE
    assert desk.answers[small].place.size == PAGE


def test_a_put_larger_than_the_arena_is_refused_at_once(desk: Desk) -> None:
    answer = desk.answers[desk.reserve(0, 17)]
    assert answer.kind == "CapacityError"
    assert answer.message == "a put of 69,632 bytes can never fit into global_segment_size 65,536"


@pytest.mark.parametrize("nbytes", [0, -1, -(2**63)])
def test_a_reservation_of_no_bytes_is_refused_and_changes_nothing(desk: Desk, nbytes: int) -> None:
    answer = desk.ask(0, wire.Reserve(nbytes, 1.0))
    assert answer.kind == "InvalidRequestError" and "at least one byte" in answer.message
    desk.put(0, ["a"], 1, want=nbytes)
    assert desk.used == PAGE and desk.service.clients[0].spare is None


def test_a_reservation_that_runs_out_of_time_is_told_how_full_it_is(desk: Desk) -> None:
    desk.put(0, ["a"], 16)
    waiting = desk.reserve(1, 2, timeout_s=5.0)
    assert desk.service.next_deadline() == 5.0
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
        desk.abandon(large)
    else:
        desk.service.disconnect(1, died=how == "death")
    assert desk.answers[small].place.size == 2 * PAGE


@pytest.mark.parametrize("fault", ["stale", "too much", "duplicates", "unknown", "rest"])
def test_memory_that_a_failed_commit_gives_back_goes_to_who_waits_for_it(desk: Desk, fault: str) -> None:
    place = desk.answers[desk.reserve(0, 16)].place
    waiting = desk.reserve(1, 10)
    if fault == "stale":
        answer = desk.answers[desk.commit(0, ["a"], place, 16, version=0)]
        assert answer.kind == "StaleSpecError"
    elif fault == "too much":
        answer = desk.answers[desk.commit(0, ["a"], place, 16, used=17 * PAGE)]
        assert answer.kind == "InvalidRequestError"
    elif fault == "duplicates":
        answer = desk.answers[desk.commit(0, ["a", "a"], place, 16)]
        assert answer.kind == "InvalidRequestError"
    elif fault == "unknown":
        request = wire.Commit("q", 1, ["a"], ["x"], [layout_of(PAGE, 1)], place.number, PAGE, FOREVER)
        assert desk.ask(0, request).kind == "UnknownPartitionError"
    else:
        assert desk.answers[desk.commit(0, ["a"], place, 2)] == wire.Done()
    assert desk.answers[waiting].place.size == 10 * PAGE


def test_shared_memory_that_cannot_be_made_is_the_requests_failure(desk: Desk) -> None:
    def full(number: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    desk.host.arena._create = full
    answer = desk.answers[desk.reserve(0, 1)]
    assert answer.kind == "CapacityError"
    assert "the control service cannot make shared memory" in answer.message and "No space" in answer.message
    assert desk.used == 0


def test_one_who_waits_is_told_when_shared_memory_cannot_be_made(desk: Desk) -> None:
    def full(number: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    desk.put(0, ["a"], 16)
    waiting, behind = desk.reserve(1, 16), desk.reserve(2, 1)
    desk.host.arena.give_back(FOREVER)
    desk.host.arena._create = full
    desk.ask(0, wire.Clear("p", ["a"]))
    assert desk.answers[waiting].place.size == 16 * PAGE or desk.answers[waiting].kind == "CapacityError"
    assert behind not in desk.answers or desk.answers[behind].place


# Spares


def test_a_spare_comes_with_the_answer_and_is_used_without_asking(desk: Desk) -> None:
    spare = desk.put(0, ["a"], 1, want=2 * PAGE).spare
    assert spare is not None and spare.size == 2 * PAGE
    assert desk.host.on_offer == {0: spare.number}
    assert desk.take_spare(0, spare)
    assert desk.answers[desk.commit(0, ["b"], spare, 2)] == wire.Done()
    assert desk.used == 3 * PAGE


def test_a_spare_is_given_only_when_there_is_plenty_and_nobody_waits(desk: Desk) -> None:
    assert desk.put(0, ["a"], 7, want=2 * PAGE).spare is None
    desk.ask(0, wire.Clear("p", None))
    mine = desk.answers[desk.reserve(0, 2)].place
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
    assert spare and desk.answers[desk.reserve(1, 12)].place.size == 12 * PAGE
    assert desk.host.on_offer == {} and not desk.take_spare(0, spare)
    answer = desk.answers[desk.commit(0, ["b"], spare, 1)]
    # A failure of its own kind: the client, which cannot know, writes again to another place.
    assert answer.kind == "StalePlaceError" and "is not reserved" in answer.message


def test_a_clients_own_spare_does_not_stand_in_its_way(desk: Desk) -> None:
    assert desk.put(0, ["a"], 1, want=4 * PAGE).spare
    desk.ask(0, wire.Clear("p", None))
    assert desk.answers[desk.reserve(0, 16)].place.size == 16 * PAGE


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
    assert desk.used == PAGE
    assert desk.put(0, ["b"], 1, want=4 * PAGE).spare is not None


def test_a_spare_is_not_used_up_by_a_request_that_names_another_extent(desk: Desk) -> None:
    spare = desk.put(0, ["a"], 1, want=4 * PAGE).spare
    assert spare
    desk.ask(0, wire.Unreserve(spare.number + 50))
    wrong = Place(spare.number + 50, spare.size, spare.at)
    assert desk.answers[desk.commit(0, ["b"], wrong)].kind == "StalePlaceError"
    assert desk.take_spare(0, spare)
    assert desk.answers[desk.commit(0, ["b"], spare)] == wire.Done()


# Commits


def full_of_samples() -> tuple[Desk, Place]:
    """A plane of two samples that has them, and a place of three pages for client 1."""
    desk = Desk(capacity=2)
    for client in (0, 1):
        desk.service.connect(client)
    desk.register()
    desk.put(0, ["a", "b"], 1)
    place = desk.answers[desk.reserve(1, 3)].place
    return desk, place


def test_a_commit_that_waits_for_samples_keeps_its_bytes_and_gives_them_back_when_it_gives_up() -> None:
    desk, place = full_of_samples()
    waiting = desk.commit(1, ["c"], place, 3, timeout_s=2.0)
    assert waiting not in desk.answers and desk.used == 4 * PAGE
    desk.pass_time(2.0)
    assert desk.answers[waiting].kind == "CapacityTimeoutError"
    assert desk.used == PAGE
    assert desk.ask(0, wire.ListIds("p")).value == ["a", "b"]


def test_a_commit_that_waits_for_samples_is_answered_by_the_clear_with_a_spare() -> None:
    desk, place = full_of_samples()
    waiting = desk.commit(1, ["c"], place, 3, want=PAGE)
    desk.ask(0, wire.Clear("p", ["a"]))
    assert desk.answers[waiting].spare.size == PAGE
    assert desk.ask(0, wire.ListIds("p")).value == ["b", "c"]


def with_offsets(count: int) -> Layout:
    """A ragged column of two rows that keeps ``count`` offsets in its layout."""
    return Layout("jagged", "torch.uint8", (), 2, PAGE, offsets=bytes(8 * count))


def with_pieces(*numbers: int) -> Layout:
    """A column of two trees with one leaf, whose rows refer to these bytes."""
    pieces = np.array(numbers, np.int64).tobytes()
    return Layout("tree", "torch.uint8", (), 2, PAGE, offsets=bytes(24), leaves=["leaf"], pieces=pieces)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"fields": ["x", "x"]}, "one layout per field"),
        ({"fields": []}, "one layout per field"),
        ({"fields": [], "layouts": []}, "of 0 fields do not fit"),
        ({"layouts": [layout_of(2 * PAGE, 2)]}, "do not fit into its place"),
        ({"layouts": [layout_of(PAGE, 1)]}, "another number of rows"),
        ({"ids": ["a", "a"]}, "not distinct"),
        ({"ids": ["a", ""]}, "not distinct, non-empty"),
        ({"ids": [], "layouts": [layout_of(PAGE, 1)]}, "another number of rows"),
        ({"tags": [{}]}, "one tag per id"),
        ({"layouts": [with_offsets(2)]}, "offsets of a commit are not one more"),
        ({"layouts": [with_offsets(4)]}, "offsets of a commit are not one more"),
        ({"layouts": [Layout("dense", "torch.uint8", (1,), 2, -64)]}, "another number of rows"),
        ({"layouts": [with_pieces(0, 0, 0, PAGE + 1)]}, "pieces of a commit are not parts of its block"),
        ({"layouts": [with_pieces(0, 0, -1, 1)]}, "pieces of a commit"),
        ({"layouts": [with_pieces(0, 0, 2, 1)]}, "pieces of a commit"),
        ({"layouts": [with_pieces(2, 0, 0, 1)]}, "pieces of a commit"),
        ({"layouts": [with_pieces(0, 1, 0, 1)]}, "pieces of a commit"),
        ({"layouts": [with_pieces(1, 0, 0, 1, 0, 0, 0, 1)]}, "pieces of a commit"),
        ({"layouts": [with_pieces(0, 0, 0)]}, "pieces of a commit"),
        ({"used": 0}, "0 bytes of 1 fields do not fit into a place of 4096"),
        ({"used": PAGE + 1}, "4097 bytes of 1 fields do not fit"),
        ({"place": None}, "needs the place"),
        ({"place": 99}, "place 99 is not reserved for this client"),
    ],
)
def test_a_commit_that_makes_no_sense_is_refused_and_leaves_nothing(
    desk: Desk, changes: dict[str, Any], reason: str
) -> None:
    place = desk.answers[desk.reserve(0, 1)].place
    right: dict[str, Any] = {
        "partition_id": "p",
        "version": 1,
        "ids": ["a", "b"],
        "fields": ["x"],
        "layouts": [layout_of(PAGE, 2)],
        "place": place.number,
        "used": PAGE,
        "timeout_s": 0.0,
    }
    answer = desk.ask(0, wire.Commit(**(right | changes)))
    kind = "StalePlaceError" if changes.get("place") else "InvalidRequestError"
    assert answer.kind == kind and reason in answer.message
    desk.service.disconnect(0, died=True)
    assert desk.used == 0 and not desk.service.table.blocks and not desk.service.table.references
    assert desk.ask(1, wire.ListIds("p")).value == []


def test_tags_alone_need_no_place(desk: Desk) -> None:
    request = wire.Commit("p", 1, ["a"], [], [], None, 0, FOREVER, [{"v": 1}])
    assert desk.ask(0, request) == wire.Done()
    assert desk.used == 0 and desk.ask(0, wire.ListIds("p")).value == ["a"]


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
    request = desk.claim(1, 1, channel=1)
    desk.abandon(request)
    assert desk.claimed(2, 2) == ["a", "b"]


def test_an_interrupted_claim_that_still_waits_is_forgotten(desk: Desk) -> None:
    request = desk.claim(1, 1, blocking=True, channel=1)
    desk.abandon(request)
    desk.put(0, ["a"])
    assert desk.answers[request].kind == "ClaimTimeoutError", "whether or not somebody reads it"
    assert desk.claimed(2, 1) == ["a"]


def test_an_interrupted_commit_that_waits_for_room_is_never_written() -> None:
    desk, place = full_of_samples()
    request = desk.commit(1, ["c"], place, 3, channel=1)
    desk.abandon(request)
    desk.ask(0, wire.Clear("p", None))
    assert desk.ask(0, wire.ListIds("p")).value == [] and desk.used == 0


def test_a_request_that_is_abandoned_before_it_arrives_is_not_served(desk: Desk) -> None:
    # Over TCP the lifeline may overtake a channel.
    desk.put(0, ["a"])
    desk.service.abandon(1, 1000)
    late = PendingRequest(1, 1000, channel=7)
    body = wire.ClaimRequest("p", "t", ["x"], 1, True, FOREVER)
    desk.service.handle(late, wire.Envelope(body))
    assert desk.answers[late].kind == "PlaneConnectionError"
    assert desk.claimed(2, 1) == ["a"]


def test_what_a_request_takes_along_is_done_before_it(desk: Desk) -> None:
    desk.put(0, ["a"], 16)
    located = desk.ask(1, wire.Locate("p", ["a"], ["x"]))
    lost = desk.claim(1, 1, channel=1)
    assert desk.answers[lost].ids == ["a"]
    answer = desk.ask(
        1,
        wire.ClaimRequest("p", "t", ["x"], 1, False, 0.0),
        released=(located.lease,),
        abandoned=(lost.number,),
    )
    assert answer.ids == ["a"], "the claim that nobody read was undone first"
    desk.ask(0, wire.Clear("p", None))
    assert desk.used == 0


def test_an_interrupted_reservation_or_read_holds_nothing(desk: Desk) -> None:
    desk.put(0, ["a"])
    for asked in (wire.Reserve(PAGE, FOREVER), wire.Locate("p", ["a"], ["x"]), wire.Freeze()):
        request = desk.post(1, asked, channel=1)
        assert desk.answers[request]
        desk.abandon(request)
    desk.ask(0, wire.Clear("p", None))
    assert desk.used == 0


@pytest.mark.parametrize("how", ["withdraw", "hang up"])
def test_withdrawn_requests_end_without_an_answer_and_let_others_move_up(desk: Desk, how: str) -> None:
    desk.put(0, ["a"], 12)
    large, small = desk.reserve(1, 12, channel=1), desk.reserve(2, 2)
    claims = [desk.claim(1, 2, blocking=True, channel=1) for _ in range(3)]
    other = desk.claim(2, 1, blocking=True)
    assert other not in desk.answers, "behind those that wait for two"
    if how == "withdraw":
        desk.ask(1, wire.Withdraw([large.number, *(claim.number for claim in claims)]), channel=1)
    else:
        desk.service.hang_up(1)
    assert desk.answers[small].place.size == 2 * PAGE
    assert desk.answers[other].ids == ["a"]
    assert large not in desk.answers and not any(claim in desk.answers for claim in claims)


def test_a_withdrawn_commit_that_waits_for_room_is_never_written() -> None:
    desk, place = full_of_samples()
    request = desk.commit(1, ["c"], place, 3, channel=1)
    desk.ask(1, wire.Withdraw([request.number]), channel=1)
    desk.ask(0, wire.Clear("p", None))
    assert desk.ask(0, wire.ListIds("p")).value == [] and desk.used == 0
    assert request not in desk.answers


def test_withdrawing_takes_nothing_from_others(desk: Desk) -> None:
    waiting = desk.claim(1, 1, blocking=True, channel=1)
    answered = desk.claim(1, 1, channel=1)
    assert desk.answers[answered].ids == []
    desk.ask(2, wire.Withdraw([waiting.number]))
    desk.ask(1, wire.Withdraw([answered.number, 10**6]), channel=1)
    desk.put(0, ["a"])
    assert desk.answers[waiting].ids == ["a"]


def test_a_claim_is_taken_back_by_who_has_it_and_by_nobody_else(desk: Desk) -> None:
    desk.put(0, ["a", "b"])
    assert desk.claimed(1, 2) == ["a", "b"]
    desk.ask(2, wire.Unclaim("p", "t", ["a", "b"]))
    assert desk.claimed(2, 2) == []
    desk.ask(1, wire.Unclaim("p", "t", ["b", "gone"]))
    assert desk.claimed(2, 2) == ["b"]
    for unknown, kind in [
        (wire.Unclaim("q", "t", ["a"]), "UnknownPartitionError"),
        (wire.Unclaim("p", "u", ["a"]), "UnknownTaskError"),
    ]:
        refused = desk.ask(1, unknown)
        assert isinstance(refused, wire.Failure) and refused.kind == kind


def test_an_answer_that_was_used_is_not_undone_by_a_later_interruption(desk: Desk) -> None:
    reserved = desk.reserve(0, 1, channel=1)
    committed = desk.commit(0, ["a"], desk.answers[reserved].place, channel=1)
    desk.abandon(committed)
    desk.claim(1, 1, channel=2)
    located = desk.post(1, wire.Locate("p", ["a"], ["x"]), channel=2)
    desk.service.abandon(1, located.number + 1)
    assert desk.claimed(2, 1) == []
    desk.ask(0, wire.Clear("p", None))
    assert desk.used == PAGE, "the read still holds its lease"


def test_what_is_read_is_not_recycled_until_it_is_dropped(desk: Desk) -> None:
    desk.put(0, ["a", "b"], 2)
    located = desk.ask(1, wire.Locate("p", ["b", "a"], ["x"]))
    again = desk.ask(2, wire.Locate("p", ["a"], ["x"]))
    desk.ask(0, wire.Clear("p", None))
    assert desk.used == 2 * PAGE
    desk.service.release(1, located.lease)
    desk.service.release(1, located.lease)  # twice is once
    desk.service.release(2, located.lease)  # and not somebody else's
    assert desk.used == 2 * PAGE
    desk.ask(2, wire.ListIds("p"), released=(again.lease,))
    assert desk.used == 0


def test_a_lease_that_comes_back_makes_room_for_who_waits(desk: Desk) -> None:
    desk.put(0, ["a"], 16)
    located = desk.ask(1, wire.Locate("p", ["a"], ["x"]))
    desk.ask(0, wire.Clear("p", None))
    waiting = desk.reserve(0, 16)
    assert waiting not in desk.answers
    desk.service.release(1, located.lease)
    assert desk.answers[waiting].place.size == 16 * PAGE


def test_places_are_told_as_neighbours_when_they_are(desk: Desk) -> None:
    desk.put(0, ["a", "b", "c"])
    located = desk.ask(0, wire.Locate("p", ["b", "c"], ["x"]))
    assert located.rows == [wire.FieldRows(2, 0, 1)]
    (index, start, layout) = located.blocks[0]
    assert (index, start, layout.rows) == (0, 0, 3)
    assert desk.ask(0, wire.Locate("p", [], ["x"])).rows == [wire.FieldRows(0)]
    scattered = desk.ask(0, wire.Locate("p", ["c", "a", "c"], ["x"])).rows[0]
    assert scattered.count == 3 and scattered.positions == b"\2\0\0\0\0\0\0\0\2\0\0\0"


def test_two_fields_of_one_put_share_a_place(desk: Desk) -> None:
    place = desk.answers[desk.reserve(0, 2)].place
    layouts = [layout_of(PAGE, 2), layout_of(PAGE, 2)]
    desk.ask(0, wire.Commit("p", 1, ["a", "b"], ["x", "y"], layouts, place.number, 2 * PAGE, FOREVER))
    located = desk.ask(1, wire.Locate("p", ["a"], ["y", "x"]))
    assert len(located.places) == 1
    assert sorted((index, start) for index, start, _ in located.blocks.values()) == [(0, 0), (0, PAGE)]
    # Overwriting one of them does not free what the other still needs, and waits for the reader.
    desk.put(0, ["a", "b"], 1)
    assert desk.used == 3 * PAGE
    desk.service.release(1, located.lease)
    assert desk.used == 2 * PAGE
    desk.ask(0, wire.Clear("p", None))
    assert desk.used == 0


# Clients go


@pytest.mark.parametrize("died", [True, False])
def test_a_client_that_goes_leaves_nothing_behind_but_what_it_wrote(desk: Desk, died: bool) -> None:
    desk.put(0, ["a"], 1)
    desk.put(1, ["b"], 1, want=2 * PAGE)
    desk.reserve(1, 1)
    desk.ask(1, wire.Locate("p", ["a"], ["x"]))
    waiting = desk.claim(1, 5, blocking=True)
    desk.service.disconnect(1, died=died)
    assert (waiting in desk.answers) is not died
    assert desk.used == 2 * PAGE
    assert desk.ask(0, wire.ServiceStatus()).value["leases"] == 0
    desk.ask(0, wire.Clear("p", ["a", "b"]))
    assert desk.used == 0
    desk.service.disconnect(1, died=died)  # once is enough


@pytest.mark.parametrize("died", [True, False])
def test_the_claims_of_a_client_that_dies_or_closes_are_handed_out_again(desk: Desk, died: bool) -> None:
    desk.put(0, ["a", "b"])
    desk.claimed(1, 2)
    desk.service.disconnect(1, died=died)
    assert desk.claimed(2, 2) == ["a", "b"]


def test_a_dead_clients_waiting_commit_never_appears() -> None:
    desk = Desk(capacity=1)
    for client in (0, 1):
        desk.service.connect(client)
    desk.register()
    desk.put(0, ["a"])
    place = desk.answers[desk.reserve(1, 3)].place
    desk.commit(1, ["b"], place, 3)
    desk.service.disconnect(1, died=True)
    desk.ask(0, wire.Clear("p", None))
    assert desk.ask(0, wire.ListIds("p")).value == [] and desk.used == 0


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
    desk.service.storage.tidy(desk.service.now)
    assert len(desk.host.segments) == 2
    desk.pass_time(0.1)
    desk.service.storage.tidy(desk.service.now)
    assert len(desk.host.segments) == 1
    assert desk.ask(0, wire.Locate("p", ["b"], ["x"])).places[0].at[0] in desk.host.segments


def test_deadlines_of_requests_that_were_answered_are_forgotten(desk: Desk) -> None:
    waiting = desk.claim(1, 1, blocking=True, timeout_s=1e12, where={"v": "never"})
    for number in range(1500):
        desk.claim(2, 1, blocking=True, timeout_s=1000.0, where={"v": number})
        desk.commit(0, [f"s{number}"], None, tags=[{"v": number}])
        place = desk.answers[desk.reserve(0, 1)].place
        desk.commit(0, [f"s{number}"], place)
        desk.ask(0, wire.Clear("p", None))
    desk.service.expire()
    assert len(desk.service.deadlines) <= 1025
    desk.service.disconnect(1, died=False)
    assert desk.answers[waiting].kind == "PlaneConnectionError"


# Checkpoints


def test_a_frozen_plane_can_be_restored_and_the_old_memory_is_recycled(desk: Desk) -> None:
    desk.put(0, ["a", "b"], 1)
    desk.claimed(1, 1)
    lease, frozen = desk.freeze(0)
    desk.ask(0, wire.Clear("p", None))
    desk.put(0, ["c"], 2)
    waiting = desk.claim(2, 5, blocking=True)
    place = desk.answers[desk.reserve(0, 4)].place
    blocks = {number: (place.number, start, layout) for number, (_, start, layout) in frozen.blocks.items()}
    restored = desk.restore(0, frozen.state, [place.number], blocks)
    assert isinstance(desk.answers[restored], wire.Done)
    assert desk.answers[waiting].kind == "PlaneConnectionError"
    desk.service.release(0, lease)
    assert desk.ask(0, wire.ListIds("p")).value == ["a", "b"]
    assert desk.claimed(1, 2) == ["b"]
    assert desk.used == PAGE
    desk.ask(0, wire.Clear("p", None))
    assert desk.used == 0


def test_a_large_state_is_frozen_at_one_point_of_time_and_read_in_pieces(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.put(0, [f"s{number}" for number in range(50)], 1, tags=[{"v": number} for number in range(50)])
    desk.claimed(1, 5)
    whole = dump_state(desk.service.state)
    monkeypatch.setattr(checkpoints, "_PIECE_BYTES", 100)
    lease = desk.ask(0, wire.Freeze()).lease
    read, is_whole = b"", False
    while not is_whole:
        # Whatever others do meanwhile is not in it.
        desk.put(1, [f"new-{len(read)}"], 1)
        desk.commit(1, ["s7"], None, tags=[{"v": len(read)}])
        desk.ask(1, wire.Clear("p", [f"s{len(read) % 50}", f"new-{len(read)}"]))
        desk.claimed(2, 1)
        piece, is_whole = desk.ask(0, wire.FrozenPiece(lease)).value
        assert len(piece) < 1000
        read += piece
    frozen = wire.FrozenPlane.read(read)
    assert frozen.state == whole
    assert {place for place, _, _ in frozen.blocks.values()} == frozen.places.keys()
    assert desk.ask(0, wire.FrozenPiece(lease)).kind == "MissingDataError"


@pytest.mark.parametrize("ended", ["released", "other client", "abandoned", "service restarted"])
def test_nothing_is_kept_of_a_frozen_state_that_nobody_will_read(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, ended: str
) -> None:
    desk.put(0, ["a"], 1)
    monkeypatch.setattr(checkpoints, "_PIECE_BYTES", 100)
    request = desk.post(0, wire.Freeze())
    lease = desk.answers[request].lease
    if ended == "released":
        desk.service.release(0, lease)
    elif ended == "abandoned":
        desk.abandon(request)
    elif ended == "service restarted":
        # It is not dumped, and the client says again which leases it holds.
        desk.service.checkpoints.frozen.clear()
    asker = 1 if ended == "other client" else 0
    assert desk.ask(asker, wire.FrozenPiece(lease)).kind == "MissingDataError"
    assert bool(desk.service.checkpoints.frozen) == (ended == "other client")
    assert "checkpoints" not in desk.service.dump()


def test_clients_that_knew_the_old_schema_are_told_after_a_restore(desk: Desk) -> None:
    other = Desk()
    other.service.connect(0)
    other.register(fields=["x", "new"])
    _, frozen = other.freeze(0)
    known = desk.ask(1, wire.Describe("p")).version
    assert isinstance(desk.answers[desk.restore(0, frozen.state, [], {})], wire.Done)
    assert desk.answers[desk.commit(1, ["a"], None, version=known)].kind == "StaleSpecError"
    assert desk.ask(1, wire.Describe("p")).spec.fields == ["x", "new"]


@pytest.mark.parametrize("fault", ["bytes", "place", "home", "beyond", "before", "missing", "unused"])
def test_a_restore_that_makes_no_sense_is_refused_and_changes_nothing(desk: Desk, fault: str) -> None:
    desk.put(0, ["a"], 1)
    lease, frozen = desk.freeze(0)
    desk.service.release(0, lease)
    place = desk.answers[desk.reserve(0, 1)].place
    state, places = frozen.state, [place.number]
    cut: Callable[[bytes], Iterable[bytes]] = pieces_of
    ((number, (_, start, layout)),) = frozen.blocks.items()
    blocks = {number: (place.number, start, layout)}
    if fault == "bytes":
        cut = lambda state: [piece[:-1] for piece in pieces_of(state)]  # noqa: E731
    elif fault == "place":
        places = [place.number, 99]
    elif fault == "home":
        blocks[number] = (99, start, layout)
    elif fault == "beyond":
        blocks[number] = (place.number, PAGE, layout)
    elif fault == "before":
        blocks[number] = (place.number, -PAGE, layout)
    elif fault == "missing":
        blocks = {}
    else:
        blocks[number + 100] = (place.number, start, layout)
    answer = desk.answers[desk.restore(0, state, places, blocks, cut=cut)]
    assert answer.kind in ("CheckpointError", "InvalidRequestError")
    assert desk.ask(0, wire.ListIds("p")).value == ["a"]
    desk.ask(0, wire.Unreserve(place.number))
    desk.ask(0, wire.Clear("p", None))
    assert desk.used == 0 and not desk.service.table.references


# Everything at once

CLIENTS = 3
IDS = [f"s{number}" for number in range(6)]


class ServiceMachine(RuleBasedStateMachine):
    """Random requests of several clients: memory is counted, and nobody waits for nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.desk = Desk(limit=12, segment=3, capacity=4)
        for client in range(CLIENTS):
            self.desk.service.connect(client)
        self.desk.register(num_samples=6)
        # What each client thinks that it has. It may be wrong about its spare, and about nothing else.
        self.waiting: dict[PendingRequest, int] = {}
        self.reserved: dict[int, list[Place]] = {client: [] for client in range(CLIENTS)}
        self.spares: dict[int, Place | None] = dict.fromkeys(range(CLIENTS))
        self.leases: dict[int, list[int]] = {client: [] for client in range(CLIENTS)}

    clients = st.integers(0, CLIENTS - 1)
    sizes = st.integers(1, 5)
    some_ids = st.lists(st.sampled_from(IDS), unique=True, min_size=1, max_size=3)
    timeouts = st.sampled_from([2.0, FOREVER])

    @rule(client=clients, size=st.integers(1, 13), timeout_s=timeouts)
    def reserve(self, client: int, size: int, timeout_s: float) -> None:
        self._expect(self.desk.reserve(client, size, timeout_s, channel=client + 1))

    @rule(
        client=clients,
        ids=some_ids,
        want=st.integers(0, 4),
        timeout_s=timeouts,
        fault=st.integers(0, 9),
        data=st.data(),
    )
    def commit(
        self, client: int, ids: list[str], want: int, timeout_s: float, fault: int, data: st.DataObject
    ) -> None:
        spare = self.spares[client]
        place: Place | None = None
        if spare is not None and self.desk.take_spare(client, spare):
            place, self.spares[client] = spare, None
        elif self.reserved[client]:
            place = self.reserved[client].pop()
        size = 1 if place is None else data.draw(st.integers(1, place.size // PAGE))
        more: dict[str, Any] = {"timeout_s": timeout_s, "want": want * PAGE, "channel": client + 1}
        if fault == 0:
            more["version"] = 0
        elif fault == 1 and place is not None:
            more["used"] = place.size + 1
        elif fault == 2:
            more["tags"] = [{}] * (len(ids) + 1)
        self._expect(self.desk.commit(client, ids, place, size, **more))

    @rule(client=clients)
    def unreserve(self, client: int) -> None:
        spare = self.spares[client]
        if self.reserved[client]:
            self._expect(self.desk.post(client, wire.Unreserve(self.reserved[client].pop().number)))
        elif spare is not None and self.desk.take_spare(client, spare):
            self.spares[client] = None
            self._expect(self.desk.post(client, wire.Unreserve(spare.number)))

    @rule(client=clients, size=st.integers(1, 3), blocking=st.booleans(), timeout_s=timeouts)
    def claim(self, client: int, size: int, blocking: bool, timeout_s: float) -> None:
        self._expect(
            self.desk.claim(client, size, blocking=blocking, timeout_s=timeout_s, channel=client + 1)
        )

    @rule(client=clients, ids=some_ids)
    def read(self, client: int, ids: list[str]) -> None:
        live = self.desk.ask(client, wire.ListIds("p")).value
        wanted = [sample_id for sample_id in ids if sample_id in live] or live
        self._expect(self.desk.post(client, wire.Locate("p", wanted, ["x"]), channel=client + 1))

    @rule(client=clients, with_a_request=st.booleans())
    def drop_what_was_read(self, client: int, with_a_request: bool) -> None:
        if self.leases[client]:
            lease = self.leases[client].pop(0)
            if with_a_request:
                self._expect(self.desk.post(client, wire.ListIds("p"), released=(lease,)))
            else:
                self.desk.service.release(client, lease)
                self._hear()

    @rule(client=clients, ids=st.none() | some_ids)
    def clear(self, client: int, ids: list[str] | None) -> None:
        self._expect(self.desk.post(client, wire.Clear("p", ids)))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def interrupt(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(list(self.waiting)))
        del self.waiting[request]
        self.desk.abandon(request)
        self._hear()

    @rule(seconds=st.integers(1, 3))
    def time_passes(self, seconds: int) -> None:
        self.desk.pass_time(seconds)
        self._hear()
        self.desk.service.storage.tidy(self.desk.service.now)
        deadlines = [at for at, _, request in self.desk.service.deadlines._heap if request in self.waiting]
        assert min(deadlines, default=FOREVER) > self.desk.service.now

    @rule(number=st.integers(0, 6), freeze=st.booleans())
    def register_or_freeze(self, number: int, freeze: bool) -> None:
        spec = PartitionSpec.checked("p", ["x"], number, ["t"])
        self._expect(self.desk.post(0, wire.Freeze() if freeze else wire.Register(spec)))

    @rule(client=clients, died=st.booleans())
    def a_client_goes_and_another_comes(self, client: int, died: bool) -> None:
        self.desk.service.disconnect(client, died=died)
        gone = [request for request in self.waiting if request.client == client]
        # Another thread of a client that closes may wait, and is told; of one that died, there is none.
        assert all((request in self.desk.answers) is not died for request in gone)
        for request in gone:
            del self.waiting[request]
            self.desk.answers.pop(request, None)
        self.reserved[client], self.leases[client], self.spares[client] = [], [], None
        self.desk.service.connect(client)
        self._hear()

    @invariant()
    def memory_is_counted(self) -> None:
        service, arena = self.desk.service, self.desk.host.arena
        held = [place for client in service.clients.values() for place in client.reserved.values()]
        spares = [client.spare for client in service.clients.values() if client.spare is not None]
        committed = sum(self._held_bytes(place) for place in service.table.places.values())
        frozen = sum(self._kept_bytes(place) for place in service.table._to_free)
        assert arena.used == sum(e.size for e in [*held, *spares]) + committed + frozen
        assert service.checkpoints.frozen or not service.table._to_free
        assert {e.number for e in held} == {e.number for mine in self.reserved.values() for e in mine}
        references = [home for home, _, _ in service.table.blocks.values()]
        leases = [lease for client in service.clients.values() for lease in client.leases.values()]
        counted = Counter([*references, *itertools.chain.from_iterable(leases)])
        assert service.table.references == counted
        assert service.table.places.keys() == counted.keys()
        parked = {block for put in service.state._waiting_puts for block in put.blocks.values()}
        assert service.table.blocks.keys() == service.state.blocks().keys() | parked

    def _held_bytes(self, place: Place) -> int:
        """What a place still has: the pages of rows that a sample or a reader needs."""
        service, kept = self.desk.service, self._kept_bytes(place)
        column = service.state.partition("p").columns["x"]
        rows = service.state.partition("p").live_rows(None)
        live = set(zip(column.block[rows].tolist(), column.position[rows].tolist(), strict=True))
        live |= {
            (block, row)
            for put in service.state._waiting_puts
            for block in put.blocks.values()
            for row in range(len(put.ids))
        }
        # Without a block, only a reader needs it, and that has been told of what was there when it came.
        needed = np.full(
            place.size, any(home == place.number for home, _, _ in service.table.blocks.values())
        )
        for block, (home, start, layout) in service.table.blocks.items():
            if home == place.number:
                size = layout.values_nbytes // layout.rows
                for row in range(layout.rows):
                    if (block, row) not in live:
                        needed[start + row * size : start + (row + 1) * size] = False
        pages_needed = int(needed.reshape(-1, PAGE).any(axis=1).sum())
        is_read = any(place.number in lease for c in service.clients.values() for lease in c.leases.values())
        is_read |= service.table._is_frozen(place.number)
        assert kept >= PAGE * pages_needed if is_read else kept == PAGE * pages_needed
        return kept

    def _kept_bytes(self, place: Place) -> int:
        given = self.desk.host.arena._given_back.get(place.number)
        return place.size if given is None else place.size - PAGE * int(given.sum())

    @invariant()
    def nobody_waits_for_room_that_is_there(self) -> None:
        waiting = self.desk.service.reservations.waiting
        if waiting:
            arena, size = self.desk.host.arena, pages(next(iter(waiting)).nbytes)
            assert not self.desk.host.on_offer, "a spare could be taken back"
            assert arena.limit - arena.used < size

    @invariant()
    def whoever_is_not_answered_is_parked(self) -> None:
        service = self.desk.service
        parked = {*service.state.waiting(), *(room.request for room in service.reservations.waiting)}
        assert parked == self.waiting.keys()

    def teardown(self) -> None:
        service = self.desk.service
        for client in range(CLIENTS):
            service.disconnect(client, died=client % 2 == 0)
        service.connect(99)
        self.desk.ask(99, wire.Clear("p", None))
        assert self.desk.used == 0
        assert not service.table.blocks and not service.table.places and not service.table.references
        service.now += 2 * IDLE_SEGMENT_S
        service.storage.tidy(service.now)
        assert not self.desk.host.segments

    def _expect(self, request: PendingRequest) -> None:
        self.waiting[request] = request.client
        self._hear()

    def _hear(self) -> None:
        """Every client reads its answers; each is for a request that was waiting."""
        for request, answer in self.desk.answers.items():
            if request.number == 0 or request not in self.waiting:
                continue
            del self.waiting[request]
            if isinstance(answer, wire.Reserved):
                self.reserved[request.client].append(answer.place)
            elif isinstance(answer, wire.Done) and answer.spare is not None:
                self.spares[request.client] = answer.spare
            elif isinstance(answer, (wire.Located, wire.Frozen)):
                self.leases[request.client].append(answer.lease)
        self.desk.answers.clear()


TestServiceCountsEverything = ServiceMachine.TestCase
TestServiceCountsEverything.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
