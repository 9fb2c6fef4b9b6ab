"""Where a viewer's snapshots come from: an address, a finished run's directory, or whatever runs here.

A :class:`RunFeed` finds a run, subscribes to it and goes on through everything that can happen meanwhile: no
run yet, an aggregator that restarts or dies, a run that ends, a new one that starts. It never guesses
silently: :meth:`RunFeed.status` says what it is looking at and how old that is.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

from rlplane.errors import ConfigError
from rlplane.metrics.discovery import RunInfo, list_runs
from rlplane.metrics.publisher import FINAL_SNAPSHOT_NAME, read_final_snapshot
from rlplane.metrics.snapshot import MetricsSnapshot
from rlplane.metrics.subscriber import MetricsSnapshotSubscriber
from rlplane.viewing.units import format_duration

__all__ = ["HOW_TO_BE_SEEN", "FeedStatus", "RunFeed", "read_run"]

HOW_TO_BE_SEEN = 'a job is seen when its config has "observability": {"enabled": True}'

_LOOK_EVERY_S = 0.5
_STALE_TICKS = 6.0
_STALE_AT_LEAST_S = 3.0

FeedState = Literal["searching", "waiting", "live", "stale", "ended"]


@dataclass(frozen=True, slots=True)
class FeedStatus:
    """What the viewer is looking at. ``age_s`` is the time since the last new snapshot arrived.

    ``searching``: no run has been found. ``waiting``: subscribed, nothing has come yet. ``stale``: what is
    shown is old. ``ended``: it is the run's last word.
    """

    state: FeedState
    text: str
    source: str = ""
    age_s: float | None = None


def read_run(directory: str | Path) -> MetricsSnapshot:
    """The final snapshot in a run's directory, or in a file.

    Raises:
        ConfigError: There is none, or it cannot be read.
    """
    path = Path(directory)
    if not path.exists():
        raise ConfigError(f"there is no {path}: name a run's directory, or its {FINAL_SNAPSHOT_NAME}")
    if path.is_dir():
        path = path / FINAL_SNAPSHOT_NAME
    try:
        return read_final_snapshot(path)
    except FileNotFoundError as error:
        raise ConfigError(
            f"{path} is not there: a run writes it when it ends; a running one is seen with rlplane top"
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigError(str(error)) from error


class RunFeed:
    """Follows one run, or the newest of this machine.

    Args:
        target: An address (``ipc://…``, ``tcp://…``), the directory of a finished run, or None for the
            newest run of this machine, and the next one when that has ended.

    Raises:
        ConfigError: The target is neither.
    """

    def __init__(self, target: str | None = None) -> None:
        self._target = target
        self._changed = threading.Condition()
        self._latest: MetricsSnapshot | None = None
        self._version = 0
        self._listeners: list[Callable[[MetricsSnapshot], None]] = []
        self._received_at: float | None = None
        self._subscriber: MetricsSnapshotSubscriber | None = None
        self._run: RunInfo | None = None
        self._gone = False
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if target is not None and "://" not in target:
            self._accept(read_run(target))
            return
        if target is not None:
            self._subscribe(target)
        else:
            self._poll()
            self._thread = threading.Thread(target=self._watch, name="rlplane-feed", daemon=True)
            self._thread.start()

    @property
    def latest(self) -> MetricsSnapshot | None:
        """The newest snapshot, of whichever run is followed."""
        return self._latest

    @property
    def version(self) -> int:
        """Grows with every snapshot."""
        return self._version

    def listen(self, listener: Callable[[MetricsSnapshot], None]) -> None:
        """Call ``listener`` with the latest snapshot and every one to come, on a thread of the feed's."""
        with self._changed:
            self._listeners.append(listener)
            if self._latest is not None:
                listener(self._latest)

    def wait(self, after_version: int, timeout_s: float) -> MetricsSnapshot | None:
        """Wait for a snapshot newer than ``after_version``; None when none came in time."""
        with self._changed:
            found = self._changed.wait_for(lambda: self._version > after_version, timeout_s)
            return self._latest if found else None

    def status(self) -> FeedStatus:
        """What is being looked at, and how old it is."""
        latest, received = self._latest, self._received_at
        source = self._run.snapshot_address if self._run is not None else self._target or ""
        if latest is None or received is None:
            if self._target is None and self._run is None:
                return FeedStatus("searching", f"no run found on this machine yet: {HOW_TO_BE_SEEN}", source)
            return FeedStatus("waiting", f"waiting for the first picture from {source}", source)
        age = time.monotonic() - received
        if latest.state.is_final:
            return FeedStatus("ended", f"the run has ended: {latest.state.value}", source, age)
        limit = max(_STALE_AT_LEAST_S, _STALE_TICKS / latest.refresh_hz if latest.refresh_hz else 0.0)
        if self._gone:
            text = f"the aggregator is gone; this picture is {format_duration(age)} old"
            return FeedStatus("stale", text, source, age)
        if age > limit:
            return FeedStatus("stale", f"no news for {format_duration(age)}", source, age)
        return FeedStatus("live", "live", source, age)

    def close(self) -> None:
        """Stop following. Idempotent; the latest snapshot stays."""
        self._stop.set()
        if self._thread is not None and threading.current_thread() is not self._thread:
            self._thread.join()
        if self._subscriber is not None:
            self._subscriber.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _watch(self) -> None:
        while not self._stop.wait(_LOOK_EVERY_S):
            self._poll()

    def _poll(self) -> None:
        """Is the run still there, and is there a newer one to go to?"""
        runs = list_runs()
        current = self._run
        if current is not None:
            alive = any(run.pid == current.pid and run.started_ns == current.started_ns for run in runs)
            ended = self._latest is not None and self._latest.state.is_final
            self._gone = not alive
            if not alive and not ended and self._recover(current):
                ended = True
            if alive and not ended:
                return
            runs = [run for run in runs if run.started_ns > current.started_ns]
        if runs:
            self._run, self._gone = runs[0], False
            self._subscribe(runs[0].snapshot_address)

    def _recover(self, run: RunInfo) -> bool:
        """The last frame may have been missed: the file has it too."""
        if not run.out_dir:
            return False
        with contextlib.suppress(ConfigError):
            snapshot = read_run(run.out_dir)
            if snapshot.run_id == run.run_id:
                self._accept(snapshot)
                return True
        return False

    def _subscribe(self, address: str) -> None:
        if self._subscriber is not None:
            self._subscriber.close()
        self._subscriber = MetricsSnapshotSubscriber(address, on_snapshot=self._accept)

    def _accept(self, snapshot: MetricsSnapshot) -> None:
        with self._changed:
            self._latest = snapshot
            self._received_at = time.monotonic()
            self._version += 1
            for listener in self._listeners:
                listener(snapshot)
            self._changed.notify_all()
