"""What the cluster bench measures when: the engines alternate, in an order that changes every round, so that
whatever else the machine does affects both alike. The first round of each part warms up and does not count.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Sequence

from rlplane_benchmarks.cluster.driver import CyclesMeasured, WakeMeasured
from rlplane_benchmarks.cluster.plan import ClusterPlan
from rlplane_benchmarks.cluster.targets import CLUSTER_TARGETS
from rlplane_benchmarks.measurements import Measurements
from rlplane_benchmarks.participants import Participant
from rlplane_benchmarks.progress import Progress
from rlplane_benchmarks.ray_cluster import ray_environment
from rlplane_benchmarks.read_checks import ReadChecks
from rlplane_benchmarks.results import (
    CLUSTER_SCHEMA,
    SCHEMA_VERSION,
    BenchResult,
    describe_machine,
    notes_about,
)
from rlplane_benchmarks.targets import judge
from rlplane_benchmarks.worker_process import WorkerProcess

__all__ = ["run_cluster_bench"]

_DRIVER = "rlplane_benchmarks.cluster.driver:ClusterDriver"
# A claim that was called this long before the put was waiting for it.
_SURELY_WAITING_S = 0.001
_WARM_UP_WAKES = 5


def run_cluster_bench(
    plan: ClusterPlan,
    participants: Sequence[Participant],
    *,
    backend: str,
    quick: bool = False,
    scale: float = 1.0,
    progress: Progress | None = None,
) -> BenchResult:
    """Measure the participants on one Ray that a process of its own starts, and judge the targets.

    Raises:
        WorkerError: An engine failed, so that there is nothing to compare.
    """
    progress = progress or Progress(None)
    started_at, started = time.time(), time.perf_counter()
    load_before = os.getloadavg()[0]
    driver = WorkerProcess("the driver of the cluster", ray_environment(), _DRIVER)
    with contextlib.closing(driver):
        run = _ClusterRun(plan, participants, driver, progress)
        progress.say("starting Ray, the engines and their clients")
        # Two at least: one that waits in a claim, and one that puts.
        clients = max(2, *plan.clients)
        driver.call("open", {participant.name: participant.store for participant in participants}, clients)
        torch_version, threads = driver.call("torch")
        run.batches()
        run.wakes()
        run.cycles()
        progress.say("ending Ray")
    progress.done()
    machine = describe_machine(torch_version, threads, load_before, os.getloadavg()[0])
    result = BenchResult(
        schema=CLUSTER_SCHEMA,
        schema_version=SCHEMA_VERSION,
        started_at=started_at,
        elapsed_s=time.perf_counter() - started,
        quick=quick,
        scale=scale,
        peers=[],
        machine=machine,
        workloads={workload.name: workload.title for workload in plan.batches},
        participants={participant.name: participant.title for participant in participants},
        series=run.measured.series(),
        checks=[checks.result() for checks in run.checks.values()],
        targets=[],
        notes=notes_about(machine, scale),
        backend=backend,
    )
    result.targets.extend(judge(result, CLUSTER_TARGETS))
    return result


class _ClusterRun:
    """The parts of a run, and what they measured."""

    def __init__(
        self,
        plan: ClusterPlan,
        participants: Sequence[Participant],
        driver: WorkerProcess,
        progress: Progress,
    ) -> None:
        self._plan, self._driver, self._progress = plan, driver, progress
        self._engines = [participant.name for participant in participants]
        self.measured = Measurements()
        self._random = random.Random(7)
        self.checks = {engine: ReadChecks(engine) for engine in self._engines}

    def batches(self) -> None:
        """Put, get and clear of whole batches, by one client."""
        for engine in self._engines:
            self._progress.say(f"making the batches of {engine}")
            self.measured.sizes.update(self._driver.call("call", engine, "prepare", self._plan.batches))
        steps = [(number, w) for number in range(self._plan.batch_rounds + 1) for w in self._plan.batches]
        for at, (number, workload) in enumerate(steps):
            for engine in self._shuffled():
                self._progress.show(workload.title, at / len(steps), engine)
                self._batch(engine, workload.name, number)
        for engine in self._engines:
            self._driver.call("call", engine, "forget")

    def _batch(self, engine: str, name: str, number: int) -> None:
        put_s = self._driver.call("call", engine, "put", name, number)
        got = self._driver.call("call", engine, "get", name, number, False)
        clear_s = self._driver.call("call", engine, "clear", name, number)
        self.checks[engine].add(f"{name}, get, round {number}", got["wrong"])
        seconds = {
            "put": put_s,
            "get": got["call"],
            "get+touch": got["touched"],
            "get drop": got["drop"],
            "clear": clear_s,
        }
        for op, value in seconds.items() if number else ():
            self.measured.add("data", name, engine, op, value)

    def wakes(self) -> None:
        """From the call of a put to the return of a claim that another client was waiting in."""
        rounds = self._plan.wakes + _WARM_UP_WAKES
        for number in range(rounds):
            for engine in self._shuffled():
                self._progress.show("a put wakes a waiting claim", number / rounds, engine)
                found: WakeMeasured = self._driver.call("wake", engine, number)
                self.checks[engine].add("wake", found.wrong)
                waited = found.put_called - found.claim_called > _SURELY_WAITING_S
                if waited and number >= _WARM_UP_WAKES:
                    seconds = found.claim_returned - found.put_called
                    self.measured.add("wake", "wake", engine, "put to claim", seconds)

    def cycles(self) -> None:
        """Cycles of put, claim, get and clear per second, and the control service's CPU time for one."""
        plan = self._plan
        for number in range(plan.client_rounds + 1):
            for count in self._random.sample(plan.clients, len(plan.clients)):
                for engine in self._shuffled():
                    title = f"{count} client{'s' * (count > 1)} at once"
                    self._progress.show(title, number / (plan.client_rounds + 1), engine)
                    self._cycles(engine, count, counts=number > 0)

    def _cycles(self, engine: str, count: int, *, counts: bool) -> None:
        # The warm-up is shorter: every client has to have worked once.
        seconds = self._plan.client_seconds / (1 if counts else 4)
        found: CyclesMeasured = self._driver.call("cycles", engine, count, self._plan.client_rows, seconds)
        self.checks[engine].add(f"{count} clients", found.done.wrong, found.done.total)
        if counts:
            self.measured.add("clients", str(count), engine, "cycles", found.done.counted / seconds)
            cpu = found.control_cpu_s / found.done.total
            self.measured.add("control", str(count), engine, "CPU per cycle", cpu)

    def _shuffled(self) -> list[str]:
        return self._random.sample(self._engines, len(self._engines))
