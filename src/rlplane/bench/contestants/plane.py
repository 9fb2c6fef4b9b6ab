"""rlplane's shared-memory engine, as a user has it: the packaged config, built by the factory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tensordict import TensorDict
from torch import Tensor

from rlplane.bench.batches import Batch, Columns
from rlplane.bench.contestants.store import check_tiny, columns_of, tiny_rows
from rlplane.config import load_config
from rlplane.factory import build_data_plane_client
from rlplane.interfaces import KVBatchMeta

__all__ = ["PlaneStore"]

_TASK = "bench"
_FIELD = "numbers"


class PlaneStore:
    """A client; the producer's is the bootstrap client."""

    def __init__(self, role: str, link: dict[str, Any]) -> None:
        # The default holds a million samples, and the claims alone have more.
        overrides: dict[str, Any] = {"storage_capacity": 4_000_000, **link}
        self._client = build_data_plane_client(load_config("shm", overrides), bootstrap=role == "producer")

    def link(self) -> dict[str, Any]:
        return {"controller_address": self._client.controller_address}  # type: ignore[attr-defined]

    def form(self, batch: Batch) -> TensorDict:
        self._client.register_partition(batch.name, batch.fields, batch.rows, [_TASK])
        return batch.tensordict()

    def put(self, name: str, ids: list[str], form: TensorDict) -> None:
        self._client.put_samples(ids, name, form)

    def get(self, batch: Batch, ids: list[str], order: Sequence[int] | None, receipt: Any) -> TensorDict:
        return self._client.get_samples(ids, batch.name, batch.fields)

    def columns(self, result: TensorDict) -> Columns:
        return columns_of(result)

    def clear(self, name: str, ids: list[str]) -> None:
        self._client.clear_samples(ids, name)

    def forget(self) -> None:
        pass

    def register(self, partition: str) -> None:
        self._client.register_partition(partition, [_FIELD], 0, [_TASK])

    def tiny(self, numbers: range) -> TensorDict:
        return TensorDict({_FIELD: tiny_rows(numbers)}, batch_size=[len(numbers)])

    def put_tiny(self, partition: str, numbers: range, rows: TensorDict) -> None:
        self._client.put_samples([f"s{number}" for number in numbers], partition, rows)

    def claim(self, partition: str, count: int, timeout_s: float) -> KVBatchMeta:
        return self._client.claim_meta(partition, _TASK, [_FIELD], count, timeout_s=timeout_s)

    def size(self, claimed: KVBatchMeta) -> int:
        return claimed.size

    def read_tiny(self, partition: str, claimed: KVBatchMeta) -> Tensor:
        rows: Tensor = self._client.get_data(claimed)[_FIELD]
        return rows

    def check_tiny(self, rows: Tensor) -> str | None:
        return check_tiny(rows)

    def clear_tiny(self, partition: str, claimed: KVBatchMeta) -> None:
        self._client.clear_samples(claimed.sample_ids, partition)

    def close(self) -> None:
        self._client.close()
