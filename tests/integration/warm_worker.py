"""Ray's workers, forked from a process that has torch loaded.

Each worker of a cluster that runs a part of the plane loads torch and tensordict, which takes three seconds
of CPU time: with hundreds of workers that was most of what the tests on clusters took. They are processes of
their own all the same, which Ray starts, watches and ends by their numbers.

Ray runs ``warm_worker.py SOCKET default_worker.py …`` where it would run ``python default_worker.py …``; that
is what ``py_executable`` of its runtime environment is for. This hands its arguments, environment and
standard streams to ``warm_worker.py SOCKET``, which forks, and ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

# Not Ray: it reads the environment of its worker when it is loaded.
_LOADED = ("torch", "tensordict", "omegaconf")
# Where it is set, the site packages are not what they were when this process started.
_STANDS_IN = "RLPLANE_AS_TRANSFER_QUEUE"


@contextlib.contextmanager
def warm_workers(directory: str) -> Iterator[dict[str, str]]:
    """Have a process to fork from; the runtime environment of a Ray whose workers shall be forked from it."""
    address = os.path.join(directory, "warm.sock")
    command = [sys.executable, __file__, address]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as server:  # the end of its stdin ends it
        try:
            yield {"py_executable": f"{sys.executable} -S -E {__file__} {address}"}
        finally:
            server.kill()


def ask(address: str, command: list[str]) -> None:
    """In the process that Ray has started: have the worker forked."""
    if os.environ.get(_STANDS_IN, "0") not in ("", "0"):
        os.execv(sys.executable, [sys.executable, *command])
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        socket.send_fds(connection, [b"."], [0, 1, 2])
        what = {"command": command, "environment": dict(os.environ), "directory": os.getcwd()}
        connection.sendall(json.dumps(what).encode())
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)  # it has been forked


def serve(address: str) -> None:
    """Load what workers need, then fork one for each that asks."""
    import gc
    import importlib
    import selectors

    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)  # whoever is too early waits
    for name in _LOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how a worker ended
    waiting = selectors.DefaultSelector()
    waiting.register(listener, selectors.EVENT_READ)
    waiting.register(0, selectors.EVENT_READ)
    while True:
        if any(key.fileobj == 0 for key, _ in waiting.select()):
            return
        connection, _ = listener.accept()
        with connection:
            _, streams, _, _ = socket.recv_fds(connection, 1, 3)
            what = json.loads(b"".join(iter(lambda: connection.recv(65536), b"")))  # noqa: B023
            if os.fork() == 0:
                waiting.close()
                listener.close()
                connection.close()
                work(streams, **what)
            for stream in streams:
                os.close(stream)


def work(streams: list[int], command: list[str], environment: dict[str, str], directory: str) -> None:
    """Be the worker that was asked for."""
    import runpy

    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    sys.argv = command
    # As in a process that begins with this environment.
    mine = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:1] = [os.path.dirname(command[0]), *mine]
    code = 1
    try:
        runpy.run_path(command[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        serve(sys.argv[1])
    else:
        ask(sys.argv[1], sys.argv[2:])
