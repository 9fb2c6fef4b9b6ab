"""Claims that wait for what a put of very many brings are answered when it is in their queues, some slices
after the put."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.unit.service.service_harness import FOREVER, Desk, JournaledPlane, finish

from rlplane.control import cursors
from rlplane.control.rules import PartitionSpec
from rlplane.service import protocol as wire
from rlplane.service.clients import PendingRequest
from rlplane.service.stall import look_ahead

MANY = 12
IDS = [f"{group}_g{member}" for group in "abcdef" for member in range(2)]
TAGS = [{"v": number // 2 % 4} for number in range(MANY)]
BY_V = [*IDS[6:8], *IDS[4:6], *IDS[2:4], *IDS[10:], *IDS[:2], *IDS[8:10]]
SLICES = 4 + MANY // 4


@pytest.fixture(autouse=True)
def few_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cursors, "_VERY_MANY_ROWS", MANY - 1)
    monkeypatch.setattr(cursors, "_MANY_ROWS", MANY - 1)
    monkeypatch.setattr(cursors, "_ROWS_A_SLICE", 4)


def new_desk(**spec: Any) -> Desk:
    desk = Desk(limit=64, segment=64)
    for client in range(4):
        desk.service.connect(client)
    desk.register(**spec)
    return desk


def claim(desk: Desk, size: int, order: str | None = None, *, client: int = 1, **more: Any) -> PendingRequest:
    more = {"blocking": True, "timeout_s": FOREVER} | more
    return desk.post(client, wire.ClaimRequest("p", "t", ["x"], size, **more, order=order))


@pytest.mark.parametrize("group_size", [None, 2])
@pytest.mark.parametrize("order", [None, "priority:v", "lifo"])
@pytest.mark.parametrize("where", [None, {"v": {">": 0}}])
def test_the_put_returns_and_the_claim_is_answered_when_all_is_lined_up(
    group_size: int | None, order: str | None, where: dict[str, Any] | None
) -> None:
    desk = new_desk(grpo_group_size=group_size)
    first, second = claim(desk, 4, order, where=where), claim(desk, 2, order, client=2, where=where)
    desk.put(0, IDS, tags=TAGS)
    assert first not in desk.answers and second not in desk.answers
    assert finish(desk) == SLICES
    wanted = {None: IDS, "priority:v": BY_V, "lifo": IDS[::-1]}[order]
    if order == "lifo" and group_size:
        wanted = [member for at in range(len(IDS) - 2, -1, -2) for member in IDS[at : at + 2]]
    if where is not None:
        wanted = [i for i in wanted if TAGS[IDS.index(i)]["v"] > 0]
    assert desk.answers[first].ids == wanted[:4] and desk.answers[second].ids == wanted[4:6]


def test_a_put_of_few_is_answered_with_at_once() -> None:
    desk = new_desk()
    waiting = claim(desk, 4, "priority:v")
    desk.put(0, IDS[:-1], tags=TAGS[:-1])
    assert desk.answers[waiting].ids == BY_V[:4] and not desk.service.has_work


def test_what_others_do_meanwhile_is_not_held_up() -> None:
    desk = new_desk()
    waiting = claim(desk, 4, "priority:v")
    desk.put(0, IDS, tags=TAGS)
    assert desk.answers[claim(desk, 2, "priority:v", client=2, blocking=False)].ids == BY_V[:2]
    later = claim(desk, 2, "priority:v", client=3)
    desk.put(0, ["best"], tags=[{"v": 9}])
    assert waiting not in desk.answers and later not in desk.answers
    finish(desk)
    assert desk.answers[waiting].ids == ["best", *BY_V[2:5]] and desk.answers[later].ids == BY_V[5:7]


def test_a_second_put_of_many_makes_it_longer() -> None:
    desk = new_desk()
    waiting = claim(desk, 20, "priority:v")
    desk.put(0, IDS, tags=TAGS)
    desk.service.go_on()
    desk.put(0, [f"{i}-again" for i in IDS], tags=TAGS)
    assert len(desk.service.work) == 1 and finish(desk) == 4 + 2 * MANY // 4
    assert len(desk.answers[waiting].ids) == 20


@pytest.mark.parametrize("what", ["dropped", "no task", "dies", "timeout", "abandoned", "cleared"])
def test_who_does_not_wait_any_more_is_not_answered(what: str) -> None:
    desk = new_desk()
    waiting = claim(desk, 4, "priority:v", timeout_s=1.0)
    desk.put(0, IDS, tags=TAGS)
    if what == "dropped":
        desk.post(0, wire.DropPartition("p"))
    elif what == "no task":
        desk.register(consumer_tasks=["u"])
    elif what == "dies":
        desk.service.disconnect(1, died=True)
    elif what == "timeout":
        desk.pass_time(2.0)
    elif what == "abandoned":
        desk.abandon(waiting)
    else:
        desk.ask(0, wire.Clear("p", IDS))
    finish(desk)
    if what in ("dies", "cleared"):
        assert waiting not in desk.answers
    else:
        assert isinstance(desk.answers[waiting], wire.Failure)
    if what in ("dies", "timeout", "abandoned"):
        assert desk.answers[claim(desk, 2, "priority:v", client=2)].ids == BY_V[:2]


@pytest.mark.parametrize("slices", range(SLICES + 1))
def test_a_service_that_is_started_again_answers_the_same(tmp_path: Path, slices: int) -> None:
    plane = JournaledPlane(tmp_path)
    plane.ask(1, wire.Register(PartitionSpec.checked("p", ["x"], 0, ["t"])))
    waiting = wire.ClaimRequest("p", "t", [], 4, True, FOREVER, order="priority:v")
    plane.ask(2, waiting)
    plane.ask(3, wire.Commit("p", 1, IDS, [], [], None, 0, FOREVER, TAGS))
    for _ in range(slices):
        plane.service.go_on()
    plane.die()
    plane.answers.pop((0, 2), None)
    plane.ask(2, waiting)
    assert ((0, 2) in plane.answers) == (slices == SLICES)
    while plane.service.has_work:
        plane.service.go_on()
    assert plane.answers[0, 2].ids == BY_V[:4]


def test_a_status_looks_ahead_for_a_queue_that_is_not_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlplane.control.looking_ahead._MANY", 2)
    desk = new_desk(grpo_group_size=2)
    desk.post(1, wire.ClaimRequest("p", "t", ["x"], 2, False, FOREVER))
    desk.put(0, IDS)
    queues = desk.service.state.partition("p").task("t").queues
    assert [queue.is_whole for queue in queues.values()] == [False]
    look = look_ahead(desk.service.state, wire.Status("p"))
    assert look is not None
    while not look():
        pass
    assert [queue.is_whole for queue in queues.values()] == [True]
    assert desk.ask(2, wire.Status("p")).value["tasks"]["t"]["ready"] == MANY
