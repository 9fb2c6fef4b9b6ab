"""The service's half of stores with keys: bytes are counted, numbers never return, garbage is discarded."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlplane.storage import keyed
from rlplane.storage.chunks import chunk_keys
from rlplane.storage.keyed import CHUNK_BYTES, BackgroundDiscard, KeyedHost
from rlplane.storage.places import Place

PATIENCE_S = 20.0
STEPS = st.lists(
    st.tuples(st.sampled_from(["reserve", "shrink", "free"]), st.integers(1, 5 * CHUNK_BYTES)), max_size=40
)


@given(STEPS, st.booleans())
def test_bytes_are_counted_exactly_and_no_key_is_ever_used_twice(
    steps: list[tuple[str, int]], at_once: bool
) -> None:
    limit = 12 * CHUNK_BYTES
    garbage: list[Place] = []

    def discard(place: Place) -> bool:
        if not at_once:
            garbage.append(place)
        return at_once

    host = KeyedHost(limit, discard)
    live: list[Place] = []
    keys: set[int] = set()
    for step, nbytes in steps:
        if step == "reserve":
            place = host.reserve(nbytes, client=0)
            room = limit - sum(held.size for held in live + garbage)
            assert (place is not None) == (nbytes <= room)
            if place is not None:
                assert place.size == nbytes and not keys & set(chunk_keys(place))
                keys |= set(chunk_keys(place))
                live.append(place)
        elif step == "shrink" and live:
            place = live.pop(0)
            live.append(host.shrink(place, min(nbytes, place.size)))
            assert live[-1].number == place.number and live[-1].size == min(nbytes, place.size)
        elif step == "free" and live:
            host.free(live.pop(0))
        assert host.used == sum(held.size for held in live + garbage)
        assert host.describe() == {"limit": limit, "used": host.used, "places": len(live)}
    host.discarded(garbage)
    assert host.used == sum(held.size for held in live)
    assert all(0 <= key < 2**63 for key in keys), "a store's keys are signed numbers of 64 bits"


def test_the_numbers_of_two_planes_in_one_store_do_not_meet() -> None:
    hosts = [KeyedHost(None, lambda place: True) for _ in range(20)]
    first = [host.reserve(1, 0).number for host in hosts]  # type: ignore[union-attr]
    assert len({number >> 24 for number in first}) == len(hosts)


class Store:
    """Discards as the test says: waits until it may, fails if it must."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []
        self.gone: list[int] = []
        self.entered = threading.Semaphore(0)
        self.may_go_on = threading.Semaphore(0)
        self.told = threading.Semaphore(0)
        self.fail = False
        self.discarding = BackgroundDiscard(self._discard, self._done)

    def _discard(self, places: Sequence[Place]) -> None:
        self.calls.append([place.number for place in places])
        self.entered.release()
        assert self.may_go_on.acquire(timeout=PATIENCE_S)
        if self.fail:
            raise OSError("the store is not there")

    def _done(self, places: Sequence[Place]) -> None:
        self.gone += [place.number for place in places]
        self.told.release()


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setattr(keyed, "_COLLECT_S", 0.0)
    made = Store()
    yield made
    made.discarding.close()
    made.may_go_on.release(100)


def test_what_becomes_garbage_meanwhile_is_discarded_together(store: Store) -> None:
    assert store.discarding.add(Place(0, 1)) is False, "it is not gone yet"
    assert store.entered.acquire(timeout=PATIENCE_S)
    for number in range(1, 100):
        store.discarding.add(Place(number, 1))
    assert store.gone == [], "it is said to be gone only when it is"
    store.may_go_on.release(2)
    for _ in range(2):
        assert store.told.acquire(timeout=PATIENCE_S)
    assert store.calls == [[0], list(range(1, 100))]
    assert store.gone == list(range(100))


def test_a_store_that_fails_to_discard_does_not_stop_the_next_time(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    store.fail = True
    store.may_go_on.release(2)
    with caplog.at_level(logging.ERROR, "rlplane"):
        store.discarding.add(Place(1, 1))
        assert store.told.acquire(timeout=PATIENCE_S)
    assert "1 places could not be discarded" in caplog.text and "the store is not there" in caplog.text
    store.fail = False
    store.discarding.add(Place(2, 1))
    assert store.told.acquire(timeout=PATIENCE_S)
    assert store.calls == [[1], [2]] and store.gone == [1, 2]


def test_a_closed_one_ends_its_thread_and_leaves_the_rest_to_the_end_of_the_store(store: Store) -> None:
    before = {thread.ident for thread in threading.enumerate() if thread.name == "rlplane-discard"}
    store.discarding.add(Place(1, 1))
    assert store.entered.acquire(timeout=PATIENCE_S)
    store.discarding.add(Place(2, 1))
    store.discarding.close()
    store.may_go_on.release(1)
    assert store.told.acquire(timeout=PATIENCE_S)
    for thread in threading.enumerate():
        if thread.ident in before:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
    store.discarding.add(Place(3, 1))
    assert store.calls == [[1]] and store.gone == [1]


def test_whoever_waits_for_room_does_not_wait_for_more_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keyed, "_COLLECT_S", 3600.0)
    store = Store()
    store.may_go_on.release(100)
    host = KeyedHost(2, store.discarding.add, hurry=store.discarding.hurry)
    first, second = host.reserve(1, 0), host.reserve(1, 0)
    assert first and second
    try:
        host.free(first)
        assert host.reserve(1, 0) is None, "there is room only when the store says so"
        assert store.told.acquire(timeout=PATIENCE_S)
        # It was said before there was anything to discard.
        assert host.reserve(3, 0) is None
        host.free(second)
        assert store.told.acquire(timeout=PATIENCE_S)
        assert store.gone == [first.number, second.number]
    finally:
        store.discarding.close()
