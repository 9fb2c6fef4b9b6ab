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
import time
from collections.abc import Callable, Sequence
from ctypes import memmove
from queue import SimpleQueue
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

native: Callable[[NDArray[np.int64], bool], None] | None
try:
    from rlplane.storage._copy import work as native
except ImportError:
    native = None

_PIECE = 2 * 2**20
_WORTH_HELP = 4 * 2**20
_WORTH_A_THREAD = 256 * 1024
# Less than this may still be in the caches when it is read.
_WORTH_STREAMING = 8 * 2**20
_MOST_HELPERS = 7
_MOMENT_S = 0.0002

Copy: TypeAlias = tuple[int, int, int]
"""Where to, where from, how many bytes. Addresses, because a view of a small column costs more than its copy;
whoever asks for a copy keeps the memory alive until it is done."""

Copies: TypeAlias = NDArray[np.int64]
"""A row per copy, with the same three columns."""


def is_native() -> bool:
    """Whether the C loop is there."""
    return native is not None


class _Job:
    """The pieces of one copy. Every thread that works on it takes the next piece.

    Who works is counted where Ctrl-C cannot come in between: in C, or in the threads of the helpers. A wrong
    count would have the caller wait for ever, or give memory away that is still being written.
    """

    def __init__(self, pieces: Copies, *, streaming: bool) -> None:
        self._count = len(pieces)
        self._native = native
        if native is not None:
            # As _copy.c wants it: pieces begun, pieces there are, whether to stream, threads, and the pieces.
            self._numbers = np.empty(4 + pieces.size, np.int64)
            self._numbers[:4] = 0, self._count, streaming, 0
            self._numbers[4:] = pieces.ravel()
        else:
            self._pieces = pieces.tolist()
            self._turn = itertools.count()  # ``next`` on it is atomic
            self._lock = threading.Lock()
            self._working = 0

    def help(self) -> None:
        """Copy what nobody has begun, in a helper's thread."""
        if self._native is not None:
            self._native(self._numbers, False)
            return
        with self._lock:
            self._working += 1
        try:
            self._copy()
        finally:
            with self._lock:
                self._working -= 1

    def finish(self) -> None:
        """Copy what nobody has begun, and wait for the others."""
        if self._native is not None:
            self._native(self._numbers, True)
            return
        self._copy()
        self._wait()

    def cancel(self) -> None:
        """Begin no more pieces, and wait for those that were begun."""
        if self._native is not None:
            self._numbers[0] = self._count
            self._native(self._numbers, True)
            return
        for _ in range(self._count):
            next(self._turn)
        self._wait()

    def _copy(self) -> None:
        for place in self._turn:
            if place >= self._count:
                break
            memmove(*self._pieces[place])

    def _wait(self) -> None:
        interrupt = None
        while self._working:
            try:
                time.sleep(_MOMENT_S)
            except BaseException as error:
                interrupt = error  # the memory is still being written
        if interrupt is not None:
            raise interrupt


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
            self._count = 0
            for _ in range(min(torch.get_num_threads() - 1, _MOST_HELPERS)):
                thread = threading.Thread(
                    target=self._run, args=(self._queue,), name="rlplane-copy", daemon=True
                )
                try:
                    thread.start()
                except RuntimeError:
                    break  # no more threads to be had: the caller copies alone
                self._count += 1
            self._pid = os.getpid()

    @staticmethod
    def _run(jobs: SimpleQueue[Any]) -> None:
        while True:
            jobs.get().help()


_helpers = _Helpers()


def copy_all(copies: Sequence[Copy]) -> None:
    """Make all copies. Sources and targets do not overlap."""
    if sum([nbytes for _, _, nbytes in copies]) < _WORTH_HELP:
        for copy in copies:
            memmove(*copy)
    else:
        # numpy takes longer to look into a list of tuples than to be given their numbers.
        numbers = np.fromiter(itertools.chain.from_iterable(copies), np.int64, 3 * len(copies))
        copy_table(numbers.reshape(-1, 3))


def copy_table(copies: Copies) -> None:
    """The same, for many of them."""
    sizes = copies[:, 2]
    total = int(sizes.sum())
    # From Python, threads that copy little at a time hinder each other more than they help.
    helped = total >= _WORTH_HELP and (native is not None or total // len(copies) >= _WORTH_A_THREAD)
    if helped and sizes.max() > _PIECE:
        copies = _cut(copies)
    job = _Job(copies, streaming=total >= _WORTH_STREAMING)
    try:
        if helped:
            _helpers.offer(job)
        job.finish()
    except BaseException:
        # Ctrl-C, and the memory is about to be given back.
        job.cancel()
        raise


def _cut(copies: Copies) -> Copies:
    """The same copies in pieces, so that threads can share a large one."""
    pieces = [
        (target + start, source + start, min(_PIECE, nbytes - start))
        for target, source, nbytes in copies.tolist()
        for start in range(0, nbytes, _PIECE)
    ]
    return np.array(pieces, np.int64)
