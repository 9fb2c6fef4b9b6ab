"""The process that starts Ray, both engines and their clients, and that runs one measurement at a time."""

from __future__ import annotations

import contextlib
import time
from typing import Any, NamedTuple

from rlplane_benchmarks.cluster.client_actor import ClientActor, client_partition
from rlplane_benchmarks.cpu_time import cpu_seconds
from rlplane_benchmarks.cycles import CyclesDone
from rlplane_benchmarks.ray_cluster import end_ray, start_ray
from rlplane_benchmarks.worker import Worker

__all__ = ["ClusterDriver", "CyclesMeasured", "WakeMeasured"]

_OBJECT_STORE_BYTES = 200 << 20
_START_TIMEOUT_S = 240.0
_ANSWER_TIMEOUT_S = 120.0
# Ray needs a moment to call all clients, and the first cycles of idle processes are slow.
_CALL_S, _WARM_UP_S = 0.1, 0.4
# The put of a wake waits this long, so that the claim is surely waiting by then.
_PUT_PAUSE_S = 0.01
_WAKE_PARTITION = "wake"


class CyclesMeasured(NamedTuple):
    """Cycles of several clients, and what they cost the control service."""

    done: CyclesDone
    control_cpu_s: float
    """CPU time of the control service for all cycles, with those of the warm-up."""


class WakeMeasured(NamedTuple):
    """A claim that waited for a put; the times are those of ``time.perf_counter``."""

    claim_called: float
    put_called: float
    claim_returned: float
    wrong: str | None


class ClusterDriver:
    """Every public method is a command of the :class:`~rlplane_benchmarks.worker_process.WorkerProcess`."""

    def __init__(self) -> None:
        self._workers: dict[str, Worker] = {}
        self._clients: list[Any] = []
        self._control_pids: dict[str, int] = {}

    def open(self, stores: dict[str, str], clients: int) -> None:
        """Start Ray, then each engine, then Ray actors that are clients of all of them."""
        import ray

        start_ray(_OBJECT_STORE_BYTES)
        joining: dict[str, tuple[str, dict[str, Any]]] = {}
        for name, store in stores.items():
            worker = self._workers[name] = Worker()
            joining[name] = (store, worker.open(store, "producer", {}))
            self._control_pids[name] = worker.control_pid()
            for partition in (_WAKE_PARTITION, *map(client_partition, range(clients))):
                worker.register(partition)
        # They ask for no CPU: there are more of them than cores, and they are meant to run at the same time.
        actor = ray.remote(num_cpus=0)(ClientActor)
        self._clients = [actor.remote(number) for number in range(clients)]
        ray.get([client.open.remote(joining) for client in self._clients], timeout=_START_TIMEOUT_S)

    def call(self, engine: str, command: str, *args: Any) -> Any:
        """Run a command of :class:`~rlplane_benchmarks.worker.Worker` on one engine, in this process."""
        return getattr(self._workers[engine], command)(*args)

    def cycles(self, engine: str, count: int, rows: int, seconds: float) -> CyclesMeasured:
        """Let the first ``count`` clients run cycles at the same time."""
        import ray

        control = self._control_pids[engine]
        before = cpu_seconds(control)
        begin = time.perf_counter() + _CALL_S
        start = begin + _WARM_UP_S
        calls = [
            client.cycles.remote(engine, rows, begin, start, start + seconds)
            for client in self._clients[:count]
        ]
        done = CyclesDone.sum(ray.get(calls, timeout=seconds + _ANSWER_TIMEOUT_S))
        return CyclesMeasured(done, cpu_seconds(control) - before)

    def wake(self, engine: str, number: int) -> WakeMeasured:
        """Put a row while another client waits for it in a claim."""
        import ray

        reader, writer = self._clients[:2]
        numbers = range(number, number + 1)
        claim = reader.call.remote(engine, "claim", _WAKE_PARTITION, 1, _ANSWER_TIMEOUT_S)
        put = writer.call.remote(engine, "put_tiny", _WAKE_PARTITION, numbers, _PUT_PAUSE_S)
        (called, returned, _), (put_called, _) = ray.get([claim, put], timeout=2 * _ANSWER_TIMEOUT_S)
        check = reader.call.remote(engine, "check_claimed", _WAKE_PARTITION, numbers)
        wrong = ray.get(check, timeout=_ANSWER_TIMEOUT_S)
        return WakeMeasured(called, put_called, returned, wrong)

    def torch(self) -> tuple[str, int]:
        """Torch's version and its number of threads, here."""
        return Worker().torch()

    def close(self) -> None:
        """End the clients, the engines and Ray."""
        if self._clients:
            import ray

            with contextlib.suppress(Exception):  # whatever is left ends with Ray
                ray.get([client.close.remote() for client in self._clients], timeout=20)
        for worker in reversed(self._workers.values()):
            worker.close()
        end_ray()
