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
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

__all__ = ["run_warm", "warm_workers"]

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
        # The end of its stdin ends it.
        server = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[number])
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


def run_warm(
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | str | None = None,
    input: bytes = b"",
    timeout: float = 300.0,
    check: bool = False,
    network: Path | str = "/proc/self/ns/net",
) -> subprocess.CompletedProcess[str]:
    """``subprocess.run`` for a Python program, with its output as text. It finds torch and the like loaded:
    this is not for tests of what is loaded, or of how a process begins. It has a session of its own,
    and the network namespace of the file ``network``."""
    python, *arguments = command
    assert python == sys.executable
    asked = {
        "arguments": arguments,
        "environment": dict(os.environ if env is None else env),
        "directory": os.path.abspath(cwd or os.getcwd()),
    }
    with (
        socket.socket(socket.AF_UNIX) as connection,
        tempfile.TemporaryFile("w+") as stdout,
        tempfile.TemporaryFile("w+") as stderr,
        tempfile.TemporaryFile() as stdin,
        open(network) as namespace,
    ):
        stdin.write(input)
        stdin.seek(0)
        connection.settimeout(timeout)
        connection.connect(os.environ[_SOCKET])
        streams = [each.fileno() for each in (stdin, stdout, stderr, namespace)]
        socket.send_fds(connection, [b"."], streams)
        connection.sendall(json.dumps(asked).encode())
        connection.shutdown(socket.SHUT_WR)
        with connection.makefile() as said:
            process = int(said.readline())
            try:
                code = int(said.readline())
            except TimeoutError:
                os.killpg(os.getpgid(process), signal.SIGKILL)
                raise subprocess.TimeoutExpired(command, timeout) from None
        stdout.seek(0)
        stderr.seek(0)
        done = subprocess.CompletedProcess(command, code, stdout.read(), stderr.read())
    if check:
        done.check_returncode()
    return done
