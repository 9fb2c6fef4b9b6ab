"""A large state is dumped by a child process, and the service goes on meanwhile."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.service.test_server import SPEC, RunningServer, claim, ids_of, in_thread, put, wait_until

from rlplane.control.dump import StateDump, dump_state
from rlplane.service import core
from rlplane.service import protocol as wire
from rlplane.service.connection import SocketConnection

IDS = [f"s{number}" for number in range(20)]


@pytest.fixture
def plane(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningServer]:
    monkeypatch.setattr(core, "_MANY_SAMPLES", 10)
    monkeypatch.setattr(core, "_PIECE_BYTES", 100)
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
    plane: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on = tmp_path / "may-go-on"

    def wait() -> None:
        while not may_go_on.exists():
            time.sleep(0.005)

    in_child(monkeypatch, wait)
    saver, worker = filled(plane), plane.client()
    before = plane.in_loop(lambda: dump_state(plane.server.service.state))
    saving, answers = in_thread(lambda: saver.exchange(wire.Freeze(), waits_s=60.0))
    while not plane.in_loop(lambda: len(plane.server._dumps)):
        time.sleep(0.001)
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
    plane: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on = tmp_path / "may-go-on"

    def wait() -> None:
        while not may_go_on.exists():
            time.sleep(0.005)

    in_child(monkeypatch, wait)
    saver = filled(plane)
    saving, _ = in_thread(lambda: saver.exchange(wire.Freeze(), waits_s=60.0))
    while not plane.in_loop(lambda: len(plane.server._dumps)):
        time.sleep(0.001)
    saver.close()
    saving.join(60)
    may_go_on.touch()
    while plane.in_loop(lambda: len(plane.server._dumps)):
        time.sleep(0.001)
    wait_until(lambda: plane.status()["leases"] == 0)
    assert not plane.in_loop(lambda: plane.server.service._frozen)
