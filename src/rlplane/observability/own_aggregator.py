"""The aggregator of a job that only says ``observability: {enabled: true}``.

The bootstrap client starts it and ends it. Other processes find it by an environment variable that they
inherit, or by the name of the plane that they join, among the runs of this machine. On a cluster it can be
reached from other machines too, encrypted: where, and with which key, the plane itself tells those who join
it, and those who ask on another machine for a run to watch.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import msgspec

from rlplane.errors import DataPlaneError
from rlplane.interfaces import ADDRESS_VARIABLE
from rlplane.metrics.aggregator import new_run_id
from rlplane.metrics.discovery import RunInfo, announce_child, list_runs, runtime_directory
from rlplane.metrics.event_publisher import METRICS_ADDRESS_VARIABLE, OFF, FindAddress
from rlplane.metrics.events import SessionEvent
from rlplane.metrics.launcher import begin_session, end_process, spawn_aggregator

logger = logging.getLogger("rlplane.observability")

OF_THE_PLANE = "plane"
"""The address that says that the plane knows it."""
DEFAULT_RUNS = Path("runs")
_END_S = 15.0
_PAUSES_S = (0.2, 2.0)
# How long a plane is asked about the aggregator before an address that seems wrong is used all the same.
_PATIENCE_S = 60.0


@runtime_checkable
class SpansMachines(Protocol):
    """An engine whose clients are on several machines, and which tells them where the aggregator is."""

    def publish_aggregator(self, address: str, run: str) -> None:
        """Tell all clients of the plane the address, and viewers on other machines what they need of the run,
        a ``RunInfo`` as JSON. Raises while there is no plane."""

    def find_aggregator(self) -> str | None:
        """What the bootstrap client has told; None if nothing yet. Raises while there is no plane."""


def plane_name(client: object, cfg: Mapping[str, Any]) -> str:
    """What tells the plane of a client from others on this machine; empty if nothing does."""
    if cfg.get("impl") == "transfer_queue":
        options: Mapping[str, Any] = cfg.get("transfer_queue") or {}
        return f"transfer_queue:{options.get('namespace') or 'default'}"
    address = getattr(client, "controller_address", None) or cfg.get("controller_address")
    return str(address or os.environ.get(ADDRESS_VARIABLE) or "")


def find_address(wanted: Mapping[str, Any], plane: str) -> str | None:
    """The address of the aggregator: from the config, from the environment, or of the run that has this
    plane. ``off`` if there shall be none; None if there is none yet."""
    given: str | None = wanted.get("metrics_address") or os.environ.get(METRICS_ADDRESS_VARIABLE) or None
    if given is None and plane:
        with contextlib.suppress(DataPlaneError, OSError):
            given = next((run.events_address for run in list_runs() if run.plane == plane), None)
    return given


def way_to(address: str | None, client: object) -> str | FindAddress | None:
    """What to send events to: ``address``, if it can be reached from here, else what asks the plane.

    A copy of a client, and an environment, may come from another machine, where the address was right.
    """
    if address is None or address == OFF:
        return None
    if not isinstance(client, SpansMachines) or (address != OF_THE_PLANE and _is_reachable(address)):
        return None if address == OF_THE_PLANE else address
    engine, patient_until = weakref.ref(client), time.monotonic() + _PATIENCE_S

    def ask() -> str | None:
        found, published = engine(), None
        if found is not None:
            with contextlib.suppress(Exception):  # There may be no plane yet; Ray may be busy.
                published = found.find_aggregator()
        if published is not None or address == OF_THE_PLANE:
            return published
        # It may be the address of somebody who comes later: what is sent waits for him.
        return address if _is_reachable(address) or time.monotonic() > patient_until else None

    return ask


def _is_reachable(address: str) -> bool:
    if not address.startswith("ipc://"):
        return True
    if Path(address.removeprefix("ipc://")).exists():
        return True
    with contextlib.suppress(DataPlaneError, OSError):  # One that is starting has no socket yet.
        return any(run.events_address == address for run in list_runs())
    return False


class OwnAggregator:
    """An aggregator process that begins and ends with the client that starts it.

    Nobody waits for it to be ready: what is sent meanwhile waits in the senders' sockets. While it runs, its
    address is in the environment, for the children of this process.

    Args:
        plane: The name of the plane, by which other processes find it.
        run_dir: Where the final snapshot goes; None for a new directory in ``./runs``.
        remote_host: The address of this machine at which others may send events and watch, encrypted; None:
            not.

    Raises:
        OSError, DataPlaneError: It cannot be started.
    """

    def __init__(self, plane: str, run_dir: str | None, remote_host: str | None = None) -> None:
        self.run_id = new_run_id()
        self.run_dir = _made(Path(run_dir) if run_dir else DEFAULT_RUNS / self.run_id)
        base = runtime_directory() / f"{os.getpid()}-{secrets.token_hex(4)}"
        self.events_address = f"ipc://{base}-events.sock"
        snapshot_address = f"ipc://{base}-snapshots.sock"
        self._pid = os.getpid()
        self._process = spawn_aggregator(
            out_dir=self.run_dir,
            run_id=self.run_id,
            events_address=self.events_address,
            snapshot_address=snapshot_address,
            plane=plane,
            remote_host=remote_host,
        )
        self._closing = threading.Event()
        # By itself it would be found only once it is up, and workers look at once.
        announce_child(
            RunInfo(
                self.run_id,
                self._process.pid,
                self.events_address,
                snapshot_address,
                time.time_ns(),
                str(self.run_dir.absolute()) if self.run_dir is not None else "",
                plane=plane,
            )
        )
        self._session = begin_session(self.events_address)
        os.environ[METRICS_ADDRESS_VARIABLE] = self.events_address

    def publish_through(self, client: SpansMachines) -> None:
        """Have the plane tell its clients where this is, as soon as both are up. Nobody waits for it."""
        threading.Thread(
            target=self._publish, args=(weakref.ref(client),), name="rlplane-publish-aggregator", daemon=True
        ).start()

    def _publish(self, reference: weakref.ref[SpansMachines]) -> None:
        info, (pause, longest) = None, _PAUSES_S
        while not self._closing.wait(pause) and self._process.poll() is None:
            pause = min(1.5 * pause, longest)
            info = info or self._find_own_run()
            client = reference()
            if client is None:
                return
            if info is not None:
                try:
                    run = msgspec.json.encode(info.seen_from_afar()).decode()
                    client.publish_aggregator(info.remote_address, run)
                    return
                except Exception as error:  # The plane may not be there yet; Ray may be busy.
                    logger.debug("the aggregator's address is not published yet: %r", error)
            del client

    def _find_own_run(self) -> RunInfo | None:
        """What the aggregator says of itself, once it can be reached from other machines."""
        with contextlib.suppress(DataPlaneError, OSError):
            for run in list_runs():
                if run.pid == self._process.pid and run.remote_address:
                    return run
        return None

    def report_error(self, error: Exception) -> None:
        """Tell the run that the job failed, so that its report says why it ended."""
        message = f"the job ended with {type(error).__name__}: {error}"
        self._session.record(SessionEvent("ERROR", time.time_ns(), message))

    def close(self) -> None:
        """End the run and wait for its final snapshot, within bounds. Idempotent; nothing in a forked
        child."""
        if self._pid != os.getpid():
            return
        self._closing.set()
        if os.environ.get(METRICS_ADDRESS_VARIABLE) == self.events_address:
            del os.environ[METRICS_ADDRESS_VARIABLE]
        self._session.record(SessionEvent("ENDED", time.time_ns()))
        self._session.close()
        end_process(self._process, _END_S)
        if self._process.returncode:
            logger.warning(
                "the aggregator ended with exit code %d; see %s", self._process.returncode, self.run_dir
            )


def _made(directory: Path) -> Path | None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        logger.warning("the run's final snapshot will not be kept: cannot make %s: %s", directory, error)
        return None
    return directory
