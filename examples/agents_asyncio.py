"""Fifty agents in one process: each talks to a model and calls tools, turn by turn, while a trainer learns.

All of them are tasks of one event loop and share one client. An agent appends each turn to its conversation;
the reward comes last, and makes the episode ready for the trainer. An agent that takes too long is cancelled,
and its episode is cleared.

The model and the tools are stand-ins that only wait: where they are, a real agent awaits its HTTP client.
"""

from __future__ import annotations

import asyncio
import random

import torch
from tensordict import NonTensorStack, TensorDict

from rlplane import AsyncDataPlaneClient, build_async_data_plane_client, load_config

AGENTS, TURNS, BATCH = 50, 4, 10
STUCK = {7, 23}  # agents whose tool does not answer in their second turn
PATIENCE_S = 3.0


async def model(conversation: list[int]) -> tuple[list[int], str]:
    """The next tokens, and the tool that they call."""
    await asyncio.sleep(random.uniform(0.0, 0.05))
    return [sum(conversation) % 1000 + i for i in range(random.randint(2, 6))], random.choice(list(TOOLS))


async def search(agent: int, turn: int) -> list[int]:
    await asyncio.sleep(3600 if agent in STUCK and turn == 1 else random.uniform(0.0, 0.05))
    return [1, 2, 3]


async def calculate(agent: int, turn: int) -> list[int]:
    return [agent * turn]


TOOLS = {"search": search, "calculate": calculate}


async def run_agent(client: AsyncDataPlaneClient, agent: int) -> None:
    conversation, calls = [agent], list[str]()
    for turn in range(TURNS):
        reply, tool = await model(conversation)
        if agent in STUCK:
            tool = "search"
        result = await TOOLS[tool](agent, turn)
        conversation += reply + result
        calls.append(tool)
        spoken = TensorDict(
            {
                "tokens": torch.tensor([reply + result]),
                "is_reply": torch.tensor([[True] * len(reply) + [False] * len(result)]),
            },
            batch_size=[1],
        )
        # Readers see whole turns: tokens, mask and tag become visible together. Only the new ones travel.
        tags = [{"turns": turn + 1}]
        is_last = turn == TURNS - 1
        await client.append_samples([f"agent{agent}"], "episodes", spoken, tags, finish=is_last)
    outcome = {"calls": NonTensorStack(calls), "reward": torch.tensor([calls.count("search") / TURNS])}
    await client.put_samples([f"agent{agent}"], "episodes", TensorDict(outcome, batch_size=[1]))


async def run_patiently(client: AsyncDataPlaneClient, agent: int) -> bool:
    try:
        async with asyncio.timeout(PATIENCE_S):
            await run_agent(client, agent)
        return True
    except TimeoutError:
        await client.clear_samples([f"agent{agent}"], "episodes")
        return False


async def train(client: AsyncDataPlaneClient) -> tuple[int, int]:
    episodes = tokens = 0
    async for meta in client.claims("episodes", "train", ["tokens", "is_reply", "reward"], BATCH):
        batch = await client.get_data(meta)
        episodes += meta.size
        tokens += int(batch["is_reply"].values().sum())
        await client.clear_samples(meta.sample_ids, "episodes")
    return episodes, tokens


async def main() -> None:
    async with build_async_data_plane_client(load_config("shm")) as client:
        fields = ["tokens", "is_reply", "calls", "reward"]
        await client.register_partition("episodes", fields, num_samples=AGENTS, consumer_tasks=["train"])
        async with asyncio.TaskGroup() as group:
            agents = [group.create_task(run_patiently(client, agent)) for agent in range(AGENTS)]
            trained = group.create_task(train(client))
        finished = sum(agent.result() for agent in agents)
        episodes, tokens = trained.result()
        status = await client.partition_status("episodes")
        print(f"{finished} of {AGENTS} agents finished; trained on {episodes} episodes with {tokens} tokens")
        print(f"{status['samples']} samples are left")
        assert episodes == finished == AGENTS - len(STUCK) and status["samples"] == 0


if __name__ == "__main__":
    asyncio.run(main())
