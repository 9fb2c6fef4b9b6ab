"""The Ray actor that is a client of every engine in the cluster bench."""

from __future__ import annotations

import gc
from typing import Any

from rlplane_benchmarks.cycles import CyclesDone
from rlplane_benchmarks.worker import Worker

__all__ = ["ClientActor"]


class ClientActor:
    """One client of each engine, in one process: an engine that is not being measured is idle in it."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._workers: dict[str, Worker] = {}

    def open(self, stores: dict[str, tuple[str, dict[str, Any]]]) -> None:
        """Join every engine: by name, the class of its store and the link of its producer."""
        for name, (store, link) in stores.items():
            self._workers[name] = Worker()
            self._workers[name].open(store, "client", link)
        # A worker collects garbage between its measurements. Cycles have no such pauses, and a user's client
        # has its garbage collector on.
        gc.enable()

    def cycles(self, engine: str, rows: int, begin: float, start: float, end: float) -> CyclesDone:
        """Run cycles in this client's own partition."""
        return self._workers[engine].cycles(client_partition(self._number), rows, begin, start, end)

    def call(self, engine: str, command: str, *args: Any) -> Any:
        """Run a command of :class:`~rlplane_benchmarks.worker.Worker` on one engine."""
        return getattr(self._workers[engine], command)(*args)

    def close(self) -> None:
        """Leave every engine."""
        for worker in self._workers.values():
            worker.close()


def client_partition(number: int) -> str:
    """The partition of a client. TransferQueue has no claims, so its readers cannot share one."""
    return f"client-{number}"
