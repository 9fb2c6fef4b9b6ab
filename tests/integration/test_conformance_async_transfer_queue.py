"""The conformance suite against the asyncio client on a cluster.

All of it on TransferQueue's simple backend. On Mooncake, what moves bytes: the rest is the same code.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.integration.conftest import ClusterFactory

from rlplane.factory import build_async_data_plane_client
from rlplane.interfaces import DataPlaneConfig
from rlplane.testing import PromiseCheck, checks, run_check
from rlplane.testing.async_adapter import BlockingClient, loop_in_thread

pytestmark = pytest.mark.cluster

MOVES_BYTES = {"writing", "columns", "objects", "trees", "appending", "reading"}
NEEDS_A_DEVICE = "what_is_on_a_device_is_moved_to_the_host"


class AsyncClusterPlanes:
    """The planes of a cluster, with asyncio clients that live on one event loop."""

    time_scale = ClusterFactory.time_scale

    def __init__(self, backend: str) -> None:
        self._planes = ClusterFactory(backend)
        self._loop = loop_in_thread()
        self._configs: dict[BlockingClient, DataPlaneConfig] = {}

    def client(self, **keys: Any) -> BlockingClient:
        return self._open(self._planes.config(**keys), bootstrap=True)

    def worker(self, client: BlockingClient) -> BlockingClient:
        return self._open(self._configs[client], bootstrap=False)

    def _open(self, cfg: DataPlaneConfig, *, bootstrap: bool) -> BlockingClient:
        client = BlockingClient(build_async_data_plane_client(cfg, bootstrap=bootstrap), self._loop)
        self._configs[client] = cfg
        return client

    def close(self) -> None:
        self._planes.close()


@pytest.fixture(scope="module")
def planes(ray_cluster: str, request: pytest.FixtureRequest) -> Iterator[AsyncClusterPlanes]:
    made = AsyncClusterPlanes(request.param)
    yield made
    made.close()


def cases() -> Iterator[tuple[str, PromiseCheck]]:
    for check in checks():
        yield "simple", check
    for check in checks():
        if check.body.__module__.rpartition(".")[2] in MOVES_BYTES:
            yield "mooncake_cpu", check


@pytest.mark.parametrize(("planes", "check"), list(cases()), ids=str, indirect=["planes"], scope="module")
def test_the_asyncio_client_keeps_on_a_cluster_the_promise_that(
    planes: AsyncClusterPlanes, check: PromiseCheck
):
    outcome = run_check(check, planes)
    assert outcome.result == "kept" or check.name == NEEDS_A_DEVICE, outcome.reason
