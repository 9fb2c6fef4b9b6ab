"""What a client held that is gone comes back in slices, between which others are served."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from tests.unit.service.service_harness import FOREVER, Desk, JournaledPlane, finish

from rlplane.control import leaving
from rlplane.control.policies import FlowPolicy
from rlplane.control.rules import PartitionSpec
from rlplane.service import protocol as wire

AT_ONCE = 4
IDS = [f"s{number}" for number in range(10 * AT_ONCE)]


@pytest.fixture(autouse=True)
def short_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaving, "_SAMPLES_AT_ONCE", AT_ONCE)


def desk_with(ids: list[str], **spec: Any) -> Desk:
    desk = Desk(limit=64, segment=64)
    for client in range(4):
        desk.service.connect(client)
    desk.register(**spec)
    desk.put(0, ids, tags=[{"weight_version": 0}] * len(ids))
    return desk


@pytest.mark.parametrize("died", [True, False])
def test_very_many_come_back_in_slices_and_in_their_order(
    caplog: pytest.LogCaptureFixture, died: bool
) -> None:
    desk = desk_with(IDS)
    assert desk.claimed(1, len(IDS) - 1) == IDS[:-1]
    with caplog.at_level(logging.INFO):
        desk.service.disconnect(1, died=died)
    assert "39 claimed samples are handed out again" in caplog.text
    assert desk.claimed(2, 2) == IDS[-5:-3]  # what is back already, before what never was away
    assert finish(desk) == 9
    assert desk.claimed(2, len(IDS)) == [*IDS[:-5], *IDS[-3:]]


def test_few_come_back_at_once() -> None:
    desk = desk_with(IDS)
    desk.claimed(1, AT_ONCE)
    desk.service.disconnect(1, died=True)
    assert not desk.service.has_work and desk.claimed(2, AT_ONCE) == IDS[:AT_ONCE]


def test_nobody_is_told_that_all_is_over_before_the_last_is_back() -> None:
    desk = desk_with(IDS)
    desk.claimed(1, len(IDS))
    desk.ask(0, wire.Finish("p"))
    assert desk.ask(0, wire.Consumed("p", ["t"])) == wire.Done(True)
    desk.service.disconnect(1, died=True)
    assert desk.ask(0, wire.Consumed("p", ["t"])) == wire.Done(False)
    assert desk.claimed(2, len(IDS)) == IDS[-AT_ONCE:]
    # Not the tail yet, and not the end.
    waiting = desk.claim(3, len(IDS), blocking=True)
    assert waiting not in desk.answers
    finish(desk)
    assert desk.answers[waiting].ids == IDS[:-AT_ONCE]
    assert desk.ask(0, wire.Consumed("p", ["t"])) == wire.Done(True)


def test_a_group_comes_back_whole_although_a_slice_ends_in_it() -> None:
    ids = [f"{group}_g{member}" for group in "abcd" for member in range(3)]
    desk = desk_with(ids, grpo_group_size=3)
    desk.claimed(1, len(ids))
    desk.service.disconnect(1, died=True)
    assert desk.claimed(2, 3) == ids[-3:]
    assert desk.claimed(2, 3) == []  # one of c is back, and waits for the others
    finish(desk)
    assert desk.claimed(2, len(ids)) == ids[:-3]


def test_what_is_too_old_is_evicted_when_it_comes_back() -> None:
    desk = desk_with(IDS, consumer_tasks=["t"], flow=FlowPolicy.windowed(1, training_task="t"))
    desk.claimed(1, len(IDS))
    desk.ask(0, wire.Advance("p", 5))
    desk.service.disconnect(1, died=True)
    assert desk.service.state.live == len(IDS) - AT_ONCE
    finish(desk)
    assert desk.service.state.live == 0 and desk.used == 0
    assert sorted(desk.ask(0, wire.Evicted("p")).ids) == sorted(IDS)


@pytest.mark.parametrize("what", ["dropped", "registered", "cleared", "marked", "another dies"])
def test_what_happens_meanwhile_is_not_undone(what: str) -> None:
    desk = desk_with(IDS)
    desk.claimed(1, len(IDS) - AT_ONCE)
    if what == "another dies":
        desk.claimed(3, AT_ONCE)
    desk.service.disconnect(1, died=True)
    left = IDS
    if what == "dropped":
        desk.post(0, wire.DropPartition("p"))
        desk.register()
        desk.put(0, IDS[:2])
        assert desk.claimed(2, 2) == IDS[:2]
        left = []
    elif what == "registered":
        desk.register(consumer_tasks=["u"])
        desk.register()
    elif what == "cleared":
        desk.post(0, wire.Clear("p", IDS[:AT_ONCE]))
        desk.put(0, ["new"])  # in the row of one that was to come back
        left = [*IDS[AT_ONCE:], "new"]
    elif what == "marked":
        desk.ask(0, wire.MarkClaimed("p", "t", IDS[:2], False))
        assert desk.claimed(2, 2) == IDS[:2]
        left = IDS[2:]
    else:
        desk.service.disconnect(3, died=True)
        left = [*IDS[-AT_ONCE:], *IDS[:-AT_ONCE]]
    finish(desk)
    found = desk.claimed(2, len(IDS))
    assert found == left or (what == "another dies" and sorted(found) == sorted(left))
    assert not desk.service.state.partition("p").task("t").is_returning


@pytest.mark.parametrize("slices", [0, 1, 5, 9])
def test_samples_go_on_coming_back_when_the_service_dies(tmp_path: Path, slices: int) -> None:
    plane = JournaledPlane(tmp_path)
    plane.service.connect(1)
    plane.ask(1, wire.Register(PartitionSpec.checked("p", ["x"], 0, ["t"])))
    plane.ask(2, wire.Commit("p", 1, IDS, [], [], None, 0, FOREVER))
    claim = wire.ClaimRequest("p", "t", [], len(IDS), False, 0.0)
    ids = plane.ask(3, claim).ids
    plane.service.disconnect(0, died=True)
    for _ in range(slices):
        plane.service.go_on()
    plane.die()
    while plane.service.has_work:
        plane.service.go_on()
    assert plane.ask(4, claim, client=1).ids == ids


def test_a_save_in_the_middle_has_everything_back() -> None:
    desk = desk_with(IDS)
    desk.claimed(1, len(IDS))
    desk.service.disconnect(1, died=True)
    _, frozen = desk.freeze(0)
    place = desk.answers[desk.reserve(2, 1)].place
    blocks = {number: (place.number, start, layout) for number, (_, start, layout) in frozen.blocks.items()}
    restored = desk.restore(2, frozen.state, [place.number], blocks)
    finish(desk)
    assert isinstance(desk.answers[restored], wire.Done)
    assert desk.claimed(2, len(IDS)) == IDS
