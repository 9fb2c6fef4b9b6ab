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
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["copy_all"]

_PIECE = 2 * 2**20
_WORTH_HELP = 4 * 2**20
_MOST_HELPERS = 7

Bytes = NDArray[np.uint8]


class _Job:
    """The pieces of one copy; ``next`` on the counter is atomic, so each piece is taken once."""

    def __init__(self, pieces: list[tuple[Bytes, Bytes]]) -> None:
        self._pieces = pieces
        self._turn = itertools.count()
        self._left = len(pieces)
        self._lock = threading.Lock()
        self._done = threading.Event()

    def work(self) -> None:
        finished = 0
        for place in self._turn:
            if place >= len(self._pieces):
                break
            target, source = self._pieces[place]
            np.copyto(target, source)
            finished += 1
        if finished:
            with self._lock:
                self._left -= finished
                if not self._left:
                    self._done.set()

    def wait(self) -> None:
        self._done.wait()


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
            job = jobs.get()
            job.work()
            del job  # or the last copy's memory would stay in use until the next one


_helpers = _Helpers()


def copy_all(copies: Iterable[tuple[Bytes, Bytes]]) -> None:
    """Copy each source to its target, both contiguous and of one size."""
    pairs = list(copies)
    if sum(target.nbytes for target, _ in pairs) < _WORTH_HELP:
        for target, source in pairs:
            np.copyto(target, source)
        return
    pieces = [
        (target[start : start + _PIECE], source[start : start + _PIECE])
        for target, source in pairs
        for start in range(0, target.nbytes, _PIECE)
    ]
    job = _Job(pieces)
    _helpers.offer(job)
    job.work()
    job.wait()
