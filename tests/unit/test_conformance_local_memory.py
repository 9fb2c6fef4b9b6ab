"""The conformance suite and the state machine, run against the local engine in memory."""

from __future__ import annotations

import uuid

import pytest
from hypothesis import settings

from rlplane.config import load_config
from rlplane.factory import build_data_plane_client
from rlplane.testing import checks, data_plane_state_machine, run_check

# All that a machine without an accelerator cannot show.
NEEDS_A_DEVICE = "what_is_on_a_device_is_moved_to_the_host"


class MemoryPlanes:
    """Every client gets a plane of its own, under a name that its workers join."""

    def __init__(self):
        self.configs = {}

    def client(self, **config):
        cfg = load_config("local", {"controller_address": f"conformance-{uuid.uuid4().hex}", **config})
        client = build_data_plane_client(cfg)
        self.configs[client] = cfg
        return client

    def worker(self, client):
        return build_data_plane_client(self.configs[client], bootstrap=False)


@pytest.mark.parametrize("check", checks(), ids=str)
def test_the_memory_engine_keeps_the_promise_that(check):
    outcome = run_check(check, MemoryPlanes())
    assert outcome.result == "kept" or check.name == NEEDS_A_DEVICE


TestMemoryPlane = data_plane_state_machine(MemoryPlanes()).TestCase
TestMemoryPlane.settings = settings(TestMemoryPlane.settings, max_examples=60, stateful_step_count=40)
