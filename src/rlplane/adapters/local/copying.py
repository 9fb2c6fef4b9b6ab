"""Copying large blocks with several threads, without waiting for any of them.

torch splits a copy evenly over its threads and waits for all of them. On a machine whose cores are busy, as
those of a training job are, one thread that gets no core makes every copy wait: we measured 60 ms for 13 MB
that takes 2 ms. Here the copy is cut into pieces, the calling thread copies them one after the other,
and helpers take pieces if they get to run. At worst the caller has copied everything itself.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterable
from ctypes import memmove
from queue import SimpleQueue
from typing import Any, TypeAlias

import torch

__all__ = ["Copy", "copy_all"]

_PIECE = 2 * 2**20
_WORTH_HELP = 4 * 2**20
_MOST_HELPERS = 7

Copy: TypeAlias = tuple[int, int, int]
"""Where to, where from, how many bytes. Addresses, because a view of a small column costs more than its copy;
who asks for a copy keeps the memory until it is done."""


class _Job:
    """The pieces of one copy; ``next`` on the counter is atomic, so each piece is taken once."""

    def __init__(self, pieces: list[Copy]) -> None:
        self._pieces = pieces
        self._turn = itertools.count()
        self._working = 0
        self._changed = threading.Condition()
        self.cancelled = False

    def work(self) -> None:
        with self._changed:
            self._working += 1
        try:
            for place in self._turn:
                if place >= len(self._pieces) or self.cancelled:
                    break
                memmove(*self._pieces[place])
        finally:
            with self._changed:
                self._working -= 1
                self._changed.notify_all()

    def wait(self) -> None:
        """Until nobody copies. Who comes later finds nothing to do."""
        with self._changed:
            self._changed.wait_for(lambda: not self._working)


class _Helpers:
    """Daemon threads that wait for jobs; made when first needed, and again after a fork."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pid = 0
        self._queue: SimpleQueue[_Job] = SimpleQueue()
        self._count = 0

    def offer(self, job: _Job) -> None:
        if self._pid != os.getpid():
            self._start()
        for _ in range(self._count):
            self._queue.put(job)

    def _start(self) -> None:
        with self._lock:
            if self._pid == os.getpid():
                return
            self._queue = SimpleQueue()
            self._count = min(torch.get_num_threads() - 1, _MOST_HELPERS)
            for _ in range(self._count):
                threading.Thread(
                    target=self._run, args=(self._queue,), name="rlplane-copy", daemon=True
                ).start()
            self._pid = os.getpid()

    @staticmethod
    def _run(jobs: SimpleQueue[Any]) -> None:
        while True:
            jobs.get().work()


_helpers = _Helpers()


def copy_all(copies: Iterable[Copy]) -> None:
    """Make all copies. Sources and targets do not overlap."""
    wanted = list(copies)
    if sum([nbytes for _, _, nbytes in wanted]) < _WORTH_HELP:
        for copy in wanted:
            memmove(*copy)
        return
    pieces = [
        (target + start, source + start, min(_PIECE, nbytes - start))
        for target, source, nbytes in wanted
        for start in range(0, nbytes, _PIECE)
    ]
    job = _Job(pieces)
    try:
        _helpers.offer(job)
        job.work()
    except BaseException:
        job.cancelled = True
        raise
    finally:
        # Also after Ctrl-C: the memory is about to be given back.
        job.wait()
