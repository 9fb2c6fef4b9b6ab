"""The conformance suite and the state machine against the asyncio client on shared memory."""

from __future__ import annotations

import pytest
from hypothesis import settings

from rlplane.config import load_config
from rlplane.factory import build_async_data_plane_client
from rlplane.testing import checks, data_plane_state_machine, run_check
from rlplane.testing.async_adapter import BlockingClient, loop_in_thread

NEEDS_A_DEVICE = "what_is_on_a_device_is_moved_to_the_host"


class AsyncShmPlanes:
    """One plane for all checks that need nothing special of it; all clients live on one event loop."""

    time_scale = 2.0

    def __init__(self):
        self._loop = loop_in_thread()
        self._shared = None

    def client(self, **config):
        if config:
            return self._open(load_config("shm", config))
        if self._shared is None:
            self._shared = self._open(load_config("shm"))
        return self.worker(self._shared)

    def worker(self, client):
        address = client.controller_address
        return self._open(load_config("shm", {"controller_address": address}), bootstrap=False)

    def _open(self, cfg, *, bootstrap=True):
        return BlockingClient(build_async_data_plane_client(cfg, bootstrap=bootstrap), self._loop)

    def close(self):
        if self._shared is not None:
            self._shared.close()
            self._shared = None


_planes = AsyncShmPlanes()


@pytest.fixture(scope="module", autouse=True)
def planes():
    yield _planes
    _planes.close()


@pytest.mark.parametrize("check", checks(), ids=str)
def test_the_asyncio_client_keeps_in_shared_memory_the_promise_that(check, planes):
    outcome = run_check(check, planes)
    assert outcome.result == "kept" or check.name == NEEDS_A_DEVICE


TestAsyncShmPlane = data_plane_state_machine(_planes).TestCase
TestAsyncShmPlane.settings = settings(TestAsyncShmPlane.settings, max_examples=15, stateful_step_count=30)
