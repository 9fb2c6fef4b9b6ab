"""rlplane as a user has it: a packaged config, built by the factory.

``PlaneStore`` is the shared-memory engine, for the bench of one machine. ``ClusterPlaneStore`` is the cluster
engine on the Ray that the process is connected to, for the cluster bench.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, ClassVar

from tensordict import TensorDict
from torch import Tensor

from rlplane.config import load_config
from rlplane.factory import build_data_plane_client
from rlplane.interfaces import KVBatchMeta
from rlplane_benchmarks.batches import Batch, Columns
from rlplane_benchmarks.loop_lag import measure_lag
from rlplane_benchmarks.participants.store import columns_of, tiny_rows
from rlplane_benchmarks.ray_cluster import LOOPBACK

__all__ = ["ClusterPlaneStore", "MooncakePlaneStore", "PlaneStore"]

_TASK = "bench"
_FIELD = "numbers"
_NAMESPACE = "rlplane-bench"


class PlaneStore:
    """A client; the producer's is the bootstrap client."""

    exemplar = "shm"
    # The default holds a million samples, and the claims alone have more.
    overrides: ClassVar[dict[str, Any]] = {"storage_capacity": 4_000_000}

    def __init__(self, role: str, link: dict[str, Any]) -> None:
        config = load_config(self.exemplar, {**self.overrides, **link})
        self._client = build_data_plane_client(config, bootstrap=role == "producer")

    def link(self) -> dict[str, Any]:
        return {"controller_address": self._client.controller_address}  # type: ignore[attr-defined]

    def prepare(self, batch: Batch) -> TensorDict:
        self._client.register_partition(batch.name, batch.fields, batch.rows, [_TASK])
        return batch.tensordict()

    def put(self, name: str, ids: list[str], prepared: TensorDict) -> None:
        self._client.put_samples(ids, name, prepared)

    def get(self, batch: Batch, ids: list[str], order: Sequence[int] | None, references: Any) -> TensorDict:
        return self._client.get_samples(ids, batch.name, batch.fields)

    def columns(self, result: TensorDict) -> Columns:
        return columns_of(result)

    def clear(self, name: str, ids: list[str]) -> None:
        self._client.clear_samples(ids, name)

    def held_bytes(self, name: str) -> int:
        """How many bytes the plane holds for a partition."""
        return int(self._client.partition_status(name)["bytes"])

    def loop_lag(self, with_client: bool, tasks: int, nbytes: int, seconds: float) -> list[float]:
        """By how many seconds a task of an event loop woke too late."""
        config = load_config(self.exemplar, {**self.overrides, **self.link()})
        return measure_lag(config if with_client else None, tasks, nbytes, seconds)

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

    def clear_tiny(self, partition: str, claimed: KVBatchMeta) -> None:
        self._client.clear_samples(claimed.sample_ids, partition)

    def control_pid(self) -> int:
        """The process in which the control service runs."""
        status = getattr(self._client, "service_status", None)
        if status is not None:
            return int(status()["pid"])
        import ray

        control = ray.get_actor("rlplane.control", namespace=_NAMESPACE)
        pid: int = ray.get(control.__ray_call__.remote(lambda _: os.getpid()), timeout=60)
        return pid

    def close(self) -> None:
        self._client.close()


class ClusterPlaneStore(PlaneStore):
    """TransferQueue's own storage units, as many as plain TransferQueue has by default."""

    exemplar = "cluster-simple"
    overrides: ClassVar[dict[str, Any]] = {
        "num_storage_units": 2,
        "global_segment_size": 512 << 20,
        "local_buffer_size": 64 << 20,
        "transfer_queue.node_ip": LOOPBACK,
        "transfer_queue.namespace": _NAMESPACE,
    }

    def link(self) -> dict[str, Any]:
        return {}


class MooncakePlaneStore(ClusterPlaneStore):
    """Mooncake over TCP."""

    exemplar = "cluster-mooncake"
