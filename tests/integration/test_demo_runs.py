"""The main job, for a few steps on each engine, and interrupted, resumed, attacked and killed."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.demo_process import DemoProcess

from rlplane.demo.stages import prompt_number

pytestmark = pytest.mark.timeout(1500)

Start = Callable[..., DemoProcess]

# Where it does not matter what is learned: short steps; and more of them than a test needs.
SHORT = ("--groups-per-step", "8")
LONG_RUN = (*SHORT, "--steps", "400")


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
    assert report["state"] == "COMPLETE"
    # What a killed worker measured last is missing, and the report says so.
    assert report["complete"] != bool(summary["deaths"])
    assert "Mean reward" in (run_dir / "report.html").read_text()
    assert (run_dir / "reward.svg").read_text().startswith("<svg xmlns=")
    assert "nothing was lost" in (run_dir / "report.txt").read_text()
    trace = json.loads((run_dir / "trace.json").read_text())
    operations = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {operation["name"] for operation in operations} >= {"put", "claim_meta"}
    by_the_job = [op["args"] for op in operations if op["args"].get("task") == "watch"]
    assert by_the_job and not [claim for claim in by_the_job if claim["status"] == "timeout"]
    check_prompts_and_bound(run_dir, steps, summary)
    return run_dir


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def check_prompts_and_bound(run_dir: Path, steps: int, summary: dict[str, Any]) -> None:
    """Every prompt that was issued was trained, dropped because it teaches nothing, or is left: once. And
    nothing that was trained was too old, unless the policy is one that trains late groups."""
    said = lines_of(run_dir / "steps.jsonl")
    assert [line["step"] for line in said] == list(range(1, steps + 1))
    trained = [prompt_number(name) for line in said for name in line["groups"]]
    flat = [line for line in lines_of(run_dir / "dropped.jsonl") if line["reason"] == "no reward variance"]
    used = [*trained, *(prompt_number(line["group_of"]) for line in flat)]
    books = summary["books"]
    assert len(used) == len(set(used))
    assert 8 * len(used) == books["cleared"]["trained"] + books["cleared"]["no reward variance"]
    assert 8 * (books["prompts"] - len(used)) == books["cleared"]["left over at the end"]
    settings = json.loads((run_dir / "run.json").read_text())["settings"]
    if settings["policy"] in ("windowed", "in_order"):
        assert summary["late"] == 0 and all(line["oldest"] <= settings["max_staleness"] for line in said)


def test_it_runs_in_one_process_with_threads(start: Start) -> None:
    slow = ("--policy", "ready_first", "--slow-groups", "0.1")
    demo = start("--backend", "memory", "--steps", "3", "--dp-world", "2", *slow, *SHORT)
    run_dir = check_complete(demo, 3)
    # Prompts are admitted for steps, and nothing is thrown away.
    assert all(line["judged"] == 8 * 8 for line in lines_of(run_dir / "steps.jsonl"))
    assert not [line for line in lines_of(run_dir / "dropped.jsonl") if line["reason"] == "too old"]


def test_it_runs_in_processes_over_shared_memory(start: Start) -> None:
    demo = start("--steps", "4", "--max-staleness", "1", "--slow-groups", "0.1", *SHORT)
    run_dir = check_complete(demo, 4)
    workers = {path.stem for path in run_dir.glob("*-*.log")}
    assert workers == {"train-0", "rollout-0", "rollout-1", "score-0"}
    report = json.loads((run_dir / "report.json").read_text())
    assert workers <= {worker.get("role") for worker in report["workers"]}
    trace = json.loads((run_dir / "trace.json").read_text())
    processes = [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"]
    assert workers <= {name.partition(" · ")[0] for name in processes}
    assert "rlplane top" in demo.stderr and "rlplane dash" in demo.stderr
    dropped = lines_of(run_dir / "dropped.jsonl")
    summary = json.loads((run_dir / "summary.json").read_text())
    (stale,) = (
        series
        for series in report["series"]
        if series["name"] == "staleness" and series["labels"] == {"partition": "rollouts", "task": "train"}
    )
    assert (stale["count"], stale["mean"]) == (summary["claimed"], pytest.approx(summary["staleness"]))
    for reason in ("too old", "no reward variance"):
        groups = [line for line in dropped if line["reason"] == reason]
        assert 8 * len(groups) == summary["books"]["cleared"][reason]


@pytest.mark.cluster
@pytest.mark.parametrize("backend", ["simple", "mooncake_cpu"])
def test_it_runs_on_ray_with_the_same_code(start: Start, ray_cluster: str, backend: str) -> None:
    environment = {"RAY_ADDRESS": ray_cluster, "RLPLANE_TRANSFER_QUEUE__NODE_IP": "127.0.0.2"}
    options = ("--impl", "transfer_queue", "--backend", backend, "--steps", "3", *SHORT)
    check_complete(start(*options, environment=environment), 3)


def test_ctrl_c_ends_it_in_order_and_it_goes_on_with_the_samples_in_flight(start: Start) -> None:
    demo = start(*LONG_RUN, "--policy", "in_order", "--max-staleness", "1")
    demo.wait_for("step   10/400")
    demo.ctrl_c()
    code, summary = demo.finish()
    assert code == 130, demo.stderr
    assert summary["state"] == "INTERRUPTED" and summary["resumable"]
    assert summary["books"]["balanced"] and summary["books"]["kept"] > 0
    demo.wait_until_nothing_is_left()
    run_dir = Path(summary["run_dir"])
    first = json.loads((run_dir / "report.json").read_text())
    assert first["state"] == "INTERRUPTED"
    assert "INTERRUPTED" in (run_dir / "report.txt").read_text()
    steps = summary["steps"] + 3
    check_complete(start("--resume", str(run_dir), "--steps", str(steps)), steps)
    both = json.loads((run_dir / "report.json").read_text())
    assert (both["run_id"], both["started_ns"]) == (first["run_id"], first["started_ns"])
    assert both["elapsed_s"] > first["elapsed_s"]
    assert sum(point["seconds"] for point in both["timeline"]) == pytest.approx(both["elapsed_s"], rel=0.05)
    for name in ("ops", "op_bytes", "samples_written", "samples_cleared"):
        assert both["totals"][name] > first["totals"][name] > 0
    written = next(part["written"] for part in both["partitions"] if part["partition"] == "rollouts")
    assert written == json.loads((run_dir / "summary.json").read_text())["books"]["written"]
    assert start("--resume", str(run_dir)).finish()[0] == 2


def test_ctrl_c_before_the_first_step_leaves_nothing(start: Start) -> None:
    demo = start(*LONG_RUN)
    demo.wait_for("watch it from another terminal")
    demo.ctrl_c()
    code, summary = demo.finish()
    assert code == 130, demo.stderr
    assert summary["state"] == "INTERRUPTED"
    has_begun = summary["books"] is not None
    assert ("to go on: " if has_begun else "before the trainer had begun") in demo.stderr
    demo.wait_until_nothing_is_left()


def test_workers_that_are_killed_are_replaced_and_no_sample_is_lost(start: Start) -> None:
    demo = start(*SHORT, "--steps", "24", "--chaos", "--chaos-every", "0.5", "--policy", "weight_fifo")
    run_dir = check_complete(demo, 24)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["deaths"] and summary["service_deaths"]
    for death in summary["service_deaths"]:
        assert f"killed the control service (process {death['pid']})" in demo.stderr
    for death in summary["deaths"]:
        assert f"killed {death['worker']} (process {death['pid']})" in demo.stderr
        assert death["worker"] in (run_dir / "report.txt").read_text()
        assert (run_dir / f"{death['replaced_by']}.log").exists()


def test_a_trainer_that_dies_ends_the_run_as_failed_and_leaves_nothing(start: Start) -> None:
    demo = start(*LONG_RUN)
    demo.wait_for("step   10/400")
    os.kill(process_of("train-0", demo), signal.SIGKILL)
    code, summary = demo.finish()
    assert code == 4 and not summary
    assert "train-0 ended with exit code -9" in demo.stderr
    demo.wait_until_nothing_is_left()


def process_of(worker: str, demo: DemoProcess) -> int:
    """The process that writes the log of this worker."""
    (found,) = [
        pid for pid in demo.processes() if os.readlink(f"/proc/{pid}/fd/2").endswith(f"/{worker}.log")
    ]
    return found


def test_when_the_job_itself_is_killed_everything_else_ends_too(start: Start) -> None:
    demo = start(*LONG_RUN)
    demo.wait_for("step   10/400")
    # The job, the aggregator, the service, four workers and what they are forked from.
    assert len(demo.processes()) >= 8
    demo.process.kill()
    demo.process.wait()
    demo.wait_until_nothing_is_left()


def test_a_job_that_was_killed_as_a_whole_goes_on_with_every_prompt_and_within_the_bound(
    start: Start, tmp_path: Path
) -> None:
    how = ("--max-staleness", "1", "--slow-groups", "0.1", "--checkpoint-every", "0.5")
    demo = start(*LONG_RUN, *how)
    demo.wait_for("step   10/400")
    demo.kill_everything()
    (run_dir,) = [path.parent for path in tmp_path.glob("*/run.json")]
    # It says every tenth.
    steps = 13 + max(map(int, re.findall(r"step +(\d+)/400", demo.stderr)))
    check_complete(start("--resume", str(run_dir), "--steps", str(steps)), steps)


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
    demo = start("--seed", "1", "--letters", "4", "--groups-per-step", "32", "--steps", "80")
    code, summary = demo.finish()
    assert code == 0, demo.stderr
    assert summary["reward_first"] < 0.3
    assert summary["reward_last"] >= 0.9
    print(f"{summary['training_seconds']:.0f} s of {time.monotonic() - began:.0f} s")
