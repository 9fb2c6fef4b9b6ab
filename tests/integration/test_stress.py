"""The short forms of ``rlplane stress``."""

from __future__ import annotations

import pytest
from tests.integration.conftest import cluster_config

from rlplane.config import load_config
from rlplane.testing.flow_stress import POLICIES, run_flow_stress
from rlplane.testing.stress import run_stress


def test_eight_processes_lose_nothing_while_the_service_is_killed_every_two_seconds() -> None:
    report = run_stress(load_config("shm", {"global_segment_size": "512 MiB"}), 8.0)
    assert report.held, report
    assert report.kills >= 1  # more, the less busy the machine is
    assert report.trained > 0
    assert len(report.pauses_s) == report.kills and f"{max(report.pauses_s):.2f} s at most" in report.row()


@pytest.mark.cluster
@pytest.mark.timeout(1200)
def test_a_job_on_a_cluster_keeps_its_bound_and_every_prompt_when_it_is_killed_with_its_ray() -> None:
    report = run_flow_stress(cluster_config("simple"), "in_order", 0.0)
    assert report.held, report
    assert report.kills == 1 and report.slow > 0 and report.trained > 0


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_keeps_its_bound_and_every_prompt_when_the_job_is_killed_and_resumes(policy: str) -> None:
    small = {"global_segment_size": "64 MiB", "local_buffer_size": "1 MiB"}
    report = run_flow_stress(load_config("shm", small), policy, 0.0)
    assert report.held, report
    assert report.kills == 1 and report.slow > 0 and report.trained > 0
