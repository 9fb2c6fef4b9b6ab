"""A large state is dumped by a child process, and the service goes on meanwhile."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.control.whole_state import dump_state
from tests.unit.service.test_server import SPEC, RunningServer, claim, ids_of, in_thread, put, wait_until

from rlplane.control.dump import StateDump
from rlplane.service import checkpoints
from rlplane.service import protocol as wire
from rlplane.service.connection import SocketConnection
from rlplane.service.journal import Joined, Journal, read_records, write_dump

IDS = [f"s{number}" for number in range(20)]


@pytest.fixture
def plane(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningServer]:
    monkeypatch.setattr(checkpoints, "_MANY_SAMPLES", 10)
    monkeypatch.setattr(checkpoints, "_PIECE_BYTES", 100)
    running = RunningServer(f"unix://{tmp_path}/service.sock")
    yield running
    running.close()


def in_child(monkeypatch: pytest.MonkeyPatch, before: Callable[[], object]) -> None:
    """Have the child that dumps the state call ``before`` first."""
    pieces, parent = StateDump.pieces, os.getpid()

    def pieces_in_child(dump: StateDump) -> Iterator[bytes]:
        if os.getpid() != parent:
            before()
        return pieces(dump)

    monkeypatch.setattr(StateDump, "pieces", pieces_in_child)


@pytest.fixture
def may_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The child that dumps the state waits until this file is there."""
    file = tmp_path / "may-go-on"

    def wait() -> None:
        while not file.exists():
            time.sleep(0.005)

    in_child(monkeypatch, wait)
    return file


def begin_to_save(plane: RunningServer, saver: SocketConnection) -> tuple[threading.Thread, list[Any]]:
    saving, answers = in_thread(lambda: saver.exchange(wire.Freeze(), waits_s=60.0))
    wait_until(lambda: plane.in_loop(lambda: len(plane.server._dumps)))
    return saving, answers


def filled(plane: RunningServer) -> SocketConnection:
    client = plane.client()
    client.exchange(wire.Register(SPEC))
    put(client, *IDS)
    return client


def state_of(client: SocketConnection, frozen: Any) -> bytes:
    read, is_whole = b"", False
    while not is_whole:
        answer: Any = client.exchange(wire.FrozenPiece(frozen.lease))
        piece, is_whole = answer.value
        read += piece
    return wire.FrozenPlane.read(read).state


def test_others_are_served_while_a_state_is_dumped_and_are_not_in_it(
    plane: RunningServer, may_go_on: Path
) -> None:
    saver, worker = filled(plane), plane.client()
    before = plane.in_loop(lambda: dump_state(plane.server.service.state))
    saving, answers = begin_to_save(plane, saver)
    put(worker, "new")
    assert ids_of(worker.exchange(claim(5))) == IDS[:5]
    worker.exchange(wire.Clear("p", IDS[:5]))
    assert not answers
    may_go_on.touch()
    saving.join(60)
    assert state_of(saver, answers[0]) == before
    saver.release(answers[0].lease)
    wait_until(lambda: plane.status()["leases"] == 0)


def test_a_child_that_is_killed_is_an_error_and_leaves_no_lease(
    plane: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_child(monkeypatch, lambda: os.kill(os.getpid(), signal.SIGKILL))
    client = filled(plane)
    answer = client.exchange(wire.Freeze(), waits_s=60.0)
    assert isinstance(answer, wire.Failure) and answer.kind == "CheckpointError"
    assert plane.status()["leases"] == 0
    assert ids_of(client.exchange(claim(20))) == IDS


def test_without_room_for_a_child_the_state_is_dumped_in_place(
    plane: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_fork() -> int:
        raise OSError("no memory for a child")

    monkeypatch.setattr(os, "fork", no_fork)
    client = filled(plane)
    before = plane.in_loop(lambda: dump_state(plane.server.service.state))
    assert state_of(client, client.exchange(wire.Freeze(), waits_s=60.0)) == before


def test_a_client_that_goes_before_the_dump_is_there_leaves_nothing(
    plane: RunningServer, may_go_on: Path
) -> None:
    saver = filled(plane)
    saving, _ = begin_to_save(plane, saver)
    saver.close()
    saving.join(60)
    may_go_on.touch()
    wait_until(lambda: not plane.in_loop(lambda: len(plane.server._dumps)))
    wait_until(lambda: plane.status()["leases"] == 0)
    assert not plane.in_loop(lambda: plane.server.service.checkpoints.frozen)


@pytest.mark.usefixtures("may_go_on")
def test_a_service_that_ends_leaves_no_child_behind(plane: RunningServer) -> None:
    saver = filled(plane)
    saving, _ = begin_to_save(plane, saver)
    (dump, _), *_ = plane.server._dumps._running.values()
    plane.close()
    saving.join(60)
    assert dump.ended.closed
    with pytest.raises(ProcessLookupError):
        os.kill(dump._child, 0)


def test_a_journal_that_cannot_be_made_shorter_is_still_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_fork() -> int:
        raise OSError("no memory for a child")

    monkeypatch.setattr(os, "fork", no_fork)
    journal = Journal(tmp_path)
    journal.add(Joined(1, "secret", True))
    journal.compact({"not": "dumped"})
    journal.add(Joined(2, "another", False))
    journal.close()
    state, records, newest = read_records(tmp_path)
    assert state is None and newest == 1
    assert [record.client for record in records if isinstance(record, Joined)] == [1, 2]


def test_a_dump_that_outlives_its_service_does_not_spoil_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child goes on writing when the service is killed, while the next service dumps what it knows."""
    dump = pickle.dump

    def dump_slowly(state: Any, file: Any, **more: Any) -> None:
        file.write(b"half of ")
        file.flush()
        monkeypatch.setattr(pickle, "dump", dump)
        Journal(tmp_path, 2).close()
        write_dump(tmp_path, 2, {"of": "the next"})
        dump(state, file, **more)

    monkeypatch.setattr(pickle, "dump", dump_slowly)
    Journal(tmp_path, 1).close()
    with contextlib.suppress(FileNotFoundError):
        write_dump(tmp_path, 1, {"of": "the one before"})
    state, _, newest = read_records(tmp_path)
    assert (state, newest) == ({"of": "the next"}, 2)


def test_what_killed_children_leave_of_their_dumps_is_removed(tmp_path: Path) -> None:
    class Deadly:
        def __reduce__(self) -> Any:
            os.kill(os.getpid(), signal.SIGKILL)

    journal = Journal(tmp_path)
    for state in (Deadly(), {"a": 1}):
        journal.compact(state)
        child = journal._child
        assert child is not None
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        journal.tidy()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["journal.2", "state.2"]
    journal.close()


def test_a_fresh_journal_that_cannot_be_opened_leaves_the_one_that_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path)
    journal.add(Joined(1, "secret", True))
    really_open = os.open

    def full(path: Any, *args: Any, **more: Any) -> int:
        if str(path).endswith("journal.1"):
            raise OSError(28, "No space left on device")
        return really_open(path, *args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", full)
        journal.compact({"not": "dumped"})
    journal.add(Joined(2, "another", False))
    journal.flush()
    state, records, newest = read_records(tmp_path)
    assert state is None and newest == 0
    assert [record.client for record in records if isinstance(record, Joined)] == [1, 2]
    journal.close()
