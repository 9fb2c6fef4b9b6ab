"""``TransferQueueClient``: TransferQueue's low-level interface, by index instead of by key."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Coroutine
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from rlplane.adapters.calls import PlaneCalls
from rlplane.adapters.link import Link
from rlplane.adapters.steps import Call
from rlplane.compat.transfer_queue import calls, sampling
from rlplane.compat.transfer_queue.metadata import BatchMeta
from rlplane.compat.transfer_queue.sampler import SequentialSampler
from rlplane.compat.transfer_queue.session import Session, Steps, current
from rlplane.interfaces import DEFAULT_TIMEOUT_S

P = ParamSpec("P")
T = TypeVar("T")

_TIMEOUT_VARIABLE = "TQ_CONTROLLER_GET_METADATA_TIMEOUT"
_LOOK_EVERY_S = 0.02
PLANE = "plane"
"""Where in the directory of a checkpoint the plane is."""


def _both(
    steps: Steps[P, T],
) -> tuple[
    Callable[Concatenate[TransferQueueClient, P], T],
    Callable[Concatenate[TransferQueueClient, P], Coroutine[Any, Any, T]],
]:
    """A call of ours as a method, and as one that is awaited."""

    @wraps(steps)
    def method(self: TransferQueueClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.session.run(steps, *args, **kwargs)

    @wraps(steps)
    async def async_method(self: TransferQueueClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.session.arun(steps, *args, **kwargs)

    return method, async_method


class TransferQueueClient:
    """Puts, finds, reads and clears samples by their indexes; each call also as ``async_…``.

    ``client_id`` and ``controller_info`` are accepted as TransferQueue has them, and not needed: all clients
    of a process share its connection to the job's plane.
    """

    def __init__(self, client_id: str = "", controller_info: object = None, **_: object) -> None:
        self.client_id = client_id or f"TransferQueueClient_{os.getpid()}"

    @property
    def session(self) -> Session:
        """This process's part in the job's TransferQueue."""
        return current()

    put, async_put = _both(calls.put_batch)
    get_data, async_get_data = _both(calls.get_batch)
    set_custom_meta, async_set_custom_meta = _both(calls.set_custom_meta)
    clear_samples, async_clear_samples = _both(calls.clear_batch)
    get_consumption_status, async_get_consumption_status = _both(calls.consumption)
    get_production_status, async_get_production_status = _both(calls.production)
    check_consumption_status, async_check_consumption_status = _both(calls.is_consumed)
    check_production_status, async_check_production_status = _both(calls.is_produced)
    reset_consumption, async_reset_consumption = _both(calls.reset_consumption)
    get_partition_list, async_get_partition_list = _both(calls.list_partitions)
    kv_retrieve_meta, async_kv_retrieve_meta = _both(calls.retrieve_meta)
    kv_retrieve_keys, async_kv_retrieve_keys = _both(calls.retrieve_keys)
    kv_list, async_kv_list = _both(calls.list_keys)

    def get_meta(
        self,
        data_fields: list[str],
        batch_size: int,
        partition_id: str,
        mode: str = "fetch",
        task_name: str | None = None,
        sampling_config: dict[str, Any] | None = None,
    ) -> BatchMeta:
        """Find samples: ``fetch`` consumes ``batch_size`` that are ready, ``force_fetch`` shows all there
        are, ``insert`` makes new ones.

        While too few are ready, ``fetch`` returns an empty batch if ``controller.polling_mode`` is on. If it
        is off, it waits for up to a minute (or ``TQ_CONTROLLER_GET_METADATA_TIMEOUT`` seconds, if it is set).

        Raises:
            TimeoutError: Too few became ready in that time.
        """
        deadline = time.monotonic() + self._patience_s(mode)
        while True:
            found = self.session.run(
                self._look, data_fields, batch_size, partition_id, mode, task_name, sampling_config, deadline
            )
            if found is not None:
                return found
            time.sleep(_LOOK_EVERY_S)

    async def async_get_meta(
        self,
        data_fields: list[str],
        batch_size: int,
        partition_id: str,
        mode: str = "fetch",
        task_name: str | None = None,
        sampling_config: dict[str, Any] | None = None,
    ) -> BatchMeta:
        """See :meth:`get_meta`."""
        deadline = time.monotonic() + self._patience_s(mode)
        while True:
            found = await self.session.arun(
                self._look, data_fields, batch_size, partition_id, mode, task_name, sampling_config, deadline
            )
            if found is not None:
                return found
            await asyncio.sleep(_LOOK_EVERY_S)

    def _patience_s(self, mode: str) -> float:
        if mode != "fetch" or self.session.conf["controller"]["polling_mode"]:
            return 0.0
        return float(os.environ.get(_TIMEOUT_VARIABLE, DEFAULT_TIMEOUT_S))

    def _look(
        self,
        plane: PlaneCalls,
        link: Link,
        names: list[str],
        batch_size: int,
        partition_id: str,
        mode: str,
        task_name: str | None,
        sampling_config: dict[str, Any] | None,
        deadline: float,
    ) -> Call[BatchMeta | None]:
        """What :meth:`get_meta` returns; None: look again."""
        if mode == "insert":
            return (yield from calls.insert(plane, link, partition_id, names, batch_size))
        if mode == "force_fetch":
            seen = yield from calls.inspect(plane, link, partition_id, None, with_kinds=True)
            return seen.meta(names)
        if mode != "fetch" or task_name is None:
            raise ValueError(
                f"mode {mode!r} with task_name {task_name!r}: it is insert, force_fetch, or fetch with a task"
            )
        left = max(deadline - time.monotonic(), 0.0)
        is_polling = self.session.conf["controller"]["polling_mode"]
        if is_polling and partition_id not in (yield from calls.list_partitions(plane, link)):
            return BatchMeta.empty()  # asking does not make it
        sampler = self.session.sampler
        if type(sampler) is SequentialSampler:
            # As the plane chooses by itself: whoever waits is woken by the write.
            found = yield from calls.take_first(plane, link, partition_id, names, batch_size, task_name, left)
        else:
            found = yield from sampling.choose(
                plane, link, sampler, partition_id, names, batch_size, task_name, sampling_config or {}
            )
            if not found and left:
                return None
        if not found and not is_polling:
            raise TimeoutError(
                f"task {task_name!r} waited for {batch_size} samples of partition {partition_id!r} "
                f"with fields {names}; too few are ready"
            )
        return found

    def clear_partition(self, partition_id: str) -> None:
        """Forget a partition and all that is in it."""
        self.session.run(self._clear_partition, partition_id)

    async def async_clear_partition(self, partition_id: str) -> None:
        """See :meth:`clear_partition`."""
        await self.session.arun(self._clear_partition, partition_id)

    def _clear_partition(self, plane: PlaneCalls, link: Link, partition_id: str) -> Call[None]:
        yield from calls.clear_partition(plane, link, partition_id)
        if type(self.session.sampler) is not SequentialSampler:
            yield from sampling.forget(plane, link, self.session.sampler, partition_id)

    def save_storage_checkpoint(self, checkpoint_dir: str) -> None:
        """Write the plane, as it is at one point of time, below a directory."""
        self.session.engine.save_checkpoint(str(Path(checkpoint_dir) / PLANE))

    def load_storage_checkpoint(self, checkpoint_dir: str) -> None:
        """Replace the plane by one that was saved."""
        # What a sampler was doing then, in a process that is gone, is not being done any more.
        self.session.engine.load_checkpoint(str(Path(checkpoint_dir) / PLANE), release_claims=True)
        self.session.run(sampling.make_room_for_sampler)
        self.session.store_conf()

    def close(self) -> None:
        """Nothing: the connection is the process's, and ends with ``transfer_queue.close()``."""
