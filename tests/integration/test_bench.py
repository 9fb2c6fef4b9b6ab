"""The bench itself, run for real on a small scale. What it measures here is worth nothing, how it does is."""

import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from rlplane_benchmarks import Participant, Plan, participants_for, quick_plan, run_bench
from rlplane_benchmarks.results import BenchResult
from rlplane_benchmarks.targets import TARGETS
from rlplane_benchmarks.worker_process import WorkerError, WorkerProcess

PLANE_STORE = "rlplane_benchmarks.participants.rlplane_client:PlaneStore"
PARTS = {"ping", "data", "images", "loop", "wake", "claims", "orders", "clients"}
DATA_OPS = {
    "put",
    "get",
    "get+touch",
    "get drop",
    "scattered",
    "scattered+touch",
    "scattered drop",
    "clear",
}


PEERS = ["redis", "ray", "tq-simple", "tq-mooncake"]


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> tuple[BenchResult, str, Path]:
    """One run of the command: its result, what it printed, and where its files are."""
    directory = tmp_path_factory.mktemp("bench")
    json, plot = directory / "bench.json", directory / "bench.svg"
    done = subprocess.run(
        [sys.executable, "-m", "rlplane.cli", "bench", "--quick", "--json", json, "--plot", plot],
        env={**os.environ, "RLPLANE_BENCH_SCALE": "0.01"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # progress is for a terminal
    return msgspec.json.decode(json.read_bytes(), type=BenchResult), done.stdout, plot


@pytest.mark.slow
def test_the_command_measures_every_part_of_every_participant(
    command: tuple[BenchResult, str, Path],
) -> None:
    result, _, _ = command
    assert (result.schema, result.schema_version, result.quick) == ("rlplane.bench", 2, True)
    assert {series.part for series in result.series} == PARTS
    for workload in result.workloads:
        is_images = workload.startswith("images")
        for participant in ("rlplane",) if is_images else ("copy", "copy-1", "rlplane"):
            ops = {s.op for s in result.series if (s.workload, s.participant) == (workload, participant)}
            held = {"held"} if workload in ("images", "images-shared") else set()
            assert ops == DATA_OPS | held, (workload, participant)
    # In so short a time a busy machine may end no cycle of the clients.
    always = [series for series in result.series if series.op != "clear" and series.part != "clients"]
    assert all(value > 0 for series in always for value in series.values)
    assert any(value > 0 for series in result.series if series.part == "clients" for value in series.values)
    shared = result.find("images-shared", "rlplane", "held")
    assert shared is not None
    assert 1 / 8 < shared.median < 1 / 6
    assert result.machine.cores > 0
    assert result.machine.torch_threads > 0
    assert result.machine.memory_bytes > 0


@pytest.mark.slow
def test_the_command_checks_every_read_and_finds_them_right(command: tuple[BenchResult, str, Path]) -> None:
    result, printed, _ = command
    assert result.right
    reads = {check.participant: check.reads for check in result.checks}
    assert all(reads[name] > 0 for name in ("copy", "copy-1", "rlplane"))
    assert all(check.failure is None for check in result.checks)
    assert f"All {sum(reads.values()):,} reads" in printed


@pytest.mark.slow
def test_the_command_prints_tables_and_judges_every_target(command: tuple[BenchResult, str, Path]) -> None:
    result, printed, plot = command
    assert [target.what for target in result.targets] == [target.what for target in TARGETS]
    assert all(target.what in printed for target in result.targets)
    assert all(title in printed for title in result.workloads.values())
    assert "÷ copy" in printed
    measured = [target for target in result.targets if target.measured is not None]
    assert len(measured) == len([target for target in TARGETS if not target.without])  # all but the peers'
    assert ET.fromstring(plot.read_text()).tag.endswith("svg")


def tiny_plan() -> Plan:
    """Data alone, for participants that take part in nothing else."""
    plan = quick_plan().scaled(0.005)
    return replace(plan, grpo=plan.grpo[:1], wide=plan.wide[1:2], images=plan.images[:2], wakes=5, claims=3)


def run_with(*extra: Participant) -> BenchResult:
    chosen, _ = participants_for([])
    limits = [participant for participant in chosen if participant.name in ("copy", "zmq")]
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent))
        return run_bench(tiny_plan(), [*limits, *extra])


@pytest.fixture(scope="module")
def with_faulty_peers() -> BenchResult:
    """One run with peers each of which is faulty in another way."""
    faulty = {
        "wrong-byte": "WrongByte",
        "old-batch": "OldBatch",
        "dies": "Dies",
        "is-not-there": "NoSuchStore",
    }
    return run_with(
        *(Participant(name, "", f"bench_faulty_stores:{cls}", peer="faulty") for name, cls in faulty.items())
    )


def test_a_participant_that_returns_wrong_bytes_is_caught(with_faulty_peers: BenchResult) -> None:
    wrong = {check.participant: check.wrong for check in with_faulty_peers.checks}
    assert not with_faulty_peers.right
    assert wrong["copy"] == []
    assert any("grpo-13MB, get, round 0" in text and "token_mask" in text for text in wrong["wrong-byte"])
    assert any("wide-8" in text for text in wrong["wrong-byte"]) or len(wrong["wrong-byte"]) == 5
    assert wrong["old-batch"]
    assert not any("round 0" in text for text in wrong["old-batch"])


def test_a_peer_that_dies_drops_out_and_the_others_go_on(with_faulty_peers: BenchResult) -> None:
    result = with_faulty_peers
    failures = {check.participant: check.failure for check in result.checks}
    assert "ended with code 7" in (failures["dies"] or "")
    assert "NoSuchStore" in (failures["is-not-there"] or "")
    assert failures["copy"] is None
    assert result.find("wide-8", "copy", "put") is not None
    assert any("dies dropped out" in note for note in result.notes)


def test_without_its_limit_or_the_engine_there_is_no_run() -> None:
    with pytest.raises(WorkerError, match="code 7"):
        run_with(Participant("dies", "", "bench_faulty_stores:Dies"))


def test_a_worker_process_says_which_command_failed_and_why() -> None:
    worker = WorkerProcess("a worker")
    try:
        with pytest.raises(WorkerError, match="a worker: load failed: ModuleNotFoundError"):
            worker.call("load", "no_such_module:Store")
        assert isinstance(worker.call("torch")[0], str)  # and goes on
    finally:
        worker.close()


def test_worker_processes_leave_the_planes_of_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plane that the user runs is in the environment; a bench that joined it would write into it."""
    monkeypatch.setenv("RLPLANE_CONTROLLER_ADDRESS", "shm:///nowhere")
    monkeypatch.setenv("RLPLANE_BACKEND", "memory")
    worker = WorkerProcess("a worker")
    try:
        link = worker.call("open", PLANE_STORE, "producer", {})
        assert link["controller_address"] not in (None, "shm:///nowhere")
    finally:
        worker.close()


def is_gone(path: str) -> bool:
    deadline = time.monotonic() + 60
    while os.path.exists(path) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not os.path.exists(path)


def test_a_worker_process_whose_bench_has_died_ends_its_plane() -> None:
    script = """
import os
from rlplane_benchmarks.worker_process import WorkerProcess
worker = WorkerProcess("a worker")
print(worker.call("open", "PLANE_STORE", "producer", {})["controller_address"])
os._exit(1)
""".replace("PLANE_STORE", PLANE_STORE)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert is_gone(done.stdout.strip().removeprefix("shm://"))


def test_a_worker_process_that_is_told_to_end_ends_its_server_and_removes_its_files() -> None:
    worker = WorkerProcess("a worker")
    path = worker.call("open", "rlplane_benchmarks.participants.redis_store:RedisStore", "producer", {})[
        "path"
    ]
    assert os.path.exists(path)
    worker._process.terminate()
    assert is_gone(os.path.dirname(path))
    worker.close()


@pytest.fixture(scope="module")
def with_peers() -> BenchResult:
    """One run with all peers, in the smallest form that takes them through everything."""
    chosen, _ = participants_for(PEERS)
    chosen = [participant for participant in chosen if participant.name not in ("copy-1", "rlplane")]
    return run_bench(replace(tiny_plan(), clients=(1, 2), resident=(128, 256)), chosen)


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.parametrize("peer", PEERS)
def test_a_peer_takes_part_through_its_own_api_and_returns_the_right_bytes(
    with_peers: BenchResult, peer: str
) -> None:
    limits = [p for p in participants_for([])[0] if p.name not in ("copy-1", "rlplane")]
    peers = [participant for participant in participants_for([peer])[0] if participant.peer is not None]
    assert peers
    checks = {check.participant: check for check in with_peers.checks}
    for participant in [*limits, *peers]:
        check = checks[participant.name]
        assert check.failure is None
        assert check.right, check.wrong
    for participant in peers:
        measured = {s.part for s in with_peers.series if s.participant == participant.name}
        assert measured == set(participant.parts)
