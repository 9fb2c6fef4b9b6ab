"""Many clients at once: processes that each put, claim, read and clear in a loop, for a stretch of time.

They are forked from one seat that has loaded everything and connected to nothing: sixty-four interpreters
would take longer to start than to measure.
"""

from __future__ import annotations

import contextlib
import os
import time
import traceback
from importlib import metadata
from multiprocessing.connection import Connection, Pipe
from typing import Any

__all__ = ["ClientPool"]

_CLAIM_TIMEOUT_S = 60.0
# Idle clients work for a while before it counts: how fast many cold processes start is another matter.
_LEAD_S = 0.25
_PATIENCE_S = 120.0


class ClientPool:
    """``count`` connected clients, of which a run uses the first few."""

    def __init__(self, store: str, link: dict[str, Any], count: int, partition: str, rows: int) -> None:
        import torch  # before the fork: once, and not in every client

        torch.set_num_threads(1)
        make = metadata.EntryPoint(name="", value=store, group="").load()
        self._clients: list[tuple[int, Connection[Any, Any]]] = []
        for number in range(count):
            ours, theirs = Pipe()
            pid = os.fork()
            if not pid:
                ours.close()
                for _, other in self._clients:
                    other.close()
                _live(make, link, number, partition, rows, theirs)
            theirs.close()
            self._clients.append((pid, ours))
        for _, pipe in self._clients:
            self._answer(pipe)

    def run(self, count: int, seconds: float) -> dict[str, Any]:
        """Let the first ``count`` clients work: their cycles in all, and what was wrong, if anything."""
        active = [pipe for _, pipe in self._clients[:count]]
        begin = time.perf_counter() + 0.02
        start = begin + _LEAD_S
        for pipe in active:
            pipe.send((begin, start, start + seconds))
        answers = [self._answer(pipe, seconds) for pipe in active]
        wrong = next((answer["wrong"] for answer in answers if answer["wrong"]), None)
        cycles = sum(answer["cycles"] for answer in answers)
        return {"cycles": cycles, "wrong": wrong, "fewest": min(answer["cycles"] for answer in answers)}

    def close(self) -> None:
        for _, pipe in self._clients:
            pipe.close()
        for pid, _ in self._clients:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        self._clients = []

    def _answer(self, pipe: Connection[Any, Any], seconds: float = 0.0) -> Any:
        if not pipe.poll(seconds + _PATIENCE_S):
            raise TimeoutError(f"a client has not answered for {seconds + _PATIENCE_S:g} s")
        answer = pipe.recv()
        if isinstance(answer, str):
            raise RuntimeError(f"a client failed: {answer}")
        return answer


def _live(
    make: Any, link: dict[str, Any], number: int, partition: str, rows: int, pipe: Connection[Any, Any]
) -> None:
    """A client's life. It never returns: it is a fork, and what the parent holds is not its own to end."""
    code = 1
    try:
        store = make("client", link)
        try:
            # Numbers that no other client uses.
            following = number * 10**9
            pipe.send({})
            while True:
                try:
                    begin, start, end = pipe.recv()
                except EOFError:
                    break
                time.sleep(max(begin - time.perf_counter(), 0))
                cycles, wrong = 0, None
                while time.perf_counter() < end:
                    numbers = range(following, following + rows)
                    following += rows
                    wrong = _cycle(store, partition, numbers) or wrong
                    # What counts is when a cycle ends.
                    cycles += start <= time.perf_counter() <= end
                pipe.send({"cycles": cycles, "wrong": wrong})
        finally:
            store.close()
        code = 0
    except BaseException as error:
        traceback.print_exc()
        with contextlib.suppress(OSError):
            pipe.send(f"{type(error).__name__}: {error}")
    finally:
        os._exit(code)


def _cycle(store: Any, partition: str, numbers: range) -> str | None:
    store.put_tiny(partition, numbers, store.tiny(numbers))
    claimed = store.claim(partition, len(numbers), _CLAIM_TIMEOUT_S)
    wrong: str | None = store.check_tiny(store.read_tiny(partition, claimed))
    store.clear_tiny(partition, claimed)
    return wrong
