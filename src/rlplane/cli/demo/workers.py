"""Where the stages run: as threads, as processes, or as Ray actors. Their code is the same in each.

``python -m rlplane.cli.demo.workers`` is a worker process: it reads what it is to do from stdin, works until
SIGTERM, and then ends the batch that it has in hand.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch

from rlplane import DataPlaneClient, PlaneConnectionError, build_data_plane_client
from rlplane_examples.grpo.settings import PROGRESS, Settings, Stop
from rlplane_examples.grpo.stages import rollout, score
from rlplane_examples.grpo.trainer import train

__all__ = ["Worker", "start_worker"]

_STAGES: dict[str, Callable[..., None]] = {"rollout": rollout, "score": score, "train": train}
# Where cores are few, the trainer and the plane go first, and rollouts take what is left.
_NICENESS = {"train": 0, "score": 5, "rollout": 10}
_Order = dict[str, Any]


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
    order = {
        "name": name,
        "config": {**config, "observability": observability},
        "settings": asdict(settings),
        "extra": {},
    }
    if name.startswith("train"):
        checkpoint = run_dir / "trainer.pt"
        order["extra"] = {"checkpoint": str(checkpoint), "resume": checkpoint.exists()}
    log = run_dir / f"{name}.log"
    if config["backend"] == "memory":
        return ThreadWorker(order, client, log)
    return ProcessWorker(order, log) if config["impl"] == "local" else RayWorker(order, log)


class ThreadWorker:
    """For the memory engine: all stages share one client, which is safe."""

    def __init__(self, order: _Order, client: DataPlaneClient, log: Path) -> None:
        self.name, self.pid = order["name"], os.getpid()
        self.exit_code: int | None = None
        self._log = log
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(order, client), name=self.name, daemon=True)
        self._thread.start()

    def _run(self, order: _Order, client: DataPlaneClient) -> None:
        try:
            _run_stage(order, client, self._stop.is_set)
            self.exit_code = 0
        except BaseException:
            self._log.write_text(traceback.format_exc())
            self.exit_code = 1

    def stop(self) -> None:
        self._stop.set()

    def kill(self) -> None:
        # It cannot be done to a thread; as a daemon it ends with the process.
        self._stop.set()

    def join(self, timeout_s: float) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()


class ProcessWorker:
    """For shared memory: a process of its own, in a group of its own, so that Ctrl-C in the terminal goes to
    the job alone, which then ends its workers in order. Not in a session of its own: Linux shares the cores
    out among sessions, and then a worker's niceness would not count beside the others."""

    def __init__(self, order: _Order, log: Path) -> None:
        self.name = order["name"]
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "rlplane.cli.demo.workers"],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                process_group=0,
            )
        self.pid = self._process.pid
        assert self._process.stdin is not None
        with self._process.stdin as pipe:
            pipe.write(json.dumps(order).encode())

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    def stop(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()

    def join(self, timeout_s: float) -> bool:
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True


class RayWorker:
    """For a cluster: an actor. Ray carries the orders to start and to stop, and nothing else."""

    def __init__(self, order: _Order, log: Path) -> None:
        import ray

        self.name, self._ray, self._log = order["name"], ray, log
        # Two calls at once: ``stop`` has to get through while ``run`` goes on.
        self._actor = ray.remote(StageActor).options(num_cpus=0, max_concurrency=2).remote()
        self.pid = ray.get(self._actor.pid.remote())
        self._run = self._actor.run.remote(order)

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

    def run(self, order: _Order) -> None:
        _run_alone(order, self._stop.is_set)


def _run_alone(order: _Order, stop: Stop) -> None:
    """Join the plane, run the stage, leave the plane."""
    torch.set_num_threads(1)  # the workers have the machine's cores to share
    os.nice(_NICENESS[order["name"].split("-")[0]])
    with build_data_plane_client(order["config"], bootstrap=False) as client:
        _run_stage(order, client, stop)


def _run_stage(order: _Order, client: DataPlaneClient, stop: Stop) -> None:
    client.put_samples([f"joined-{order['name']}"], PROGRESS, None, [{"joined": order["name"]}])
    stage = _STAGES[order["name"].split("-")[0]]
    stage(client, Settings(**order["settings"]), order["name"], stop, **order["extra"])


def main() -> None:
    """A worker process."""
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    order = json.load(sys.stdin)
    try:
        _run_alone(order, stopping.is_set)
    except PlaneConnectionError as error:
        # The plane has gone, and with it the job: there is nobody to work for.
        sys.exit(f"{order['name']}: {error}")


if __name__ == "__main__":
    main()
