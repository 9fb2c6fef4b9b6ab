"""Real NIXL telemetry, run by test_nixl.py: two agents move a batch over UCX, and the figures agree."""

from __future__ import annotations

import time

import nixl._api as nixl_api
import numpy as np
import pytest

from rlplane.transfer_stats import TransferStats

DESCRIPTORS, BATCH_BYTES = 16, 1 << 20


@pytest.fixture
def agents():
    config = nixl_api.nixl_agent_config(backends=["UCX"], capture_telemetry=True)
    return nixl_api.nixl_agent("rollout", config), nixl_api.nixl_agent("trainer", config)


def extents(memory: np.ndarray) -> list[tuple[int, int, int]]:
    size = memory.nbytes // DESCRIPTORS
    return [(memory.ctypes.data + index * size, size, 0) for index in range(DESCRIPTORS)]


def transfer(agent, handle) -> None:
    state, deadline = agent.transfer(handle), time.monotonic() + 60
    while state == "PROC":
        assert time.monotonic() < deadline, "the transfer did not finish"
        state = agent.check_xfer_state(handle)
    assert state == "DONE"


def test_telemetry_of_real_transfers_agrees_with_the_bytes_moved(agents):
    source, target = agents
    data = np.random.default_rng(0).integers(0, 255, BATCH_BYTES, dtype=np.uint8)
    there = np.zeros_like(data)
    registered = [
        agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
        for agent, memory in ((source, data), (target, there))
    ]
    peer = source.add_remote_agent(target.get_agent_metadata())
    handle = source.initialize_xfer(
        "WRITE",
        source.get_xfer_descs(extents(data), "DRAM"),
        source.get_xfer_descs(extents(there), "DRAM"),
        peer,
        b"batch written",
    )
    stats = TransferStats()
    for _ in range(3):
        there[:] = 0
        transfer(source, handle)
        stats.record_transfer(source.get_xfer_telemetry(handle))
        assert np.array_equal(data, there)
    source.release_xfer_handle(handle)
    for agent, memory in zip(agents, registered, strict=True):
        agent.deregister_memory(memory)

    assert stats.num_successful_transfers == 3
    assert stats.data["bytes_transferred"] == [BATCH_BYTES] * 3
    assert stats.data["num_descriptors"] == [DESCRIPTORS] * 3
    # NIXL's clock starts when the transfer is posted, so posting is a part of it; both are seconds here.
    assert all(0 < duration < 60 for duration in stats.data["transfer_duration"])
    for post, whole in zip(stats.data["post_duration"], stats.data["transfer_duration"], strict=True):
        assert 0 <= post <= whole
    figures = stats.reduce()
    assert figures["Avg MB per transfer"] == 1.0
    assert figures["Avg number of descriptors"] == 16.0
    total_s = sum(stats.data["transfer_duration"])
    assert figures["Throughput (MB/s)"] == pytest.approx(3.0 / total_s, rel=1e-3)


def test_a_transfer_that_fails_is_a_failure_and_no_transfer(agents):
    source, _ = agents
    stats = TransferStats()
    data = np.zeros(64, dtype=np.uint8)
    descriptors = source.get_xfer_descs([(data.ctypes.data, data.nbytes, 0)], "DRAM")
    try:
        source.initialize_xfer("WRITE", descriptors, descriptors, "nobody", b"")
    except Exception:
        stats.record_failed_transfer()
    assert stats.failures()["num_failed_transfers"] == 1
    assert not stats.is_empty()
    assert stats.reduce()["Num successful transfers"] == 0
