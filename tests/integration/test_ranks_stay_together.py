"""DistributedDataParallel over a stream: every rank gets as many batches as the others."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.integration.shm_workers import context
from torch.nn.parallel import DistributedDataParallel

from rlplane import kv_first_write, load_config
from rlplane.adapters.local.shm import ShmDataPlaneClient
from rlplane.data import StreamingDataset
from rlplane.interfaces import DataPlaneConfig

BATCHES = 25
PER_RANK = 3


def train(rank: int, world: int, cfg: DataPlaneConfig, meeting_point: str, results: Any) -> None:
    """One rank. Rank 1 is slow, so that without the plane's help the others would run ahead of it."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting_point, rank=rank, world_size=world)
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    dataset = StreamingDataset(
        cfg, "flow", "train", ["tokens"], PER_RANK, dp_rank=rank, dp_world=world, with_meta=True, clear=True
    )
    seen = []
    for meta, batch in dataset:
        if rank == 1:
            time.sleep(0.01)
        loss = model(batch["tokens"].sum(1, keepdim=True).float()).square().mean()
        optimizer.zero_grad()
        loss.backward()  # waits for all ranks
        optimizer.step()
        seen.append(meta.sample_ids)
    weight = next(model.parameters()).item()
    results.put((rank, seen, weight))
    dist.destroy_process_group()


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_train_equally_many_batches_of_a_ragged_flow(world: int, tmp_path: Path) -> None:
    small = {"global_segment_size": 64 << 20, "local_buffer_size": 1 << 20}
    # Two more than a whole number of batches: a shorter last one for two ranks, and left over for four.
    count = BATCHES * PER_RANK * world + 2
    with ShmDataPlaneClient(load_config("shm", small)) as client:
        cfg = load_config("shm", {**small, "controller_address": client.controller_address})
        client.register_partition("flow", ["tokens"], 0, ["train"])
        results = context.Queue()
        meeting_point = f"file://{tmp_path / 'meeting'}"
        ranks = [
            context.Process(target=train, args=(rank, world, cfg, meeting_point, results))
            for rank in range(world)
        ]
        for process in ranks:
            process.start()
        try:
            for first in range(0, count, 7):
                ids = range(first, min(first + 7, count))
                lengths = [1 + number * 37 % 11 for number in ids]
                rows = torch.ones(len(lengths), 11, dtype=torch.long)
                kv_first_write(
                    {"tokens": rows},
                    dp_client=client,
                    partition_id="flow",
                    sample_ids=[f"s{number}" for number in ids],
                    lengths=lengths,
                    token_aligned_fields=["tokens"],
                )
            client.finish_partition("flow")
            got = {rank: (seen, weight) for rank, seen, weight in (results.get(timeout=300) for _ in ranks)}
        finally:
            for process in ranks:
                process.join(120)
                if process.is_alive():
                    process.kill()
        assert [process.exitcode for process in ranks] == [0] * world
        batches = BATCHES + (world == 2)
        assert [len(seen) for seen, _ in got.values()] == [batches] * world
        for parts in zip(*(got[rank][0] for rank in range(world)), strict=True):
            assert len({len(part) for part in parts}) == 1
        trained = [i for seen, _ in got.values() for part in seen for i in part]
        assert len(set(trained)) == len(trained) == count - (2 if world == 4 else 0)
        assert len({weight for _, weight in got.values()}) == 1
        assert client.count("flow") == count - len(trained)
