"""Whoever starts the control service of a machine, starts it again when it dies, and ends it."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlplane.adapters.local.process import SERVICE_KEYS
from rlplane.errors import PlaneConnectionError
from rlplane.storage.shm.directory import PlaneDirectory, remove_if_dead

logger = logging.getLogger(__name__)

_START_TIMEOUT_S = 60.0
_END_TIMEOUT_S = 10.0
# A service that dies again and again, each time at once, has a reason that another start does not change.
_FEWEST_SECONDS, _MOST_DEATHS = 1.0, 5


class Supervisor:
    """Runs the service process of a new plane until :meth:`close`.

    Args:
        cfg: The plane's config.
        command: What to run instead of the service's own module. Takes the same arguments.
        needs_bootstrap: Whether the plane ends with its bootstrap client.
    """

    def __init__(
        self,
        cfg: Mapping[str, Any],
        command: Sequence[str] = (sys.executable, "-m", "rlplane.adapters.local.process"),
        *,
        needs_bootstrap: bool = True,
    ) -> None:
        self._cfg = {key: cfg.get(key) for key in SERVICE_KEYS}
        self._command = [*command, "--config", json.dumps(self._cfg)]
        if not needs_bootstrap:
            self._command.append("--without-bootstrap")
        self._pid = os.getpid()
        self._closing = False
        # Held to start a service and to decide that none is started any more; by a signal handler too.
        self._starting = threading.RLock()
        self._supervised: io.FileIO | None = None
        self._process, self.address = self._start()
        self._path = Path(self.address.removeprefix("shm://"))
        if self._cfg["journal"] is not False and self._cfg["reconnect_timeout_s"] != 0:
            self._supervised = PlaneDirectory.at(self.address).supervise()
            threading.Thread(target=self._watch, name="rlplane-supervisor", daemon=True).start()

    @property
    def pid(self) -> int:
        """The process of the service."""
        return self._process.pid

    def close(self) -> None:
        """Wait for the service to end, or end it, and remove what it leaves behind."""
        if self._pid != os.getpid():
            return
        with self._starting:
            self._closing = True
        if not _has_ended(self._process.pid, _END_TIMEOUT_S):
            os.kill(self._process.pid, signal.SIGKILL)
            _has_ended(self._process.pid, _END_TIMEOUT_S)
        self._stop_supervising()
        remove_if_dead(self._path)
        if not sys.is_finalizing():
            self._process.wait()

    def wait(self) -> int:
        """Wait until the plane has ended; the code that its last service ended with."""
        while True:
            process = self._process
            code = process.wait()
            with self._starting:
                if self._process is process and (self._supervised is None or not self._path.exists()):
                    return code
            time.sleep(0.01)

    def terminate(self) -> None:
        """Tell the service to end."""
        with self._starting:
            self._closing = True
        self._process.terminate()

    def _watch(self) -> None:
        deaths = 0
        while True:
            began = time.monotonic()
            code = self._process.wait()
            deaths = deaths + 1 if time.monotonic() - began < _FEWEST_SECONDS else 1
            with self._starting:
                # Whoever ends the plane in order has said so before its process ends; a plane that ended by
                # itself, such as by SIGTERM, has removed its directory.
                if self._closing or not self._path.exists():
                    return
                if deaths > _MOST_DEATHS:
                    logger.error("the control service died %d times in a row; that is enough", deaths)
                    break
                logger.warning("the control service ended with code %s; it is started again", code)
                try:
                    self._process, _ = self._start(self._path)
                except (OSError, PlaneConnectionError) as error:
                    # Another death, of one that has not lived for long.
                    logger.warning("the control service did not start: %s", error)
        self._stop_supervising()

    def _stop_supervising(self) -> None:
        supervised, self._supervised = self._supervised, None
        if supervised is not None:
            supervised.close()

    def _start(self, take_over: Path | None = None) -> tuple[subprocess.Popen[bytes], str]:
        read_fd, write_fd = os.pipe()
        command = [*self._command, "--ready-fd", str(write_fd)]
        if take_over is not None:
            command += ["--take-over", str(take_over)]
        try:
            # Columns of numbers grow page by page, and not all of them by a huge page within one put.
            environment = {"NUMPY_MADVISE_HUGEPAGE": "0", **os.environ}
            process = subprocess.Popen(
                command, pass_fds=[write_fd], stdin=subprocess.DEVNULL, env=environment
            )
        finally:
            os.close(write_fd)
        try:
            address = _first_words(process.pid, read_fd)
        finally:
            os.close(read_fd)
        if not address:
            code = process.wait(_START_TIMEOUT_S)
            with contextlib.suppress(OSError):
                process.kill()
            raise PlaneConnectionError(
                f"the control service ended with code {code} before it was ready; see its log"
            )
        return process, address


def _first_words(pid: int, read_fd: int) -> str:
    """What a child writes into a pipe, in one piece; nothing if it ends without. That the pipe has not ended
    does not matter: a process that another thread has forked meanwhile may hold it too."""
    os.set_blocking(read_fd, False)
    with contextlib.suppress(ProcessLookupError):
        child = os.pidfd_open(pid)
        try:
            poll = select.poll()
            poll.register(child, select.POLLIN)
            poll.register(read_fd, select.POLLIN)
            poll.poll()
        finally:
            os.close(child)
    try:
        return os.read(read_fd, select.PIPE_BUF).decode()
    except BlockingIOError:
        return ""


def _has_ended(pid: int, timeout_s: float) -> bool:
    """Wait for the end of a child. Not by ``Popen.wait``: the thread that supervises is in the middle of
    that, and holds its lock for ever when the interpreter ends before it."""
    try:
        child = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        poll = select.poll()
        poll.register(child, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))
    finally:
        os.close(child)
