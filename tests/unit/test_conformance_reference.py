"""The conformance suite, run against the reference adapter."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rlplane.testing import check_data_plane, checks, run_check

sys.path.insert(0, str(Path(__file__).parent))
from reference_adapter import ReferencePlanes, make_client

# All that a machine without an accelerator cannot show.
NEEDS_A_DEVICE = "what_is_on_a_device_is_moved_to_the_host"


@pytest.mark.parametrize("check", checks(), ids=str)
def test_the_reference_adapter_keeps_the_promise_that(check):
    outcome = run_check(check, ReferencePlanes())
    assert outcome.result == "kept" or check.name == NEEDS_A_DEVICE


def test_a_plain_function_is_a_factory_and_what_it_lacks_is_said():
    reasons = {o.check.name: o.reason for o in check_data_plane(make_client) if o.result == "not applicable"}
    reasons.pop(NEEDS_A_DEVICE, None)
    assert reasons
    assert all("worker()" in reason or "does not take" in reason for reason in reasons.values())
