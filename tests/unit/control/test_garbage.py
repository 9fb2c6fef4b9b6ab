"""A partition that is dropped is freed at once: the service lets the garbage collector look at young things
only."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
from tests.unit.control import at_once

from rlplane.control.looking_ahead import look_for_claim
from rlplane.control.requests import Claim, Put
from rlplane.control.rules import PartitionSpec
from rlplane.control.state import ControlState
from rlplane.service.stall import collect_young_garbage_only


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("group_size", [None, 2])
def test_a_dropped_partition_has_no_cycles(group_size: int | None, no_collector: None) -> None:
    state = ControlState()
    state.register(PartitionSpec.checked("p", ["x"], 0, ["t"], group_size))
    ids = [f"{group}_g{number}" for group in "abc" for number in range(2)]
    state.put(Put("p", ids, {"x": 1}, [{"v": number} for number in range(6)]))
    for order in (None, "lifo", "priority:v", "random:1"):
        claim = Claim("p", "t", ["x"], 2, {"v": {">=": 0}}, order=order)
        for look in look_for_claim(state, claim):
            while not look(lambda: True):
                pass
        del look
        state.claim(claim, blocking=False)
    state.claim(Claim("p", "t", ["x"], 2, {"v": {">=": 100}}, token=object()), blocking=True)
    long = Put("p", ["d_g0", "d_g1"], {"x": 2}, [{"v": 9}] * 2)
    state.begin_put(long).make_some_ready()
    state.put(long)
    partition = state.partition("p")
    parts = [partition, partition.table, partition.cursors, partition.looking, partition.claims]
    left = [weakref.ref(part) for part in parts]
    del partition, parts, long
    at_once.drop(state, "p")
    assert [part() for part in left] == [None] * len(left)


def test_the_service_collects_young_garbage_and_never_everything() -> None:
    before = gc.get_threshold()
    try:
        collect_young_garbage_only()
        assert gc.get_threshold()[:2] == before[:2] and gc.get_threshold()[2] > 10**9
    finally:
        gc.set_threshold(*before)
