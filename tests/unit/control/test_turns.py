"""Fields that grow turn by turn, against a model that keeps a list of pieces per sample."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.control import at_once
from tests.unit.control.whole_state import dump_state, restore_state

from rlplane.control.loading import BlockSize
from rlplane.control.requests import Put
from rlplane.control.rules import PartitionSpec
from rlplane.control.state import ControlState
from rlplane.errors import InvalidRequestError, MissingDataError

SPEC = PartitionSpec(partition_id="p", fields=["x"], num_samples=0, tasks=["t"])
IDS = ["a", "b", "c"]

some_ids = st.lists(st.sampled_from(IDS), min_size=1, unique=True)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("append"), some_ids, st.booleans()),
        st.tuples(st.just("put"), some_ids, st.just(True)),
        st.tuples(st.just("clear"), some_ids, st.just(True)),
        st.tuples(st.just("restore"), st.just([]), st.just(True)),
    ),
    max_size=30,
)


def pieces_of(state: ControlState, sample_id: str) -> list[tuple[int, int]]:
    try:
        found = state.locate("p", [sample_id], ["x"])["x"]
    except MissingDataError:
        return []
    return list(zip(found.blocks.tolist(), found.positions.tolist(), strict=True))


@settings(deadline=None)
@given(operations)
def test_every_piece_is_found_in_its_order_and_freed_with_its_last_sample(
    steps: list[tuple[str, list[str], bool]],
) -> None:
    state = ControlState()
    state.register(SPEC)
    model: dict[str, list[tuple[int, int]]] = {}
    finished: set[str] = set()
    freed: set[int] = set()
    for block, (kind, ids, finishes) in enumerate(steps):
        if kind == "restore":
            numbers = {number: number for number in state.blocks()}
            sizes = {number: BlockSize(1, len(IDS)) for number in numbers}
            state = restore_state(dump_state(state), numbers, sizes, None)
        elif kind == "clear":
            _, effects = at_once.clear(state, "p", ids)
            freed.update(effects.freed)
            for sample_id in ids:
                model.pop(sample_id, None)
                finished.discard(sample_id)
        else:
            put = Put("p", list(ids), {"x": block}, appends=kind == "append", finishes=finishes)
            if kind == "append" and not finished.isdisjoint(ids):
                with pytest.raises(InvalidRequestError, match="finished"):
                    state.put(put)
                continue
            freed.update(state.put(put).freed)
            for position, sample_id in enumerate(ids):
                before = model.get(sample_id, []) if kind == "append" else []
                model[sample_id] = [*before, (block, position)]
                if finishes:
                    finished.add(sample_id)
        assert {sample_id: pieces_of(state, sample_id) for sample_id in IDS} == {
            sample_id: model.get(sample_id, []) for sample_id in IDS
        }
        assert state.partitions["p"].columns["x"].produced == len(finished)
        held = {number for pieces in model.values() for number, _ in pieces}
        assert state.blocks().keys() == held
        assert freed.isdisjoint(held)


def test_samples_with_and_without_turns_are_read_together() -> None:
    state = ControlState()
    state.register(SPEC)
    state.put(Put("p", ["a", "b"], {"x": 0}, appends=True, finishes=False))
    state.put(Put("p", ["b"], {"x": 1}, appends=True))
    state.put(Put("p", ["c"], {"x": 2}))
    found = state.locate("p", ["c", "b", "a"], ["x"])["x"]
    assert found.per_row is not None
    np.testing.assert_array_equal(found.blocks, [2, 0, 1, 0])
    np.testing.assert_array_equal(found.positions, [0, 1, 0, 0])
    np.testing.assert_array_equal(found.per_row, [1, 2, 1])
