"""Who is measured when: every round goes once round the contestants, in an order that changes each time, so
that what the machine does meanwhile falls on all of them alike. The first rounds warm up and do not count.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from rlplane.bench.contestants import COPY, ZMQ, Contestant
from rlplane.bench.plan import Plan, Workload
from rlplane.bench.progress import Progress
from rlplane.bench.results import (
    SCHEMA,
    SCHEMA_VERSION,
    BenchResult,
    Check,
    Series,
    describe_machine,
)
from rlplane.bench.seat import SeatError, SeatProcess
from rlplane.bench.targets import judge

__all__ = ["run_bench"]

_WAKE_PAUSE_S = 0.003
# A claim that was called this long before the put was waiting for it.
_SURELY_WAITING_S = 0.001
_CLAIM_TIMEOUT_S = 30.0
_FILL_AT_ONCE = 20_000
_WRONG_KEPT = 5


def run_bench(
    plan: Plan,
    contestants: Sequence[Contestant],
    *,
    quick: bool = False,
    scale: float = 1.0,
    peers: Sequence[str] = (),
    notes: Sequence[str] = (),
    progress: Progress | None = None,
) -> BenchResult:
    """Measure the contestants, each in processes of its own, and judge the targets.

    A contestant that fails drops out, with its reason in the result; the others go on.

    Raises:
        SeatError: rlplane itself, or a limit, failed: there is nothing to compare.
    """
    progress = progress or Progress(None)
    started_at, started = time.time(), time.perf_counter()
    load_before = os.getloadavg()[0]
    race = _Race(plan, progress)
    with contextlib.closing(race):
        race.open(contestants)
        torch_version, threads = race.torch()
        race.ping()
        race.data(plan.grpo, plan.grpo_rounds)
        race.data(plan.wide, plan.wide_rounds)
        race.wake()
        race.claims()
        race.clients()
        race.ping()
        progress.say("ending the contestants")
    progress.done()
    series = race.series()
    every_note = [*notes, *race.notes]
    machine = describe_machine(torch_version, threads, load_before, os.getloadavg()[0])
    if load_before > machine.cores / 2:
        every_note.append(
            f"the machine was busy before the run began (load {load_before:.1f} on {machine.cores} cores):"
            " figures of an idle machine are another matter"
        )
    if scale != 1:
        every_note.append(f"at scale {scale:g} batches and counts are smaller than their titles say")
    workloads = {workload.name: workload.title for workload in (*plan.grpo, *plan.wide)}
    result = BenchResult(
        schema=SCHEMA,
        schema_version=SCHEMA_VERSION,
        started_at=started_at,
        elapsed_s=time.perf_counter() - started,
        quick=quick,
        scale=scale,
        peers=list(peers),
        machine=machine,
        workloads=workloads,
        contestants={contestant.name: contestant.title for contestant in contestants},
        series=series,
        checks=race.checks(),
        targets=[],
        notes=every_note,
    )
    result.targets.extend(judge(result))
    return result


class _AnySeat(Protocol):
    def call(self, command: str, *args: Any) -> Any: ...
    def send(self, command: str, *args: Any) -> None: ...
    def receive(self) -> Any: ...
    def close(self) -> None: ...


class _InsideSeat:
    """A consumer that is an actor of the producer."""

    def __init__(self, producer: SeatProcess) -> None:
        self._producer = producer

    def call(self, command: str, *args: Any) -> Any:
        self.send(command, *args)
        return self.receive()

    def send(self, command: str, *args: Any) -> None:
        self._producer.call("forward_send", command, args)

    def receive(self) -> Any:
        return self._producer.call("forward_receive")

    def close(self) -> None:
        """It goes with the producer."""


class _Entry:
    """A contestant that takes part, with its seats and what has been found about it."""

    def __init__(self, contestant: Contestant) -> None:
        self.contestant = contestant
        self.name = contestant.name
        self._environment = contestant.environment()
        self.producer = self._seat("producer")
        self.consumer: _AnySeat = (
            _InsideSeat(self.producer) if contestant.consumer_inside else self._seat("consumer")
        )
        self.clients: SeatProcess | None = None
        self.link: dict[str, Any] = {}
        self.reads = 0
        self.wrong: list[str] = []
        self.failure: str | None = None

    def processes(self) -> list[SeatProcess]:
        return [seat for seat in (self.producer, self.consumer) if isinstance(seat, SeatProcess)]

    def await_load(self) -> None:
        for seat in self.processes():
            seat.receive()

    def open(self) -> None:
        self.link = self.producer.call("open", self.contestant.store, "producer", {})
        if not self.contestant.consumer_inside:
            self.consumer.call("open", self.contestant.store, "consumer", self.link)

    def _seat(self, role: str) -> SeatProcess:
        return SeatProcess(f"{self.name} ({role})", self._environment)

    def start_clients(self, count: int, partition: str, rows: int) -> None:
        self.clients = self._seat("clients")
        self.clients.call("clients_start", self.contestant.store, self.link, count, partition, rows)

    def register(self, partition: str) -> None:
        self.producer.call("register", partition)

    def forget(self) -> None:
        self.producer.call("forget")
        self.consumer.call("forget")

    def check(self, where: str, wrong: str | None) -> None:
        self.reads += 1
        if wrong and len(self.wrong) < _WRONG_KEPT:
            self.wrong.append(f"{where}: {wrong}")

    def close(self) -> None:
        for seat in (self.clients, self.consumer, self.producer):
            if seat is not None:
                seat.close()


class _Race:
    def __init__(self, plan: Plan, progress: Progress) -> None:
        self._plan, self._progress = plan, progress
        self._entries: list[_Entry] = []
        self._values: dict[tuple[str, str, str, str], list[float]] = defaultdict(list)
        self._sizes: dict[str, int] = {}
        self._random = random.Random(7)
        self.notes: list[str] = []

    def open(self, contestants: Sequence[Contestant]) -> None:
        self._progress.say("starting processes")
        self._entries = [_Entry(contestant) for contestant in contestants]
        # All at once, because every one of them loads torch.
        for entry in self._entries:
            for seat in entry.processes():
                seat.send("load", entry.contestant.store)
        for entry in self._entries:
            self._with(entry, _Entry.await_load)
            self._progress.say(f"starting {entry.name}")
            self._with(entry, _Entry.open)

    def close(self) -> None:
        # Each ends its reader before its server; among themselves they need not wait.
        with ThreadPoolExecutor(max(len(self._entries), 1)) as pool:
            list(pool.map(_Entry.close, self._entries))

    def torch(self) -> tuple[str, int]:
        version, threads = self._entry(COPY).producer.call("torch")
        return version, threads

    def checks(self) -> list[Check]:
        return [Check(entry.name, entry.reads, entry.wrong, entry.failure) for entry in self._entries]

    def series(self) -> list[Series]:
        return [
            Series.of(
                *key,
                values,
                unit="cycles/s" if key[0] == "clients" else "s",
                nbytes=self._sizes.get(key[1], 0) if key[0] == "data" else 0,
            )
            for key, values in self._values.items()
            if values
        ]

    # The parts

    def ping(self) -> None:
        """Bare round trips, at the start and at the end: one after the other, and after a pause each."""
        self._progress.say("bare ZMQ round trips")
        entry = self._entry(ZMQ)
        entry.producer.call("ping", 50, 0.0)
        self._add("ping", "ping", ZMQ, "round trip", *entry.producer.call("ping", self._plan.pings // 2, 0.0))
        paused = entry.producer.call("ping", max(self._plan.pings // 10, 5), _WAKE_PAUSE_S)
        self._add("ping", "ping", ZMQ, "round trip after a pause", *paused)

    def data(self, workloads: Sequence[Workload], rounds: int) -> None:
        """Put, read in order, read scattered, clear."""
        for entry in self._taking_part("data"):
            self._progress.say(f"{workloads[0].name} …: making the batches of {entry.name}")
            self._with(entry, self._prepare, workloads)
        warm_up = self._plan.warm_up
        steps = [(number, workload) for number in range(warm_up + rounds) for workload in workloads]
        for at, (number, workload) in enumerate(steps):
            for entry in self._shuffled("data"):
                self._progress.show(workload.title, at / len(steps), entry.name)
                self._with(entry, self._data_round, workload, number, number >= warm_up)
        for entry in self._taking_part("data"):
            self._with(entry, _Entry.forget)

    def _prepare(self, entry: _Entry, workloads: Sequence[Workload]) -> None:
        entry.producer.send("prepare", workloads)
        if isinstance(entry.consumer, _InsideSeat):
            self._sizes.update(entry.producer.receive())
            entry.consumer.call("prepare", workloads)
        else:
            entry.consumer.call("prepare", workloads)
            self._sizes.update(entry.producer.receive())

    def _data_round(self, entry: _Entry, workload: Workload, number: int, counts: bool) -> None:
        name = workload.name
        # Ray's references are the producer's to drop; elsewhere the last reader clears.
        clearing = entry.producer if entry.contestant.consumer_inside else entry.consumer
        for repeat in range(workload.repeat):
            serial = number * workload.repeat + repeat
            found = {"put": entry.producer.call("put", name, serial)}
            for op, scattered in (("get", False), ("scattered", True)):
                got = entry.consumer.call("get", name, serial, scattered)
                entry.check(f"{name}, {op}, round {number}", got["wrong"])
                found |= {op: got["call"], f"{op}+touch": got["touched"], f"{op} drop": got["drop"]}
            found["clear"] = clearing.call("clear", name, serial)
            if counts:
                for op, seconds in found.items():
                    self._add("data", name, entry.name, op, seconds)

    def wake(self) -> None:
        """From the call of a put to the return of a claim that waited for it."""
        partition = "wake"
        for entry in self._taking_part("wake"):
            self._with(entry, _Entry.register, partition)
        warm_up = min(10, self._plan.wakes)
        for number in range(warm_up + self._plan.wakes):
            for entry in self._shuffled("wake"):
                self._progress.show(
                    "a put wakes a waiting claim", number / (warm_up + self._plan.wakes), entry.name
                )
                self._with(entry, self._wake_once, partition, number, number >= warm_up)

    def _wake_once(self, entry: _Entry, partition: str, number: int, counts: bool) -> None:
        entry.consumer.send("claim", partition, 1, _CLAIM_TIMEOUT_S)
        put_at, _ = entry.producer.call("put_tiny", partition, range(number, number + 1), _WAKE_PAUSE_S)
        entered, returned, _ = entry.consumer.receive()
        entry.check("wake", entry.consumer.call("check_claimed", partition))
        if counts and put_at - entered > _SURELY_WAITING_S:
            self._add("wake", "wake", entry.name, "put to claim", returned - put_at)

    def claims(self) -> None:
        """A claim with ever more samples resident, all of them ready."""
        size = self._plan.claim_size
        levels: list[tuple[_Entry, int]] = []
        for entry in self._taking_part("claims"):
            for resident in self._plan.resident:
                if resident <= max(entry.contestant.most_resident, self._plan.resident[0]):
                    self._with(entry, self._fill, resident)
                    levels.append((entry, resident))
        for number in range(self._plan.claims + 3):
            self._random.shuffle(levels)
            for entry, resident in levels:
                self._progress.show(
                    "claims with samples resident", number / (self._plan.claims + 3), entry.name
                )
                self._with(entry, self._claim_once, resident, size, number, number >= 3)

    def _fill(self, entry: _Entry, resident: int) -> None:
        partition = f"resident-{resident}"
        entry.register(partition)
        for first in range(0, resident, _FILL_AT_ONCE):
            self._progress.show(f"filling up to {resident:,} samples", first / resident, entry.name)
            entry.producer.call("put_tiny", partition, range(first, min(first + _FILL_AT_ONCE, resident)))

    def _claim_once(self, entry: _Entry, resident: int, size: int, number: int, counts: bool) -> None:
        partition = f"resident-{resident}"
        entered, returned, claimed = entry.consumer.call("claim", partition, size, _CLAIM_TIMEOUT_S)
        if claimed != size:
            raise SeatError(f"{entry.name} claimed {claimed} of {size} samples with {resident} ready")
        entry.check(f"claims at {resident}", entry.consumer.call("check_claimed", partition))
        # As many come as go, so that the number stays what the series says it is.
        first = resident + number * size
        entry.producer.call("put_tiny", partition, range(first, first + size))
        if counts:
            self._add("claims", str(resident), entry.name, "claim", returned - entered)

    def clients(self) -> None:
        """Cycles of put, claim, read and clear per second, by clients that all use the same partition."""
        partition, plan = "clients", self._plan
        for entry in self._taking_part("clients"):
            self._progress.say(f"starting the clients of {entry.name}")
            self._with(entry, self._start_clients, partition)
        for number in range(plan.client_rounds + 1):
            for count in self._random.sample(plan.clients, len(plan.clients)):
                for entry in self._shuffled("clients"):
                    if count <= entry.contestant.most_clients:
                        self._progress.show(
                            f"{count} client{'s' * (count > 1)} at once",
                            number / (plan.client_rounds + 1),
                            entry.name,
                        )
                        self._with(entry, self._clients_run, count, number > 0)

    def _start_clients(self, entry: _Entry, partition: str) -> None:
        entry.register(partition)
        most = max(n for n in self._plan.clients if n <= entry.contestant.most_clients)
        entry.start_clients(most, partition, self._plan.client_rows)

    def _clients_run(self, entry: _Entry, count: int, counts: bool) -> None:
        assert entry.clients is not None
        seconds = self._plan.client_seconds if counts else self._plan.client_seconds / 4
        found = entry.clients.call("clients_run", count, seconds)
        entry.check(f"{count} clients", found["wrong"])
        if counts:
            self._add("clients", str(count), entry.name, "cycles", found["cycles"] / seconds)

    # Book-keeping

    def _add(self, part: str, workload: str, contestant: str, op: str, *values: float) -> None:
        self._values[part, workload, contestant, op].extend(values)

    def _entry(self, name: str) -> _Entry:
        return next(entry for entry in self._entries if entry.name == name)

    def _taking_part(self, part: str) -> list[_Entry]:
        return [entry for entry in self._entries if part in entry.contestant.parts and not entry.failure]

    def _shuffled(self, part: str) -> Iterable[_Entry]:
        entries = self._taking_part(part)
        self._random.shuffle(entries)
        return entries

    def _with(self, entry: _Entry, step: Callable[..., Any], *args: Any) -> None:
        """Run a step of an entry; a peer that fails drops out, and anybody else ends the run."""
        if entry.failure:
            return
        try:
            step(entry, *args)
        except SeatError as error:
            if entry.contestant.peer is None:
                raise
            entry.failure = str(error)
            self.notes.append(f"{entry.name} dropped out: {error}")
