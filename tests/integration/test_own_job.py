"""A job that only says ``observability: {enabled: true}`` is seen: from its own processes, by top, dash and
report."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from tests.warm_workers import run_warm

import rlplane
from rlplane.metrics.discovery import RunInfo, list_runs
from rlplane.metrics.event_publisher import METRICS_ADDRESS_VARIABLE
from rlplane.metrics.subscriber import MetricsSnapshotSubscriber
from rlplane.viewing.feed import read_run

pytestmark = pytest.mark.slow
ENABLED = {"observability": {"enabled": True, "callback": print}}


@pytest.fixture(autouse=True)
def in_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(METRICS_ADDRESS_VARIABLE)
    monkeypatch.chdir(tmp_path)


def run_of(plane: str | None) -> RunInfo:
    (run,) = [run for run in list_runs() if run.plane and run.plane == plane]
    return run


WORKER = """
import sys, torch, rlplane
from tensordict import TensorDict

role, *address = sys.argv[1:]
overrides = {"observability": {"enabled": True, "role": role}, "controller_address": (address or [None])[0]}
with rlplane.build_data_plane_client(rlplane.load_config("shm", overrides), bootstrap=False) as client:
    ids = [f"{role}-{number}" for number in range(4)]
    client.put_samples(ids, "p", TensorDict({"x": torch.zeros(4, 2)}, [4]))
"""


def run_worker(*arguments: str, inherits: bool) -> int:
    hidden = () if inherits else (METRICS_ADDRESS_VARIABLE, "RLPLANE_CONTROLLER_ADDRESS")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    return run_warm([sys.executable, "-c", WORKER, *arguments], env=environment).returncode


def test_the_bootstrap_client_starts_an_aggregator_that_workers_find_and_ends_it(tmp_path: Path) -> None:
    with rlplane.build_data_plane_client(rlplane.load_config("shm", ENABLED)) as client:
        client.register_partition("p", ["x"], 8, ["train"])
        address = client.controller_address  # type: ignore[attr-defined]
        run = run_of(address)
        assert not run.remote_address  # On one machine, no port is opened.
        assert run_worker("child", inherits=True) == 0
        assert run_worker("stranger", address, inherits=False) == 0
        with MetricsSnapshotSubscriber(run.snapshot_address) as subscriber:
            live = subscriber.wait_for_snapshot(timeout=20.0)
        assert live is not None and live.run_id == run.run_id
    assert METRICS_ADDRESS_VARIABLE not in os.environ
    assert run.run_id not in [other.run_id for other in list_runs()]
    final = read_run(tmp_path / "runs" / run.run_id)
    assert final.state.value == "COMPLETE"
    assert {"child", "stranger"} <= {worker.role for worker in final.workers}
    (part,) = final.partitions
    assert (part.partition, part.written, part.tracked) == ("p", 8, True)


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rlplane.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_top_and_report_find_the_run_and_say_which_line_to_add_when_there_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Other tests of this machine have runs too. (The path of a socket has to be short.)
    runtime = tempfile.TemporaryDirectory(prefix="own")
    monkeypatch.setenv("XDG_RUNTIME_DIR", runtime.name)
    monkeypatch.setenv("RAY_ADDRESS", "local")  # and clusters
    for arguments in (("top", "--json", "--wait", "0.1"), ("report",)):
        done = command(*arguments)
        assert done.returncode == 3 and '"observability": {"enabled": True}' in done.stderr
    with rlplane.build_data_plane_client(rlplane.load_config("local", ENABLED)) as client:
        client.register_partition("p", ["x"], 8, ["train"])
        found = json.loads(command("top", "--json", "--wait", "30").stdout)
        (run,) = list_runs()
        assert found["snapshot"]["run_id"] == run.run_id
    assert f"Run {run.run_id}: COMPLETE" in command("report").stdout
    runtime.cleanup()


@pytest.mark.parametrize("kind", ["blocking", "asyncio"])
def test_a_job_that_fails_says_so_in_its_run(tmp_path: Path, kind: str) -> None:
    cfg = rlplane.load_config("local", ENABLED)

    def train() -> None:
        with rlplane.build_data_plane_client(cfg):
            raise ValueError("the loss is not a number")

    async def train_async() -> None:
        async with rlplane.build_async_data_plane_client(cfg):
            raise ValueError("the loss is not a number")

    with pytest.raises(ValueError, match="the loss"):
        train() if kind == "blocking" else asyncio.run(train_async())
    (directory,) = (tmp_path / "runs").iterdir()
    told = "the job ended with ValueError: the loss is not a number"
    assert told in [line.message for line in read_run(directory).log]
    assert told in command("report", str(directory)).stdout


def test_an_aggregator_can_be_switched_off(tmp_path: Path) -> None:
    cfg = rlplane.load_config("local", {**ENABLED, "observability.metrics_address": "off"})
    with rlplane.build_data_plane_client(cfg) as client:
        client.register_partition("p", ["x"], 8, ["train"])
        assert METRICS_ADDRESS_VARIABLE not in os.environ
    assert not (tmp_path / "runs").exists()


def test_a_job_goes_on_when_no_aggregator_can_be_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "rlplane").write_text("not a directory")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with rlplane.build_data_plane_client(rlplane.load_config("local", ENABLED)) as client:
        client.register_partition("p", ["x"], 8, ["train"])
        assert client.list_sample_ids("p") == []
    assert "no aggregator could start" in caplog.text


def test_what_the_plane_evicts_does_not_count_as_never_cleared(tmp_path: Path) -> None:
    with rlplane.build_data_plane_client(rlplane.load_config("local", ENABLED)) as client:
        flow = rlplane.FlowPolicy.windowed(0)
        client.register_partition("p", ["x"], 8, ["train"], flow=flow)
        ids = ["a", "b", "c"]
        versions = [{"weight_version": version} for version in (0, 0, 1)]
        client.put_samples(ids, "p", TensorDict({"x": torch.zeros(3)}, [3]), versions)
        client.advance_version("p", 1)
        assert client.list_sample_ids("p") == ["c"]
    (directory,) = (tmp_path / "runs").iterdir()
    final = read_run(directory)
    assert final.n_never_cleared == 1
    assert [part.never_cleared for part in final.partitions] == [1]
