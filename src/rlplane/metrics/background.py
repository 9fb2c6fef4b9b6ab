"""A thread for work that must not hold up its caller: started by need, asleep when idle, ended within a
bound.

It knows what every owner of such a thread would otherwise have to get right on its own: a forked child has no
thread and starts its own, a process that ends without closing still has its work finished, and a signal
handler may ask for work.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import multiprocessing.util
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Protocol

logger = logging.getLogger(__name__)

# How long a process that ends without closing waits for each of its threads.
_CLOSE_AT_EXIT_S = 1.0


class Owner(Protocol):
    """The object that has a thread."""

    def close(self, timeout_s: float, /) -> None: ...


class BackgroundThread:
    """Runs ``work``, a generator that yields how many seconds it may rest (None: until it is woken).

    Args:
        name: The thread's name.
        work: Made anew in a forked child. It ends by itself, soon after ``closing`` is true.
        owner: Closed when the process ends.

    Attributes:
        asleep: Whether work has to be announced with :meth:`wake`. The generator sets it before a long rest,
            and then looks for work once more, so that none is missed.
        closing: Whether :meth:`close` was called; ``deadline`` is by when the work has to be over.
    """

    def __init__(self, name: str, work: Callable[[], Iterator[float | None]], owner: Owner) -> None:
        self._name = name
        self._work = work
        self._owner = weakref.ref(owner)
        self.after_fork()
        call_after_fork(self)

    def after_fork(self) -> None:
        """Forget the parent's thread."""
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        # SimpleQueue.put may be called from a signal handler, which no Event or Condition allows.
        self._signals: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.asleep = True
        self.closing = False
        self.deadline = 0.0

    def wake(self) -> None:
        """Start the thread, or end its rest. Never waits."""
        if self._thread is not None:
            self.asleep = False
            self._signals.put(None)
        # Not blocking: whoever loses the race, or is a signal handler inside it, leaves it to the other.
        elif not self.closing and self._starting.acquire(blocking=False):
            try:
                if self._thread is None:
                    self.asleep = False
                    thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                    thread.start()
                    self._thread = thread
                    self._close_at_exit()
            except RuntimeError:  # The interpreter is ending and starts no threads.
                self.closing = True
            finally:
                self._starting.release()

    def close(self, timeout_s: float) -> None:
        """Let the work come to its end, and wait for that."""
        with self._starting:
            self.deadline = time.monotonic() + timeout_s
            self.closing = True
            thread = self._thread
        if thread is not None:
            self._signals.put(None)
            if thread is not threading.current_thread():
                thread.join(timeout_s + 0.5)

    def _run(self) -> None:
        try:
            for rest_s in self._work():
                with contextlib.suppress(queue.Empty):
                    self._signals.get(timeout=rest_s)
                self.asleep = False
        except Exception:
            logger.warning("%s stops", self._name, exc_info=True)

    def _close_at_exit(self) -> None:
        reference, pid = self._owner, os.getpid()

        def close() -> None:
            owner = reference()
            # A forked child inherits the parent's registration: the pid says whose it is.
            if owner is not None and pid == os.getpid():
                owner.close(_CLOSE_AT_EXIT_S)

        atexit.register(close)
        # Children of multiprocessing end without atexit, but run its finalizers.
        multiprocessing.util.Finalize(None, close, exitpriority=10)


class AfterFork(Protocol):
    def after_fork(self) -> None: ...


_IN_FORKED_CHILD: weakref.WeakSet[AfterFork] = weakref.WeakSet()


def call_after_fork(item: AfterFork) -> None:
    """Have ``item.after_fork`` called in every forked child, for as long as the item lives."""
    _IN_FORKED_CHILD.add(item)


def _after_fork_in_child() -> None:
    for item in list(_IN_FORKED_CHILD):
        item.after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
