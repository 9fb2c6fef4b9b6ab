"""The short form of ``rlplane stress``."""

from __future__ import annotations

from rlplane.config import load_config
from rlplane.testing.stress import run_stress


def test_eight_processes_lose_nothing_while_the_service_is_killed_every_two_seconds() -> None:
    report = run_stress(load_config("shm", {"global_segment_size": "512 MiB"}), 8.0)
    assert report.held, report
    assert report.kills >= 1  # more, the less busy the machine is
    assert report.trained > 0
