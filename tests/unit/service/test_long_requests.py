"""A request that changes very many samples is worked off in slices, between which others are served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.unit.control.whole_state import dump_state
from tests.unit.service.service_harness import FOREVER, Desk, JournaledPlane, finish, layout_of

from rlplane.control import clearing, loading, marking, staging, unclaiming
from rlplane.control.fields import FieldIndex
from rlplane.control.loading import pieces_of
from rlplane.control.requests import Put
from rlplane.control.rules import PartitionSpec
from rlplane.control.state import ControlState
from rlplane.errors import UnknownPartitionError
from rlplane.service import commits, long_work
from rlplane.service import protocol as wire
from rlplane.service.clients import PendingRequest
from rlplane.service.commits import PutWork
from rlplane.storage.keyed import KeyedHost
from rlplane.storage.places import Layout, Loss
from rlplane.storage.shm.arena import PAGE

AT_ONCE = 4
IDS = [f"s{number}" for number in range(10 * AT_ONCE)]


@pytest.fixture(autouse=True)
def short_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clearing, "_SAMPLES_AT_ONCE", AT_ONCE)
    monkeypatch.setattr(unclaiming, "_SAMPLES_AT_ONCE", AT_ONCE)
    monkeypatch.setattr(marking, "_SAMPLES_AT_ONCE", AT_ONCE)


@pytest.fixture
def desk() -> Desk:
    """A plane with a page for every two samples."""
    desk = Desk(limit=64, segment=64)
    for client in range(3):
        desk.service.connect(client)
    desk.register()
    for at in range(0, len(IDS), 2):
        desk.put(1, IDS[at : at + 2])
    return desk


def live(desk: Desk) -> list[str]:
    return list(desk.service.state.partition("p").rows)


@pytest.mark.parametrize("ids", [IDS, None])
def test_a_long_clear_takes_slices_and_is_answered_when_all_are_gone(
    desk: Desk, ids: list[str] | None
) -> None:
    request = desk.post(1, wire.Clear("p", ids))
    assert live(desk) == IDS[AT_ONCE:] and request not in desk.answers
    desk.put(1, ["new"])  # not one of those that were there when it was asked for
    assert finish(desk, AT_ONCE) == 9
    assert desk.answers[request] == wire.Done(len(IDS))
    assert live(desk) == ["new"] and desk.used == PAGE


def test_others_are_served_between_the_slices(desk: Desk) -> None:
    long = desk.post(1, wire.Clear("p", IDS[2 * AT_ONCE :]))
    assert desk.ask(0, wire.Clear("p", IDS[:2])) == wire.Done(2)  # it does not wait for the long one
    assert desk.claimed(2, 3) == IDS[2:5]
    waiting = desk.claim(2, len(IDS), blocking=True)
    desk.put(0, ["late"])
    another = desk.post(0, wire.Clear("p", [*IDS[5 : 2 * AT_ONCE], "late", *IDS[-AT_ONCE:]]))
    assert long not in desk.answers and another not in desk.answers
    finish(desk, AT_ONCE)
    assert desk.answers[long].value + desk.answers[another].value == len(IDS) - 5 + 1
    assert waiting not in desk.answers and live(desk) == IDS[2:5]


def test_what_waits_for_room_gets_it_while_a_clear_is_under_way(desk: Desk) -> None:
    waiting = desk.reserve(0, 64 - 20 + 2)
    assert waiting not in desk.answers
    request = desk.post(1, wire.Clear("p", IDS))
    assert isinstance(desk.answers[waiting], wire.Reserved) and request not in desk.answers
    finish(desk, AT_ONCE)


def test_a_partition_that_is_dropped_is_unknown_at_once_and_freed_in_slices(desk: Desk) -> None:
    claim = desk.claim(2, len(IDS) + 1, blocking=True)
    request = desk.post(1, wire.DropPartition("p"))
    gone = wire.failure_of(UnknownPartitionError("partition 'p' was dropped"))
    assert desk.answers[claim].kind == gone.kind
    assert isinstance(desk.ask(0, wire.ListIds("p")), wire.Failure)
    assert request not in desk.answers and desk.used == (len(IDS) - AT_ONCE) // 2 * PAGE
    desk.register()
    desk.put(0, IDS[-2:])
    _, frozen = desk.freeze(0)
    assert len(frozen.blocks) == 1  # what is left of the old one is in no checkpoint
    assert finish(desk, AT_ONCE) == 9
    assert desk.answers[request] == wire.Done(len(IDS))
    assert live(desk) == IDS[-2:] and desk.service.state.live == 2


def test_a_partition_can_be_dropped_in_the_middle_of_a_clear(desk: Desk) -> None:
    first, second = desk.post(1, wire.Clear("p", IDS)), desk.post(0, wire.DropPartition("p"))
    finish(desk, AT_ONCE)
    assert desk.answers[first].value + desk.answers[second].value == len(IDS)
    assert desk.service.state.live == 0 and desk.used == 0


@pytest.mark.parametrize("died", [True, False])
def test_what_a_client_has_begun_is_done_although_it_goes(desk: Desk, died: bool) -> None:
    desk.post(1, wire.Clear("p", IDS))
    desk.service.disconnect(1, died=died)
    finish(desk, AT_ONCE)
    assert desk.service.state.live == 0 and desk.used == 0


@pytest.mark.parametrize("slices", [0, 1, 5, 9])
def test_a_clear_goes_on_where_it_was_when_the_service_dies_and_is_answered_once(
    tmp_path: Path, slices: int
) -> None:
    plane = JournaledPlane(tmp_path)
    plane.ask(1, wire.Register(PartitionSpec.checked("p", ["x"], 100, ["t"])))
    place = plane.ask(2, wire.Reserve(PAGE, FOREVER)).place
    layout = layout_of(PAGE, len(IDS))
    plane.ask(3, wire.Commit("p", 1, IDS, ["x"], [layout], place.number, PAGE, FOREVER))
    assert plane.ask(4, wire.DropPartition("p")) is None
    for _ in range(slices):
        plane.service.go_on()
    plane.die()
    assert plane.service.state.live == max(len(IDS) - (slices + 1) * AT_ONCE, 0)
    before = dict(plane.answers)
    plane.answers.clear()
    again = plane.ask(4, wire.DropPartition("p"))
    assert again == before.get((0, 4))
    while plane.service.has_work:
        plane.service.go_on()
    assert plane.answers[0, 4] == wire.Done(len(IDS))
    assert plane.service.table.places == {} and plane.service.state.live == 0


def test_a_clear_that_is_abandoned_is_done_and_its_answer_not_kept(tmp_path: Path) -> None:
    plane = JournaledPlane(tmp_path)
    plane.ask(1, wire.Register(PartitionSpec.checked("p", ["x"], 100, ["t"])))
    plane.ask(2, wire.Commit("p", 1, IDS, [], [], None, 0, FOREVER))
    assert plane.ask(3, wire.Clear("p", IDS)) is None
    plane.service.abandon(0, 3)
    while plane.service.has_work:
        plane.service.go_on()
    assert plane.service.state.live == 0
    assert 3 not in plane.service.clients[0].answers


@pytest.mark.parametrize("come", range(12))
def test_a_load_goes_on_where_it_was_when_the_service_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, come: int
) -> None:
    monkeypatch.setattr(loading, "_SAMPLES_AT_ONCE", AT_ONCE)
    state = ControlState()
    state.register(PartitionSpec.checked("loaded", ["x"], 100, ["t"]))
    state.put(Put("loaded", IDS, {}))
    pieces = [wire.RestorePiece(5, state=piece) for piece in pieces_of(dump_state(state))]
    assert len(pieces) == 10
    plane = JournaledPlane(tmp_path)
    plane.ask(1, wire.Register(PartitionSpec.checked("old", ["x"], 100, ["t"])))
    plane.ask(2, wire.Commit("old", 1, IDS, [], [], None, 0, FOREVER))
    requests: list[wire.Request] = [*pieces, wire.Restore(5, [])]
    for number, request in enumerate(requests[:come], 10):
        plane.ask(number, request)
    plane.die()
    assert list(plane.service.state.partitions) == ["old" if come < len(requests) else "loaded"]
    # Whether the last one was answered the client does not know.
    for number, request in list(enumerate(requests, 10))[max(come - 1, 0) :]:
        plane.answers.pop((0, number), None)
        plane.ask(number, request)
    while plane.service.has_work:
        plane.service.go_on()
    assert plane.answers[0, 20] == wire.Done(len(IDS))
    assert list(plane.service.state.partitions) == ["loaded"]
    assert list(plane.service.state.partition("loaded").rows) == IDS
    assert plane.service.state.live == len(IDS) and not plane.service.clients[0].loading


def test_samples_that_are_replaced_by_a_load_go_in_slices(desk: Desk) -> None:
    request = desk.restore(0, dump_state(ControlState()), [], {})
    assert request not in desk.answers and desk.service.state.partitions == {}
    desk.register()
    desk.put(0, IDS[:2])
    assert finish(desk, AT_ONCE) == 9
    assert desk.answers[request] == wire.Done(len(IDS))
    assert desk.service.state.live == 2 and desk.used == PAGE


def test_samples_that_were_lost_with_a_storage_unit_are_found_in_slices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(long_work, "_AT_ONCE", AT_ONCE)
    desk = Desk()
    desk.service.storage = KeyedHost(1000 * PAGE, lambda place: True, 4)
    desk.service.connect(0)
    desk.register()
    places = {}
    for sample_id in IDS:
        place = desk.answers[desk.reserve(0, 1)].place
        places[sample_id] = place.number
        desk.commit(0, [sample_id], place)
    looked_at: list[int] = []
    rows_in = FieldIndex.rows_in

    def counted(self: FieldIndex, lost: Any, rows: Any) -> Any:
        looked_at.append(len(rows))
        return rows_in(self, lost, rows)

    monkeypatch.setattr(FieldIndex, "rows_in", counted)
    first = desk.post(0, wire.Lost(Loss((1,), 4)))
    second = desk.post(0, wire.Lost(Loss((1,), 4)))  # another client has noticed it too
    desk.ask(0, wire.Clear("p", IDS[:AT_ONCE]))  # some that are lost may be gone when they are found
    assert desk.answers.keys().isdisjoint({first, second})
    kept = [sample_id for sample_id in IDS[AT_ONCE:] if places[sample_id] % 4 != 1]
    assert finish(desk, AT_ONCE) >= 2 * len(IDS) // AT_ONCE - 2 and max(looked_at) <= AT_ONCE
    assert desk.answers[first] == desk.answers[second] == wire.Done(len(IDS) - AT_ONCE - len(kept))
    assert live(desk) == kept
    assert desk.ask(0, wire.Lost(Loss((1,), 4))) == wire.Done()


@pytest.mark.parametrize("order", [None, "priority:n", "random:1"])
@pytest.mark.parametrize("group_size", [None, 2])
def test_what_a_large_partition_has_in_its_queues_is_freed_in_slices_too(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, group_size: int | None, order: str | None
) -> None:
    monkeypatch.setattr(clearing, "_LARGE", 1)
    desk.register(partition_id="q", grpo_group_size=group_size)
    partition = desk.service.state.partition("q")
    ids = [f"{number // 2}_g{number % 2}" for number in range(2 * AT_ONCE)]
    desk.service.state.put(Put("q", ids, {}, [{"n": number} for number in range(2 * AT_ONCE)]))
    asked = wire.ClaimRequest("q", "t", [], 2, False, 0.0)
    asked.order = order
    assert len(desk.ask(1, asked).ids) == 2
    (queue,) = partition.task("t").queues.values()
    request = desk.post(1, wire.DropPartition("q"))
    before = sum(map(len, queue.contents()))
    while request not in desk.answers:
        desk.service.go_on()
        assert sum(map(len, queue.contents())) >= before - AT_ONCE
        before = sum(map(len, queue.contents()))
    assert desk.answers[request] == wire.Done(len(ids)) and not before and not partition.columns


# A long claim that ends


@pytest.mark.parametrize("how", ["unclaimed", "abandoned"])
def test_what_a_long_claim_had_comes_back_in_slices_and_in_its_order(desk: Desk, how: str) -> None:
    claim = desk.claim(1, len(IDS) - 1)
    ids = desk.answers[claim].ids
    if how == "abandoned":
        desk.abandon(claim)
    else:
        request = desk.post(1, wire.Unclaim("p", "t", ids))
        assert request not in desk.answers
    assert desk.claimed(2, 2) == IDS[-5:-3]  # what is back already, before what never was away
    slices = 1
    while desk.service.has_work:
        desk.service.go_on()
        slices += 1
    assert slices == 10
    if how == "unclaimed":
        assert desk.answers[request] == wire.Done(0)
    assert desk.claimed(2, len(IDS)) == [*IDS[:-5], *IDS[-3:]]


def test_what_its_client_claims_meanwhile_is_not_given_back(desk: Desk) -> None:
    ids = desk.claimed(1, 3 * AT_ONCE)
    desk.post(1, wire.Unclaim("p", "t", [*ids[-2:], *ids]))
    assert desk.claimed(1, 2) == ids[-AT_ONCE : -AT_ONCE + 2]
    assert desk.claimed(1, 2) == ids[-2:]
    while desk.service.has_work:
        desk.service.go_on()
    assert desk.claimed(2, len(IDS)) == [*ids[:-AT_ONCE], *IDS[len(ids) :]]


@pytest.mark.parametrize("what", ["dropped", "registered", "dies", "cleared"])
def test_a_long_claim_can_end_twice(desk: Desk, what: str) -> None:
    request = desk.post(1, wire.Unclaim("p", "t", desk.claimed(1, len(IDS))))
    if what == "dropped":
        desk.post(0, wire.DropPartition("p"))
        desk.register()
        desk.put(0, IDS[:2])
        assert desk.claimed(1, 2) == IDS[:2]
    elif what == "registered":
        desk.register(consumer_tasks=["u"])
        desk.register()
    elif what == "dies":
        desk.service.disconnect(1, died=True)
    else:
        desk.post(0, wire.Clear("p", IDS[:AT_ONCE]))
    work_off(desk)
    assert desk.answers[request] == wire.Done(0)
    left = {"dropped": [], "registered": IDS, "dies": IDS, "cleared": IDS[AT_ONCE:]}[what]
    assert desk.claimed(2, len(IDS)) == left


@pytest.mark.parametrize("is_finished", [False, True])
@pytest.mark.parametrize("slices", [0, 1, 5, 9])
def test_a_claim_goes_on_ending_when_the_service_dies(tmp_path: Path, slices: int, is_finished: bool) -> None:
    plane = JournaledPlane(tmp_path)
    plane.ask(1, wire.Register(PartitionSpec.checked("p", ["x"], 0, ["t"])))
    plane.ask(2, wire.Commit("p", 1, IDS, [], [], None, 0, FOREVER))
    ids = plane.ask(3, wire.ClaimRequest("p", "t", [], len(IDS), False, 0.0)).ids
    unclaim = wire.Unclaim("p", "t", ids, is_finished)
    assert plane.ask(4, unclaim) is None
    for _ in range(slices):
        plane.service.go_on()
    plane.die()
    plane.answers.pop((0, 4), None)
    plane.ask(4, unclaim)
    while plane.service.has_work:
        plane.service.go_on()
    assert plane.answers[0, 4] == wire.Done(0)
    assert plane.ask(5, wire.ClaimRequest("p", "t", [], len(IDS), False, 0.0)).ids == (
        [] if is_finished else ids
    )
    plane.service.disconnect(0, died=True)
    assert plane.service.state.partition("p").task("t").count == (len(IDS) if is_finished else 0)


# A long put

MANY = IDS[: 3 * AT_ONCE]


@pytest.fixture
def long_puts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "_SAMPLES_AT_ONCE", AT_ONCE)
    monkeypatch.setattr(commits, "_MANY_SAMPLES", AT_ONCE)


@pytest.fixture
def empty_desk(long_puts: None) -> Desk:
    desk = Desk(limit=64, segment=64, capacity=4 * AT_ONCE)
    for client in range(3):
        desk.service.connect(client)
    desk.register()
    return desk


def work_off(desk: Desk) -> None:
    while desk.service.has_work:
        desk.service.go_on()


def begin_put(desk: Desk, ids: list[str], **more: Any) -> PendingRequest:
    place = desk.answers[desk.reserve(1, 1)].place
    return desk.commit(1, ids, place, **more)


def test_nothing_of_a_long_put_is_there_before_all_of_it_is(empty_desk: Desk) -> None:
    desk = empty_desk
    waiting = desk.claim(2, 2, blocking=True)
    request = begin_put(desk, MANY, tags=[{"n": 1}] * len(MANY))
    for _ in range(3):
        desk.service.go_on()
        assert live(desk) == [] and desk.service.state.count("p", {"n": 1}) == 0
        assert request not in desk.answers and waiting not in desk.answers
        assert desk.service.state.partition("p").status(0.0)["written"] == 0
    desk.service.go_on()
    assert isinstance(desk.answers[request], wire.Done) and not desk.service.has_work
    assert sorted(live(desk)) == sorted(MANY) and desk.answers[waiting].ids == MANY[:2]
    assert desk.service.state.count("p", {"n": 1}) == len(MANY)


@pytest.mark.parametrize("slices", range(4))
@pytest.mark.parametrize("how", ["abandoned", "dies", "closes"])
def test_a_long_put_that_nobody_waits_for_is_undone(empty_desk: Desk, slices: int, how: str) -> None:
    desk = empty_desk
    request = begin_put(desk, MANY)
    for _ in range(slices):
        desk.service.go_on()
    if how == "abandoned":
        desk.abandon(request)
    else:
        desk.service.disconnect(1, died=how == "dies")
    assert not desk.service.has_work and request not in desk.answers
    assert live(desk) == [] and desk.used == 0 and not desk.service.table.blocks


@pytest.mark.parametrize("slices", range(4))
@pytest.mark.parametrize("what", ["dropped", "registered"])
def test_a_long_put_to_a_partition_that_changes_is_made_anew(
    empty_desk: Desk, slices: int, what: str
) -> None:
    desk = empty_desk
    request = begin_put(desk, MANY)
    for _ in range(slices):
        desk.service.go_on()
    if what == "dropped":
        desk.post(0, wire.DropPartition("p"))
    desk.register()
    while desk.service.has_work:
        desk.service.go_on()
    assert desk.answers[request].kind == "StaleSpecError"
    assert live(desk) == [] and desk.used == 0


def test_a_long_put_waits_for_room_as_any_other_and_gives_up_in_time(empty_desk: Desk) -> None:
    desk = empty_desk
    desk.put(0, IDS[-2:])
    first = begin_put(desk, IDS[: 3 * AT_ONCE - 1])
    second = begin_put(desk, IDS[AT_ONCE : 5 * AT_ONCE - 3], timeout_s=3.0)
    work_off(desk)
    assert isinstance(desk.answers[first], wire.Done) and second not in desk.answers
    desk.pass_time(4.0)
    assert desk.answers[second].kind == "CapacityTimeoutError"
    assert len(live(desk)) == 3 * AT_ONCE + 1 and desk.used == 2 * PAGE
    third = begin_put(desk, IDS[5 * AT_ONCE : 7 * AT_ONCE])
    work_off(desk)
    assert third not in desk.answers
    desk.ask(0, wire.Clear("p", IDS[: 2 * AT_ONCE][:AT_ONCE]))
    desk.ask(0, wire.Clear("p", IDS[AT_ONCE : 2 * AT_ONCE]))
    assert isinstance(desk.answers[third], wire.Done)


@pytest.mark.parametrize("slices", range(5))
def test_a_service_that_dies_in_the_middle_of_a_long_put_goes_on_with_it(
    tmp_path: Path, long_puts: None, slices: int
) -> None:
    plane = JournaledPlane(tmp_path)
    plane.ask(1, wire.Register(PartitionSpec.checked("p", ["x"], 0, ["t"])))
    place = plane.ask(2, wire.Reserve(PAGE, FOREVER)).place
    layout = layout_of(PAGE, len(MANY))
    commit = wire.Commit("p", 1, MANY, ["x"], [layout], place.number, PAGE, FOREVER)
    plane.ask(3, commit)
    for _ in range(min(slices, 4)):
        plane.service.go_on()
    plane.die()
    plane.answers.pop((0, 3), None)
    plane.ask(3, commit)  # what a client does whose service is another one
    while plane.service.has_work:
        plane.service.go_on()
    assert isinstance(plane.answers[0, 3], wire.Done)
    assert sorted(plane.service.state.partition("p").rows) == sorted(MANY)
    assert plane.ask(4, wire.ClaimRequest("p", "t", ["x"], 20, False, 0.0)).ids == MANY


def begin_append(desk: Desk, ids: list[str], *, width: int = 1, finishes: bool = False) -> PendingRequest:
    """Begin to append a turn of ``width`` bytes to the field x."""
    place = desk.answers[desk.reserve(1, 1)].place
    layout = Layout("dense", "torch.uint8", (2, width), len(ids), 2 * width * len(ids))
    version = desk.service.state.partition("p").version
    body = wire.Commit("p", version, ids, ["x"], [layout], place.number, layout.nbytes, FOREVER)
    body.appends, body.finishes = True, finishes
    return desk.post(1, body)


def turns_of(desk: Desk, ids: list[str]) -> list[int]:
    pieces = desk.service.state.locate("p", ids, ["x"])["x"]
    return [1] * len(ids) if pieces.per_row is None else pieces.per_row.tolist()


def test_a_long_append_is_there_at_once_and_every_turn_in_its_order(empty_desk: Desk) -> None:
    desk = empty_desk
    for turns in range(1, 4):
        request = begin_append(desk, MANY, finishes=turns == 3)
        while desk.service.has_work:
            if turns > 1:
                assert turns_of(desk, MANY) == [turns - 1] * len(MANY)
            desk.service.go_on()
        assert isinstance(desk.answers[request], wire.Done)
        assert turns_of(desk, MANY) == [turns] * len(MANY)
    assert desk.claimed(2, 20) == MANY
    desk.post(1, wire.Clear("p", MANY))
    work_off(desk)
    assert desk.used == 0 and not desk.service.table.blocks


@pytest.mark.parametrize("slices", range(4))
@pytest.mark.parametrize("what", ["another kind", "finished"])
def test_a_long_append_is_refused_whole_if_one_sample_cannot_take_it(
    empty_desk: Desk, slices: int, what: str
) -> None:
    desk = empty_desk
    request = begin_append(desk, MANY)
    for _ in range(slices):
        desk.service.go_on()
    # Somebody else comes first, while it is made ready.
    short = begin_append(
        desk, MANY[-1:], width=2 if what == "another kind" else 1, finishes=what == "finished"
    )
    assert isinstance(desk.answers[short], wire.Done)
    work_off(desk)
    assert desk.answers[request].kind == "InvalidRequestError"
    assert ("grows by tokens" if what == "another kind" else "is finished") in desk.answers[request].message
    assert live(desk) == MANY[-1:] and turns_of(desk, MANY[-1:]) == [1] and desk.used == PAGE


def test_what_a_very_long_put_was_made_of_is_freed_in_slices_after_it_is_answered(
    empty_desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = empty_desk
    monkeypatch.setattr(commits, "_MANY_TO_FREE", AT_ONCE)
    monkeypatch.setattr(staging, "_FREED_AT_ONCE", AT_ONCE)
    for value in (1, 2):
        request = begin_put(desk, list(MANY), tags=[{"n": value} for _ in MANY])
        while request not in desk.answers:
            desk.service.go_on()
        assert desk.service.state.count("p", {"n": value}) == len(MANY)
        (work,) = desk.service.work
        assert isinstance(work, PutWork)
        left: list[list[Any]] = [work._staging._ids, work._staging._given or [], work._staging._replaced]
        assert list(map(len, left)) == [len(MANY), len(MANY), len(MANY) * (value - 1)]
        while desk.service.has_work:
            before = sum(map(len, left))
            desk.service.go_on()
            assert before - sum(map(len, left)) <= AT_ONCE
        assert not any(left)
    assert desk.claimed(2, 3) == MANY[:3]


@pytest.mark.parametrize("come", range(6))
def test_what_was_named_before_a_put_is_known_to_the_service_that_goes_on(
    tmp_path: Path, long_puts: None, come: int
) -> None:
    plane = JournaledPlane(tmp_path)
    plane.ask(1, wire.Register(PartitionSpec.checked("p", ["x"], 0, ["t"])))
    commit = wire.Commit("p", 1, [], [], [], None, 0, FOREVER)
    commit.named = 5
    requests: list[wire.Request] = [
        wire.Naming(5, at, MANY[at : at + 5], [{"n": at}] * len(MANY[at : at + 5])) for at in (0, 5, 10)
    ]
    requests.append(commit)
    for number, request in enumerate(requests[:come], 10):
        plane.ask(number, request)
    plane.die()
    for number, request in list(enumerate(requests, 10))[max(come - 1, 0) :]:
        plane.answers.pop((0, number), None)
        plane.ask(number, request)
    while plane.service.has_work:
        plane.service.go_on()
    claimed = plane.ask(20, wire.ClaimRequest("p", "t", [], 20, False, 0.0))
    assert claimed.ids == MANY and [tags["n"] for tags in claimed.tags] == [0] * 5 + [5] * 5 + [10] * 2
    assert not plane.service.clients[0].named


def test_names_that_come_twice_count_once_and_those_that_do_not_fit_are_refused(desk: Desk) -> None:
    for _ in range(2):
        assert desk.ask(1, wire.Naming(3, 0, IDS[:2])) == wire.Done()
        assert desk.ask(1, wire.Naming(3, 2, IDS[2:4])) == wire.Done()
    assert isinstance(desk.ask(1, wire.Naming(3, 5, IDS[5:6])), wire.Failure)
    assert isinstance(desk.ask(1, wire.Naming(3, 4, IDS[5:6], [{}])), wire.Failure)
    assert desk.ask(1, wire.Clear("p", [], 3)) == wire.Done(4)
    assert desk.ask(1, wire.Clear("p", [], 3)).kind == "InvalidRequestError"  # they are gone with the first


def test_a_clear_whose_names_never_came_is_refused_and_clears_nothing(desk: Desk) -> None:
    desk.ask(1, wire.Naming(3, 0, IDS[:2]))
    refused = desk.ask(1, wire.Clear("p", [], 4))
    assert refused.kind == "InvalidRequestError" and "have not come" in refused.message
    assert desk.ask(2, wire.Clear("p", [], 3)).kind == "InvalidRequestError"  # another client's names
    assert live(desk) == IDS
    desk.ask(1, wire.Naming(5, 0, []))
    assert desk.ask(1, wire.Clear("p", [], 5)) == wire.Done(0)  # none is as good a number as any


def test_a_commit_without_its_names_is_refused_and_its_place_comes_back(desk: Desk) -> None:
    used = desk.used
    for named in (3, 4):
        desk.ask(1, wire.Naming(3, 0, ["a"]))
        place = desk.answers[desk.reserve(1, 1)].place
        body = wire.Commit("p", 0, [], ["x"], [layout_of(PAGE, 1)], place.number, PAGE, FOREVER)
        body.named = named
        assert isinstance(desk.ask(1, body), wire.Failure)  # of another version, or without samples
        desk.ask(1, wire.Unname(3))
    request = desk.post(1, wire.Naming(3, 0, ["a"]))
    assert desk.answers[request] == wire.Done()
    body.named = 3
    desk.service.clients[1].abandoned.append(request.number + 1)
    assert isinstance(desk.ask(1, body), wire.Failure)
    assert desk.used == used and not desk.service.clients[1].named


def mark(desk: Desk, ids: list[str]) -> PendingRequest:
    """Mark samples as claimed by hand, which others have named before."""
    for at in range(0, len(ids), AT_ONCE):
        desk.ask(1, wire.Naming(7, at, ids[at : at + AT_ONCE]))
    return desk.post(1, wire.MarkClaimed("p", "t", [], True, 7))


def test_very_many_samples_are_marked_as_claimed_at_one_moment(desk: Desk) -> None:
    request = mark(desk, IDS[2:])
    for _ in range(8):
        assert request not in desk.answers and desk.service.state.partition("p").task("t").count == 0
        desk.service.go_on()
    work_off(desk)
    assert desk.answers[request] == wire.Done(True)
    assert desk.claimed(2, len(IDS)) == IDS[:2]


@pytest.mark.parametrize("slices", range(9))
@pytest.mark.parametrize("what", ["claimed", "cleared", "written anew", "named twice", "dropped", "dies"])
def test_none_is_marked_if_one_cannot_be(desk: Desk, slices: int, what: str) -> None:
    request = mark(desk, [*IDS, IDS[0]] if what == "named twice" else IDS)
    for _ in range(slices):
        desk.service.go_on()
    if what == "claimed":
        assert desk.claimed(2, 1) == IDS[:1]
    elif what == "dropped":
        desk.post(0, wire.DropPartition("p"))
    elif what == "dies":
        desk.service.disconnect(1, died=True)
    elif what != "named twice":
        desk.ask(0, wire.Clear("p", [IDS[-1]]))
        if what == "written anew":
            desk.put(0, [IDS[-1]])
    work_off(desk)
    if what == "dies":
        assert request not in desk.answers
    else:
        assert desk.answers[request] == wire.Done(False)
    if what != "dropped":
        left = [i for i in IDS if what == "named twice" or what == "dies" or i in live(desk)]
        claimed = desk.claimed(2, len(IDS))
        assert sorted(claimed) == sorted(left[1:] if what == "claimed" else left)


def test_a_mark_whose_names_never_came_is_refused(desk: Desk) -> None:
    assert desk.ask(1, wire.MarkClaimed("p", "t", [], True, 7)).kind == "InvalidRequestError"


def test_a_cursor_is_moved_back_in_slices_and_the_order_is_that_of_the_claims(desk: Desk) -> None:
    claimed = desk.claimed(2, 9) + desk.claimed(0, len(IDS))
    request = desk.post(1, wire.MarkClaimed("p", "t", None, False))
    desk.ask(0, wire.Clear("p", IDS[:1]))
    again = desk.claimed(0, 2)  # while it goes on; they stay claimed
    assert request not in desk.answers and again == claimed[-AT_ONCE:][:2]
    work_off(desk)
    assert desk.answers[request] == wire.Done(True)
    assert desk.claimed(0, len(IDS)) == [i for i in claimed[1:] if i not in again]
