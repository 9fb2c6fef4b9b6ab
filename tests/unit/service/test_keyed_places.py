"""The control service over a store with keys: what is freed is room again only when the store has let go."""

from __future__ import annotations

import itertools

import pytest
from tests.unit.service.service_harness import Desk

from rlplane.service import protocol as wire
from rlplane.service.core import ControlService
from rlplane.service.questions import status_of
from rlplane.storage.keyed import KeyedHost
from rlplane.storage.places import Place
from rlplane.storage.shm.arena import PAGE


class KeyedDesk(Desk):
    """A service whose store takes its time: ``garbage`` is what it was told to discard."""

    def __init__(self, *, limit: int = 16, capacity: int = 1000) -> None:
        self.garbage: list[Place] = []
        self.host = KeyedHost(limit * PAGE, self._discard)  # type: ignore[assignment]
        self.answers = {}
        self.service = ControlService(capacity, self.host, self._send)
        self._numbers = itertools.count(1)

    def _discard(self, place: Place) -> bool:
        self.garbage.append(place)
        return False

    def let_go(self) -> list[int]:
        """The store has discarded all garbage; the numbers of it."""
        places, self.garbage = self.garbage, []
        self.host.discarded(places)  # type: ignore[attr-defined]
        self.service.retry_reservations()
        return [place.number for place in places]


@pytest.fixture
def desk() -> KeyedDesk:
    desk = KeyedDesk()
    for client in range(3):
        desk.service.connect(client)
    desk.register()
    return desk


def place_of(desk: KeyedDesk, sample_id: str) -> int:
    located = desk.ask(2, wire.Locate("p", [sample_id], ["x"]))
    desk.service.release(2, located.lease)
    number: int = located.places[0].number
    return number


def test_bytes_are_room_until_they_have_left_the_store(desk: KeyedDesk) -> None:
    desk.put(0, ["a", "b"], 16)
    waiting = desk.reserve(1, 1)
    desk.ask(0, wire.Clear("p", ["a", "b"]))
    assert waiting not in desk.answers and desk.used == 16 * PAGE
    desk.let_go()
    assert desk.answers[waiting].place.size == desk.used == PAGE


def test_an_overwrite_goes_to_a_new_place_and_the_old_one_is_discarded(desk: KeyedDesk) -> None:
    desk.put(0, ["a", "b"], 2)
    old = place_of(desk, "a")
    desk.put(0, ["a", "b"], 2)
    new = place_of(desk, "a")
    assert new != old
    assert desk.let_go() == [old] and desk.used == 2 * PAGE


def test_a_place_is_discarded_with_the_last_sample_that_needs_it(desk: KeyedDesk) -> None:
    desk.put(0, ["a", "b", "c"], 3)
    place = place_of(desk, "a")
    desk.ask(0, wire.Clear("p", ["a", "b", "nobody"]))
    assert desk.garbage == []
    desk.ask(0, wire.Clear("p", ["c"]))
    assert desk.let_go() == [place] and desk.used == 0


def test_a_write_that_is_given_up_is_discarded_and_cannot_be_committed(desk: KeyedDesk) -> None:
    place = desk.answers[desk.reserve(0, 2)].place
    assert desk.ask(0, wire.Unreserve(place.number)) == wire.Done()
    assert desk.let_go() == [place.number] and desk.used == 0
    assert desk.answers[desk.commit(0, ["a"], place, 2)].kind == "StalePlaceError"
    assert desk.ask(0, wire.ListIds("p")) == wire.Done([])


@pytest.mark.parametrize("died", [True, False])
def test_what_a_client_that_goes_has_not_committed_is_discarded(desk: KeyedDesk, died: bool) -> None:
    spare = desk.put(0, ["a"], 1, want=2 * PAGE).spare
    reserved = desk.answers[desk.reserve(0, 3)].place
    assert spare is not None
    assert status_of(desk.service)["reserved"] == 5 * PAGE
    desk.service.disconnect(0, died=died)
    assert sorted(desk.let_go()) == sorted([spare.number, reserved.number])
    assert status_of(desk.service)["reserved"] == 0 and desk.used == PAGE
    assert desk.ask(1, wire.ListIds("p")) == wire.Done(["a"])


def test_a_spare_is_revoked_without_asking_and_its_commit_is_told(desk: KeyedDesk) -> None:
    spare = desk.put(0, ["a"], 1, want=4 * PAGE).spare
    assert spare is not None
    waiting = desk.reserve(1, 14)
    assert waiting not in desk.answers and desk.garbage == [spare]
    desk.let_go()
    assert desk.answers[waiting].place.size == 14 * PAGE
    # The first client does not know, and has written to it.
    assert desk.answers[desk.commit(0, ["b"], spare, 4)].kind == "StalePlaceError"
    assert desk.used == 15 * PAGE
    assert desk.ask(0, wire.ListIds("p")) == wire.Done(["a"])


def test_nothing_leaves_the_store_while_a_checkpoint_is_made(desk: KeyedDesk) -> None:
    desk.put(0, ["a"], 1)
    place = place_of(desk, "a")
    lease, frozen = desk.freeze(1)
    desk.ask(0, wire.Clear("p", ["a"]))
    assert desk.garbage == [] and list(frozen.places) == [place]
    desk.service.release(1, lease)
    assert desk.let_go() == [place]
