"""The events as JSON lines, and the same figures from them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlplane.metrics.event_logger import EventLoggerService, read_event_log, snapshot_from_event_log
from rlplane.metrics.events import EventBatch, OpRecord, SampleEvent, SessionEvent, pack_ops


def batch(seq: int, n_dropped: int = 0) -> EventBatch:
    records = [
        OpRecord("put", "p", 2, 64, 100 * seq, seq, task="t"),
        OpRecord("get", "p", 2, 0, 7, seq, "error", 3, None, "KeyError", "gone"),
    ]
    life = SampleEvent(kind="written", partition_id="p", sample_ids=[f"s{seq}"], time_ns=seq)
    return EventBatch(
        worker="w",
        pid=9,
        host="h",
        seq=seq,
        sent_ns=seq,
        n_dropped=n_dropped,
        ops=pack_ops(records)[0],
        events=[life, SessionEvent("ERROR", 1, "x")],
    )


def test_batches_come_back_from_the_file(tmp_path: Path) -> None:
    event_logger = EventLoggerService(tmp_path / "events.jsonl")
    empty = EventBatch(worker="idle", pid=8, host="h", seq=1, sent_ns=1)
    written = [batch(1), empty, batch(2, n_dropped=3)]
    for item in written:
        event_logger.write(item)
    event_logger.close()
    event_logger.close()
    back = list(read_event_log(tmp_path / "events.jsonl"))
    assert [item.op_records() for item in back] == [item.op_records() for item in written]
    assert [item.events for item in back] == [item.events for item in written]
    assert [(item.worker, item.seq, item.n_dropped) for item in back] == [
        ("w", 1, 0),
        ("idle", 1, 0),
        ("w", 2, 3),
    ]


def test_a_line_is_one_flat_record_that_says_whose_it_is(tmp_path: Path) -> None:
    event_logger = EventLoggerService(tmp_path / "events.jsonl")
    event_logger.write(batch(1))
    event_logger.flush()
    head, put, *_ = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert (head["type"], head["worker"], head["seq"]) == ("batch", "w", 1)
    assert (put["type"], put["op"], put["wall_ns"], put["worker"], put["pid"]) == ("op", "put", 100, "w", 9)
    event_logger.close()


def test_a_last_line_that_was_cut_off_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    event_logger = EventLoggerService(path)
    event_logger.write(batch(1))
    event_logger.close()
    path.write_bytes(path.read_bytes()[:-10])
    (back,) = read_event_log(path)
    assert len(back.op_records()) == 2


def test_any_other_bad_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"type":"batch"}\n')
    with pytest.raises(ValueError, match=r"events\.jsonl, line 1"):
        list(read_event_log(path))


def test_a_full_disk_ends_the_journal_and_nothing_else() -> None:
    event_logger = EventLoggerService(Path("/dev/full"))
    event_logger.write(batch(1))
    event_logger.flush()
    assert event_logger.failed
    event_logger.write(batch(2))
    event_logger.close()


def test_the_figures_can_be_counted_again(tmp_path: Path) -> None:
    event_logger = EventLoggerService(tmp_path / "events.jsonl")
    for seq in (1, 2, 4):
        event_logger.write(batch(seq))
    event_logger.close()
    snapshot = snapshot_from_event_log(tmp_path / "events.jsonl", "run")
    assert (snapshot.run_id, snapshot.exact) == ("run", True)
    assert snapshot.total("ops", op="put") == 3
    assert snapshot.total("op_failures") == 3
    assert snapshot.total("batches_lost") == 1
    assert snapshot.n_in_flight == 3
