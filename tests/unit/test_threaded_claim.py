"""A claim that ran in a thread and was cancelled is not lost."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import rlplane
from rlplane.threaded_claim import claim_in_thread


def until(condition: Any) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


@pytest.fixture(params=["local", "shm"])
def client(request: pytest.FixtureRequest) -> Any:
    with rlplane.build_data_plane_client(rlplane.load_config(request.param)) as made:
        made.register_partition("p", ["x"], 0, ["t"])
        yield made


def put(client: rlplane.DataPlaneClient, ids: list[str]) -> None:
    client.put_samples(ids, "p", TensorDict({"x": torch.zeros(len(ids))}, batch_size=[len(ids)]))


# The puts go through the loop's own thread, and wait there if the machine is busy.
@pytest.mark.filterwarnings("ignore:put_samples waits in a thread that runs an event loop:RuntimeWarning")
def test_nothing_is_lost_by_claims_that_are_cancelled_at_any_moment(client: Any) -> None:
    ids = [f"s{number}" for number in range(400)]
    pick = random.Random(0)
    taken: list[str] = []
    outcomes: set[str] = set()

    async def one() -> None:
        claiming = asyncio.create_task(claim_in_thread(client, "p", "t", ["x"], 2, timeout_s=60.0))
        for _ in range(pick.choice([0, 1, 2, 3, 5, 50])):
            await asyncio.sleep(pick.choice([0, 0, 0.0005]))
        claiming.cancel()
        try:
            taken.extend((await claiming).sample_ids)
            outcomes.add("claimed")
        except asyncio.CancelledError:
            outcomes.add("cancelled")

    async def main() -> None:
        for number in range(100):
            if number % 2:  # every other claim finds something at once, the rest wait for a while
                put(client, ids[4 * (number - 1) : 4 * (number + 1)])
            await one()

    asyncio.run(main())  # waits for the threads
    assert "cancelled" in outcomes
    left = client.claim_meta("p", "t", ["x"], len(ids), blocking=False).sample_ids
    assert sorted(taken + left) == sorted(ids), "a sample was lost, or handed out twice"


def test_what_a_claim_gets_after_its_cancellation_goes_to_the_front_of_the_queue(client: Any) -> None:
    async def main() -> None:
        claiming = asyncio.create_task(claim_in_thread(client, "p", "t", ["x"], 2, timeout_s=120.0))
        await asyncio.to_thread(until, lambda: client.partition_status("p")["tasks"]["t"]["waiting"])
        claiming.cancel()
        with pytest.raises(asyncio.CancelledError):
            await claiming
        await asyncio.to_thread(put, client, ["a", "b", "c"])

    asyncio.run(main())
    assert client.claim_meta("p", "t", ["x"], 3, timeout_s=120.0).sample_ids == ["a", "b", "c"]


def test_what_came_together_with_the_cancellation_is_given_back(client: Any) -> None:
    put(client, ["a"])
    given_back = threading.Event()
    unclaim = client.unclaim

    def note(meta: rlplane.KVBatchMeta) -> None:
        unclaim(meta)
        given_back.set()

    async def main() -> None:
        client.unclaim = note
        claiming = asyncio.create_task(claim_in_thread(client, "p", "t", ["x"], 1))
        await asyncio.sleep(0)  # the thread is started
        # The loop stands still until the claim has been made: its answer and the cancellation come together.
        until(lambda: client.check_consumption_status("p", ["t"]))
        time.sleep(0.05)
        claiming.cancel()
        with pytest.raises(asyncio.CancelledError):
            await claiming
        await asyncio.to_thread(given_back.wait, 120)

    asyncio.run(main())
    assert given_back.is_set()
    assert client.claim_meta("p", "t", ["x"], 1, timeout_s=120.0).sample_ids == ["a"]


def test_errors_and_results_are_those_of_the_claim(client: Any) -> None:
    put(client, ["a"])
    meta = asyncio.run(claim_in_thread(client, "p", "t", ["x"], 1))
    assert meta.sample_ids == ["a"] and meta.task_name == "t"
    with pytest.raises(rlplane.ClaimTimeoutError):
        asyncio.run(claim_in_thread(client, "p", "t", ["x"], 1, timeout_s=0.01))
