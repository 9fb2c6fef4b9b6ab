"""The conformance suite, run against the reference adapter."""

from __future__ import annotations

import pytest
from tests.unit.reference_adapter import ReferenceClient, ReferencePlanes, make_client

from rlplane.testing import check_data_plane, checks, run_check

# All that a machine without an accelerator cannot show.
NEEDS_A_DEVICE = "what_is_on_a_device_is_moved_to_the_host"


@pytest.mark.parametrize("check", checks(), ids=str)
def test_the_reference_adapter_keeps_the_promise_that(check):
    outcome = run_check(check, ReferencePlanes())
    wanted = "refused" if check.features & ReferenceClient.limitations else "kept"
    assert outcome.result == wanted or check.name == NEEDS_A_DEVICE


def test_a_plain_function_is_a_factory_and_what_it_lacks_is_said():
    reasons = {o.check.name: o.reason for o in check_data_plane(make_client) if o.result == "not applicable"}
    reasons.pop(NEEDS_A_DEVICE, None)
    assert reasons
    assert all("worker()" in reason or "does not take" in reason for reason in reasons.values())
