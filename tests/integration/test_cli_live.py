"""The viewers on a real run, all at once and without a flag, and its remains afterwards."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.warm_workers import WarmProcess, run_warm

from rlplane.metrics.snapshot import SessionState
from rlplane.viewing.feed import RunFeed, read_run

RUN = Path(__file__).with_name("viewed_run.py")


def until(condition: Callable[[], Any], what: str, seconds: float = 60) -> Any:
    deadline = time.monotonic() + seconds
    while True:
        found = condition()
        if found:
            return found
        assert time.monotonic() < deadline, f"{what} did not happen in {seconds:g} s"
        time.sleep(0.05)


def rlplane(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rlplane.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(autouse=True)
def own_machine(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("x")))
    monkeypatch.delenv("RLPLANE_METRICS_ADDRESS", raising=False)


@pytest.fixture
def live(tmp_path: Path) -> Iterator[tuple[str, Path, subprocess.Popen[str]]]:
    """The id, directory and process of a run that goes on until its stdin is closed."""
    process = WarmProcess(
        [sys.executable, str(RUN), str(tmp_path / "run")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None and process.stdin is not None
    run_id = process.stdout.readline().split()[0]
    yield run_id, tmp_path / "run", process
    if process.poll() is None:
        process.stdin.close()
        process.wait(60)
    process.stdout.close()


def test_every_viewer_finds_the_run_at_once_and_its_remains_can_be_read(
    live: tuple[str, Path, subprocess.Popen[str]],
) -> None:
    run_id, directory, process = live
    dash = subprocess.Popen(
        [sys.executable, "-m", "rlplane.cli", "dash", "--port", "0"], stderr=subprocess.PIPE, text=True
    )
    try:
        assert dash.stderr is not None
        address = dash.stderr.readline().split()[1]
        base, _, token = address.partition("?token=")
        assert httpx.get(f"{base}api/view", trust_env=False, timeout=30).status_code == 401
        bearer = {"authorization": f"Bearer {token}"}
        with (
            httpx.Client(base_url=base, headers=bearer, timeout=30, trust_env=False) as page,
            RunFeed() as feed,
        ):
            until(lambda: page.get("/api/view").json().get("run"), "the page finding the run")
            until(lambda: feed.latest is not None and feed.latest.total("samples_cleared") > 100, "samples")
            top = json.loads(rlplane("top", "--json").stdout)
            view = page.get("/api/view").json()
            assert top["snapshot"]["run_id"] == view["run"]["id"] == run_id
            assert view["feed"]["state"] == "live"
            tasks = {task["task"] for task in view["flows"][0]["tasks"]}
            assert tasks == {"reward", "train"}
            assert view["lifecycle"]["finished"] and view["totals"]["failures"] == 1
            assert f"Run {run_id}: LIVE (incomplete)" in rlplane("report").stdout
            scraped = {family.name for family in text_string_to_metric_families(page.get("/metrics").text)}
            assert "rlplane_operation_duration_seconds" in scraped
            points = until(
                lambda: (
                    (columns := page.get("/api/history").json()["columns"])["latency"].get("put")
                    and columns["time_s"]
                ),
                "the history",
            )
            assert points == sorted(points)

            assert process.stdin is not None
            process.stdin.close()
            assert process.wait(60) == 0
            until(lambda: feed.status().state == "ended", "the end")
            until(lambda: page.get("/api/view").json()["run"]["state"] == "COMPLETE", "the page's end")
            assert f"Run {run_id}: COMPLETE" in page.get(f"/report/{run_id}.html").text
    finally:
        dash.send_signal(signal.SIGINT)
        assert dash.wait(30) == 130
        assert dash.stderr is not None
        dash.stderr.close()

    assert rlplane("report", str(directory)).stdout.startswith(f"Run {run_id}: COMPLETE")
    made = rlplane("trace", str(directory), "-o", str(directory / "trace.json"), "--json")
    final = read_run(directory)
    assert json.loads(made.stdout)["operations"] == final.total("ops")
    spans = [e for e in json.loads((directory / "trace.json").read_text())["traceEvents"] if e["ph"] == "X"]
    assert {"put", "claim_meta", "get_data", "clear"} <= {span["name"] for span in spans}


def test_the_aggregator_by_itself_ends_on_sigterm_with_a_final_file(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "rlplane.cli", "aggregate", "--out", str(tmp_path), "--run-id", "alone"],
        stderr=subprocess.PIPE,
    )
    try:
        with RunFeed() as feed:
            until(lambda: feed.latest is not None, "finding it")
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
            until(lambda: feed.status().state == "ended", "the end")
    finally:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()
    assert read_run(tmp_path).state is SessionState.INTERRUPTED
    assert read_run(tmp_path).run_id == "alone"


def test_the_aggregators_metrics_have_a_token_that_is_printed_and_left_for_its_user_alone(
    tmp_path: Path,
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "rlplane.cli", "aggregate", "--out", str(tmp_path), "--prometheus-port", "0"],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        address = process.stderr.readline().removeprefix("open ").strip()
        bare, _, token = address.partition("?token=")
        file = Path(process.stderr.readline().removeprefix("the token is in ").strip())
        assert file.read_text() == token and file.stat().st_mode & 0o077 == 0
        assert httpx.get(bare, trust_env=False, timeout=300).status_code == 401
        assert "rlplane_up" in httpx.get(address, trust_env=False, timeout=300).text
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert token not in process.stderr.read()  # Not in its log.
        assert not file.exists()
    finally:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


def test_an_aggregator_that_cannot_start_is_exit_code_3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLPLANE_TOKEN", " ")
    done = rlplane("aggregate", "--prometheus-port", "0")
    assert done.returncode == 3 and "RLPLANE_TOKEN is blank" in done.stderr
    done = rlplane("aggregate", "--events-address", "tcp://0.0.0.0:0")
    assert done.returncode == 3, done.stderr
    assert "Traceback" not in done.stderr


def test_a_served_plane_can_be_joined_and_ends_on_ctrl_c() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "rlplane.cli", "serve", "storage_capacity=100"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None and process.stderr is not None
        address = process.stdout.readline().strip()
        code = (
            "from rlplane import build_data_plane_client, load_config\n"
            "client = build_data_plane_client(load_config('shm'), bootstrap=False)\n"
            "client.register_partition('p', ['x'], 1, ['t'])\n"
            "client.put_samples(['a'], 'p', tags=[{}])\n"
            "print(client.list_sample_ids('p'))\n"
            "client.close()"
        )
        joined = run_warm(
            [sys.executable, "-c", code],
            env=os.environ | {"RLPLANE_CONTROLLER_ADDRESS": address},
        )
        assert joined.stdout == "['a']\n", joined.stderr
        process.send_signal(signal.SIGINT)
        assert process.wait(30) in (0, 130)
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            stream.close()
