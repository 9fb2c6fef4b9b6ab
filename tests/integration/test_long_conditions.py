"""Claims whose condition looks at many samples, over real sockets."""

from __future__ import annotations

import threading

from tests.integration import shm_workers as workers

from rlplane.adapters.local.shm import ShmDataPlaneClient
from rlplane.config import load_config
from rlplane.errors import ClaimTimeoutError, ClientClosedError, DataPlaneError
from rlplane.factory import build_data_plane_client

SAMPLES, AT_ONCE = 40_000, 4_000


def test_claims_with_long_conditions_are_answered_and_others_beside_them() -> None:
    plane = build_data_plane_client(load_config("shm"))
    assert isinstance(plane, ShmDataPlaneClient)
    plane.register_partition("flow", ["x"], 10**9, ["train"])
    for start in range(0, SAMPLES, AT_ONCE):
        numbers = range(start, start + AT_ONCE)
        plane.put_samples([f"s{number}" for number in numbers], "flow", None, [{"v": n} for n in numbers])
    worker = workers.connect(plane.controller_address)
    failures: list[type[DataPlaneError]] = []

    def claim_in_vain(number: int) -> None:
        try:
            where = {"v": {"in": [-number, *range(-5000, -3000)]}}
            worker.claim_meta("flow", "train", [], 1, timeout_s=1.0, where=where)
        except DataPlaneError as error:
            failures.append(type(error))

    waiting = [threading.Thread(target=claim_in_vain, args=(number,)) for number in range(1, 9)]
    for thread in waiting:
        thread.start()
    last = plane.claim_meta("flow", "train", [], 2, where={"v": {">=": SAMPLES - 2}})
    assert last.sample_ids == [f"s{SAMPLES - 2}", f"s{SAMPLES - 1}"]
    for number in range(20):
        plane.put_samples([f"late-{number}"], "flow", None, [{"v": SAMPLES + number}])
    for thread in waiting:
        thread.join(60)
    assert failures == [ClaimTimeoutError] * 8
    stall = plane.service_status()["loop_stall_ms"]
    assert 0 < stall["recent"] <= stall["max"]
    # A client that goes away while its condition is looked at takes it along.
    doomed = threading.Thread(target=claim_in_vain, args=(99,), daemon=True)
    doomed.start()
    worker.close()
    doomed.join(10)
    assert failures[8] in (ClientClosedError, ClaimTimeoutError)
    assert plane.claim_meta("flow", "train", [], 1, where={"v": 5}).sample_ids == ["s5"]
    plane.close()
