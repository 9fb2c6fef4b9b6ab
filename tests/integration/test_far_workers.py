"""Workers on other machines than the aggregator: they ask the plane where it is, and send encrypted.

Here the plane is pictured and the machines are one; real ones are in ``test_two_nodes.py``.
"""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

import rlplane
from rlplane.interfaces import DataPlaneClient
from rlplane.metrics.discovery import RunInfo, list_finished, list_runs
from rlplane.metrics.event_publisher import METRICS_ADDRESS_VARIABLE
from rlplane.metrics.snapshot import MetricsSnapshot
from rlplane.observability import MetricsDataPlaneClient, wrap_with_observability
from rlplane.observability import own_aggregator as own
from rlplane.viewing.feed import RunFeed, read_run

pytestmark = pytest.mark.slow


class Notice:
    """What a plane that spans machines tells those who join it."""

    def __init__(self) -> None:
        self.address: str | None = None
        self.run: RunInfo | None = None
        self.reachable = threading.Event()

    def check(self) -> None:
        if not self.reachable.is_set():
            raise ConnectionError("there is no plane yet")


def spanning(client: DataPlaneClient, notice: Notice) -> DataPlaneClient:
    """The client as one of an engine that spans machines."""

    def publish(address: str, run: str) -> None:
        notice.check()
        notice.address, notice.run = address, msgspec.json.decode(run, type=RunInfo)

    def find() -> str | None:
        notice.check()
        return notice.address

    client.publish_aggregator, client.find_aggregator = publish, find  # type: ignore[attr-defined]
    return client


@pytest.fixture
def notice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Notice:
    monkeypatch.delenv(METRICS_ADDRESS_VARIABLE)
    monkeypatch.chdir(tmp_path)
    return Notice()


def engine(notice: Notice, bootstrap: bool) -> DataPlaneClient:
    return spanning(
        rlplane.build_data_plane_client(rlplane.load_config("local"), bootstrap=bootstrap), notice
    )


def observed(
    notice: Notice, role: str, *, bootstrap: bool = False, node_ip: str = "127.0.0.1"
) -> DataPlaneClient:
    cfg = {
        "impl": "transfer_queue",
        # Under another name, so that it is not found among the runs of this machine.
        "transfer_queue": {"node_ip": node_ip, "namespace": f"far-{os.getpid()}-{role}"},
        "observability": {"enabled": True, "callback": lambda event: None, "role": role},
    }
    return wrap_with_observability(engine(notice, bootstrap), cfg, bootstrap=bootstrap)


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def finished(path: Path) -> MetricsSnapshot:
    (directory,) = (path / "runs").iterdir()
    return read_run(directory)


def roles(snapshot: MetricsSnapshot) -> set[str]:
    return {worker.role for worker in snapshot.workers}


def test_a_worker_that_knows_no_address_asks_the_plane_until_it_is_told(
    notice: Notice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with observed(notice, "driver", bootstrap=True) as driver:
        driver.register_partition("p", ["x"], 8, ["train"])
        monkeypatch.delenv(METRICS_ADDRESS_VARIABLE)
        with observed(notice, "early") as early:
            early.put_samples(["a"], "p", tags=[{}])
            notice.reachable.set()
            until(lambda: notice.address, "the address being published")
            assert notice.address is not None and notice.address.startswith("curve://")
        # An environment that came from the driver's machine, where its socket is.
        monkeypatch.setenv(METRICS_ADDRESS_VARIABLE, f"ipc://{tmp_path}/of-another-machine.sock")
        with observed(notice, "inherited") as inherited:
            inherited.put_samples(["b"], "p", tags=[{}])
    final = finished(tmp_path)
    assert final.total("ops", op="put") == final.total("samples_written") == 2
    assert final.total("ops", op="register") == 1 and final.total("bad_frames") == 0


def test_without_the_key_nobody_is_counted(notice: Notice, tmp_path: Path) -> None:
    notice.reachable.set()
    with observed(notice, "driver", bootstrap=True) as driver:
        driver.register_partition("p", ["x"], 8, ["train"])
        until(lambda: notice.address, "the address being published")
        assert notice.address is not None
        place = notice.address.rpartition("@")[2]
        inner = engine(notice, bootstrap=False)
        with MetricsDataPlaneClient(inner, metrics_address=f"tcp://{place}", role="stranger") as stranger:
            stranger.put_samples(["a"], "p", tags=[{}])
            host, _, port = place.rpartition(":")
            with (
                socket.create_connection((host, int(port)), timeout=300) as raw,
                contextlib.suppress(ConnectionResetError),
            ):
                raw.sendall(b"\xff" * 4096)
                while raw.recv(4096):  # Until it is thrown out.
                    pass
    final = finished(tmp_path)
    assert "stranger" not in roles(final) and final.total("samples_written") == 0
    log = next((tmp_path / "runs").glob("*/aggregator.log")).read_text()
    assert notice.address[8:40] not in log


def test_a_viewer_gets_pictures_and_a_key_that_lets_it_send_nothing(notice: Notice, tmp_path: Path) -> None:
    notice.reachable.set()
    with observed(notice, "driver", bootstrap=True) as driver:
        driver.register_partition("p", ["x"], 8, ["train"])
        until(lambda: notice.run, "the run being published")
        assert notice.run is not None and notice.address is not None
        told = notice.run
        assert told.run_id == list_runs()[0].run_id and not (told.events_address or told.remote_address)
        with RunFeed(told.snapshot_address) as feed:
            assert feed.wait(0, 60) is not None
            assert feed.status().source.startswith("curve://…@127.0.0.1:")
        keys = told.snapshot_address.rpartition("@")[0]
        forged = f"{keys}@{notice.address.rpartition('@')[2]}"
        inner = engine(notice, bootstrap=False)
        with MetricsDataPlaneClient(inner, metrics_address=forged, role="stranger") as stranger:
            stranger.put_samples(["a"], "p", tags=[{}])
    final = finished(tmp_path)
    assert "stranger" not in roles(final) and final.total("samples_written") == 0


def test_an_address_that_cannot_be_had_costs_only_what_would_have_come_by_it(
    notice: Notice, tmp_path: Path
) -> None:
    notice.reachable.set()
    with observed(notice, "driver", bootstrap=True, node_ip="203.0.113.1") as driver:
        driver.register_partition("p", ["x"], 8, ["train"])
        driver.put_samples(["a"], "p", tags=[{}])
    assert finished(tmp_path).total("samples_written") == 1 and notice.address is None
    log = next((tmp_path / "runs").glob("*/aggregator.log")).read_text()
    assert "processes on other machines are not seen: cannot listen on 203.0.113.1" in log


def test_a_plane_without_an_aggregator_is_not_asked_for_ever(
    notice: Notice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("rlplane.observability.dispatcher._LOOK_FOR_AGGREGATOR_S", 0.0)
    notice.reachable.set()
    driver = engine(notice, bootstrap=True)
    with driver, observed(notice, "alone") as alone:
        alone.register_partition("p", ["x"], 8, ["train"])
        until(lambda: "no aggregator was found" in caplog.text, "giving up")
        alone.put_samples(["a"], "p", tags=[{}])
        assert alone.snapshot()["ops"]["put"]["count"] == 1  # type: ignore[attr-defined]


def test_an_address_whose_socket_is_not_there_yet_is_used_when_the_plane_knows_no_other(
    notice: Notice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = f"ipc://{tmp_path}/later.sock"
    with engine(notice, bootstrap=True) as client:
        ask = own.way_to(address, client)
        assert callable(ask) and ask() is None
        (tmp_path / "later.sock").touch()
        assert ask() == address == own.way_to(address, client)
        (tmp_path / "later.sock").unlink()
        monkeypatch.setattr(own, "_PATIENCE_S", -1.0)
        ask = own.way_to(address, client)
        assert callable(ask) and ask() == address
        notice.reachable.set()
        notice.address = "tcp://127.0.0.1:1"
        assert ask() == notice.address
        assert own.way_to("off", client) is own.way_to(None, client) is None


def test_the_search_keeps_no_client_alive(notice: Notice) -> None:
    driver = engine(notice, bootstrap=True)
    with driver:
        client = engine(notice, bootstrap=False)
        ask = own.way_to(own.OF_THE_PLANE, client)
        assert callable(ask)
        notice.reachable.set()
        notice.address = "tcp://127.0.0.1:1"
        assert ask() == notice.address
        client.close()
        gone = weakref.ref(client)
        del client
        gc.collect()
        assert gone() is None and ask() is None


def test_the_key_is_gone_with_the_run(notice: Notice) -> None:
    notice.reachable.set()
    with observed(notice, "driver", bootstrap=True) as driver:
        driver.register_partition("p", ["x"], 8, ["train"])
        until(lambda: notice.address, "the address being published")
    assert not any(run.remote_address or run.remote_snapshots for run in list_finished())
    assert not any(run.remote_address == notice.address for run in list_runs())
