"""The runs of the Ray cluster that this machine belongs to, for commands that find none on the machine.

A child process asks Ray, as a worker would (``rlplane.adapters.transfer_queue.runs``). Where Ray is not
installed, or has no process here and no address, nothing is started and nothing is waited for.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

import msgspec

from rlplane.metrics.discovery import RunInfo

logger = logging.getLogger(__name__)

_COMMAND = (sys.executable, "-m", "rlplane.adapters.transfer_queue.runs")
_LOOK_EVERY_S = 10.0
_CONNECT_S = 2.0
_FIRST_ANSWER_S = 60.0
_END_S = 3.0


class ClusterRuns:
    """Asks the cluster from the first call of :meth:`runs` on, in the background, until it is closed."""

    def __init__(self) -> None:
        self._runs: list[RunInfo] = []
        self._where = "on this machine"
        self._process: subprocess.Popen[str] | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._answered = threading.Event()
        self._closing = threading.Event()

    def runs(self) -> list[RunInfo]:
        """The live runs of the cluster as of the last answer, newest first."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._ask, name="rlplane-cluster-runs", daemon=True)
            self._thread.start()
        return self._runs

    def where(self) -> str:
        """Where runs are looked for, and what stands in the way, in words."""
        return self._where

    def wait_for_answer(self) -> list[RunInfo]:
        """The live runs; waits for the first answer, if there is a cluster to ask."""
        self.runs()
        self._answered.wait(_FIRST_ANSWER_S)
        return self._runs

    def close(self) -> None:
        """Stop asking. Idempotent."""
        self._closing.set()
        with self._lock:
            process = self._process
        if process is not None:
            _end(process, patient=self._answered.is_set())
        if self._thread is not None:
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _ask(self) -> None:
        while not self._closing.is_set():
            trouble = _stands_in_the_way()
            if trouble is None:
                self._where = "on this machine (its Ray cluster is being asked)"
                self._listen()
            else:
                self._note([], trouble)
            self._closing.wait(_LOOK_EVERY_S)

    def _listen(self) -> None:
        """Hear what the child says until it ends."""
        quiet = None if logger.isEnabledFor(logging.DEBUG) else subprocess.DEVNULL
        with self._lock:
            if self._closing.is_set():
                return
            # A group of its own: Ctrl-C is for us, and its stdin ends with us, however that is.
            self._process = process = subprocess.Popen(
                _COMMAND,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=quiet,
                text=True,
                process_group=0,
            )
        trouble = "it ended without an answer"
        with process:
            assert process.stdout is not None
            for line in process.stdout:
                answer = json.loads(line)
                if "error" in answer:
                    trouble = answer["error"]
                else:
                    runs = [run for text in answer["runs"] if (run := _read(text)) is not None]
                    self._note(sorted(runs, key=lambda run: -run.started_ns))
        self._note([], f"its Ray cluster cannot be asked: {trouble}")

    def _note(self, runs: list[RunInfo], trouble: str | None = None) -> None:
        self._runs = runs
        if trouble is None:
            self._where = "on this machine or in its Ray cluster"
        else:
            self._where = f"on this machine ({trouble})" if trouble else "on this machine"
        self._answered.set()


def _read(text: str) -> RunInfo | None:
    """The run, if it can be watched from here: it may be of another version, or have found no free port."""
    with contextlib.suppress(msgspec.DecodeError):
        run = msgspec.json.decode(text, type=RunInfo)
        return run if run.snapshot_address else None
    return None


def _end(process: subprocess.Popen[str], *, patient: bool) -> None:
    """End the child: it leaves Ray in order if it has joined, which it may not have yet."""
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.close()
    if patient:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
    process.kill()


def _stands_in_the_way() -> str | None:
    """None if there is a cluster to ask; else why not, or nothing where nobody would expect one."""
    if importlib.util.find_spec("ray") is None:
        return ""
    address = os.environ.get("RAY_ADDRESS", "")
    if address == "local":
        return ""  # Ray is told to start a cluster of its own, so there is none to ask.
    if address in ("", "auto"):
        return None if _raylet_runs_here() else ""
    # Ray itself would try for a minute.
    place = urlsplit(address if "://" in address else f"//{address}")
    try:
        socket.create_connection((place.hostname or "", place.port or 6379), _CONNECT_S).close()
    except (OSError, ValueError) as error:
        return f"Ray at {address} does not answer: {error}"
    return None


def _raylet_runs_here() -> bool:
    """Whether a node of a cluster has its process here: what ``ray.init(address="auto")`` looks for."""
    for file in Path("/proc").glob("[0-9]*/comm"):
        with contextlib.suppress(OSError):
            if file.read_text() == "raylet\n":
                return True
    return False
