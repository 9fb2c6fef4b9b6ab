"""The messages of the control service: what goes in comes out, yesterday's bytes can still be read."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlplane import errors
from rlplane.control.rules import PartitionSpec
from rlplane.service import protocol as wire
from rlplane.service.commits import StalePlaceError, StaleSpecError
from rlplane.storage.places import ALIGN, Layout, Loss, Place

SPEC = PartitionSpec.checked("p", ["x", "y"], 4, ["t"], 2, {"y": ["a", "b"]})
LAYOUT = Layout("enum", "torch.uint8", (2, 0), 3, 7, ["a", "b"], b"offsets")
PLACE = Place(1, 8192, (2, 4096, 0))

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
    wire.Unclaim("p", "t", ["a"]),
    wire.DropPartition("p"),
    wire.Consumed("p", ["t"]),
    wire.Status("p"),
    wire.ServiceStatus(),
    wire.ListIds("p"),
    wire.Peek("p", {"v": 1}, ["x"], 3, "lifo"),
    wire.Count("p", None),
    wire.Advance("p", 3),
    wire.ShouldAbort("p", ["a"]),
    wire.Evicted("p", 5),
    wire.Finish("p"),
    wire.CloseGroup("p", 7, "failed", ["x"]),
    wire.Freeze(),
    wire.FrozenPiece(3),
    wire.RestorePiece(3, {5: (1, 0, LAYOUT)}, b"state"),
    wire.Restore(3, [1], True),
    wire.Unload(3),
    wire.Shutdown(),
    wire.Withdraw([3, 4]),
    wire.Register(SPEC, extend=True),
    wire.MarkClaimed("p", "t", None, True),
    wire.Inspect("p", ["a"], True, [3]),
    wire.Lost(Loss((1,), 4, (7, 8))),
    wire.Naming(3, 0, ["a"], [{"v": 1}]),
    wire.Unname(3),
]
ANSWERS: list[Any] = [
    wire.Failure("KeyError", "text", 3),
    wire.Done(),
    wire.Done({"a": [1, 2.5, None]}, PLACE),
    wire.Described(7, SPEC),
    wire.Reserved(PLACE),
    wire.Claimed(["a"], [{"v": 1}]),
    wire.Located(
        1, [PLACE], {3: (0, 64, LAYOUT)}, [wire.FieldRows(2, 3, 1), wire.FieldRows(1, 0, 0, b"12", b"3")]
    ),
    wire.Frozen(1),
    wire.Welcome(7, "secret"),
]
HELLOS = [wire.Hello(2, "token", 17, True), wire.Hello(2, "", client=3, secret="secret")]
NOTICES = [wire.Release(3), wire.Abandon(4), wire.Goodbye()]


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda request: type(request).__name__)
def test_a_request_arrives_as_it_was_sent(request_: Any) -> None:
    envelope = wire.Envelope(request_, [1, 2], [3])
    assert wire.envelope_decoder.decode(msgspec.msgpack.encode(envelope)) == envelope


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: type(answer).__name__)
def test_an_answer_arrives_as_it_was_sent(answer: Any) -> None:
    assert wire.answer_decoder.decode(msgspec.msgpack.encode(answer)) == answer


@pytest.mark.parametrize("hello", HELLOS, ids=["lifeline", "channel"])
def test_an_introduction_arrives_as_it_was_sent(hello: wire.Hello) -> None:
    assert wire.hello_decoder.decode(wire.encode(hello)) == hello


@pytest.mark.parametrize("notice", NOTICES, ids=lambda notice: type(notice).__name__)
def test_a_notice_arrives_as_it_was_sent(notice: Any) -> None:
    assert wire.notice_decoder.decode(wire.encode(notice)) == notice


def test_every_kind_of_message_is_tried_here() -> None:
    assert {type(request) for request in REQUESTS} == set(get_args(wire.Request))
    assert {type(answer) for answer in ANSWERS} == set(get_args(wire.Answer))


def test_a_message_without_its_newest_fields_can_be_read() -> None:
    old: list[Any] = ["Commit", "p", 1, ["a"], [], [], None, 1, 0.0]
    assert wire.envelope_decoder.decode(msgspec.msgpack.encode([old])).request == REQUESTS[5]
    assert wire.answer_decoder.decode(msgspec.msgpack.encode(["Done"])) == wire.Done()
    failure = wire.answer_decoder.decode(msgspec.msgpack.encode(["Failure", "X", "text"]))
    assert isinstance(failure, wire.Failure) and failure.ready == 0
    layout = msgspec.msgpack.decode(msgspec.msgpack.encode(["dense", "torch.bool", [], 1, 1]), type=Layout)
    assert layout.vocabulary is None and layout.offsets is None
    assert wire.hello_decoder.decode(msgspec.msgpack.encode([2, "token"])).client is None


@settings(max_examples=300, deadline=None)
@given(
    st.binary(max_size=60)
    | st.recursive(st.none() | st.integers(0, 300) | st.text(max_size=3), st.lists).map(
        msgspec.msgpack.encode
    )
)
def test_random_bytes_are_refused_as_malformed_and_nothing_else(data: bytes) -> None:
    for decoder in (wire.envelope_decoder, wire.hello_decoder, wire.notice_decoder, wire.answer_decoder):
        try:
            decoded = decoder.decode(data)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            continue
        assert isinstance(decoded, msgspec.Struct)


@pytest.mark.parametrize("name", [name for name in errors.__all__ if name != "ClaimTimeoutError"])
def test_an_error_arrives_as_itself(name: str) -> None:
    error = getattr(errors, name)("what went wrong")
    arrived = wire.error_of(wire.failure_of(error))
    assert type(arrived) is type(error) and str(arrived) == "what went wrong"


def test_a_claims_timeout_says_how_many_were_ready() -> None:
    arrived = wire.error_of(wire.failure_of(errors.ClaimTimeoutError("late", 3)))
    assert isinstance(arrived, errors.ClaimTimeoutError) and arrived.ready == 3


@pytest.mark.parametrize(
    "kind", ["", "SystemExit", "StaleSpecError", "StalePlaceError", "annotations", "__all__"]
)
def test_a_failure_of_no_known_kind_is_a_data_plane_error(kind: str) -> None:
    arrived = wire.error_of(wire.Failure(kind, "boom"))
    assert type(arrived) is errors.DataPlaneError and str(arrived) == "the control service failed: boom"
    assert wire.failure_of(StaleSpecError("x")).kind == "StaleSpecError"
    assert wire.failure_of(StalePlaceError("x")).kind == "StalePlaceError"


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(["dense", "jagged", "object", "enum"]), st.integers(0, 1000), st.integers(0, 10**6))
def test_a_layout_is_aligned_and_has_room_for_values_and_offsets(kind: str, rows: int, nbytes: int) -> None:
    layout = Layout(kind, "torch.uint8", (), rows, nbytes)
    assert layout.offsets_at % ALIGN == layout.nbytes % ALIGN == 0
    ragged = kind in ("jagged", "object")
    offsets = 8 * (rows + 1) if ragged else 0
    assert nbytes <= layout.offsets_at < nbytes + ALIGN
    assert layout.offsets_at + offsets <= layout.nbytes < layout.offsets_at + offsets + ALIGN
    if ragged:
        # With the offsets in the layout, there are none in the block.
        assert msgspec.structs.replace(layout, offsets=bytes(offsets)).nbytes == layout.offsets_at
