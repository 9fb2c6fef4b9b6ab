"""A put that is made ready some samples at a time is written as any other, whatever happens meanwhile."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.control import at_once
from tests.unit.control.histories import OWNER, History, tag_values

from rlplane.control import staging
from rlplane.control.fields import pieces_of
from rlplane.control.requests import Put
from rlplane.control.rules import PartitionSpec
from rlplane.control.state import ControlState
from rlplane.errors import DataPlaneError, InvalidRequestError, MissingDataError

IDS = [f"{group}_g{number}" for group in "abc" for number in range(2)]
QUEUES = list(itertools.product([(), ("x",)], [None, "lifo", "priority:v"]))


class LongPut(History):
    """A partition, and a put of all samples that is under way."""

    def put(self, ids: list[str], fields: tuple[str, ...], tags: list[int] | None) -> None:
        self.state.put(_put(ids, {name: next(self.blocks) for name in fields}, tags))

    def append(self, ids: list[str], fields: tuple[str, ...], finishes: bool) -> str | None:
        put = _put(ids, {name: next(self.blocks) for name in fields}, None)
        put.appends, put.finishes = True, finishes
        return self.refusal(put)

    def refusal(self, put: Put) -> str | None:
        """Write a put, if it is not refused."""
        try:
            self.state.put(put)
        except InvalidRequestError as error:
            return str(error)
        return None

    def long_put(
        self, ids: list[str], fields: tuple[str, ...], tags: list[int] | None, appends: bool, finishes: bool
    ) -> Put:
        put = _put(ids, {name: 1000 + at for at, name in enumerate(fields)}, tags)
        put.appends, put.finishes = appends, finishes or not appends
        return put

    def register(self, group_size: int | None) -> None:
        self.group_size = group_size
        self.state.register(PartitionSpec.checked("p", ["x", "y"], 0, ["t"], group_size))

    def count(self, value: int) -> int:
        return self.state.count("p", {"v": value})

    def picture(self) -> Any:
        partition = self.state.partition("p")
        rows = partition.live_rows(None)
        places = {
            name: [
                column.block[rows].tolist(),
                *[np.array(part).tolist() for part in pieces_of(column, rows)],
            ]
            for name, column in partition.columns.items()
        }
        counts = [self.count(value) for value in range(3)]
        assert sorted(partition.rows) == sorted(partition.names()) and len(rows) == self.state.live
        assert partition.rows.find(partition.names()) == rows.tolist()
        if partition.spec.group_size:
            groups: dict[str, list[int]] = {}
            for row in rows.tolist():
                groups.setdefault(partition.table.groups[row], []).append(row)
            assert {name: sorted(partition.groups.of(name)) for name in groups} == {
                name: sorted(members) for name, members in groups.items()
            }
            assert partition.groups._staged == 0 and partition.groups._members.keys() == groups.keys()
        return partition.inspect(rows), places, counts, partition.status(0.0)


def _put(ids: list[str], blocks: dict[str, int], tags: list[int] | None) -> Put:
    return Put("p", ids, blocks, tag_values(ids, tags), owner=OWNER)


ids_ = st.lists(st.sampled_from(IDS), unique=True, min_size=1, max_size=4)
fields_ = st.sampled_from([(), ("x",), ("y",), ("x", "y")])
tags_ = st.none() | st.lists(st.integers(0, 2), min_size=1, max_size=4)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("put"), ids_, fields_, tags_),
        st.tuples(st.just("append"), ids_, fields_, st.booleans()),
        st.tuples(
            st.just("claim"), st.just(("x",)), st.sampled_from([q[1] for q in QUEUES]), st.integers(1, 2)
        ),
        st.tuples(st.just("unclaim"), ids_),
        st.tuples(st.just("clear"), ids_),
        st.tuples(st.just("count"), st.integers(0, 2)),
        st.tuples(st.just("register"), st.sampled_from([None, 2])),
    ),
    max_size=16,
)


@pytest.fixture(autouse=True, scope="module")
def short_slices() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging, "_SAMPLES_AT_ONCE", 2)
        yield


@pytest.mark.parametrize("group_size", [None, 2])
@settings(max_examples=150, deadline=None)
@given(
    steps=steps,
    begins=st.integers(0, 12),
    lasts=st.integers(3, 8),
    what=st.tuples(st.permutations(IDS), fields_, tags_, st.booleans(), st.booleans()),
    is_undone=st.booleans(),
    last=st.sampled_from(QUEUES),
)
def test_what_happens_while_a_put_is_made_ready_is_as_if_it_came_before_it(
    group_size: int | None,
    steps: list[Any],
    begins: int,
    lasts: int,
    what: tuple[list[str], tuple[str, ...], list[int] | None, bool, bool],
    is_undone: bool,
    last: tuple[tuple[str, ...], str | None],
) -> None:
    at_once, sliced = LongPut(group_size), LongPut(group_size)
    long, short = sliced.long_put(*what), at_once.long_put(*what)
    ends = begins + lasts
    for at, (kind, *arguments) in enumerate([*steps, *[("count", 0)] * (ends + 1)]):
        assert getattr(at_once, kind)(*arguments) == getattr(sliced, kind)(*arguments)
        if at == begins:
            sliced.state.begin_put(long)
        elif begins < at <= ends:
            assert long.staged is not None
            if not long.staged.is_over:
                long.staged.make_some_ready()
            if at == ends and is_undone:
                long.staged.undo()
            elif at == ends and short.appends:
                refused = sliced.refusal(long)
                assert refused == at_once.refusal(short)
                if refused is not None:
                    long.staged.undo()
            elif at == ends:
                assert sliced.state.put(long).freed == at_once.state.put(short).freed
    assert at_once.picture() == sliced.picture()
    assert at_once.claim(*last, 6) == sliced.claim(*last, 6)


def staged(state: ControlState, put: Put) -> Put:
    state.begin_put(put)
    assert put.staged is not None
    while not put.staged.is_over:
        put.staged.make_some_ready()
    return put


@pytest.mark.parametrize("ids", [["a", "b", "a"], ["a", "a"], ["a", "b", ""], ["old", "a", "b", "old"]])
def test_a_name_twice_is_refused_and_leaves_nothing(ids: list[str]) -> None:
    state = ControlState()
    state.register(PartitionSpec.checked("p", ["x"], 0, ["t"]))
    state.put(Put("p", ["old"], {"x": 1}))
    put = Put("p", ids, {"x": 2})
    with pytest.raises(InvalidRequestError, match="distinct"):
        staged(state, put)
    assert put.staged is not None
    put.staged.undo()
    assert state.partition("p").names() == ["old"] and state.live == 1
    assert not state.partition("p").table.watchers


def test_one_that_must_exist_is_refused_if_a_sample_goes_while_it_is_made_ready() -> None:
    state = ControlState()
    state.register(PartitionSpec.checked("p", ["x", "y"], 0, ["t"]))
    state.put(Put("p", ["a", "b", "c"], {"x": 1}))
    put = staged(state, Put("p", ["a", "b", "c"], {"y": 2}, must_exist=True))
    at_once.clear(state, "p", ["b"])
    with pytest.raises(MissingDataError, match="'b'"):
        state.put(put)


def test_one_that_waits_for_room_is_written_when_there_is_some_and_undone_when_it_gives_up() -> None:
    state = ControlState(capacity=4)
    state.register(PartitionSpec.checked("p", ["x"], 0, ["t"]))
    state.put(Put("p", ["a", "b"], {"x": 1}))
    first = staged(state, Put("p", ["c", "d", "e"], {"x": 2}, [{"v": 1}] * 3, token="first"))
    second = staged(state, Put("p", ["f", "g", "h"], {"x": 3}, token="second"))
    assert not state.put(first).answers and not state.put(second).answers
    assert state.partition("p").names() == ["a", "b"] and state.count("p", {"v": 1}) == 0
    effects = state.give_up("second")
    assert isinstance(effects.answers[0][1], DataPlaneError) and effects.freed == [3]
    _, effects = at_once.clear(state, "p", ["a"])
    assert effects.answers == [("first", None)]
    assert state.partition("p").names() == ["b", "c", "d", "e"] and state.count("p", {"v": 1}) == 3
    # The rows of the one that gave up are used again.
    at_once.clear(state, "p", None)
    state.put(Put("p", ["i", "j", "k", "l"], {"x": 4}))
    assert state.partition("p").table.size == 64 and state.partition("p").table._unused <= 8
