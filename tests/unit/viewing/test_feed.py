"""Finding a run and following it, whatever happens to it."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from tests.simulated_run import SimulatedRun, SnapshotServer

from rlplane.errors import ConfigError
from rlplane.metrics.discovery import RunInfo, announce, withdraw
from rlplane.metrics.snapshot import SessionState
from rlplane.viewing.feed import RunFeed, read_run


@pytest.fixture(autouse=True)
def own_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A runtime directory of the test's own, so that no other run is found."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen in 20 s"
        time.sleep(0.01)


def info(address: str, run: SimulatedRun, started_ns: int, out_dir: str = "") -> RunInfo:
    return RunInfo(run.run_id, os.getpid(), "ipc:///nowhere", address, started_ns, out_dir)


def test_without_a_run_it_searches_and_says_so() -> None:
    with RunFeed() as feed:
        assert feed.latest is None
        assert feed.status().state == "searching"


def test_a_run_that_is_announced_is_found_by_itself(own_machine: Path) -> None:
    run = SimulatedRun()
    with SnapshotServer(f"ipc://{own_machine}/s.sock") as server, RunFeed() as feed:
        announced = announce(info(server.address, run, 1))
        server.publish(run.step())
        until(lambda: feed.latest is not None, "finding the run")
        assert feed.status().state == "live"
        withdraw(announced)


class OtherMachine:
    """Knows of the runs that it was told."""

    def __init__(self) -> None:
        self.known: list[RunInfo] = []
        self.n_asked = 0

    def runs(self) -> list[RunInfo]:
        self.n_asked += 1
        return self.known

    def where(self) -> str:
        return "on this machine or on that one"


def test_while_nothing_runs_here_a_run_elsewhere_is_found_and_followed(own_machine: Path) -> None:
    other, near, far = OtherMachine(), SimulatedRun(run_id="near"), SimulatedRun(run_id="far")
    with (
        SnapshotServer(f"ipc://{own_machine}/far.sock") as away,
        SnapshotServer(f"ipc://{own_machine}/near.sock") as here,
        RunFeed(None, other) as feed,
    ):
        assert feed.status().text.startswith("no run found on this machine or on that one yet: a job is seen")
        other.known = [info(away.address, far, 1)]
        rarely = msgspec.structs.replace(far.step(), refresh_hz=0.001)
        away.publish(rarely)
        until(lambda: feed.latest is not None, "finding the run")
        assert feed.latest is not None and feed.latest.run_id == "far"
        announced = announce(info(here.address, near, 2))
        here.publish(near.step())
        other.known = []  # Who knows of it may be out of reach. Its next picture is not due yet.
        before = other.n_asked
        until(lambda: other.n_asked > before + 2, "looking again")
        assert feed.status().state == "live" and feed.latest.run_id == "far"
        withdraw(announced)


def test_a_run_of_this_machine_comes_before_those_elsewhere(own_machine: Path) -> None:
    other, near = OtherMachine(), SimulatedRun(run_id="near")
    other.known = [info(f"ipc://{own_machine}/far.sock", SimulatedRun(run_id="far"), 5)]
    with SnapshotServer(f"ipc://{own_machine}/near.sock") as here:
        announced = announce(info(here.address, near, 1))
        here.publish(near.step())
        with RunFeed(None, other) as feed:
            until(lambda: feed.latest is not None, "finding the run")
            assert feed.latest is not None and feed.latest.run_id == "near"
        withdraw(announced)


def test_an_aggregator_that_restarts_at_its_address_is_followed(own_machine: Path) -> None:
    address = f"ipc://{own_machine}/s.sock"
    run = SimulatedRun()
    with RunFeed(address) as feed:
        assert feed.status().state == "waiting"
        with SnapshotServer(address) as server:
            server.publish(run.step())
            until(lambda: feed.latest is not None, "the first picture")
        again = SimulatedRun(started_ns=run.started_ns + 5, run_id="again")
        with SnapshotServer(address) as server:
            server.publish(again.step())
            until(lambda: feed.latest is not None and feed.latest.run_id == "again", "the next run")


def test_old_data_is_called_old(own_machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = SimulatedRun()
    with SnapshotServer(f"ipc://{own_machine}/s.sock") as server, RunFeed(server.address) as feed:
        server.publish(run.step())
        until(lambda: feed.latest is not None, "the first picture")
        now = time.monotonic
        monkeypatch.setattr("rlplane.viewing.feed.time.monotonic", lambda: now() + 60)
        status = feed.status()
        assert status.state == "stale"
        assert "no news for" in status.text


def test_an_aggregator_that_was_killed_is_noticed(own_machine: Path) -> None:
    run = SimulatedRun()
    with SnapshotServer(f"ipc://{own_machine}/s.sock") as server:
        announced = announce(info(server.address, run, 1))
        with RunFeed() as feed:
            server.publish(run.step())
            until(lambda: feed.latest is not None, "the first picture")
            announced.unlink()
            until(lambda: feed.status().state == "stale", "noticing that it is gone")
            assert "the aggregator is gone" in feed.status().text


def test_a_last_picture_that_was_missed_is_read_from_the_file(own_machine: Path) -> None:
    run = SimulatedRun()
    with SnapshotServer(f"ipc://{own_machine}/s.sock") as server:
        announced = announce(info(server.address, run, 1, str(own_machine)))
        with RunFeed() as feed:
            server.publish(run.step())
            until(lambda: feed.latest is not None, "the first picture")
            final = run.step(state=SessionState.COMPLETE)
            (own_machine / "final_snapshot.json").write_bytes(msgspec.json.encode(final))
            announced.unlink()
            until(lambda: feed.status().state == "ended", "reading the file")
            assert feed.latest == final


def test_a_file_of_another_run_is_never_taken_for_this_ones(own_machine: Path) -> None:
    run, other = SimulatedRun(), SimulatedRun(run_id="yesterday")
    (own_machine / "final_snapshot.json").write_bytes(
        msgspec.json.encode(other.step(state=SessionState.COMPLETE))
    )
    with SnapshotServer(f"ipc://{own_machine}/s.sock") as server:
        announced = announce(info(server.address, run, 1, str(own_machine)))
        with RunFeed() as feed:
            server.publish(run.step())
            until(lambda: feed.latest is not None, "the first picture")
            announced.unlink()
            until(lambda: feed.status().state == "stale", "noticing that it is gone")
            assert feed.latest is not None and feed.latest.run_id == run.run_id


def test_after_the_end_the_next_run_is_followed(own_machine: Path) -> None:
    first, second = SimulatedRun(run_id="first"), SimulatedRun(run_id="second")
    one, two = (SnapshotServer(f"ipc://{own_machine}/{name}.sock") for name in ("one", "two"))
    with one, two:
        announced = announce(info(one.address, first, 1))
        with RunFeed() as feed:
            one.publish(first.step(state=SessionState.COMPLETE))
            until(lambda: feed.status().state == "ended", "the end")
            announced.unlink()
            two.publish(second.step())
            announced = announce(info(two.address, second, 2))
            until(lambda: feed.latest is not None and feed.latest.run_id == "second", "the next run")
            announced.unlink()


def test_a_finished_runs_directory_is_shown_as_it_ended(tmp_path: Path) -> None:
    final = SimulatedRun().step(state=SessionState.COMPLETE)
    (tmp_path / "final_snapshot.json").write_bytes(msgspec.json.encode(final))
    with RunFeed(str(tmp_path)) as feed:
        assert feed.latest == final
        assert feed.status().state == "ended"


@pytest.mark.parametrize("content", [None, b"{}", b"not json"])
def test_a_directory_without_a_run_is_a_config_error(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "final_snapshot.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"final_snapshot\.json"):
        read_run(tmp_path)
