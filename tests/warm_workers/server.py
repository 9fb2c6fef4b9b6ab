"""``server.py NUMBER``, which is that of a socket that listens: forks a process for each who asks, to be a
worker of Ray's or a program. See ``__init__.py``."""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import multiprocessing.process
import os
import runpy
import selectors
import signal
import socket
import sys
import types
from typing import Any

# What a worker of a plane loads. Not Ray, which reads the environment of its worker when it is loaded, nor
# what loads Ray; but what Ray itself loads.
_LOADED = (
    "torch",
    "tensordict",
    "omegaconf",
    "google.protobuf.internal.builder",
    "google.protobuf.text_format",
    "filelock",
    "jsonschema",
    "msgpack",
    "psutil",
    "pydantic.main",
    "requests",
    "uvloop",
    "wcwidth",
    "yaml",
    "zmq.asyncio",
    "rlplane.adapters.async_client",
    "rlplane.adapters.transfer_queue.client",
    "rlplane.adapters.transfer_queue.service",
    "rlplane.storage.mooncake.processes",
)
_CLONE_NEWNET = 0x40000000


def serve(listener: socket.socket) -> dict[str, Any] | None:
    """Wait for the first who asks, load what workers need, then fork a process for each. It returns in those,
    what was asked for."""
    waiting = selectors.DefaultSelector()
    waiting.register(listener, selectors.EVENT_READ)
    waiting.register(0, selectors.EVENT_READ)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # its end is that of its stdin
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # who wants to know how a process ended has it watched
    is_warm = False
    while True:
        if any(key.fileobj == 0 for key, _ in waiting.select()):
            return None
        if not is_warm:
            for name in _LOADED:
                importlib.import_module(name)
            assert "ray" not in sys.modules
            gc.collect()
            gc.freeze()
            is_warm = True
        connection, _ = listener.accept()
        with connection:
            _, inherited, _, _ = socket.recv_fds(connection, 1, 4)
            asked = json.loads(b"".join(iter(lambda: connection.recv(65536), b"")))  # noqa: B023
            if os.fork() == 0:
                waiting.close()
                listener.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                if "arguments" in asked:
                    _watch(connection, inherited)
                os.setsid()
                signal.signal(signal.SIGINT, signal.default_int_handler)
                _show(asked["environment"])
                if "arguments" in asked:
                    connection.send(b"%d\n" % os.getpid())
                connection.close()
                return {"streams": inherited[:3], "network": inherited[3], **asked}
            if "arguments" not in asked:
                connection.send(b".")
            for descriptor in inherited:
                os.close(descriptor)


def _watch(connection: socket.socket, inherited: list[int]) -> None:
    """Return in one more process, which tells its number; here, tell how it ended."""
    if process := os.fork():
        for descriptor in inherited:
            os.close(descriptor)
        _, status = os.waitpid(process, 0)
        connection.send(b"%d\n" % status)
        os._exit(0)


def _begin(streams: list[int], network: int, environment: dict[str, str], directory: str) -> None:
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    # Tests have hosts that are network namespaces.
    if os.fstat(network).st_ino != os.stat("/proc/self/ns/net").st_ino:
        assert ctypes.CDLL(None, use_errno=True).setns(network, _CLONE_NEWNET) == 0
    os.close(network)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    # Where processes that it spawns look for its script.
    multiprocessing.process.ORIGINAL_DIR = directory  # type: ignore[attr-defined]
    if threads := environment.get("OMP_NUM_THREADS"):  # it is read when torch is loaded
        sys.modules["torch"].set_num_threads(int(threads))
    if environment.get("RLPLANE_AS_TRANSFER_QUEUE", "0") not in ("", "0"):  # and this when Python starts
        importlib.import_module("rlplane.compat.transfer_queue_import").install()


def _show(environment: dict[str, str]) -> None:
    """Have ``/proc`` show this environment, by which tests find processes, and not that of the server."""
    with open("/proc/self/stat") as stat:
        begin, end = map(int, stat.read().rpartition(")")[2].split()[47:49])
    text = b"".join(f"{name}={value}\0".encode() for name, value in environment.items())
    ctypes.memmove(begin, text[: end - begin].ljust(end - begin, b"\0"), end - begin)


def _set_path(first: str, environment: dict[str, str]) -> None:
    """As in a process that begins with this environment."""
    sys.path[:1] = [first, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]


def work(command: list[str], environment: dict[str, str], **rest: Any) -> None:
    """Be the worker that was asked for."""
    _begin(environment=environment, **rest)
    sys.argv = command
    _set_path(os.path.dirname(command[0]), environment)
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


def run(arguments: list[str], environment: dict[str, str], **rest: Any) -> None:
    """Be ``python`` with these arguments: ``-c CODE``, ``-m MODULE`` or a script, and its own. Ends as that
    does, so threads are waited for and what was registered for the end is called."""
    _begin(environment=environment, **rest)
    # Those of the server may have been made for a terminal.
    sys.stdin, sys.stdout, sys.stderr = (
        open(number, "w" if number else "r", closefd=False, buffering=1 if number == 2 else -1)  # noqa: SIM115
        for number in range(3)
    )
    kind, *given = arguments
    try:
        if kind == "-m":
            sys.argv = given
            _set_path(os.getcwd(), environment)
            runpy.run_module(given[0], run_name="__main__", alter_sys=True)
            return
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        if kind == "-c":
            sys.argv = ["-c", *given[1:]]
            _set_path("", environment)
            code = compile(given[0], "<string>", "exec")
        else:
            sys.argv = arguments
            _set_path(os.path.dirname(os.path.abspath(kind)), environment)
            main.__file__ = kind
            with open(kind, "rb") as script:
                code = compile(script.read(), kind, "exec")
        exec(code, main.__dict__)
    except Exception as error:
        # Without the lines of this file, which the program knows nothing of.
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)


if __name__ == "__main__":
    what = serve(socket.socket(fileno=int(sys.argv[1])))
    if what is not None:
        (run if "arguments" in what else work)(**what)
