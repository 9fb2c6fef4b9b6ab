"""Whole runs with real processes: workers, one of them killed, viewers, and the exact report at the end."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from rlplane.errors import PlaneConnectionError
from rlplane.metrics.aggregator import AggregatorHandle, start_aggregator
from rlplane.metrics.discovery import list_runs
from rlplane.metrics.event_logger import snapshot_from_event_log
from rlplane.metrics.event_publisher import METRICS_ADDRESS_VARIABLE
from rlplane.metrics.events import SessionEvent
from rlplane.metrics.publisher import FINAL_SNAPSHOT_NAME, read_final_snapshot
from rlplane.metrics.snapshot import MetricsSnapshot, SessionState
from rlplane.metrics.subscriber import MetricsSnapshotSubscriber
from rlplane.report import Report, find_report, render_html, render_text

WORKER = Path(__file__).parent / "metrics_worker.py"


def wait_until(done: Callable[[], bool], what: str, timeout: float = 60.0) -> None:
    deadline = time.monotonic() + timeout
    while not done():
        assert time.monotonic() < deadline, f"{what} did not happen within {timeout} s"
        time.sleep(0.01)


@pytest.fixture
def handle(tmp_path: Path) -> Iterator[AggregatorHandle]:
    made = start_aggregator(out_dir=tmp_path / "out", jsonl=True, refresh_hz=20)
    yield made
    if made.process.poll() is None:
        made.process.send_signal(signal.SIGCONT)
        made.interrupt()


Worker = subprocess.Popen[str]


@pytest.fixture
def start_worker() -> Iterator[Callable[..., Worker]]:
    started: list[Worker] = []

    def start(name: str, steps: int, *more: str) -> Worker:
        worker = subprocess.Popen(
            [sys.executable, str(WORKER), name, str(steps), *more],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(worker)
        return worker

    yield start
    for worker in started:
        if worker.poll() is None:
            worker.kill()
        worker.communicate()


def wait_for_line(worker: Worker, line: str) -> None:
    assert worker.stdout is not None
    assert worker.stdout.readline().strip() == line


def finish(worker: Worker) -> None:
    """Let a worker that holds close in order."""
    out, _ = worker.communicate(timeout=300)
    assert worker.returncode == 0
    assert out.strip().endswith("dropped 0")


def latest(handle: AggregatorHandle) -> MetricsSnapshot:
    snapshot = handle.subscriber.latest
    assert snapshot is not None
    return snapshot


def test_four_workers_of_which_one_is_killed_give_one_exact_report(
    handle: AggregatorHandle, start_worker: Callable[..., Worker], tmp_path: Path
) -> None:
    workers = {f"w{index}": start_worker(f"w{index}", 300, "hold") for index in range(4)}
    for worker in workers.values():
        wait_for_line(worker, "recorded")
    # 300 steps have 3 operations each, and 270 of them a clear.
    wait_until(
        lambda: handle.subscriber.latest is not None and latest(handle).total("ops") == 4 * 1170, "ops"
    )
    workers["w3"].kill()
    workers["w3"].communicate()
    for name in ("w0", "w1", "w2"):
        finish(workers[name])
    report = handle.finish()

    # Nobody can know whether w3 had more to say when it was killed.
    assert not report.complete
    assert any("last events of 1 workers never came (w3)" in warning for warning in report.warnings)
    assert report.exact
    assert report.source == "published"
    assert report.totals["ops"] == 4 * 1170
    assert report.totals["samples_written"] == 4 * 600
    assert report.totals["samples_cleared"] == 4 * 540
    assert report.totals["tracked_samples_failed"] == 4 * 15
    assert report.n_never_cleared == 4 * 60
    assert report.totals.get("batches_lost", 0) == 0
    states = {worker.worker: worker.state for worker in report.workers}
    assert states == {"w0": "gone", "w1": "gone", "w2": "gone", "w3": states["w3"]}
    assert states["w3"] != "gone", "a killed worker never said goodbye"

    # The same figures, counted again offline by the same code, and by other, simpler code.
    assert handle.event_log_path is not None
    offline = Report.from_snapshot(snapshot_from_event_log(handle.event_log_path))
    assert offline.figures() == report.figures()
    check_by_hand(handle.event_log_path, report)
    stored = read_final_snapshot(tmp_path / "out" / FINAL_SNAPSHOT_NAME)
    assert Report.from_snapshot(stored).figures() == report.figures()
    assert "COMPLETE" in render_text(report)
    assert "<svg" in render_html(report)


def check_by_hand(event_log: Path, report: Report) -> None:
    """Compute the report's figures from the lines, with nothing but lists and sorting."""
    walls: dict[tuple[str, ...], list[int]] = defaultdict(list)
    counts: dict[tuple[str, str], int] = defaultdict(int)
    written: dict[str, int] = {}
    waits: list[int] = []
    for line in event_log.read_text().splitlines():
        record = json.loads(line)
        if record["type"] == "op":
            walls[record["op"],].append(record["wall_ns"])
            walls[record["op"], record["worker"]].append(record["wall_ns"])
            counts[record["op"], record.get("status", "ok")] += 1
        elif record["type"] == "life" and record["kind"] == "written":
            written |= dict.fromkeys(record["sample_ids"], record["time_ns"])
        elif record["type"] == "life" and record["kind"] == "cleared":
            waits += [record["time_ns"] - written[sample] for sample in record["sample_ids"]]
    for op in report.ops:
        values = sorted(walls[op.op,])
        assert op.latency is not None
        assert op.count == op.latency.count == len(values)
        assert op.latency.total == sum(values)
        assert (op.latency.min, op.latency.max) == (values[0], values[-1])
        for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("p99.9", 0.999)):
            assert op.latency.percentiles[name] == values[math.ceil(round(share * len(values), 6)) - 1]
        mean = sum(values) / len(values)
        variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
        assert op.latency.std_dev == pytest.approx(math.sqrt(variance), rel=1e-12)
        assert (op.timeouts, op.failures) == (counts[op.op, "timeout"], counts[op.op, "error"])
    for worker in report.workers:
        for worker_op in worker.by_op:
            values = sorted(walls[worker_op.op, worker.worker])
            assert worker_op.latency is not None
            assert worker_op.count == len(values)
            assert worker_op.latency.p99 == values[math.ceil(round(0.99 * len(values), 6)) - 1]
    (cleared,) = [series for series in report.series if series.name == "written_to_cleared"]
    assert cleared.count == len(waits)
    assert cleared.total == sum(waits)
    assert cleared.percentiles["p50"] == sorted(waits)[math.ceil(0.5 * len(waits)) - 1]


def test_an_aggregator_that_is_stopped_for_a_while_loses_nothing_and_holds_nobody_up(
    handle: AggregatorHandle, start_worker: Callable[..., Worker]
) -> None:
    wait_until(lambda: handle.subscriber.latest is not None, "a first snapshot")
    handle.process.send_signal(signal.SIGSTOP)
    workers = [start_worker(f"w{index}", 200, "hold") for index in range(2)]
    for worker in workers:
        wait_for_line(worker, "recorded")  # They recorded everything while nobody took it.
    handle.process.send_signal(signal.SIGCONT)
    for worker in workers:
        finish(worker)
    report = handle.finish()
    assert report.complete
    assert report.totals["ops"] == 2 * 780
    assert report.totals.get("events_dropped", 0) == 0


def test_a_late_viewer_sees_the_run_at_once_and_two_see_the_same(
    tmp_path: Path, start_worker: Callable[..., Worker]
) -> None:
    # A tick in 20 seconds: what a viewer gets sooner can only be the snapshot that was kept for it.
    handle = start_aggregator(out_dir=tmp_path, refresh_hz=0.05)
    try:
        wait_until(lambda: handle.subscriber.latest is not None, "the first snapshot")
        with MetricsSnapshotSubscriber(handle.snapshot_address) as one:
            first = one.wait_for_snapshot(15.0)
            with MetricsSnapshotSubscriber(handle.snapshot_address) as two:
                assert first is not None
                assert two.wait_for_snapshot(15.0) == first
                start_worker("w0", 10).communicate()
                report = handle.finish()
                assert one.wait_for_complete(15.0) == two.wait_for_complete(15.0)
        assert report.totals["ops"] == 39
    finally:
        handle.interrupt()


SLOW_VIEWER = """
import sys
from rlplane.metrics.subscriber import MetricsSnapshotSubscriber
with MetricsSnapshotSubscriber(sys.argv[1], conflate=False) as subscriber:
    print(subscriber.wait_for_snapshot(60) is not None, flush=True)
    final = subscriber.wait_for_complete(60)
    print(final.state.value if final else None, flush=True)
"""


def test_the_last_frame_reaches_a_viewer_that_was_stopped(
    handle: AggregatorHandle, start_worker: Callable[..., Worker]
) -> None:
    viewer = subprocess.Popen(
        [sys.executable, "-c", SLOW_VIEWER, handle.snapshot_address], stdout=subprocess.PIPE, text=True
    )
    assert viewer.stdout is not None
    assert viewer.stdout.readline().strip() == "True"
    viewer.send_signal(signal.SIGSTOP)
    try:
        start_worker("w0", 50).communicate()
        seq = latest(handle).seq
        wait_until(lambda: latest(handle).seq > seq + 20, "twenty more snapshots")
        assert latest(handle).total("ops") == 195, "the stopped viewer holds nobody else up"
        handle._session.record(SessionEvent("ENDED", 0))
        wait_until(lambda: handle.subscriber.complete is not None, "the final snapshot elsewhere")
        viewer.send_signal(signal.SIGCONT)
        assert viewer.communicate(timeout=300)[0].strip() == "COMPLETE"
    finally:
        if viewer.poll() is None:
            viewer.kill()
            viewer.communicate()


def test_a_final_file_of_another_run_is_not_taken_for_this_ones(
    tmp_path: Path, start_worker: Callable[..., Worker]
) -> None:
    with start_aggregator(out_dir=tmp_path, run_id="yesterday") as former:
        start_worker("w0", 10).communicate()
    assert former.finish().run_id == "yesterday"
    today = start_aggregator(out_dir=tmp_path, run_id="today", refresh_hz=20)
    start_worker("w1", 20).communicate()
    wait_until(lambda: today.subscriber.latest is not None and latest(today).total("ops") == 78, "ops")
    today.process.kill()  # It writes nothing: yesterday's file is still there.
    today.process.wait()
    report = today.finish()
    assert (report.run_id, report.source, report.complete) == ("today", "live", False)
    assert report.totals["ops"] == 78


def test_the_address_is_in_the_environment_and_the_run_is_listed_while_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(METRICS_ADDRESS_VARIABLE)
    assert METRICS_ADDRESS_VARIABLE not in os.environ
    with start_aggregator(out_dir=tmp_path) as handle:
        assert os.environ[METRICS_ADDRESS_VARIABLE] == handle.events_address
        (mine,) = [run for run in list_runs() if run.run_id == handle.run_id]
        assert (mine.snapshot_address, mine.out_dir) == (handle.snapshot_address, str(tmp_path))
        assert mine.pid == handle.process.pid
    assert METRICS_ADDRESS_VARIABLE not in os.environ
    assert handle.process.poll() == 0
    assert not [run for run in list_runs() if run.run_id == handle.run_id]
    assert handle.finish() is handle.finish()
    for address in (handle.events_address, handle.snapshot_address):
        assert not Path(address.removeprefix("ipc://")).exists()


def fail_in_a_run(out_dir: Path) -> None:
    with start_aggregator(out_dir=out_dir, run_id="run") as handle:
        handle.report_error("the loss is nan")
        raise RuntimeError("training failed")


def test_an_error_in_the_block_interrupts_the_run(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="training failed"):
        fail_in_a_run(tmp_path)
    report = find_report("run", final_path=tmp_path / FINAL_SNAPSHOT_NAME)
    assert report.state is SessionState.INTERRUPTED
    assert not report.complete
    assert report.totals["session_errors"] == 1
    assert any(line.message == "the loss is nan" for line in report.log)


def test_garbage_sent_to_the_aggregator_is_counted_and_stops_nothing(
    handle: AggregatorHandle, start_worker: Callable[..., Worker]
) -> None:
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.connect(handle.events_address)
        for frame in (b"", b"short", b"rlplane.events\0\0\xc1garbage", os.urandom(5000)):
            socket.send(frame)
    start_worker("w0", 20).communicate()
    report = handle.finish()
    assert report.complete
    assert report.totals["bad_frames"] == 4
    assert report.totals["ops"] == 78


def test_a_job_can_end_without_any_worker(handle: AggregatorHandle) -> None:
    report = handle.finish()
    assert report.complete
    assert report.workers == []


def test_an_aggregator_that_cannot_start_says_why(tmp_path: Path) -> None:
    with start_aggregator() as handle, pytest.raises(PlaneConnectionError, match="cannot bind"):
        start_aggregator(out_dir=tmp_path, events_address=f"ipc://{tmp_path}/no/such/directory")
    assert handle.finish().complete
    with pytest.raises(PlaneConnectionError, match="other machines"):
        start_aggregator(events_address="tcp://0.0.0.0:0")
    with pytest.raises(PlaneConnectionError, match="refresh_hz"):
        start_aggregator(refresh_hz=0)


def test_it_works_over_loopback_tcp_too(tmp_path: Path, start_worker: Callable[..., Worker]) -> None:
    with start_aggregator(
        out_dir=tmp_path, events_address="tcp://127.0.0.1:*", snapshot_address="tcp://127.0.0.1:*"
    ) as handle:
        assert handle.events_address.startswith("tcp://127.0.0.1:")
        start_worker("w0", 20).communicate()
    assert handle.finish().totals["ops"] == 78
