"""The control state of a cluster plane by itself: reserve and commit, room, garbage, death, checkpoints."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest

from rlplane.adapters.transfer_queue.control import Control
from rlplane.adapters.transfer_queue.liveness import Lifeline
from rlplane.adapters.transfer_queue.wire import Layout
from rlplane.errors import (
    CapacityError,
    CapacityTimeoutError,
    CheckpointError,
    ClaimTimeoutError,
    DataPlaneError,
    MissingDataError,
    UnknownPartitionError,
)
from rlplane.objects import encode_tags
from rlplane.rules import PartitionSpec


class Store:
    """Rows as TransferQueue would give and take them."""

    def __init__(self):
        self.counter = itertools.count()
        self.cleared = []
        self.discarded = threading.Event()
        self.fail = False

    def allocate(self, partition_id, count):
        return [next(self.counter) for _ in range(count)]

    def discard(self, write):
        self.cleared.append(write.number)
        self.discarded.set()
        if self.fail:
            raise OSError("the store is not there")


@pytest.fixture
def make():
    made = []

    def control(capacity=None, capacity_bytes=None, **options):
        store = Store()
        plane = Control(capacity, capacity_bytes, store.allocate, store.discard, **options)
        made.append(plane)
        plane.register(PartitionSpec.checked("p", ["x", "y"], 1000, ["train"]))
        return plane, store

    yield control
    for plane in made:
        plane.close()


def rows(count, width=4):
    return {"x": Layout("dense", "float32", (width,), count)}


def reserve(plane, ids, layouts=None, *, owner=1, token="t", tags=None, chunk_rows=2):
    encoded = None if tags is None else encode_tags(tags)
    layouts = rows(len(ids)) if layouts is None else layouts
    return plane.reserve(token, owner, "p", list(ids), encoded, layouts, chunk_rows)


def put(plane, ids, layouts=None, **how):
    reservation = reserve(plane, ids, layouts, **how)
    assert plane.commit(reservation.number) is None
    return reservation


def claim(plane, size, *, owner=1, token="c", blocking=False, where=None):
    return plane.claim(token, owner, "p", "train", ["x"], size, where, blocking)


def test_a_reserved_write_is_invisible_until_it_is_committed(make):
    plane, _ = make()
    reservation = reserve(plane, "ab", tags=[{"v": 1}, {"v": 2}])
    assert isinstance(plane.locate("p", ["a"], ["x"]), MissingDataError)
    assert claim(plane, 2) == ([], encode_tags([]))
    plane.commit(reservation.number)
    assert claim(plane, 2) == (["a", "b"], encode_tags([{"v": 1}, {"v": 2}]))
    location = plane.locate("p", ["b", "a"], ["x"])
    assert location.places["x"][1].tolist() == [1, 0]
    assert location.writes[reservation.number].indexes == reservation.indexes


def test_a_write_gets_a_row_of_transferqueue_per_chunk(make):
    plane, _ = make()
    assert len(reserve(plane, "abcde", chunk_rows=2).indexes) == 3
    assert reserve(plane, "abcde", {}, chunk_rows=5, token="u").indexes == []


def test_errors_come_back_as_values(make):
    plane, _ = make()
    assert isinstance(plane.status("unknown"), UnknownPartitionError)
    assert isinstance(plane.commit(12345), DataPlaneError)


def test_an_overwrite_goes_to_new_rows_and_frees_the_old_ones(make):
    plane, store = make()
    old = put(plane, "ab")
    new = put(plane, "ab")
    assert not set(old.indexes) & set(new.indexes)
    assert plane.drain() == 0
    assert store.cleared == [old.number]
    assert set(plane.locate("p", ["a"], ["x"]).writes) == {new.number}


def test_rows_are_freed_when_the_last_sample_that_needs_them_is_cleared(make):
    plane, store = make()
    written = put(plane, "abc")
    assert plane.clear("p", ["a", "b", "nobody"]) == 2
    assert plane.drain() == 0 and store.cleared == []
    plane.clear("p", ["c"])
    assert plane.drain() == 0 and store.cleared == [written.number]


def test_an_abandoned_write_never_appears_and_is_cleared(make):
    plane, store = make()
    reservation = reserve(plane, "ab")
    plane.abandon(reservation.number)
    assert plane.drain() == 0 and store.cleared == [reservation.number]
    assert isinstance(plane.commit(reservation.number), DataPlaneError)


def test_a_store_that_fails_to_clear_does_not_stop_the_next_clear(make, caplog):
    plane, store = make()
    store.fail = True
    put(plane, "a")
    plane.clear("p", ["a"])
    assert plane.drain() == 0
    put(plane, "b")
    plane.clear("p", ["b"])
    assert plane.drain() == 0 and len(store.cleared) == 2
    assert "could not be cleared" in caplog.text


def test_samples_that_are_reserved_count_as_room_in_use(make):
    plane, _ = make(capacity=3)
    first = reserve(plane, "ab", token="one")
    assert reserve(plane, "cd", token="two") is None
    assert isinstance(plane.give_up_room("two", 2, "p"), CapacityTimeoutError)
    plane.abandon(first.number)
    assert reserve(plane, "cd", token="three") is not None


def test_puts_that_wait_for_room_are_served_in_their_order(make):
    plane, _ = make(capacity=4)
    put(plane, "abcd")
    assert reserve(plane, "efg", token="large") is None
    plane.clear("p", ["a"])
    assert reserve(plane, "h", token="small") is None, "a small put must not starve a large one"
    plane.clear("p", ["b", "c"])
    assert reserve(plane, "efg", token="large") is not None


def test_a_put_that_has_stopped_asking_holds_nobody_back(make, monkeypatch):
    plane, _ = make(capacity=2)
    put(plane, "a")
    assert reserve(plane, "bc", token="gone") is None
    monkeypatch.setattr("rlplane.adapters.transfer_queue.control._FORGET_WAITER_S", -1.0)
    assert reserve(plane, "b", token="here") is not None


def test_a_put_without_new_samples_needs_no_room(make):
    plane, _ = make(capacity=1)
    put(plane, "a")
    assert reserve(plane, "b", token="waits") is None
    assert reserve(plane, "a", token="overwrites") is not None


def test_bytes_are_room_until_they_have_left_the_store(make):
    plane, _ = make(capacity_bytes=64)
    put(plane, "ab", rows(2, width=8))
    assert reserve(plane, "c", rows(1, width=1), token="waits") is None
    plane.clear("p", ["a", "b"])
    assert plane.drain() == 0
    assert reserve(plane, "c", rows(1, width=1), token="waits") is not None


def test_what_can_never_fit_is_refused_at_once(make):
    plane, _ = make(capacity=2, capacity_bytes=64)
    assert isinstance(reserve(plane, "abc", rows(3, width=1)), CapacityError)
    assert isinstance(reserve(plane, "a", rows(1, width=100)), CapacityError)


def test_a_waiting_claim_is_answered_when_it_asks_again(make):
    plane, _ = make()
    assert claim(plane, 2, token="waits", blocking=True) is None
    assert plane.poll("waits") is None
    put(plane, "ab")
    assert plane.poll("waits")[0] == ["a", "b"]


def test_a_claim_that_gives_up_gets_its_error_or_the_answer_that_came_first(make):
    plane, _ = make()
    claim(plane, 2, token="late", blocking=True)
    put(plane, "a")
    error = plane.give_up_claim("late")
    assert isinstance(error, ClaimTimeoutError) and error.ready == 1
    claim(plane, 2, token="lucky", blocking=True)
    put(plane, "b", token="u")
    assert plane.give_up_claim("lucky")[0] == ["a", "b"]


def test_what_an_interrupted_claim_was_given_goes_to_the_next_one(make):
    plane, _ = make()
    claim(plane, 1, token="interrupted", blocking=True)
    put(plane, "a")
    plane.cancel_claim("interrupted")
    assert claim(plane, 1)[0] == ["a"]


def test_a_client_that_leaves_while_it_waits_is_given_nothing_more(make):
    plane, _ = make()
    claim(plane, 1, owner=5, token="answered", blocking=True)
    claim(plane, 2, owner=5, token="waiting", blocking=True)
    put(plane, "a")
    plane.leave(5)
    put(plane, "bc", token="u")
    assert claim(plane, 9)[0] == ["a", "b", "c"]
    assert plane.poll("answered") is None and plane.poll("waiting") is None


def test_a_client_that_dies_leaves_no_writes_and_gives_its_claims_back(make):
    plane, store = make(client_timeout_s=0.05, listen_ip="127.0.0.1")
    owner, address = plane.join()
    put(plane, "ab", owner=99)
    line = Lifeline(address, owner)
    unfinished = reserve(plane, "cd", owner=owner, token="u")
    assert claim(plane, 1, owner=owner)[0] == ["a"]
    line._closed.set()
    line._connection.shutdown(2)
    assert store.discarded.wait(10)
    assert store.cleared == [unfinished.number]
    assert claim(plane, 5, owner=99)[0] == ["a", "b"]


def test_a_client_that_says_goodbye_keeps_its_claims(make):
    plane, store = make(client_timeout_s=0.05, listen_ip="127.0.0.1")
    owner, address = plane.join()
    other, _ = plane.join()
    put(plane, "ab", owner=99)
    line, witness = Lifeline(address, owner), Lifeline(address, other)
    assert claim(plane, 1, owner=owner)[0] == ["a"]
    reserve(plane, "e", owner=other, token="w")
    plane.leave(owner)
    line.close()
    # The witness dies later than the one who left: when it is buried, that one would have been too.
    witness._closed.set()
    witness._connection.shutdown(2)
    assert store.discarded.wait(10)
    assert claim(plane, 5, owner=99)[0] == ["b"]


def test_a_connection_that_breaks_is_made_anew_and_nobody_is_taken_for_dead(make):
    plane, _ = make(client_timeout_s=5.0, listen_ip="127.0.0.1")
    owner, address = plane.join()
    line = Lifeline(address, owner)
    reservation = reserve(plane, "a", owner=owner)
    line._connection.shutdown(2)
    assert plane.commit(reservation.number) is None
    line.close()


def test_a_frozen_state_comes_back_with_its_places_and_cursors(make):
    plane, _ = make()
    ragged = {"y": Layout("ragged", "int64", (3,), 2, np.array([1, 5]))}
    put(plane, "ab", tags=[{"v": 1}, {"v": 2}])
    put(plane, "ab", ragged, token="u")
    claim(plane, 1)
    frozen = plane.freeze(7)
    before = plane.locate("p", ["b"], ["x", "y"])
    plane.thaw(7)

    other, _ = make()
    assert other.shut(1)
    used = other.restore(frozen, 1)
    other.thaw(1)
    after = other.locate("p", ["b"], ["x", "y"])
    assert sorted(used["p"]) == sorted(i for write in before.writes.values() for i in write.indexes)
    for name, (numbers, positions) in before.places.items():
        assert after.places[name][0].tolist() == numbers.tolist()
        assert after.places[name][1].tolist() == positions.tolist()
    assert claim(other, 5)[0] == ["b"]
    other.clear("p", ["a", "b"])
    assert other.drain() == 0


def test_unfinished_claims_of_a_frozen_state_can_be_handed_out_again(make):
    plane, _ = make()
    put(plane, "abc", owner=9)
    claim(plane, 2, owner=3)
    put(plane, "a", {"y": rows(1)["x"]}, owner=3, token="u")
    frozen = plane.freeze(7)
    other, _ = make()
    assert other.shut(1)
    other.restore(frozen, 1, True)
    other.thaw(1)
    assert claim(other, 5)[0] == ["b", "c"], "the owner of 'a' had written its part"


def test_nothing_leaves_the_store_while_a_checkpoint_is_made(make):
    plane, store = make()
    put(plane, "a")
    plane.freeze(7)
    plane.clear("p", ["a"])
    assert plane.drain(timeout_s=0) == 1 and store.cleared == []
    plane.thaw(7)
    assert plane.drain() == 0 and len(store.cleared) == 1


def test_writers_wait_while_a_checkpoint_is_loaded(make):
    plane, _ = make()
    open_write = reserve(plane, "a")
    assert plane.shut(7) is False, "a write is under way"
    assert plane.shut(8) is False, "another client loads"
    assert reserve(plane, "b", token="u") is None
    assert plane.commit(open_write.number) is None
    assert plane.shut(7) is True
    plane.thaw(7)
    assert reserve(plane, "b", token="u") is not None


def test_a_state_that_cannot_be_decoded_changes_nothing(make):
    plane, _ = make()
    put(plane, "a")
    assert plane.shut(1)
    assert isinstance(plane.restore(b"\x00garbage", 1), CheckpointError)
    plane.thaw(1)
    assert plane.ids("p") == ["a"]
