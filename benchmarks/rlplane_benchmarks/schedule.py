"""What is measured when: every round measures each participant once, in an order that changes every round, so
that whatever else the machine does affects all of them alike. The first rounds warm up and do not count.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rlplane_benchmarks.active_participant import ActiveParticipant, WorkerActor
from rlplane_benchmarks.claim_orders import claim_costs
from rlplane_benchmarks.cycles import CyclesDone
from rlplane_benchmarks.measurements import Measurements
from rlplane_benchmarks.participants import COPY, RLPLANE, ZMQ, Participant
from rlplane_benchmarks.plan import Plan, Workload
from rlplane_benchmarks.progress import Progress
from rlplane_benchmarks.results import (
    SCHEMA,
    SCHEMA_VERSION,
    BenchResult,
    Check,
    describe_machine,
    notes_about,
)
from rlplane_benchmarks.targets import judge
from rlplane_benchmarks.worker_process import WorkerError

__all__ = ["run_bench"]

_WAKE_PAUSE_S = 0.003
# A claim that was called this long before the put was waiting for it.
_SURELY_WAITING_S = 0.001
_CLAIM_TIMEOUT_S = 30.0
_FILL_AT_ONCE = 20_000


def run_bench(
    plan: Plan,
    participants: Sequence[Participant],
    *,
    quick: bool = False,
    scale: float = 1.0,
    peers: Sequence[str] = (),
    notes: Sequence[str] = (),
    progress: Progress | None = None,
) -> BenchResult:
    """Measure the participants, each in processes of its own, and judge the targets.

    A peer that fails drops out, with its reason in the result; the others go on.

    Raises:
        WorkerError: rlplane itself or a limit failed, so that there is nothing to compare.
    """
    progress = progress or Progress(None)
    started_at, started = time.time(), time.perf_counter()
    load_before = os.getloadavg()[0]
    run = _Run(plan, progress)
    with contextlib.closing(run):
        run.open(participants)
        torch_version, threads = run.torch()
        run.ping()
        run.data(plan.grpo, plan.grpo_rounds)
        run.data(plan.wide, plan.wide_rounds)
        run.data(plan.images, plan.image_rounds, part="images")
        run.loop_lag()
        run.listing()
        run.wake()
        run.claims()
        run.orders()
        run.clients()
        run.ping()
        progress.say("ending the participants")
    progress.done()
    series = run.measured.series()
    machine = describe_machine(torch_version, threads, load_before, os.getloadavg()[0])
    workloads = {workload.name: workload.title for workload in (*plan.grpo, *plan.wide, *plan.images)}
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
        participants={participant.name: participant.title for participant in participants},
        series=series,
        checks=run.checks(),
        targets=[],
        notes=[*notes, *run.notes, *notes_about(machine, scale)],
    )
    result.targets.extend(judge(result))
    return result


class _Run:
    """The parts of a run, in the order in which ``run_bench`` calls them."""

    def __init__(self, plan: Plan, progress: Progress) -> None:
        self._plan, self._progress = plan, progress
        self._active: list[ActiveParticipant] = []
        self.measured = Measurements()
        self._random = random.Random(7)
        self.notes: list[str] = []

    def open(self, participants: Sequence[Participant]) -> None:
        self._progress.say("starting processes")
        self._active = [ActiveParticipant(participant) for participant in participants]
        # All load at the same time, because each of them imports torch, which takes seconds.
        for active in self._active:
            for worker in active.processes():
                worker.send("load", active.participant.store)
        for active in self._active:
            self._with(active, ActiveParticipant.await_load)
            self._progress.say(f"starting {active.name}")
            self._with(active, ActiveParticipant.open)

    def close(self) -> None:
        # Each participant ends its reader before its server; they need not wait for each other.
        with ThreadPoolExecutor(max(len(self._active), 1)) as pool:
            list(pool.map(ActiveParticipant.close, self._active))

    def torch(self) -> tuple[str, int]:
        version, threads = self._by_name(COPY).producer.call("torch")
        return version, threads

    def checks(self) -> list[Check]:
        return [active.reads.result(active.failure) for active in self._active]

    # The parts

    def ping(self) -> None:
        """Bare round trips, some one after the other and some each after a pause."""
        self._progress.say("bare ZMQ round trips")
        active = self._by_name(ZMQ)
        active.producer.call("ping", 50, 0.0)
        self.measured.add(
            "ping", "ping", ZMQ, "round trip", *active.producer.call("ping", self._plan.pings // 2, 0.0)
        )
        paused = active.producer.call("ping", max(self._plan.pings // 10, 5), _WAKE_PAUSE_S)
        self.measured.add("ping", "ping", ZMQ, "round trip after a pause", *paused)

    def data(self, workloads: Sequence[Workload], rounds: int, part: str = "data") -> None:
        """Put, get in order, get in a random order, and clear of whole batches."""
        for active in self._taking_part(part):
            self._progress.say(f"{workloads[0].name} …: making the batches of {active.name}")
            self._with(active, self._prepare, workloads)
        warm_up = self._plan.warm_up
        steps = [(number, workload) for number in range(warm_up + rounds) for workload in workloads]
        for at, (number, workload) in enumerate(steps):
            for active in self._shuffled(part):
                self._progress.show(workload.title, at / len(steps), active.name)
                self._with(active, self._data_round, part, workload, number, number >= warm_up)
        for active in self._taking_part(part):
            self._with(active, ActiveParticipant.forget)

    def _prepare(self, active: ActiveParticipant, workloads: Sequence[Workload]) -> None:
        active.producer.send("prepare", workloads)
        if isinstance(active.consumer, WorkerActor):
            self.measured.sizes.update(active.producer.receive())
            active.consumer.call("prepare", workloads)
        else:
            active.consumer.call("prepare", workloads)
            self.measured.sizes.update(active.producer.receive())

    def _data_round(
        self, active: ActiveParticipant, part: str, workload: Workload, number: int, counts: bool
    ) -> None:
        name = workload.name
        # Ray's references are dropped by the producer; elsewhere the last reader clears.
        clearing = active.producer if active.participant.consumer_is_actor else active.consumer
        for repeat in range(workload.repeat):
            serial = number * workload.repeat + repeat
            found = {"put": active.producer.call("put", name, serial)}
            if workload.is_trees and "held" in active.participant.parts:
                found["held"] = active.producer.call("held_share", name)
            for op, scattered in (("get", False), ("scattered", True)):
                got = active.consumer.call("get", name, serial, scattered)
                active.reads.add(f"{name}, {op}, round {number}", got["wrong"])
                found |= {op: got["call"], f"{op}+touch": got["touched"], f"{op} drop": got["drop"]}
            found["clear"] = clearing.call("clear", name, serial)
            if counts:
                for op, seconds in found.items():
                    self.measured.add(part, name, active.name, op, seconds)

    def loop_lag(self) -> None:
        """By how much a task wakes too late whose event loop an asyncio client shares."""
        for _, active in self._rounds("loop", self._plan.lag_rounds, "an event loop beside a put"):
            self._with(active, self._lag_once)

    def _lag_once(self, active: ActiveParticipant) -> None:
        plan = self._plan
        for with_client, op in ((False, "without a client"), (True, "beside a put")):
            lags = active.producer.call(
                "loop_lag", with_client, plan.lag_tasks, plan.lag_bytes, plan.lag_seconds
            )
            self.measured.add("loop", "loop", active.name, op, *lags)

    def listing(self) -> None:
        """All keys of a partition with their tags, asked for by another process than wrote them."""
        count, partition = self._plan.listed, "listed"
        for active in self._taking_part("list"):
            self._with(active, lambda each: each.producer.call("put_tiny", partition, range(count)))
        for number, active in self._rounds("list", self._plan.listings + 1, "listing keys"):
            self._with(active, self._list_once, partition, count, number > 0)

    def _list_once(self, active: ActiveParticipant, partition: str, count: int, counts: bool) -> None:
        seconds, found = active.consumer.call("list_keys", partition)
        wrong = None if found == count else f"{found} of {count} keys were listed"
        active.reads.add("list", wrong)
        if counts:
            self.measured.add("list", str(count), active.name, "list", seconds)

    def wake(self) -> None:
        """From the call of a put to the return of a claim that waited for it."""
        partition = "wake"
        for active in self._taking_part("wake"):
            self._with(active, ActiveParticipant.register, partition)
        warm_up = min(10, self._plan.wakes)
        rounds = self._rounds("wake", warm_up + self._plan.wakes, "a put wakes a waiting claim")
        for number, active in rounds:
            self._with(active, self._wake_once, partition, number, number >= warm_up)

    def _wake_once(self, active: ActiveParticipant, partition: str, number: int, counts: bool) -> None:
        active.consumer.send("claim", partition, 1, _CLAIM_TIMEOUT_S)
        put_at, _ = active.producer.call("put_tiny", partition, range(number, number + 1), _WAKE_PAUSE_S)
        entered, returned, _ = active.consumer.receive()
        active.reads.add("wake", active.consumer.call("check_claimed", partition))
        if counts and put_at - entered > _SURELY_WAITING_S:
            self.measured.add("wake", "wake", active.name, "put to claim", returned - put_at)

    def claims(self) -> None:
        """A claim while more and more samples are resident, all of them ready."""
        size = self._plan.claim_size
        levels: list[tuple[ActiveParticipant, int]] = []
        for active in self._taking_part("claims"):
            for resident in self._plan.resident:
                if resident <= max(active.participant.most_resident, self._plan.resident[0]):
                    self._with(active, self._fill, resident)
                    levels.append((active, resident))
        for number in range(self._plan.claims + 3):
            self._random.shuffle(levels)
            for active, resident in levels:
                self._progress.show(
                    "claims with samples resident", number / (self._plan.claims + 3), active.name
                )
                self._with(active, self._claim_once, resident, size, number, number >= 3)

    def _fill(self, active: ActiveParticipant, resident: int) -> None:
        partition = f"resident-{resident}"
        active.register(partition)
        for first in range(0, resident, _FILL_AT_ONCE):
            self._progress.show(f"filling up to {resident:,} samples", first / resident, active.name)
            active.producer.call("put_tiny", partition, range(first, min(first + _FILL_AT_ONCE, resident)))

    def _claim_once(
        self, active: ActiveParticipant, resident: int, size: int, number: int, counts: bool
    ) -> None:
        partition = f"resident-{resident}"
        entered, returned, claimed = active.consumer.call("claim", partition, size, _CLAIM_TIMEOUT_S)
        if claimed != size:
            raise WorkerError(f"{active.name} claimed {claimed} of {size} samples with {resident} ready")
        active.reads.add(f"claims at {resident}", active.consumer.call("check_claimed", partition))
        # As many rows are put as were cleared, so that as many stay resident as the series says.
        first = resident + number * size
        active.producer.call("put_tiny", partition, range(first, first + size))
        if counts:
            self.measured.add("claims", str(resident), active.name, "claim", returned - entered)

    def orders(self) -> None:
        """A claim in each order and under each flow policy, in the control state alone."""
        plan = self._plan
        self._progress.say(f"claims in other orders, with {plan.ordered:,} samples resident")
        for name, seconds in claim_costs(plan.ordered, plan.claim_size, min(plan.claims, 40)):
            op = f"claim at {plan.ordered:,} resident"
            self.measured.add("orders", name, RLPLANE, op, *seconds)

    def clients(self) -> None:
        """Cycles of put, claim, read and clear per second, by clients that all use the same partition."""
        partition, plan = "clients", self._plan
        for active in self._taking_part("clients"):
            self._progress.say(f"starting the clients of {active.name}")
            self._with(active, self._start_clients, partition)
        for number in range(plan.client_rounds + 1):
            for count in self._random.sample(plan.clients, len(plan.clients)):
                for active in self._shuffled("clients"):
                    if count <= active.participant.most_clients:
                        self._progress.show(
                            f"{count} client{'s' * (count > 1)} at once",
                            number / (plan.client_rounds + 1),
                            active.name,
                        )
                        self._with(active, self._clients_run, count, number > 0)

    def _start_clients(self, active: ActiveParticipant, partition: str) -> None:
        active.register(partition)
        most = max(n for n in self._plan.clients if n <= active.participant.most_clients)
        active.start_clients(most, partition, self._plan.client_rows)

    def _clients_run(self, active: ActiveParticipant, count: int, counts: bool) -> None:
        assert active.clients is not None
        seconds = self._plan.client_seconds if counts else self._plan.client_seconds / 4
        done: CyclesDone = active.clients.call("clients_run", count, seconds)
        active.reads.add(f"{count} clients", done.wrong, done.total)
        if counts:
            self.measured.add("clients", str(count), active.name, "cycles", done.counted / seconds)

    # The participants

    def _by_name(self, name: str) -> ActiveParticipant:
        return next(active for active in self._active if active.name == name)

    def _taking_part(self, part: str) -> list[ActiveParticipant]:
        return [active for active in self._active if part in active.participant.parts and not active.failure]

    def _shuffled(self, part: str) -> list[ActiveParticipant]:
        participants = self._taking_part(part)
        self._random.shuffle(participants)
        return participants

    def _rounds(self, part: str, count: int, title: str) -> Iterator[tuple[int, ActiveParticipant]]:
        """The number of each round and, for each, whoever takes part, in an order that changes."""
        for number in range(count):
            for active in self._shuffled(part):
                self._progress.show(title, number / count, active.name)
                yield number, active

    def _with(self, active: ActiveParticipant, step: Callable[..., Any], *args: Any) -> None:
        """Run a step of a participant. A peer that fails drops out; a failure of any other ends the run."""
        if active.failure:
            return
        try:
            step(active, *args)
        except WorkerError as error:
            if active.participant.peer is None:
                raise
            active.failure = str(error)
            self.notes.append(f"{active.name} dropped out: {error}")
