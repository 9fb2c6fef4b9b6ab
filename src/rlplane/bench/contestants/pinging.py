"""The limit of the machine for messages: a bare ZMQ round trip between two processes."""

from __future__ import annotations

import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import zmq

__all__ = ["PingStore"]

_MESSAGE = b"x" * 64


class PingStore:
    """The producer asks with a DEALER; the consumer answers with a ROUTER, over a Unix-domain socket."""

    def __init__(self, role: str, link: dict[str, Any]) -> None:
        self._context = zmq.Context(io_threads=1)
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        if role == "producer":
            self._directory = tempfile.TemporaryDirectory(prefix="rlplane-bench-")
            self._address = f"ipc://{Path(self._directory.name) / 'ping'}"
            self._socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
            self._socket.connect(self._address)
        else:
            self._address = link["address"]
            threading.Thread(target=self._echo, daemon=True).start()

    def link(self) -> dict[str, Any]:
        return {"address": self._address}

    def ping(self, count: int, pause_s: float) -> list[float]:
        """Seconds of each round trip; with a pause, both sides have gone to sleep before each."""
        times = []
        for _ in range(count):
            if pause_s:
                time.sleep(pause_s)
            started = time.perf_counter()
            self._socket.send(_MESSAGE)
            answer = self._socket.recv()
            times.append(time.perf_counter() - started)
            if answer != _MESSAGE:
                raise RuntimeError(f"the echo of {len(_MESSAGE)} bytes came back as {len(answer)}")
        return times

    def _echo(self) -> None:
        socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        socket.bind(self._address)
        try:
            while True:
                socket.send_multipart(socket.recv_multipart())
        except zmq.ContextTerminated:
            socket.close(linger=0)

    def close(self) -> None:
        if self._directory is not None:
            self._socket.close(linger=0)
        self._context.term()
        if self._directory is not None:
            self._directory.cleanup()
