"""Many clients at once on one machine: processes that run the cycles of ``cycles.py`` at the same time.

They are forked from one process that has imported everything and is connected to nothing, because starting 64
interpreters would take longer than the measurement.
"""

from __future__ import annotations

import contextlib
import os
import time
import traceback
from multiprocessing.connection import Connection, Pipe
from pkgutil import resolve_name
from typing import Any

from rlplane_benchmarks.cycles import CyclesDone, run_cycles

__all__ = ["ForkedClients"]

# The clients work for a while before their cycles count, because processes that were idle are slow at first.
_WARM_UP_S = 0.25
_ANSWER_TIMEOUT_S = 120.0
# Every client numbers its rows from a multiple of this, so that no two clients write the same sample.
_NUMBERS_PER_CLIENT = 10**9


class ForkedClients:
    """``count`` connected clients, of which a run uses the first few."""

    def __init__(self, store: str, link: dict[str, Any], count: int, partition: str, rows: int) -> None:
        import torch  # before the fork: once, and not in every client

        torch.set_num_threads(1)
        make = resolve_name(store)
        self._clients: list[tuple[int, Connection[Any, Any]]] = []
        for number in range(count):
            ours, theirs = Pipe()
            pid = os.fork()
            if not pid:
                ours.close()
                for _, other in self._clients:
                    other.close()
                _run_client(make, link, number, partition, rows, theirs)
            theirs.close()
            self._clients.append((pid, ours))
        for _, pipe in self._clients:
            self._answer(pipe)

    def run(self, count: int, seconds: float) -> CyclesDone:
        """Let the first ``count`` clients work at the same time, and return what they did in all."""
        active = [pipe for _, pipe in self._clients[:count]]
        begin = time.perf_counter() + 0.02
        start = begin + _WARM_UP_S
        for pipe in active:
            pipe.send((begin, start, start + seconds))
        return CyclesDone.sum([self._answer(pipe, seconds) for pipe in active])

    def close(self) -> None:
        for _, pipe in self._clients:
            pipe.close()
        for pid, _ in self._clients:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        self._clients = []

    def _answer(self, pipe: Connection[Any, Any], seconds: float = 0.0) -> Any:
        if not pipe.poll(seconds + _ANSWER_TIMEOUT_S):
            raise TimeoutError(f"a client has not answered for {seconds + _ANSWER_TIMEOUT_S:g} s")
        answer = pipe.recv()
        if isinstance(answer, str):
            raise RuntimeError(f"a client failed: {answer}")
        return answer


def _run_client(
    make: Any, link: dict[str, Any], number: int, partition: str, rows: int, pipe: Connection[Any, Any]
) -> None:
    """Serve one forked client. It never returns, so that nothing of the parent is closed twice."""
    code = 1
    try:
        store = make("client", link)
        try:
            first_number = number * _NUMBERS_PER_CLIENT
            pipe.send(None)
            while True:
                try:
                    times = pipe.recv()
                except EOFError:
                    break
                done = run_cycles(store, partition, rows, first_number, *times)
                first_number += done.total * rows
                pipe.send(done)
        finally:
            store.close()
        code = 0
    except BaseException as error:
        traceback.print_exc()
        with contextlib.suppress(OSError):
            pipe.send(f"{type(error).__name__}: {error}")
    finally:
        os._exit(code)
