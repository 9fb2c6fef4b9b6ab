"""Flow control in the control state: late writes, budgets, looks, policies, groups that end short, ranks."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest
from tests.unit.control import at_once
from tests.unit.control.whole_state import dump_state, restore_state

from rlplane.control.loading import BlockSize
from rlplane.control.policies import FlowPolicy
from rlplane.control.requests import Batch, Claim, Put
from rlplane.control.rules import PartitionSpec
from rlplane.control.state import ControlState
from rlplane.control.steps import divided
from rlplane.errors import InvalidRequestError, MissingDataError, StepOverError


def plane(tasks: list[str] | None = None, group_size: int | None = None, **spec: Any) -> ControlState:
    state = ControlState()
    number = spec.pop("num_samples", 1000)
    state.register(PartitionSpec.checked("p", ["x", "y"], number, tasks or ["t"], group_size, **spec))
    return state


_blocks = iter(range(1_000_000))


def write(state: ControlState, ids: Any, *fields: str, owner: int = 0, **put: Any) -> list[Any]:
    blocks = {name: next(_blocks) for name in fields}
    return state.put(Put("p", list(ids), blocks, put.pop("tags", None), owner=owner, **put)).answers


def claim(
    state: ControlState, size: int, *fields: str, task: str = "t", owner: int = 0, **how: Any
) -> list[str]:
    request = Claim("p", task, fields or ["x"], size, owner=owner, token="now", **how)
    ((_, batch),) = state.claim(request, blocking=False).answers
    assert isinstance(batch, Batch)
    return list(batch.ids)


def test_a_look_keeps_an_index_of_the_tag_that_follows_writes_and_clears() -> None:
    state = plane()
    write(state, "abc", "x", tags=[{"v": 1}, {"v": 2}, {"v": [1]}])
    assert state.count("p", {"v": 1}) == 1
    write(state, "bd", tags=[{"v": 1}, {"v": True}])
    assert state.peek("p", {"v": 1}).ids == ["a", "b", "d"]
    assert state.peek("p", {"v": [1]}).ids == ["c"]
    at_once.clear(state, "p", ["a"])
    write(state, "c", tags=[{"v": 1}])
    assert state.peek("p", {"v": {"<=": 1}}).ids == ["b", "c", "d"]
    index = state.partition("p").looking.indexes["v"]
    assert (
        sorted(index.candidates(1)) == sorted(index.candidates({"==": 1}))
        and len(list(index.candidates(2))) == 0
    )


def test_a_late_write_is_refused_as_a_whole() -> None:
    state = plane()
    write(state, "ab", "x")
    at_once.clear(state, "p", ["a"])
    with pytest.raises(MissingDataError, match=r"'a' any more \(1 of 2 samples"):
        write(state, "ab", "y", must_exist=True)
    assert claim(state, 9, "y") == [] and "a" not in state.partition("p").rows


def test_a_waiting_claim_of_tokens_is_told_of_a_sample_that_can_never_fit() -> None:
    state = plane()
    waiting = Claim("p", "t", ["x"], 9, token="w", max_tokens=5)
    assert not state.claim(waiting, blocking=True)
    answers = write(state, "ab", "x", tags=[{"input_lengths": 9}, {"input_lengths": 1}])
    ((token, error),) = [answer for answer in answers if answer[0] == "w"]
    assert token == "w" and isinstance(error, InvalidRequestError) and "sample 'a' has 9 tokens" in str(error)
    assert state.waiting() == [] and claim(state, 9) == ["a", "b"]


# Policies

ROLES = ["rollout", "train"]


def flow(kind: str, group_size: int | None = None, **policy: Any) -> ControlState:
    return plane(ROLES, group_size, flow={"kind": kind, **policy})


def versions(*numbers: int) -> list[dict[str, Any]]:
    return [{"weight_version": number} for number in numbers]


def saved_and_loaded(state: ControlState, **how: Any) -> ControlState:
    blocks = {block: block for block in state.blocks()}
    return restore_state(dump_state(state), blocks, dict.fromkeys(blocks, BlockSize(8, 99)), None, **how)


def test_claims_of_a_dead_trainer_that_have_become_too_old_are_evicted() -> None:
    state = flow("windowed", max_staleness=0)
    write(state, "ab", "x", tags=versions(0, 1))
    assert claim(state, 2, task="train", owner=7) == ["a", "b"]
    at_once.advance(state, "p", 1)
    assert state.count("p") == 2
    assert at_once.release_owner(state, 7)[0] == 2
    assert claim(state, 9, task="train") == ["b"]
    assert state.evicted("p").ids == ["a"] and state.partition("p").flow.evicted == {"stale": 1}


def test_an_eviction_frees_blocks_and_lets_a_put_in_that_waited() -> None:
    state = ControlState(1)
    state.register(PartitionSpec.checked("p", ["x"], 9, ["train"], flow=FlowPolicy.windowed(0)))
    state.put(Put("p", ["a"], {"x": -7}, versions(0)))
    assert not state.put(Put("p", ["b"], {"x": -2}, versions(1), token="waits"))
    effects = at_once.advance(state, "p", 1)
    assert effects.answers == [("waits", None)] and effects.freed == [-7]
    assert state.live == 1 and state.blocks() == {-2: 1}


@pytest.mark.parametrize("how", ["a write", "a claim that is given back"])
def test_a_put_gets_the_room_of_what_is_evicted_by(how: str) -> None:
    state = plane(["train"], flow=FlowPolicy.windowed(0))
    state.capacity = 1
    write(state, "a", "x")
    claim(state, 1, task="train", owner=1)
    at_once.advance(state, "p", 1)
    write(state, "b", "x", token="waits")
    old = Put("p", ["a"], {}, [{"weight_version": 0}], token="old")
    if how == "a write":
        assert not at_once.unclaim(state, "p", "train", ["a"], 1).answers
        answers = state.put(old).answers
    else:
        state.put(old)
        answers = at_once.unclaim(state, "p", "train", ["a"], 1).answers
    assert ("waits", None) in answers and state.live == 1


def test_a_registration_with_a_tighter_bound_evicts_at_once() -> None:
    state = flow("windowed", max_staleness=5)
    write(state, "ab", "x", tags=versions(0, 3))
    at_once.advance(state, "p", 4)
    state.register(PartitionSpec.checked("p", ["x", "y"], 9, ROLES, flow=FlowPolicy.windowed(1)))
    assert claim(state, 9, task="train") == ["b"]


@pytest.mark.parametrize("kind", ["ready_first", "weight_fifo", "in_order"])
def test_a_prompt_of_a_dead_rollout_is_handed_out_again_and_counted_once(kind: str) -> None:
    state = flow(kind, max_staleness=0, batch=2)
    write(state, "abc", "x")
    assert claim(state, 9, task="rollout", owner=5) == ["a", "b"]
    assert claim(state, 9, task="rollout") == []
    at_once.release_owner(state, 5)
    assert claim(state, 9, task="rollout") == ["a", "b"]
    assert state.partition("p").flow.admitted == 2


def test_a_step_that_a_dead_trainer_had_is_trained_before_the_next() -> None:
    state = flow("in_order", max_staleness=1, batch=2)
    write(state, "abcd", "x")
    claim(state, 4, task="rollout")
    write(state, "abcd", "y")
    assert claim(state, 2, "y", task="train", owner=3) == ["a", "b"]
    at_once.release_owner(state, 3)
    assert claim(state, 9, "y", task="train") == ["a", "b"]
    assert claim(state, 9, "y", task="train") == ["c", "d"]


def test_a_group_that_comes_back_in_two_parts_is_handed_out_whole() -> None:
    state = plane(group_size=2)
    write(state, ["a_g0", "a_g1"], "x")
    assert claim(state, 2, owner=1) == ["a_g0", "a_g1"]
    at_once.unclaim(state, "p", "t", ["a_g0"], 1)
    at_once.unclaim(state, "p", "t", ["a_g1"], 1)
    assert claim(state, 2) == ["a_g1", "a_g0"]


def test_a_step_of_any_size_is_admitted_and_trained_whole() -> None:
    state = flow("in_order", max_staleness=0, batch=100)
    ids = [f"s{number}" for number in range(200)]
    write(state, ids, "x")
    for version, of_step in enumerate((ids[:100], ids[100:])):
        at_once.advance(state, "p", version)
        assert claim(state, 200, task="rollout") == of_step
        assert claim(state, 100, task="train") == of_step


def test_a_step_that_was_being_trained_at_a_dump_is_trained_before_the_next() -> None:
    state = flow("in_order", max_staleness=1, batch=2)
    write(state, "abcd", "x")
    claim(state, 4, task="rollout", owner=2)
    write(state, "abcd", "y", owner=2)
    assert claim(state, 2, "y", task="train", owner=3) == ["a", "b"]
    back = saved_and_loaded(state, release_claims=True)
    assert claim(back, 9, "y", task="train") == ["a", "b"]
    assert claim(back, 9, "y", task="train") == ["c", "d"]


@pytest.mark.parametrize("kind", ["windowed", "ready_first", "weight_fifo", "in_order"])
def test_a_dump_keeps_the_policy_and_all_that_it_counts(kind: str) -> None:
    state = flow(kind, max_staleness=1, batch=2)
    write(state, "abcdef", "x", tags=versions(0, 1, 0, 1, 2, 2))
    claim(state, 4, task="rollout", owner=1)
    claim(state, 1, task="train", owner=2)
    at_once.clear(state, "p", ["b"])
    at_once.advance(state, "p", 2)
    back = saved_and_loaded(state)
    before, after = state.partition("p"), back.partition("p")
    for task in ROLES:
        assert claim(back, 9, task=task) == claim(state, 9, task=task)
    assert after.spec == before.spec and after.flow_status() == before.flow_status()
    assert back.evicted("p").tags == state.evicted("p").tags


def test_random_steps_of_a_window_never_hand_out_what_is_too_old() -> None:
    random = Random(5)
    state = flow("windowed", max_staleness=2, group_size=2)
    version = claimed = 0
    for step in range(400):
        begun = max(version - random.randrange(4), 0)
        tags = versions(begun, begun + random.randrange(2))
        write(state, [f"p{step}_g0", f"p{step}_g1"], "x", tags=tags)
        if random.random() < 0.3:
            version += 1
            at_once.advance(state, "p", version)
        if random.random() < 0.4:
            ((_, batch),) = state.claim(Claim("p", "train", ["x"], 4, owner=step), blocking=False).answers
            assert isinstance(batch, Batch)
            assert all(tags["weight_version"] >= version - 2 for tags in batch.tags)
            claimed += len(batch.ids)
            if random.random() < 0.3:
                claimed -= at_once.release_owner(state, step)[0]
    evicted = state.partition("p").flow.evicted["stale"]
    assert evicted and claimed == state.partition("p").tasks["train"].count and evicted + state.live == 800


@pytest.mark.parametrize("order", ["lifo", "priority:v", "random:3"])
@pytest.mark.parametrize("group_size", [None, 2])
def test_an_ordered_queue_keeps_its_order_and_its_count(order: str, group_size: int | None) -> None:
    random = Random(11)
    state = plane(group_size=group_size)
    partition = state.partition("p")
    for number in range(300):
        write(state, [f"s{number}_g{n}" for n in range(2)], "x", tags=[{"v": random.randrange(5)}] * 2)
        some = random.choice(list(partition.rows))
        write(state, [some], tags=[{"v": random.randrange(9)}])
        if random.random() < 0.5:
            at_once.clear(state, "p", [random.choice(list(partition.rows))])
        if random.random() < 0.5:
            queue = partition.cursors.queue(partition.tasks["t"], Claim("p", "t", ["x"], 2, order=order))
            units = [
                partition.ids[rows].tolist()
                for piece in queue.pieces(None)
                for rows in np.split(piece.rows, piece.starts[1:])
                if len(rows)
            ]
            keys = [max(partition.tags[partition.rows[i]]["v"] for i in unit) for unit in units]
            assert order != "priority:v" or keys == sorted(keys, reverse=True)
            assert len(units) * (group_size or 1) == queue.ready
            taken = claim(state, 2, order=order)
            assert taken == [i for unit in units for i in unit][:2]
            at_once.clear(state, "p", taken[:1])


@pytest.mark.parametrize("group_size", [None, 2])
def test_an_order_follows_the_tags_however_many_other_orders_were_asked_for(group_size: int | None) -> None:
    tasks = ["t", *(f"other{number}" for number in range(20))]
    state = plane(tasks, group_size)
    write(state, ["a_g0", "a_g1", "b_g0", "b_g1"], "x", tags=[{"v": n} for n in (4, 3, 2, 1)])
    assert claim(state, 2, order="priority:v") == ["a_g0", "a_g1"]
    at_once.release_owner(state, 0)
    for number in range(20):
        claim(state, 2, task=f"other{number}", order=f"priority:{number}")
    write(state, ["b_g0", "b_g1"], tags=[{"v": 9}, {"v": 8}])
    assert claim(state, 4, order="priority:v") == ["b_g0", "b_g1", "a_g0", "a_g1"]


# Groups that end short


def test_a_group_that_comes_back_bit_by_bit_stands_where_it_was_claimed() -> None:
    state = plane(group_size=2)
    write(state, ["a_g0", "a_g1", "b_g0", "b_g1"], "x")
    assert claim(state, 4, owner=1) == ["a_g0", "a_g1", "b_g0", "b_g1"]
    at_once.unclaim(state, "p", "t", ["a_g0"], 1)
    at_once.release_owner(state, 1)
    assert claim(state, 4) == ["a_g1", "a_g0", "b_g0", "b_g1"]


def test_two_groups_of_one_name_with_a_size_of_their_own_are_a_tail() -> None:
    state = plane(group_size=2)
    write(state, [f"a_g{n}" for n in range(6)], "x", tags=[{"group_size": 3}] * 6)
    waiting = Claim("p", "t", ["x"], 16, token="w")
    assert not state.claim(waiting, blocking=True).answers
    ((_, batch),) = state.finish("p").answers
    assert isinstance(batch, Batch) and len(batch.ids) == 6


GROUP = ["a_g0", "a_g1", "a_g2", "a_g3"]


def test_what_a_dead_worker_left_of_a_group_is_handed_out_again_and_finishes_it() -> None:
    state = plane(ROLES, 4)
    write(state, GROUP, "x")
    assert claim(state, 4, task="rollout", owner=1) == GROUP
    write(state, GROUP[:2], "y", owner=1)
    assert at_once.release_owner(state, 1)[0] == 2
    assert claim(state, 4, task="rollout", owner=2) == GROUP[2:]
    write(state, GROUP[2:], "y", owner=2)
    assert claim(state, 4, "y", task="train") == GROUP
    assert claim(state, 4, task="rollout") == []


def test_what_is_left_of_a_group_counts_as_a_group_and_survives_another_death_and_a_load() -> None:
    state = plane(ROLES, 4)
    write(state, [*GROUP, "b_g0", "b_g1", "b_g2", "b_g3"], "x")
    waiting = Claim("p", "rollout", ["x"], 4, owner=3, token="w")
    claim(state, 8, task="rollout", owner=1)
    assert not state.claim(waiting, blocking=True)
    write(state, [*GROUP[:3], "b_g0", "b_g1", "b_g2", "b_g3"], "y", owner=1)
    ((token, batch),) = at_once.release_owner(state, 1)[1].answers
    assert token == "w" and isinstance(batch, Batch) and batch.ids == ["a_g3"]
    back = saved_and_loaded(state, release_claims=True)
    assert claim(back, 4, task="rollout") == ["a_g3"]
    at_once.release_owner(state, 3)
    assert claim(saved_and_loaded(state), 4, task="rollout") == ["a_g3"]
    assert claim(state, 4, task="rollout", owner=4) == ["a_g3"]


def test_a_member_that_was_given_back_is_handed_out_when_its_group_is_closed_without_another() -> None:
    state = plane(group_size=3)
    ids = ["a_g0", "a_g1", "a_g2"]
    write(state, ids, "x")
    assert claim(state, 3, owner=1) == ids
    write(state, ids[:2], "y")
    at_once.finish_claims(state, "p", "t", ["a_g0"], 1)
    at_once.unclaim(state, "p", "t", ids, 1)
    assert state.close_group("p", "a", "failed")[0] == 2
    assert claim(state, 3) == ["a_g1"]


def test_what_lines_up_again_is_behind_all_others_whatever_fields_are_asked_for() -> None:
    state = plane()
    assert claim(state, 1, "y") == []
    write(state, "abc", "x", "y")
    assert claim(state, 1, "x", max_uses=2) == ["a"]
    assert claim(state, 3, "y") == ["b", "c", "a"]


def test_the_clock_of_a_group_starts_with_its_first_finished_member_and_again_after_a_load() -> None:
    policy = {"finished_fields": ["y"], "min_group_size": 2, "group_timeout_s": 10.0}
    state = plane(ROLES, 4, flow=policy)
    write(state, [*GROUP, "b_g0"], "x", clock=1.0)
    assert state.next_deadline() == float("inf")
    write(state, GROUP[:1], "y", clock=5.0)
    write(state, GROUP[1:2], "y", clock=9.0)
    assert state.next_deadline() == 15.0 and not state.expire(14.9)
    back = saved_and_loaded(state)
    assert back.next_deadline() <= 100.0 and not back.expire(100.0) and back.next_deadline() == 110.0
    for which, clock in ((state, 15.0), (back, 110.0)):
        which.expire(clock)
        assert claim(which, 4, "y", task="train") == GROUP[:2]
        assert which.partition("p").flow_status()["closed_short"] == {"timeout": 1}
        assert list(which.partition("p").rows) == [*GROUP[:2], "b_g0"]
        assert which.next_deadline() == float("inf")


def test_a_group_that_is_whole_in_time_stays_and_one_below_the_minimum_goes() -> None:
    policy = {"finished_fields": ["y"], "min_group_size": 2, "group_timeout_s": 10.0}
    state = plane(ROLES, 2, flow=policy)
    write(state, ["a_g0", "a_g1", "b_g0", "b_g1"], "x")
    write(state, ["a_g0", "a_g1", "b_g1"], "y", clock=1.0)
    effects = state.expire(11.0)
    assert not effects.answers and list(state.partition("p").rows) == ["a_g0", "a_g1"]
    assert state.evicted("p").ids == ["b_g0", "b_g1"]
    assert claim(state, 4, "y", task="train") == ["a_g0", "a_g1"]


def test_a_closed_group_keeps_its_size_in_a_dump() -> None:
    state = plane(ROLES, 4)
    write(state, GROUP[:3], "y")
    state.close_group("p", "a", "cancelled")
    back = saved_and_loaded(state)
    assert claim(back, 4, "y", task="train") == GROUP[:3]
    at_once.clear(back, "p", None)
    write(back, GROUP, "y")
    assert claim(back, 4, "y", task="train") == GROUP  # a new group of that name is of the usual size


# Ranks


def part(state: ControlState, rank: int, step: str, size: int = 4, world: int = 2, owner: int = 0) -> Any:
    request = Claim("p", "t", ["x"], size, owner=owner, step=step, dp_rank=rank, dp_world=world)
    return state.claim(request, blocking=True).answers


def ids_of(answers: Any) -> list[str]:
    ((_, batch),) = answers
    return list(batch.ids)


@pytest.mark.parametrize("lengths", [[5] * 8, [9, 1, 1, 1, 1, 1, 1, 1], [8, 7, 6, 5, 4, 3, 2, 1]])
def test_places_are_divided_equally_and_by_length(lengths: list[int]) -> None:
    parts = divided(lengths, 2)
    assert [len(p) for p in parts] == [4, 4] and sorted(parts[0] + parts[1]) == list(range(8))
    loads = [sum(lengths[place] for place in p) for p in parts]
    assert abs(loads[0] - loads[1]) <= max(lengths) - min(lengths)


def test_a_dead_rank_gives_nothing_back_and_a_load_keeps_the_parts() -> None:
    state = plane()
    write(state, "abcdef", "x")
    first = ids_of(part(state, 0, "1", owner=7))
    assert at_once.release_owner(state, 7)[0] == 0
    for which in (state, saved_and_loaded(state, release_claims=True)):
        assert ids_of(part(which, 0, "1", owner=8)) == first
        assert sorted(first + ids_of(part(which, 1, "1"))) == list("abcd")
        assert not part(which, 0, "2")
        assert ids_of(which.finish("p").answers) in (["e"], ["f"])
        assert ids_of(part(which, 0, "3")) == ids_of(part(which, 1, "3")) == []


def test_a_step_that_is_over_stays_over_after_a_load() -> None:
    state = plane()
    write(state, "abcd", "x")
    at_once.clear(state, "p", [*ids_of(part(state, 0, "1", size=2)), *ids_of(part(state, 1, "1", size=2))])
    for which in (state, saved_and_loaded(state)):
        ((_, error),) = part(which, 0, "1", size=2)
        assert isinstance(error, StepOverError) and claim(which, 9) == ["c", "d"]


def test_a_part_is_over_when_its_samples_are_cleared_also_after_a_load() -> None:
    state = plane()
    write(state, "abcdef", "x")
    mine, other = ids_of(part(state, 0, "1")), ids_of(part(state, 1, "1"))
    at_once.clear(state, "p", [*mine, other[0]])
    for which in (state, saved_and_loaded(state)):
        ((_, error),) = part(which, 0, "1")
        assert isinstance(error, StepOverError)
        assert ids_of(part(which, 1, "1")) == other  # until the last of it is gone
        at_once.clear(which, "p", other)
        ((_, error),) = part(which, 1, "1")
        assert isinstance(error, StepOverError) and not which.partition("p").claims.steps


def test_a_rank_does_not_wait_for_its_part_behind_a_claim_that_wants_more() -> None:
    state = plane()
    write(state, "abcd", "x")
    first = ids_of(part(state, 0, "1"))
    assert not state.claim(Claim("p", "t", ["x"], 4), blocking=True).answers
    assert sorted(first + ids_of(part(state, 1, "1"))) == list("abcd")


def test_a_rank_that_asked_for_something_else_gets_its_part_of_what_another_has_divided() -> None:
    state = plane()
    write(state, "ab", "x")
    other = Claim("p", "t", ["x"], 2, {"v": 1}, step="1", dp_world=2)
    assert not state.claim(other, blocking=True).answers
    answers: Any = part(state, 1, "1", size=2)
    assert sorted(batch.ids for _, batch in answers) == [["a"], ["b"]]


def test_a_claim_in_another_order_does_not_wait_behind_one_that_wants_more() -> None:
    state = plane()
    write(state, "ab", "x")
    assert not state.claim(Claim("p", "t", ["x"], 4), blocking=True).answers
    assert not state.claim(Claim("p", "t", ["x"], 2), blocking=True).answers
    newest = state.claim(Claim("p", "t", ["x"], 2, order="lifo"), blocking=True)
    assert ids_of(newest.answers) == ["b", "a"]


def test_what_a_budget_leaves_over_waits_for_the_next_step() -> None:
    state = plane()
    write(state, "abcdef", "x", tags=[{"input_lengths": 2}] * 6)
    request = Claim("p", "t", ["x"], 4, step="1", dp_world=2, max_tokens=7)
    assert len(ids_of(state.claim(request, blocking=False).answers)) == 1
    assert claim(state, 9) == ["c", "d", "e", "f"]
    tight = Claim("p", "t", ["x"], 4, step="2", dp_world=2, max_tokens=2)
    write(state, "gh", "x", tags=[{"input_lengths": 2}] * 2)
    ((_, error),) = state.claim(tight, blocking=True).answers
    assert isinstance(error, InvalidRequestError) and claim(state, 9) == ["g", "h"]


def test_steps_in_order_neither_end_early_nor_short_when_the_flow_is_finished() -> None:
    state = flow("in_order", max_staleness=0, batch=2)
    write(state, "abc", "x")
    state.finish("p")
    waiting = Claim("p", "train", ["y"], 2, token="w")
    assert not state.claim(waiting, blocking=True)
    assert claim(state, 1, task="rollout") == ["a"]
    assert len(write(state, "a", "y")) == 1  # the other prompt of the step is still to be admitted
    assert claim(state, 9, task="rollout") == ["b"]
    assert [ids.ids for token, ids in write(state, "b", "y") if token == "w"] == [["a", "b"]]
    at_once.clear(state, "p", ["a", "b"])
    at_once.advance(state, "p", 1)
    assert claim(state, 9, task="rollout") == ["c"]
    write(state, "c", "y")
    assert ids_of(state.claim(Claim("p", "train", ["y"], 2), blocking=True).answers) == ["c"]
    assert ids_of(state.claim(Claim("p", "train", ["y"], 2), blocking=True).answers) == []


def test_a_prompt_that_failed_does_not_hold_up_the_next_step_when_no_other_can_take_its_place() -> None:
    state = flow("in_order", max_staleness=1, batch=2)
    write(state, "abcd", "x")
    assert claim(state, 9, task="rollout") == list("abcd")
    at_once.clear(state, "p", ["a"])
    write(state, "bcd", "y")
    assert claim(state, 9, "y", task="train") == ["b"]
    assert claim(state, 9, "y", task="train") == ["c", "d"]


def test_ranks_in_order_come_to_an_end_when_the_last_step_cannot_be_divided() -> None:
    state = flow("in_order", max_staleness=1, batch=2)
    write(state, "abc", "x")
    assert claim(state, 9, task="rollout") == ["a", "b", "c"]
    write(state, "abc", "y")
    state.finish("p")
    parts = [
        [
            ids_of(
                state.claim(
                    Claim("p", "train", ["y"], 2, step=str(step), dp_rank=rank, dp_world=2), blocking=True
                ).answers
            )
            for rank in range(2)
        ]
        for step in range(2)
    ]
    assert parts == [[["a"], ["b"]], [[], []]]


@pytest.mark.parametrize("others", ["", "b", "bc"])
def test_at_the_end_ranks_share_groups_of_any_size_or_get_none(others: str) -> None:
    state = plane(group_size=2)
    write(state, [f"a_g{n}" for n in range(4)], "x", tags=[{"group_size": 4}] * 4)
    write(state, [f"{name}_g{n}" for name in others for n in range(2)], "x")
    state.finish("p")
    parts = [ids_of(part(state, rank, "1", size=8)) for rank in range(2)]
    groups = [sorted({sample_id[0] for sample_id in ids}) for ids in parts]
    assert groups == ([["a"], ["b"]] if others else [[], []])


def test_at_the_end_ranks_share_the_samples_of_short_groups_when_asked() -> None:
    state = plane(group_size=2)
    write(state, ["a_g0", "b_g0", "b_g1"], "x", tags=[{"group_size": 1}, {}, {}])
    state.finish("p")
    parts = [
        ids_of(
            state.claim(
                Claim("p", "t", ["x"], 4, step=step, dp_world=2, split_groups=True), blocking=True
            ).answers
        )
        for step in ("1", "2")
    ]
    assert parts == [["a_g0"], []] and claim(state, 4) == ["b_g1"]


def test_the_end_waits_for_a_group_whose_time_is_not_over() -> None:
    policy = FlowPolicy(finished_fields=["x"], min_group_size=1, group_timeout_s=5.0)
    state = plane(ROLES, 2, flow=policy)
    write(state, ["a_g0"], "x")
    state.finish("p")
    waits(state, "train", 2, "x")
    assert got(state.expire(5.0).answers) == [["a_g0"]]
    write(state, ["b_g0"], "x", clock=6.0)
    at_once.clear(state, "p", ["b_g0"])
    assert ids_of(state.claim(Claim("p", "train", ["x"], 2), blocking=True).answers) == []


def test_what_is_given_back_by_hand_and_has_become_too_old_is_not_handed_out() -> None:
    state = flow("windowed", max_staleness=0)
    write(state, "ab", "x", tags=[{"weight_version": 0}] * 2)
    assert claim(state, 2, task="train") == ["a", "b"]
    at_once.advance(state, "p", 1)
    waits(state, "train", 1, "x")
    assert not at_once.unmark(state, "p", "train", ["a"]).answers
    assert state.evicted("p").ids == ["a"]


# Claims that others make possible


def waits(state: ControlState, task: str, size: int, *fields: str, token: object = "w", **how: Any) -> None:
    assert not state.claim(Claim("p", task, fields, size, token=token, **how), blocking=True).answers


def got(answers: Any, token: object = "w") -> list[list[str]]:
    return [batch.ids for who, batch in answers if who == token]


def test_the_claim_that_ends_a_step_wakes_one_that_waits_for_the_next() -> None:
    state = flow("in_order", max_staleness=1, batch=1)
    write(state, "abcd", "x")
    assert claim(state, 9, task="rollout") == ["a", "b"]
    write(state, "ab", "y", tags=[{"v": 0}, {"v": 1}])
    waits(state, "train", 1, "y", where={"v": 1})
    ends = Claim("p", "train", ["y"], 1, token="now")
    assert got(state.claim(ends, blocking=False).answers) == [["b"]]


def test_a_claim_of_the_next_step_is_woken_whoever_waits_before_it() -> None:
    state = flow("in_order", max_staleness=1, batch=1)
    write(state, "ab", "x")
    assert claim(state, 9, task="rollout") == ["a", "b"]
    write(state, "b", "y", tags=[{"v": 1}])
    waits(state, "train", 1, "y", token="second", where={"v": 1})
    waits(state, "train", 1, "y", token="first")
    answers = write(state, "a", "y", tags=[{"v": 0}])
    assert (got(answers, "first"), got(answers, "second")) == ([["a"]], [["b"]])


@pytest.mark.parametrize("tasks", [["train", "rollout"], ["rollout", "train"]])
@pytest.mark.parametrize("by", ["claim", "advance"])
def test_what_is_ready_when_it_is_admitted_wakes_the_trainer(tasks: list[str], by: str) -> None:
    state = plane(tasks, flow=FlowPolicy.in_order(0, 1, first_version=1))
    write(state, "a", "x", "y")
    waits(state, "train", 1, "y")
    if by == "claim":
        at_once.advance(state, "p", 1)
        answers = state.claim(Claim("p", "rollout", ["x"], 1), blocking=False).answers
    else:
        waits(state, "rollout", 1, "x", token="rollout")
        answers = at_once.advance(state, "p", 1).answers
    assert got(answers) == [["a"]]


def test_a_claim_of_what_another_waits_for_lets_that_one_have_its_tail() -> None:
    state = plane(num_samples=2)
    write(state, "a", "x", "y")
    write(state, "b", "x")
    waits(state, "t", 2, "y")
    taken = Claim("p", "t", ["x"], 1, order="lifo", token="now")
    assert got(state.claim(taken, blocking=False).answers) == [["a"]]
