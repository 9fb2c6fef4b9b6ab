"""Publishes snapshots at a fixed rate, and the final one twice: to the subscribers and to a file.

The order of the end is what matters. :meth:`MetricsPublisher.publish_final` first stops the tick and waits
until it has stopped, so that no LIVE frame can follow the final one. Then it writes and publishes; either may
fail without stopping the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from pathlib import Path

import msgspec

from rlplane.atomic_file import write_atomically
from rlplane.errors import ConfigError
from rlplane.metrics.snapshot import MetricsSnapshot
from rlplane.transport import MessagePublisher

FINAL_SNAPSHOT_NAME = "final_snapshot.json"

logger = logging.getLogger(__name__)


class MetricsPublisher:
    """The tick, and the end.

    Args:
        messages: Where snapshots go.
        make_snapshot: Makes the picture of now; called at every tick.
        refresh_hz: Ticks per second.
        final_path: Where the final snapshot is written; None for nowhere.
        deliver_within_s: How long the final frame waits for subscribers whose queue is full.
    """

    def __init__(
        self,
        messages: MessagePublisher[MetricsSnapshot],
        make_snapshot: Callable[[], MetricsSnapshot],
        *,
        refresh_hz: float = 4.0,
        final_path: Path | None = None,
        deliver_within_s: float = 2.0,
    ) -> None:
        if not 0 < refresh_hz <= 1000:
            raise ConfigError(f"refresh_hz is {refresh_hz}; it must be above 0 and at most 1000")
        self._messages = messages
        self._make_snapshot = make_snapshot
        self._period_s = 1.0 / refresh_hz
        self._final_path = final_path
        self._deliver_within_s = deliver_within_s
        self._tick_task: asyncio.Task[None] | None = None
        self._final: asyncio.Future[bool] | None = None
        self.latest: MetricsSnapshot | None = None
        self.n_failed_ticks = 0
        self.published = False
        self.written = False

    def start(self) -> None:
        """Begin to tick, on the running loop."""
        if self._tick_task is None and self._final is None:
            self._tick_task = asyncio.get_running_loop().create_task(self._tick_for_ever())

    async def _tick_for_ever(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            self.tick()
            due = max(due + self._period_s, loop.time())
            await asyncio.sleep(due - loop.time())

    def tick(self) -> None:
        """Make a snapshot and publish it. A failure is logged and counted; the next tick tries again."""
        try:
            self.latest = self._make_snapshot()
            self._messages.publish(self.latest)
        except Exception:
            self.n_failed_ticks += 1
            if self.n_failed_ticks == 1:
                logger.exception("a snapshot could not be published; further failures are only counted")

    async def publish_final(self, snapshot: Callable[[], MetricsSnapshot]) -> bool:
        """Publish and write the final snapshot; whether either reached its place.

        The first call decides what is final; any later one, from wherever, waits for that and returns the
        same.
        """
        if self._final is not None:
            return await asyncio.shield(self._final)
        self._final = asyncio.get_running_loop().create_future()
        result = False
        try:
            await self._stop_tick()
            self.latest = snapshot()
            self.written = self._write(self.latest)
            self.published = self._publish(self.latest)
            result = self.published or self.written
        finally:
            self._final.set_result(result)
        return result

    async def _stop_tick(self) -> None:
        task, self._tick_task = self._tick_task, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def _publish(self, snapshot: MetricsSnapshot) -> bool:
        try:
            delivered = self._messages.publish(snapshot, deliver_within_s=self._deliver_within_s)
        except Exception:
            logger.exception("the final snapshot could not be published")
            return False
        if not delivered:
            logger.warning("a slow subscriber may have missed the final snapshot; it is in the file")
        return True

    def _write(self, snapshot: MetricsSnapshot) -> bool:
        if self._final_path is None:
            return False
        try:
            write_atomically(self._final_path, msgspec.json.format(msgspec.json.encode(snapshot), indent=1))
        except Exception as exc:
            logger.error("the final snapshot could not be written to %s: %s", self._final_path, exc)
            return False
        return True


def read_final_snapshot(path: Path) -> MetricsSnapshot:
    """Read what :class:`MetricsPublisher` wrote. Raises ``OSError``, or ``ValueError`` for a file that is
    no snapshot."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=MetricsSnapshot)
    except msgspec.DecodeError as exc:
        raise ValueError(f"{path} is not a snapshot: {exc}") from exc
