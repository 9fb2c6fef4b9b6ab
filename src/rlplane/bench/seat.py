"""A process that one side of a contestant sits in, and the commands that it takes over a pipe.

Times are taken inside the seat, with the monotonic clock that all processes of a machine share, so nothing
of the bench itself is in them. Everything that is not the operation (making bytes, checking them, collecting
garbage) is outside.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from importlib import metadata
from multiprocessing.connection import Connection, Pipe
from typing import Any

from rlplane.bench.clients import ClientPool
from rlplane.bench.plan import Workload

__all__ = ["Seat", "SeatError", "SeatProcess"]

COMMAND_TIMEOUT_S = 300.0
_CLOSE_TIMEOUT_S = 30.0


class SeatError(Exception):
    """A command failed in the seat, or the seat has gone; the message is the seat's last words."""


class SeatProcess:
    """A seat in a process of its own, from the outside."""

    def __init__(self, name: str, environment: Mapping[str, str] | None = None) -> None:
        self.name = name
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the process
        ours, theirs = Pipe()
        inherited = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith("RLPLANE_") or key.startswith("RLPLANE_BENCH_")
        }
        # A seat must be able to load what the caller can.
        inherited["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rlplane.bench.seat", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env={**inherited, **(environment or {})},
        )
        theirs.close()
        self._pipe: Connection[Any, Any] = ours

    def call(self, command: str, *args: Any, timeout_s: float = COMMAND_TIMEOUT_S) -> Any:
        """Run a command in the seat and return its result."""
        self.send(command, *args)
        return self.receive(timeout_s)

    def send(self, command: str, *args: Any) -> None:
        """Start a command; :meth:`receive` has its result."""
        try:
            self._pipe.send((command, args))
        except OSError:
            raise self._gone() from None

    def receive(self, timeout_s: float = COMMAND_TIMEOUT_S) -> Any:
        try:
            if not self._pipe.poll(timeout_s):
                raise SeatError(f"{self.name} has not answered for {timeout_s:g} s")
            fine, value = self._pipe.recv()
        except (EOFError, OSError):
            raise self._gone() from None
        if not fine:
            raise SeatError(f"{self.name}: {value}")
        return value

    def close(self) -> None:
        """Ask the seat to end what it started and itself; insist if it does not."""
        with contextlib.suppress(SeatError):
            self.call("close", timeout_s=_CLOSE_TIMEOUT_S)
        self._pipe.close()
        try:
            self._process.wait(_CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _gone(self) -> SeatError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        self._log.seek(0)
        words = self._log.read().decode(errors="replace").strip()[-2000:]
        return SeatError(f"{self.name} ended with code {self._process.poll()}: {words or 'it said nothing'}")


class Seat:
    """The commands. Each public method is one."""

    def __init__(self) -> None:
        self._store: Any = None
        self._batches: dict[str, Any] = {}
        self._forms: dict[str, Any] = {}
        self._claimed: Any = None
        self._clients: ClientPool | None = None

    # The store, and what the seat needs to know

    def load(self, store: str) -> None:
        """Import what the store needs, which takes longer than anything else at the start."""
        _load(store)

    def open(self, store: str, role: str, link: dict[str, Any]) -> dict[str, Any]:
        """Build the store ``module:Class``; what it returns is the other side's ``link``."""
        self._store = _load(store)(role, link)
        # What is there now stays: only what a round leaves is collected between rounds.
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
        """Make the batches, each in the form that the store's users hold it; how many bytes each has."""
        from rlplane.bench.batches import make_batches

        self._batches = make_batches(workloads)
        self._forms = {}
        for name, batch in self._batches.items():
            self._forms[name] = self._store.form(batch)
        return {name: batch.nbytes for name, batch in self._batches.items()}

    def forget(self) -> None:
        self._batches, self._forms = {}, {}
        self._store.forget()
        gc.collect()

    def put(self, name: str, number: int) -> float:
        batch = self._batches[name]
        batch.stamp(number)
        ids, form = batch.ids(number), self._forms[name]
        gc.collect()
        started = time.perf_counter()
        self._store.put(name, ids, form)
        return time.perf_counter() - started

    def get(self, name: str, number: int, scattered: bool, receipt: Any = None) -> dict[str, Any]:
        """Read all rows, in order or scattered: seconds of the call, with every byte read, of the drop."""
        from rlplane.bench.batches import scattered_order, touch

        batch = self._batches[name]
        batch.stamp(number)
        order = scattered_order(batch.rows, number) if scattered else None
        ids = batch.ids(number)
        if order is not None:
            ids = [ids[row] for row in order]
        gc.collect()
        started = time.perf_counter()
        result = self._store.get(batch, ids, order, receipt)
        called = time.perf_counter()
        columns = self._store.columns(result)
        touching = time.perf_counter()
        touch(columns)
        touched = time.perf_counter()
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

    # The control plane: rows of a few numbers

    def register(self, partition: str) -> None:
        self._store.register(partition)

    def put_tiny(self, partition: str, numbers: range, pause_s: float = 0.0) -> tuple[float, float]:
        """Put rows that the claims take; when it started and ended."""
        rows = self._store.tiny(numbers)
        if pause_s:
            time.sleep(pause_s)
        started = time.perf_counter()
        self._store.put_tiny(partition, numbers, rows)
        return started, time.perf_counter()

    def claim(self, partition: str, count: int, timeout_s: float) -> tuple[float, float, int]:
        """Claim rows: when the call was made, when it returned, and how many rows it gave."""
        entered = time.perf_counter()
        self._claimed = self._store.claim(partition, count, timeout_s)
        returned = time.perf_counter()
        return entered, returned, int(self._store.size(self._claimed))

    def check_claimed(self, partition: str) -> str | None:
        """Read what the last claim gave, and clear it; what was wrong with it, or None."""
        wrong = self._store.check_tiny(self._store.read_tiny(partition, self._claimed))
        self._store.clear_tiny(partition, self._claimed)
        self._claimed = None
        return str(wrong) if wrong else None

    # Round trips

    def ping(self, count: int, pause_s: float) -> list[float]:
        times: list[float] = self._store.ping(count, pause_s)
        return times

    # Many clients

    def clients_start(self, store: str, link: dict[str, Any], count: int, partition: str, rows: int) -> None:
        self._clients = ClientPool(store, link, count, partition, rows)

    def clients_run(self, count: int, seconds: float) -> dict[str, Any]:
        assert self._clients is not None, "clients_start comes first"
        return self._clients.run(count, seconds)

    # A consumer that only the producer can reach: an actor

    def forward_send(self, command: str, args: tuple[Any, ...]) -> None:
        self._store.forward_send(command, args)

    def forward_receive(self) -> Any:
        return self._store.forward_receive()


def _load(path: str) -> Any:
    return metadata.EntryPoint(name="", value=path, group="").load()


def _serve(pipe: Connection[Any, Any]) -> None:
    """Take commands until ``close``, or until whoever runs the bench has gone; leave nothing behind."""
    seat = Seat()
    try:
        while True:
            try:
                command, args = pipe.recv()
                if command == "close":
                    break
                pipe.send(_answer(seat, command, args))
            except (EOFError, OSError):
                return
    finally:
        seat.close()
    with contextlib.suppress(OSError):
        pipe.send((True, None))


def _answer(seat: Seat, command: str, args: tuple[Any, ...]) -> tuple[bool, Any]:
    try:
        return True, getattr(seat, command)(*args)
    except Exception as error:
        traceback.print_exc()
        return False, f"{command} failed: {type(error).__name__}: {error}"


if __name__ == "__main__":
    # Ctrl-C reaches every process of a terminal; the bench's own answer to it is to close the seats.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # As an exception, so that a seat ends what it started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    _serve(Connection(int(sys.argv[1])))
