"""The small commands: config, doctor, report, trace, top --json."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from tests.simulated_run import SimulatedRun, SnapshotServer

from rlplane.cli import ExitCode, run
from rlplane.config import load_config
from rlplane.metrics.event_logger import EventLoggerService
from rlplane.metrics.events import EventBatch, OpRecord, pack_ops
from rlplane.metrics.snapshot import SessionState


@pytest.fixture(autouse=True)
def own_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("RLPLANE_CONFIG", raising=False)


def finished_run(directory: Path, **details: Any) -> Path:
    directory.mkdir()
    simulated = SimulatedRun(**details)
    for _ in range(60):
        simulated.pass_time()
    final = simulated.step(state=SessionState.COMPLETE)
    (directory / "final_snapshot.json").write_bytes(msgspec.json.encode(final))
    return directory


def read_json(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def test_a_printed_config_can_be_read_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", "shm", "storage_capacity=7", "observability.track_partitions=a,b"]) == 0
    file = tmp_path / "plane.toml"
    file.write_text(capsys.readouterr().out)
    assert load_config(file) == load_config(
        "shm", {"storage_capacity": 7, "observability.track_partitions": ["a", "b"]}
    )


def test_an_override_needs_no_source(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", "--json", "storage_capacity=9"]) == 0
    content = read_json(capsys)
    assert content["source"] == "shm" and content["config"]["storage_capacity"] == 9


def test_a_file_is_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plane.toml"
    assert run(["config", "--exemplar", "local"]) == 0
    file.write_text(capsys.readouterr().out)
    assert run(["config", "--check", str(file)]) == ExitCode.OK
    assert "is valid: impl 'local', backend 'memory'" in capsys.readouterr().out
    file.write_text(file.read_text() + "\nsurprise = 1\n")
    assert run(["config", "--check", str(file)]) == ExitCode.USAGE
    assert "surprise" in capsys.readouterr().err


def test_the_config_of_the_environment_is_the_default(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RLPLANE_CONFIG", "local")
    assert run(["config"]) == 0
    assert 'backend = "memory"' in capsys.readouterr().out


def test_serve_is_only_for_the_engine_that_has_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "local"]) == ExitCode.USAGE
    assert "backend 'shm'" in capsys.readouterr().err


def test_doctor_fails_when_something_would_stop_a_plane(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from rlplane.storage.shm import doctor as local

    checks = [local.Check("platform", "ok", "Linux"), local.Check("shared memory", "problem", "too small")]
    monkeypatch.setattr(local, "inspect", lambda: checks)
    assert run(["doctor"]) == ExitCode.FAILED
    assert "problem  shared memory: too small" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("free", "shown"), [(64 << 20, "64.0 MiB"), (3 << 29, "1.5 GiB"), (5 << 40, "5.0 TiB")]
)
def test_doctor_shows_sizes_in_the_unit_that_fits(
    free: int, shown: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    space = SimpleNamespace(f_blocks=free, f_bavail=free, f_frsize=1)
    monkeypatch.setattr("os.statvfs", lambda path: space)
    run(["doctor"])
    assert f"{shown} of {shown} free" in capsys.readouterr().out


def test_a_report_is_text_html_or_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = finished_run(tmp_path / "run", run_id="my\x1b[31m run")
    assert run(["report", str(directory)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("Run my [31m run: COMPLETE") and "claim_meta" in text
    assert run(["report", str(directory), "--json", "--html", str(tmp_path / "out.html")]) == 0
    content = read_json(capsys)
    assert content["schema"] == "rlplane.report" and content["complete"]
    assert "<html" in (tmp_path / "out.html").read_text()[:200]


def test_without_a_name_the_report_is_of_the_newest_run_in_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["report"]) == ExitCode.CANNOT_START
    assert "there is none in ./runs" in capsys.readouterr().err
    (tmp_path / "runs").mkdir()
    for age, name in enumerate(["newest", "older", "oldest"]):
        final = finished_run(tmp_path / "runs" / name, run_id=name) / "final_snapshot.json"
        os.utime(final, (1e9 - age, 1e9 - age))
    assert run(["report"]) == ExitCode.OK
    captured = capsys.readouterr()
    assert captured.out.startswith("Run newest: COMPLETE")
    assert "runs/newest" in captured.err


def test_a_report_that_cannot_be_made_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", str(tmp_path / "nowhere")]) == ExitCode.USAGE
    assert "final_snapshot.json" in capsys.readouterr().err
    directory = finished_run(tmp_path / "run")
    assert run(["report", str(directory), "--html", str(tmp_path / "no" / "dir.html")]) == ExitCode.FAILED
    assert "cannot write" in capsys.readouterr().err
    assert run(["report", str(directory), str(directory)]) == ExitCode.USAGE
    assert "--compare A B" in capsys.readouterr().err
    assert run(["report", "--compare", str(directory)]) == ExitCode.USAGE


def test_two_runs_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = finished_run(tmp_path / "one", run_id="one", seed=1)
    two = finished_run(tmp_path / "two", run_id="two", seed=2)
    assert run(["report", "--compare", str(one), str(two)]) == 0
    assert capsys.readouterr().out.startswith("one → two\n")
    assert run(["report", "--compare", str(one), str(two), "--json"]) == 0
    content = read_json(capsys)
    assert content["schema"] == "rlplane.report.compare"
    assert {"what", "before", "after", "change", "verdict"} <= set(content["changes"][0])


def journal(path: Path) -> None:
    ops = [
        OpRecord("put", "rollouts", 8, 4096, 1_000_000, 1_700_000_000_000_000_000 + at, thread_id=1)
        for at in range(3)
    ]
    ops.append(
        OpRecord("claim_meta", "rollouts", 0, 0, 5_000_000, 1_700_000_000_100_000_000, "timeout", 2, "train")
    )
    record = EventLoggerService(path)
    record.write(EventBatch(worker="w1", pid=7, host="h", seq=1, sent_ns=1, ops=pack_ops(ops)[0]))
    record.write(EventBatch(worker="w2", pid=7, host="g", seq=1, sent_ns=1, ops=pack_ops(ops[:1])[0]))
    record.close()


def test_a_trace_of_the_journal_has_every_operation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal(tmp_path / "events.jsonl")
    out = tmp_path / "trace.json"
    assert run(["trace", str(tmp_path), "-o", str(out), "--json"]) == 0
    assert read_json(capsys)["operations"] == 5
    events = json.loads(out.read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert [span["name"] for span in spans] == ["put", "put", "put", "claim_meta", "put"]
    assert (spans[0]["cat"], spans[0]["ts"], spans[0]["dur"]) == ("rollouts", 1.7e15, 1_000)
    assert spans[3]["dur"] == 5_000 and spans[3]["args"]["task"] == "train"
    assert len({span["pid"] for span in spans}) == 2
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {"w1 pid 7", "w2 pid 7"}


def test_a_directory_without_records_has_no_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["trace", str(tmp_path)]) == ExitCode.USAGE
    assert "events.jsonl" in capsys.readouterr().err


def test_a_script_reads_a_running_run_with_top_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with SnapshotServer(f"ipc://{tmp_path}/s.sock") as server:
        server.publish(SimulatedRun().step())
        assert run(["top", server.address, "--json"]) == 0
    content = read_json(capsys)
    assert content["snapshot"]["run_id"] == "simulated-run" and content["feed"]["state"] == "live"


def test_without_a_run_or_a_terminal_top_cannot_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "local")  # Other tests of this machine have clusters.
    assert run(["top", "--json", "--wait", "0.1"]) == ExitCode.CANNOT_START
    assert "no run found on this machine" in capsys.readouterr().err
    assert run(["top"]) == ExitCode.CANNOT_START
    assert "rlplane top --json" in capsys.readouterr().err


def test_dash_refuses_another_host_without_a_token(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["dash", "--host", "0.0.0.0", "--no-token"]) == ExitCode.USAGE
    assert "needs a token" in capsys.readouterr().err


def test_a_token_is_taken_from_no_command_line_and_must_not_be_blank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["dash", "--token", "correct-horse"]) == ExitCode.USAGE
    (tmp_path / "token").write_text("\n")
    assert run(["dash", "--token-file", str(tmp_path / "token")]) == ExitCode.USAGE
    assert "is blank" in capsys.readouterr().err
    monkeypatch.setenv("RLPLANE_TOKEN", " ")
    assert run(["dash"]) == ExitCode.USAGE
    assert "RLPLANE_TOKEN is blank" in capsys.readouterr().err


def test_dash_cannot_start_on_a_port_that_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    from rlplane.web.app import listen

    with listen("127.0.0.1", 0) as taken:
        port = str(taken.getsockname()[1])
        assert run(["dash", "--port", port]) == ExitCode.CANNOT_START
    assert f"127.0.0.1:{port}" in capsys.readouterr().err
