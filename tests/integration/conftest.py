"""Ray, TransferQueue and Mooncake for the tests, started once per session, on loopback."""

from __future__ import annotations

import dataclasses
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rlplane.adapters.transfer_queue import TQDataPlaneClient
from rlplane.adapters.transfer_queue.plane import SERVICE, namespace, plane_config
from rlplane.adapters.transfer_queue.service import ServiceActor
from rlplane.config import load_config
from rlplane.interfaces import DataPlaneConfig

# Ray replaces 127.0.0.1 by an address that others can reach; this one is as much loopback, and stays.
LOOPBACK = "127.0.0.2"
BACKENDS = {"simple": "cluster-simple", "mooncake_cpu": "cluster-mooncake"}


def cluster_config(backend: str, **keys: Any) -> DataPlaneConfig:
    """A small plane on loopback. Unless it is told otherwise, it has a Ray namespace to itself."""
    small = {
        "transfer_queue.node_ip": LOOPBACK,
        "transfer_queue.namespace": f"test-{uuid.uuid4().hex[:8]}",
        "num_storage_units": 1,
        "global_segment_size": 128 << 20,
        "local_buffer_size": 4 << 20,
        "claim_meta_poll_interval_s": 0.05,
    }
    return load_config(BACKENDS[backend], {**small, **keys})


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[str]:
    """A Ray of our own; its address."""
    ray = pytest.importorskip("ray")
    # Short: Ray puts Unix sockets below it, and their paths have little room.
    directory = tempfile.mkdtemp(prefix="rlp-", dir="/tmp")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(
        address="local",
        num_cpus=32,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=100 << 20,
        _node_ip_address=LOOPBACK,
        _temp_dir=directory,
    )
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()
    shutil.rmtree(directory, ignore_errors=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """End Ray after the last test that shares it. Its daemons and the actors of its planes poll: while the
    other tests ran, that was a tenth of all CPU time. A test that asks for it later would start it again."""
    yield
    shares, goes_on = ("ray_cluster" in getattr(each, "fixturenames", ()) for each in (item, nextitem))
    if shares and not goes_on:
        last: Any = item  # pytest has no public way to end a fixture
        for definition in last.session._fixturemanager.getfixturedefs("ray_cluster", item):
            definition.finish(last._request)


class ClusterFactory:
    """Planes of one backend, for the conformance suite.

    One set of TransferQueue's actors serves all of them, and each config that a check asks for gets a control
    service of its own beside it: that is where capacity is decided, and it is one process instead of five.
    """

    time_scale = 2.0

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.owner = TQDataPlaneClient(cluster_config(backend, num_storage_units=2))
        self._configs: dict[frozenset[tuple[str, Any]], DataPlaneConfig] = {frozenset(): self.owner._cfg}
        self._services: list[Any] = []

    def config(self, **keys: Any) -> DataPlaneConfig:
        """The config of the plane that has these keys, which is started when first asked for."""
        # What only the client reads needs no plane of its own.
        mine = {key: value for key, value in keys.items() if key not in ("allow_pickle", "local_buffer_size")}
        if "global_segment_size" in mine:
            mine["num_storage_units"] = 1
        known = frozenset(mine.items())
        if known not in self._configs:
            config = cluster_config(self.backend, num_storage_units=2)
            self._configs[known] = self._start_service(load_config(dict(config), mine))
        return load_config(dict(self._configs[known]), keys)

    def _start_service(self, config: DataPlaneConfig) -> DataPlaneConfig:
        import ray

        plane = dataclasses.replace(
            self.owner._plane,
            namespace=namespace(config),
            config=plane_config(config),
            service={},
            actor=None,
            started=[],
            journal_dir="",  # that of the owner has another plane in it
        )
        actor = ray.remote(ServiceActor).options(name=SERVICE, namespace=plane.namespace, num_cpus=0)
        service = actor.remote(dict(config), plane.describe())
        ray.get(service.describe.remote())
        self._services.append(service)
        return config

    def client(self, **keys: Any) -> TQDataPlaneClient:
        """A client that asks for a plane with these keys, and finds one."""
        return TQDataPlaneClient(self.config(**keys))

    def worker(self, client: TQDataPlaneClient) -> TQDataPlaneClient:
        """One more client of the plane of ``client``."""
        return TQDataPlaneClient(client._cfg, bootstrap=False)

    def close(self) -> None:
        """End every plane."""
        import ray

        for service in self._services:
            ray.kill(service)
        self.owner.close()


@pytest.fixture(scope="session", params=list(BACKENDS))
def cluster(request: pytest.FixtureRequest, ray_cluster: str) -> Iterator[ClusterFactory]:
    """The planes of each backend in turn."""
    factory = ClusterFactory(request.param)
    yield factory
    factory.close()


@pytest.fixture
def start_plane(ray_cluster: str) -> Iterator[Callable[..., TQDataPlaneClient]]:
    """Starts planes that a test may break: ``start_plane(backend, **config)`` gives the bootstrap client."""
    started: list[TQDataPlaneClient] = []

    def start(backend: str, **keys: Any) -> TQDataPlaneClient:
        client = TQDataPlaneClient(cluster_config(backend, **keys))
        started.append(client)
        return client

    yield start
    for client in started:
        client.close()
