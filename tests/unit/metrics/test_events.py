"""The wire between workers and aggregator."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlplane.metrics.events import (
    EventBatch,
    EventRecordCodec,
    LogRecord,
    OpRecord,
    PartitionStatus,
    SampleEvent,
    SessionEvent,
    TaskStatus,
    TransferRecord,
    WeightVersion,
    WorkerGoodbye,
    WorkerHello,
    pack_ops,
)

names = st.text(max_size=8)
integers = st.integers(-(2**63), 2**63 - 1)
ops = st.builds(
    OpRecord,
    op=names,
    partition_id=names,
    n_keys=integers,
    n_bytes=integers,
    wall_ns=integers,
    start_ns=integers,
    status=st.sampled_from(["ok", "error", "timeout"]),
    thread_id=st.integers(0, 2**63 - 1),
    task=st.none() | names,
    error_class=st.none() | st.text(min_size=1, max_size=8),
    error_message=st.none() | st.text(min_size=1, max_size=8),
)


def batch(**fields: object) -> EventBatch:
    return EventBatch(**{"worker": "w", "pid": 7, "host": "h", "seq": 1, "sent_ns": 5, **fields})  # type: ignore[arg-type]


@given(st.lists(ops, max_size=20))
def test_operations_come_back_from_their_columns(records: list[OpRecord]) -> None:
    columns, refused = pack_ops(records)
    assert refused == 0
    codec = EventRecordCodec()
    back = codec.decode(codec.encode(batch(ops=columns))[1])
    for record in records:
        record.worker, record.pid = "w", 7
        if record.error_class is None:
            record.error_message = None
        else:
            record.error_message = record.error_message or ""
    assert back.op_records() == records
    assert len(back) == len(records)


def test_every_kind_of_event_comes_back() -> None:
    events = [
        SampleEvent(
            kind="claimed", partition_id="p", sample_ids=["a"], time_ns=1, task="t", weight_versions=[None]
        ),
        WeightVersion(3, 1),
        TransferRecord({"transfer_duration": [0.5]}, 1, {"transfers": 2}),
        PartitionStatus(partition_id="p", time_ns=1, samples=2, bytes=3, tasks={"t": TaskStatus(1, 2, 3)}),
        WorkerHello(1, "rollout"),
        WorkerGoodbye(2),
        SessionEvent("ERROR", 3, "no"),
        LogRecord("warning", "text", 4),
    ]
    codec = EventRecordCodec()
    assert codec.decode(codec.encode(batch(events=events))[1]).events == events


def test_one_malformed_operation_does_not_cost_the_others() -> None:
    good = OpRecord("put", "p", 1, 2, 3, 4)
    bad = [
        OpRecord("put", "p", 1.5, 2, 3, 4),  # type: ignore[arg-type]
        OpRecord("put", "p", 1, 2**70, 3, 4),
        OpRecord("put", None, 1, 2, 3, 4),  # type: ignore[arg-type]
        OpRecord(b"put", "p", 1, 2, 3, 4),  # type: ignore[arg-type]
        OpRecord("put", "\ud800", 1, 2, 3, 4),
        OpRecord("put", "p", 1, 2, 3, 4, thread_id=[]),  # type: ignore[arg-type]
    ]
    columns, refused = pack_ops([good, *bad, good])
    assert (len(columns), refused) == (2, len(bad))


def test_columns_that_do_not_fit_together_are_a_bad_frame() -> None:
    codec = EventRecordCodec()
    for field, value in (
        ("key_index", b"\x09\0\0\0"),
        ("key_index", b"\0\0\0"),
        ("wall_ns", b"1234567"),
        ("n_bytes", b""),
    ):
        columns, _ = pack_ops([OpRecord("put", "p", 1, 2, 3, 4)])
        setattr(columns, field, value)
        payload = codec.encode(batch(ops=columns))[1]
        with pytest.raises(ValueError, match=r"column|key_index|key index"):
            codec.decode(payload)
        assert codec.on_decode_error(payload, ValueError("bad")) is None


def test_garbage_is_dropped_and_a_programmers_error_is_not() -> None:
    codec = EventRecordCodec()
    with pytest.raises(msgspec.DecodeError):
        codec.decode(b"\xc1garbage")
    assert codec.on_decode_error(b"", msgspec.DecodeError("x")) is None
    with pytest.raises(AttributeError):
        codec.on_decode_error(b"", AttributeError("a bug"))


def test_a_batch_of_the_first_version_can_be_read_for_ever() -> None:
    first = bytes.fromhex(FIRST_VERSION)
    got = EventRecordCodec().decode(first)
    assert (got.worker, got.pid, got.host, got.seq, got.n_dropped) == ("w0", 42, "node", 3, 5)
    assert got.op_records() == [
        OpRecord("put", "rollouts", 8, 4096, 1000, 2000, thread_id=9, worker="w0", pid=42),
        OpRecord("get", "rollouts", 1, 2, 3, 4, "error", 9, "train", "KeyError", "gone", "w0", 42),
    ]
    assert got.events == [SessionEvent("STARTED", 11), WorkerGoodbye(12)]


FIRST_VERSION = (
    "89a6776f726b6572a27730a37069642aa4686f7374a46e6f6465a373657103a773656e745f6e7306a96e5f64726f7070"
    "656405a36f7073979295a3707574a8726f6c6c6f757473a26f6bc00995a3676574a8726f6c6c6f757473a56572726f72"
    "a5747261696e09c4080000000001000000c41008000000000000000100000000000000c4100010000000000000020000"
    "0000000000c410e8030000000000000300000000000000c410d0070000000000000400000000000000919301a84b6579"
    "4572726f72a4676f6e65a66576656e74739284a474797065a773657373696f6ea46b696e64a753544152544544a77469"
    "6d655f6e730ba76d657373616765a082a474797065a7676f6f64627965a774696d655f6e730ca776657273696f6e01"
)


def test_a_status_of_the_contract_becomes_a_record() -> None:
    status = {
        "partition_id": "p",
        "num_samples": 4,
        "samples": 3,
        "bytes": 10,
        "oldest_age_s": 1.5,
        "tasks": {"train": {"claimed": 1, "unclaimed": 2, "waiting": 1}},
    }
    record = PartitionStatus.from_client(status, 9, capacity_bytes=100)
    assert (record.samples, record.bytes, record.oldest_age_s, record.capacity_bytes) == (3, 10, 1.5, 100)
    assert record.tasks == {"train": TaskStatus(ready=2, claimed=1, waiting=1)}


def test_the_dict_of_transfer_statistics_becomes_a_record() -> None:
    wire = {"transfer_duration": [0.1], "beyond_sample": {"transfers": 3}, "window": [1.0, 2.0]}
    assert TransferRecord.from_dict(wire, 5) == TransferRecord(
        {"transfer_duration": [0.1]}, 5, {"transfers": 3}
    )
