"""The published picture: its codec, its first version for ever, and the ways to look into it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from rlplane.metrics.snapshot import (
    CounterStat,
    GaugeStat,
    LogLine,
    MetricsSnapshot,
    MetricsSnapshotCodec,
    PartitionStat,
    SampleAge,
    SeriesStat,
    SeriesSummary,
    SessionState,
    TaskStat,
    TimelinePoint,
    WorkerOpStat,
    WorkerStat,
)

FIRST_VERSION = Path(__file__).parent / "data" / "snapshot_v1.msgpack"


def snapshot_of_the_first_version() -> MetricsSnapshot:
    return MetricsSnapshot(
        run_id="run-1",
        state=SessionState.COMPLETE,
        seq=7,
        time_ns=1_700_000_000_000_000_000,
        monotonic_ns=5_000_000_000,
        started_ns=1_699_999_990_000_000_000,
        elapsed_s=10.0,
        exact=True,
        n_pending_tasks=1,
        refresh_hz=4.0,
        host="node",
        pid=42,
        metrics=[
            CounterStat("ops", 12, {"op": "put", "partition": "rollouts"}, 3.5),
            GaugeStat("bytes_held", 10, {}, 20),
            SeriesStat(
                "op_latency",
                2,
                {"op": "put"},
                "ns",
                30,
                10,
                20,
                15.0,
                7.1,
                {"p50": 10},
                [10, 20],
                [2],
                0,
                1,
                True,
            ),
        ],
        partitions=[
            PartitionStat("rollouts", 1, 2, 3, 4, 5, 6, 7.5, True, tasks=[TaskStat("train", 1, 2, 3)])
        ],
        workers=[
            WorkerStat(
                "w0",
                43,
                "node",
                ops=12,
                by_op=[WorkerOpStat("put", 12, latency=SeriesSummary(2, 15, 10, 20, 20, 20))],
            )
        ],
        n_in_flight=1,
        oldest=[SampleAge("s0", "rollouts", 3.5, 1, "w0", 2, ["train"], True)],
        log=[LogLine(1, "error", "text", "w0")],
        timeline=[TimelinePoint(0.0, 1.0, ops=12)],
    )


def test_a_snapshot_of_the_first_version_can_be_read_for_ever() -> None:
    assert MetricsSnapshotCodec().decode(FIRST_VERSION.read_bytes()) == snapshot_of_the_first_version()


def test_a_snapshot_travels_as_msgpack_and_as_json() -> None:
    snapshot = snapshot_of_the_first_version()
    codec = MetricsSnapshotCodec()
    assert codec.decode(codec.encode(snapshot)[1]) == snapshot
    assert msgspec.json.decode(msgspec.json.encode(snapshot), type=MetricsSnapshot) == snapshot


def test_large_integers_keep_their_last_digit_on_the_wire() -> None:
    snapshot = snapshot_of_the_first_version()
    total = 2**62 + 1
    snapshot.metrics = [SeriesStat("s", 1, total=total, max=total, percentiles={"p50": total})]
    codec = MetricsSnapshotCodec()
    for back in (
        codec.decode(codec.encode(snapshot)[1]),
        msgspec.json.decode(msgspec.json.encode(snapshot), type=MetricsSnapshot),
    ):
        (series,) = back.series("s")
        assert (series.total, series.max, series.percentiles) == (total, total, {"p50": total})


def test_the_schema_version_is_on_the_wire() -> None:
    assert msgspec.msgpack.decode(FIRST_VERSION.read_bytes())["schema_version"] == 1


def test_fields_of_a_later_version_are_passed_over() -> None:
    later = msgspec.to_builtins(snapshot_of_the_first_version())
    later["a_new_field"] = {"x": 1}
    later["metrics"][0]["another"] = 2
    assert MetricsSnapshotCodec().decode(msgspec.msgpack.encode(later)) == snapshot_of_the_first_version()


def test_what_cannot_be_read_is_dropped_with_one_log_line(caplog: pytest.LogCaptureFixture) -> None:
    codec = MetricsSnapshotCodec()
    for _ in range(2):
        assert codec.on_decode_error(b"xx", msgspec.DecodeError("torn")) is None
    assert len(caplog.records) == 1
    with pytest.raises(AttributeError):
        codec.on_decode_error(b"", AttributeError("a bug"))


def test_stats_are_found_by_name_and_some_of_their_labels() -> None:
    snapshot = snapshot_of_the_first_version()
    snapshot.metrics.append(CounterStat("ops", 5, {"op": "get", "partition": "rollouts"}, 1.0))
    assert snapshot.total("ops") == 17
    assert snapshot.total("ops", op="put") == 12
    assert snapshot.rate("ops", partition="rollouts") == 4.5
    assert snapshot.total("ops", partition="other") == 0
    assert [stat.labels for stat in snapshot.series("op_latency")] == [{"op": "put"}]


def test_gauges_include_those_of_partitions_and_tasks() -> None:
    gauges = {(g.name, *g.labels.values()): g.value for g in snapshot_of_the_first_version().gauges()}
    assert gauges["bytes_held",] == 10
    assert gauges["partition_bytes", "rollouts"] == 2
    assert gauges["partition_capacity_bytes", "rollouts"] == 6
    assert gauges["task_waiting", "rollouts", "train"] == 3


def test_only_the_last_two_states_are_final() -> None:
    assert [state for state in SessionState if state.is_final] == [
        SessionState.COMPLETE,
        SessionState.INTERRUPTED,
    ]
