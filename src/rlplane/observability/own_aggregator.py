"""The aggregator of a job that only says ``observability: {enabled: true}``.

The bootstrap client starts it and ends it. Other processes find it by an environment variable that they
inherit, or by the name of the plane that they join, among the runs of this machine.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlplane.errors import DataPlaneError
from rlplane.interfaces import ADDRESS_VARIABLE
from rlplane.metrics.aggregator import new_run_id
from rlplane.metrics.discovery import RunInfo, announce, list_runs, runtime_directory
from rlplane.metrics.event_publisher import METRICS_ADDRESS_VARIABLE, EventPublisherService
from rlplane.metrics.events import SESSION_ROLE, SessionEvent
from rlplane.metrics.launcher import spawn_aggregator

__all__ = ["OwnAggregator", "find_address", "plane_name"]

logger = logging.getLogger("rlplane.observability")

DEFAULT_RUNS = Path("runs")
_END_S = 15.0


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


class OwnAggregator:
    """An aggregator process that begins and ends with the client that starts it.

    Nobody waits for it to be ready: what is sent meanwhile waits in the senders' sockets. While it runs, its
    address is in the environment, for the children of this process.

    Args:
        plane: The name of the plane, by which other processes find it.
        run_dir: Where the final snapshot goes; None for a new directory in ``./runs``.

    Raises:
        OSError, DataPlaneError: It cannot be started.
    """

    def __init__(self, plane: str, run_dir: str | None) -> None:
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
        )
        # By itself it would be found only once it is up, and workers look at once.
        announce(
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
        self._session = EventPublisherService(
            self.events_address, f"session:{os.getpid()}", role=SESSION_ROLE
        )
        self._session.record(SessionEvent("STARTED", time.time_ns()))
        os.environ[METRICS_ADDRESS_VARIABLE] = self.events_address

    def close(self) -> None:
        """End the run and wait for its final snapshot, within bounds. Idempotent; nothing in a forked
        child."""
        if self._pid != os.getpid():
            return
        if os.environ.get(METRICS_ADDRESS_VARIABLE) == self.events_address:
            del os.environ[METRICS_ADDRESS_VARIABLE]
        self._session.record(SessionEvent("ENDED", time.time_ns()))
        self._session.close()
        for signal_number in (0, signal.SIGTERM, signal.SIGKILL):
            if signal_number:
                self._process.send_signal(signal_number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S)
                break
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
