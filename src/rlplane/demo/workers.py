"""Where the stages run: as threads, as processes, or as Ray actors. Their code is the same in each."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any, Protocol

import torch

from rlplane import DataPlaneClient, PlaneConnectionError, build_data_plane_client
from rlplane.demo.settings import PROGRESS, Settings, Stop
from rlplane.demo.stages import rollout, score
from rlplane.demo.trainer import train
from rlplane.interfaces import ADDRESS_VARIABLE

_STAGES: dict[str, Callable[..., None]] = {"rollout": rollout, "score": score, "train": train}
# Where cores are few, the trainer and the plane go first, and rollouts get the rest of the CPU time.
_NICENESS = {"train": 0, "score": 5, "rollout": 10}
_Assignment = dict[str, Any]


class Worker(Protocol):
    """A running stage."""

    name: str
    pid: int

    @property
    def exit_code(self) -> int | None:
        """None while it runs, 0 when it ended well, negative when a signal ended it."""

    def stop(self) -> None:
        """Ask it to end after the batch that it has in hand."""

    def kill(self) -> None:
        """End it now, with SIGKILL."""

    def join(self, timeout_s: float) -> bool:
        """Wait for its end; whether it came in time."""


def start_worker(
    name: str, client: DataPlaneClient, config: Mapping[str, Any], settings: Settings, run_dir: Path
) -> Worker:
    """Start a stage in the way that fits the engine. ``name`` is the stage's and a number: ``rollout-0``."""
    observability = {**config["observability"], "role": name}
    assignment = {
        "name": name,
        "config": {**config, "observability": observability},
        "settings": asdict(settings),
    }
    log = run_dir / f"{name}.log"
    if config["backend"] == "memory":
        return ThreadWorker(assignment, client, log)
    return ProcessWorker(assignment, log) if config["impl"] == "local" else RayWorker(assignment, log)


class ThreadWorker:
    """For the memory engine: all stages share one client, which is safe."""

    def __init__(self, assignment: _Assignment, client: DataPlaneClient, log: Path) -> None:
        self.name, self.pid = assignment["name"], os.getpid()
        self.exit_code: int | None = None
        self._log = log
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(assignment, client), name=self.name, daemon=True
        )
        self._thread.start()

    def _run(self, assignment: _Assignment, client: DataPlaneClient) -> None:
        try:
            _run_stage(assignment, client, self._stop.is_set)
            self.exit_code = 0
        except BaseException:
            self._log.write_text(traceback.format_exc())
            self.exit_code = 1

    def stop(self) -> None:
        self._stop.set()

    def kill(self) -> None:
        # A thread cannot be killed; being a daemon, it ends with the process.
        self._stop.set()

    def join(self, timeout_s: float) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()


class ProcessWorker:
    """For shared memory: a process of its own. Not in a session of its own: Linux shares the cores out among
    sessions, and then a worker's niceness would not count beside the others."""

    def __init__(self, assignment: _Assignment, log: Path) -> None:
        self.name = assignment["name"]
        prepare_processes()
        # What the processes are forked from was there before the plane, and has not inherited its address.
        address = {"controller_address": os.environ[ADDRESS_VARIABLE]}
        assignment = {**assignment, "config": {**assignment["config"], **address}}
        # Daemon: should the job fail in an unforeseen way, its end does not wait for this one.
        self._process = _FORKS.Process(
            target=_work_in_process, args=(assignment, log), name=self.name, daemon=True
        )
        self._process.start()
        self.pid = self._process.pid or 0

    @property
    def exit_code(self) -> int | None:
        return self._process.exitcode

    def stop(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()

    def join(self, timeout_s: float) -> bool:
        self._process.join(timeout_s)
        return self._process.exitcode is not None


# To load torch takes seconds of CPU time. One process does it for all workers, which are forked from it. It
# does nothing else, so there is no lock, socket or half-done computation that a fork could copy.
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload([__name__])


def prepare_processes() -> None:
    """Start the process that workers are forked from, unless it runs; it needs some seconds to be ready."""
    resource_tracker.ensure_running()  # which would unblock below what is blocked
    # What is blocked here is blocked in that process and in the workers: Ctrl-C in the terminal goes to the
    # job alone, which then ends them in order.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class RayWorker:
    """For a cluster: an actor. Ray carries the requests to start and to stop, and nothing else."""

    def __init__(self, assignment: _Assignment, log: Path) -> None:
        import ray

        self.name, self._ray, self._log = assignment["name"], ray, log
        # Two calls at once: ``stop`` has to get through while ``run`` goes on.
        self._actor = ray.remote(StageActor).options(num_cpus=0, max_concurrency=2).remote()
        self.pid = ray.get(self._actor.pid.remote())
        self._run = self._actor.run.remote(assignment)

    @property
    def exit_code(self) -> int | None:
        if not self.join(0):
            return None
        try:
            self._ray.get(self._run)
        except self._ray.exceptions.RayActorError:
            return -signal.SIGKILL
        except self._ray.exceptions.RayError as error:
            self._log.write_text(str(error))
            return 1
        return 0

    def stop(self) -> None:
        self._actor.stop.remote()

    def kill(self) -> None:
        self._ray.kill(self._actor)

    def join(self, timeout_s: float) -> bool:
        done, _ = self._ray.wait([self._run], timeout=timeout_s)
        return bool(done)


class StageActor:
    """What runs inside a Ray actor."""

    def __init__(self) -> None:
        self._stop = threading.Event()

    def pid(self) -> int:
        return os.getpid()

    def stop(self) -> None:
        self._stop.set()

    def run(self, assignment: _Assignment) -> None:
        _run_with_own_client(assignment, self._stop.is_set)


def _run_with_own_client(assignment: _Assignment, stop: Stop) -> None:
    """Join the plane, run the stage, leave the plane."""
    torch.set_num_threads(1)  # the workers have the machine's cores to share
    os.nice(_NICENESS[assignment["name"].split("-")[0]])
    with build_data_plane_client(assignment["config"], bootstrap=False) as client:
        _run_stage(assignment, client, stop)


def _run_stage(assignment: _Assignment, client: DataPlaneClient, stop: Stop) -> None:
    client.put_samples([f"joined-{assignment['name']}"], PROGRESS, None, [{"joined": assignment["name"]}])
    stage = _STAGES[assignment["name"].split("-")[0]]
    stage(client, Settings(**assignment["settings"]), assignment["name"], stop)


def _work_in_process(assignment: _Assignment, log: Path) -> None:
    """Work until SIGTERM, then finish the batch in hand."""
    with log.open("ab") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    try:
        _run_with_own_client(assignment, stopping.is_set)
    except PlaneConnectionError as error:
        # The plane ends with the job, so there is nothing left to do.
        sys.exit(f"{assignment['name']}: {error}")
