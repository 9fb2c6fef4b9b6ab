"""verl's own code on our plane and on the real TransferQueue: one step of a job, with the same results."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.warm_workers import run_warm

JOB = Path(__file__).with_name("verl_job.py")


def run_job(**environment: str) -> dict[str, Any]:
    inherited = {name: value for name, value in os.environ.items() if name != "RLPLANE_CONTROLLER_ADDRESS"}
    done = run_warm(
        [sys.executable, str(JOB)],
        env={**inherited, "RAY_USAGE_STATS_ENABLED": "0", **environment},
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    seen: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return seen


@pytest.mark.cluster
@pytest.mark.slow
def test_a_step_of_a_verl_job_is_the_same_on_ours_as_on_transfer_queue(ray_cluster: str) -> None:
    ours = run_job(RLPLANE_AS_TRANSFER_QUEUE="1")
    assert ours["sampled"][0] == ["uid1_0_0", "uid1_1_0", "uid2_0_0", "uid2_1_0"]
    assert ours["left"] == {"uid4": "pending"}
    assert ours == run_job(RAY_ADDRESS=ray_cluster)
