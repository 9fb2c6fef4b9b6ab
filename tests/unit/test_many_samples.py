"""Calls that name very many samples are divided into requests of fewer, and promise the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import NonTensorStack, TensorDict

from rlplane.adapters import many
from rlplane.compat.transfer_queue import calls
from rlplane.config import load_config
from rlplane.errors import MissingDataError
from rlplane.factory import build_data_plane_client
from rlplane.service import parts
from rlplane.service import protocol as wire
from rlplane.service.in_process import InProcessConnection

AT_ONCE = 4
SAMPLES = 5 * AT_ONCE + 1
IDS = [f"s{number}" for number in range(SAMPLES)]


class Requests:
    """The requests that a client makes. ``before`` is called with each of a kind, as somebody else would be
    served who has asked just before."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[Any] = []
        self.before: dict[type, Callable[[int], None]] = {}
        exchange = InProcessConnection.exchange

        def counted(connection: InProcessConnection, request: Any, **more: Any) -> wire.Answer:
            self.made.append(request)
            before = self.before.pop(type(request), None)
            if before is not None:
                before(len(self.of(type(request))))
                self.before.setdefault(type(request), before)
            return exchange(connection, request, **more)

        monkeypatch.setattr(InProcessConnection, "exchange", counted)

    def of(self, kind: type) -> list[Any]:
        return [request for request in self.made if isinstance(request, kind)]


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Requests:
    monkeypatch.setattr(parts, "_AT_ONCE", AT_ONCE)
    return Requests(monkeypatch)


@pytest.fixture
def plane() -> Iterator[Any]:
    with build_data_plane_client(load_config("local")) as plane:
        plane.register_partition("p", ["x", "y"], 0, ["t"])
        yield plane


def columns(ids: list[str], first: int = 0) -> TensorDict:
    numbers = [first + int(sample_id[1:]) for sample_id in ids]
    rows = NonTensorStack(*[{"n": number} for number in numbers])
    return TensorDict({"x": torch.tensor(numbers), "y": rows}, batch_size=[len(ids)])


def put(plane: Any, ids: list[str], first: int = 0) -> None:
    plane.put_samples(ids, "p", columns(ids, first))


def numbers_of(data: TensorDict) -> list[int]:
    numbers: list[int] = data["x"].tolist()
    assert [row["n"] for row in data["y"].tolist()] == numbers
    return numbers


@given(st.data())
def test_a_read_of_many_is_what_a_read_of_few_would_be(data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(1, SAMPLES - 1), max_size=4)))
    asked = data.draw(
        st.permutations(IDS) | st.lists(st.sampled_from(IDS), min_size=AT_ONCE + 1) | st.just(IDS)
    )
    with pytest.MonkeyPatch.context() as patch, build_data_plane_client(load_config("local")) as plane:
        patch.setattr(parts, "_AT_ONCE", AT_ONCE)
        plane.register_partition("p", ["x", "y", "turns"], 0, ["t"])
        for start, end in zip([0, *cuts], [*cuts, SAMPLES], strict=True):
            put(plane, IDS[start:end])
        grown = data.draw(st.integers(0, SAMPLES))
        if grown:
            turn = TensorDict({"turns": torch.zeros(grown, 1)}, batch_size=[grown])
            plane.append_samples(IDS[:grown], "p", turn)
        if grown < SAMPLES:
            rest = TensorDict({"turns": torch.zeros(SAMPLES - grown, 1)}, batch_size=[SAMPLES - grown])
            plane.put_samples(IDS[grown:], "p", rest)
        turn = TensorDict({"turns": torch.ones(SAMPLES, 1)}, batch_size=[SAMPLES])
        if grown == SAMPLES:
            plane.append_samples(IDS, "p", turn, finish=True)
        fields = ["x", "y", *(["turns"] if grown in (0, SAMPLES) else [])]
        read: Any = plane.get_samples(list(asked), "p", fields)
        assert numbers_of(read) == [int(sample_id[1:]) for sample_id in asked]
        if grown == SAMPLES:
            assert [row.flatten().tolist() for row in read["turns"].unbind()] == [[0.0, 1.0]] * len(asked)
        del read
        assert plane.service_status()["leases"] == 0  # type: ignore[attr-defined]


def test_a_read_of_one_put_is_neighbours_and_others_are_served_between_its_requests(
    plane: Any, requests: Requests
) -> None:
    put(plane, IDS)
    served: list[str] = []
    requests.before[wire.Locate] = lambda _: served.extend(plane.claim_meta("p", "t", ["x"], 1).sample_ids)
    assert numbers_of(plane.get_samples(IDS, "p", ["x", "y"])) == list(range(SAMPLES))
    assert [len(request.ids) for request in requests.of(wire.Locate)] == [AT_ONCE] * 5 + [1]
    assert served == IDS[:6]


@pytest.mark.parametrize("nth", range(1, 7))
def test_a_read_of_many_never_sees_a_part_of_a_write(plane: Any, requests: Requests, nth: int) -> None:
    put(plane, IDS)

    def write(number: int) -> None:
        if number == nth:
            put(plane, IDS[::-1], 100)

    requests.before[wire.Locate] = write
    assert numbers_of(plane.get_samples(IDS, "p", ["x", "y"])) == list(range(100, 100 + SAMPLES))
    assert len(requests.of(wire.Locate)) == (6 if nth == 1 else 12)
    assert plane.service_status()["leases"] == 0


def test_a_read_that_others_write_into_all_the_time_is_made_in_one_go(plane: Any, requests: Requests) -> None:
    put(plane, IDS)
    requests.before[wire.Locate] = lambda number: put(plane, IDS, number)
    read = numbers_of(plane.get_samples(IDS, "p", ["x", "y"]))
    last = len(requests.of(wire.Locate))
    assert read == list(range(last, last + SAMPLES)) and requests.of(wire.Locate)[-1].ids == IDS
    assert plane.service_status()["leases"] == 0


def test_a_read_misses_what_is_cleared_between_its_requests(plane: Any, requests: Requests) -> None:
    put(plane, IDS)

    def clear(number: int) -> None:
        if number == 3:
            plane.clear_samples([IDS[0], IDS[-1]], "p")

    requests.before[wire.Locate] = clear
    with pytest.raises(MissingDataError, match=IDS[-1]):
        plane.get_samples(IDS, "p", ["x"])
    assert plane.service_status()["leases"] == 0


def test_what_is_given_back_by_several_requests_is_claimed_again_in_its_order(
    plane: Any, requests: Requests
) -> None:
    put(plane, IDS)
    held = plane.claim_meta("p", "t", ["x"], SAMPLES - 2)
    plane.unclaim(held)
    assert [len(request.ids) for request in requests.of(wire.Unclaim)] == [3, 4, 4, 4, 4]
    assert plane.claim_meta("p", "t", ["x"], SAMPLES).sample_ids == IDS


def test_claims_of_many_are_finished_by_several_requests(plane: Any, requests: Requests) -> None:
    put(plane, IDS)
    plane.finish_claims(plane.claim_meta("p", "t", ["x"], SAMPLES))
    assert len(requests.of(wire.Unclaim)) == 6
    plane.unclaim(plane.claim_meta("p", "t", ["x"], 1, blocking=False))
    assert plane.claim_meta("p", "t", ["x"], 1, blocking=False).sample_ids == []


def test_it_is_asked_of_few_at_a_time_whether_to_go_on(plane: Any, requests: Requests) -> None:
    put(plane, IDS)
    assert plane.should_abort(IDS, "p") == []
    assert len(requests.of(wire.ShouldAbort)) == 6


def test_a_put_of_many_names_them_before_and_is_there_at_once(plane: Any, requests: Requests) -> None:
    seen: list[int] = []
    for kind in (wire.Naming, wire.Commit):
        requests.before[kind] = lambda _: seen.append(plane.count("p"))
    tags = [{"n": number} for number in range(SAMPLES)]
    written = plane.put_samples(IDS, "p", columns(IDS), tags)
    assert written.sample_ids == IDS and written.tags == tags
    assert seen == [0] * 7 and max(len(request.ids) for request in requests.of(wire.Naming)) == AT_ONCE
    assert requests.of(wire.Commit)[0].ids == [] and requests.of(wire.Reserve)[0].ids == []
    read = plane.claim_meta("p", "t", ["x"], SAMPLES)
    assert read.sample_ids == IDS and read.tags == tags
    plane.put_samples(IDS, "p", None, [{"n": -number} for number in range(SAMPLES)])
    assert plane.count("p", {"n": {"<": 0}}) == SAMPLES - 1


def test_a_put_of_many_to_a_partition_that_is_registered_again_is_made_anew(
    plane: Any, requests: Requests
) -> None:
    def register(number: int) -> None:
        if number == 1:
            plane.register_partition("p", ["x", "y"], 0, ["t"])

    requests.before[wire.Commit] = register
    put(plane, IDS)
    assert len(requests.of(wire.Commit)) == 2 and len(requests.of(wire.Naming)) == 12
    assert plane.claim_meta("p", "t", ["x"], SAMPLES).sample_ids == IDS
    assert not named(plane)


@pytest.mark.parametrize("kind", [wire.Naming, wire.Reserve, wire.Commit])
def test_what_a_put_has_named_is_forgotten_when_it_is_interrupted(
    plane: Any, requests: Requests, kind: type
) -> None:
    def interrupt(number: int) -> None:
        if number == (3 if kind is wire.Naming else 1):
            raise KeyboardInterrupt

    requests.before[kind] = interrupt
    with pytest.raises(KeyboardInterrupt):
        put(plane, IDS)
    assert plane.count("p") == 0 and not named(plane)
    assert plane.service_status()["reserved"] == 0


def named(plane: Any) -> list[int]:
    """The requests whose samples have been named and that have not come."""
    clients = plane._link().connection._service._service.clients.values()
    return [number for held in clients for number in held.named]


def test_a_clear_of_many_names_them_before_and_is_done_to_its_end(plane: Any, requests: Requests) -> None:
    put(plane, IDS)
    counts: list[int] = []
    for kind in (wire.Naming, wire.Clear):
        requests.before[kind] = lambda _: counts.append(plane.count("p"))
    plane.clear_samples([*IDS[:-1], "nobody"], "p")
    assert counts == [SAMPLES] * 7 and plane.list_sample_ids("p") == IDS[-1:]
    assert not named(plane)


@pytest.mark.parametrize("how", ["all", "ids", "numbers"])
def test_what_is_known_of_many_samples_is_asked_for_in_parts_and_told_as_one(
    plane: Any, requests: Requests, how: str
) -> None:
    put(plane, IDS)
    plane.put_samples(IDS[:3], "p", None, tags=[{"n": number} for number in range(3)])
    plane.claim_meta("p", "t", ["x"], 2)
    named = {"ids": [*IDS, "nobody", IDS[0]], "numbers": [*range(SAMPLES), 1000]}
    asked: dict[str, Any] = {"ids": None} | ({} if how == "all" else {how: named[how]})
    seen = plane._call(calls.inspect, "p", **asked, with_kinds=True)
    assert (seen.ids, seen.numbers) == (IDS, list(range(SAMPLES)))
    assert seen.tags == [{"n": number} for number in range(3)] + [{}] * (SAMPLES - 3)
    assert seen.common_fields == ["x", "y"] and seen.tasks["t"].tolist() == [True] * 2 + [False] * (
        SAMPLES - 2
    )
    assert [len(kinds) for kinds in seen.kinds.values()] == [1, 1]
    assert len(requests.of(wire.Inspect)) == (1 if how == "all" else 6)


def test_a_field_that_comes_between_two_parts_is_not_one_that_all_have(
    plane: Any, requests: Requests
) -> None:
    put(plane, IDS)

    def write(number: int) -> None:
        if number == 3:
            plane.register_partition("p", ["x", "y", "z"], 0, ["t", "u"])
            plane.put_samples(IDS, "p", TensorDict({"z": torch.zeros(SAMPLES)}, batch_size=[SAMPLES]))

    requests.before[wire.Inspect] = write
    seen = plane._call(calls.inspect, "p", IDS)
    assert seen.common_fields == ["x", "y"] and seen.fields["z"].tolist() == [False] * 8 + [True] * (
        SAMPLES - 8
    )
    assert seen.tasks["u"].tolist() == [False] * SAMPLES
    requests.before[wire.Inspect] = lambda number: plane.drop_partition("p") if number == 9 else None
    assert plane._call(calls.inspect, "p", IDS).ids == []


def test_many_samples_are_marked_as_claimed_by_one_request(plane: Any, requests: Requests) -> None:
    put(plane, IDS)

    def mark(_: Any, link: Any, ids: list[str]) -> Any:
        return many.mark_claimed("p", "t", ids)

    assert plane._call(mark, IDS[1:]) is True and plane._call(mark, IDS) is False
    assert plane.claim_meta("p", "t", ["x"], SAMPLES, blocking=False).sample_ids == IDS[:1]
    assert len(requests.of(wire.MarkClaimed)) == 2 and len(requests.of(wire.Naming)) == 17
    assert max(len(request.ids) for request in requests.made if hasattr(request, "ids")) == AT_ONCE
