"""TransferQueue through its own API: the key-value calls for batches, ``get_meta`` for claims.

Every process is a driver on one Ray, as in a job that is not made of Ray's actors.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

from tensordict import TensorDict
from torch import Tensor

from rlplane.bench.batches import Batch, Columns
from rlplane.bench.contestants.ray_cluster import LOOPBACK, end_ray, join_ray, start_ray
from rlplane.bench.contestants.store import TINY_WIDTH, check_tiny, columns_of, tiny_rows

__all__ = ["MooncakeStore", "SimpleStore"]

_TASK = "bench"
_FIELD = "numbers"
# TransferQueue wakes nobody: its own loader asks once a second. This is the best that asking can be.
_ASK_AGAIN_S = 0.001


class SimpleStore:
    """TransferQueue's default: its storage units are Ray actors that are reached over ZMQ."""

    def __init__(self, role: str, link: dict[str, Any]) -> None:
        os.environ.setdefault("TQ_LOGGING_LEVEL", "CRITICAL")
        self._prepare(link)
        if role == "producer":
            self._address = start_ray(200 << 20)
        else:
            self._address = link["ray"]
            join_ray(self._address)
        import transfer_queue
        from omegaconf import OmegaConf

        self._tq = transfer_queue
        self._started = role == "producer"
        # An earlier config wins, so every later process may pass none.
        self._tq.init(OmegaConf.create(self._config()) if self._started else None)

    def _prepare(self, link: dict[str, Any]) -> None:
        pass

    def _config(self) -> dict[str, Any]:
        return {"controller": {"polling_mode": True}}

    def link(self) -> dict[str, Any]:
        return {"ray": self._address}

    def form(self, batch: Batch) -> TensorDict:
        return batch.tensordict()

    def put(self, name: str, ids: list[str], form: TensorDict) -> None:
        self._tq.kv_batch_put(keys=ids, partition_id=name, fields=form)

    def get(self, batch: Batch, ids: list[str], order: Sequence[int] | None, receipt: Any) -> Any:
        return self._tq.kv_batch_get(keys=ids, partition_id=batch.name, select_fields=batch.fields)

    def columns(self, result: Any) -> Columns:
        return columns_of(result)

    def clear(self, name: str, ids: list[str]) -> None:
        self._tq.kv_clear(keys=ids, partition_id=name)

    def forget(self) -> None:
        pass

    def register(self, partition: str) -> None:
        # There is no partition before its first write, and asking for one that is not there is an error.
        numbers = range(-1, 0)
        self.put_tiny(partition, numbers, self.tiny(numbers))
        self.clear_tiny(partition, self.claim(partition, 1, 10.0))

    def tiny(self, numbers: range) -> TensorDict:
        return TensorDict({_FIELD: tiny_rows(numbers)}, batch_size=[len(numbers)])

    def put_tiny(self, partition: str, numbers: range, rows: TensorDict) -> None:
        self._tq.kv_batch_put(keys=[f"s{number}" for number in numbers], partition_id=partition, fields=rows)

    def claim(self, partition: str, count: int, timeout_s: float) -> Any:
        deadline = time.monotonic() + timeout_s
        client = self._tq.get_client()
        while True:
            meta = client.get_meta(
                data_fields=[_FIELD],
                batch_size=count,
                partition_id=partition,
                mode="fetch",
                task_name=_TASK,
            )
            if meta.size:
                return meta
            if time.monotonic() > deadline:
                raise TimeoutError(f"{count} rows were not ready within {timeout_s:g} s")
            time.sleep(_ASK_AGAIN_S)

    def size(self, claimed: Any) -> int:
        return int(claimed.size)

    def read_tiny(self, partition: str, claimed: Any) -> Tensor:
        rows = self._tq.get_client().get_data(claimed)[_FIELD]
        flat: Tensor = rows.values() if rows.is_nested else rows
        return flat.reshape(-1, TINY_WIDTH)

    def check_tiny(self, rows: Tensor) -> str | None:
        return check_tiny(rows)

    def clear_tiny(self, partition: str, claimed: Any) -> None:
        self._tq.get_client().clear_samples(claimed)

    def close(self) -> None:
        # ``close`` of any process ends the controller, so only the first one's may.
        if self._started:
            self._tq.close()
        end_ray()


class MooncakeStore(SimpleStore):
    """The same with the bytes in Mooncake's store, over TCP."""

    def _prepare(self, link: dict[str, Any]) -> None:
        from rlplane.adapters.transfer_queue.mooncake import MooncakeMaster
        from rlplane.adapters.transfer_queue.network import set_mooncake_environment

        # Before TransferQueue is imported, which loads Mooncake, which reads some of it then.
        set_mooncake_environment(LOOPBACK, quiet=True)
        # Not by TransferQueue, which ends every master of the machine before it starts one.
        self._master = None if link else MooncakeMaster(LOOPBACK, None)

    def _config(self) -> dict[str, Any]:
        from rlplane.adapters.transfer_queue.mooncake import store_config

        assert self._master is not None
        store = store_config(self._master.address(), {"mooncake_protocol": "tcp"}, 2 << 30, 512 << 20)
        return {
            **super()._config(),
            "backend": {
                "storage_backend": "MooncakeStore",
                "MooncakeStore": {**store, "local_hostname": LOOPBACK},
            },
        }

    def close(self) -> None:
        super().close()
        if self._master is not None:
            self._master.stop()
