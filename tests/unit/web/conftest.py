"""The page's server on a real socket, showing a run that is only pictured."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from tests.simulated_run import SimulatedRun, SnapshotServer

from rlplane.metrics.snapshot import SessionState
from rlplane.transport.gate import Gate, HalfOpenConnections
from rlplane.viewing.feed import RunFeed
from rlplane.web.app import DashboardServer, listen

EVIL = "<script>alert(1)</script>"


@dataclass
class Stage:
    """A run that is published, the feed that follows it, and how to ask the page's server."""

    run: SimulatedRun
    server: SnapshotServer
    feed: RunFeed
    serve: Callable[..., httpx.Client]

    def publish(self, seconds: float = 1.0, state: SessionState | None = None) -> None:
        version = self.feed.version
        self.server.publish(self.run.step(seconds, state))
        assert self.feed.wait(version, 20) is not None


@contextmanager
def serving(
    feed: RunFeed, gate: Gate, half_open: HalfOpenConnections | None = None
) -> Iterator[httpx.Client]:
    with listen("127.0.0.1", 0) as listening:
        ready = threading.Event()
        server = DashboardServer(feed, listening, gate, ready.set, half_open)
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            assert ready.wait(20)
            address = f"http://127.0.0.1:{listening.getsockname()[1]}"
            with httpx.Client(base_url=address, timeout=20, trust_env=False) as client:
                yield client
        finally:
            server.should_exit = True
            thread.join(20)
            assert not thread.is_alive()


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with ExitStack() as stack:
        server = stack.enter_context(SnapshotServer(f"ipc://{tmp_path}/s.sock"))
        feed = stack.enter_context(RunFeed(server.address))
        yield Stage(
            SimulatedRun([EVIL, "weights"]),
            server,
            feed,
            lambda gate=None, **options: stack.enter_context(serving(feed, gate or Gate(None), **options)),
        )


@pytest.fixture
def client(stage: Stage) -> httpx.Client:
    return stage.serve()
