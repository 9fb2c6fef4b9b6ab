"""Python loads this when it starts, in all processes of the tests. One that Ray has started to be a worker
has the worker forked by ``server.py``, and ends.

Ray runs ``python default_worker.py …``, or ``python setup_worker.py default_worker.py …``, where the first
sets the environment up and becomes the second. What it would do beside setting variables, it does itself.
"""

import os
import sys


def _ask(address: str, arguments: list[str]) -> None:
    import json
    import socket

    command = []
    context = {}
    for argument in arguments:
        name, _, value = argument.partition("=")
        if name == "--serialized-runtime-env-context":
            context = json.loads(value)
        elif name == "--language":
            if value != "PYTHON":
                return
        elif not argument.endswith("/setup_worker.py"):
            command.append(argument)
    variables = context.pop("env_vars", None) or {}
    if context.pop("py_executable", sys.executable) != sys.executable or any(context.values()):
        return
    environment = {**os.environ, **variables}
    if any("$" in value for value in variables.values()):
        return
    what = {"command": command, "environment": environment, "directory": os.getcwd()}
    network = os.open("/proc/self/ns/net", os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        socket.send_fds(connection, [b"."], [0, 1, 2, network])
        connection.sendall(json.dumps(what).encode())
        connection.shutdown(socket.SHUT_WR)
        if connection.recv(1):
            os._exit(0)


if os.path.dirname((sys.orig_argv[1:] or [""])[0]).endswith("/ray/_private/workers"):
    _address = os.environ.get("WARM_WORKERS_SOCKET")
    if _address:
        _ask(_address, sys.orig_argv[1:])
