"""Ray's workers, and programs that tests run, forked from a process that has torch loaded.

Each process that runs a part of the plane loads torch and tensordict, which takes three seconds of CPU time:
with hundreds of them that was most of what the tests took. They are processes of their own all the same, and
Ray watches and ends its workers by their numbers.

    server.py   loads what they need when it is first asked, and forks a process for each who asks
    site/       on the path of every Python of the tests: one that Ray starts as a worker asks, and ends
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

__all__ = ["WarmProcess", "run_warm", "warm_workers"]

_HERE = Path(__file__).parent
_SITE = str(_HERE / "site")
_SOCKET = "WARM_WORKERS_SOCKET"


@contextlib.contextmanager
def warm_workers() -> Iterator[None]:
    """Inside, the workers of every Ray that this process and its children start are forked, by the server of
    a process above if there is one."""
    # The bench's processes inherit the module path and not its variable.
    sys.path.append(_SITE)
    if _SOCKET in os.environ:
        yield
        return
    directory = tempfile.mkdtemp(prefix="rlp-", dir="/tmp")
    address = os.path.join(directory, "warm.sock")
    before = os.environ.get("PYTHONPATH")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(64)
        number = listener.fileno()
        command = [sys.executable, str(_HERE / "server.py"), str(number)]
        # The end of its stdin ends it. Its processes show their environment in the place of this variable.
        room = {**os.environ, "WARM_WORKERS_ROOM": "." * (1 << 16)}
        server = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[number], env=room)
    os.environ[_SOCKET] = address
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_SITE, before]))
    try:
        yield
    finally:
        server.kill()
        server.wait()
        assert server.stdin is not None
        server.stdin.close()
        del os.environ[_SOCKET], os.environ["PYTHONPATH"]
        if before is not None:
            os.environ["PYTHONPATH"] = before
        shutil.rmtree(directory, ignore_errors=True)


class WarmProcess(subprocess.Popen[str]):
    """``subprocess.Popen`` for a Python program, with pipes of text. It finds torch and the like loaded: it
    is not for tests of what is loaded or of how a process begins. It has a session of its own, the network
    namespace of the file ``network``, and a parent that tells us how it ended."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        network: Path | str = "/proc/self/ns/net",
        stdin: int | IO[Any] | None = None,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
        cwd: Path | str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._network = network
        super().__init__(command, stdin=stdin, stdout=stdout, stderr=stderr, cwd=cwd, env=env, text=True)

    def _execute_child(self, command: Sequence[str], *details: Any) -> None:
        """What ``Popen`` does to fork and to execute."""
        _, _, _, _, cwd, env, _, _, _, *pipes = details
        read_in, write_in, read_out, write_out, read_err, write_err, *_ = pipes
        python, *arguments = command
        assert python == sys.executable
        asked = {
            "arguments": arguments,
            "environment": dict(os.environ if env is None else env),
            "directory": os.path.abspath(cwd or os.getcwd()),
        }
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(os.environ[_SOCKET])
        theirs = [read_in, write_out, write_err]
        with open(self._network) as network:
            streams = [number if stream == -1 else stream for number, stream in enumerate(theirs)]
            socket.send_fds(connection, [b"."], [*streams, network.fileno()])
        connection.sendall(json.dumps(asked).encode())
        connection.shutdown(socket.SHUT_WR)
        self._says = connection.makefile()
        connection.close()
        self.pid = int(self._says.readline())
        self._child_created = True
        self._devnull: int
        for stream, other in zip(theirs, (write_in, read_out, read_err), strict=True):
            if stream not in (-1, getattr(self, "_devnull", None)) and other != -1:
                os.close(stream)
        if hasattr(self, "_devnull"):
            os.close(self._devnull)

    def _try_wait(self, flags: int) -> tuple[int, int]:
        """The process's number, or 0 when it has not ended, and how it ended as ``waitpid`` tells it."""
        if flags & os.WNOHANG and not select.select([self._says], [], [], 0)[0]:
            return 0, 0
        said = self._says.readline()
        self._says.close()
        return self.pid, int(said or signal.SIGKILL)

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        itself: Any = self
        if self.returncode is None and itself._waitpid_lock.acquire(False):
            try:
                process, status = self._try_wait(os.WNOHANG)
                if process:
                    itself._handle_exitstatus(status)
            finally:
                itself._waitpid_lock.release()
        return self.returncode


def run_warm(
    command: Sequence[str], *, input: str = "", timeout: float = 300.0, check: bool = False, **how: Any
) -> subprocess.CompletedProcess[str]:
    """``subprocess.run`` for such a program, with its output captured."""
    pipe = subprocess.PIPE
    with WarmProcess(command, stdin=pipe, stdout=pipe, stderr=pipe, **how) as process:
        try:
            stdout, stderr = process.communicate(input, timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(command, process.returncode, stdout, stderr)
    if check:
        done.check_returncode()
    return done
