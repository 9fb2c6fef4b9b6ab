"""A dump that is written in slices has the state of one moment, whatever happens between two of them."""

from __future__ import annotations

import contextlib
import gc
import pickle
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.control import at_once
from tests.unit.control.whole_state import dump_state

from rlplane.control import copies, dump, staging
from rlplane.control.dump import StateDump
from rlplane.control.requests import Claim, Effects, Put
from rlplane.control.rules import PartitionSpec
from rlplane.control.state import ControlState
from rlplane.errors import DataPlaneError, InvalidRequestError

IDS = [f"{name}_g{number}" for name in "abcdefgh" for number in range(2)]
FLOWS: list[Any] = [
    None,
    {"on_lost": "keep"},
    {"kind": "windowed", "max_staleness": 1},
    {"kind": "ready_first", "max_staleness": 1, "batch": 4},
    {"kind": "in_order", "max_staleness": 1, "batch": 4},
]


@pytest.fixture(autouse=True, scope="module")
def short_slices() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copies, "_ROWS_AT_ONCE", 3)
        patch.setattr(dump, "_NUMBERS_AT_ONCE", 3)
        patch.setattr(dump, "_SAMPLES_AT_ONCE", 3)
        patch.setattr(staging, "_SAMPLES_AT_ONCE", 2)
        yield


class Plane:
    """A partition to which random things happen."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.state = ControlState()
        self.flow = self.random.choice(FLOWS)
        self.group_size = self.random.choice([None, 2])
        self.blocks = 0
        self.staged: list[Put] = []
        self.steps = 0
        self.register()

    def register(self) -> None:
        tasks = ["rollout", "train", *self.random.choice([[], ["u"]])]
        self.state.register(
            PartitionSpec.checked("p", ["x", "y"], 0, tasks, self.group_size, None, self.flow)
        )

    def step(self) -> None:
        self.state.now += 1.0
        kind = self.random.choice(
            ["put", "put", "append", "stage", "stage", "claim", "claim", "claim", "unclaim", "finish", "mark",
             "unmark", "clear", "again", "close", "lose", "advance", "leave", "grow", "drop"]
        )  # fmt: skip
        with contextlib.suppress(DataPlaneError):  # what is refused changes nothing
            getattr(self, f"_{kind}")()

    def _ids(self) -> list[str]:
        return self.random.sample(IDS, self.random.randrange(1, 6))

    def _task(self) -> str:
        return self.random.choice(list(self.state.partition("p").tasks))

    def _new_put(self, **how: Any) -> Put:
        ids, fields = self._ids(), self.random.sample("xyz", self.random.randrange(3))
        tags = [{"weight_version": self.random.randrange(3), "v": self.steps} for _ in ids]
        blocks = {name: self.blocks + at for at, name in enumerate(fields)}
        self.blocks += len(blocks)
        self.steps += 1
        some_tags = self.random.choice([None, tags])
        return Put("p", ids, blocks, some_tags, owner=self.random.randrange(2), now=self.state.now, **how)

    def _put(self) -> None:
        self.state.put(self._new_put())

    def _append(self) -> None:
        self.state.put(self._new_put(appends=True, finishes=self.random.random() < 0.3))

    def _stage(self) -> None:
        """Begin a long put, go on with one, or end it."""
        if len(self.staged) < 2:
            put = self._new_put()
            self.state.begin_put(put)
            self.staged.append(put)
            return
        put = self.staged[0]
        assert put.staged is not None
        if put.staged.partition is not self.state.partitions.get("p"):
            del self.staged[0]
        elif not put.staged.is_over:
            put.staged.make_some_ready()
        else:
            del self.staged[0]
            if self.random.random() < 0.2:
                put.staged.undo()
            else:
                self.state.put(put)

    def _claim(self) -> None:
        size = self.random.randrange(1, 4) * (self.group_size or 1)
        how: dict[str, Any] = {"max_uses": self.random.choice([1, 1, 3])}
        if self.random.random() < 0.2:
            how = {"step": str(self.steps), "dp_rank": 0, "dp_world": 1}
        fields = self.random.choice([[], ["x"]])
        claim = Claim("p", self._task(), fields, size, owner=self.random.randrange(2), **how)
        self.state.claim(claim, blocking=False)

    def _unclaim(self) -> None:
        at_once.unclaim(self.state, "p", self._task(), self._ids(), self.random.randrange(2))

    def _finish(self) -> None:
        at_once.finish_claims(self.state, "p", self._task(), self._ids(), self.random.randrange(2))

    def _mark(self) -> None:
        at_once.mark(self.state, "p", self._task(), self._ids()[:2])

    def _unmark(self) -> None:
        at_once.unmark(self.state, "p", self._task(), self.random.choice([None, self._ids()]))

    def _clear(self) -> None:
        at_once.clear(self.state, "p", self._ids())

    def _again(self) -> None:
        if self.random.random() < 0.3:
            self.group_size = self.random.choice([None, 2])
        self.register()

    def _close(self) -> None:
        self.state.close_group("p", self.random.choice("abcdefgh"), "failed", ["x"])

    def _lose(self) -> None:
        lost: Any = {block: None for block in self.state.blocks() if self.random.random() < 0.3}
        losing = self.state.begin_lose(lost, InvalidRequestError("gone"), Effects())
        while not losing.is_over:
            self.state.lose_some(losing, 4, Effects())

    def _advance(self) -> None:
        at_once.advance(self.state, "p", self.state.partition("p").flow.version + 1)

    def _leave(self) -> None:
        at_once.release_owner(self.state, self.random.randrange(2))

    def _grow(self) -> None:
        self.state.put(
            Put("p", [f"{self.steps}-{more}_g0" for more in range(40)], {"x": 10_000 + self.steps})
        )
        self.steps += 1

    def _drop(self) -> None:
        if self.random.random() < 0.2:
            at_once.drop(self.state, "p")
            self.register()


@settings(max_examples=400, deadline=None)
@given(seed=st.integers(0, 2**32), before=st.integers(0, 30), often=st.integers(1, 6))
def test_a_dump_has_what_was_there_when_it_was_begun(seed: int, before: int, often: int) -> None:
    plane = Plane(seed)
    for _ in range(before):
        plane.step()
    expected = dump_state(plane.state)
    written, second = [], None
    for at, piece in enumerate(StateDump(plane.state).pieces()):
        written.append(piece)
        if at == 4:
            second = dump_state(plane.state), StateDump(plane.state).pieces()  # two at a time
        if at % often == 0:
            plane.step()
    assert b"".join(written) == expected
    if second is not None:
        assert b"".join(second[1]) == second[0]
        del second
    assert not plane.state.partition("p").table.savers


def test_a_table_forgets_a_dump_that_nobody_goes_on_with() -> None:
    plane = Plane(0)
    pieces = StateDump(plane.state).pieces()
    savers = plane.state.partition("p").table.savers
    gc.disable()  # without its help
    try:
        assert next(pieces) == b"" and len(savers) == 1
        del pieces
        assert not savers
    finally:
        gc.enable()


def test_a_state_that_is_being_dumped_can_be_pickled() -> None:
    plane = Plane(0)
    pieces = StateDump(plane.state).pieces()
    next(pieces)
    assert pickle.loads(pickle.dumps(plane.state)).partition("p").table.savers == []


def test_columns_of_numbers_are_encoded_as_if_at_once() -> None:
    for count in (0, 1, 31, 32, 300, 8191, 8192, 9000):
        column = np.arange(count)
        pieces = b"".join(dump._pieces_of_column(column, np.arange(count)))
        assert pieces == dump._encode(column.tobytes())
