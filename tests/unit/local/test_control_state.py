"""The control state, against a model of dictionaries, and the corners that random operations seldom reach."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.unit.local.plane_model import PlaneModel, plain

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
from rlplane.index import Batch, Claim, ControlState, Put
from rlplane.rules import PartitionSpec

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
    """Every operation goes to the state and to the model; then both must say the same."""

    def __init__(self) -> None:
        super().__init__()
        self.state = ControlState(CAPACITY)
        self.model = PlaneModel(CAPACITY)
        self.next_block = 0
        self.parked: dict[Any, tuple[str, str, int] | None] = {}
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
        if self._both(lambda plane: plane.put(put)) is None:
            self.parked[put.token] = None

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
        got = self._both(lambda plane: plane.claim(claim, blocking=blocking))
        if got is None:
            self.parked[claim.token] = (partition_id, task, owner)
        elif isinstance(got, list):
            self.batches.append((partition_id, task, got, owner))

    @precondition(lambda self: self.parked)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        token = data.draw(st.sampled_from(list(self.parked)))
        is_claim = self.parked.pop(token) is not None
        error = self.state.give_up(token)
        assert isinstance(error, ClaimTimeoutError if is_claim else CapacityTimeoutError)
        assert self.model.give_up(token)
        assert self.state.give_up(token) is None
        self._compare()

    @rule(partition_id=partition_ids, ids=some_ids)
    def clear(self, partition_id: str, ids: list[str]) -> None:
        self._both(lambda plane: plane.clear(partition_id, ids))

    @precondition(lambda self: self.batches)
    @rule(data=st.data())
    def unclaim(self, data: st.DataObject) -> None:
        batch = data.draw(st.sampled_from(self.batches))
        self.batches.remove(batch)
        self._both(lambda plane: plane.unclaim(*batch))

    @rule(owner=owners)
    def lose_a_client(self, owner: int) -> None:
        self._both(lambda plane: plane.release_owner(owner))
        left = self.state.parked()
        self.parked = {token: asked for token, asked in self.parked.items() if token in left}

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
            self._both(lambda plane: plane.clear(name, None))
        elif kind == "clear one's own":
            owner = data.draw(owners)
            self._both(lambda plane: plane.clear_written_by(name, owner))
        else:
            error, whose = PlaneConnectionError("over"), data.draw(st.none() | owners)
            self._both(lambda plane: plane.abort(error, whose))

    @invariant()
    def they_hold_the_same(self) -> None:
        assert self.state.live == self.model.live <= CAPACITY
        assert self.state.blocks() == dict(self.model.references())
        assert set(map(id, self.state.parked())) == set(map(id, self.model.parked()))
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
                    blocks, positions = self.state.locate(name, [sample_id], [field])[field]
                    assert (blocks.item(), positions.item()) == place

    def _both(self, operation: Any) -> Any:
        """Do it to both and compare; return what came of it."""
        outcomes = []
        for plane in (self.state, self.model):
            try:
                outcomes.append(plain(operation(plane)))
            except DataPlaneError as error:
                outcomes.append(type(error))
        assert outcomes[0] == outcomes[1]
        self._compare()
        return outcomes[0]

    def _compare(self) -> None:
        answers = [(token, plain(result)) for token, result in self.state.answers]
        assert answers == [(token, plain(result)) for token, result in self.model.answers]
        for token, result in answers:
            asked = self.parked.pop(token)  # answered once, and only who waits
            if isinstance(result, list) and asked:
                partition_id, task, owner = asked
                self.batches.append((partition_id, task, result, owner))
        assert len(set(self.state.freed)) == len(self.state.freed)
        assert set(self.state.freed) == self.model.freed()
        for plane in (self.state, self.model):
            plane.answers.clear()
        self.state.freed.clear()


TestControlStateIsTheModel = ControlStateMachine.TestCase
TestControlStateIsTheModel.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)


def plane(capacity: int | None = None, **spec: Any) -> ControlState:
    state = ControlState(capacity)
    defaults = {"partition_id": "p", "fields": ["x", "y"], "num_samples": 1000, "consumer_tasks": ["t"]}
    state.register(PartitionSpec.checked(**(defaults | spec)))
    return state


_blocks = iter(range(10**9))


def write(state: ControlState, ids: list[str], *fields: str, **more: Any) -> bool | None:
    return state.put(Put("p", ids, {name: next(_blocks) for name in fields}, **more))


def wait_for(state: ControlState, size: int, *fields: str, token: Any, **more: Any) -> Batch | None:
    return state.claim(Claim("p", "t", fields, size, token=token, **more), blocking=True)


def claimed(state: ControlState, size: int, *fields: str, **more: Any) -> list[str]:
    batch = state.claim(Claim("p", "t", fields, size, **more), blocking=False)
    assert batch is not None
    return batch.ids


def answered(state: ControlState) -> list[tuple[Any, Any]]:
    answers, state.answers = state.answers, []
    return [(token, plain(result)) for token, result in answers]


def test_puts_that_wait_for_room_go_in_order_and_a_small_one_does_not_overtake() -> None:
    state = plane(capacity=4)
    write(state, ["a", "b", "c"], "x")
    assert write(state, ["d", "e"], "x", token="large") is None
    assert write(state, ["f"], "x", token="small") is None
    # Nothing new, so nothing to wait for.
    assert write(state, ["a", "c"], "y") is True
    assert state.put(Put("p", ["b"], {}, [{"v": 1}])) is True
    state.clear("p", ["a"])
    assert answered(state) == [("large", True)]
    state.clear("p", ["b"])
    assert answered(state) == [("small", True)]


def test_a_put_behind_one_that_gives_up_moves_on() -> None:
    state = plane(capacity=4)
    write(state, ["a", "b", "c"], "x")
    write(state, ["d", "e"], "x", token="large")
    write(state, ["f"], "x", token="small")
    error = state.give_up("large")
    assert isinstance(error, CapacityTimeoutError)
    assert "no room for 2 samples" in str(error) and "storage_capacity 4" in str(error)
    assert answered(state) == [("small", True)]


def test_a_put_that_can_never_fit_is_refused_at_once() -> None:
    state = plane(capacity=2)
    with pytest.raises(CapacityError, match="3 new samples can never fit into storage_capacity 2"):
        write(state, ["a", "b", "c"], "x")
    assert not state.parked()


def test_a_put_that_a_clear_made_too_large_is_refused_and_holds_up_nobody() -> None:
    state = plane(capacity=3)
    write(state, ["a", "b", "c"], "x")
    # Two of its four samples exist, so that it could fit; then they are cleared.
    assert write(state, ["a", "b", "d", "e"], "x", token="grown") is None
    assert write(state, ["f"], "x", token="behind") is None
    state.clear("p", ["a", "b"])
    assert answered(state) == [("grown", CapacityError), ("behind", True)]


def test_waiting_claims_with_a_condition_are_woken_by_tags_alone() -> None:
    state = plane()
    write(state, ["a", "b"], "x", tags=[{"v": 0}, {"v": 0}])
    assert wait_for(state, 2, "x", token="w", where={"v": {">=": 5}}) is None
    state.put(Put("p", ["a"], {}, [{"v": 5}]))
    assert answered(state) == []
    state.put(Put("p", ["b"], {}, [{"v": 6}]))
    assert answered(state) == [("w", ["a", "b"])]


def test_waiting_claims_are_served_in_the_order_in_which_they_came() -> None:
    state = plane()
    for token in ("first", "second", "third"):
        wait_for(state, 2, "x", token=token)
    write(state, list("abcde"), "x")
    assert answered(state) == [("first", ["a", "b"]), ("second", ["c", "d"])]
    write(state, ["f"], "x")
    assert answered(state) == [("third", ["e", "f"])]


def test_a_claim_that_waits_holds_back_a_later_one_that_wants_the_same() -> None:
    state = plane()
    wait_for(state, 3, "x", token="large")
    wait_for(state, 1, "x", token="small")
    wait_for(state, 1, "x", token="picky", where={"v": 1})
    wait_for(state, 1, "y", token="other fields")
    write(state, ["a", "b"], "x", "y", tags=[{"v": 1}, {"v": 1}])
    assert answered(state) == [("other fields", ["a"])]
    write(state, ["c", "d", "e", "f"], "x")
    assert answered(state) == [("large", ["b", "c", "d"]), ("small", ["e"])]


def test_a_claim_with_a_condition_holds_back_only_those_with_the_same_condition() -> None:
    state = plane()
    wait_for(state, 2, "x", token="picky", where={"v": 1})
    wait_for(state, 1, "x", token="as picky", where={"v": 1})
    wait_for(state, 1, "x", token="not picky")
    write(state, ["a", "b"], "x", tags=[{"v": 0}, {"v": 1}])
    assert answered(state) == [("not picky", ["a"])]
    write(state, ["c", "d"], "x", tags=[{"v": 1}, {"v": 1}])
    assert answered(state) == [("picky", ["b", "c"]), ("as picky", ["d"])]


def test_what_more_than_64_clients_wrote_is_kept_apart() -> None:
    state = plane()
    for owner in range(200):
        write(state, [f"s{owner}", f"s{(owner + 1) % 200}"], "x", owner=owner)
    assert state.clear_written_by("p", 130) == 2
    assert state.clear_written_by("p", 63) == 2
    assert state.clear_written_by("p", 64) == 1  # s64 went with 63
    assert state.clear_written_by("p", 130) == 0
    assert len(state.partition("p").rows) == 195


def test_a_dead_clients_place_among_the_writers_is_free_and_clean_for_another() -> None:
    state = plane()
    for owner in range(70):
        write(state, [f"s{owner}"], "x", owner=owner)
    state.release_owner(66)
    write(state, ["new"], "x", owner=1000)
    assert len(state.partition("p")._signed) == 2
    assert state.clear_written_by("p", 1000) == 1
    assert "s66" in state.partition("p").rows
    # A client that is not known to have written here clears everything.
    assert state.clear_written_by("p", 66) == 70


def test_many_samples_and_reused_rows_keep_their_places() -> None:
    state = plane()
    claimed(state, 1, "x")
    for step in range(30):
        ids = [f"s{step}-{place}" for place in range(50)]
        write(state, ids, "x", owner=step)
        if step % 3 == 0:
            state.clear("p", ids[::2])
    live = list(state.partition("p").rows)
    assert len(live) == 1500 - 250
    assert claimed(state, 2000, "x") == live
    assert claimed(state, 2000, "x") == []
    assert state.clear_written_by("p", 29) == 50
    blocks, positions = state.locate("p", ["s1-49", "s3-1", "s1-0"], ["x"])["x"]
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
    state.register(PartitionSpec.checked("p", ["x"], 9, ["t"], 2))
    assert dict(answered(state)) == {
        "size": InvalidRequestError,
        "field": UnknownFieldError,
        "task": UnknownTaskError,
    }
    assert state.parked() == []


def test_a_dead_clients_claims_come_back_first_and_in_order_unless_it_finished_them() -> None:
    state = plane()
    write(state, list("abcdef"), "x")
    assert claimed(state, 2, "x", owner=1) == ["a", "b"]
    assert claimed(state, 2, "x", owner=2) == ["c", "d"]
    assert claimed(state, 1, "x", owner=1) == ["e"]
    write(state, ["b"], "y", owner=1)
    write(state, ["a"], "y", owner=2)  # not the holder's work
    assert state.release_owner(1) == 2
    assert claimed(state, 9, "x") == ["a", "e", "f"]


def test_a_dead_client_that_wrote_only_tags_has_not_finished() -> None:
    state = plane()
    write(state, ["a"], "x")
    claimed(state, 1, "x", owner=1)
    state.put(Put("p", ["a"], {}, [{"seen": True}], owner=1))
    assert state.release_owner(1) == 1


def test_the_blocks_of_a_dead_clients_waiting_put_are_freed() -> None:
    state = plane(capacity=1)
    write(state, ["a"], "x")
    state.put(Put("p", ["b"], {"x": -7}, owner=3, token="dead"))
    state.put(Put("p", ["c"], {"x": -8}, owner=4, token="behind"))
    state.release_owner(3)
    assert state.freed == [-7] and state.parked() == ["behind"]


def test_a_claim_that_runs_out_of_time_is_told_what_there_was() -> None:
    state = plane()
    write(state, ["a", "b", "c"], "x", tags=[{"v": 1}, {"v": 0}, {"v": 1}])
    claimed(state, 1, "x")
    wait_for(state, 5, "x", token="w", where={"v": 1})
    error = state.give_up("w")
    assert isinstance(error, ClaimTimeoutError) and error.ready == 1
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


def test_a_claim_that_times_out_lets_the_one_behind_it_go_on() -> None:
    state = plane()
    wait_for(state, 3, "x", token="large")
    wait_for(state, 1, "x", token="small")
    write(state, ["a"], "x")
    state.give_up("large")
    assert answered(state) == [("small", ["a"])]


def test_a_tail_is_handed_out_once_all_that_remain_are_ready() -> None:
    state = plane(num_samples=3)
    write(state, ["a", "b"], "x")
    wait_for(state, 8, "x", token="w")
    write(state, ["c"])
    assert answered(state) == []
    state.clear("p", ["c"])
    assert answered(state) == [("w", ["a", "b"])]


def test_what_does_not_exist_is_named() -> None:
    state = plane()
    with pytest.raises(UnknownPartitionError, match="'nope' is not registered; registered are: 'p'"):
        state.clear("nope", None)
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
