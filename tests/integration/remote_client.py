"""DataPlaneClients whose calls are made by another process, so that a suite can be run across processes."""

from __future__ import annotations

import io
import itertools
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, cast

import cloudpickle
import torch
from tests.integration.shm_workers import context

from rlplane.interfaces import DataPlaneClient


def _pack(value):
    # Plain pickle cannot load tensors of some of the newer dtypes.
    buffer = io.BytesIO()
    torch.save(value, buffer, pickle_module=cloudpickle)
    return buffer.getvalue()


def _unpack(data):
    return torch.load(io.BytesIO(data), weights_only=False)


def _serve(pipe):
    lock = threading.Lock()
    clients: dict[int, Any] = {}

    def call(number, key, method, args, kwargs):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                outcome = (True, getattr(clients[key], method)(*args, **kwargs))
            except BaseException as error:
                outcome = (False, error)
        said = [(str(item.message), item.category) for item in caught]
        with lock:
            pipe.send_bytes(_pack((number, outcome, said)))

    while True:
        try:
            number, key, method, args, kwargs = _unpack(pipe.recv_bytes())
        except EOFError:
            return
        if method == "stop":
            return
        if method == "adopt":
            clients[key] = args[0]
        else:
            # A thread per call, because a claim may wait while others go on.
            threading.Thread(target=call, args=(number, key, method, args, kwargs), daemon=True).start()


class RemoteProcess:
    """A process that makes the calls of any number of clients."""

    def __init__(self):
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._waiting = {}
        threading.Thread(target=self._receive, daemon=True).start()

    def adopt(self, client):
        """A client that lives there; ``client`` is pickled into the process."""
        key = next(self._numbers)
        with self._lock:
            self._pipe.send_bytes(_pack((key, key, "adopt", (client,), {})))
        # Its methods are put into the class below, where a type checker does not see them.
        return cast("Callable[..., RemoteClient]", RemoteClient)(self, key)

    def call(self, key, method, args, kwargs):
        future: Future[Any] = Future()
        with self._lock:
            number = next(self._numbers)
            self._waiting[number] = future
            self._pipe.send_bytes(_pack((number, key, method, args, kwargs)))
        (fine, value), said = future.result()
        for message, category in said:
            warnings.warn(message, category, stacklevel=4)
        if not fine:
            raise value
        return value

    def stop(self):
        # By a message: our end stays open, however often it is closed, while a thread reads from it.
        with self._lock:
            self._pipe.send_bytes(_pack((next(self._numbers), None, "stop", (), {})))
        self.process.join(120)
        assert self.process.exitcode == 0

    def _receive(self):
        while True:
            try:
                number, outcome, said = _unpack(self._pipe.recv_bytes())
            except (EOFError, OSError):
                return
            self._waiting.pop(number).set_result((outcome, said))


class RemoteClient(DataPlaneClient):
    """Forwards every method of the contract to its process."""

    def __init__(self, process, key):
        self._process, self._key = process, key


def _forward(method):
    return lambda self, *args, **kwargs: self._process.call(self._key, method, args, kwargs)


for _method in [name for name in vars(DataPlaneClient) if not name.startswith("_")]:
    setattr(RemoteClient, _method, _forward(_method))
RemoteClient.__abstractmethods__ = frozenset()
