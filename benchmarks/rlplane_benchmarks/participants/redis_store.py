"""A Redis server that the bench starts, on a Unix socket, without persistence; a hash per row."""

from __future__ import annotations

import ctypes
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlplane_benchmarks.batches import Batch, Columns
from rlplane_benchmarks.participants.store import TINY_WIDTH, tiny_rows

__all__ = ["RedisStore"]

_START_S = 20.0
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


class RedisStore:
    """A connection; the producer runs the server."""

    def __init__(self, role: str, link: dict[str, Any]) -> None:
        import redis

        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self._server: subprocess.Popen[bytes] | None = None
        if role == "producer":
            self._directory = tempfile.TemporaryDirectory(prefix="rlplane-bench-")
            self._path = str(Path(self._directory.name) / "redis")
            self._server = _start_server(self._path)
        else:
            self._path = link["path"]
        self._redis = redis.Redis(unix_socket_path=self._path)
        self._wait_for_it()

    def link(self) -> dict[str, Any]:
        return {"path": self._path}

    def prepare(self, batch: Batch) -> Batch:
        return batch

    def put(self, name: str, ids: list[str], prepared: Batch) -> None:
        # As bytes, because redis-py takes the number of items for the number of bytes.
        columns = {
            field: [row.numpy().data.cast("B") for row in prepared.split(field)] for field in prepared.fields
        }
        pipeline = self._redis.pipeline(transaction=False)
        for row, sample_id in enumerate(ids):
            pipeline.hset(sample_id, mapping={field: rows[row] for field, rows in columns.items()})
        pipeline.execute()

    def get(self, batch: Batch, ids: list[str], order: Sequence[int] | None, references: Any) -> Columns:
        pipeline = self._redis.pipeline(transaction=False)
        for sample_id in ids:
            pipeline.hmget(sample_id, batch.fields)
        rows = pipeline.execute()
        columns: Columns = {}
        for number, (name, value) in enumerate(batch.values.items()):
            pieces = [row[number] for row in rows]
            lengths = None if batch.lengths is None else [len(piece) // value.itemsize for piece in pieces]
            # A bytearray and not bytes, because tensors are writable.
            columns[name] = (torch.frombuffer(bytearray().join(pieces), dtype=value.dtype), lengths)
        return columns

    def columns(self, result: Columns) -> Columns:
        return result

    def clear(self, name: str, ids: list[str]) -> None:
        self._redis.delete(*ids)

    def forget(self) -> None:
        pass

    # Claims: a list of ids that are ready

    def register(self, partition: str) -> None:
        pass

    def tiny(self, numbers: range) -> list[bytes]:
        return [row.numpy().tobytes() for row in tiny_rows(numbers)]

    def put_tiny(self, partition: str, numbers: range, rows: list[bytes]) -> None:
        ids = [f"{partition}.{number}" for number in numbers]
        # In one transaction, as a put of rlplane is.
        pipeline = self._redis.pipeline(transaction=True)
        pipeline.mset(dict(zip(ids, rows, strict=True)))
        pipeline.rpush(partition, *ids)
        pipeline.execute()

    def claim(self, partition: str, count: int, timeout_s: float) -> list[bytes]:
        claimed: list[bytes] = []
        while len(claimed) < count:
            answer = self._redis.blmpop(timeout_s, 1, partition, direction="LEFT", count=count - len(claimed))
            if answer is None:
                raise TimeoutError(f"{len(claimed)} of {count} rows came within {timeout_s:g} s")
            claimed += answer[1]
        return claimed

    def size(self, claimed: list[bytes]) -> int:
        return len(claimed)

    def read_tiny(self, partition: str, claimed: list[bytes]) -> Tensor:
        rows: Any = self._redis.mget(claimed)
        return torch.frombuffer(bytearray().join(rows), dtype=torch.int64).view(-1, TINY_WIDTH)

    def clear_tiny(self, partition: str, claimed: list[bytes]) -> None:
        self._redis.delete(*claimed)

    def close(self) -> None:
        self._redis.close()
        if self._server is not None:
            self._server.terminate()
            self._server.wait(20)
        if self._directory is not None:
            self._directory.cleanup()

    def _wait_for_it(self) -> None:
        import redis

        deadline = time.monotonic() + _START_S
        while True:
            try:
                self._redis.ping()
                return
            except redis.ConnectionError:
                ended = self._server is not None and self._server.poll() is not None
                if ended or time.monotonic() > deadline:
                    raise
                time.sleep(0.02)


def _start_server(path: str) -> subprocess.Popen[bytes]:
    options = {"port": "0", "unixsocket": path, "unixsocketperm": "700", "save": "", "appendonly": "no"}
    command = ["redis-server"]
    for name, value in options.items():
        command += [f"--{name}", value]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_die_with_parent)


def _die_with_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
