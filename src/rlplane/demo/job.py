"""One run of the demo: it starts the plane, the aggregator and the workers, replaces workers that die, and
at the end checks that every sample is accounted for."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlplane import DataPlaneClient, UnsupportedOperationError, build_data_plane_client, load_config
from rlplane.demo.progress import ProgressReader
from rlplane.demo.redirect import redirected
from rlplane.demo.settings import PROGRESS, ROLLOUTS, WEIGHTS, Settings, register_partitions
from rlplane.demo.workers import Worker, start_worker
from rlplane.metrics.launcher import start_aggregator

if TYPE_CHECKING:
    from rlplane.report import Report

__all__ = ["Death", "DemoError", "Job", "RunOutcome", "SampleBalance", "engine_config"]

EXEMPLARS = {
    ("local", "memory"): "local",
    ("local", "shm"): "shm",
    ("transfer_queue", "simple"): "cluster-simple",
    ("transfer_queue", "mooncake_cpu"): "cluster-mooncake",
}
INTERRUPTED_NAME = "interrupted.json"
ENGINE_LOG_NAME = "engine.log"
_REMAINING = "left over at the end"
_STOP_S = 30.0


class DemoError(Exception):
    """The run cannot go on."""


@dataclass
class Death:
    """A worker that was killed, the worker that replaced it, and the samples that others then finished."""

    worker: str
    pid: int
    at_s: float
    replaced_by: str
    handed_out_again: list[str] = field(default_factory=list)


@dataclass
class SampleBalance:
    """What became of the samples of the partition ``rollouts``: the trainer's count beside the plane's.

    ``kept`` samples are in the checkpoint of an interrupted run. ``lost`` ones should be in the plane and are
    not, ``unknown`` ones are there and should not be. ``left`` counts what is there after everything was
    cleared.
    """

    written: int
    written_by_plane: int
    cleared: dict[str, int]
    kept: int
    lost: list[str]
    unknown: list[str]
    left: int

    @property
    def balanced(self) -> bool:
        """Whether every sample is accounted for."""
        accounted = sum(self.cleared.values()) + self.kept
        return self.written == self.written_by_plane == accounted and not (
            self.lost or self.unknown or self.left
        )


@dataclass
class RunOutcome:
    """How a run ended. ``balance`` is None when it was interrupted before the trainer had begun."""

    state: str
    seconds: float
    steps: list[dict[str, Any]]
    deaths: list[Death]
    service_deaths: list[Death]
    balance: SampleBalance | None
    resumable: bool
    report: Report


def engine_config(impl: str, backend: str, name: str, metrics_address: str) -> dict[str, Any]:
    """The exemplar of the engine, small enough for any machine, with every operation measured."""
    observability = {"enabled": True, "metrics_address": metrics_address, "track_partitions": [ROLLOUTS]}
    sizes = {"global_segment_size": 256 << 20, "local_buffer_size": 16 << 20, "storage_capacity": 100_000}
    overrides = {**sizes, "observability": observability, "claim_meta_poll_interval_s": 0.02}
    if impl == "transfer_queue":
        # A plane of its own, also on a Ray where others have theirs.
        overrides["transfer_queue.namespace"] = f"rlplane-demo-{name}"
    return dict(load_config(EXEMPLARS[impl, backend], overrides))


class Job:
    """One run in one directory. :meth:`run` returns when it is done, or soon after :meth:`interrupt`."""

    def __init__(
        self,
        settings: Settings,
        run_dir: Path,
        *,
        impl: str = "local",
        backend: str = "shm",
        chaos_s: float | None = None,
        on_start: Callable[[Job], None] = lambda job: None,
        on_step: Callable[[dict[str, Any]], None] = lambda step: None,
        on_death: Callable[[Death], None] = lambda death: None,
    ) -> None:
        self.settings, self.run_dir = settings, run_dir
        self.impl, self.backend, self.chaos_s = impl, backend, chaos_s
        self.on_start, self.on_step, self.on_death = on_start, on_step, on_death
        self.workers: list[Worker] = []
        self.steps: list[dict[str, Any]] = []
        self.deaths: list[Death] = []
        self.service_deaths: list[Death] = []
        self._joined: set[str] = set()
        self._last_report: dict[str, Any] | None = None
        self._written_earlier = 0
        self._resumable = False
        self._interrupted = threading.Event()
        self._began = time.monotonic()

    def interrupt(self) -> None:
        """End in order: the step and the batches in hand are finished, then everything is saved."""
        self._interrupted.set()

    def run(self) -> RunOutcome:
        """Start everything, watch it to its end, and end everything, whatever happens."""
        aggregator = self.aggregator = start_aggregator(
            out_dir=self.run_dir,
            drain_timeout_s=10.0,
            jsonl=True,
            resume=(self.run_dir / INTERRUPTED_NAME).exists(),
        )
        try:
            config = engine_config(self.impl, self.backend, self.run_dir.name, aggregator.events_address)
            with self._start_plane(config) as client:
                self._open_plane(client)
                with self._ending_workers(), ProgressReader(client) as progress:
                    self._start_workers(client, config)
                    self.on_start(self)
                    self._watch(client, config, progress)
                    self._stop_workers(client, progress)
                    balance = self._balance_samples(client)
        except BaseException as error:
            aggregator.report_error(f"{type(error).__name__}: {error}")
            aggregator.interrupt()
            raise
        interrupted = self._interrupted.is_set()
        return RunOutcome(
            state="INTERRUPTED" if interrupted else "COMPLETE",
            seconds=time.monotonic() - self._began,
            steps=self.steps,
            deaths=self.deaths,
            service_deaths=self.service_deaths,
            balance=balance,
            resumable=self._resumable,
            report=aggregator.interrupt() if interrupted else aggregator.finish(),
        )

    def _start_plane(self, config: Mapping[str, Any]) -> DataPlaneClient:
        """Build the client that starts the engine, whose own log goes to a file and not over the display."""
        with (self.run_dir / ENGINE_LOG_NAME).open("ab") as log, redirected(2, log.fileno()):
            return build_data_plane_client(config)

    def _open_plane(self, client: DataPlaneClient) -> None:
        note = self.run_dir / INTERRUPTED_NAME
        if not note.exists():
            register_partitions(client, self.settings)
            return
        client.load_checkpoint(str(self.run_dir / "plane"))
        earlier = json.loads(note.read_text())
        self.steps += earlier["steps"]
        # An engine may count from the beginning or from the load: what matters is what comes after.
        self._written_earlier = earlier["written"] - client.partition_status(ROLLOUTS)["written"]
        note.unlink()

    def _start_workers(self, client: DataPlaneClient, config: Mapping[str, Any]) -> None:
        rollouts = [f"rollout-{number}" for number in range(self.settings.rollout_workers)]
        for name in ["train-0", *rollouts, "score-0"]:
            self.workers.append(start_worker(name, client, config, self.settings, self.run_dir))

    @contextlib.contextmanager
    def _ending_workers(self) -> Iterator[None]:
        try:
            yield
        finally:
            for worker in self.workers:
                worker.kill()
            for worker in self.workers:
                worker.join(_STOP_S)

    def _watch(self, client: DataPlaneClient, config: Mapping[str, Any], progress: ProgressReader) -> None:
        """Pass on what the trainer reports, and replace workers that were killed, until the trainer ends."""
        rng = random.Random(self.settings.seed)
        next_kill, steps_at_kill = time.monotonic() + (self.chaos_s or 0.0), len(self.steps)
        while self._last_report is None and not self._interrupted.is_set():
            self._read_report(client, progress, wait_s=0.2)
            for place, worker in enumerate(self.workers):
                if worker.exit_code is not None and self._last_report is None:
                    self.workers[place] = self._replace(worker, client, config, progress)
            # With a step in between, and none that has just been started again: a machine that starts workers
            # more slowly than we kill them would do nothing else.
            victims = [worker for worker in self.workers[1:] if worker.name in self._joined]
            may_kill = victims and len(self.steps) > steps_at_kill and time.monotonic() > next_kill
            if self.chaos_s is not None and may_kill:
                if self.backend == "shm" and len(self.deaths) > len(self.service_deaths):
                    self._kill_service(client)
                else:
                    rng.choice(victims).kill()
                next_kill = time.monotonic() + self.chaos_s * rng.uniform(0.5, 1.5)
                steps_at_kill = len(self.steps)

    def _kill_service(self, client: DataPlaneClient) -> None:
        """It comes back with everything in it, and nobody has to do anything."""
        pid = client.service_status()["pid"]  # type: ignore[attr-defined]
        os.kill(pid, signal.SIGKILL)
        at_s = round(time.monotonic() - self._began, 2)
        self.service_deaths.append(Death("the control service", pid, at_s, "a new one with its journal"))
        self.on_death(self.service_deaths[-1])

    def _read_report(self, client: DataPlaneClient, progress: ProgressReader, wait_s: float) -> bool:
        """Handle the next report of a worker; whether one came within ``wait_s``."""
        report = progress.next(wait_s)
        if report is None:
            return False
        if "joined" in report:
            self._joined.add(report["joined"])
        elif "done" in report:
            self._last_report = report
        else:
            for death in self.deaths:
                death.handed_out_again += report["handed_out_again"].get(death.worker, [])
            # As in every view: all partitions together.
            held = (client.partition_status(name)["bytes"] for name in (ROLLOUTS, WEIGHTS, PROGRESS))
            report["bytes_held"] = sum(held)
            self.steps.append(report)
            self.on_step(report)
        return True

    def _replace(
        self, worker: Worker, client: DataPlaneClient, config: Mapping[str, Any], progress: ProgressReader
    ) -> Worker:
        code = worker.exit_code
        if worker.name.startswith("train") and code == 0 and self._read_report(client, progress, _STOP_S):
            return worker  # its last report was still on its way
        if code is None or code >= 0 or worker.name.startswith("train"):
            log = self.run_dir / f"{worker.name}.log"
            lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
            reason = f": {lines[-1]}" if lines else ""
            raise DemoError(f"{worker.name} ended with exit code {code}{reason} (see {log})")
        base, _, generation = worker.name.partition(".")
        name = f"{base}.{int(generation or 0) + 1}"
        death = Death(worker.name, worker.pid, round(time.monotonic() - self._began, 2), name)
        self.deaths.append(death)
        self.on_death(death)
        return start_worker(name, client, config, self.settings, self.run_dir)

    def _stop_workers(self, client: DataPlaneClient, progress: ProgressReader) -> None:
        """Stop the trainer first, which has a step to finish and needs the others for it; then the others."""
        trainer, *others = self.workers
        for group in ([trainer], others):
            for worker in group:
                worker.stop()
            deadline = time.monotonic() + _STOP_S
            for worker in group:
                if not worker.join(max(0.0, deadline - time.monotonic())):
                    raise DemoError(f"{worker.name} (process {worker.pid}) did not stop in {_STOP_S:g} s")
        progress.finish()
        while self._read_report(client, progress, wait_s=0.0):
            pass

    def _balance_samples(self, client: DataPlaneClient) -> SampleBalance | None:
        """Compare what the trainer has in flight with what is in the plane, then save or clear that."""
        last = self._last_report
        if last is None:
            return None
        expected, live = set(last["in_flight"]), set(client.list_sample_ids(ROLLOUTS))
        balance = SampleBalance(
            written=last["prompts"] * self.settings.group_size,
            written_by_plane=client.partition_status(ROLLOUTS)["written"] + self._written_earlier,
            cleared=dict(last["cleared"]),
            kept=0,
            lost=sorted(expected - live),
            unknown=sorted(live - expected),
            left=0,
        )
        if self._interrupted.is_set():
            balance.kept = len(live & expected)
            self._save(client, balance.written)
            return balance
        balance.cleared[_REMAINING] = len(live & expected)
        for partition in (ROLLOUTS, WEIGHTS, PROGRESS):
            ids = client.list_sample_ids(partition)
            if ids:
                client.clear_samples(ids, partition)
            balance.left += client.partition_status(partition)["samples"]
        return balance

    def _save(self, client: DataPlaneClient, written: int) -> None:
        try:
            client.save_checkpoint(str(self.run_dir / "plane"))
        except UnsupportedOperationError:
            return
        note = {"steps": self.steps, "written": written, "impl": self.impl, "backend": self.backend}
        settings = {"settings": asdict(self.settings)}
        (self.run_dir / INTERRUPTED_NAME).write_text(json.dumps({**note, **settings}))
        self._resumable = True
