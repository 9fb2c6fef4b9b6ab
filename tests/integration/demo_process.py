"""``rlplane demo`` as a process of its own, and what it leaves behind."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.warm_workers import WarmProcess

_TOKEN = "RLPLANE_TEST_TOKEN"


class DemoProcess:
    """Started as from a shell: in a group of its own, which Ctrl-C goes to as a whole."""

    def __init__(self, out: Path, *options: str, environment: Mapping[str, str] | None = None) -> None:
        self._token = uuid.uuid4().hex
        self._killed: set[str] = set()
        self._shm_before = set(os.listdir("/dev/shm"))
        self._log = out / f"stderr-{self._token}"
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("RLPLANE_")}
        with self._log.open("wb") as stderr:
            self.process = WarmProcess(
                [sys.executable, "-m", "rlplane.cli", "demo", "--out", str(out), "--json", *options],
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={**inherited, _TOKEN: self._token, **(environment or {})},
            )

    @property
    def stderr(self) -> str:
        return self._log.read_text(errors="replace")

    def wait_for(self, text: str, timeout_s: float = 600.0) -> None:
        """Until it has said ``text`` to the terminal."""
        deadline = time.monotonic() + timeout_s
        while text not in self.stderr:
            assert self.process.poll() is None, f"ended with {self.process.returncode}: {self.stderr}"
            assert time.monotonic() < deadline, f"{text!r} did not come: {self.stderr}"
            time.sleep(0.05)

    def ctrl_c(self) -> None:
        os.killpg(self.process.pid, signal.SIGINT)

    def finish(self, timeout_s: float = 1200.0) -> tuple[int, dict[str, Any]]:
        """Its exit code, and what it said in JSON."""
        try:
            stdout, _ = self.process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.end()
            raise
        return self.process.returncode, json.loads(stdout) if stdout else {}

    def processes(self) -> dict[int, str]:
        """Every process that it has started and that lives, however far removed."""
        found = {}
        for entry in Path("/proc").iterdir():
            try:
                if (
                    entry.name.isdigit()
                    and f"{_TOKEN}={self._token}".encode() in (entry / "environ").read_bytes()
                ):
                    found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
            except OSError:
                continue
        return found

    def wait_until_nothing_is_left(self, timeout_s: float = 180.0) -> None:
        """No process, and nothing in /dev/shm that one of its processes would have made."""
        deadline = time.monotonic() + timeout_s
        pids = {str(pid) for pid in self.processes()}
        while self.processes() and time.monotonic() < deadline:
            pids |= {str(pid) for pid in self.processes()}
            time.sleep(0.1)
        assert not self.processes()
        left = {name for name in os.listdir("/dev/shm") if name.startswith("rlplane")} - self._shm_before
        # Other tests may run beside this one: what is ours has the number of one of our processes.
        assert not [name for name in left if set(name.split("-")) & pids]

    def kill_everything(self) -> None:
        """SIGKILL to all of its processes: the job, the workers, the control service, the aggregator."""
        while pids := self.processes():
            self._killed |= {str(pid) for pid in pids}
            for pid in [self.process.pid, *pids]:  # the job first, which would start others again
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.poll()
        self.process.wait(60)

    def end(self) -> None:
        """Kill what is left of it, and remove what only ``rlplane doctor --clean`` would remove then."""
        if self.process.stdout is not None:
            self.process.stdout.close()
        self.kill_everything()
        for path in Path("/dev/shm").glob("rlplane-*"):
            if set(path.name.split("-")) & self._killed:
                shutil.rmtree(path, ignore_errors=True)
