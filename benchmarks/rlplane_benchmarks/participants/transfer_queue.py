"""TransferQueue through its own API, and rlplane through the same one.

``KeyValueStore`` uses the key-value calls, on the Ray that the process is connected to. The cluster bench
measures it from Ray actors. ``SimpleStore`` and ``MooncakeStore`` take part in the bench of one machine,
where every process is a driver that joins one Ray, and where readers share a partition, so that a claim is
``get_meta``. ``FacadeStore`` makes the calls of ``KeyValueStore`` to ``rlplane.compat.transfer_queue``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from tensordict import TensorDict
from torch import Tensor

from rlplane.interfaces import ADDRESS_VARIABLE
from rlplane_benchmarks.batches import Batch, Columns
from rlplane_benchmarks.participants.store import TINY_WIDTH, columns_of, tiny_rows
from rlplane_benchmarks.ray_cluster import LOOPBACK, end_ray, join_ray, start_ray

__all__ = ["FacadeStore", "KeyValueStore", "MooncakeKeyValueStore", "MooncakeStore", "SimpleStore"]

_TASK = "bench"
_FIELD = "numbers"
# TransferQueue does not wake a waiting reader; its own loader asks once a second. Asking every millisecond is
# about the best that asking can do.
_ASK_AGAIN_S = 0.001


class KeyValueStore:
    """The default storage (units that are Ray actors, reached over ZMQ), and keys that the reader lists."""

    def __init__(self, role: str, link: dict[str, Any]) -> None:
        os.environ.setdefault("TQ_LOGGING_LEVEL", "CRITICAL")
        self._started = role == "producer"
        self._written_here: set[str] = set()
        self._connect(link)
        self._tq = self._module()
        # Processes after the first get the config that the first one passed.
        self._tq.init(self._config() if self._started else None)

    def _module(self) -> Any:
        import transfer_queue

        return transfer_queue

    def _connect(self, link: dict[str, Any]) -> None:
        """Prepare what has to be there before TransferQueue is imported."""

    def _config(self) -> dict[str, Any]:
        return {"controller": {"polling_mode": True}}

    def link(self) -> dict[str, Any]:
        return {}

    def prepare(self, batch: Batch) -> TensorDict:
        return batch.tensordict()

    def put(self, name: str, ids: list[str], prepared: TensorDict) -> None:
        self._tq.kv_batch_put(keys=ids, partition_id=name, fields=prepared)

    def get(self, batch: Batch, ids: list[str], order: Sequence[int] | None, references: Any) -> Any:
        return self._tq.kv_batch_get(keys=ids, partition_id=batch.name, select_fields=batch.fields)

    def columns(self, result: Any) -> Columns:
        return columns_of(result)

    def clear(self, name: str, ids: list[str]) -> None:
        self._tq.kv_clear(keys=ids, partition_id=name)

    def forget(self) -> None:
        pass

    def list_keys(self, partition: str) -> dict[str, Any]:
        keys: dict[str, Any] = self._tq.kv_list(partition_id=partition)[partition]
        return keys

    # Claims: a partition has one reader, which lists its keys

    def register(self, partition: str) -> None:
        pass

    def tiny(self, numbers: range) -> TensorDict:
        return TensorDict({_FIELD: tiny_rows(numbers)}, batch_size=[len(numbers)])

    def put_tiny(self, partition: str, numbers: range, rows: TensorDict) -> None:
        self._tq.kv_batch_put(keys=[f"s{number}" for number in numbers], partition_id=partition, fields=rows)
        self._written_here.add(partition)

    def claim(self, partition: str, count: int, timeout_s: float) -> Any:
        keys: list[str] = _ask_until(lambda: self._ready(partition, count), count, timeout_s)
        return keys[:count]

    def _ready(self, partition: str, count: int) -> list[str] | None:
        keys = list(self._tq.kv_list(partition_id=partition).get(partition, ()))
        if len(keys) < count:
            return None
        if partition in self._written_here:
            return keys
        # A key is listed before its bytes are written, so a reader of another process's put has to ask.
        meta = self._tq.get_client().kv_retrieve_meta(keys=keys, partition_id=partition, create=False)
        return keys if meta.field_names and meta.is_ready else None

    def size(self, claimed: Any) -> int:
        return len(claimed)

    def read_tiny(self, partition: str, claimed: Any) -> Tensor:
        return _flat(self._tq.kv_batch_get(keys=claimed, partition_id=partition, select_fields=[_FIELD]))

    def clear_tiny(self, partition: str, claimed: Any) -> None:
        self._tq.kv_clear(keys=claimed, partition_id=partition)

    def control_pid(self) -> int:
        """The process of TransferQueue's controller."""
        import ray

        controller = ray.get_actor("TransferQueueController", namespace="transfer_queue")
        pid: int = ray.get(controller.__ray_call__.remote(lambda _: os.getpid()), timeout=60)
        return pid

    def close(self) -> None:
        # ``close`` in any process ends the controller, so only the process that started it may call it.
        if self._started:
            self._tq.close()


class FacadeStore(KeyValueStore):
    """Our module with TransferQueue's interface, on shared memory."""

    def _module(self) -> Any:
        from rlplane.compat import transfer_queue

        return transfer_queue

    def _connect(self, link: dict[str, Any]) -> None:
        # As for a child of the process that has started it.
        os.environ |= link

    def link(self) -> dict[str, Any]:
        return {ADDRESS_VARIABLE: os.environ[ADDRESS_VARIABLE]}


class SimpleStore(KeyValueStore):
    """The same for processes that are drivers of a Ray of their own, which the producer starts."""

    def _connect(self, link: dict[str, Any]) -> None:
        if self._started:
            self._address = start_ray(200 << 20)
        else:
            self._address = link["ray"]
            join_ray(self._address)

    def link(self) -> dict[str, Any]:
        return {"ray": self._address}

    def register(self, partition: str) -> None:
        # ``get_meta`` fails for a partition that nothing has been written to.
        numbers = range(-1, 0)
        self.put_tiny(partition, numbers, self.tiny(numbers))
        self.clear_tiny(partition, self.claim(partition, 1, 10.0))

    def claim(self, partition: str, count: int, timeout_s: float) -> Any:
        return _ask_until(lambda: self._fetch_meta(partition, count), count, timeout_s)

    def _fetch_meta(self, partition: str, count: int) -> Any:
        meta = self._tq.get_client().get_meta(
            data_fields=[_FIELD], batch_size=count, partition_id=partition, mode="fetch", task_name=_TASK
        )
        return meta if meta.size else None

    def size(self, claimed: Any) -> int:
        return int(claimed.size)

    def read_tiny(self, partition: str, claimed: Any) -> Tensor:
        return _flat(self._tq.get_client().get_data(claimed))

    def clear_tiny(self, partition: str, claimed: Any) -> None:
        self._tq.get_client().clear_samples(claimed)

    def close(self) -> None:
        super().close()
        end_ray()


class _OnMooncake(KeyValueStore):
    """The bytes are in Mooncake's store, over TCP; every client lends it memory."""

    lent_bytes = 2 << 30
    buffer_bytes = 512 << 20

    def _connect(self, link: dict[str, Any]) -> None:
        from rlplane.storage.mooncake.network import set_mooncake_environment
        from rlplane.storage.mooncake.processes import MooncakeMaster

        # TransferQueue's import loads Mooncake, which reads some of its environment then.
        set_mooncake_environment(LOOPBACK, quiet=True)
        # TransferQueue would end every master of the machine before it starts one.
        self._master = MooncakeMaster(LOOPBACK, None) if self._started else None
        super()._connect(link)

    def _config(self) -> dict[str, Any]:
        from rlplane.storage.mooncake.processes import store_config

        assert self._master is not None
        address, options = self._master.address(), {"mooncake_protocol": "tcp"}
        store = store_config(address, options, self.lent_bytes, self.buffer_bytes)
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


class MooncakeStore(_OnMooncake, SimpleStore):
    """Mooncake in the bench of one machine."""


class MooncakeKeyValueStore(_OnMooncake):
    """Mooncake in the cluster bench: more clients, each of which lends less."""

    lent_bytes = 128 << 20
    buffer_bytes = 64 << 20


def _ask_until(ask: Callable[[], Any], count: int, timeout_s: float) -> Any:
    deadline = time.monotonic() + timeout_s
    while True:
        found = ask()
        if found is not None:
            return found
        if time.monotonic() > deadline:
            raise TimeoutError(f"{count} rows were not ready within {timeout_s:g} s")
        time.sleep(_ASK_AGAIN_S)


def _flat(result: Any) -> Tensor:
    rows = result[_FIELD]
    flat: Tensor = rows.values() if rows.is_nested else rows
    return flat.reshape(-1, TINY_WIDTH)
