"""Answers of very many samples are encoded in slices, and say the same."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.service.test_server import SPEC, RunningServer, address, plane, put, wait_until  # noqa: F401

from rlplane.control import snapshots
from rlplane.control.requests import Put
from rlplane.control.rules import PartitionSpec
from rlplane.control.state import ControlState
from rlplane.service import long_answers
from rlplane.service import protocol as wire
from rlplane.service.framing import Inbox, message
from rlplane.service.long_answers import LongAnswer, is_long_answer

TAGS = st.dictionaries(st.text(max_size=3), st.integers(0, 2**63) | st.text(max_size=3), max_size=2)


def in_slices(answer: wire.Answer) -> tuple[wire.Answer, int]:
    """What an answer is when it is read, and in how many slices it was encoded."""
    long, slices = LongAnswer(7, answer), 1
    while not long.encode_some():
        slices += 1
    ((number, body),) = Inbox(2**30).messages(memoryview(long.message()))
    assert number == 7
    return wire.answer_decoder.decode(body), slices


@given(st.lists(st.tuples(st.text(max_size=5), TAGS), max_size=60), st.integers(1, 20))
def test_it_is_read_as_if_it_had_been_encoded_at_once(samples: list[Any], at_once: int) -> None:
    ids, tags = [sample for sample, _ in samples], [tag for _, tag in samples]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(long_answers, "_AT_ONCE", at_once)
        for answer in (wire.Done(ids), wire.Claimed(ids, tags, 0.5)):
            assert in_slices(answer)[0] == answer


@given(
    st.lists(st.tuples(st.text(max_size=5), TAGS), min_size=2, max_size=40),
    st.lists(st.text(max_size=3), max_size=20, unique=True),
    st.integers(1, 20),
)
def test_what_is_known_of_samples_is_read_as_if_it_had_been_encoded_at_once(
    samples: list[tuple[str, Any]], fields: list[str], at_once: int
) -> None:
    state = ControlState()
    state.register(PartitionSpec.checked("p", [f"x{name}" for name in fields], 0, ["t", "u"]))
    by_id = dict(samples)
    state.put(Put("p", [f"s{sample}" for sample in by_id], {}, list(by_id.values())))
    partition = state.partition("p")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(long_answers, "_AT_ONCE", at_once)
        at_once_told = wire.Done(partition.inspect(partition.live_rows(None)) | {"kinds": {"x": [("a", 1)]}})
        patch.setattr(snapshots, "_MANY", 0)
        answer = wire.Done(partition.inspect(partition.live_rows(None)) | {"kinds": {"x": [("a", 1)]}})
        assert is_long_answer(answer) and not is_long_answer(at_once_told)
        told, _ = in_slices(answer)
    assert told == wire.answer_decoder.decode(wire.encode(at_once_told))


def test_names_and_claims_of_many_samples_are_long_and_nothing_else_is() -> None:
    ids = list(map(str, range(70_000)))
    assert is_long_answer(wire.Done(ids)) and is_long_answer(wire.Claimed(ids, [{}] * len(ids)))
    assert not is_long_answer(wire.Done(ids[:60_000])) and not is_long_answer(wire.Done(b"0" * 10**6))
    assert in_slices(wire.Done(ids)) == (wire.Done(ids), 6)


@pytest.fixture
def everything_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_answers, "_MANY", 1)
    monkeypatch.setattr(long_answers, "_AT_ONCE", 1)
    monkeypatch.setattr(snapshots, "_MANY", 1)


@pytest.mark.usefixtures("everything_is_long")
def test_others_are_served_between_two_slices_and_one_client_keeps_its_order(plane: RunningServer) -> None:  # noqa: F811
    connection, other = plane.client(), plane.client()
    connection.exchange(wire.Register(SPEC))
    ids = [f"{number:03}" for number in range(300)]
    for sample_id in ids:
        put(connection, sample_id)
    hello = wire.Hello(
        wire.PROTOCOL_VERSION, plane.token, client=connection.client, secret=connection._secret
    )
    requests: list[wire.Request] = [wire.ListIds("p"), wire.Count("p"), wire.ListIds("p"), wire.Count("p")]
    with plane.raw(hello) as raw, plane.raw(hello) as gone:
        with plane.stopped():
            gone.sendall(message(1, wire.encode(wire.Envelope(wire.ListIds("p")))))
            for number, request in enumerate(requests):
                raw.sendall(message(number, wire.encode(wire.Envelope(request))))
        gone.close()  # while its answer is being encoded
        assert other.exchange(wire.Count("p")) == wire.Done(300)
        inbox = Inbox(2**20)
        answered: list[tuple[int, Any]] = []
        while len(answered) < len(requests):
            for number, body in inbox.messages(memoryview(raw.recv(2**20))):
                answer = wire.answer_decoder.decode(body)
                assert isinstance(answer, wire.Done)
                answered.append((number, answer.value))
    assert answered == [(0, ids), (1, 300), (2, ids), (3, 300)]
    wait_until(lambda: not plane.in_loop(lambda: plane.server._long_answers))


@pytest.mark.usefixtures("everything_is_long")
def test_a_long_claim_is_what_was_there_when_it_was_made(plane: RunningServer) -> None:  # noqa: F811
    connection, other = plane.client(), plane.client()
    connection.exchange(wire.Register(SPEC))
    ids = [f"{number:03}" for number in range(100)]
    for sample_id in ids:
        put(connection, sample_id)
    hello = wire.Hello(
        wire.PROTOCOL_VERSION, plane.token, client=connection.client, secret=connection._secret
    )
    claim = wire.ClaimRequest("p", "t", [], 100, False, 0.0)
    with plane.raw(hello) as raw:
        raw.sendall(message(1, wire.encode(wire.Envelope(claim))))
        wait_until(lambda: other.exchange(wire.Consumed("p", ["t"])) == wire.Done(True))
        assert other.exchange(wire.Clear("p", ids)) == wire.Done(100)  # perhaps before all were encoded
        inbox = Inbox(2**20)
        answered: list[bytes] = []
        while not answered:
            answered = [bytes(body) for _, body in inbox.messages(memoryview(raw.recv(2**20)))]
    answer = wire.answer_decoder.decode(answered[0])
    assert isinstance(answer, wire.Claimed) and answer.ids == ids and len(answer.tags) == 100


@pytest.mark.usefixtures("everything_is_long")
def test_a_long_claim_is_handed_out_once(plane: RunningServer) -> None:  # noqa: F811
    connection = plane.client()
    connection.exchange(wire.Register(SPEC))
    for sample_id in "abcd":
        put(connection, sample_id)
    claim = wire.ClaimRequest("p", "t", [], 3, False, 0.0)
    claimed = connection.exchange(claim)
    assert isinstance(claimed, wire.Claimed) and claimed.ids == ["a", "b", "c"]
    claimed = connection.exchange(claim)
    assert isinstance(claimed, wire.Claimed) and claimed.ids == ["d"]
