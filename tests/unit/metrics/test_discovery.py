"""Finding the aggregators of this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlplane.errors import ConfigError
from rlplane.metrics.discovery import RunInfo, announce, list_runs, runtime_directory, withdraw


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "rlplane"


def info(pid: int, run_id: str = "run", started_ns: int = 1) -> RunInfo:
    return RunInfo(run_id, pid, "ipc:///e", "ipc:///s", started_ns)


def test_a_running_aggregator_is_found_until_it_withdraws() -> None:
    path = announce(info(os.getpid()))
    assert [run.run_id for run in list_runs()] == ["run"]
    withdraw(path)
    withdraw(path)
    assert list_runs() == []


def test_the_newest_run_comes_first(directory: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        announce(info(os.getpid(), "old", 1))
        announce(info(child.pid, "new", 2))
        assert [run.run_id for run in list_runs()] == ["new", "old"]
    finally:
        child.communicate()


def test_what_a_killed_aggregator_left_is_removed(directory: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    left = runtime_directory() / "events.sock"
    left.touch()
    elsewhere = directory.parent / "snapshots.sock"
    elsewhere.touch()
    path = announce(RunInfo("run", child.pid, f"ipc://{left}", f"ipc://{elsewhere}", 1))
    child.kill()
    child.communicate()
    assert list_runs() == []
    assert not path.exists()
    assert not left.exists()
    assert elsewhere.exists(), "only what is in our directory is ours to remove"


def test_a_pid_that_was_given_to_another_process_is_no_aggregator() -> None:
    path = announce(info(os.getpid()))
    text = path.read_text()
    path.write_text(text.replace('"pid_start":', '"pid_start":1'))
    assert list_runs() == []


def test_a_torn_file_is_removed(directory: Path) -> None:
    (runtime_directory() / "run-1.json").write_text("{")
    assert list_runs() == []
    assert list(directory.iterdir()) == []


def test_the_directory_is_the_users_own(directory: Path) -> None:
    assert runtime_directory().stat().st_mode & 0o777 == 0o700
    directory.chmod(0o755)
    with pytest.raises(ConfigError, match="mode 0700"):
        runtime_directory()


def test_a_link_in_the_place_of_the_directory_is_refused(directory: Path) -> None:
    target = directory.parent / "target"
    target.mkdir(mode=0o700)
    directory.symlink_to(target)
    with pytest.raises(ConfigError, match="must be a directory"):
        runtime_directory()


def test_without_a_runtime_directory_a_temporary_one_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert runtime_directory() == tmp_path / f"rlplane-{os.getuid()}"
