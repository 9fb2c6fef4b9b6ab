"""A pytest plugin for the tests that TransferQueue ships: what they ask its controller, by Ray, is answered
from the status of our plane; and they share one small Ray."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
import transfer_queue

from rlplane.compat.transfer_queue import calls
from rlplane.compat.transfer_queue.session import current

assert transfer_queue.__name__ == "rlplane.compat.transfer_queue", "RLPLANE_AS_TRANSFER_QUEUE has no effect"


class _Method:
    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def remote(self, *args: Any) -> Any:
        return ray.put(self._function(*args))


class _Controller:
    list_partitions = _Method(lambda: current().run(calls.list_partitions))
    clear_partition = _Method(lambda partition_id: transfer_queue.get_client().clear_partition(partition_id))

    @property
    def get_partition_snapshot(self) -> _Method:
        return _Method(_snapshot)


def _snapshot(partition_id: str) -> SimpleNamespace | None:
    seen = current().run(calls.inspect, partition_id, None)
    columns = {name: column for column, name in enumerate(seen.fields)}
    produced = torch.zeros(max(seen.numbers, default=-1) + 1, len(columns), dtype=torch.int8)
    for name, has in seen.fields.items():
        produced[seen.numbers, columns[name]] = torch.tensor(has, dtype=torch.int8)
    return SimpleNamespace(
        keys_mapping=dict(zip(seen.ids, seen.numbers, strict=True)),
        global_indexes=set(seen.numbers),
        custom_meta=dict(zip(seen.numbers, seen.tags, strict=True)),
        field_name_mapping=columns,
        production_status=produced,
    )


def pytest_configure(config: pytest.Config) -> None:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20)
    get_actor, shutdown = ray.get_actor, ray.shutdown

    def find(name: str, namespace: str | None = None) -> Any:
        return _Controller() if name == "TransferQueueController" else get_actor(name, namespace)

    ray.get_actor, ray.shutdown = find, lambda: None
    config.add_cleanup(shutdown)
