"""The conformance suite and the state machine against shared memory, in one process and across several."""

from __future__ import annotations

import pytest
from hypothesis import settings
from tests.integration.remote_client import RemoteClient, RemoteProcess

from rlplane.config import load_config
from rlplane.factory import build_data_plane_client
from rlplane.testing import checks, data_plane_state_machine, run_check

NEEDS_A_DEVICE = "what_is_on_a_device_is_moved_to_the_host"


class ShmPlanes:
    """One plane for all checks that need nothing special of it; each check gets clients of its own."""

    time_scale = 2.0

    def __init__(self):
        self._shared = None

    def client(self, **config):
        if config:
            return build_data_plane_client(load_config("shm", config))
        if self._shared is None:
            self._shared = build_data_plane_client(load_config("shm"))
        return self.worker(self._shared)

    def worker(self, client):
        address = client.controller_address
        return build_data_plane_client(load_config("shm", {"controller_address": address}), bootstrap=False)

    def close(self):
        if self._shared is not None:
            self._shared.close()
            self._shared = None


class RemotePlanes(ShmPlanes):
    """The same, with the client in one other process and its workers in a second one."""

    def __init__(self):
        super().__init__()
        self._processes = RemoteProcess(), RemoteProcess()

    def client(self, **config):
        if config:
            raise NotImplementedError("capacity is the plane's, and not the process's")
        return self._remote(self._processes[0], super().client())

    def worker(self, client):
        if isinstance(client, RemoteClient):
            return self._remote(self._processes[1], super().worker(self._shared))
        return super().worker(client)

    def _remote(self, process, client):
        remote = process.adopt(client)
        client.close()
        return remote

    def close(self):
        for process in self._processes:
            process.stop()
        super().close()


_planes = ShmPlanes()


@pytest.fixture(scope="module", autouse=True)
def planes():
    yield _planes
    _planes.close()


@pytest.mark.parametrize("check", checks(), ids=str)
def test_shared_memory_keeps_the_promise_that(check, planes):
    outcome = run_check(check, planes)
    assert outcome.result == "kept" or check.name == NEEDS_A_DEVICE


@pytest.fixture(scope="module")
def remote_planes():
    shared = RemotePlanes()
    yield shared
    shared.close()


@pytest.mark.parametrize("check", [check for check in checks() if not check.features], ids=str)
def test_shared_memory_keeps_across_processes_the_promise_that(check, remote_planes):
    outcome = run_check(check, remote_planes)
    assert outcome.result == "kept" or check.name == NEEDS_A_DEVICE


TestShmPlane = data_plane_state_machine(_planes).TestCase
TestShmPlane.settings = settings(TestShmPlane.settings, max_examples=25, stateful_step_count=30)
