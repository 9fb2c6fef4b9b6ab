"""Copying large blocks with several threads, without waiting for any of them.

torch splits a copy evenly over its threads and waits for all of them. On a machine whose cores are busy, as
those of a training job are, one thread that gets no core makes every copy wait: we measured 60 ms for 13 MB
that takes 2 ms. Here the copy is cut into pieces, the calling thread copies them one after the other,
and helpers take pieces if they get to run. At worst the caller has copied everything itself.

The pieces are copied by a few lines of C, ``_copy.c``: past the caches if it is many megabytes, which takes
two thirds of the time. Where rlplane was installed without a compiler, ``memmove`` copies them.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Sequence
from ctypes import memmove
from queue import SimpleQueue
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

native: Callable[[NDArray[np.int64]], None] | None
try:
    from rlplane.adapters.local._copy import work as native
except ImportError:
    native = None

__all__ = ["Copies", "Copy", "copy_all", "copy_table", "is_native"]

_PIECE = 2 * 2**20
_WORTH_HELP = 4 * 2**20
_WORTH_A_THREAD = 256 * 1024
# Less than this may still be in the caches when it is read.
_WORTH_STREAMING = 8 * 2**20
_MOST_HELPERS = 7

Copy: TypeAlias = tuple[int, int, int]
"""Where to, where from, how many bytes. Addresses, because a view of a small column costs more than its copy;
who asks for a copy keeps the memory until it is done."""

Copies: TypeAlias = NDArray[np.int64]
"""A row per copy, with the same three columns."""


def is_native() -> bool:
    """Whether the C loop is there."""
    return native is not None


class _Job:
    """The pieces of one copy. Every thread that works on it takes the next piece."""

    def __init__(self, pieces: Copies, *, streaming: bool) -> None:
        self._count = len(pieces)
        if native is not None:
            # As _copy.c wants it: pieces begun, pieces there are, whether to stream, and the pieces.
            self._numbers = np.empty(3 + pieces.size, np.int64)
            self._numbers[:3] = 0, self._count, streaming
            self._numbers[3:] = pieces.ravel()
        else:
            self._pieces = pieces.tolist()
            self._turn = itertools.count()  # ``next`` on it is atomic
        self._working = 0
        self._changed = threading.Condition()
        self._cancelled = False

    def work(self) -> None:
        with self._changed:
            self._working += 1
        try:
            self.copy()
        finally:
            with self._changed:
                self._working -= 1
                self._changed.notify_all()

    def copy(self) -> None:
        if native is not None:
            native(self._numbers)
            return
        for place in self._turn:
            if place >= self._count or self._cancelled:
                break
            memmove(*self._pieces[place])

    def cancel(self) -> None:
        """Begin no more pieces."""
        self._cancelled = True
        if native is not None:
            self._numbers[0] = self._count

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


def copy_all(copies: Sequence[Copy]) -> None:
    """Make all copies. Sources and targets do not overlap."""
    if sum([nbytes for _, _, nbytes in copies]) < _WORTH_HELP:
        for copy in copies:
            memmove(*copy)
    else:
        copy_table(np.array(copies, np.int64))


def copy_table(copies: Copies) -> None:
    """The same, for many of them."""
    sizes = copies[:, 2]
    total = int(sizes.sum())
    # From Python, threads that copy little at a time hinder each other more than they help.
    helped = total >= _WORTH_HELP and (native is not None or total // len(copies) >= _WORTH_A_THREAD)
    if helped and sizes.max() > _PIECE:
        copies = _cut(copies)
    job = _Job(copies, streaming=total >= _WORTH_STREAMING)
    if not helped:
        job.copy()
        return
    try:
        _helpers.offer(job)
        job.work()
    except BaseException:
        job.cancel()
        raise
    finally:
        # Also after Ctrl-C: the memory is about to be given back.
        job.wait()


def _cut(copies: Copies) -> Copies:
    """The same copies in pieces, so that threads can share a large one."""
    pieces = [
        (target + start, source + start, min(_PIECE, nbytes - start))
        for target, source, nbytes in copies.tolist()
        for start in range(0, nbytes, _PIECE)
    ]
    return np.array(pieces, np.int64)
