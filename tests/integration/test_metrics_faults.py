"""What may happen to an aggregator: signals at every stage, a disk that fails, a parent that is gone."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from rlplane.metrics.discovery import RunInfo, list_runs
from rlplane.metrics.event_publisher import EventPublisherService
from rlplane.metrics.events import OpRecord, SampleEvent, SessionEvent
from rlplane.metrics.publisher import FINAL_SNAPSHOT_NAME, read_final_snapshot
from rlplane.metrics.snapshot import MetricsSnapshot, SessionState
from rlplane.metrics.subscriber import MetricsSnapshotSubscriber
from rlplane.report import find_report

MODULE = ["-m", "rlplane.metrics.aggregator"]


def wait_until(done: Callable[[], bool], what: str, timeout: float = 60.0) -> None:
    deadline = time.monotonic() + timeout
    while not done():
        assert time.monotonic() < deadline, f"{what} did not happen within {timeout} s"
        time.sleep(0.01)


class Aggregator:
    """A real aggregator process with a sender and a viewer."""

    def __init__(self, out_dir: Path, program: list[str], options: list[str], prefix: list[str]) -> None:
        self.out_dir = out_dir
        read_end, write_end = os.pipe()
        self.process = subprocess.Popen(
            [
                *prefix,
                sys.executable,
                *program,
                *("--out", str(out_dir), "--run-id", "run", "--refresh-hz", "20"),
                *("--ready-fd", str(write_end)),
                *options,
            ],
            pass_fds=[write_end],
        )
        os.close(write_end)
        with os.fdopen(read_end, "rb") as ready:
            self.info = msgspec.json.decode(ready.readline(), type=RunInfo)
        self.sender = EventPublisherService(self.info.events_address, "w0")
        self.viewer = MetricsSnapshotSubscriber(self.info.snapshot_address)

    @property
    def final_path(self) -> Path:
        return self.out_dir / FINAL_SNAPSHOT_NAME

    def final(self) -> MetricsSnapshot:
        """The final file, once the process has ended in order."""
        assert self.process.wait(60) == 0
        assert [file.name for file in self.out_dir.iterdir()] == [FINAL_SNAPSHOT_NAME], "no temporary file"
        return read_final_snapshot(self.final_path)

    def wait_for(self, done: Callable[[MetricsSnapshot], bool], what: str) -> None:
        wait_until(lambda: self.viewer.latest is not None and done(self.viewer.latest), what)

    def session(self, kind: str) -> None:
        self.sender.record(SessionEvent(kind, time.time_ns()))  # type: ignore[arg-type]

    def operations(self, count: int) -> None:
        for number in range(count):
            self.sender.record(OpRecord("put", "p", 1, 1, number + 1, 0))

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.sender.close(timeout=0.1)
        self.viewer.close()


Start = Callable[..., Aggregator]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Aggregator] = []

    def make(
        *options: str,
        program: list[str] | None = None,
        out_dir: Path | None = None,
        prefix: list[str] | None = None,
    ) -> Aggregator:
        made = Aggregator(out_dir or tmp_path / "out", program or MODULE, list(options), prefix or [])
        started.append(made)
        return made

    yield make
    for aggregator in started:
        aggregator.close()


# SIGTERM at every stage.


def test_sigterm_before_the_run_started_leaves_an_interrupted_file(start: Start) -> None:
    aggregator = start()
    aggregator.wait_for(lambda s: s.state is SessionState.INITIALIZE, "INITIALIZE")
    aggregator.process.terminate()
    assert aggregator.final().state is SessionState.INTERRUPTED
    final = aggregator.viewer.wait_for_complete(30.0)
    assert final is not None
    assert final.state is SessionState.INTERRUPTED


def test_sigterm_while_live_keeps_every_event_that_was_sent(start: Start) -> None:
    aggregator = start()
    aggregator.session("STARTED")
    aggregator.operations(5000)
    aggregator.wait_for(lambda s: s.state is SessionState.LIVE and s.total("ops") == 5000, "5000 ops")
    aggregator.process.terminate()
    final = aggregator.final()
    assert final.state is SessionState.INTERRUPTED
    assert final.total("ops") == 5000
    (latency,) = final.series("op_latency")
    assert latency.exact
    assert latency.percentiles["p50"] == 2500
    assert not find_report("run", final_path=aggregator.final_path).complete


def test_sigterm_while_draining_leaves_an_interrupted_file(start: Start, tmp_path: Path) -> None:
    aggregator = start("--drain-timeout", "0", program=[str(script(tmp_path, SLOW_TRIGGER))])
    aggregator.sender.record(SampleEvent(kind="written", partition_id="p", sample_ids=["a"], time_ns=1))
    aggregator.session("ENDED")
    aggregator.wait_for(lambda s: s.state is SessionState.DRAINING, "DRAINING")
    aggregator.process.terminate()
    final = aggregator.final()
    assert final.state is SessionState.INTERRUPTED
    assert final.n_pending_tasks == 1


@pytest.mark.parametrize("moment", ["before the file is whole", "after the file is in place"])
def test_sigterm_in_the_middle_of_the_end_still_leaves_a_whole_file(
    start: Start, tmp_path: Path, moment: str
) -> None:
    patched = "fsync" if moment == "before the file is whole" else "replace"
    aggregator = start(program=[str(script(tmp_path, SIGTERM_IN_FINAL.format(patched=patched)))])
    aggregator.operations(10)
    aggregator.session("ENDED")
    final = aggregator.final()
    assert final.state is SessionState.COMPLETE
    assert final.total("ops") == 10
    assert aggregator.viewer.wait_for_complete(30.0) is not None


def test_sigterm_twice_is_like_once(start: Start) -> None:
    aggregator = start()
    aggregator.operations(10)
    aggregator.wait_for(lambda s: s.total("ops") == 10, "ops")
    aggregator.process.terminate()
    aggregator.process.terminate()
    assert aggregator.final().state is SessionState.INTERRUPTED


def script(directory: Path, text: str) -> Path:
    """An aggregator with a fault built in."""
    path = directory / "faulty.py"
    path.write_text(text)
    return path


SLOW_TRIGGER = """
import asyncio, sys
from rlplane.metrics import aggregator

class Service(aggregator.MetricsAggregatorService):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        async def for_ever(step):
            await asyncio.Event().wait()
        self.run_state.table.add_trigger("written", for_ever)

aggregator.MetricsAggregatorService = Service
sys.exit(aggregator.main())
"""

SIGTERM_IN_FINAL = """
import os, signal, sys
from rlplane.metrics import aggregator, publisher

real = os.{patched}
write = publisher.write_atomically

def interrupted(*args):
    result = real(*args)
    os.kill(os.getpid(), signal.SIGTERM)
    return result

def patched_write(path, content):
    if path.name == publisher.FINAL_SNAPSHOT_NAME:
        os.{patched} = interrupted
    write(path, content)

publisher.write_atomically = patched_write
sys.exit(aggregator.main())
"""


# The drain.


def test_a_drain_that_takes_too_long_ends_complete_with_what_was_pending(
    start: Start, tmp_path: Path
) -> None:
    aggregator = start("--drain-timeout", "0.2", program=[str(script(tmp_path, SLOW_TRIGGER))])
    aggregator.sender.record(SampleEvent(kind="written", partition_id="p", sample_ids=["a"], time_ns=1))
    aggregator.session("ENDED")
    final = aggregator.final()
    assert (final.state, final.n_pending_tasks) == (SessionState.COMPLETE, 1)
    report = find_report("run", final_path=aggregator.final_path)
    assert not report.complete
    assert any("1 tasks pending" in warning for warning in report.warnings)


def test_events_that_arrive_after_the_end_was_announced_still_count(start: Start) -> None:
    aggregator = start()
    other = EventPublisherService(aggregator.info.events_address, "late")
    try:
        aggregator.session("ENDED")
        aggregator.wait_for(lambda s: s.state is SessionState.DRAINING, "DRAINING")
        other.record(OpRecord("put", "p", 1, 1, 1, 0))
        other.close(timeout=30.0)
    finally:
        other.close()
    final = aggregator.final()
    assert (final.state, final.total("ops")) == (SessionState.COMPLETE, 1)


# Ctrl-C, and a parent that is gone.


JOB = """
import subprocess, sys, time, os
from rlplane.metrics.events import OpRecord, SessionEvent
from rlplane.metrics.event_publisher import EventPublisherService

out = sys.argv[1]
address = f"ipc://{out}.sock"
child = subprocess.Popen([sys.executable, "-m", "rlplane.metrics.aggregator", "--out", out, "--run-id", "run",
                          "--events-address", address, "--parent-pid", str(os.getpid())])
sender = EventPublisherService(address, "job")
try:
    for number in range(100):
        sender.record(OpRecord("put", "p", 1, 1, 1, 0))
    while not any(name.startswith("run-") for name in os.listdir(os.environ["XDG_RUNTIME_DIR"] + "/rlplane")):
        time.sleep(0.01)
    print(child.pid, flush=True)
    time.sleep(600)
except KeyboardInterrupt:
    for number in range(100):
        sender.record(OpRecord("clear", "p", 1, 1, 1, 0))
    sender.record(SessionEvent("ENDED", time.time_ns()))
    sender.close(timeout=30)
    sys.exit(child.wait())
"""


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A short one: it is where Unix sockets are made, whose paths have little room."""
    with tempfile.TemporaryDirectory(prefix="rlp-") as path:
        yield Path(path)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    (tmp_path / "runtime" / "rlplane").mkdir(parents=True, mode=0o700)
    (tmp_path / "runtime" / "rlplane").chmod(0o700)
    process = subprocess.Popen(
        [sys.executable, "-c", JOB, str(tmp_path / "out")],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path / "runtime")},
    )
    yield process
    if process.poll() is None:
        process.kill()
    process.communicate()


def test_ctrl_c_to_the_whole_group_loses_no_event(job: subprocess.Popen[str], tmp_path: Path) -> None:
    assert job.stdout is not None
    job.stdout.readline()
    os.killpg(job.pid, signal.SIGINT)
    assert job.wait(60) == 0
    final = read_final_snapshot(tmp_path / "out" / FINAL_SNAPSHOT_NAME)
    assert final.state is SessionState.COMPLETE
    assert (final.total("ops", op="put"), final.total("ops", op="clear")) == (100, 100)


def test_an_aggregator_ends_with_its_parent_and_keeps_the_figures(
    job: subprocess.Popen[str], tmp_path: Path
) -> None:
    assert job.stdout is not None
    child = int(job.stdout.readline())
    with MetricsSnapshotSubscriber(info_of(tmp_path).snapshot_address) as viewer:
        wait_until(lambda: viewer.latest is not None and viewer.latest.total("ops") == 100, "100 ops")
        job.kill()  # It has no chance to say anything.
        final = viewer.wait_for_complete(30.0)
    assert final is not None
    wait_until(lambda: not Path(f"/proc/{child}").exists() or is_zombie(child), "the end of the aggregator")
    stored = read_final_snapshot(tmp_path / "out" / FINAL_SNAPSHOT_NAME)
    assert (stored.state, stored.total("ops")) == (SessionState.INTERRUPTED, 100)
    assert any("is gone" in line.message for line in stored.log)


def info_of(tmp_path: Path) -> RunInfo:
    (path,) = (tmp_path / "runtime" / "rlplane").glob("run-*.json")
    return msgspec.json.decode(path.read_bytes(), type=RunInfo)


def is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


# Disks.


def test_a_disk_that_takes_nothing_more_does_not_stop_the_publication(start: Start, tmp_path: Path) -> None:
    aggregator = start("--jsonl", str(tmp_path / "out" / "events.jsonl"), "--max-values-in-memory", "10")
    # Every write to a file fails from here on, as on a full disk: events, spilled values, the final snapshot.
    resource.prlimit(aggregator.process.pid, resource.RLIMIT_FSIZE, (0, 0))
    aggregator.operations(1000)
    aggregator.session("ENDED")
    aggregator.sender.close()
    final = aggregator.viewer.wait_for_complete(60.0)
    assert aggregator.process.wait(60) == 0
    assert final is not None
    assert (final.state, final.total("ops")) == (SessionState.COMPLETE, 1000)
    assert not final.exact, "the values could not be spilled"
    assert [file.name for file in aggregator.out_dir.iterdir()] == ["events.jsonl"]
    report = find_report("run", subscriber=aggregator.viewer, final_path=aggregator.final_path)
    assert (report.source, report.complete) == ("published", True)
    assert any("histogram" in warning for warning in report.warnings)


def can_mount() -> bool:
    return (
        subprocess.run(
            ["unshare", "-rm", "mount", "-t", "tmpfs", "x", "/mnt"], capture_output=True
        ).returncode
        == 0
    )


@pytest.mark.skipif(not can_mount(), reason="needs a mount namespace; the test above makes the same fault")
def test_a_full_filesystem_does_not_stop_the_publication(start: Start, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    mount = f'mount -t tmpfs -o size=4k x {out} && dd if=/dev/zero of={out}/full bs=4k 2>/dev/null; exec "$@"'
    aggregator = start(prefix=["unshare", "-rm", "sh", "-c", mount, "sh"])
    aggregator.operations(1000)
    aggregator.session("ENDED")
    final = aggregator.viewer.wait_for_complete(60.0)
    assert aggregator.process.wait(60) == 0
    assert final is not None
    assert (final.state, final.exact, final.total("ops")) == (SessionState.COMPLETE, True, 1000)


def test_a_directory_that_cannot_be_written_does_not_stop_the_publication(start: Start) -> None:
    # Nobody, root included, can make a file there.
    aggregator = start("--jsonl", "/proc/self/events.jsonl", out_dir=Path("/proc/self"))
    aggregator.operations(100)
    aggregator.session("ENDED")
    final = aggregator.viewer.wait_for_complete(60.0)
    assert aggregator.process.wait(60) == 0
    assert final is not None
    assert (final.state, final.exact, final.total("ops")) == (SessionState.COMPLETE, True, 100)
    assert any("the events are not recorded" in line.message for line in final.log)


def test_values_beyond_memory_are_spilled_and_the_report_is_still_exact(start: Start) -> None:
    aggregator = start("--max-values-in-memory", "1000")
    aggregator.operations(20_000)
    aggregator.session("ENDED")
    final = aggregator.final()
    (latency,) = final.series("op_latency")
    assert final.exact
    assert (latency.count, latency.percentiles["p50"], latency.percentiles["p99.9"]) == (
        20_000,
        10_000,
        19_980,
    )


# A crash.


def test_an_aggregator_that_is_started_again_gets_the_workers_back(start: Start, tmp_path: Path) -> None:
    address = ["--events-address", f"ipc://{tmp_path}/e", "--snapshot-address", f"ipc://{tmp_path}/s"]
    former = start(*address)
    former.operations(10)
    former.wait_for(lambda s: s.total("ops") == 10, "10 ops")
    former.process.kill()
    former.process.wait()
    assert former.info.run_id not in [run.run_id for run in list_runs() if run.pid == former.process.pid]
    again = start(*address)
    former.operations(20)  # The same worker, which noticed nothing.
    again.wait_for(lambda s: s.total("ops") >= 20, "20 ops")
    again.session("ENDED")
    assert again.final().total("ops") >= 20
    assert former.viewer.wait_for_complete(30.0) is not None, "a viewer that stayed sees the new one's end"
