"""A process in which commands run: one side of a participant, or the driver of the cluster bench.

Commands and their results travel over a pipe. The process ends what it started when it is told to close, and
also when whoever runs the bench has died.

To load torch takes seconds of CPU time, and a bench has dozens of these processes. So they are forked from
one that has it loaded and does nothing else.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection, Pipe
from pkgutil import resolve_name
from typing import Any

__all__ = ["WorkerError", "WorkerProcess"]

_FORKS = multiprocessing.get_context("forkserver")
# Not Ray, which reads the environment when it is loaded, nor the store of a participant that may need it.
_FORKS.set_forkserver_preload([__name__, "rlplane_benchmarks.batches"])
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
        self._log = tempfile.NamedTemporaryFile()  # noqa: SIM115 - it lives as long as the process
        ours, theirs = Pipe()
        inherited = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith("RLPLANE_") or key.startswith("RLPLANE_BENCH_")
        }
        # What the process starts must be able to import whatever the caller can.
        inherited["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        self._process = _FORKS.Process(
            target=_run, args=(worker, theirs, self._log.name, {**inherited, **(environment or {})})
        )
        self._process.start()
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
        self._process.join(_CLOSE_TIMEOUT_S)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
        self._log.close()

    def _gone(self) -> WorkerError:
        self._process.join(5)
        self._log.seek(0)
        words = self._log.read().decode(errors="replace").strip()[-2000:]
        return WorkerError(
            f"{self.name} ended with code {self._process.exitcode}: {words or 'it wrote nothing'}"
        )


def _run(worker: str, pipe: Connection[Any, Any], log: str, environment: dict[str, str]) -> None:
    """Be the process that was forked."""
    os.environ.clear()
    os.environ.update(environment)
    for path, number in ((os.devnull, 0), (log, 1), (log, 2)):
        stream = os.open(path, os.O_RDWR | os.O_APPEND)
        os.dup2(stream, number)
        os.close(stream)
    # Ctrl-C reaches every process of a terminal; the bench answers it by closing its processes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # As an exception, so that the worker ends what it started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    _serve(resolve_name(worker)(), pipe)


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
