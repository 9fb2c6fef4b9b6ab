"""What other people's interfaces need of the control state: partitions that grow, cursors moved by hand."""

from __future__ import annotations

from typing import Any

from tests.unit.control import at_once
from tests.unit.control.whole_state import dump_state, restore_state

from rlplane.control.loading import BlockSize
from rlplane.control.requests import Batch, Claim, Put
from rlplane.control.rules import PartitionSpec
from rlplane.control.state import ControlState

IDS = ["a", "b", "c"]


def spec(fields: list[str], tasks: list[str]) -> PartitionSpec:
    return PartitionSpec(partition_id="p", fields=fields, num_samples=0, tasks=tasks)


def state_with_samples() -> ControlState:
    state = ControlState()
    state.register(spec(["x"], ["train"]))
    state.put(Put("p", IDS, {"x": 1}, [{"v": number} for number in range(3)]))
    return state


def claimed(state: ControlState, size: int = 3, task: str = "train") -> list[str]:
    effects = state.claim(Claim("p", task, ["x"], size), blocking=False)
    (_, batch), *_ = effects.answers
    assert isinstance(batch, Batch)
    return list(batch.ids)


def test_extending_a_partition_keeps_what_it_has_and_adds_what_it_lacks() -> None:
    state = state_with_samples()
    assert claimed(state, 1) == ["a"]
    state.register(spec(["y"], ["score"]), extend=True)
    partition = state.partition("p")
    assert (partition.spec.fields, partition.spec.tasks) == (["x", "y"], ["train", "score"])
    assert claimed(state) == ["b", "c"]
    assert claimed(state, task="score") == IDS


def test_extending_by_what_is_there_changes_nothing() -> None:
    state = state_with_samples()
    before = state.partition("p").version
    state.register(spec(["x"], []), extend=True)
    assert state.partition("p").version == before


def test_extending_makes_a_partition_that_is_not_there() -> None:
    state = ControlState()
    state.register(spec(["x"], ["train"]), extend=True)
    assert state.partition("p").spec.tasks == ["train"]


def test_samples_that_were_marked_are_not_claimed_and_those_set_free_are_claimed_again() -> None:
    state = state_with_samples()
    assert claimed(state, 1) == ["a"]  # and there is a queue, in which the others are
    marked = at_once.mark(state, "p", "train", ["b"])
    assert marked
    assert claimed(state) == ["c"]
    assert state.partition("p").consumed(["train"])
    at_once.unmark(state, "p", "train", None)
    assert not state.partition("p").consumed(["train"])
    assert sorted(claimed(state)) == IDS


def test_marking_is_refused_whole_when_one_sample_is_claimed_or_gone() -> None:
    state = state_with_samples()
    assert claimed(state, 1) == ["a"]
    for ids in (["a", "b"], ["b", "nobody"]):
        assert at_once.mark(state, "p", "train", ids) is False
    assert claimed(state) == ["b", "c"]


def test_a_claim_that_waits_gets_what_is_set_free() -> None:
    state = state_with_samples()
    assert len(claimed(state)) == 3
    token: Any = object()
    assert not state.claim(Claim("p", "train", ["x"], 2, token=token), blocking=True).answers
    effects = at_once.unmark(state, "p", "train", ["a", "c"])
    (answered, batch), *_ = effects.answers
    assert answered is token and isinstance(batch, Batch) and batch.ids == ["a", "c"]


def test_inspecting_tells_numbers_tags_fields_and_cursors_of_what_is_there() -> None:
    state = state_with_samples()
    state.put(Put("p", ["c"], {"y": 2}))
    assert claimed(state, 1) == ["a"]
    partition = state.partition("p")
    assert partition.inspect(partition.live_rows(["c", "nobody", "a"])) == {
        "ids": ["c", "a"],
        "numbers": [2, 0],
        "tags": [{"v": 2}, {"v": 0}],
        "fields": {"x": b"\1\1", "y": b"\1\0"},
        "tasks": {"train": b"\0\1"},
    }
    assert partition.inspect(partition.live_rows(None))["ids"] == IDS


def test_samples_are_found_by_their_numbers_in_the_order_asked() -> None:
    state = state_with_samples()
    at_once.clear(state, "p", ["b"])
    partition = state.partition("p")
    assert partition.inspect(partition.table.rows_numbered([2, 1, 0, 3, -1, 1 << 70]))["ids"] == ["c", "a"]


def test_the_numbers_of_samples_survive_a_checkpoint() -> None:
    state = state_with_samples()
    at_once.clear(state, "p", ["a"])
    restored = restore_state(dump_state(state), {1: 7}, {1: BlockSize(64, 3)}, None)
    restored.put(Put("p", ["d"], {"x": 8}))
    partition = restored.partition("p")
    assert partition.inspect(partition.live_rows(None))["numbers"] == [1, 2, 3]
