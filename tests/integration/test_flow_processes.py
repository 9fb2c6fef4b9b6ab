"""Flow control with real processes on one machine: workers that are killed, and rollouts that run ahead."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from tensordict import TensorDict
from tests.integration.shm_workers import context

from rlplane import FlowPolicy, build_data_plane_client, load_config
from rlplane.adapters.local.shm import ShmDataPlaneClient
from rlplane.interfaces import DataPlaneConfig

GROUPS, SIZE = 64, 8
PATIENCE_S = 240
SMALL = {"global_segment_size": 64 << 20, "local_buffer_size": 1 << 20}


def generate(cfg: DataPlaneConfig, dies_in_group: int | None) -> None:
    """A rollout worker that writes member by member; one of them is killed in the middle of a group."""
    with build_data_plane_client(cfg, bootstrap=False) as client:
        group = 0
        while True:
            meta = client.claim_meta("flow", "rollout", ["prompt"], SIZE, timeout_s=None)
            if not meta.size:
                return
            version = client.partition_status("flow")["flow"]["version"]
            for number, sample_id in enumerate(meta.sample_ids):
                if group == dies_in_group and number == 3:
                    os.kill(os.getpid(), signal.SIGKILL)
                row = TensorDict({"response": torch.zeros(1, 4)}, [1])
                client.put_samples([sample_id], "flow", row, [{"weight_version": version}])
            group += 1


def prompts(groups: int) -> list[str]:
    return [f"p{group}_g{member}" for group in range(groups) for member in range(SIZE)]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "policy",
    [None, FlowPolicy.ready_first(1, batch=4), FlowPolicy.in_order(1, batch=4)],
    ids=["none", "ready_first", "in_order"],
)
def test_groups_of_a_worker_that_was_killed_are_finished_by_another(policy: FlowPolicy | None) -> None:
    with ShmDataPlaneClient(load_config("shm", SMALL)) as client:
        cfg = load_config("shm", {**SMALL, "controller_address": client.controller_address})
        client.register_partition("flow", ["prompt", "response"], 0, ["rollout", "train"], SIZE, flow=policy)
        ids = prompts(GROUPS)
        client.put_samples(ids, "flow", TensorDict({"prompt": torch.zeros(len(ids))}, [len(ids)]))
        client.finish_partition("flow")
        workers = [context.Process(target=generate, args=(cfg, dies)) for dies in (2, None)]
        workers[0].start()
        workers[0].join(PATIENCE_S)  # it dies in its third group
        assert workers[0].exitcode == -signal.SIGKILL
        workers[1].start()
        try:
            trained: list[str] = []
            for step in range(GROUPS // 4):
                batch = client.claim_meta("flow", "train", ["response"], 4 * SIZE, timeout_s=PATIENCE_S)
                assert [group.size for group in batch.groups()] == [SIZE] * 4
                if policy is not None:
                    assert all(step - tags["weight_version"] <= 1 for tags in batch.tags or ())
                trained += [str(group.name) for group in batch.groups()]
                client.clear_samples(batch.sample_ids, "flow")
                client.advance_version("flow", step + 1)
            assert sorted(trained) == sorted(f"p{group}" for group in range(GROUPS))
            assert client.count("flow") == 0
        finally:
            for worker in workers:
                worker.join(PATIENCE_S / 4)
                if worker.is_alive():
                    worker.kill()
        assert workers[1].exitcode == 0
