"""Finished runs of this machine, and the figures by which they are compared."""

import os
from pathlib import Path

import msgspec
import pytest
from tests.simulated_run import SimulatedRun

from rlplane.metrics.discovery import RunInfo, remember
from rlplane.metrics.snapshot import SessionState
from rlplane.viewing.runs import figures_of, finished_runs, read_finished


def leave_run(directory: Path, run_id: str) -> None:
    directory.mkdir(parents=True)
    snapshot = SimulatedRun(run_id=run_id).step(10.0, SessionState.COMPLETE)
    (directory / "final_snapshot.json").write_bytes(msgspec.json.encode(snapshot))


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "runtime").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_runs_are_found_in_the_directory_and_where_aggregators_of_this_machine_left_them(
    places: Path,
) -> None:
    assert finished_runs() == []
    leave_run(places / "runs" / "here", "here")
    leave_run(places / "elsewhere" / "there", "there")
    os.utime(places / "runs" / "here" / "final_snapshot.json", (1, 1))
    remember(RunInfo("there", 1, "ipc://e", "ipc://s", 5, str(places / "elsewhere" / "there")))
    remember(RunInfo("gone", 2, "ipc://e", "ipc://s", 6, str(places / "removed")))
    assert [run.run_id for run in finished_runs()] == ["there", "here"]


def test_a_finished_run_is_read_by_the_name_of_its_directory_or_by_its_id(places: Path) -> None:
    leave_run(places / "runs" / "2026-01-01", "the-id")
    for name in ("2026-01-01", "the-id"):
        found = read_finished(name)
        assert found is not None and found.run_id == "the-id"
    assert read_finished("nobody") is None
    leave_run(places / "runs" / "newer", "2026-01-01")
    os.utime(places / "runs" / "2026-01-01" / "final_snapshot.json", (1, 1))
    found = read_finished("2026-01-01")
    assert found is not None and found.run_id == "the-id"


def test_figures_are_rates_and_shares_so_that_lengths_do_not_matter() -> None:
    run = SimulatedRun()
    short, long = figures_of(run.step(10.0)), figures_of(run.step(90.0, SessionState.COMPLETE))
    assert (short["lasted"], long["lasted"]) == ("10 s", "1m 40s")
    for figures in (short, long):
        assert figures["share of a training step in the plane"] == "40%"
        assert figures["tokens per second"] == "900"
        assert figures["operations that failed"] == "0%"
