"""The main job, for a few steps on each engine, and interrupted, resumed, attacked and killed."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.integration.demo_process import DemoProcess

pytestmark = pytest.mark.timeout(900)

Start = Callable[..., DemoProcess]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[DemoProcess] = []

    def begin(*options: str, **keys: object) -> DemoProcess:
        started.append(DemoProcess(tmp_path, *options, **keys))  # type: ignore[arg-type]
        return started[-1]

    yield begin
    for demo in started:
        demo.end()


def check_complete(demo: DemoProcess, steps: int) -> Path:
    """It ended well, said so truly, and left its results and nothing else."""
    code, summary = demo.finish()
    assert code == 0, demo.stderr
    assert (summary["state"], summary["steps"]) == ("COMPLETE", steps)
    books = summary["books"]
    assert books["balanced"] and not books["lost"] and not books["unknown"] and books["left"] == 0
    assert sum(books["cleared"].values()) == books["written"] == books["written_by_plane"]
    assert books["cleared"]["trained"] > 0
    demo.wait_until_nothing_is_left()
    run_dir = Path(summary["run_dir"])
    report = json.loads((run_dir / "report.json").read_text())
    assert report["state"] == "COMPLETE" and report["complete"]
    assert "Mean reward" in (run_dir / "report.html").read_text()
    assert (run_dir / "reward.svg").read_text().startswith("<svg xmlns=")
    assert "nothing was lost" in (run_dir / "report.txt").read_text()
    trace = json.loads((run_dir / "trace.json").read_text())
    assert {event["name"] for event in trace["traceEvents"] if event["ph"] == "X"} >= {"put", "claim_meta"}
    steps_said = [json.loads(line)["step"] for line in (run_dir / "steps.jsonl").read_text().splitlines()]
    assert steps_said == list(range(1, steps + 1))
    return run_dir


def test_it_runs_in_one_process_with_threads(start: Start) -> None:
    check_complete(start("--backend", "memory", "--steps", "3", "--dp-world", "2"), 3)


def test_it_runs_in_processes_over_shared_memory(start: Start) -> None:
    demo = start("--steps", "4", "--max-staleness", "1")
    run_dir = check_complete(demo, 4)
    workers = {path.stem for path in run_dir.glob("*-*.log")}
    assert workers == {"train-0", "rollout-0", "rollout-1", "score-0"}
    report = json.loads((run_dir / "report.json").read_text())
    assert workers <= {worker.get("role") for worker in report["workers"]}
    trace = json.loads((run_dir / "trace.json").read_text())
    processes = [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"]
    assert workers <= {name.partition(" · ")[0] for name in processes}
    assert "rlplane top" in demo.stderr and "rlplane dash" in demo.stderr
    dropped = [json.loads(line) for line in (run_dir / "dropped.jsonl").read_text().splitlines()]
    summary = json.loads((run_dir / "summary.json").read_text())
    for reason in ("too old", "no reward variance"):
        groups = [line for line in dropped if line["reason"] == reason]
        assert 8 * len(groups) == summary["books"]["cleared"][reason]


@pytest.mark.cluster
@pytest.mark.parametrize("backend", ["simple", "mooncake_cpu"])
def test_it_runs_on_ray_with_the_same_code(start: Start, ray_cluster: str, backend: str) -> None:
    environment = {"RAY_ADDRESS": ray_cluster, "RLPLANE_TRANSFER_QUEUE__NODE_IP": "127.0.0.2"}
    check_complete(
        start("--impl", "transfer_queue", "--backend", backend, "--steps", "3", environment=environment), 3
    )


def test_ctrl_c_ends_it_in_order_and_it_goes_on_with_the_samples_in_flight(start: Start) -> None:
    demo = start("--steps", "8")
    demo.wait_for("step    2/8")
    demo.ctrl_c()
    code, summary = demo.finish()
    assert code == 130, demo.stderr
    assert summary["state"] == "INTERRUPTED" and summary["resumable"]
    assert summary["books"]["balanced"] and summary["books"]["kept"] > 0
    demo.wait_until_nothing_is_left()
    run_dir = Path(summary["run_dir"])
    assert json.loads((run_dir / "report.json").read_text())["state"] == "INTERRUPTED"
    assert "INTERRUPTED" in (run_dir / "report.txt").read_text()
    check_complete(start("--resume", str(run_dir)), 8)
    assert start("--resume", str(run_dir)).finish()[0] == 2


def test_ctrl_c_before_the_first_step_leaves_nothing(start: Start) -> None:
    demo = start("--steps", "8")
    demo.wait_for("rlplane top")
    demo.ctrl_c()
    code, summary = demo.finish()
    assert code == 130, demo.stderr
    assert summary["state"] == "INTERRUPTED"
    demo.wait_until_nothing_is_left()


def test_workers_that_are_killed_are_replaced_and_no_sample_is_lost(start: Start) -> None:
    demo = start("--steps", "12", "--chaos", "--chaos-every", "3")
    run_dir = check_complete(demo, 12)
    deaths = json.loads((run_dir / "summary.json").read_text())["deaths"]
    assert deaths
    for death in deaths:
        assert f"killed {death['worker']} (process {death['pid']})" in demo.stderr
        assert death["worker"] in (run_dir / "report.txt").read_text()
        assert (run_dir / f"{death['replaced_by']}.log").exists()


def test_a_trainer_that_dies_ends_the_run_as_failed_and_leaves_nothing(start: Start) -> None:
    demo = start("--steps", "50")
    demo.wait_for("step    5/50")
    os.kill(child_that_publishes_weights(demo), signal.SIGKILL)
    code, summary = demo.finish()
    assert code == 4 and not summary
    assert "train-0 ended with exit code -9" in demo.stderr
    demo.wait_until_nothing_is_left()


def child_that_publishes_weights(demo: DemoProcess) -> int:
    """The first worker that was started."""
    return min(pid for pid, command in demo.processes().items() if "rlplane.cli.demo.workers" in command)


def test_when_the_job_itself_is_killed_everything_else_ends_too(start: Start) -> None:
    demo = start("--steps", "50")
    demo.wait_for("step    5/50")
    assert len(demo.processes()) >= 6
    demo.process.kill()
    demo.process.wait()
    demo.wait_until_nothing_is_left()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--chaos", "--backend", "memory"], "has threads"),
        (["--impl", "local", "--backend", "simple"], "--backend shm or memory, not simple"),
        (["--resume", "nowhere"], "nowhere cannot be resumed"),
        (["--steps", "0"], "steps"),
    ],
)
def test_what_cannot_run_is_refused_at_once(start: Start, options: list[str], message: str) -> None:
    demo = start(*options)
    code, _ = demo.finish()
    assert code == 2
    assert message in demo.stderr


@pytest.mark.slow
def test_it_learns(start: Start) -> None:
    began = time.monotonic()
    demo = start("--seed", "1", "--steps", "70")
    code, summary = demo.finish()
    assert code == 0, demo.stderr
    assert summary["reward_first"] < 0.3
    assert summary["reward_last"] >= 0.9
    print(f"{summary['training_seconds']:.0f} s of {time.monotonic() - began:.0f} s")
