"""The control state, against a model of dictionaries, and the corners that random operations seldom reach."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.unit.control import at_once
from tests.unit.control.plane_model import PlaneModel, plain

from rlplane.control.requests import Batch, Claim, Effects, Put
from rlplane.control.rules import PartitionSpec
from rlplane.control.state import ControlState
from rlplane.errors import (
    CapacityError,
    CapacityTimeoutError,
    ClaimTimeoutError,
    DataPlaneError,
    InvalidRequestError,
    MissingDataError,
    PlaneConnectionError,
    UnknownFieldError,
    UnknownPartitionError,
    UnknownTaskError,
)

CAPACITY = 7
IDS = [f"{name}_g{number}" for name in "abc" for number in range(3)] + ["loner"]
TASKS = ["train", "score"]

some_ids = st.lists(st.sampled_from(IDS), unique=True, max_size=5)
some_fields = st.lists(st.sampled_from("xxyz"), unique=True, max_size=2)
some_tags = st.fixed_dictionaries({}, optional={"v": st.integers(0, 2), "group": st.sampled_from("ab")})
conditions = st.sampled_from([None, {"v": 1}, {"v": {">=": 1}}, {"v": {"in": [0, 2]}}])
partition_ids = st.sampled_from("ppppq")
owners = st.integers(0, 1)


class ControlStateMachine(RuleBasedStateMachine):
    """Every operation goes to the state and to the model; then both must say the same.

    Every request is answered exactly once, and one that raises changes nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.state = ControlState(CAPACITY)
        self.model = PlaneModel(CAPACITY)
        self.next_block = 0
        # Every request that has not been answered: whose it is, and for a claim its partition and task.
        self.unanswered: dict[Any, tuple[int, tuple[str, str] | None]] = {}
        self.batches: list[tuple[str, str, list[str], int]] = []

    @initialize(group_size=st.sampled_from([None, None, 3]))
    def register_one(self, group_size: int | None) -> None:
        self.register("p", ["x", "y"], 6, TASKS, group_size)

    def register(
        self, partition_id: str, fields: list[str], number: int, tasks: list[str], group_size: int | None
    ) -> None:
        spec = PartitionSpec.checked(partition_id, fields, number, tasks, group_size)
        self._both(lambda plane: plane.register(spec))

    @rule(
        partition_id=partition_ids,
        ids=some_ids,
        fields=some_fields,
        tags=st.none() | st.lists(some_tags, min_size=5, max_size=5),
        owner=owners,
    )
    def put_anything(self, **put: Any) -> None:
        self.put(**put)

    @rule(
        ids=st.lists(st.sampled_from(IDS[:-1]), unique=True, min_size=2, max_size=5),
        fields=st.sampled_from([["x"], ["x", "y"]]),
        tags=st.none() | st.lists(st.fixed_dictionaries({"v": st.integers(0, 2)}), min_size=5, max_size=5),
        owner=owners,
    )
    def put_much(self, **put: Any) -> None:
        self.put("p", **put)

    def put(
        self,
        partition_id: str,
        ids: list[str],
        fields: list[str],
        tags: list[dict[str, Any]] | None,
        owner: int,
    ) -> None:
        blocks = {name: self.next_block + place for place, name in enumerate(fields)}
        self.next_block += len(blocks)
        sizes = [64 * (1 + place) for place in range(len(blocks))]
        mine = None if tags is None else tags[: len(ids)]
        put = Put(partition_id, ids, blocks, mine, nbytes=sizes, owner=owner, token=object())
        self.unanswered[put.token] = (owner, None)
        if self._both(lambda plane: plane.put(put)) is not None:
            del self.unanswered[put.token]

    @rule(
        partition_id=partition_ids,
        task=st.sampled_from(TASKS),
        fields=some_fields,
        size=st.integers(1, 4),
        where=conditions,
        owner=owners,
        blocking=st.booleans(),
    )
    def claim_anything(self, **claim: Any) -> None:
        self.claim(**claim)

    @rule(
        fields=st.sampled_from([["x"], ["x"], ["x", "y"]]),
        size=st.sampled_from([1, 2, 3, 6]),
        where=st.none() | conditions,
        owner=owners,
    )
    def wait(self, **claim: Any) -> None:
        self.claim("p", "train", blocking=True, **claim)

    def claim(
        self,
        partition_id: str,
        task: str,
        fields: list[str],
        size: int,
        where: dict[str, Any] | None,
        owner: int,
        blocking: bool,
    ) -> None:
        claim = Claim(partition_id, task, fields, size, where, owner=owner, token=object())
        self.unanswered[claim.token] = (owner, (partition_id, task))
        if self._both(lambda plane: plane.claim(claim, blocking=blocking)) is not None:
            del self.unanswered[claim.token]

    @precondition(lambda self: self.unanswered)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        token = data.draw(st.sampled_from(list(self.unanswered)))
        self._both(lambda plane: plane.give_up(token))
        assert token not in self.unanswered
        assert not self.state.give_up(token), "it does not wait any more"

    @rule(partition_id=partition_ids, ids=some_ids)
    def clear(self, partition_id: str, ids: list[str]) -> None:
        self._both(lambda plane: _clear(plane, partition_id, ids))

    @precondition(lambda self: self.batches)
    @rule(data=st.data())
    def unclaim(self, data: st.DataObject) -> None:
        batch = data.draw(st.sampled_from(self.batches))
        self.batches.remove(batch)
        self._both(lambda plane: _unclaim(plane, *batch))

    @rule(owner=owners)
    def lose_a_client(self, owner: int) -> None:
        # The dead are not answered.
        self.unanswered = {token: asked for token, asked in self.unanswered.items() if asked[0] != owner}
        self._both(lambda plane: _release_owner(plane, owner))

    # In one rule, or they would be most of what happens and little else would come about.
    @rule(kind=st.sampled_from(["register", "clear all", "clear one's own", "abort"]), data=st.data())
    def upset(self, kind: str, data: st.DataObject) -> None:
        name = data.draw(partition_ids)
        if kind == "register":
            self.register(
                name,
                data.draw(some_fields),
                data.draw(st.integers(0, 6)),
                data.draw(st.lists(st.sampled_from(TASKS), unique=True, min_size=1)),
                data.draw(st.sampled_from([None, None, 1, 2, 3])),
            )
        elif kind == "clear all":
            self._both(lambda plane: _clear(plane, name, None))
        elif kind == "clear one's own":
            owner = data.draw(owners)
            self._both(lambda plane: _clear_written_by(plane, name, owner))
        else:
            error, whose = PlaneConnectionError("over"), data.draw(st.none() | owners)
            self._both(lambda plane: plane.abort(error, whose))

    @invariant()
    def they_hold_the_same(self) -> None:
        assert self.state.live == self.model.live <= CAPACITY
        assert self.state.blocks() == dict(self.model.references())
        assert set(map(id, self.state.waiting())) == set(map(id, self.model.waiting()))
        assert set(map(id, self.state.waiting())) == set(map(id, self.unanswered))
        assert len(self.state.waiting()) == len(self.unanswered)
        for name, flow in self.model.flows.items():
            partition = self.state.partition(name)
            status = partition.status(0.0)
            assert list(partition.rows) == list(flow.samples)
            assert status["written"] == flow.written
            assert status["bytes"] == sum(size for home, size in self.model.given.values() if home == name)
            assert status["fields"] == {
                field: {
                    "declared": field in flow.spec.fields,
                    "produced": sum(field in sample.places for sample in flow.samples.values()),
                }
                for field in flow.fields
            }
            for task, cursor in flow.tasks.items():
                counts = status["tasks"][task]
                assert counts["claimed"] == len(cursor.claimed)
                assert counts["unclaimed"] == len(flow.samples) - len(cursor.claimed)
                assert counts["waiting"] == len(cursor.waiters)
                done = bool(flow.samples or flow.written) and len(cursor.claimed) == len(flow.samples)
                assert partition.consumed([task]) is done
            for sample_id, sample in flow.samples.items():
                assert partition.tags[partition.rows[sample_id]] == sample.tags
                for field, place in sample.places.items():
                    blocks, positions, _ = self.state.locate(name, [sample_id], [field])[field]
                    assert (blocks.item(), positions.item()) == place

    def teardown(self) -> None:
        self._both(lambda plane: plane.abort(PlaneConnectionError("over"), None))
        assert not self.unanswered and not self.state.waiting()

    def _both(self, operation: Any) -> type[DataPlaneError] | None:
        """Do it to both and compare all that came of it; return the kind of error if it raised one."""
        before = picture(self.state)
        wanted = got = None
        effects, count = Effects(), None
        try:
            done = operation(self.state)
            count, effects = done if isinstance(done, tuple) else (None, done)
        except DataPlaneError as error:
            got = type(error)
            assert picture(self.state) == before, "it raised, and has changed something"
        try:
            assert operation(self.model) == count
        except DataPlaneError as error:
            wanted = type(error)
        assert got == wanted
        self._compare(effects)
        return got

    def _compare(self, effects: Effects) -> None:
        answers = answered(effects)
        assert answers == [(token, plain(result)) for token, result in self.model.answers]
        self.model.answers.clear()
        for token, result in answers:
            owner, asked = self.unanswered.pop(token)  # once, and only what was asked
            if isinstance(result, list) and asked:
                self.batches.append((*asked, result, owner))
        assert len(set(effects.freed)) == len(effects.freed)
        assert set(effects.freed) == self.model.freed()


def _clear(plane: ControlState | PlaneModel, partition_id: str, ids: list[str] | None) -> Any:
    if isinstance(plane, ControlState):
        return at_once.clear(plane, partition_id, ids)
    return plane.clear(partition_id, ids)


def _clear_written_by(plane: ControlState | PlaneModel, partition_id: str, owner: int) -> Any:
    if isinstance(plane, ControlState):
        return at_once.clear_written_by(plane, partition_id, owner)
    return plane.clear_written_by(partition_id, owner)


def _release_owner(plane: ControlState | PlaneModel, owner: int) -> Any:
    if isinstance(plane, ControlState):
        return at_once.release_owner(plane, owner)
    return plane.release_owner(owner)


def _unclaim(
    plane: ControlState | PlaneModel, partition_id: str, task: str, ids: list[str], owner: int
) -> Any:
    if not isinstance(plane, ControlState):
        return plane.unclaim(partition_id, task, ids, owner)
    if task not in plane.partition(partition_id).tasks:
        return Effects()  # nothing is asked of a task that a new registration has removed
    return at_once.unclaim(plane, partition_id, task, ids, owner)


def picture(value: Any, seen: set[int] | None = None) -> Any:
    """A value with everything that it refers to, each object once, as something that compares by content."""
    seen = set() if seen is None else seen
    if isinstance(value, np.ndarray):
        return value.dtype, value.tolist() if value.dtype == object else value.tobytes()
    if isinstance(value, dict):
        return [(picture(key, seen), picture(item, seen)) for key, item in value.items()]
    if isinstance(value, (list, tuple, deque)):
        return [picture(item, seen) for item in value]
    names = getattr(value, "__slots__", None) or getattr(value, "__dict__", None)
    if not names or id(value) in seen or not type(value).__module__.startswith("rlplane."):
        return value
    seen.add(id(value))
    return [(name, picture(getattr(value, name), seen)) for name in names]


def answered(effects: Effects) -> list[tuple[Any, Any]]:
    return [(token, plain(result)) for token, result in effects.answers]


TestControlStateIsTheModel = ControlStateMachine.TestCase
TestControlStateIsTheModel.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)


def plane(capacity: int | None = None, **spec: Any) -> ControlState:
    state = ControlState(capacity)
    defaults: dict[str, Any] = {
        "partition_id": "p",
        "fields": ["x", "y"],
        "num_samples": 1000,
        "consumer_tasks": ["t"],
    }
    state.register(PartitionSpec.checked(**(defaults | spec)))
    return state


_blocks = iter(range(10**9))


PUT = ("put", None)  # the answer to a put that was written, under the token that write() gives it


def write(state: ControlState, ids: list[str], *fields: str, **more: Any) -> list[tuple[Any, Any]]:
    """Put, and return what was answered."""
    more.setdefault("token", "put")
    return answered(state.put(Put("p", ids, {name: next(_blocks) for name in fields}, **more)))


def wait_for(state: ControlState, size: int, *fields: str, token: Any, **more: Any) -> list[tuple[Any, Any]]:
    return answered(state.claim(Claim("p", "t", fields, size, token=token, **more), blocking=True))


def claimed(state: ControlState, size: int, *fields: str, **more: Any) -> list[str]:
    effects = state.claim(Claim("p", "t", fields, size, token="claim", **more), blocking=False)
    ((token, ids),) = answered(effects)
    assert token == "claim"
    return ids


def clear(state: ControlState, *ids: str) -> list[tuple[Any, Any]]:
    count, effects = at_once.clear(state, "p", list(ids))
    assert count == len(ids)
    return answered(effects)


def test_puts_that_wait_for_room_go_in_order_and_a_small_one_does_not_overtake() -> None:
    state = plane(capacity=4)
    write(state, ["a", "b", "c"], "x")
    assert write(state, ["d", "e"], "x", token="large") == []
    assert write(state, ["f"], "x", token="small") == []
    # Nothing new, so nothing to wait for.
    assert write(state, ["a", "c"], "y") == [PUT]
    assert write(state, ["b"], tags=[{"v": 1}]) == [PUT]
    assert clear(state, "a") == [("large", None)]
    assert clear(state, "b") == [("small", None)]


def test_a_put_behind_one_that_gives_up_moves_on() -> None:
    state = plane(capacity=4)
    write(state, ["a", "b", "c"], "x")
    write(state, ["d", "e"], "x", token="large")
    write(state, ["f"], "x", token="small")
    effects = state.give_up("large")
    assert answered(effects) == [("large", CapacityTimeoutError), ("small", None)]
    error = str(effects.answers[0][1])
    assert "no room for 2 samples" in error and "storage_capacity 4" in error
    assert len(effects.freed) == 1, "the block of the put that gave up"


def test_a_put_that_can_never_fit_is_refused_at_once() -> None:
    state = plane(capacity=2)
    with pytest.raises(CapacityError, match="3 new samples can never fit into storage_capacity 2"):
        write(state, ["a", "b", "c"], "x")
    assert not state.waiting()


def test_a_put_that_a_clear_made_too_large_is_refused_and_holds_up_nobody() -> None:
    state = plane(capacity=3)
    write(state, ["a", "b", "c"], "x")
    # Two of its four samples exist, so that it could fit; then they are cleared.
    assert write(state, ["a", "b", "d", "e"], "x", token="grown") == []
    assert write(state, ["f"], "x", token="behind") == []
    assert clear(state, "a", "b") == [("grown", CapacityError), ("behind", None)]


def test_waiting_claims_with_a_condition_are_woken_by_tags_alone() -> None:
    state = plane()
    write(state, ["a", "b"], "x", tags=[{"v": 0}, {"v": 0}])
    assert wait_for(state, 2, "x", token="w", where={"v": {">=": 5}}) == []
    assert write(state, ["a"], tags=[{"v": 5}]) == [PUT]
    assert write(state, ["b"], tags=[{"v": 6}]) == [PUT, ("w", ["a", "b"])]


def test_waiting_claims_are_served_in_the_order_in_which_they_came() -> None:
    state = plane()
    for token in ("first", "second", "third"):
        wait_for(state, 2, "x", token=token)
    assert write(state, list("abcde"), "x") == [PUT, ("first", ["a", "b"]), ("second", ["c", "d"])]
    assert write(state, ["f"], "x") == [PUT, ("third", ["e", "f"])]


def test_a_claim_that_waits_holds_back_a_later_one_that_wants_the_same() -> None:
    state = plane()
    wait_for(state, 3, "x", token="large")
    wait_for(state, 1, "x", token="small")
    wait_for(state, 1, "x", token="picky", where={"v": 1})
    wait_for(state, 1, "y", token="other fields")
    tags = [{"v": 1}, {"v": 1}]
    assert write(state, ["a", "b"], "x", "y", tags=tags) == [PUT, ("other fields", ["a"])]
    assert write(state, list("cdef"), "x") == [PUT, ("large", ["b", "c", "d"]), ("small", ["e"])]


def test_a_claim_with_a_condition_holds_back_only_those_with_the_same_condition() -> None:
    state = plane()
    wait_for(state, 2, "x", token="picky", where={"v": 1})
    wait_for(state, 1, "x", token="as picky", where={"v": 1})
    wait_for(state, 1, "x", token="not picky")
    assert write(state, ["a", "b"], "x", tags=[{"v": 0}, {"v": 1}]) == [PUT, ("not picky", ["a"])]
    both = [PUT, ("picky", ["b", "c"]), ("as picky", ["d"])]
    assert write(state, ["c", "d"], "x", tags=[{"v": 1}, {"v": 1}]) == both


def test_what_more_than_64_clients_wrote_is_kept_apart() -> None:
    state = plane()
    for owner in range(200):
        write(state, [f"s{owner}", f"s{(owner + 1) % 200}"], "x", owner=owner)
    assert at_once.clear_written_by(state, "p", 130)[0] == 2
    assert at_once.clear_written_by(state, "p", 63)[0] == 2
    assert at_once.clear_written_by(state, "p", 64)[0] == 1  # s64 went with 63
    assert at_once.clear_written_by(state, "p", 130)[0] == 0
    assert len(state.partition("p").rows) == 195


def test_a_dead_clients_place_among_the_writers_is_free_and_clean_for_another() -> None:
    state = plane()
    for owner in range(70):
        write(state, [f"s{owner}"], "x", owner=owner)
    at_once.release_owner(state, 66)
    write(state, ["new"], "x", owner=1000)
    assert len(state.partition("p").table._written_bits) == 2
    assert at_once.clear_written_by(state, "p", 1000)[0] == 1
    assert "s66" in state.partition("p").rows
    # A client that is not known to have written here clears everything.
    assert at_once.clear_written_by(state, "p", 66)[0] == 70


def test_many_samples_and_reused_rows_keep_their_places() -> None:
    state = plane()
    claimed(state, 1, "x")
    for step in range(30):
        ids = [f"s{step}-{place}" for place in range(50)]
        write(state, ids, "x", owner=step)
        if step % 3 == 0:
            at_once.clear(state, "p", ids[::2])
    live = list(state.partition("p").rows)
    assert len(live) == 1500 - 250
    assert claimed(state, 2000, "x") == live
    assert claimed(state, 2000, "x") == []
    assert at_once.clear_written_by(state, "p", 29)[0] == 50
    blocks, positions, _ = state.locate("p", ["s1-49", "s3-1", "s1-0"], ["x"])["x"]
    assert positions.tolist() == [49, 1, 0] and blocks[0] == blocks[2] != blocks[1]


def test_registering_with_another_group_size_sorts_the_samples_anew() -> None:
    state = plane(grpo_group_size=2)
    write(state, ["a_g0", "b_g0", "a_g1"], "x")
    assert claimed(state, 2, "x") == ["a_g0", "a_g1"]
    state.register(PartitionSpec.checked("p", ["x"], 9, ["t"], 3))
    write(state, ["c_g0", "b_g1", "c_g1", "b_g2"], "x")
    assert claimed(state, 3, "x") == ["b_g0", "b_g1", "b_g2"]
    state.register(PartitionSpec.checked("p", ["x"], 9, ["t"]))
    assert claimed(state, 9, "x") == ["c_g0", "c_g1"]


def test_a_sample_keeps_the_group_of_its_first_write_when_the_group_size_changes() -> None:
    state = plane(grpo_group_size=2)
    write(state, ["a_g0", "a_g1", "a_g2"], "x")
    state.put(Put("p", ["a_g0"], {}, [{"group": "elsewhere"}]))
    state.register(PartitionSpec.checked("p", ["x"], 9, ["t"], 3))
    assert claimed(state, 3, "x") == ["a_g0", "a_g1", "a_g2"]


def test_a_group_size_is_refused_when_a_live_sample_belongs_to_no_group() -> None:
    state = plane()
    write(state, ["a_g0", "loner"], "x")
    with pytest.raises(InvalidRequestError, match=r"'loner'.*belongs to no group"):
        state.register(PartitionSpec.checked("p", ["x"], 9, ["t", "new"], 2))
    assert list(state.partition("p").tasks) == ["t"]
    assert claimed(state, 9, "x") == ["a_g0", "loner"]


def test_a_waiting_claim_that_a_registration_makes_impossible_is_told() -> None:
    state = plane(consumer_tasks=["t", "u"])
    wait_for(state, 3, "x", token="size")
    wait_for(state, 2, "y", token="field")
    state.claim(Claim("p", "u", ["x"], 2, token="task"), blocking=True)
    effects = state.register(PartitionSpec.checked("p", ["x"], 9, ["t"], 2))
    assert dict(answered(effects)) == {
        "size": InvalidRequestError,
        "field": UnknownFieldError,
        "task": UnknownTaskError,
    }
    assert state.waiting() == []


def test_a_dead_clients_claims_come_back_first_and_in_order_unless_it_finished_them() -> None:
    state = plane()
    write(state, list("abcdef"), "x")
    assert claimed(state, 2, "x", owner=1) == ["a", "b"]
    assert claimed(state, 2, "x", owner=2) == ["c", "d"]
    assert claimed(state, 1, "x", owner=1) == ["e"]
    write(state, ["b"], "y", owner=1)
    write(state, ["a"], "y", owner=2)  # not the holder's work
    assert at_once.release_owner(state, 1)[0] == 2
    assert claimed(state, 9, "x") == ["a", "e", "f"]


def test_a_dead_client_that_wrote_only_tags_has_not_finished() -> None:
    state = plane()
    write(state, ["a"], "x")
    claimed(state, 1, "x", owner=1)
    state.put(Put("p", ["a"], {}, [{"seen": True}], owner=1))
    assert at_once.release_owner(state, 1)[0] == 1


def test_the_blocks_of_a_dead_clients_waiting_put_are_freed() -> None:
    state = plane(capacity=1)
    write(state, ["a"], "x")
    state.put(Put("p", ["b"], {"x": -7}, owner=3, token="dead"))
    state.put(Put("p", ["c"], {"x": -8}, owner=4, token="behind"))
    returned, effects = at_once.release_owner(state, 3)
    assert returned == 0 and effects.freed == [-7] and effects.answers == []
    assert state.waiting() == ["behind"]


def test_a_claim_that_runs_out_of_time_is_told_what_there_was() -> None:
    state = plane()
    write(state, ["a", "b", "c"], "x", tags=[{"v": 1}, {"v": 0}, {"v": 1}])
    claimed(state, 1, "x")
    wait_for(state, 5, "x", token="w", where={"v": 1})
    ((token, error),) = state.give_up("w").answers
    assert token == "w" and isinstance(error, ClaimTimeoutError) and error.ready == 1
    for part in (
        "task 't'",
        "5 samples",
        "partition 'p'",
        "['x']",
        "1 were ready",
        "{'v': 1}",
        "2 without",
        "3 live",
    ):
        assert part in str(error)
    assert claimed(state, 9, "x") == ["b", "c"]


def readiness(state: ControlState) -> tuple[int | None, int, list[str]]:
    task = state.partition("p").status(0.0)["tasks"]["t"]
    return task["ready"], task["waiting"], task["fields"]


def test_ready_counts_what_satisfies_the_claim_that_waits_and_not_another_of_the_same_task() -> None:
    state = plane()
    write(state, [f"s{n}" for n in range(100)], "x")
    assert readiness(state) == (None, 0, [])  # nobody has claimed: nobody knows what it would ask for
    assert claimed(state, 1, "x", where={"v": 9}) == []
    assert readiness(state) == (0, 0, ["x"])
    wait_for(state, 4, "y", token="w")
    assert readiness(state) == (0, 1, ["y"])
    write(state, ["s0", "s1"], "y")
    assert readiness(state) == (2, 1, ["y"])
    assert claimed(state, 50, "x") == [f"s{n}" for n in range(50)]
    assert readiness(state) == (0, 1, ["y"])
    state.give_up("w")
    assert readiness(state) == (50, 0, ["x"])  # the claim that was made last


def test_ready_counts_only_what_matches_the_condition_of_the_claim() -> None:
    state = plane()
    write(state, ["a", "b", "c"], "x", tags=[{"v": 1}, {"v": 0}, {"v": 1}])
    wait_for(state, 3, "x", token="w", where={"v": 1})
    assert readiness(state) == (2, 1, ["x"])
    write(state, ["b"], tags=[{"v": 2}])
    assert readiness(state) == (2, 1, ["x"])
    write(state, ["a"], tags=[{"v": 2}])
    assert readiness(state) == (1, 1, ["x"])


def test_a_claim_whose_field_a_registration_removed_says_nothing_about_what_is_ready() -> None:
    state = plane()
    write(state, ["a"], "x")
    claimed(state, 1, "y")
    state.register(PartitionSpec.checked("p", ["x"], 1000, ["t"]))
    assert readiness(state) == (None, 0, [])


def test_a_look_at_the_status_changes_nothing() -> None:
    state = plane(grpo_group_size=2)
    claimed(state, 2, "x")
    state.register(PartitionSpec.checked("p", ["x"], 9, ["t"]))
    write(state, ["a", "b"], "x")
    before = picture(state)
    assert readiness(state) == (2, 0, ["x"])
    assert picture(state) == before


def test_a_task_writes_what_its_workers_write_to_the_samples_that_they_claimed() -> None:
    state = plane()
    write(state, ["a", "b"], "x", owner=1)
    assert claimed(state, 1, "x", owner=2) == ["a"]
    write(state, ["a"], "y", owner=2)
    write(state, ["b"], "y", owner=1)
    assert state.partition("p").status(0.0)["tasks"]["t"]["writes"] == ["y"]


def test_a_claim_that_times_out_lets_the_one_behind_it_go_on() -> None:
    state = plane()
    wait_for(state, 3, "x", token="large")
    wait_for(state, 1, "x", token="small")
    assert write(state, ["a"], "x") == [PUT]
    assert answered(state.give_up("large")) == [("large", ClaimTimeoutError), ("small", ["a"])]


def test_a_tail_is_handed_out_once_all_that_remain_are_ready() -> None:
    state = plane(num_samples=3)
    write(state, ["a", "b"], "x")
    wait_for(state, 8, "x", token="w")
    assert write(state, ["c"]) == [PUT]
    assert clear(state, "c") == [("w", ["a", "b"])]


def test_what_does_not_exist_is_named() -> None:
    state = plane()
    with pytest.raises(UnknownPartitionError, match="'nope' is not registered; registered are: 'p'"):
        at_once.clear(state, "nope", None)
    with pytest.raises(UnknownPartitionError, match="none yet"):
        ControlState().locate("p", [], [])
    with pytest.raises(UnknownTaskError, match=r"no task 'nope'; it has \['t'\]"):
        state.claim(Claim("p", "nope", [], 1), blocking=False)
    with pytest.raises(UnknownFieldError, match=r"no field 'z'; it has \['x', 'y'\]"):
        wait_for(state, 1, "z", token=None)
    write(state, ["a", "b"], "x")
    with pytest.raises(MissingDataError, match=r"does not have 'c', 'd', 'e', … \(4 of 5 samples"):
        state.locate("p", list("acdefc"), ["x"])
    with pytest.raises(MissingDataError, match=r"field 'y' .* not written for 'b', 'a' \(2 of 2"):
        state.locate("p", ["b", "a", "b"], ["x", "y"])
    with pytest.raises(UnknownFieldError, match="no field 'z'"):
        state.locate("p", ["a"], ["z"])


def test_requests_that_are_refused_change_nothing_and_are_answered_by_the_error_alone() -> None:
    state = plane(capacity=2, grpo_group_size=2)
    write(state, ["a_g0"], "x")
    wait_for(state, 2, "x", token="waits")
    before = picture(state)
    refused: list[Any] = [
        lambda: state.put(Put("p", ["b_g0", "loner"], {"x": 7}, token="put")),
        lambda: state.put(Put("p", ["a_g1", "b_g0", "b_g1"], {"x": 7}, token="put")),
        lambda: state.claim(Claim("p", "t", ["x"], 3, token="claim"), blocking=True),
        lambda: state.claim(Claim("p", "t", ["z"], 2, token="claim"), blocking=True),
        lambda: state.claim(Claim("p", "nobody", ["x"], 2, token="claim"), blocking=True),
        lambda: at_once.clear(state, "q", None),
        lambda: at_once.clear_written_by(state, "q", 0),
        lambda: at_once.unclaim(state, "q", "t", ["a_g0"], 0),
    ]
    for request in refused:
        with pytest.raises(DataPlaneError):
            request()
        assert picture(state) == before
    assert state.waiting() == ["waits"]


def test_the_blocks_of_a_waiting_put_are_freed_when_it_will_never_be_written() -> None:
    state = plane(capacity=1)
    write(state, ["a"], "x")
    for token, block in (("late", -1), ("aborted", -2)):
        assert not state.put(Put("p", ["b"], {"x": block}, token=token))
    effects = state.give_up("late")
    assert answered(effects) == [("late", CapacityTimeoutError)] and effects.freed == [-1]
    effects = state.abort(PlaneConnectionError("over"))
    assert answered(effects) == [("aborted", PlaneConnectionError)] and effects.freed == [-2]


def test_a_dropped_partition_frees_its_blocks_and_refuses_who_waits_for_it() -> None:
    state = ControlState(2)
    state.register(PartitionSpec.checked("p", ["x"], 9, ["t"]))
    state.register(PartitionSpec.checked("q", ["x"], 9, ["t"]))
    state.put(Put("p", ["a", "b"], {"x": 1}, token="first"))
    state.put(Put("p", ["c"], {"x": 2}, token="for the dropped one"))
    state.put(Put("q", ["d"], {"x": 3}, token="for another"))
    state.claim(Claim("p", "t", ["x"], 5, token="claim"), blocking=True)
    count, effects = at_once.drop(state, "p")
    answers = dict(effects.answers)
    assert count == 2 and sorted(effects.freed) == [1, 2]
    assert isinstance(answers["for the dropped one"], UnknownPartitionError)
    assert isinstance(answers["claim"], UnknownPartitionError)
    assert answers["for another"] is None and state.live == 1
    state.register(PartitionSpec.checked("p", ["x"], 9, ["t"]))
    assert state.partition("p").version == 2, "a client that knows the old one must notice"


def test_queues_that_nobody_asks_for_are_dropped_and_come_back_in_order() -> None:
    state = ControlState(None)
    fields = [f"f{n}" for n in range(40)]
    state.register(PartitionSpec.checked("p", fields, 9, ["t"]))
    state.put(Put("p", ["a", "b"], dict(zip(fields, range(40), strict=True))))
    for name in fields:
        state.claim(Claim("p", "t", [name], 5, {"no": {"==": 1}}), blocking=False)
    assert len(state.partition("p").task("t").queues) <= 16
    ((_, batch),) = state.claim(Claim("p", "t", ["f0"], 2), blocking=False).answers
    assert isinstance(batch, Batch) and batch.ids == ["a", "b"]
    ((_, batch),) = state.claim(Claim("p", "t", ["f1"], 2), blocking=False).answers
    assert isinstance(batch, Batch) and batch.ids == []


def test_a_task_that_produces_two_fields_holds_a_sample_until_both_are_there() -> None:
    state = ControlState(None)
    produces = {"score": ["y", "z"]}
    state.register(PartitionSpec.checked("p", ["x", "y", "z"], 9, ["score"], produces=produces))
    state.put(Put("p", ["a", "b"], {"x": 1}, owner=0))
    state.claim(Claim("p", "score", ["x"], 2, owner=1), blocking=False)
    state.put(Put("p", ["a", "b"], {"y": 2}, owner=1))
    state.put(Put("p", ["a"], {"z": 3}, owner=1))
    assert at_once.release_owner(state, 1)[0] == 1


@pytest.mark.parametrize("produces", [{"nobody": ["x"]}, {"t": ["nothing"]}, {"t": "x"}, ["t"]])
def test_what_a_task_produces_names_tasks_and_fields_of_the_partition(produces: Any) -> None:
    with pytest.raises(InvalidRequestError, match="produces"):
        PartitionSpec.checked("p", ["x"], 9, ["t"], produces=produces)


def test_a_waiting_put_that_a_registration_makes_invalid_is_refused_at_once() -> None:
    state = plane(capacity=1)
    state.put(Put("p", ["a_g0"], {}, token="there"))
    for token, sample_id in (("first", "b_g0"), ("loner", "c"), ("last", "d_g0")):
        state.put(Put("p", [sample_id], {"x": -ord(sample_id[0])}, token=token))
    effects = state.register(PartitionSpec.checked("p", ["x"], 10, ["t"], 2))
    assert answered(effects) == [("loner", InvalidRequestError)] and effects.freed == [-ord("c")]
    assert state.waiting() == ["first", "last"]
    assert clear(state, "a_g0") == [("first", None)]


def test_a_registration_that_refuses_the_first_waiting_put_lets_the_next_one_in() -> None:
    state = plane(capacity=2)
    state.put(Put("p", ["a_g0"], {}, token="there"))
    state.put(Put("p", ["b", "c"], {}, token="loners"))
    state.put(Put("p", ["d_g0"], {}, token="next"))
    effects = state.register(PartitionSpec.checked("p", ["x"], 10, ["t"], 2))
    assert answered(effects) == [("loners", InvalidRequestError), ("next", None)]


def test_a_registration_whose_bound_evicts_samples_makes_room_for_a_waiting_put() -> None:
    state = plane(capacity=1, consumer_tasks=["train"])
    at_once.advance(state, "p", 3)
    state.put(Put("p", ["old"], {}, [{"weight_version": 1}], token="there"))
    state.put(Put("p", ["new"], {}, [{"weight_version": 3}], token="waits"))
    flow = {"kind": "windowed", "max_staleness": 1}
    effects = state.register(PartitionSpec.checked("p", ["x"], 9, ["train"], flow=flow))
    assert answered(effects) == [("waits", None)]


def test_a_waiting_put_of_samples_that_another_has_made_meanwhile_needs_no_room() -> None:
    state = plane(capacity=2)
    state.put(Put("p", ["a", "b"], {}, None))
    state.put(Put("p", ["c", "d"], {}, None, token="large"))
    assert not state.put(Put("p", ["c"], {}, None, token="small")).answers
    effects = at_once.clear(state, "p", ["a", "b"])[1]
    assert dict(effects.answers) == {"large": None, "small": None}
