"""One picture per tick, made and encoded once, whoever and however many are looking."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Sequence

import msgspec

from rlplane.metrics.snapshot import MetricsSnapshot
from rlplane.viewing.feed import FeedStatus, RunFeed
from rlplane.viewing.history import History, HistoryPoint, as_columns
from rlplane.web.view import make_view

_LOOK_EVERY_S = 0.1
_STATUS_EVERY_S = 1.0
_LARGE_BYTES = 256 * 1024
_MAX_FINISHED_RUNS = 16


class Broadcast:
    """Keeps the history of what a feed shows, and tells every listener about each new picture.

    Args:
        feed: Where snapshots come from.
        interval_s: The least time between two pictures; large ones are sent half as often.
    """

    def __init__(self, feed: RunFeed, interval_s: float = 0.5) -> None:
        self.feed = feed
        self.history = History()
        self.finished: OrderedDict[str, MetricsSnapshot] = OrderedDict()
        self._interval_s = interval_s
        # Filled on the feed's thread, emptied on the loop's: a run's last picture is never skipped.
        self._arrived: deque[MetricsSnapshot] = deque(maxlen=256)
        self._sent_at = 0.0
        self._is_new = False
        self._size = 0
        self._status: FeedStatus = feed.status()
        self._status_at = 0.0
        self._pending: list[HistoryPoint] = []
        self._listeners: set[asyncio.Queue[bytes]] = set()
        self._closing = False
        feed.listen(self._arrived.append)

    async def run(self) -> None:
        """Follow the feed until :meth:`close`."""
        while not self._closing:
            self._poll()
            await asyncio.sleep(_LOOK_EVERY_S)

    def close(self) -> None:
        """End every listener's stream."""
        self._closing = True
        for listener in self._listeners:
            _offer(listener, b"")

    def _poll(self) -> None:
        self.catch_up()
        snapshot = self.feed.latest
        now = time.monotonic()
        interval = self._interval_s * (2 if self._size > _LARGE_BYTES else 1)
        if snapshot is not None and self._is_new and now - self._sent_at >= interval:
            self._sent_at, self._is_new = now, False
            if self._listeners:
                message = self._picture(snapshot, self._pending)
                self._size = len(message)
                self._send(message)
            self._pending.clear()
        status = self.feed.status()
        if status.state != self._status.state or now - self._status_at >= _STATUS_EVERY_S:
            self._status, self._status_at = status, now
            self._send(_event("status", status))

    def catch_up(self) -> None:
        """Take what has arrived into the history. Call it on the loop before reading that."""
        while self._arrived:
            self._note(self._arrived.popleft())
            self._is_new = True

    def _note(self, snapshot: MetricsSnapshot) -> None:
        point = self.history.add(snapshot)
        if point is not None:
            self._pending.append(point)
        if snapshot.state.is_final:
            self.finished[snapshot.run_id] = snapshot
            self.finished.move_to_end(snapshot.run_id)
            while len(self.finished) > _MAX_FINISHED_RUNS:
                self.finished.popitem(last=False)

    def _picture(self, snapshot: MetricsSnapshot, points: Sequence[HistoryPoint]) -> bytes:
        view = make_view(snapshot, self.feed.status())
        return _event("view", {**view, "points": as_columns(points)})

    def _send(self, message: bytes) -> None:
        for listener in self._listeners:
            _offer(listener, message)

    async def listen(self) -> AsyncIterator[bytes]:
        """Server-sent events, from the picture of now on, until the listener goes or :meth:`close`."""
        # A slow browser gets the newest pictures, not all of them: the queue is short.
        queue: asyncio.Queue[bytes] = asyncio.Queue(maxsize=4)
        self._listeners.add(queue)
        try:
            yield b"retry: 1000\n\n"
            self.catch_up()
            snapshot = self.feed.latest
            if snapshot is not None:
                yield self._picture(snapshot, [])
            yield _event("status", self.feed.status())
            while not self._closing:
                message = await queue.get()
                if message:
                    yield message
        finally:
            self._listeners.discard(queue)


def _offer(queue: asyncio.Queue[bytes], message: bytes) -> None:
    if queue.full():
        with contextlib.suppress(asyncio.QueueEmpty):
            queue.get_nowait()
    queue.put_nowait(message)


def _event(name: str, content: object) -> bytes:
    # JSON has no raw newline, so one data line is enough.
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(content) + b"\n\n"
