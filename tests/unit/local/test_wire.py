"""The messages of the shared-memory engine: what goes in comes out, yesterday's bytes can still be read."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlplane import errors
from rlplane.adapters.local import wire
from rlplane.adapters.local.controller import StaleSpecError
from rlplane.rules import PartitionSpec

SPEC = PartitionSpec.checked("p", ["x", "y"], 4, ["t"], 2, {"y": ["a", "b"]})
LAYOUT = wire.Layout("enum", "torch.uint8", (2, 0), 3, 7, ["a", "b"])
EXTENT = wire.Extent(1, 2, 4096, 8192, False)

REQUESTS: list[Any] = [
    wire.Register(SPEC),
    wire.Describe("p"),
    wire.Reserve(10, float("inf")),
    wire.Unreserve(3),
    wire.Commit("p", 1, ["a"], ["x"], [LAYOUT], 4, 64, 1.5, [{"v": [1, None, {"k": b"b"}]}], 128),
    wire.Commit("p", 1, ["a"], [], [], None, 1, 0.0),
    wire.ClaimRequest("p", "t", ["x"], 4, True, 2.0, {"v": {">=": 3}}),
    wire.Locate("p", ["a", "ü"], ["x"]),
    wire.Clear("p", None),
    wire.Clear("p", ["a"]),
    wire.Consumed("p", ["t"]),
    wire.Status(None),
    wire.ListIds("p"),
    wire.Freeze(),
    wire.Restore(b"state", [1], {5: (1, 0, LAYOUT)}, True),
    wire.Shutdown(),
]
ANSWERS: list[Any] = [
    wire.Failure("KeyError", "text", 3),
    wire.Done(),
    wire.Done({"a": [1, 2.5, None]}, EXTENT),
    wire.Described(7, SPEC),
    wire.Reserved(EXTENT),
    wire.Claimed(["a"], [{"v": 1}]),
    wire.Located(1, [EXTENT], {3: (0, 64, LAYOUT)}, [wire.Place(2, 3, 1), wire.Place(1, 0, 0, b"12", b"3")]),
    wire.Frozen(1, b"state", [EXTENT], {3: (0, 64, LAYOUT)}),
]


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda request: type(request).__name__)
def test_a_request_arrives_as_it_was_sent(request_: Any) -> None:
    envelope = wire.Envelope(5, request_, [1, 2])
    assert wire.envelope_decoder.decode(msgspec.msgpack.encode(envelope)) == envelope


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: type(answer).__name__)
def test_an_answer_arrives_as_it_was_sent(answer: Any) -> None:
    assert wire.answer_decoder.decode(msgspec.msgpack.encode(answer)) == answer


def test_a_message_without_its_newest_fields_can_be_read() -> None:
    old: list[Any] = ["Commit", "p", 1, ["a"], [], [], None, 1, 0.0]
    assert wire.envelope_decoder.decode(msgspec.msgpack.encode([0, old])).request == REQUESTS[5]
    assert wire.answer_decoder.decode(msgspec.msgpack.encode(["Done"])) == wire.Done()
    assert wire.answer_decoder.decode(msgspec.msgpack.encode(["Failure", "X", "text"])).ready == 0
    layout = msgspec.msgpack.decode(
        msgspec.msgpack.encode(["dense", "torch.bool", [], 1, 1]), type=wire.Layout
    )
    assert layout.vocabulary is None


@settings(max_examples=300, deadline=None)
@given(
    st.binary(max_size=60)
    | st.recursive(st.none() | st.integers(0, 300) | st.text(max_size=3), st.lists).map(
        msgspec.msgpack.encode
    )
)
def test_random_bytes_are_refused_as_malformed_and_nothing_else(data: bytes) -> None:
    try:
        envelope = wire.envelope_decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return
    assert isinstance(envelope, wire.Envelope)


@pytest.mark.parametrize("name", [name for name in errors.__all__ if name != "ClaimTimeoutError"])
def test_an_error_arrives_as_itself(name: str) -> None:
    error = getattr(errors, name)("what went wrong")
    arrived = wire.error_of(wire.failure_of(error))
    assert type(arrived) is type(error) and str(arrived) == "what went wrong"


def test_a_claims_timeout_says_how_many_were_ready() -> None:
    arrived = wire.error_of(wire.failure_of(errors.ClaimTimeoutError("late", 3)))
    assert isinstance(arrived, errors.ClaimTimeoutError) and arrived.ready == 3


@pytest.mark.parametrize("kind", ["", "SystemExit", "StaleSpecError", "annotations", "__all__"])
def test_a_failure_of_no_known_kind_is_a_data_plane_error(kind: str) -> None:
    arrived = wire.error_of(wire.Failure(kind, "boom"))
    assert type(arrived) is errors.DataPlaneError and str(arrived) == "the controller failed: boom"
    assert wire.failure_of(StaleSpecError("x")).kind == "StaleSpecError"


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(["dense", "jagged", "object", "enum"]), st.integers(0, 1000), st.integers(0, 10**6))
def test_a_layout_is_aligned_and_has_room_for_values_and_offsets(kind: str, rows: int, nbytes: int) -> None:
    layout = wire.Layout(kind, "torch.uint8", (), rows, nbytes)
    assert layout.offsets_at % wire.ALIGN == layout.nbytes % wire.ALIGN == 0
    offsets = 8 * (rows + 1) if kind in ("jagged", "object") else 0
    assert nbytes <= layout.offsets_at < nbytes + wire.ALIGN
    assert layout.offsets_at + offsets <= layout.nbytes < layout.offsets_at + offsets + wire.ALIGN
