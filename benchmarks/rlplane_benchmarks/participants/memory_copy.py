"""The limit of the machine for bytes: a torch copy into shared memory that is mapped and was used before.

The reading side copies out of it, into memory of its own that has been used before, too.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlplane_benchmarks.batches import Batch, Columns

__all__ = ["CopyStore", "OneThreadCopyStore"]

_ALIGNMENT = 64


class CopyStore:
    """One mapped file without a name, as large as the largest batch so far, and no bookkeeping."""

    threads: int | None = None

    def __init__(self, role: str, link: dict[str, Any]) -> None:
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        if role == "producer":
            self._fd = os.memfd_create("rlplane-bench")
        else:
            # The producer's file through its descriptor: a file without a name cannot be left behind.
            self._fd = os.open(link["path"], os.O_RDWR)
        self._mapped = torch.empty(0, dtype=torch.uint8)
        self._own = torch.empty(0, dtype=torch.uint8)

    def link(self) -> dict[str, Any]:
        return {"path": f"/proc/{os.getpid()}/fd/{self._fd}"}

    def prepare(self, batch: Batch) -> Batch:
        size = sum(_aligned(value) for value in batch.values.values())
        if size > self._mapped.numel():
            if os.fstat(self._fd).st_size < size:
                os.ftruncate(self._fd, size)
            self._mapped = torch.from_numpy(np.frombuffer(mmap.mmap(self._fd, size), np.uint8))
            self._own = torch.zeros(size, dtype=torch.uint8)
        return batch

    def put(self, name: str, ids: list[str], prepared: Batch) -> None:
        at = 0
        for value in prepared.values.values():
            _view(self._mapped, at, value).copy_(value)
            at += _aligned(value)

    def get(self, batch: Batch, ids: list[str], order: Sequence[int] | None, references: Any) -> Columns:
        at, columns = 0, {}
        for name, value in batch.values.items():
            source, own = _view(self._mapped, at, value), _view(self._own, at, value)
            if order is None:
                own.copy_(source)
            elif batch.lengths is None:
                torch.index_select(source, 0, torch.tensor(order), out=own)
            else:
                rows = torch.split(source, batch.lengths)
                torch.cat([rows[row] for row in order], out=own)
            columns[name] = (own, None)
            at += _aligned(value)
        return columns  # type: ignore[return-value]

    def columns(self, result: Columns) -> Columns:
        return result

    def clear(self, name: str, ids: list[str]) -> None:
        pass

    def forget(self) -> None:
        self._mapped = self._own = torch.empty(0, dtype=torch.uint8)

    def close(self) -> None:
        os.close(self._fd)


class OneThreadCopyStore(CopyStore):
    """The same for a process that may use one core."""

    threads = 1


def _aligned(value: Tensor) -> int:
    return -(-value.numel() * value.itemsize // _ALIGNMENT) * _ALIGNMENT


def _view(memory: Tensor, at: int, like: Tensor) -> Tensor:
    return memory[at : at + like.numel() * like.itemsize].view(like.dtype).view(like.shape)
