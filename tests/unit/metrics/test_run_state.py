"""From batches of events to a snapshot: totals, workers, partitions, lives, bounds."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from rlplane.metrics.events import (
    EventBatch,
    LogRecord,
    OpRecord,
    PartitionStatus,
    SampleEvent,
    SessionEvent,
    SingleEvent,
    TaskStatus,
    TransferRecord,
    WeightVersion,
    WorkerGoodbye,
    WorkerHello,
    pack_ops,
)
from rlplane.metrics.run_state import SILENT_AFTER_S, RunState
from rlplane.metrics.snapshot import (
    MAX_OLDEST,
    MAX_PARTITIONS,
    OTHER,
    MetricsSnapshot,
    MetricsSnapshotCodec,
    SessionState,
    WorkerStat,
)


class Run:
    """A ledger that is fed batches of named workers."""

    def __init__(self, **options: object) -> None:
        self.run_state = RunState("run", **options)  # type: ignore[arg-type]
        self.seq: dict[str, int] = {}

    def send(
        self, *events: OpRecord | SingleEvent, worker: str = "w0", pid: int = 1, dropped: int = 0, **more: int
    ) -> None:
        seq = more.get("seq", self.seq.get(worker, 0) + 1)
        self.seq[worker] = seq
        ops = [event for event in events if isinstance(event, OpRecord)]
        self.run_state.add_batch(
            EventBatch(
                worker=worker,
                pid=pid,
                host="node",
                seq=seq,
                sent_ns=0,
                n_dropped=dropped,
                ops=pack_ops(ops)[0] if ops else None,
                events=[event for event in events if not isinstance(event, OpRecord)],
            ),
            more.get("now_ns"),
        )

    def snapshot(self, state: SessionState = SessionState.LIVE, exact: bool = False) -> MetricsSnapshot:
        return self.run_state.snapshot(state, exact=exact)


def op(
    name: str = "put", partition: str = "p", keys: int = 1, size: int = 10, wall: int = 1000, **more: str
) -> OpRecord:
    return OpRecord(name, partition, keys, size, wall, 0, **more)  # type: ignore[arg-type]


def life(kind: str, *ids: str, at: int, partition: str = "p", **fields: object) -> SampleEvent:
    return SampleEvent(kind=kind, partition_id=partition, sample_ids=list(ids), time_ns=at, **fields)  # type: ignore[arg-type]


def worker(snapshot: MetricsSnapshot, name: str) -> WorkerStat:
    return next(stat for stat in snapshot.workers if stat.worker == name)


# Operations.


def test_operations_are_counted_by_op_partition_and_worker() -> None:
    run = Run()
    run.send(op(), op("get", "q", 4, 100), op(status="timeout"), worker="a")
    run.send(op(status="error"), op(status="whatever"), worker="b")
    snapshot = run.snapshot()
    assert snapshot.total("ops") == 5
    assert snapshot.total("ops", op="put", partition="p") == 4
    assert snapshot.total("op_bytes", partition="q") == 100
    assert snapshot.total("op_keys", op="get") == 4
    assert snapshot.total("op_timeouts") == 1
    assert snapshot.total("op_failures", op="put") == 2
    one, two = worker(snapshot, "a"), worker(snapshot, "b")
    assert (one.ops, one.keys, one.bytes, one.timeouts, one.failures) == (3, 6, 120, 1, 0)
    assert (two.ops, two.failures) == (2, 2)
    assert {stat.op: stat.count for stat in one.by_op} == {"put": 2, "get": 1}
    assert snapshot.total("events") == 5


def test_latencies_are_exact_in_total_and_per_worker() -> None:
    run = Run()
    rng = np.random.default_rng(0)
    truth: dict[str, list[int]] = {}
    for name in ("a", "b", "c"):
        truth[name] = rng.integers(1, 10**9, 500).tolist()
        run.send(*(op(wall=wall) for wall in truth[name]), worker=name)
        run.snapshot()
    snapshot = run.snapshot(SessionState.COMPLETE, exact=True)
    assert snapshot.exact
    everything = sorted(value for values in truth.values() for value in values)
    (latency,) = snapshot.series("op_latency", op="put")
    assert latency.percentiles["p50"] == everything[749]
    assert (latency.count, latency.total, latency.max) == (1500, sum(everything), everything[-1])
    for name, values in truth.items():
        summary = worker(snapshot, name).by_op[0].latency
        assert summary is not None
        assert summary.p90 == sorted(values)[449]
        assert summary.max == max(values)


def test_figures_that_no_operation_can_have_are_refused_one_by_one() -> None:
    run = Run()
    run.send(op(keys=-1), op(size=2**60), op(wall=-5), op(keys=3, size=7))
    snapshot = run.snapshot(SessionState.COMPLETE, exact=True)
    assert snapshot.total("ops") == 4
    assert snapshot.total("op_keys") == 1 + 1 + 3
    assert snapshot.total("op_bytes") == 10 + 10 + 7
    (latency,) = snapshot.series("op_latency")
    assert latency.count == 3
    assert snapshot.total("values_refused") == 3


def test_failed_operations_are_in_the_log_but_do_not_flood_it() -> None:
    run = Run()
    failed = op(status="error", error_class="KeyError", error_message="no sample 's1'")
    run.send(*[failed] * 50)
    (line,) = run.snapshot().log
    assert (line.message, line.count) == ("put on p: KeyError: no sample 's1'", 50)


def test_a_partition_that_nobody_tracks_or_reports_is_named_and_not_known() -> None:
    run = Run()
    run.send(op(partition="p"), life("written", "a", at=1, partition="q"))
    parts = {part.partition: (part.tracked, part.known) for part in run.snapshot().partitions}
    assert parts == {"p": (False, False), "q": (True, True)}


def test_what_is_said_again_is_one_line_with_a_count_and_times() -> None:
    run = Run()
    run.send(op(status="error", error_class="KeyError", error_message="no sample 's1'"))
    (first,) = run.snapshot().log
    run.send(op(status="error", error_class="ValueError", error_message="no"))
    run.send(op(status="error", error_class="KeyError", error_message="no sample 's27'"))
    other, line = run.snapshot().log
    assert (other.message, other.count) == ("put on p: ValueError: no", 1)
    assert (line.message, line.count) == ("put on p: KeyError: no sample 's27'", 2)
    assert line.first_ns == first.time_ns < line.time_ns


def test_a_claim_that_found_nothing_in_time_is_counted_and_not_logged() -> None:
    run = Run()
    for name, error in (("claim_meta", "ClaimTimeoutError"), ("put", "CapacityTimeoutError")):
        run.send(op(name, status="timeout", error_class=error, error_message="0 were ready"))
    snapshot = run.snapshot()
    assert [line.message for line in snapshot.log] == ["put on p: CapacityTimeoutError: 0 were ready"]
    assert snapshot.total("op_timeouts", op="claim_meta") == 1 and snapshot.total("op_failures") == 0
    assert sum(point.failures for point in snapshot.timeline) == 0


def test_waiting_is_a_series_of_its_own_and_no_part_of_the_latency() -> None:
    run = Run()
    waited = OpRecord("claim_meta", "p", 3, 0, 5_000_000, 0, task="train", wait_ns=4_000_000)
    run.send(waited, op("claim_meta", keys=2, wall=1_000_000, task="train"))
    snapshot = run.snapshot()
    (latency,) = snapshot.series("op_latency", op="claim_meta")
    (wait,) = snapshot.series("op_wait")
    assert (latency.count, latency.min, latency.max) == (2, 1_000_000, 1_000_000)
    assert wait.labels == {"op": "claim_meta", "partition": "p", "task": "train"}
    assert (wait.count, wait.total) == (1, 4_000_000)
    assert snapshot.total("claim_keys", partition="p", task="train") == 5
    assert snapshot.workers[0].by_op[0].waited_s == pytest.approx(0.004)
    assert sum(point.wait_ns for point in snapshot.timeline) == 4_000_000


# Workers.


def test_lost_batches_and_dropped_events_are_noticed() -> None:
    run = Run()
    run.send(op(), worker="a", seq=1)
    run.send(op(), worker="a", seq=4, dropped=7)
    run.send(op(), worker="a", seq=4)
    snapshot = run.snapshot()
    assert snapshot.total("batches_lost") == 2
    assert snapshot.total("events_dropped") == 7
    assert (worker(snapshot, "a").lost_batches, worker(snapshot, "a").dropped) == (2, 7)


def test_a_worker_that_is_replaced_keeps_its_name_and_its_losses() -> None:
    run = Run()
    run.send(op(), worker="a", pid=1, dropped=5)
    run.send(op(), worker="a", pid=2, seq=1, dropped=2)
    stat = worker(run.snapshot(), "a")
    assert (stat.pid, stat.ops, stat.dropped, stat.lost_batches) == (2, 2, 7, 0)


def test_a_workers_state_is_alive_silent_or_gone() -> None:
    run = Run()
    long_ago = 1_000_000_000
    run.send(WorkerHello(0, "rollout"), worker="silent", now_ns=long_ago)
    run.send(WorkerHello(0), worker="alive")
    run.send(WorkerHello(0), WorkerGoodbye(1), worker="gone")
    run.send(WorkerHello(0, "session"), worker="driver")
    snapshot = run.snapshot()
    assert {stat.worker: stat.state for stat in snapshot.workers} == {
        "silent": "silent",
        "alive": "alive",
        "gone": "gone",
    }
    assert worker(snapshot, "silent").role == "rollout"
    assert SILENT_AFTER_S > 1.0, "a heartbeat must come sooner"
    assert next(g.value for g in snapshot.gauges() if g.name == "workers_alive") == 1


# Lives.


def test_the_life_of_samples_is_measured_by_task_and_by_worker() -> None:
    run = Run()
    run.send(life("written", "a", "b", at=1000, n_bytes=100, weight_versions=[3, 4]), worker="rollout")
    run.send(life("claimed", "a", "b", at=1500, task="train"), worker="trainer")
    run.send(life("cleared", "a", at=3000), worker="trainer")
    run.send(life("failed", "b", at=3000, reason="nan"), worker="trainer")
    snapshot = run.snapshot(SessionState.COMPLETE, exact=True)
    (claimed,) = snapshot.series("written_to_claimed", partition="p", task="train")
    (cleared,) = snapshot.series("written_to_cleared", partition="p")
    (staleness,) = snapshot.series("staleness", task="train")
    assert (claimed.count, claimed.max, cleared.max) == (2, 500, 2000)
    assert (staleness.min, staleness.max, staleness.unit) == (0, 1, "versions")
    (partition,) = snapshot.partitions
    assert (partition.written, partition.claimed, partition.cleared, partition.failed) == (2, 2, 1, 1)
    assert (partition.samples, partition.peak_samples, partition.bytes, partition.peak_bytes) == (
        1,
        2,
        50,
        100,
    )
    assert partition.never_cleared == 1
    rollout, trainer = worker(snapshot, "rollout"), worker(snapshot, "trainer")
    assert (rollout.written, rollout.never_cleared, trainer.claimed, trainer.failed) == (2, 1, 2, 1)
    assert trainer.staleness is not None
    assert trainer.staleness.max == 1
    assert [row.sample_id for row in snapshot.oldest] == ["b"]
    assert snapshot.oldest[0].claimed_by == ["train"]
    assert [row.sample_id for row in snapshot.finished] == ["a"]


def test_staleness_is_counted_from_the_newest_version_that_exists() -> None:
    run = Run()
    run.send(life("written", "a", at=1, weight_versions=[2]), WeightVersion(5, 2))
    run.send(life("claimed", "a", at=3, task="train"), life("written", "b", at=4))
    run.send(life("claimed", "b", at=5, task="train"))
    (staleness,) = run.snapshot().series("staleness")
    assert (staleness.count, staleness.max) == (1, 3), "a sample without a version has no staleness"


def test_an_engines_word_on_a_partition_is_believed() -> None:
    run = Run()
    run.send(life("written", "a", at=1, n_bytes=5), op(partition="untracked"))
    status = PartitionStatus(
        partition_id="p",
        time_ns=10,
        samples=40,
        bytes=400,
        capacity_bytes=1000,
        tasks={"train": TaskStatus(ready=7, claimed=2, waiting=1)},
    )
    run.send(status)
    run.send(msgspec.structs.replace(status, time_ns=9, samples=1))
    run.send(life("written", "b", at=12))
    partition, untracked = run.snapshot().partitions
    assert (partition.samples, partition.bytes, partition.capacity_bytes) == (40, 400, 1000)
    assert partition.reported
    assert [(task.ready, task.claimed, task.waiting) for task in partition.tasks] == [(7, 2, 1)]
    assert (untracked.partition, untracked.samples) == ("untracked", 0)


def test_without_an_engines_word_tasks_show_what_is_left_for_them() -> None:
    run = Run()
    run.send(life("written", "a", "b", "c", at=1), life("claimed", "a", at=2, task="train"))
    (task,) = run.snapshot().partitions[0].tasks
    assert (task.ready, task.claimed, task.waiting) == (2, 1, None)


# Transfers, session, log.


def test_transfers_count_with_those_beyond_the_sample() -> None:
    run = Run()
    run.send(
        TransferRecord(
            {
                "transfer_duration": [0.001, 0.003],
                "post_duration": [1e-6, 2e-6],
                "bytes_transferred": [100, 300],
                "num_descriptors": [1, 2],
                "num_failed_transfers": [1, 1],
                "num_kv_expired_reqs": [1],
            },
            1,
            {"transfers": 8, "bytes_transferred": 1000, "num_failed_notifications": 4},
        )
    )
    snapshot = run.snapshot(SessionState.COMPLETE, exact=True)
    assert (snapshot.total("transfers"), snapshot.total("transfer_bytes")) == (10, 1400)
    assert {c.labels["kind"]: c.value for c in snapshot.counters("transfer_failures")} == {
        "transfer": 2,
        "notification": 4,
        "expired": 1,
    }
    (duration,) = snapshot.series("transfer_duration")
    assert (duration.min, duration.max, duration.count) == (1_000_000, 3_000_000, 2)


def test_session_errors_and_log_records_reach_the_viewers() -> None:
    seen: list[SessionEvent] = []
    run = Run(on_session=seen.append)
    run.send(
        SessionEvent("ERROR", 1, "the loss is nan"), LogRecord("warning", "slow disk", 2), worker="trainer"
    )
    snapshot = run.snapshot()
    assert [(line.level, line.worker, line.message) for line in snapshot.log] == [
        ("error", "trainer", "the loss is nan"),
        ("warning", "trainer", "slow disk"),
    ]
    assert snapshot.total("session_errors") == 1
    assert seen == [SessionEvent("ERROR", 1, "the loss is nan")]


def test_one_event_that_cannot_be_handled_does_not_harm_the_others() -> None:
    run = Run()
    run.send(
        TransferRecord({"transfer_duration": ["x"]}, 1),  # type: ignore[list-item]
        life("written", "a", at=1),
        op(),
    )
    snapshot = run.snapshot()
    assert snapshot.n_in_flight == 1
    assert snapshot.total("ops") == 1
    assert snapshot.total("values_refused") == 1
    assert "TransferRecord was refused" in snapshot.log[0].message


# Bounds.


def test_names_without_end_do_not_make_snapshots_without_end() -> None:
    run = Run()
    for step in range(3 * MAX_PARTITIONS):
        run.send(
            op(partition=f"step-{step}"), life("written", f"s{step}", at=step + 1, partition=f"step-{step}")
        )
    snapshot = run.snapshot()
    assert snapshot.total("ops") == 3 * MAX_PARTITIONS
    assert snapshot.total("ops", partition=OTHER) == 2 * MAX_PARTITIONS
    assert len(snapshot.partitions) == MAX_PARTITIONS + 1
    assert sum(part.samples for part in snapshot.partitions) == 3 * MAX_PARTITIONS
    assert len(snapshot.oldest) == MAX_OLDEST


def test_500_workers_and_200_partitions_fit_into_a_frame() -> None:
    run = Run()
    for index in range(500):
        records = [op(name, f"p{(index + j) % 200}") for j, name in enumerate(("put", "get", "clear"))]
        run.send(*records, worker=f"worker-{index}")
    snapshot = run.snapshot()
    assert len(snapshot.workers) == 500
    assert len(snapshot.partitions) == 200
    assert len(MetricsSnapshotCodec().encode(snapshot)[1]) < 1_000_000


def test_time_goes_on_in_the_timeline_and_its_points_add_up() -> None:
    run = Run()
    for _ in range(5):
        run.send(op(size=7), life("written", "a", at=1))
        snapshot = run.snapshot()
    assert sum(point.ops for point in snapshot.timeline) == 5
    assert sum(point.bytes for point in snapshot.timeline) == 35
    assert snapshot.timeline[-1].samples_held == 1


def test_a_sequence_number_grows_with_every_snapshot() -> None:
    run = Run()
    assert [run.snapshot().seq for _ in range(3)] == [1, 2, 3]
    assert run.snapshot().run_id == "run"
    with pytest.raises(TypeError):
        RunState()  # type: ignore[call-arg]
