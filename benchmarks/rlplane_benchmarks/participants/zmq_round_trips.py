"""The limit of the machine for messages: a bare ZMQ round trip between two processes.

With many clients, a cycle is four of them: as many as a put, a claim, a get and a clear need at least.
"""

from __future__ import annotations

import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import zmq
from torch import Tensor

from rlplane_benchmarks.participants.store import tiny_rows

__all__ = ["PingStore"]

_MESSAGE = b"x" * 64


class PingStore:
    """The producer asks with a DEALER; the consumer answers with a ROUTER, over a Unix-domain socket."""

    def __init__(self, role: str, link: dict[str, Any]) -> None:
        self._context = zmq.Context(io_threads=1)
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self._asks = role != "consumer"
        if role == "producer":
            self._directory = tempfile.TemporaryDirectory(prefix="rlplane-bench-")
            self._address = f"ipc://{Path(self._directory.name) / 'ping'}"
        else:
            self._address = link["address"]
        if self._asks:
            self._socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
            self._socket.connect(self._address)
        else:
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
            self._round_trip()
            times.append(time.perf_counter() - started)
        return times

    def register(self, partition: str) -> None:
        pass

    def tiny(self, numbers: range) -> Tensor:
        return tiny_rows(numbers)

    def put_tiny(self, partition: str, numbers: range, rows: Tensor) -> None:
        self._rows = rows
        self._round_trip()

    def claim(self, partition: str, count: int, timeout_s: float) -> Tensor:
        self._round_trip()
        return self._rows

    def read_tiny(self, partition: str, claimed: Tensor) -> Tensor:
        self._round_trip()
        return claimed

    def clear_tiny(self, partition: str, claimed: Tensor) -> None:
        self._round_trip()

    def _round_trip(self) -> None:
        self._socket.send(_MESSAGE)
        answer = self._socket.recv()
        if answer != _MESSAGE:
            raise RuntimeError(f"the echo of {len(_MESSAGE)} bytes came back as {len(answer)}")

    def _echo(self) -> None:
        socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        socket.bind(self._address)
        try:
            while True:
                socket.send_multipart(socket.recv_multipart())
        except zmq.ContextTerminated:
            socket.close(linger=0)

    def close(self) -> None:
        if self._asks:
            self._socket.close(linger=0)
        self._context.term()
        if self._directory is not None:
            self._directory.cleanup()
