"""A worker holds one side of a participant: its store. It takes commands, and times the store's calls.

A worker runs in a process of its own (``worker_process.py``) or in a Ray actor. Times are taken here, with
the monotonic clock that all processes of a machine share, so that nothing of the bench itself is in them.
Making bytes, checking them and collecting garbage are outside of the measured time.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from pkgutil import resolve_name
from typing import Any

from rlplane_benchmarks.cycles import CyclesDone, check_rows, run_cycles
from rlplane_benchmarks.forked_clients import ForkedClients
from rlplane_benchmarks.plan import Workload

__all__ = ["Worker"]


class Worker:
    """Every public method is a command."""

    def __init__(self) -> None:
        self._store: Any = None
        self._batches: dict[str, Any] = {}
        self._prepared: dict[str, Any] = {}
        self._claimed: Any = None
        self._next_number = 0
        self._clients: ForkedClients | None = None

    # The store

    def load(self, store: str) -> None:
        """Import what the store needs, which takes longer than anything else at the start."""
        resolve_name(store)

    def open(self, store: str, role: str, link: dict[str, Any]) -> dict[str, Any]:
        """Build the store ``module:Class``. The result is the ``link`` with which other workers join it."""
        self._store = resolve_name(store)(role, link)
        # Objects that exist now stay: between rounds only what a round left is collected.
        gc.collect()
        gc.freeze()
        gc.disable()
        result: dict[str, Any] = self._store.link()
        return result

    def torch(self) -> tuple[str, int]:
        import torch

        return str(torch.__version__), torch.get_num_threads()

    def close(self) -> None:
        if self._clients is not None:
            self._clients.close()
        if self._store is not None:
            self._store.close()

    # Batches

    def prepare(self, workloads: Sequence[Workload]) -> dict[str, int]:
        """Make the batches, each as the store's own API takes it, and return how many bytes each has."""
        from rlplane_benchmarks.batches import make_batches

        self._batches = make_batches(workloads)
        self._prepared = {name: self._store.prepare(batch) for name, batch in self._batches.items()}
        return {name: batch.nbytes for name, batch in self._batches.items()}

    def forget(self) -> None:
        self._batches, self._prepared = {}, {}
        self._store.forget()
        gc.collect()

    def put(self, name: str, number: int) -> float:
        batch = self._batches[name]
        batch.stamp(number)
        ids, prepared = batch.ids(number), self._prepared[name]
        gc.collect()
        started = time.perf_counter()
        self._store.put(name, ids, prepared)
        return time.perf_counter() - started

    def get(self, name: str, number: int, scattered: bool, references: Any = None) -> dict[str, Any]:
        """Read all rows, in order or in a random order, and check them.

        The result has the seconds of the call alone, of the call with a read of every byte, and of dropping
        the result; and what was wrong with the rows, or None.
        """
        from rlplane_benchmarks.batches import scattered_order, touch, words_of

        batch = self._batches[name]
        batch.stamp(number)
        order = scattered_order(batch.rows, number) if scattered else None
        ids = batch.ids(number)
        if order is not None:
            ids = [ids[row] for row in order]
        gc.collect()
        started = time.perf_counter()
        result = self._store.get(batch, ids, order, references)
        called = time.perf_counter()
        columns = self._store.columns(result)
        words = words_of(columns)
        touching = time.perf_counter()
        touch(words)
        touched = time.perf_counter()
        del words
        wrong = batch.difference(columns, order)
        dropping = time.perf_counter()
        del result, columns
        dropped = time.perf_counter()
        call = called - started
        return {
            "call": call,
            "touched": call + touched - touching,
            "drop": dropped - dropping,
            "wrong": wrong,
        }

    def clear(self, name: str, number: int) -> float:
        ids = self._batches[name].ids(number)
        gc.collect()
        started = time.perf_counter()
        self._store.clear(name, ids)
        return time.perf_counter() - started

    def held_share(self, name: str) -> float:
        """The bytes that the store holds of a batch, as a share of those that its rows have."""
        share: float = self._store.held_bytes(name) / self._batches[name].nbytes
        return share

    def loop_lag(self, with_client: bool, tasks: int, nbytes: int, seconds: float) -> list[float]:
        """By how many seconds a task of an event loop woke too late, again and again."""
        gc.collect()
        lags: list[float] = self._store.loop_lag(with_client, tasks, nbytes, seconds)
        return lags

    def list_keys(self, partition: str) -> tuple[float, int]:
        """List a partition's keys, and return how long it took and how many there were."""
        gc.collect()
        started = time.perf_counter()
        keys = self._store.list_keys(partition)
        return time.perf_counter() - started, len(keys)

    # Claims, with rows of a few numbers

    def register(self, partition: str) -> None:
        self._store.register(partition)

    def put_tiny(self, partition: str, numbers: range, pause_s: float = 0.0) -> tuple[float, float]:
        """Put rows for a claim, and return when the put started and when it ended."""
        rows = self._store.tiny(numbers)
        if pause_s:
            time.sleep(pause_s)
        started = time.perf_counter()
        self._store.put_tiny(partition, numbers, rows)
        return started, time.perf_counter()

    def claim(self, partition: str, count: int, timeout_s: float) -> tuple[float, float, int]:
        """Claim rows, and return when the claim was called, when it returned, and how many rows it got."""
        entered = time.perf_counter()
        self._claimed = self._store.claim(partition, count, timeout_s)
        returned = time.perf_counter()
        return entered, returned, int(self._store.size(self._claimed))

    def check_claimed(self, partition: str, numbers: range | None = None) -> str | None:
        """Read the rows of the last claim, clear them, and return what was wrong with them, or None.

        With ``numbers`` they have to be exactly the rows of these numbers.
        """
        rows = self._store.read_tiny(partition, self._claimed)
        wrong = check_rows(rows, numbers)
        self._store.clear_tiny(partition, self._claimed)
        self._claimed = None
        return wrong

    # Round trips

    def ping(self, count: int, pause_s: float) -> list[float]:
        times: list[float] = self._store.ping(count, pause_s)
        return times

    # Many clients

    def cycles(self, partition: str, rows: int, begin: float, start: float, end: float) -> CyclesDone:
        """Run cycles in a partition that no other client uses, with numbers that were not used before."""
        done = run_cycles(self._store, partition, rows, self._next_number, begin, start, end, alone=True)
        self._next_number += done.total * rows
        return done

    def control_pid(self) -> int:
        """The process in which the control service of the engine runs."""
        pid: int = self._store.control_pid()
        return pid

    def clients_start(self, store: str, link: dict[str, Any], count: int, partition: str, rows: int) -> None:
        self._clients = ForkedClients(store, link, count, partition, rows)

    def clients_run(self, count: int, seconds: float) -> CyclesDone:
        assert self._clients is not None, "clients_start comes first"
        return self._clients.run(count, seconds)

    # The reading side of Ray's object store is an actor, which only the writing side can call.

    def forward_send(self, command: str, args: tuple[Any, ...]) -> None:
        self._store.forward_send(command, args)

    def forward_receive(self) -> Any:
        return self._store.forward_receive()
