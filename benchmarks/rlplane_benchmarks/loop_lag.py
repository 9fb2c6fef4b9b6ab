"""How long an event loop stands still while the asyncio client works on it.

256 tasks sleep and wake on one loop. Beside them one task waits in a claim, and another puts a batch again
and again. A task that sleeps for 1 ms measures by how much it wakes too late. Without a client the same is
measured, because the machine has its share.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeAlias

import torch
from tensordict import TensorDict

import rlplane

__all__ = ["measure_lag"]

_ROWS = 64
_TICK_S = 0.001
_PARTITION = "loop"

_Work: TypeAlias = Callable[[asyncio.Event, asyncio.Event], Coroutine[Any, Any, None]]
"""Sets the first event when it is ready, and works until the second is set."""


def measure_lag(config: Mapping[str, Any] | None, tasks: int, nbytes: int, seconds: float) -> list[float]:
    """By how many seconds a task woke too late, again and again. A client joins the plane of ``config``."""

    async def nothing(ready: asyncio.Event, stop: asyncio.Event) -> None:
        ready.set()
        await stop.wait()

    async def client(ready: asyncio.Event, stop: asyncio.Event) -> None:
        assert config is not None
        await _put_and_wait(config, nbytes, ready, stop)

    return asyncio.run(_lags(nothing if config is None else client, tasks, seconds))


async def _lags(work: _Work, tasks: int, seconds: float) -> list[float]:
    ready, stop, lags = asyncio.Event(), asyncio.Event(), list[float]()

    async def bystander() -> None:
        while not stop.is_set():
            await asyncio.sleep(0.05)

    async def probe() -> None:
        while not stop.is_set():
            due = time.perf_counter() + _TICK_S
            await asyncio.sleep(_TICK_S)
            lags.append(time.perf_counter() - due)

    async with asyncio.TaskGroup() as group:
        group.create_task(work(ready, stop))
        await ready.wait()
        for _ in range(tasks - 3):
            group.create_task(bystander())
        group.create_task(probe())
        await asyncio.sleep(seconds)
        stop.set()
    return lags


async def _put_and_wait(
    config: Mapping[str, Any], nbytes: int, ready: asyncio.Event, stop: asyncio.Event
) -> None:
    """One claim that waits for what never comes, and one put after the other."""
    ids = [str(row) for row in range(_ROWS)]
    fields = TensorDict({"x": torch.ones(_ROWS, nbytes // _ROWS, dtype=torch.uint8)}, batch_size=[_ROWS])
    async with rlplane.build_async_data_plane_client(config, bootstrap=False) as client:
        await client.register_partition(_PARTITION, ["x", "never"], _ROWS, ["train"])
        claim = asyncio.create_task(client.claim_meta(_PARTITION, "train", ["never"], 1, timeout_s=None))
        # The first one makes the pages.
        await client.put_samples(ids, _PARTITION, fields)
        ready.set()
        while not stop.is_set():
            await client.put_samples(ids, _PARTITION, fields)
        claim.cancel()
        await client.drop_partition(_PARTITION)
