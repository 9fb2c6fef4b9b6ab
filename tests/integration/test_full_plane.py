"""A plane that is full goes on: what finishes samples gets room before what makes new ones."""

from __future__ import annotations

from tests.integration import shm_workers as workers

from rlplane.adapters.local.shm import ShmDataPlaneClient
from rlplane.config import load_config
from rlplane.factory import build_data_plane_client

MB = 1 << 20
ROWS, WIDTH = 8, 64 * 1024
PRODUCERS, BATCHES = 3, 20


def test_producers_that_fill_the_arena_do_not_stop_the_stage_that_finishes_samples() -> None:
    cfg = load_config("shm", {"global_segment_size": 8 * MB, "local_buffer_size": 1 * MB})
    plane = build_data_plane_client(cfg)
    assert isinstance(plane, ShmDataPlaneClient)
    plane.register_partition("flow", ["x", "logprobs"], 10**6, ["score", "train"])
    address = plane.controller_address
    processes = [
        workers.start(workers.fill, address, f"producer-{number}", BATCHES, ROWS, WIDTH)
        for number in range(PRODUCERS)
    ]
    # Nothing is scored before the producers stand: 7 MiB and a bit are what new samples may use.
    workers.wait_until(lambda: plane.service_status()["storage"]["used"] > 6 * MB)
    processes.append(workers.start(workers.score, address, PRODUCERS * BATCHES, ROWS))
    trained: set[str] = set()
    for _ in range(PRODUCERS * BATCHES):
        meta = plane.claim_meta("flow", "train", ["x", "logprobs"], ROWS, timeout_s=30)
        assert trained.isdisjoint(meta.sample_ids)
        trained.update(meta.sample_ids)
        plane.clear_samples(meta.sample_ids, "flow")
    assert len(trained) == PRODUCERS * BATCHES * ROWS
    for process in processes:
        process.join(30)
        assert process.exitcode == 0
    assert plane.service_status()["samples"] == 0
    plane.close()
