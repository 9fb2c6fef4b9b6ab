"""Ray's object store: numpy arrays, which it hands out without a copy.

References cannot leave Ray, so the reading side is an actor of the writing side's driver.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlplane_benchmarks.batches import Batch, Columns
from rlplane_benchmarks.participants.store import tiny_rows
from rlplane_benchmarks.ray_cluster import end_ray, start_ray

__all__ = ["RayBatchStore", "RayRowsStore"]

_STORE_BYTES = 1536 << 20


class RayBatchStore:
    """The batch as one object: a dict of arrays. Scattered rows are gathered by the reader."""

    def __init__(self, role: str, link: dict[str, Any]) -> None:
        self._refs: dict[str, list[Any]] = {}
        self._answer: Any = None
        self._queues: dict[str, Any] = {}
        if role == "consumer":
            return
        import ray

        from rlplane_benchmarks.worker import Worker

        start_ray(_STORE_BYTES)
        self._consumer = ray.remote(num_cpus=1)(Worker).remote()
        path = f"{type(self).__module__}:{type(self).__name__}"
        ray.get(self._consumer.open.remote(path, "consumer", {}))

    def link(self) -> dict[str, Any]:
        return {}

    def forward_send(self, command: str, args: tuple[Any, ...]) -> None:
        if command == "get":
            args = (*args, self._refs[args[0]])
        if command == "claim":
            args = (self._queues[args[0]], *args[1:])
        self._answer = getattr(self._consumer, command).remote(*args)

    def forward_receive(self) -> Any:
        import ray

        answer, self._answer = self._answer, None
        return ray.get(answer)

    def prepare(self, batch: Batch) -> Any:
        arrays = {name: value.numpy() for name, value in batch.values.items()}
        offsets = None if batch.offsets is None else batch.offsets.numpy()
        return {"arrays": arrays, "offsets": offsets}

    def put(self, name: str, ids: list[str], prepared: Any) -> None:
        import ray

        self._refs[name] = [ray.put(prepared)]

    def get(self, batch: Batch, ids: list[str], order: Sequence[int] | None, references: Any) -> Any:
        import ray

        (got,) = ray.get(references)
        if order is None:
            return got
        arrays, offsets = got["arrays"], got["offsets"]
        if offsets is None:
            return {"arrays": {name: array[order] for name, array in arrays.items()}, "offsets": None}
        gathered = {
            name: np.concatenate([array[offsets[row] : offsets[row + 1]] for row in order])
            for name, array in arrays.items()
        }
        ends = np.concatenate(([0], np.cumsum(np.diff(offsets)[order])))
        return {"arrays": gathered, "offsets": ends}

    def columns(self, result: Any) -> Columns:
        offsets = result["offsets"]
        lengths = None if offsets is None else np.diff(offsets).tolist()
        return {name: (_tensor(array), lengths) for name, array in result["arrays"].items()}

    def clear(self, name: str, ids: list[str]) -> None:
        # Ray frees an object when the last reference to it is gone.
        del self._refs[name]

    def forget(self) -> None:
        self._refs = {}

    # A claim that waits: Ray's own queue

    def register(self, partition: str) -> None:
        from ray.util.queue import Queue

        self._queues[partition] = Queue(actor_options={"num_cpus": 0})

    def tiny(self, numbers: range) -> Any:
        return tiny_rows(numbers).numpy()

    def put_tiny(self, partition: str, numbers: range, rows: Any) -> None:
        self._queues[partition].put_nowait_batch(list(rows))

    def claim(self, partition: Any, count: int, timeout_s: float) -> Any:
        return [partition.get(timeout=timeout_s) for _ in range(count)]

    def size(self, claimed: Any) -> int:
        return len(claimed)

    def read_tiny(self, partition: str, claimed: Any) -> Tensor:
        return _tensor(np.stack(claimed))

    def clear_tiny(self, partition: str, claimed: Any) -> None:
        pass

    def close(self) -> None:
        end_ray()


class RayRowsStore(RayBatchStore):
    """A row per object. The reader puts the rows together, since it needs columns."""

    def prepare(self, batch: Batch) -> Any:
        columns = {name: [row.numpy() for row in batch.split(name)] for name in batch.fields}
        return [{name: rows[number] for name, rows in columns.items()} for number in range(batch.rows)]

    def put(self, name: str, ids: list[str], prepared: Any) -> None:
        import ray

        self._refs[name] = [ray.put(row) for row in prepared]

    def get(self, batch: Batch, ids: list[str], order: Sequence[int] | None, references: Any) -> Any:
        import ray

        rows = ray.get(references if order is None else [references[row] for row in order])
        join = np.stack if batch.lengths is None else np.concatenate
        arrays = {name: join([row[name] for row in rows]) for name in batch.fields}
        if batch.lengths is None:
            return {"arrays": arrays, "offsets": None}
        first = batch.fields[0]
        return {"arrays": arrays, "offsets": np.cumsum([0, *(len(row[first]) for row in rows)])}


def _tensor(array: Any) -> Tensor:
    with warnings.catch_warnings():
        # Ray's arrays are read-only, and torch warns because its tensors cannot be.
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(array)
