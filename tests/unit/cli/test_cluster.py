"""Looking for runs in a Ray cluster, where there is none. A real one is in ``test_two_nodes.py``."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlplane.cli import cluster
from rlplane.cli.cluster import ClusterRuns


def started(found: ClusterRuns) -> bool:
    return found._process is not None


@pytest.mark.parametrize("why", ["no ray", "local", "no raylet"])
def test_where_no_cluster_is_nothing_is_started(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if why == "no ray":
        monkeypatch.setitem(sys.modules, "ray", None)
        monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    elif why == "local":
        monkeypatch.setenv("RAY_ADDRESS", "local")
    else:
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
        monkeypatch.setattr(cluster, "_raylet_runs_here", lambda: False)
    with ClusterRuns() as found:
        assert found.wait_for_answer() == [] and found.where() == "on this machine"
        assert not started(found)


def test_an_address_where_nothing_answers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    with ClusterRuns() as found:
        assert found.wait_for_answer() == [] and not started(found)
        assert found.where().startswith(f"on this machine (Ray at {address} does not answer: ")


def test_a_node_of_ray_is_known_by_its_process(tmp_path: Path) -> None:
    raylet = tmp_path / "raylet"
    raylet.symlink_to("/bin/sleep")
    with subprocess.Popen([raylet, "600"]) as process:
        try:
            # A process gets its new name a moment after it is said to have started.
            deadline = time.monotonic() + 60
            while not cluster._raylet_runs_here():
                assert time.monotonic() < deadline
                time.sleep(0.001)
        finally:
            process.kill()


def test_what_the_child_says_last_is_told_to_people(monkeypatch: pytest.MonkeyPatch) -> None:
    says = """print('{"error": "its version is another"}')"""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(cluster, "_raylet_runs_here", lambda: True)
    monkeypatch.setattr(cluster, "_COMMAND", (sys.executable, "-c", says))
    with ClusterRuns() as found:
        assert found.wait_for_answer() == []
        assert found.where() == "on this machine (its Ray cluster cannot be asked: its version is another)"


def test_a_run_that_cannot_be_read_is_left_out_and_the_child_ends_with_us(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    says = (
        "import json, sys\n"
        "run = dict(run_id='r', pid=1, events_address='', snapshot_address='curve://x', started_ns=1)\n"
        "newer = {**run, 'run_id': 'new', 'started_ns': 2}\n"
        "runs = [run, {**run, 'snapshot_address': ''}, {'run_id': 7}, newer]\n"
        "print(json.dumps({'runs': [json.dumps(run) for run in runs]}), flush=True)\n"
        "sys.stdin.read()"
    )
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(cluster, "_raylet_runs_here", lambda: True)
    monkeypatch.setattr(cluster, "_COMMAND", (sys.executable, "-c", says))
    with ClusterRuns() as found:
        assert [run.run_id for run in found.wait_for_answer()] == ["new", "r"]
        assert found.where() == "on this machine or in its Ray cluster"
    assert found._process is not None and found._process.returncode == 0
