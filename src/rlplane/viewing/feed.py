"""Where a viewer's snapshots come from: an address, a finished run's directory, or whatever runs here or,
when nothing does, elsewhere.

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
from typing import Literal, Protocol, Self

from rlplane.errors import ConfigError
from rlplane.metrics.discovery import RunInfo, list_runs
from rlplane.metrics.publisher import FINAL_SNAPSHOT_NAME, read_final_snapshot
from rlplane.metrics.snapshot import MetricsSnapshot
from rlplane.metrics.subscriber import MetricsSnapshotSubscriber
from rlplane.transport.curve import without_secret
from rlplane.viewing.units import format_duration

HOW_TO_BE_SEEN = 'a job is seen when its config has "observability": {"enabled": True}'

_LOOK_EVERY_S = 0.5
_STALE_TICKS = 6.0
_STALE_AT_LEAST_S = 3.0

FeedState = Literal["searching", "waiting", "live", "stale", "ended"]


class Elsewhere(Protocol):
    """Knows the runs of other machines. It is asked often, and answers at once with what it knows."""

    def runs(self) -> list[RunInfo]:
        """Those that go on now."""

    def where(self) -> str:
        """Where it looks, this machine included, such as ``on this machine or in its Ray cluster``."""


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
        elsewhere: Where to look, without a target, while nothing runs on this machine.

    Raises:
        ConfigError: The target is neither.
    """

    def __init__(self, target: str | None = None, elsewhere: Elsewhere | None = None) -> None:
        self._target = target
        self._elsewhere = elsewhere
        self._is_far = False
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
        source = without_secret(self._run.snapshot_address if self._run is not None else self._target or "")
        if latest is None or received is None:
            if self._target is None and self._run is None:
                where = self._elsewhere.where() if self._elsewhere is not None else "on this machine"
                return FeedStatus("searching", f"no run found {where} yet: {HOW_TO_BE_SEEN}", source)
            return FeedStatus("waiting", f"waiting for the first picture from {source}", source)
        age = time.monotonic() - received
        if latest.state.is_final:
            return FeedStatus("ended", f"the run has ended: {latest.state.value}", source, age)
        if self._gone:
            text = f"the aggregator is gone; this picture is {format_duration(age)} old"
            return FeedStatus("stale", text, source, age)
        if not self._is_fresh():
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
        runs, far = list_runs(), []
        if self._elsewhere is not None and (not runs or self._is_far):
            far = self._elsewhere.runs()
            runs = sorted([*runs, *far], key=lambda run: -run.started_ns)
        current = self._run
        if current is not None:
            alive = any(run.pid == current.pid and run.started_ns == current.started_ns for run in runs)
            ended = self._latest is not None and self._latest.state.is_final
            # Who knows of a run elsewhere may be out of reach for a while: its pictures come all the same.
            alive = alive or (self._is_far and self._is_fresh())
            self._gone = not alive
            if not alive and not ended and self._recover(current):
                ended = True
            if alive and not ended:
                return
            runs = [run for run in runs if run.started_ns > current.started_ns]
        if runs:
            self._run, self._gone, self._is_far = runs[0], False, runs[0] in far
            self._subscribe(runs[0].snapshot_address)

    def _is_fresh(self) -> bool:
        """Whether pictures come as often as the run said."""
        latest, received = self._latest, self._received_at
        if latest is None or received is None:
            return False
        limit = max(_STALE_AT_LEAST_S, _STALE_TICKS / latest.refresh_hz if latest.refresh_hz else 0.0)
        return time.monotonic() - received <= limit

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
