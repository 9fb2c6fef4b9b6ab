"""``IsolatedConsumer``: code of others, on a thread where it can do no harm.

A user's callback or a sink may raise, block or be slow. Whoever offers it something never waits: items go
into a bounded buffer, and when that is full the newest are dropped and counted. A failure is counted and
logged once; after ``max_failures`` in a row, or one call that does not come back for ``stuck_after_s``, the
consumer is switched off with a warning.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

logger = logging.getLogger(__name__)


class IsolatedConsumer:
    """A buffer, a thread, and ``deliver``, which is called there, oldest item first.

    Args:
        name: What it is called in the log.
        deliver: Takes a list of items; with ``one_by_one``, an item.
        close: Called on the same thread after the last batch, when the consumer is closed.
        max_queue: Items that may wait.
        max_batch: Items that are handed over at once.
        max_failures: Failed deliveries in a row after which it is switched off.
        stuck_after_s: How long one delivery may take before it is given up.
    """

    def __init__(
        self,
        name: str,
        deliver: Callable[[Any], None],
        close: Callable[[], None] | None = None,
        *,
        one_by_one: bool = False,
        max_queue: int = 16_384,
        max_batch: int = 1024,
        max_failures: int = 10,
        stuck_after_s: float = 30.0,
    ) -> None:
        self.name = name
        self._deliver = deliver
        self._close = close
        self._one_by_one = one_by_one
        self._max_queue = max_queue
        self._max_batch = max_batch
        self._max_failures = max_failures
        self._stuck_after_s = stuck_after_s
        self._changed = threading.Condition()
        self._queue: deque[Any] = deque()
        self._thread: threading.Thread | None = None
        self._busy_since: float | None = None
        self._in_a_row = 0
        self._stuck = False
        self._closing = False
        self._done = False
        self.enabled = True
        self.delivered = 0
        self.failures = 0
        self.dropped = 0

    def offer(self, items: Sequence[Any]) -> None:
        """Queue items, oldest first. Never waits, never raises."""
        if not items:
            return
        with self._changed:
            if self.enabled:
                self._check_stuck()
            if not self.enabled or self._closing:
                self.dropped += len(items)
                return
            room = max(self._max_queue - len(self._queue), 0)
            if len(items) > room:
                if not self.dropped:
                    _warn_elsewhere("%s cannot keep up: some of its events are dropped", self.name)
                self.dropped += len(items) - room
                items = items[:room]
            self._queue.extend(items)
            if self._thread is None:
                self._start()
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that was offered has been delivered (or dropped); False if that takes too long."""
        with self._changed:
            return self._changed.wait_for(lambda: self._idle() or self._stuck, timeout_s)

    def close(self, timeout_s: float = 2.0) -> None:
        """Deliver what is queued and close the sink, for at most ``timeout_s``. Idempotent."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            if self._thread is None and self._close is not None:
                self._start()
            if self._thread is None or threading.current_thread() is self._thread:
                return
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._done or self._stuck, timeout_s)

    def state(self) -> dict[str, Any]:
        """Counts for the snapshot."""
        return {
            "enabled": self.enabled,
            "delivered": self.delivered,
            "failures": self.failures,
            "dropped": self.dropped,
            "waiting": len(self._queue),
        }

    def _idle(self) -> bool:
        return not self._queue and self._busy_since is None

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name=f"rlplane-{self.name}", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # The interpreter is ending and starts no threads.
            self.enabled, self._done = False, True

    def _check_stuck(self) -> None:
        if self._busy_since is not None and time.monotonic() - self._busy_since > self._stuck_after_s:
            self.failures += 1
            self._stuck = True
            self._switch_off(f"it has not come back for {self._stuck_after_s:g} s")

    def _switch_off(self, reason: str) -> None:
        self.enabled = False
        self.dropped += len(self._queue)
        self._queue.clear()
        _warn_elsewhere("%s is switched off: %s. The data plane goes on without it.", self.name, reason)
        self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closing)
                size = min(len(self._queue), self._max_batch)
                batch = [self._queue.popleft() for _ in range(size)]
                self._busy_since = time.monotonic()
            for items in batch if self._one_by_one else [batch] if batch else []:
                if not self.enabled:
                    self.dropped += 1 if self._one_by_one else size
                    continue
                self._busy_since = time.monotonic()
                error = self._attempt(self._deliver, items)
                self._count(1 if self._one_by_one else size, error)
            with self._changed:
                self._busy_since = None
                self._changed.notify_all()
                if self._closing and not self._queue:
                    break
        if self._close is not None:
            error = self._attempt(self._close)
            if error is not None:
                logger.warning("%s could not be closed: %r", self.name, error)
        with self._changed:
            self._done = True
            self._changed.notify_all()

    def _attempt(self, call: Callable[..., None], *args: Any) -> BaseException | None:
        try:
            call(*args)
        except BaseException as error:  # Not even SystemExit of a callback may end the thread.
            return error
        return None

    def _count(self, size: int, error: BaseException | None) -> None:
        if error is None:
            self.delivered += size
            self._in_a_row = 0
            return
        self.failures += 1
        self._in_a_row += 1
        if self.failures == 1:
            logger.warning("%s failed; this is logged once: %r", self.name, error, exc_info=error)
        if self._in_a_row >= self._max_failures:
            with self._changed:
                if self.enabled:
                    self._switch_off(f"it failed {self._in_a_row} times in a row, last with {error!r}")


def _warn_elsewhere(message: str, *args: object) -> None:
    # What is stuck may be a log handler, which holds the lock that logging needs: never wait for it.
    try:
        threading.Thread(target=logger.warning, args=(message, *args), daemon=True).start()
    except RuntimeError:  # The interpreter is ending.
        pass
