"""One run of the demo: it starts the plane, the aggregator and the workers, replaces workers that die, and
at the end checks that every sample is accounted for."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlplane import DataPlaneClient, UnknownPartitionError, build_data_plane_client, load_config
from rlplane.adapters.checkpoint import latest_checkpoint
from rlplane.config import EXEMPLAR_OF
from rlplane.demo.progress import ProgressReader, steps_in
from rlplane.demo.redirect import redirected
from rlplane.demo.settings import PROGRESS, ROLLOUTS, WEIGHTS, Settings, register_partitions
from rlplane.demo.workers import Worker, prepare_processes, start_worker
from rlplane.metrics.launcher import start_aggregator
from rlplane.metrics.publisher import FINAL_SNAPSHOT_NAME

if TYPE_CHECKING:
    from rlplane.report import Report

RUN_NAME, PLANE_NAME, CHECKPOINTS_NAME = "run.json", "plane", "checkpoints"
ENGINE_LOG_NAME = "engine.log"
_REMAINING = "left over at the end"
_STOP_S = 120.0


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
    cleared. ``prompts`` is how many prompts were issued, whether once or again.
    """

    prompts: int
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


def engine_config(
    impl: str, backend: str, run_dir: Path, metrics_address: str, checkpoint_s: float
) -> dict[str, Any]:
    """The exemplar of the engine, small enough for any machine, with every operation measured and with
    checkpoints that the plane saves by itself."""
    observability = {"enabled": True, "metrics_address": metrics_address, "track_partitions": [ROLLOUTS]}
    sizes = {"global_segment_size": 256 << 20, "local_buffer_size": 16 << 20, "storage_capacity": 100_000}
    overrides = {**sizes, "observability": observability, "claim_meta_poll_interval_s": 0.02}
    overrides["checkpoint"] = {"dir": str(run_dir / CHECKPOINTS_NAME), "every_s": checkpoint_s, "keep": 2}
    if impl == "transfer_queue":
        # A plane of its own, also on a Ray where others have theirs.
        overrides["transfer_queue.namespace"] = f"rlplane-demo-{run_dir.name}"
    return dict(load_config(EXEMPLAR_OF[backend], overrides))


def checkpoint_of(run_dir: Path) -> Path | None:
    """The newest checkpoint of a run that did not end by itself: one that the plane saved by itself, or the
    one from before, which Ctrl-C has left."""
    whole = run_dir / PLANE_NAME
    return latest_checkpoint(run_dir / CHECKPOINTS_NAME) or (whole if whole.exists() else None)


def earlier_run(run_dir: Path) -> dict[str, Any] | None:
    """The engine and the settings of a run that can be resumed; None: there is none."""
    if checkpoint_of(run_dir) is None:
        return None
    earlier: dict[str, Any] = json.loads((run_dir / RUN_NAME).read_text())
    return earlier


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
        checkpoint_s: float = 5.0,
        on_start: Callable[[Job], None] = lambda job: None,
        on_step: Callable[[dict[str, Any]], None] = lambda step: None,
        on_death: Callable[[Death], None] = lambda death: None,
    ) -> None:
        self.settings, self.run_dir = settings, run_dir
        self.impl, self.backend = impl, backend
        self.chaos_s, self.checkpoint_s = chaos_s, checkpoint_s
        self.on_start, self.on_step, self.on_death = on_start, on_step, on_death
        self.workers: list[Worker] = []
        self.steps: list[dict[str, Any]] = []
        self.deaths: list[Death] = []
        self.service_deaths: list[Death] = []
        self._joined: set[str] = set()
        self._last_report: dict[str, Any] | None = None
        self._resumable = False
        self._interrupted = threading.Event()
        self._began = time.monotonic()

    def interrupt(self) -> None:
        """End in order: the step and the batches in hand are finished, then everything is saved."""
        self._interrupted.set()

    def run(self) -> RunOutcome:
        """Start everything, watch it to its end, and end everything, whatever happens."""
        checkpoint = checkpoint_of(self.run_dir)
        note = {"impl": self.impl, "backend": self.backend, "settings": asdict(self.settings)}
        (self.run_dir / RUN_NAME).write_text(json.dumps(note))
        if self.backend == "shm":
            prepare_processes()  # by the time that there is a plane it is ready
        # A run that was killed as a whole has no final snapshot: what it measured until then is gone.
        measured = checkpoint is not None and (self.run_dir / FINAL_SNAPSHOT_NAME).exists()
        aggregator = self.aggregator = start_aggregator(
            out_dir=self.run_dir, drain_timeout_s=10.0, jsonl=True, resume=measured
        )
        try:
            config = engine_config(
                self.impl, self.backend, self.run_dir, aggregator.events_address, self.checkpoint_s
            )
            with self._start_plane(config) as client:
                self._open_plane(client, checkpoint)
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
        # From here on there is a later one, or nothing to resume.
        shutil.rmtree(self.run_dir / CHECKPOINTS_NAME, ignore_errors=True)
        if not interrupted:
            shutil.rmtree(self.run_dir / PLANE_NAME, ignore_errors=True)
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

    def _open_plane(self, client: DataPlaneClient, checkpoint: Path | None) -> None:
        if checkpoint is None:
            register_partitions(client, self.settings)
            return
        client.load_checkpoint(str(checkpoint), release_claims=True)
        try:
            reports = client.list_sample_ids(PROGRESS)
        except UnknownPartitionError:  # the plane was saved before it had its partitions
            register_partitions(client, self.settings)
            return
        self.steps += steps_in(client)
        # Reports of workers that are gone.
        client.clear_samples([name for name in reports if not name.startswith("step-")], PROGRESS)

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
        elif report["step"] == len(self.steps) + 1:  # else it was told before the run was resumed
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
        interrupted = self._interrupted.is_set()
        if interrupted:
            client.save_checkpoint(str(self.run_dir / PLANE_NAME))
            self._resumable = True
        expected, live = set(last["in_flight"]), set(client.list_sample_ids(ROLLOUTS))
        # Too old when they were written, after the trainer's last look.
        evicted = set(client.evicted_meta(ROLLOUTS).sample_ids)
        balance = SampleBalance(
            prompts=last["prompts"],
            written=last["written"],
            written_by_plane=client.partition_status(ROLLOUTS)["written"],
            cleared=dict(last["cleared"]),
            kept=0,
            lost=sorted(expected - live - evicted),
            unknown=sorted((live | evicted) - expected),
            left=0,
        )
        if interrupted:
            balance.kept = len((live | evicted) & expected)
            return balance
        balance.cleared[_REMAINING] = len((live | evicted) & expected)
        for partition in (ROLLOUTS, WEIGHTS, PROGRESS):
            ids = client.list_sample_ids(partition)
            if ids:
                client.clear_samples(ids, partition)
            balance.left += client.partition_status(partition)["samples"]
        return balance
