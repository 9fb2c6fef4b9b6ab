"""A request that changes very many samples is worked off in slices, between which others are served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.unit.service.service_harness import FOREVER, ArenaHost, Desk, layout_of

from rlplane.control import clearing, loading
from rlplane.control.dump import dump_state
from rlplane.control.fields import FieldIndex
from rlplane.control.loading import pieces_of
from rlplane.control.requests import Put
from rlplane.control.rules import PartitionSpec
from rlplane.control.state import ControlState
from rlplane.errors import UnknownPartitionError
from rlplane.service import long_work
from rlplane.service import protocol as wire
from rlplane.service.clients import PendingRequest
from rlplane.service.core import ControlService
from rlplane.service.journal import Journal
from rlplane.service.recovery import JournaledHost, recover
from rlplane.storage.keyed import KeyedHost
from rlplane.storage.places import Loss
from rlplane.storage.shm.arena import PAGE

AT_ONCE = 4
IDS = [f"s{number}" for number in range(10 * AT_ONCE)]


@pytest.fixture(autouse=True)
def short_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clearing, "_SAMPLES_AT_ONCE", AT_ONCE)


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


def finish(desk: Desk) -> int:
    """Work off what was begun; return in how many slices."""
    slices = 0
    while desk.service.has_work:
        before = desk.service.state.live
        desk.service.go_on()
        slices += 1
        assert before - desk.service.state.live <= AT_ONCE
    return slices


@pytest.mark.parametrize("ids", [IDS, None])
def test_a_long_clear_takes_slices_and_is_answered_when_all_are_gone(
    desk: Desk, ids: list[str] | None
) -> None:
    request = desk.post(1, wire.Clear("p", ids))
    assert live(desk) == IDS[AT_ONCE:] and request not in desk.answers
    desk.put(1, ["new"])  # not one of those that were there when it was asked for
    assert finish(desk) == 9
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
    finish(desk)
    assert desk.answers[long].value + desk.answers[another].value == len(IDS) - 5 + 1
    assert waiting not in desk.answers and live(desk) == IDS[2:5]


def test_what_waits_for_room_gets_it_while_a_clear_is_under_way(desk: Desk) -> None:
    waiting = desk.reserve(0, 64 - 20 + 2)
    assert waiting not in desk.answers
    request = desk.post(1, wire.Clear("p", IDS))
    assert isinstance(desk.answers[waiting], wire.Reserved) and request not in desk.answers
    finish(desk)


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
    assert finish(desk) == 9
    assert desk.answers[request] == wire.Done(len(IDS))
    assert live(desk) == IDS[-2:] and desk.service.state.live == 2


def test_a_partition_can_be_dropped_in_the_middle_of_a_clear(desk: Desk) -> None:
    first, second = desk.post(1, wire.Clear("p", IDS)), desk.post(0, wire.DropPartition("p"))
    finish(desk)
    assert desk.answers[first].value + desk.answers[second].value == len(IDS)
    assert desk.service.state.live == 0 and desk.used == 0


@pytest.mark.parametrize("died", [True, False])
def test_what_a_client_has_begun_is_done_although_it_goes(desk: Desk, died: bool) -> None:
    desk.post(1, wire.Clear("p", IDS))
    desk.service.disconnect(1, died=died)
    finish(desk)
    assert desk.service.state.live == 0 and desk.used == 0


class JournaledPlane:
    """A service with a journal; it can be killed, and the next one goes on in its place."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.answers: dict[tuple[int, int], Any] = {}
        journal = Journal(directory)
        self.service = ControlService(1000, JournaledHost(ArenaHost(64, 64), journal), self._deliver, journal)
        self.service.connect(0, "secret")

    def _deliver(self, request: PendingRequest, answer: wire.Answer) -> None:
        assert (request.client, request.number) not in self.answers, "answered twice"
        self.answers[request.client, request.number] = answer

    def ask(self, number: int, request: wire.Request) -> Any:
        body = wire.encode(wire.Envelope(request))
        self.service.handle(PendingRequest(0, number, 7), wire.envelope_decoder.decode(body), body)
        return self.answers.get((0, number))

    def die(self) -> None:
        """Kill the service, and start it again."""
        journal = self.service.journal
        if journal is not None:
            journal.flush()
        self.service = recover(self.directory, 1000, 64 * PAGE).service
        self.service.deliver = self._deliver


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
    assert finish(desk) == 9
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
    assert finish(desk) >= 2 * len(IDS) // AT_ONCE - 2 and max(looked_at) <= AT_ONCE
    assert desk.answers[first] == desk.answers[second] == wire.Done(len(IDS) - AT_ONCE - len(kept))
    assert live(desk) == kept
    assert desk.ask(0, wire.Lost(Loss((1,), 4))) == wire.Done()
