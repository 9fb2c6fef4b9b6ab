"""Ray's workers, forked from a process that has torch loaded.

Each worker of a cluster that runs a part of the plane loads torch and tensordict, which takes three seconds
of CPU time: with hundreds of workers that was most of what the tests on clusters took. They are processes of
their own all the same, which Ray watches and ends by their numbers.

    server.py   loads what workers need when it is first asked, and forks a worker for each who asks
    site/       on the path of every Python of the tests: one that Ray starts as a worker asks, and ends
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

__all__ = ["warm_workers"]

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
    server = subprocess.Popen(  # the end of its stdin ends it
        [sys.executable, str(_HERE / "server.py"), address], stdin=subprocess.PIPE
    )
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
