"""What a new version makes too old, or a group that has waited too long, goes in slices, between which others
are served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.unit.service.service_harness import FOREVER, Desk, JournaledPlane, finish

from rlplane.control import advancing, partition
from rlplane.control.loading import pieces_of
from rlplane.control.policies import FlowPolicy
from rlplane.control.rules import PartitionSpec
from rlplane.service import protocol as wire

AT_ONCE = 4
IDS = [f"s{number}" for number in range(10 * AT_ONCE)]
FLOW = FlowPolicy.windowed(1, training_task="t")


@pytest.fixture(autouse=True)
def short_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advancing, "_SAMPLES_AT_ONCE", AT_ONCE)
    monkeypatch.setattr(partition, "_GROUPS_AT_ONCE", 2)


def desk_with(ids: list[str], *, capacity: int = 1000, flow: FlowPolicy = FLOW, **spec: Any) -> Desk:
    desk = Desk(limit=64, segment=64, capacity=capacity)
    for client in range(3):
        desk.service.connect(client)
    desk.register(flow=flow, **spec)
    if ids:
        put(desk, ids)
    return desk


def put(desk: Desk, ids: list[str], version: int = 0) -> None:
    desk.put(0, ids, tags=[{"weight_version": version}] * len(ids))


def live(desk: Desk) -> list[str]:
    return list(desk.service.state.partition("p").rows)


def flow_of(desk: Desk) -> dict[str, Any]:
    flow: dict[str, Any] = desk.service.state.partition("p").status(0.0)["flow"]
    return flow


def test_a_version_counts_when_all_that_it_makes_too_old_is_gone() -> None:
    desk = desk_with(IDS)
    put(desk, ["new"], 5)
    request = desk.post(0, wire.Advance("p", 5))
    assert len(live(desk)) == len(IDS) + 1 - AT_ONCE and flow_of(desk)["version"] == 0
    assert desk.claimed(1, 2) == IDS[AT_ONCE : AT_ONCE + 2]  # the version does not count yet
    assert request not in desk.answers
    finish(desk, AT_ONCE)
    assert desk.answers[request] == wire.Done() and flow_of(desk)["version"] == 5
    assert sorted(live(desk)) == ["new", *IDS[AT_ONCE : AT_ONCE + 2]]  # what is being trained stays
    assert desk.claimed(1, len(IDS)) == ["new"]
    assert flow_of(desk)["evicted"] == {"stale": len(IDS) - 2}
    told = desk.ask(2, wire.Evicted("p"))
    assert sorted(told.ids) == sorted({*IDS} - {*IDS[AT_ONCE : AT_ONCE + 2]})
    assert all(tags["evicted"] == "stale" for tags in told.tags)


def test_few_are_evicted_at_once() -> None:
    desk = desk_with(IDS[: AT_ONCE - 1])
    assert desk.ask(0, wire.Advance("p", 5)) == wire.Done()
    assert not live(desk) and not desk.service.has_work


def test_what_comes_meanwhile_and_is_too_old_goes_too() -> None:
    desk = desk_with(IDS)
    request = desk.post(0, wire.Advance("p", 5))
    put(desk, ["late", "later"])
    desk.service.go_on()
    desk.ask(1, wire.Unclaim("p", "t", desk.claimed(1, 2)))
    finish(desk, AT_ONCE)
    assert desk.answers[request] == wire.Done() and not live(desk) and desk.used == 0
    put(desk, ["too late"])
    assert not live(desk)


def test_two_versions_at_once_end_with_the_higher() -> None:
    desk = desk_with(IDS)
    requests = [desk.post(client, wire.Advance("p", version)) for client, version in ((0, 9), (1, 5))]
    finish(desk, AT_ONCE)
    assert all(desk.answers[request] == wire.Done() for request in requests)
    assert flow_of(desk)["version"] == 9
    assert isinstance(desk.ask(0, wire.Advance("p", 8)), wire.Failure)


def test_who_waits_for_room_gets_it_slice_by_slice() -> None:
    desk = desk_with(IDS, capacity=len(IDS))
    place = desk.answers[desk.reserve(1, 1)].place
    waiting = desk.commit(1, ["a", "b"], place, tags=[{"weight_version": 5}] * 2)
    assert waiting not in desk.answers
    desk.post(0, wire.Advance("p", 5))
    assert isinstance(desk.answers[waiting], wire.Done) and desk.service.has_work
    finish(desk, AT_ONCE)
    assert live(desk) == ["a", "b"] and desk.service.state.live == 2


def test_a_group_goes_whole() -> None:
    ids = [f"{group}_g{member}" for group in "abcdef" for member in range(3)]
    desk = desk_with([], grpo_group_size=3)
    desk.put(0, ids, tags=[{"weight_version": 0 if i.endswith("g1") else 5} for i in ids])
    desk.post(0, wire.Advance("p", 5))
    assert len(live(desk)) == len(ids) - 6  # two groups are more than a slice
    while desk.service.has_work:
        desk.service.go_on()
        assert len(live(desk)) % 3 == 0
    assert not live(desk)


def test_a_partition_can_be_dropped_meanwhile() -> None:
    desk = desk_with(IDS)
    request, dropped = desk.post(0, wire.Advance("p", 5)), desk.post(1, wire.DropPartition("p"))
    while desk.service.has_work:
        desk.service.go_on()
    assert isinstance(desk.answers[request], wire.Done) and isinstance(desk.answers[dropped], wire.Done)
    assert desk.service.state.live == 0 and desk.used == 0


@pytest.mark.parametrize("how", ["abandoned", "dies"])
def test_a_version_that_nobody_waits_for_counts_in_the_end(how: str) -> None:
    desk = desk_with(IDS)
    request = desk.post(1, wire.Advance("p", 5))
    if how == "abandoned":
        desk.abandon(request)
    else:
        desk.service.disconnect(1, died=True)
    finish(desk, AT_ONCE)
    assert not live(desk) and flow_of(desk)["version"] == 5


def test_a_registration_with_a_tighter_bound_evicts_in_slices() -> None:
    desk = desk_with(IDS, flow=FlowPolicy.windowed(9, training_task="t"))
    desk.ask(0, wire.Advance("p", 5))
    request = desk.post(0, wire.Register(PartitionSpec.checked("p", ["x"], 0, ["t"], flow=FLOW)))
    assert request not in desk.answers and live(desk)
    finish(desk, AT_ONCE)
    assert desk.answers[request] == wire.Done() and not live(desk)


@pytest.mark.parametrize("tag", ["weight_version", "other"])
def test_a_registration_looks_up_versions_in_slices(tag: str) -> None:
    desk = desk_with(IDS, flow=FlowPolicy())
    flow = FlowPolicy.windowed(1, training_task="t", version_tag=tag)
    request = desk.post(0, wire.Register(PartitionSpec.checked("p", ["x"], 0, ["t"], flow=flow)))
    assert request not in desk.answers
    finish(desk, AT_ONCE)
    assert desk.answers[request] == wire.Done() and live(desk) == IDS
    desk.post(0, wire.Advance("p", 5))
    finish(desk, AT_ONCE)
    assert live(desk) == ([] if tag == "weight_version" else IDS)


@pytest.mark.parametrize("slices", [0, 1, 5, 9])
def test_a_version_goes_on_coming_when_the_service_dies(tmp_path: Path, slices: int) -> None:
    plane = JournaledPlane(tmp_path)
    plane.ask(1, wire.Register(PartitionSpec.checked("p", ["x"], 0, ["t"], flow=FLOW)))
    tags = [{"weight_version": 0}] * len(IDS)
    plane.ask(2, wire.Commit("p", 1, IDS, [], [], None, 0, FOREVER, tags))
    assert plane.ask(3, wire.Advance("p", 5)) is None
    for _ in range(slices):
        plane.service.go_on()
    plane.die()
    plane.answers.pop((0, 3), None)
    plane.ask(3, wire.Advance("p", 5))
    while plane.service.has_work:
        plane.service.go_on()
    assert plane.answers[0, 3] == wire.Done() and plane.service.state.live == 0
    assert len(plane.ask(4, wire.Evicted("p")).ids) == len(IDS)


def test_what_is_too_old_of_a_checkpoint_is_gone_when_it_is_there() -> None:
    desk = desk_with(IDS)
    assert len(desk.claimed(1, len(IDS))) == len(IDS)
    desk.ask(0, wire.Advance("p", 5))
    _, frozen = desk.freeze(0)
    place = desk.answers[desk.reserve(2, 1)].place
    blocks = {number: (place.number, start, layout) for number, (_, start, layout) in frozen.blocks.items()}
    desk.post(2, wire.RestorePiece(1, blocks))
    for piece in pieces_of(frozen.state):
        desk.post(2, wire.RestorePiece(1, state=piece))
    restored = desk.post(2, wire.Restore(1, [place.number], release_claims=True))
    assert restored not in desk.answers
    while desk.service.has_work:
        desk.service.go_on()
    assert isinstance(desk.answers[restored], wire.Done) and not live(desk)


@pytest.mark.parametrize("least", [1, 2])
def test_groups_that_have_waited_too_long_end_some_at_a_time(least: int) -> None:
    flow = FlowPolicy.windowed(9, group_timeout_s=5.0, finished_fields=["x"], min_group_size=least)
    ids = [f"{group}_g0" for group in "abcdefg"]
    desk = desk_with(ids, grpo_group_size=2, consumer_tasks=["t", "train"], flow=flow)
    desk.put(0, ["whole_g0", "whole_g1"])
    steps = 0
    desk.service.now += 6.0
    while desk.service.next_deadline() <= desk.service.now:
        before, closed = len(live(desk)), flow_of(desk)["closed_short"].get("timeout", 0)
        desk.service.expire()
        assert before - len(live(desk)) <= 2
        assert flow_of(desk)["closed_short"].get("timeout", 0) - closed <= 2
        steps += 1
    assert steps == 4
    assert len(live(desk)) == (9 if least == 1 else 2)
    assert len(desk.ask(0, wire.Evicted("p")).ids) == (0 if least == 1 else 7)
