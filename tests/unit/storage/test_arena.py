"""The arena: places never overlap, every byte is counted, and what is free can be had."""

from __future__ import annotations

import errno
import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rlplane.storage.places import Place
from rlplane.storage.shm.arena import PAGE, Arena, pages

MB, GB = 2**20, 2**30
LIMIT = 40
SEGMENT = 8
NOBODY = -1
Hole = tuple[int, int]
Page = tuple[int, int]


class ArenaMachine(RuleBasedStateMachine):
    """Random clients of one arena; which pages exist and what is free is worked out anew each time."""

    def __init__(self) -> None:
        super().__init__()
        self.segments: dict[int, int] = {}
        self.ever: set[int] = set()  # the numbers of all segments that there were
        self.last_place = 0
        self.homes: dict[int, int] = {}
        self.idle_since: dict[int, float] = {}
        self.backed: set[Page] = set()
        self.touched: set[Page] = set()  # those that may exist
        self.places: list[Place] = []
        self.given_back: dict[int, list[tuple[int, int]]] = {}
        self.now = 0.0
        self.arena = Arena(
            LIMIT * PAGE + 100, self._create, self._destroy, self._discard, segment_size=SEGMENT * PAGE - 1
        )

    def _create(self, number: int, size: int) -> None:
        assert number not in self.ever, "a client may still have the file of that number mapped"
        self.ever.add(number)
        assert size % PAGE == 0
        self.segments[number] = size
        self.idle_since[number] = self.now

    def _destroy(self, number: int) -> None:
        assert not self._in(number), "somebody still has memory there"
        del self.segments[number]
        self.homes.pop(number)
        self.backed = {page for page in self.backed if page[0] != number}
        self.touched = {page for page in self.touched if page[0] != number}

    def _discard(self, number: int, start: int, size: int) -> None:
        gone = {(number, page) for page in range(start // PAGE, (start + size) // PAGE)}
        assert size > 0 and start % PAGE == size % PAGE == 0
        assert gone <= self.touched, "pages that do not exist are given back"
        assert not any(gone & self._held(place) for place in self.places), "somebody still has memory there"
        self.backed -= gone
        self.touched -= gone

    @rule(nbytes=st.integers(1, 12 * PAGE) | st.integers(1, LIMIT * PAGE), owner=st.integers(0, 2))
    def allocate(self, nbytes: int, owner: int) -> None:
        size = pages(nbytes)
        possible = self.arena.used + size <= LIMIT * PAGE
        before, touched = dict(self.segments), set(self.touched)
        place = self.arena.allocate(nbytes, owner, self.now)
        assert (place is not None) is possible, "what fits by the sum of free bytes fits"
        if place is None:
            assert self.segments == before and self.touched == touched
            return
        assert place.size == size and place.number > self.last_place
        self.last_place = place.number
        mine = _pages_of(place)
        assert is_backed(place) is (mine <= self.backed)
        if len(touched) * PAGE + size <= LIMIT * PAGE:
            assert self.touched == touched, "pages are given back only when others need them"
        home = self.homes.get(segment_of(place))
        if home not in (owner, None, NOBODY):
            assert mine <= touched, "in a segment of others only what exists is taken"
        elif home != owner:
            self.homes[segment_of(place)] = owner
        self.touched |= mine
        self.places.append(place)

    @precondition(lambda self: self.places)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        place = data.draw(st.sampled_from(self.places))
        self.places.remove(place)
        held = self._held(place)
        self.given_back.pop(place.number, None)
        self.arena.free(place, self.now)
        if not is_backed(place):
            assert not self.touched & held - self.backed, "nobody knows whether these pages exist"
        if segment_of(place) in self.segments and not self._in(segment_of(place)):
            self.idle_since[segment_of(place)] = self.now

    @precondition(lambda self: self.places)
    @rule(data=st.data())
    def commit_a_part(self, data: st.DataObject) -> None:
        place = data.draw(st.sampled_from(self.places))
        if place.number in self.given_back:
            return  # it was committed
        nbytes = data.draw(st.integers(1, place.size))
        kept = self.arena.shrink(place, nbytes)
        assert kept == Place(place.number, pages(nbytes), (segment_of(place), offset_of(place), 1))
        self.places[self.places.index(place)] = kept
        self.backed |= _pages_of(place)

    @precondition(lambda self: self.places)
    @rule(data=st.data())
    def give_a_part_back(self, data: st.DataObject) -> None:
        place = data.draw(st.sampled_from(self.places))
        ends = sorted(data.draw(st.lists(st.integers(0, place.size), min_size=2, max_size=6)))
        dead = list(zip(ends[::2], ends[1::2], strict=False))
        before = self._held(place)
        given = self.arena.give_back_part(place, dead)
        self.given_back.setdefault(place.number, []).extend(given)
        whole = {
            (segment_of(place), offset_of(place) // PAGE + page)
            for page in range(place.size // PAGE)
            if any(start <= page * PAGE and (page + 1) * PAGE <= stop for start, stop in dead)
        }
        assert self._held(place) == before - whole

    @rule(owner=st.integers(0, 2))
    def a_client_goes(self, owner: int) -> None:
        self.arena.leave_home(owner)
        self.homes = {number: NOBODY if home == owner else home for number, home in self.homes.items()}

    @rule(seconds=st.integers(1, 6))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds

    @rule()
    def give_back(self) -> None:
        long = [n for n in self.segments if not self._in(n) and self.idle_since[n] < self.now - 5]
        assert self.arena.give_back(self.now - 5) == long
        assert not set(long) & set(self.segments)

    @rule(forgotten=st.integers(0, 3))
    def another_service_takes_over(self, forgotten: int) -> None:
        self.last_place += forgotten
        data = {
            number: [(page * PAGE, PAGE) for home, page in sorted(self.touched) if home == number]
            for number in self.segments
        }
        again = Arena(LIMIT * PAGE, self._create, self._destroy, self._discard, segment_size=SEGMENT * PAGE)
        again.adopt(self.segments, self.places, self.last_place, data, self.given_back)
        untouched = {
            (number, page)
            for number, start, size in again.untouched()
            for page in range(start // PAGE, (start + size) // PAGE)
        }
        every = {(number, page) for number, size in self.segments.items() for page in range(size // PAGE)}
        assert untouched == every - self.touched
        self.arena = again
        self.backed = {page for place in self.places if is_backed(place) for page in self._held(place)}
        self.homes = dict.fromkeys(self.homes, NOBODY)
        self.idle_since = {
            number: self.idle_since[number] if self._in(number) else 0.0 for number in self.segments
        }

    @invariant()
    def everything_is_counted(self) -> None:
        held = sum(len(self._held(place)) for place in self.places)
        assert self.arena.used == PAGE * held <= self.arena.limit == LIMIT * PAGE
        assert len(self.touched) * PAGE <= LIMIT * PAGE
        assert self.arena.describe() == {
            "limit": LIMIT * PAGE,
            "total": len(self.touched) * PAGE,
            "used": self.arena.used,
            "segments": len(self.segments),
            "backed": len(self.backed) * PAGE,
        }

    @invariant()
    def places_are_apart_and_the_rest_is_free_in_whole_pieces(self) -> None:
        for number in self.segments:
            # Raises if two overlap; neighbours that are free are one hole, so this proves the coalescing.
            assert self.arena._segments[number].free == self._holes(number)

    def teardown(self) -> None:
        while self.places:
            self.arena.free(self.places.pop(), self.now)
        assert self.arena.used == 0
        for number, size in self.segments.items():
            assert self.arena._segments[number].free == [(0, size)]
        every = list(self.segments)
        assert self.arena.give_back(float("inf")) == every
        assert not self.touched and not self.segments

    def _held(self, place: Place) -> set[Page]:
        given = self.given_back.get(place.number, [])
        return _pages_of(place) - {
            (segment_of(place), (offset_of(place) + start) // PAGE + page)
            for start, size in given
            for page in range(size // PAGE)
        }

    def _in(self, number: int) -> list[int]:
        pages = [page for place in self.places for home, page in self._held(place) if home == number]
        assert len(set(pages)) == len(pages), "two places have the same page"
        return sorted(pages)

    def _holes(self, number: int) -> list[Hole]:
        holes, at = [], 0
        for page in self._in(number):
            if page * PAGE > at:
                holes.append((at, page * PAGE - at))
            at = (page + 1) * PAGE
        assert at <= self.segments[number]
        return holes + ([(at, self.segments[number] - at)] if at < self.segments[number] else [])


def segment_of(place: Place) -> int:
    return place.at[0]


def offset_of(place: Place) -> int:
    return place.at[1]


def is_backed(place: Place) -> bool:
    return bool(place.at[2])


def _pages_of(place: Place) -> set[Page]:
    first = offset_of(place) // PAGE
    return {(segment_of(place), first + page) for page in range(place.size // PAGE)}


TestArenaIsExact = ArenaMachine.TestCase
TestArenaIsExact.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def arena(limit: int, segment: int, *, create: object = None) -> Arena:
    def nothing(*_: int) -> None:
        pass

    return Arena(limit, create or nothing, nothing, nothing, segment_size=segment)  # type: ignore[arg-type]


@pytest.mark.parametrize(("nbytes", "size"), [(0, 1), (1, 1), (PAGE, 1), (PAGE + 1, 2), (10 * PAGE, 10)])
def test_sizes_are_whole_pages_and_at_least_one(nbytes: int, size: int) -> None:
    assert pages(nbytes) == size * PAGE


def test_a_client_gets_the_memory_again_that_it_has_mapped_already() -> None:
    it = arena(100 * PAGE, 10 * PAGE)
    mine = it.allocate(5 * PAGE, 1, 0.0)
    other = it.allocate(5 * PAGE, 2, 0.0)
    assert mine and other and segment_of(mine) != segment_of(other)
    it.free(mine, 0.0)
    again = it.allocate(5 * PAGE, 1, 0.0)
    assert again and (segment_of(again), offset_of(again)) == (segment_of(mine), offset_of(mine))


def test_recycled_pages_need_no_backing_and_new_ones_do() -> None:
    it = arena(100 * PAGE, 10 * PAGE)
    first = it.allocate(4 * PAGE, 1, 0.0)
    assert first and not is_backed(first)
    it.free(it.shrink(first, 2 * PAGE), 0.0)
    small = it.allocate(2 * PAGE, 1, 0.0)
    beyond = it.allocate(3 * PAGE, 1, 0.0)
    assert small and is_backed(small)
    assert beyond and not is_backed(beyond)


def test_a_few_samples_here_and_there_do_not_keep_a_large_put_out() -> None:
    it = arena(8 * GB, 256 * MB)
    for client in range(32):
        place = it.allocate(1000, client, 0.0)
        assert place
        it.shrink(place, 1000)
    large = it.allocate(257 * MB, 40, 0.0)
    assert large and large.size == 257 * MB
    most = it.allocate(it.limit - it.used, 41, 0.0)
    assert most and it.used == it.limit


@pytest.mark.parametrize("fill", [0.7, 0.85, 0.95])
def test_what_fits_by_the_sum_of_free_bytes_fits_however_torn_the_arena_is(fill: float) -> None:
    it, pick = arena(64 * MB, 4 * MB), random.Random(1)
    places: list[Place] = []
    for number in range(1500):
        size = pick.randrange(1, 2 * MB)
        while it.used + pages(size) > fill * it.limit:
            it.free(places.pop(pick.randrange(len(places))), 0.0)
        place = it.allocate(size, number % 8, 0.0)
        assert place is not None
        places.append(it.shrink(place, size))
        assert it.used + it.cached <= it.limit


def test_an_arena_that_cannot_make_a_segment_stays_as_it_was() -> None:
    def full(number: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "no space")

    it = arena(100 * PAGE, 10 * PAGE, create=full)
    with pytest.raises(OSError, match="no space"):
        it.allocate(PAGE, 1, 0.0)
    assert it.describe() == {"limit": 100 * PAGE, "total": 0, "used": 0, "segments": 0, "backed": 0}


@pytest.mark.parametrize(
    ("limit", "expected"),
    [(64 * MB, 1024 * MB), (8 * GB, 64 * GB), (1024 * GB, 1024 * GB), (8 * PAGE, 128 * PAGE)],
)
def test_a_segment_has_more_addresses_than_the_arena_has_memory(limit: int, expected: int) -> None:
    made: list[int] = []
    it = Arena(limit, lambda _, size: made.append(size), lambda _: None, lambda *_: None)
    it.allocate(1, 0, 0.0)
    assert made == [expected]


def test_the_number_of_a_segment_that_is_gone_is_not_used_again_by_another_service() -> None:
    segments: dict[int, int] = {}

    def arena() -> Arena:
        return Arena(8 * PAGE, segments.__setitem__, segments.__delitem__, lambda *_: None)

    first = arena()
    place = first.allocate(PAGE, 0, 0.0)
    assert place is not None
    first.free(place, 0.0)
    assert first.give_back(1.0) == [segment_of(place)] and not segments
    second = arena()
    second.adopt({}, [], place.number, {}, {})
    again = second.allocate(PAGE, 0, 0.0)
    assert again is not None and segment_of(again) != segment_of(place)
