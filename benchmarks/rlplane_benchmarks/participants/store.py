"""What the store of a participant has: one side of an engine, through the engine's own API, inside a worker.

``put``, ``get`` and ``clear`` are timed, and do all that a user of that engine would have to do: a put takes
tensors, and a get ends with one tensor per field. ``prepare`` and ``columns`` are not timed: they translate
between the bench's batches and what the engine's API takes and returns, without touching the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from tensordict import NonTensorStack
from torch import Tensor

from rlplane_benchmarks.batches import Batch, Columns
from rlplane_benchmarks.images import tensors_of

__all__ = [
    "TINY_WIDTH",
    "ClusterStore",
    "DataStore",
    "TinyStore",
    "check_tiny",
    "columns_of",
    "tiny_rows",
]

TINY_WIDTH = 8


class DataStore(Protocol):
    """Takes part in ``data``."""

    def __init__(self, role: str, link: dict[str, Any]) -> None:
        """``role`` is ``producer``, which starts the engine, ``consumer`` or ``client``, which join it.

        ``link`` is what the producer's :meth:`link` returned, and empty for the producer.
        """

    def link(self) -> dict[str, Any]: ...
    def prepare(self, batch: Batch) -> Any: ...
    def put(self, name: str, ids: list[str], prepared: Any) -> None: ...
    def get(self, batch: Batch, ids: list[str], order: Sequence[int] | None, references: Any) -> Any: ...
    def columns(self, result: Any) -> Columns: ...
    def clear(self, name: str, ids: list[str]) -> None: ...
    def forget(self) -> None: ...
    def close(self) -> None: ...


class TinyStore(Protocol):
    """Takes part in ``wake``, ``claims`` and ``clients``: rows of a few numbers that are claimed."""

    def register(self, partition: str) -> None: ...
    def tiny(self, numbers: range) -> Any: ...
    def put_tiny(self, partition: str, numbers: range, rows: Any) -> None: ...
    def claim(self, partition: str, count: int, timeout_s: float) -> Any: ...
    def size(self, claimed: Any) -> int: ...
    def read_tiny(self, partition: str, claimed: Any) -> Tensor: ...
    def clear_tiny(self, partition: str, claimed: Any) -> None: ...


class ClusterStore(DataStore, TinyStore, Protocol):
    """Takes part in the cluster bench, on the Ray that the process is connected to."""

    def control_pid(self) -> int: ...


def tiny_rows(numbers: range) -> Tensor:
    """For each number a row that can be checked by itself: the number, and the ones after it."""
    return torch.arange(numbers.start, numbers.stop).unsqueeze(1) + torch.arange(TINY_WIDTH)


def check_tiny(rows: Tensor) -> str | None:
    """What is wrong with rows that ``tiny_rows`` made, in whatever order, or None."""
    if rows.ndim != 2 or rows.shape[1] != TINY_WIDTH or rows.dtype is not torch.int64:
        return f"rows came back as {rows.dtype} of shape {tuple(rows.shape)}"
    if not torch.equal(rows, rows[:, :1] + torch.arange(TINY_WIDTH)):
        return "rows came back with other numbers than were written"
    return None


def columns_of(result: Any) -> Columns:
    """The columns of a TensorDict, without a copy."""
    columns: Columns = {}
    for name in result.keys():  # noqa: SIM118 - a TensorDict iterates over its rows
        value = result.get(name)
        if isinstance(value, NonTensorStack):
            columns[name] = (tensors_of(value), None)
        elif not value.is_nested:
            columns[name] = (value, None)
        elif value.layout is torch.jagged:
            columns[name] = (value.values(), value.offsets().diff().tolist())
        else:
            rows = list(value.unbind())
            columns[name] = (rows, [row.shape[0] for row in rows])
    return columns
