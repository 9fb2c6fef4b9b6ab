"""The conformance suite and the state machine, run against the asyncio client on the engine in memory."""

from __future__ import annotations

import uuid

import pytest
from hypothesis import settings

from rlplane.config import load_config
from rlplane.factory import build_async_data_plane_client
from rlplane.testing import checks, data_plane_state_machine, run_check
from rlplane.testing.async_adapter import BlockingClient, loop_in_thread

# All that a machine without an accelerator cannot show.
NEEDS_A_DEVICE = "what_is_on_a_device_is_moved_to_the_host"


class AsyncMemoryPlanes:
    """Every client gets a plane of its own; all of them live on one event loop."""

    def __init__(self):
        self.loop = loop_in_thread()
        self.configs = {}

    def client(self, **config):
        cfg = load_config("local", {"controller_address": f"conformance-{uuid.uuid4().hex}", **config})
        client = BlockingClient(build_async_data_plane_client(cfg), self.loop)
        self.configs[client] = cfg
        return client

    def worker(self, client):
        return BlockingClient(build_async_data_plane_client(self.configs[client], bootstrap=False), self.loop)


PLANES = AsyncMemoryPlanes()


@pytest.mark.parametrize("check", checks(), ids=str)
def test_the_asyncio_client_keeps_in_memory_the_promise_that(check):
    outcome = run_check(check, PLANES)
    assert outcome.result == "kept" or check.name == NEEDS_A_DEVICE


TestAsyncMemoryPlane = data_plane_state_machine(PLANES).TestCase
TestAsyncMemoryPlane.settings = settings(
    TestAsyncMemoryPlane.settings, max_examples=30, stateful_step_count=40
)
