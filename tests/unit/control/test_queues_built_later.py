"""A queue that is built later hands out the same as one that was there from the beginning."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.unit.control import at_once
from tests.unit.control.histories import OWNER, History, tag_values
from tests.unit.control.whole_state import dump_state, restore_state

from rlplane.control import conditions, cursors, leaving, making
from rlplane.control.loading import BlockSize
from rlplane.control.looking_ahead import look_for_claim
from rlplane.control.requests import Claim, Effects, Put

FIELDS: list[tuple[str, ...]] = [(), ("x",), ("y",), ("x", "y")]
ORDERS = [None, "lifo", "priority:v"]
QUEUES = list(itertools.product(FIELDS, ORDERS))
IDS = [f"{group}_g{number}" for group in "abcd" for number in range(2)]


class LaterQueues(History):
    """What happens to a partition."""

    def ask_for_everything(self) -> None:
        for fields, order in QUEUES:
            self.claim(fields, order, 8, where={"v": "never"})

    def put(self, ids: list[str], fields: tuple[str, ...], tags: list[int] | None) -> None:
        blocks = {name: next(self.blocks) for name in fields}
        self.state.put(Put("p", ids, blocks, tag_values(ids, tags)))

    def close(self, name: str) -> None:
        if self.group_size and name in self.state.partition("p").table.groups.tolist():
            self.state.close_group("p", name, "failed", [])

    def build_in_slices(self, fields: tuple[str, ...], order: str | None) -> Iterator[None]:
        for look in look_for_claim(self.state, Claim("p", "t", fields, 8, order=order)):
            while not look(lambda: True):
                yield

    def saved_and_loaded(self, *, release_claims: bool) -> LaterQueues:
        blocks = self.state.blocks()
        sizes = {block: BlockSize(0, 8) for block in blocks}
        numbers = {block: block for block in blocks}
        back = LaterQueues(self.group_size)
        back.state = restore_state(
            dump_state(self.state), numbers, sizes, None, release_claims=release_claims
        )
        return back


ids_ = st.lists(st.sampled_from(IDS), unique=True, min_size=1, max_size=4)
fields_ = st.sampled_from(FIELDS)
tags_ = st.lists(st.integers(0, 2), min_size=1, max_size=4)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("put"), ids_, fields_, st.none() | tags_),
        st.tuples(st.just("put"), st.just(IDS), fields_, st.none()),
        st.tuples(st.just("claim"), fields_, st.sampled_from(ORDERS), st.integers(1, 3), st.integers(1, 3)),
        st.tuples(st.just("unclaim"), ids_),
        st.tuples(st.just("unclaim"), st.just(IDS)),
        st.tuples(st.just("clear"), ids_),
        st.tuples(st.just("close"), st.sampled_from("abcd")),
    ),
    max_size=25,
)


# A member that the task has kept is cleared and written again, after the others were handed out without it.
REPLACED_MEMBER = [
    ("put", IDS, ("x",), None),
    ("claim", (), None, 3, 1),
    ("unclaim", ["c_g1"]),
    ("clear", ["c_g0"]),
    ("put", ["c_g0"], ("x",), None),
    ("claim", (), None, 1, 1),
]


@pytest.mark.parametrize("group_size", [None, 2])
@settings(max_examples=300, deadline=None)
@given(steps=steps, dies=st.booleans(), last=st.sampled_from(QUEUES))
@example(steps=REPLACED_MEMBER, dies=False, last=((), None))
def test_the_order_does_not_depend_on_when_a_queue_is_built(
    group_size: int | None, steps: list[Any], dies: bool, last: tuple[tuple[str, ...], str | None]
) -> None:
    before, after = LaterQueues(group_size), LaterQueues(group_size)
    before.ask_for_everything()
    for kind, *arguments in steps:
        assert getattr(before, kind)(*arguments) == getattr(after, kind)(*arguments)
    # A load may hand out again what was claimed, as if the owner had died.
    loaded = after.saved_and_loaded(release_claims=dies)
    if dies:
        at_once.release_owner(before.state, OWNER)
        at_once.release_owner(after.state, OWNER)
    assert before.claim(*last, 8) == after.claim(*last, 8) == loaded.claim(*last, 8)


@pytest.mark.parametrize("group_size", [None, 2])
@settings(max_examples=200, deadline=None)
@given(steps=steps, slices=st.integers(0, 5), last=st.sampled_from(QUEUES))
def test_what_a_client_held_comes_back_in_slices_as_it_would_at_once(
    group_size: int | None, steps: list[Any], slices: int, last: tuple[tuple[str, ...], str | None]
) -> None:
    whole, sliced = LaterQueues(group_size), LaterQueues(group_size)
    for history in (whole, sliced):
        history.ask_for_everything()
        for kind, *arguments in steps:
            getattr(history, kind)(*arguments)
    at_once.release_owner(whole.state, OWNER)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(leaving, "_SAMPLES_AT_ONCE", 1)
        gone, _ = sliced.state.begin_release(OWNER)
        for _ in range(slices):
            if not gone.is_over:
                sliced.state.release_some(gone, Effects())
        # A save in the middle has what is still to come back where it will be.
        loaded = sliced.saved_and_loaded(release_claims=False)
        while not gone.is_over:
            sliced.state.release_some(gone, Effects())
    task = sliced.state.partition("p").task("t")
    assert task.kept == whole.state.partition("p").task("t").kept and not task.is_returning
    # A group some of which was back before comes among the others by when the rest of it does.
    in_order = sorted if group_size else list
    wanted = in_order(whole.claim(*last, 8))
    assert in_order(sliced.claim(*last, 8)) == wanted and in_order(loaded.claim(*last, 8)) == wanted


@pytest.mark.parametrize("group_size", [None, 2])
@settings(max_examples=300, deadline=None)
@given(
    steps=steps,
    begins=st.integers(0, 20),
    is_finished=st.booleans(),
    last=st.sampled_from(QUEUES),
)
def test_the_order_does_not_depend_on_what_happens_while_a_queue_is_built_in_slices(
    group_size: int | None,
    steps: list[Any],
    begins: int,
    is_finished: bool,
    last: tuple[tuple[str, ...], str | None],
) -> None:
    whole, sliced = LaterQueues(group_size), LaterQueues(group_size)
    slices: Iterator[None] = iter(())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conditions, "_ROWS_AT_ONCE", 2)
        patch.setattr(cursors, "_SORTED_AT_ONCE", 2)
        patch.setattr(making, "_ROWS_AT_ONCE", 2)
        patch.setattr(cursors, "_MANY_ROWS", 3)  # so that a put to a queue that is whole is a long one
        for at, (kind, *arguments) in enumerate(steps):
            assert getattr(whole, kind)(*arguments) == getattr(sliced, kind)(*arguments)
            if at == begins:
                slices = sliced.build_in_slices(*last)
            next(slices, None)
        if is_finished:
            for _ in slices:
                pass
        assert whole.claim(*last, 8) == sliced.claim(*last, 8)


@settings(max_examples=150, deadline=None)
@given(steps=steps, last=st.sampled_from(QUEUES))
def test_the_order_does_not_depend_on_whether_a_put_was_of_very_many(
    steps: list[Any], last: tuple[tuple[str, ...], str | None]
) -> None:
    few, many = LaterQueues(None), LaterQueues(None)
    for history in few, many:
        history.ask_for_everything()
    for kind, *arguments in steps:
        wanted = getattr(few, kind)(*arguments)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cursors, "_VERY_MANY_ROWS", 1)  # so that it drops the queues that are in order
            assert getattr(many, kind)(*arguments) == wanted
    assert few.claim(*last, 8) == many.claim(*last, 8)


def test_a_checkpoint_from_before_places_were_kept_loads() -> None:
    history = LaterQueues(None)
    history.put(["a_g0", "b_g0", "c_g0"], ("x",), None)
    history.claim((), None, 1)
    history.unclaim(["a_g0"])
    history.claim((), None, 2)
    saved = msgspec.msgpack.decode(dump_state(history.state))
    for partition in saved["partitions"]:
        del partition["stamps"], partition["closed"]
        for task in partition["tasks"]:
            del task["places"]
    blocks = {0: BlockSize(0, 8)}
    state = restore_state(msgspec.msgpack.encode(saved), {0: 0}, blocks, None, release_claims=True)
    history.state, history.blocks = state, itertools.count(1)
    history.put(["d_g0"], ("x",), None)
    assert history.claim((), None, 4) == ["a_g0", "b_g0", "c_g0", "d_g0"]
