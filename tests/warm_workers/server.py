"""``server.py SOCKET``: forks a worker of Ray's for each process that asks. See ``__init__.py``."""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys

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
    "starlette.datastructures",
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


def serve(address: str) -> None:
    """Wait for the first who asks, load what workers need, then fork one for each."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    waiting = selectors.DefaultSelector()
    waiting.register(listener, selectors.EVENT_READ)
    waiting.register(0, selectors.EVENT_READ)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # its end is that of its stdin
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how a worker ended
    is_warm = False
    while True:
        if any(key.fileobj == 0 for key, _ in waiting.select()):
            return
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
            what = json.loads(b"".join(iter(lambda: connection.recv(65536), b"")))  # noqa: B023
            if os.fork() == 0:
                waiting.close()
                listener.close()
                connection.close()
                work(inherited[:3], inherited[3], **what)
            connection.send(b".")
            for descriptor in inherited:
                os.close(descriptor)


def work(
    streams: list[int], network: int, command: list[str], environment: dict[str, str], directory: str
) -> None:
    """Be the worker that was asked for."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
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
    serve(sys.argv[1])
