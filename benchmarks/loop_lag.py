"""How long an event loop stands still while the asyncio client works on it.

256 tasks sleep and wake on one loop. Beside them one task waits in a claim, and another puts 52 MB again and
again. A task that sleeps for 1 ms measures by how much it wakes too late. The same is measured without a
client, and with the blocking client in the place of the asyncio one::

    python benchmarks/loop_lag.py [seconds]
"""

from __future__ import annotations

import asyncio
import sys
import time
import warnings
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

import rlplane

TASKS, ROWS, PUT_BYTES = 256, 64, 52 * 2**20
TICK_S = 0.001

Work = Callable[[asyncio.Event, asyncio.Event], Coroutine[Any, Any, int]]
"""Sets the first event when ready, works until the second is set, and returns how many puts it made."""


async def lag_of(work: Work, seconds: float) -> tuple[list[float], int]:
    """By how many seconds a task of this loop woke too late while ``work`` was under way, and its puts."""
    ready, stop, lags = asyncio.Event(), asyncio.Event(), list[float]()

    async def bystander() -> None:
        while not stop.is_set():
            await asyncio.sleep(0.05)

    async def probe() -> None:
        while not stop.is_set():
            due = time.perf_counter() + TICK_S
            await asyncio.sleep(TICK_S)
            lags.append(time.perf_counter() - due)

    working = asyncio.create_task(work(ready, stop))
    await ready.wait()
    others = [asyncio.create_task(bystander()) for _ in range(TASKS - 3)]
    others.append(asyncio.create_task(probe()))
    await asyncio.sleep(seconds)
    stop.set()
    done = await working
    await asyncio.gather(*others)
    return lags, done


def batch() -> TensorDict:
    return TensorDict({"x": torch.ones(ROWS, PUT_BYTES // ROWS, dtype=torch.uint8)}, batch_size=[ROWS])


async def nothing(ready: asyncio.Event, stop: asyncio.Event) -> int:
    ready.set()
    await stop.wait()
    return 0


async def with_asyncio_client(ready: asyncio.Event, stop: asyncio.Event) -> int:
    ids, fields, puts = [str(row) for row in range(ROWS)], batch(), 0
    async with rlplane.build_async_data_plane_client(rlplane.load_config("shm")) as client:
        await client.register_partition("p", ["x", "never"], 10**6, ["train"])
        claim = asyncio.create_task(client.claim_meta("p", "train", ["never"], 1))
        await client.put_samples(ids, "p", fields)
        ready.set()
        while not stop.is_set():
            await client.put_samples(ids, "p", fields)
            puts += 1
        claim.cancel()
    return puts


async def with_blocking_client(ready: asyncio.Event, stop: asyncio.Event) -> int:
    ids, fields, puts = [str(row) for row in range(ROWS)], batch(), 0
    with rlplane.build_data_plane_client(rlplane.load_config("shm")) as client:
        client.register_partition("p", ["x"], 10**6, ["train"])
        client.put_samples(ids, "p", fields)
        ready.set()
        while not stop.is_set():
            client.put_samples(ids, "p", fields)
            puts += 1
            await asyncio.sleep(0)
    return puts


async def main(seconds: float) -> None:
    print(f"{TASKS} tasks on one loop, {seconds:g} s each; by how many ms a task wakes too late\n")
    print(f"{'':24}{'median':>9}{'p99':>9}{'largest':>9}{'puts':>7}")
    works: dict[str, Work] = {
        "no client": nothing,
        "asyncio client": with_asyncio_client,
        "blocking client": with_blocking_client,
    }
    for name, work in works.items():
        lags, puts = await lag_of(work, seconds)
        median, p99, largest = (1e3 * float(q) for q in np.quantile(lags, [0.5, 0.99, 1.0]))
        print(f"{name:24}{median:9.2f}{p99:9.2f}{largest:9.2f}{puts:7}")


if __name__ == "__main__":
    warnings.simplefilter("ignore", RuntimeWarning)  # that the blocking client stops the loop is shown here
    asyncio.run(main(float(sys.argv[1]) if len(sys.argv) > 1 else 5.0))
