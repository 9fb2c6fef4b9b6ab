"""The control state through a checkpoint: what comes back behaves as what went in, and rubbish is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.control import at_once
from tests.unit.control.whole_state import dump_state, restore_state

from rlplane.control.dump import SCHEMA_VERSION, block_names
from rlplane.control.loading import BlockSize
from rlplane.control.requests import Batch, Claim, Put
from rlplane.control.rules import PartitionSpec
from rlplane.control.state import ControlState
from rlplane.errors import CheckpointError

OFFSET = 1000
TASKS = ["train", "score"]
IDS = [f"{name}_g{number}" for name in "abcd" for number in range(2)]


def step_strategy() -> Any:
    ids = st.lists(st.sampled_from(IDS), unique=True, min_size=1, max_size=5)
    fields = st.lists(st.sampled_from("xyz"), unique=True, max_size=3)
    tags = st.none() | st.lists(st.fixed_dictionaries({"v": st.integers(0, 2)}), min_size=5, max_size=5)
    return st.one_of(
        st.tuples(st.just("put"), ids, fields, tags, st.integers(0, 2)),
        st.tuples(st.just("put"), ids, fields, tags, st.integers(0, 2)),
        st.tuples(st.just("claim"), st.sampled_from(TASKS), fields, st.integers(1, 2), st.integers(0, 2)),
        st.tuples(st.just("clear"), ids),
        st.tuples(st.just("register"), st.integers(0, 9), st.sampled_from([None, 2])),
    )


def build(steps: list[Any], group_size: int | None) -> ControlState:
    """A state that random operations have made, in two partitions with the same history."""
    state = ControlState()
    block = 0
    for name in ("p", "q"):
        state.register(PartitionSpec.checked(name, ["x", "y"], 8, TASKS, group_size))
        for kind, *arguments in steps:
            if kind == "put":
                ids, fields, tags, owner = arguments
                blocks = {field: block + place for place, field in enumerate(fields)}
                block += len(blocks)
                own_tags = None if tags is None else tags[: len(ids)]
                sizes = [64 * (number + 1) for number in blocks.values()]
                state.put(Put(name, ids, blocks, own_tags, nbytes=sizes, owner=owner, now=float(block)))
            elif kind == "claim":
                task, fields, size, owner = arguments
                known = [field for field in fields if field in state.partition(name).columns]
                size *= state.partition(name).spec.group_size or 1
                state.claim(Claim(name, task, known, size, owner=owner), blocking=False)
            elif kind == "clear":
                at_once.clear(state, name, arguments[0])
            else:
                state.register(PartitionSpec.checked(name, ["x", "y"], arguments[0], TASKS, arguments[1]))
    return state


def sizes_of(state: ControlState) -> dict[int, BlockSize]:
    """Of the blocks that :func:`build` makes. None of its puts has more than five rows."""
    return {number: BlockSize(64 * (number + 1), 5) for number in state.blocks()}


def reloaded(state: ControlState, **options: Any) -> ControlState:
    numbers = {number: number + OFFSET for number in state.blocks()}
    return restore_state(
        dump_state(state), numbers, sizes_of(state), options.pop("capacity", None), **options
    )


def claim(state: ControlState, claim: Claim, *, blocking: bool) -> list[str]:
    ((_, batch),) = state.claim(claim, blocking=blocking).answers
    assert isinstance(batch, Batch)
    return list(batch.ids)


def remaining(state: ControlState, name: str, task: str, fields: list[str]) -> list[str]:
    """What the task would get, one batch after the other."""
    size = state.partition(name).spec.group_size or 1
    got: list[str] = []
    while True:
        batch = claim(state, Claim(name, task, fields, size), blocking=False)
        if not batch:
            return got
        got += batch


histories = st.lists(step_strategy(), max_size=25)
group_sizes = st.sampled_from([None, 2])
quick = settings(max_examples=100, deadline=None)


@quick
@given(histories, group_sizes)
def test_a_state_that_was_saved_and_loaded_looks_the_same(steps: list[Any], group_size: int | None) -> None:
    state = build(steps, group_size)
    loaded = reloaded(state, capacity=100)
    assert loaded.live == state.live and loaded.capacity == 100
    assert list(loaded.partitions) == list(state.partitions)
    assert loaded.blocks() == {number + OFFSET: rows for number, rows in state.blocks().items()}
    for name, partition in state.partitions.items():
        again = loaded.partition(name)
        assert list(again.rows) == list(partition.rows)
        before, after = partition.status(50.0), again.status(50.0)
        for task in TASKS:  # what claims asked for is not kept: what is ready is known when one asks again
            for key in ("ready", "wanted", "fields", "where", "writes"):
                del before["tasks"][task][key], after["tasks"][task][key]
        assert after == before
        for sample_id, row in partition.rows.items():
            assert again.tags[again.rows[sample_id]] == partition.tags[row]
            for field, column in partition.columns.items():
                if column.block[row] >= 0:
                    blocks, positions, _ = state.locate(name, [sample_id], [field])[field]
                    blocks_again, positions_again, _ = loaded.locate(name, [sample_id], [field])[field]
                    assert blocks_again == blocks + OFFSET and positions_again == positions


@quick
@given(histories, group_sizes, st.sampled_from(["", "x", "y", "xy", "xyz"]))
def test_a_state_that_was_saved_and_loaded_hands_out_the_same_in_the_same_order(
    steps: list[Any], group_size: int | None, fields: str
) -> None:
    state = build(steps, group_size)
    loaded = reloaded(state)
    for name in state.partitions:
        known = [field for field in fields if field in state.partition(name).columns]
        for task in TASKS:
            assert remaining(loaded, name, task, known) == remaining(state, name, task, known)


@quick
@given(histories, group_sizes)
def test_a_second_save_is_the_first(steps: list[Any], group_size: int | None) -> None:
    state = build(steps, group_size)
    for owner in range(3):
        for partition in state.partitions.values():
            for task in partition.tasks.values():
                task.owner[task.owner == owner] = -1  # as if finished: who held a claim does not come back
    data = dump_state(state)
    same = {number: number for number in state.blocks()}
    assert dump_state(restore_state(data, same, sizes_of(state), None)) == data


@quick
@given(histories, group_sizes)
def test_a_loaded_state_frees_every_block_when_it_is_cleared(
    steps: list[Any], group_size: int | None
) -> None:
    state = build(steps, group_size)
    loaded = reloaded(state)
    freed: list[int] = []
    for name in loaded.partitions:
        freed += at_once.clear(loaded, name, None)[1].freed
        assert loaded.partition(name).nbytes == 0
    assert sorted(freed) == sorted(number + OFFSET for number in state.blocks())
    assert loaded.live == 0 and not loaded.blocks()


@quick
@given(histories)
def test_claims_that_were_not_finished_are_handed_out_again_when_asked_for(steps: list[Any]) -> None:
    state = build([step for step in steps if step[0] != "register"], None)
    loaded = reloaded(state, release_claims=True)
    for name, partition in state.partitions.items():
        for task, cursor in partition.tasks.items():
            unfinished = {i for i, row in partition.rows.items() if cursor.owner[row] >= 0}
            unclaimed = {i for i, row in partition.rows.items() if not cursor.claimed[row]}
            assert set(remaining(loaded, name, task, [])) == unfinished | unclaimed


def small_state() -> ControlState:
    state = ControlState()
    state.register(PartitionSpec.checked("p", ["x", "y"], 3, ["t"], None, {"y": ["good", "bad"]}))
    state.put(Put("p", ["a", "b"], {"x": 0, "extra": 1}, [{"v": 1}, {}], nbytes=[64, 128], now=5.0))
    return state


def test_a_tail_is_still_a_tail_after_loading() -> None:
    state = small_state()
    state.put(Put("p", ["c"], {"x": 2}, nbytes=[192]))
    loaded = reloaded(state)
    assert claim(loaded, Claim("p", "t", ["x"], 8), blocking=True) == ["a", "b", "c"]


def test_new_writes_come_after_the_loaded_ones_and_undeclared_fields_stay_known() -> None:
    loaded = reloaded(small_state())
    loaded.put(Put("p", ["c"], {"x": 5}))
    assert remaining(loaded, "p", "t", ["x"]) == ["a", "b", "c"]
    status = loaded.partition("p").status(0.0)["fields"]
    assert status["extra"] == {"declared": False, "produced": 2}
    assert status["y"] == {"declared": True, "produced": 0}
    assert loaded.partition("p").spec.enums == {"y": ["good", "bad"]}


@pytest.mark.parametrize("later", [{"group": "elsewhere"}, {"group": None}, {"group": [1]}])
def test_a_sample_keeps_the_group_of_its_first_write(later: dict[str, Any]) -> None:
    state = ControlState()
    state.register(PartitionSpec.checked("p", ["x"], 9, ["t"], 2))
    state.put(Put("p", ["a", "b"], {"x": 0}, [{"group": "one"}, {"group": "one"}], nbytes=[64]))
    state.put(Put("p", ["b"], {}, [later]))
    loaded = reloaded(state)
    assert remaining(loaded, "p", "t", ["x"]) == ["a", "b"]
    assert loaded.partition("p").tags[loaded.partition("p").rows["b"]] == later


def test_a_checkpoint_from_before_groups_were_kept_can_be_read() -> None:
    state = ControlState()
    state.register(PartitionSpec.checked("p", ["x"], 9, ["t"], 2))
    state.put(Put("p", ["a_g0", "a_g1"], {"x": 0}, nbytes=[64]))
    plain = msgspec.msgpack.decode(dump_state(state))
    for partition in plain["partitions"]:
        del partition["groups"]
    loaded = restore_state(msgspec.msgpack.encode(plain), {0: 0}, {0: BlockSize(64, 2)}, None)
    assert remaining(loaded, "p", "t", ["x"]) == ["a_g0", "a_g1"]


def test_blocks_are_named_by_partition_and_field() -> None:
    assert {
        number: name for number, name in block_names(dump_state(small_state())).items() if number >= 0
    } == {
        0: "p/x",
        1: "p/extra",
    }


def test_a_checkpoint_larger_than_the_plane_is_refused() -> None:
    with pytest.raises(CheckpointError, match="has 2 samples; storage_capacity is 1"):
        reloaded(small_state(), capacity=1)


def changed(**changes: Any) -> bytes:
    plain = msgspec.msgpack.decode(dump_state(small_state()))
    partition = plain["partitions"][0]
    for path, value in changes.items():
        home: Any = partition
        *heads, last = path.split("__")
        for head in heads:
            home = home[int(head) if head.isdigit() else head]
        home[last] = value
    return msgspec.msgpack.encode(plain)


SIZES = {0: BlockSize(64, 2), 1: BlockSize(128, 2)}
WRONG: dict[str, bytes] = {
    "nothing": b"",
    "rubbish": b"rubbish",
    "an empty map": msgspec.msgpack.encode({}),
    "a list": msgspec.msgpack.encode([1, 2]),
    "too few positions": changed(columns__0__positions=b"\0\0\0\0"),
    "odd bytes": changed(columns__0__positions=b"\0\0\0"),
    "too many blocks": changed(columns__0__blocks=np.zeros(3, np.int64).tobytes()),
    "a row beyond its block": changed(columns__0__positions=np.array([0, 2], np.int32).tobytes()),
    "a row before its block": changed(columns__0__positions=np.array([-1, 1], np.int32).tobytes()),
    "a block for all": changed(columns__0__blocks=np.zeros(1, np.int64).tobytes()),
    "too few stamps": changed(columns__0__stamps=b""),
    "an unknown block": changed(columns__0__blocks=np.array([0, 77], np.int64).tobytes()),
    "too few births": changed(born=b""),
    "too few tags": changed(tags=[{}]),
    "an id twice": changed(ids=["a", "a"]),
    "an empty id": changed(ids=["a", ""]),
    "another task": changed(tasks__0__name="other"),
    "too few claims": changed(tasks__0__claimed=b"\1"),
    "too many groups": changed(groups=["g"] * 3),
    "a column twice": changed(columns__1__name="x"),
    "a negative count": changed(spec__num_samples=-1),
    "no group size": changed(spec__group_size=0),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("release_claims", [True, False])
def test_bytes_that_are_not_a_state_are_refused(wrong: str, release_claims: bool) -> None:
    with pytest.raises(CheckpointError, match="the checkpoint"):
        restore_state(WRONG[wrong], {0: 0, 1: 1}, SIZES, None, release_claims=release_claims)


def test_two_partitions_of_one_name_are_refused() -> None:
    plain = msgspec.msgpack.decode(dump_state(small_state()))
    plain["partitions"] *= 2
    with pytest.raises(CheckpointError, match="'p' twice"):
        restore_state(msgspec.msgpack.encode(plain), {0: 0, 1: 1}, SIZES, None)


def test_another_version_is_refused_with_both_numbers() -> None:
    plain = msgspec.msgpack.decode(dump_state(small_state()))
    plain["version"] = SCHEMA_VERSION + 1
    with pytest.raises(
        CheckpointError, match=f"schema version {SCHEMA_VERSION + 1}; .* reads {SCHEMA_VERSION}"
    ):
        restore_state(msgspec.msgpack.encode(plain), {}, {}, None)


def test_a_block_that_is_not_in_the_file_is_named() -> None:
    with pytest.raises(CheckpointError, match="block 1 "):
        restore_state(dump_state(small_state()), {0: 0}, {0: BlockSize(64, 2)}, None)


@pytest.mark.parametrize("serials", [(0, 9), (1, 0), (1, 1), (-1, 0)])
def test_numbers_of_samples_that_are_not_in_order_are_refused(serials: tuple[int, int]) -> None:
    good = dump_state(small_state())
    numbers = np.array([0, 1]).tobytes()
    assert good.count(numbers) == 1
    with pytest.raises(CheckpointError, match="not in order"):
        restore_state(good.replace(numbers, np.array(serials).tobytes()), {0: 0, 1: 1}, SIZES, None)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_altered_bytes_are_refused_or_harmless_and_never_anything_else(data: st.DataObject) -> None:
    good = dump_state(small_state())
    at = data.draw(st.integers(0, len(good) - 1))
    what = data.draw(st.binary(min_size=0, max_size=4))
    cut = data.draw(st.integers(0, 4))
    altered = good[:at] + what + good[at + cut :]
    try:
        loaded = restore_state(altered, {0: 0, 1: 1}, SIZES, None)
    except CheckpointError:
        return
    for name in loaded.partitions:
        loaded.partition(name).status(0.0)
        at_once.clear(loaded, name, None)
    assert loaded.live == 0
