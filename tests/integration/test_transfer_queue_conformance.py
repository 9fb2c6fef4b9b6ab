"""Every promise of the contract, and the state machine, on TransferQueue with both of its backends."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from rlplane.testing import PromiseCheck, checks, data_plane_state_machine, run_check

pytestmark = pytest.mark.cluster

# What a machine without an accelerator cannot show.
NOT_HERE = {"what_is_on_a_device_is_moved_to_the_host"}


@pytest.mark.parametrize("check", checks(), ids=lambda check: check.name)
def test_the_contract_is_kept(cluster, check: PromiseCheck):
    outcome = run_check(check, cluster)
    assert outcome.result == "kept" or check.name in NOT_HERE, outcome.reason


def test_random_operations_agree_with_a_model(cluster):
    run_state_machine_as_test(
        data_plane_state_machine(cluster),
        settings=settings(
            max_examples=8,
            stateful_step_count=25,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
