"""A viewer's side: the latest snapshot of a run, and its last one.

A thread receives, so a subscriber works the same in a script, under asyncio and in a terminal application.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Self

import zmq

from rlplane.metrics.snapshot import MetricsSnapshot, MetricsSnapshotCodec, SessionState
from rlplane.transport import ZmqMessageSubscriber

__all__ = ["MetricsSnapshotSubscriber"]

logger = logging.getLogger(__name__)


class MetricsSnapshotSubscriber:
    """Receives the snapshots of an aggregator.

    Args:
        address: The aggregator's snapshot address.
        run_id: Ignore snapshots of any other run; by default none is ignored.
        conflate: Keep only the newest snapshot when they come faster than they are looked at. Turn it off to
            see every tick with ``on_snapshot``.
        on_snapshot: Called with each snapshot, on the receiving thread. What it raises is logged once.
    """

    def __init__(
        self,
        address: str,
        *,
        run_id: str | None = None,
        conflate: bool = True,
        on_snapshot: Callable[[MetricsSnapshot], None] | None = None,
    ) -> None:
        self._run_id = run_id
        self._on_snapshot = on_snapshot
        self._changed = threading.Condition()
        self._latest: MetricsSnapshot | None = None
        self._complete: MetricsSnapshot | None = None
        self._received_at: float | None = None
        self._stop = threading.Event()
        self._warned = False
        self._context: zmq.Context[Any] = zmq.Context()
        try:
            self._messages = ZmqMessageSubscriber(
                MetricsSnapshotCodec(),
                address,
                topics=[MetricsSnapshotCodec.topic],
                conflate=conflate,
                context=self._context,
            )
        except BaseException:
            self._context.term()
            raise
        self._thread = threading.Thread(target=self._run, name="rlplane-metrics-subscriber", daemon=True)
        self._thread.start()

    @property
    def latest(self) -> MetricsSnapshot | None:
        """The newest snapshot; the final one once it has come."""
        return self._latest

    @property
    def complete(self) -> MetricsSnapshot | None:
        """The COMPLETE (or INTERRUPTED) snapshot, once it has come."""
        return self._complete

    @property
    def age_s(self) -> float | None:
        """Seconds since the last snapshot arrived, so that a viewer can say that its data is old."""
        return None if self._received_at is None else time.monotonic() - self._received_at

    def wait_for_snapshot(self, timeout: float, *, after_seq: int = 0) -> MetricsSnapshot | None:
        """Wait for a snapshot with a higher ``seq``; None when none came in time."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_after(after_seq), timeout)
            return self._latest if self._is_after(after_seq) else None

    def _is_after(self, seq: int) -> bool:
        return self._latest is not None and self._latest.seq > seq

    def wait_for_complete(self, timeout: float) -> MetricsSnapshot | None:
        """Wait for the final snapshot; None when it did not come in time."""
        with self._changed:
            self._changed.wait_for(lambda: self._complete is not None, timeout)
            return self._complete

    def close(self) -> None:
        """Stop receiving. Idempotent; what was received stays."""
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                snapshot = self._messages.receive(0.1)
                if snapshot is not None:
                    self._note(snapshot)
        except Exception:
            logger.exception("the subscriber stops")
        finally:
            self._messages.close()
            self._context.term()

    def _note(self, snapshot: MetricsSnapshot) -> None:
        if self._run_id is not None and snapshot.run_id != self._run_id:
            return
        with self._changed:
            before = self._latest
            # A late joiner makes the publisher send its last frame again, to everybody.
            if before is not None and _same_run(before, snapshot) and before.seq >= snapshot.seq:
                return
            self._latest = snapshot
            self._received_at = time.monotonic()
            if snapshot.state.is_final:
                self._complete = snapshot
            elif snapshot.state in (SessionState.INITIALIZE, SessionState.LIVE):
                self._complete = None  # The aggregator was started again.
            self._changed.notify_all()
        if self._on_snapshot is not None:
            try:
                self._on_snapshot(snapshot)
            except Exception:
                if not self._warned:
                    self._warned = True
                    logger.exception("on_snapshot failed; further failures are not logged")


def _same_run(one: MetricsSnapshot, other: MetricsSnapshot) -> bool:
    # An aggregator that is started again may be given the same run id, and counts from 1.
    return one.run_id == other.run_id and one.started_ns == other.started_ns
