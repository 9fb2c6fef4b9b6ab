"""``rlplane top`` in a real terminal (tmux)."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.simulated_run import SimulatedRun, SnapshotServer

from rlplane.metrics.snapshot import SessionState


class Terminal:
    """A tmux server of the test's own, with one window."""

    def __init__(self, socket: Path, *command: str) -> None:
        tmux = shutil.which("tmux")
        assert tmux, "the test needs tmux"
        self._tmux = [tmux, "-S", str(socket), "-f", "/dev/null"]
        # A size in the environment would win over the terminal's own.
        clean = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        start = [*self._tmux, "new-session", "-d", "-x", "120", "-y", "34", *command]
        subprocess.run(start, env=clean, capture_output=True, timeout=30, check=True)

    def run(self, *arguments: str) -> str:
        done = subprocess.run(
            [*self._tmux, *arguments], capture_output=True, text=True, timeout=30, check=True
        )
        return done.stdout

    def screen(self) -> str:
        return self.run("capture-pane", "-p")

    def press(self, *keys: str) -> None:
        self.run("send-keys", *keys)

    def until(self, condition: Callable[[str], bool], what: str) -> str:
        deadline = time.monotonic() + 60
        while True:
            screen = self.screen()
            if condition(screen):
                return screen
            assert time.monotonic() < deadline, f"{what} did not happen in 60 s:\n{screen}"
            time.sleep(0.1)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    address = f"ipc://{tmp_path}/s.sock"
    # The shell stays when the program has ended, so that its last words can be read.
    command = f"{sys.executable} -m rlplane.cli top {address}; echo EXIT:$?; cat"
    shown = Terminal(tmp_path / "tmux", command)
    yield shown
    shown.run("kill-server")


def test_it_lives_in_a_terminal_from_the_first_picture_to_the_report(
    terminal: Terminal, tmp_path: Path
) -> None:
    terminal.until(lambda screen: "waiting for the first picture" in screen, "starting")
    run = SimulatedRun(slow_task="logprob", workers=12)
    with SnapshotServer(f"ipc://{tmp_path}/s.sock") as server:
        server.publish(run.step())
        first = terminal.until(lambda screen: "LIVE" in screen and "rollouts" in screen, "the first picture")
        assert "simulated-run" in first and "claim_meta" in first
        for _ in range(6):
            server.publish(run.step(10.0))
        terminal.until(lambda screen: "up 1m 01s" in screen, "new figures")
        terminal.press("2")
        terminal.until(lambda screen: "rollout-0" in screen and "last seen" in screen, "the workers")
        terminal.press("/", "trainer", "Enter")
        terminal.until(lambda screen: "trainer-3" in screen and "rollout-0" not in screen, "the filter")
        # By itself: a terminal takes Escape and a key right after it for one.
        terminal.press("Escape")
        terminal.until(lambda screen: "rollout-0" in screen, "clearing the filter")
        terminal.press("1")
        terminal.until(lambda screen: "each task:" in screen, "the partitions")
        terminal.press("Enter")
        terminal.until(lambda screen: "logprob holds everything up" in screen, "the partition")
        terminal.press("Escape")
        terminal.until(lambda screen: "1 Partitions" in screen, "coming back")

    # The aggregator is gone; another one comes at the same address.
    terminal.until(lambda screen: "OLD DATA" in screen, "calling it old")
    again = SimulatedRun(run_id="second-run", started_ns=run.started_ns + 1)
    with SnapshotServer(f"ipc://{tmp_path}/s.sock") as server:
        server.publish(again.step())
        terminal.until(lambda screen: "second-run" in screen and "OLD DATA" not in screen, "the restart")
        server.publish(again.step(state=SessionState.COMPLETE))
        terminal.until(lambda screen: "Run second-run: COMPLETE" in screen, "the report")
        terminal.press("q")
        last = terminal.until(lambda screen: "EXIT:" in screen, "quitting")
        assert "EXIT:0" in last and "Traceback" not in last


def test_ctrl_q_leaves_the_terminal_as_it_was(terminal: Terminal) -> None:
    terminal.until(lambda screen: "waiting for the first picture" in screen, "starting")
    terminal.press("C-q")
    last = terminal.until(lambda screen: "EXIT:" in screen, "quitting")
    assert "EXIT:0" in last and "Traceback" not in last
