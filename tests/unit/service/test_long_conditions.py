"""A condition or an order that looks at many samples does so in pieces, between which others are served."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.unit.service.service_harness import FOREVER, Desk

from rlplane.control.conditions import key_of
from rlplane.control.ordered_rows import OrderedRowQueue
from rlplane.control.policies import Order
from rlplane.control.rules import PartitionSpec, group_name
from rlplane.service import protocol as wire
from rlplane.service import stall
from rlplane.service.questions import status_of
from rlplane.service.stall import look_ahead

SAMPLES = 40_000


def claim(size: int, where: dict[str, Any]) -> wire.Envelope:
    return wire.Envelope(wire.ClaimRequest("p", "t", [], size, False, FOREVER, where))


@pytest.fixture(autouse=True)
def the_shortest_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stall, "_SLICE_S", 0.0)
    monkeypatch.setattr(stall, "_SHORT_S", FOREVER)


@pytest.fixture(scope="module")
def desk() -> Desk:
    return filled_desk()


def filled_desk() -> Desk:
    desk = Desk(capacity=10**6)
    desk.service.connect(0)
    desk.register()
    for start in range(0, SAMPLES, 1000):
        ids = [f"s{number}" for number in range(start, start + 1000)]
        tags = [{"v": number} for number in range(start, start + 1000)]
        assert desk.answers[desk.commit(0, ids, None, tags=tags)] == wire.Done()
    return desk


def test_a_claim_is_looked_at_in_pieces_and_finds_what_was_written_between_them(desk: Desk) -> None:
    envelope = claim(3, {"v": {">=": SAMPLES - 1}})
    look = look_ahead(desk.service.state, envelope.request)
    assert look is not None
    pieces = 1
    while not look():
        pieces += 1
        if pieces < 9:
            desk.commit(0, [f"between-{pieces}"], None, tags=[{"v": SAMPLES + pieces}])
    assert pieces > 100
    answer = desk.ask(0, envelope.request)
    assert answer.ids == [f"s{SAMPLES - 1}", "between-2", "between-3"]


def test_what_was_looked_at_is_not_looked_at_again(desk: Desk) -> None:
    envelope = claim(8, {"v": -1})
    look = look_ahead(desk.service.state, envelope.request)
    assert look is not None
    while not look():
        pass

    def look_again(tags: dict[str, Any]) -> bool:
        raise AssertionError("every sample was looked at before")

    partition = desk.service.state.partition("p")
    matches = partition.looking.conditions.get(key_of({"v": -1}), look_again)
    matches._condition = look_again
    rows = partition.live_rows(None)
    unclaimed = rows[~partition.task("t").claimed[rows]]
    assert len(unclaimed) >= SAMPLES - 3 and not matches(unclaimed).any()


@pytest.mark.parametrize("order", ["priority:v", "random:5"])
def test_an_order_is_worked_out_in_pieces_and_sees_what_changes_between_them(
    monkeypatch: pytest.MonkeyPatch, order: str
) -> None:
    desk = filled_desk()
    monkeypatch.setattr("rlplane.control.looking_ahead._MANY", SAMPLES // 2)
    body = wire.ClaimRequest("p", "t", [], SAMPLES, False, FOREVER, None, order=order)
    monkeypatch.setattr("rlplane.control.cursors._SORTED_AT_ONCE", 1024)
    sorted_at_once: list[int] = []
    push = OrderedRowQueue._push

    def counted_push(self: OrderedRowQueue, rows: Any, *more: Any) -> None:
        sorted_at_once.append(len(rows))
        push(self, rows, *more)

    monkeypatch.setattr(OrderedRowQueue, "_push", counted_push)
    look = look_ahead(desk.service.state, body)
    assert look is not None
    pieces = 1
    while not look():
        pieces += 1
        if pieces < 9:
            desk.commit(0, [f"among-{pieces}"], None, tags=[{"v": SAMPLES + pieces}])
            desk.commit(0, ["s5"], None, tags=[{"v": -1000 * pieces}])
    assert pieces > SAMPLES // 1024
    assert 0 < max(sorted_at_once) <= 1024
    partition = desk.service.state.partition("p")
    names = list(partition.rows)
    keys = Order(order).keys(names, [partition.tags[row] for row in partition.rows.values()])
    wanted = [names[place] for place in np.argsort(keys, kind="stable")]
    calls = 0
    work_out = Order.keys

    def counted(self: Order, ids: list[str], tags: list[dict[str, Any]]) -> Any:
        nonlocal calls
        calls += len(ids)
        return work_out(self, ids, tags)

    monkeypatch.setattr(Order, "keys", counted)
    unclaimed = [i for i in wanted if not partition.task("t").claimed[partition.rows[i]]]
    assert desk.ask(0, body).ids == unclaimed[:SAMPLES]
    assert calls < 20  # what came or changed after it was looked at
    assert sum(sorted_at_once) < SAMPLES + 20
    again = look_ahead(desk.service.state, body)
    assert again is not None and again()  # the queue is there


@pytest.mark.parametrize("order", ["priority:v", "random:5"])
@pytest.mark.parametrize("blocking", [False, True])
def test_a_claim_with_a_condition_in_an_order_is_looked_at_in_that_order(order: str, blocking: bool) -> None:
    desk, size = filled_desk(), SAMPLES // 4
    where = {"v": {">": SAMPLES // 2}}
    body = wire.ClaimRequest("p", "t", [], size, blocking, FOREVER, where, order=order)
    look = look_ahead(desk.service.state, body)
    assert look is not None
    while not look():
        pass
    partition = desk.service.state.partition("p")
    matches, calls = partition.looking.conditions._matches[key_of(where)], 0
    condition = matches._condition

    def counted(tags: Any) -> bool:
        nonlocal calls
        calls += 1
        return condition(tags)

    matches._condition = counted
    names = [name for name, row in partition.rows.items() if partition.tags[row]["v"] > SAMPLES // 2]
    keys = Order(order).keys(names, [partition.tags[partition.rows[name]] for name in names])
    wanted = [names[place] for place in np.argsort(keys, kind="stable")]
    unclaimed = [i for i in wanted if not partition.task("t").claimed[partition.rows[i]]]
    assert desk.ask(0, body).ids == unclaimed[:size]
    assert calls <= 4096  # of one piece more


@pytest.mark.parametrize("what", ["nothing", "put", "cleared", "grown", "claimed", "groups", "no task"])
def test_the_first_queue_of_a_task_is_built_before_the_claim(
    monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr("rlplane.control.looking_ahead._MANY", 2)
    monkeypatch.setattr("rlplane.control.cursors._VERY_MANY_ROWS", 2)
    monkeypatch.setattr("rlplane.service.stall._SLICE_S", 0.0)
    desk, ids = Desk(limit=64, segment=64), [f"{name}_g0" for name in "abcdef"]
    desk.service.connect(0)
    desk.register()
    desk.put(0, ids)
    body = wire.ClaimRequest("p", "t", ["x"], 100, False, FOREVER)
    look = look_ahead(desk.service.state, body)
    assert look is not None and not look()
    left = ids
    if what == "put":
        desk.put(0, ["g_g0"])
        left = [*ids, "g_g0"]
    elif what == "cleared":
        desk.ask(0, wire.Clear("p", ids[:2]))
        left = ids[2:]
    elif what == "grown":
        more = [f"{number}_g0" for number in range(200)]
        desk.put(0, more)
        left = [*ids, *more][:100]
    elif what == "claimed":
        left = desk.claimed(0, 2) and ids[2:]
    elif what == "groups":
        desk.register(grpo_group_size=1)
    elif what == "no task":
        desk.register(consumer_tasks=["u"])
    while not look():
        pass
    if what == "no task":
        assert isinstance(desk.ask(0, body), wire.Failure)
        return
    task = desk.service.state.partition("p").task("t")
    assert ((("x",), "") in task.queues) == (what != "groups")
    assert desk.ask(0, body).ids == left
    again = look_ahead(desk.service.state, body)
    assert again is None or again()


@pytest.mark.parametrize("what", ["nothing", "tagged", "cleared", "grown", "no group"])
def test_the_groups_of_samples_are_worked_out_before_a_registration(
    monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr("rlplane.control.looking_ahead._MANY", 2)
    monkeypatch.setattr("rlplane.control.conditions._ROWS_AT_ONCE", 2)
    monkeypatch.setattr("rlplane.service.stall._SLICE_S", 0.0)
    desk = Desk(limit=64, segment=64)
    desk.service.connect(0)
    desk.register()
    groups = {f"{name}_g{member}": name for name in "abc" for member in range(2)}
    desk.put(0, list(groups))
    body = wire.Register(PartitionSpec.checked("p", ["x"], 0, ["t"], 2))
    look = look_ahead(desk.service.state, body)
    assert look is not None
    for _ in range(3):
        assert not look()
    if what == "tagged":
        desk.put(0, ["a_g0", "c_g1"], tags=[{"group": "other"}] * 2)
        groups |= {"a_g0": "other", "c_g1": "other"}
    elif what == "cleared":
        desk.ask(0, wire.Clear("p", ["a_g0", "a_g1"]))
        desk.put(0, ["new_g0"])  # in the row of one that was looked at
        groups = {i: name for i, name in groups.items() if name != "a"} | {"new_g0": "new"}
    elif what == "grown":
        more = {f"n{number}_g0": f"n{number}" for number in range(100)}
        desk.put(0, list(more))
        groups |= more
    elif what == "no group":
        desk.put(0, ["loner"])
    while not look():
        pass
    answer = desk.ask(0, body)
    partition = desk.service.state.partition("p")
    if what == "no group":
        assert isinstance(answer, wire.Failure) and "loner" in answer.message
        assert partition.table.groups.tolist() == [None] * partition.table.size
        return
    assert answer == wire.Done()
    wanted = {i: group_name(name) for i, name in groups.items()}
    assert {i: partition.table.groups[row] for i, row in partition.rows.items()} == wanted


@pytest.mark.parametrize("limit", [None, 0, 5, SAMPLES + 100])
@pytest.mark.parametrize("order", ["priority:v", "random:5"])
def test_a_peek_in_an_order_is_looked_at_in_pieces(
    monkeypatch: pytest.MonkeyPatch, order: str, limit: int | None
) -> None:
    desk = filled_desk()
    body = wire.Peek("p", {"v": {">": 30}}, [], limit, order)
    look = look_ahead(desk.service.state, body)
    assert look is not None
    pieces = 1
    while not look():
        pieces += 1
        if pieces < 9:
            desk.commit(0, ["s5"], None, tags=[{"v": 100 * pieces}])
    assert pieces > 200
    calls: list[int] = []
    work_out = Order.keys

    def counted(self: Order, ids: list[str], tags: list[dict[str, Any]]) -> Any:
        calls.append(len(ids))
        return work_out(self, ids, tags)

    monkeypatch.setattr(Order, "keys", counted)
    seen = desk.ask(0, body)
    assert sum(calls) < 20
    partition = desk.service.state.partition("p")
    names = [name for name, row in partition.rows.items() if partition.tags[row]["v"] > 30]
    by_key = {name: work_out(Order(order), [name], [partition.tags[partition.rows[name]]]) for name in names}
    assert seen.ids == sorted(names, key=by_key.__getitem__)[:limit]


def test_a_claim_that_finds_its_batch_at_the_front_is_not_looked_at_in_pieces(desk: Desk) -> None:
    look = look_ahead(desk.service.state, claim(8, {"v": {"<": SAMPLES}}).request)
    assert look is not None and look()


def test_after_a_long_look_others_come_before_the_claim(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stall, "_SHORT_S", 0.0)
    monkeypatch.setattr(stall, "_SLICE_S", FOREVER)
    look = look_ahead(desk.service.state, claim(8, {"v": {"<": -1}}).request)
    assert look is not None and not look()
    monkeypatch.setattr(stall, "_SHORT_S", FOREVER)
    assert look()


@pytest.mark.parametrize(
    "request_",
    [
        wire.ClaimRequest("p", "t", [], 1, False, FOREVER, None),
        wire.ClaimRequest("p", "t", [], 1, False, FOREVER, {"v": {"no such operator": 1}}),
        wire.ListIds("p"),
    ],
)
def test_other_requests_are_handled_at_once(desk: Desk, request_: Any) -> None:
    assert look_ahead(desk.service.state, request_) is None


@pytest.mark.parametrize(("partition", "task", "field"), [("q", "t", "x"), ("p", "u", "x"), ("p", "t", "y")])
def test_a_claim_that_will_be_refused_is_refused(desk: Desk, partition: str, task: str, field: str) -> None:
    body = wire.ClaimRequest(partition, task, [field], 1, False, FOREVER, {"v": 1})
    assert look_ahead(desk.service.state, body) is None
    assert isinstance(desk.ask(0, body), wire.Failure)


@pytest.mark.parametrize("where", [{"v": 7}, {"v": {"<": 3}}, {"no such tag": 1}, {"v": 7, "w": {"<": 3}}])
def test_a_question_is_looked_at_in_pieces_and_sees_what_changes_between_them(
    desk: Desk, where: dict[str, Any]
) -> None:
    before = desk.ask(0, wire.Count("p", where))
    partition = desk.service.state.partition("p")
    partition.looking.indexes.clear()
    look = look_ahead(desk.service.state, wire.Count("p", where))
    assert look is not None
    assert not look()
    tags = [{"v": 7}, {"v": 1}, {"v": SAMPLES}]
    ids = [f"new-{len(partition.rows)}-{number}" for number in range(3)]
    desk.commit(0, ids, None, tags=tags)
    desk.ask(0, wire.Clear("p", ids[1:]))
    while not look():
        pass
    assert all(index.is_whole for index in partition.looking.indexes.values())
    assert desk.ask(0, wire.Count("p", where)).value == before.value + (where == {"v": 7})
    desk.ask(0, wire.Clear("p", ids))
    assert desk.ask(0, wire.Count("p", where)) == before


def test_the_status_says_for_how_long_the_loop_was_busy(desk: Desk) -> None:
    busy = desk.service.stall
    busy.record(0.2, 100.0)
    busy.record(0.1, 101.0)
    assert status_of(desk.service)["loop_stall_ms"] == {"max": 200.0, "recent": 200.0}
    busy.record(0.05, 111.0)
    busy.record(0.03, 122.0)
    assert status_of(desk.service)["loop_stall_ms"] == {"max": 200.0, "recent": 50.0}
    busy.record(0.01, 200.0)
    assert status_of(desk.service)["loop_stall_ms"] == {"max": 200.0, "recent": 10.0}
