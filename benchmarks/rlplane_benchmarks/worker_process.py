"""A process in which commands run: one side of a participant, or the driver of the cluster bench.

Commands and their results travel over a pipe. The process ends what it started when it is told to close, and
also when whoever runs the bench has died.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection, Pipe
from typing import Any

from rlplane_benchmarks.worker import load_class

__all__ = ["WorkerError", "WorkerProcess"]

_WORKER = "rlplane_benchmarks.worker:Worker"
COMMAND_TIMEOUT_S = 300.0
_CLOSE_TIMEOUT_S = 30.0


class WorkerError(Exception):
    """A command failed in the process, or the process ended; the message has its last output."""


class WorkerProcess:
    """The process as the bench sees it. ``worker`` names the class whose public methods are the commands."""

    def __init__(
        self, name: str, environment: Mapping[str, str] | None = None, worker: str = _WORKER
    ) -> None:
        self.name = name
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the process
        ours, theirs = Pipe()
        inherited = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith("RLPLANE_") or key.startswith("RLPLANE_BENCH_")
        }
        # The process must be able to import whatever the caller can.
        inherited["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rlplane_benchmarks.worker_process", worker, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env={**inherited, **(environment or {})},
        )
        theirs.close()
        self._pipe: Connection[Any, Any] = ours

    def call(self, command: str, *args: Any, timeout_s: float = COMMAND_TIMEOUT_S) -> Any:
        """Run a command and return its result."""
        self.send(command, *args)
        return self.receive(timeout_s)

    def send(self, command: str, *args: Any) -> None:
        """Start a command; :meth:`receive` has its result."""
        try:
            self._pipe.send((command, args))
        except OSError:
            raise self._gone() from None

    def receive(self, timeout_s: float = COMMAND_TIMEOUT_S) -> Any:
        try:
            if not self._pipe.poll(timeout_s):
                raise WorkerError(f"{self.name} has not answered for {timeout_s:g} s")
            fine, value = self._pipe.recv()
        except (EOFError, OSError):
            raise self._gone() from None
        if not fine:
            raise WorkerError(f"{self.name}: {value}")
        return value

    def close(self) -> None:
        """Ask the process to end what it started and itself, and kill it if it does not."""
        with contextlib.suppress(WorkerError):
            self.call("close", timeout_s=_CLOSE_TIMEOUT_S)
        self._pipe.close()
        try:
            self._process.wait(_CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _gone(self) -> WorkerError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        self._log.seek(0)
        words = self._log.read().decode(errors="replace").strip()[-2000:]
        return WorkerError(
            f"{self.name} ended with code {self._process.poll()}: {words or 'it wrote nothing'}"
        )


def _serve(worker: Any, pipe: Connection[Any, Any]) -> None:
    """Run commands until ``close``, or until the other end of the pipe is gone."""
    try:
        while True:
            try:
                command, args = pipe.recv()
                if command == "close":
                    break
                pipe.send(_answer(worker, command, args))
            except (EOFError, OSError):
                return
    finally:
        worker.close()
    with contextlib.suppress(OSError):
        pipe.send((True, None))


def _answer(worker: Any, command: str, args: tuple[Any, ...]) -> tuple[bool, Any]:
    try:
        return True, getattr(worker, command)(*args)
    except Exception as error:
        traceback.print_exc()
        return False, f"{command} failed: {type(error).__name__}: {error}"


if __name__ == "__main__":
    # Ctrl-C reaches every process of a terminal; the bench answers it by closing its processes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # As an exception, so that the worker ends what it started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    _serve(load_class(sys.argv[1])(), Connection(int(sys.argv[2])))
