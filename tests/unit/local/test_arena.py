"""The arena: extents never overlap, every byte is counted, and what is free can be had."""

from __future__ import annotations

import errno

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rlplane.adapters.local.arena import PAGE, Arena, pages
from rlplane.adapters.local.wire import Extent

LIMIT = 40
SEGMENT = 8
NOBODY = -1
Hole = tuple[int, int]


class ArenaMachine(RuleBasedStateMachine):
    """Random clients of one arena; the holes are worked out anew from the extents each time."""

    def __init__(self) -> None:
        super().__init__()
        self.segments: dict[int, int] = {}
        self.homes: dict[int, int] = {}
        self.idle_since: dict[int, float] = {}
        self.backed: set[tuple[int, int]] = set()
        self.extents: list[Extent] = []
        self.now = 0.0
        self.arena = Arena(LIMIT * PAGE + 100, self._create, self._destroy, segment_size=SEGMENT * PAGE - 1)

    def _create(self, number: int, size: int) -> None:
        assert number not in self.segments
        assert size % PAGE == 0
        self.segments[number] = size
        self.idle_since[number] = self.now

    def _destroy(self, number: int) -> None:
        assert not self._in(number), "somebody still has memory there"
        del self.segments[number]
        self.homes.pop(number)
        self.backed = {page for page in self.backed if page[0] != number}

    @rule(nbytes=st.integers(1, 12 * PAGE) | st.integers(1, LIMIT * PAGE), owner=st.integers(0, 2))
    def allocate(self, nbytes: int, owner: int) -> None:
        size = pages(nbytes)
        fitting = {
            number: first for number in self.segments if (first := self._first_hole(number, size)) is not None
        }
        room = LIMIT * PAGE - sum(self.segments.values())
        idle = sum(held for number, held in self.segments.items() if not self._in(number))
        possible = bool(fitting) or size <= room + idle
        before = dict(self.segments)
        extent = self.arena.allocate(nbytes, owner, self.now)
        assert (extent is not None) is possible
        if extent is None:
            assert self.segments == before
            return
        assert extent.size == size and extent.number not in [known.number for known in self.extents]
        covered = {(extent.segment, page) for page in _pages_of(extent)}
        assert extent.backed is (covered <= self.backed)
        home = self.homes.get(extent.segment)
        if extent.segment not in before:
            assert not any(self.homes[number] in (owner, NOBODY) for number in fitting)
            self.homes[extent.segment] = owner
        else:
            assert extent.offset == fitting[extent.segment]
            wishes = [owner, NOBODY]
            rank = {n: wishes.index(h) if h in wishes else 2 for n, h in self.homes.items() if n in fitting}
            assert rank[extent.segment] == min(rank.values())
            if home == NOBODY:
                self.homes[extent.segment] = owner
        self.extents.append(extent)

    @precondition(lambda self: self.extents)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        extent = data.draw(st.sampled_from(self.extents))
        self.extents.remove(extent)
        self.arena.free(extent, self.now)
        if not self._in(extent.segment):
            self.idle_since[extent.segment] = self.now

    @precondition(lambda self: self.extents)
    @rule(data=st.data())
    def commit_a_part(self, data: st.DataObject) -> None:
        extent = data.draw(st.sampled_from(self.extents))
        nbytes = data.draw(st.integers(1, extent.size))
        kept = self.arena.shrink(extent, nbytes)
        assert kept == Extent(extent.number, extent.segment, extent.offset, pages(nbytes))
        self.extents[self.extents.index(extent)] = kept
        self.backed |= {(kept.segment, page) for page in _pages_of(kept)}

    @rule(owner=st.integers(0, 2))
    def a_client_goes(self, owner: int) -> None:
        self.arena.abandon_home(owner)
        self.homes = {number: NOBODY if home == owner else home for number, home in self.homes.items()}

    @rule(seconds=st.integers(1, 6))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds

    @rule()
    def give_back(self) -> None:
        long = [n for n in self.segments if not self._in(n) and self.idle_since[n] < self.now - 5]
        assert self.arena.give_back(self.now - 5) == long
        assert not set(long) & set(self.segments)

    @invariant()
    def everything_is_counted(self) -> None:
        assert self.arena.total == sum(self.segments.values()) <= self.arena.limit == LIMIT * PAGE
        assert self.arena.used == sum(extent.size for extent in self.extents)
        assert self.arena.describe() == {
            "limit": LIMIT * PAGE,
            "total": self.arena.total,
            "used": self.arena.used,
            "segments": len(self.segments),
            "backed": len(self.backed) * PAGE,
        }

    @invariant()
    def extents_are_apart_and_the_rest_is_free_in_whole_pieces(self) -> None:
        for number in self.segments:
            # Raises if two overlap; neighbours that are free are one hole, so this proves the coalescing.
            assert self.arena._segments[number].free == self._holes(number)

    def teardown(self) -> None:
        for extent in self.extents:
            self.arena.free(extent, self.now)
        assert self.arena.used == 0
        for number, size in self.segments.items():
            assert self.arena._segments[number].free == [(0, size)]
        self.extents.clear()
        every = list(self.segments)
        assert self.arena.give_back(float("inf")) == every
        assert self.arena.total == 0 and not self.segments

    def _in(self, number: int) -> list[Extent]:
        return sorted((e for e in self.extents if e.segment == number), key=lambda e: e.offset)

    def _holes(self, number: int) -> list[Hole]:
        holes, at = [], 0
        for extent in self._in(number):
            assert extent.offset >= at and extent.offset % PAGE == extent.size % PAGE == 0
            if extent.offset > at:
                holes.append((at, extent.offset - at))
            at = extent.offset + extent.size
        assert at <= self.segments[number]
        return holes + ([(at, self.segments[number] - at)] if at < self.segments[number] else [])

    def _first_hole(self, number: int, size: int) -> int | None:
        return next((offset for offset, room in self._holes(number) if room >= size), None)


def _pages_of(extent: Extent) -> range:
    return range(extent.offset // PAGE, (extent.offset + extent.size) // PAGE)


TestArenaIsExact = ArenaMachine.TestCase
TestArenaIsExact.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def arena(limit: int, segment: int, *, create: object = None) -> Arena:
    def nothing(*_: int) -> None:
        pass

    return Arena(limit, create or nothing, nothing, segment_size=segment)  # type: ignore[arg-type]


@pytest.mark.parametrize(("nbytes", "size"), [(0, 1), (1, 1), (PAGE, 1), (PAGE + 1, 2), (10 * PAGE, 10)])
def test_sizes_are_whole_pages_and_at_least_one(nbytes: int, size: int) -> None:
    assert pages(nbytes) == size * PAGE


def test_a_client_gets_the_memory_again_that_it_has_mapped_already() -> None:
    it = arena(100 * PAGE, 10 * PAGE)
    mine = it.allocate(5 * PAGE, 1, 0.0)
    other = it.allocate(5 * PAGE, 2, 0.0)
    assert mine and other and mine.segment != other.segment
    it.free(mine, 0.0)
    again = it.allocate(5 * PAGE, 1, 0.0)
    assert again and (again.segment, again.offset) == (mine.segment, mine.offset)


def test_recycled_pages_need_no_backing_and_new_ones_do() -> None:
    it = arena(100 * PAGE, 10 * PAGE)
    first = it.allocate(4 * PAGE, 1, 0.0)
    assert first and not first.backed
    it.free(it.shrink(first, 2 * PAGE), 0.0)
    small = it.allocate(2 * PAGE, 1, 0.0)
    beyond = it.allocate(PAGE, 1, 0.0)
    assert small and small.backed
    assert beyond and not beyond.backed


def test_idle_segments_make_way_for_a_large_extent() -> None:
    it = arena(16 * PAGE, 4 * PAGE)
    small = [it.allocate(4 * PAGE, owner, 0.0) for owner in range(4)]
    assert it.allocate(8 * PAGE, 9, 0.0) is None
    for extent in small[:2]:
        assert extent
        it.free(extent, 1.0)
    large = it.allocate(8 * PAGE, 9, 2.0)
    assert large and large.size == 8 * PAGE
    assert it.describe()["segments"] == 3 and it.total == 16 * PAGE


def test_an_arena_that_cannot_make_a_segment_stays_as_it_was() -> None:
    def full(number: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "no space")

    it = arena(100 * PAGE, 10 * PAGE, create=full)
    with pytest.raises(OSError, match="no space"):
        it.allocate(PAGE, 1, 0.0)
    assert it.describe() == {"limit": 100 * PAGE, "total": 0, "used": 0, "segments": 0, "backed": 0}


@pytest.mark.parametrize(
    ("limit", "expected"),
    [(64 * 2**20, 4 * 2**20), (4 * 2**20, 2**20), (2**40, 256 * 2**20), (8 * PAGE, 8 * PAGE)],
)
def test_a_segments_default_size_is_a_part_of_the_limit(limit: int, expected: int) -> None:
    made: list[int] = []
    it = Arena(limit, lambda number, size: made.append(size), lambda number: None)
    it.allocate(1, 0, 0.0)
    assert made == [expected]
