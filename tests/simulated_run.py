"""Snapshots of simulated runs, for tests of the viewers: plausible, reproducible, of any size.

A :class:`SimulatedRun` keeps counters, distributions and samples in flight as a run would, and returns a
``MetricsSnapshot`` for each :meth:`~SimulatedRun.step`. A :class:`SnapshotServer` publishes them at an
address, as an aggregator does. Nothing here needs torch, nor a plane.
"""

from __future__ import annotations

import math
import queue
import threading
from collections import deque
from collections.abc import Iterable
from typing import Self

import numpy as np
import numpy.typing as npt

from rlplane.metrics.events import FlowStat
from rlplane.metrics.snapshot import (
    GRIDS,
    PERCENTILES,
    CounterStat,
    GaugeStat,
    LogLine,
    MetricsSnapshot,
    MetricsSnapshotCodec,
    PartitionStat,
    SampleAge,
    SeriesStat,
    SeriesSummary,
    SessionState,
    Stat,
    StepOpStat,
    StepStat,
    StepTotals,
    TaskStat,
    TimelinePoint,
    WorkerOpStat,
    WorkerStat,
)
from rlplane.transport import ZmqMessagePublisher

__all__ = ["SimulatedRun", "SnapshotServer", "series_of"]

_SECOND = 1_000_000_000
# op: (operations per second and worker, samples per operation, bytes per sample, median latency in ns)
_OPS = {
    "put": (6.0, 8, 26_000, 640_000),
    "claim_meta": (4.0, 8, 0, 310_000),
    "get_data": (4.0, 8, 26_000, 480_000),
    "clear": (2.0, 16, 0, 150_000),
}


class SimulatedRun:
    """A run with ``partitions`` × ``tasks`` and some workers, in steps of time.

    Args:
        partitions: Their names.
        tasks: The consumer tasks of every partition, in the order in which samples pass them.
        workers: How many worker processes.
        slow_task: A task that keeps up with only half of what arrives, so that samples pile up before it.
        seed: The same seed gives the same run.
    """

    def __init__(
        self,
        partitions: Iterable[str] = ("rollouts", "weights"),
        tasks: Iterable[str] = ("reward", "logprob", "train"),
        workers: int = 4,
        *,
        run_id: str = "simulated-run",
        slow_task: str | None = None,
        started_ns: int = 1_700_000_000 * _SECOND,
        capacity_samples: int | None = 20_000,
        seed: int = 0,
    ) -> None:
        self.run_id = run_id
        self.partitions = list(partitions)
        self.tasks = list(tasks)
        self.n_workers = workers
        self.slow_task = slow_task
        self.started_ns = started_ns
        self.capacity_samples = capacity_samples
        self.state = SessionState.LIVE
        self.elapsed_s = 0.0
        self._random = np.random.default_rng(seed)
        self._seq = 0
        self._counters: dict[tuple[str, tuple[tuple[str, str], ...]], list[float]] = {}
        self._values: dict[tuple[str, tuple[tuple[str, str], ...]], list[npt.NDArray[np.float64]]] = {}
        self._written = dict.fromkeys(self.partitions, 0.0)
        self._claimed = {(name, task): 0.0 for name in self.partitions for task in self.tasks}
        self._cleared = dict.fromkeys(self.partitions, 0.0)
        self._peak = dict.fromkeys(self.partitions, 0)
        self._timeline: deque[TimelinePoint] = deque(maxlen=360)
        self._log: deque[LogLine] = deque(maxlen=100)
        self._failures = 0
        self.flow: FlowStat | None = FlowStat(
            "ready_first", 7, 2, 640, 24, {"stale": 16, "timeout": 3}, {"cancelled": 2}
        )

    def step(self, seconds: float = 1.0, state: SessionState | None = None) -> MetricsSnapshot:
        """Let time pass and return the snapshot at its end."""
        self.pass_time(seconds)
        self.state = state or self.state
        return self._snapshot()

    def pass_time(self, seconds: float = 1.0) -> None:
        """Let time pass without making a snapshot, which is the expensive part."""
        self.elapsed_s += seconds
        self._seq += 1
        for (name, _), entry in self._counters.items():
            if name == "op_failures":
                entry[1] = 0.0
        wave = 1 + 0.25 * math.sin(self.elapsed_s / 7) + 0.05 * self._random.standard_normal()
        share = self.n_workers / len(self.partitions)
        before = dict(self._written), dict(self._claimed), dict(self._cleared)
        for name in self.partitions:
            self._flow(name, 40.0 * share * wave * seconds, seconds)
        ops = 0.0
        for op, (rate, keys, size, median) in _OPS.items():
            count = rate * self.n_workers * wave * seconds
            ops += count
            self._record("op_latency", "ns", self._latencies(median, max(1, round(count))), op=op)
            for name in self.partitions:
                part = count / len(self.partitions)
                for counter, amount in (("ops", 1), ("op_keys", keys), ("op_bytes", keys * size)):
                    self._count(counter, part * amount, seconds, op=op, partition=name)
        self._count("events", ops, seconds)
        for name in self.partitions:
            for field, size in (("tokens", 1024), ("mm.pixel_values", 40_960)):
                self._count("field_bytes", size * seconds, seconds, partition=name, field=field)
        self._timeline.append(self._timeline_point(seconds, ops, before))

    def fail(self, message: str, op: str = "claim_meta", worker: str = "rollout-0") -> None:
        """An operation fails: counted, and in the log from the next step on."""
        self._failures += 1
        self._count("op_failures", 1, 1.0, op=op, partition=self.partitions[0])
        time_ns = self.started_ns + int(self.elapsed_s * _SECOND)
        self._log.append(LogLine(time_ns, "error", message, worker))

    def _flow(self, name: str, arriving: float, seconds: float) -> None:
        self._written[name] += arriving
        self._count("samples_written", arriving, seconds, partition=name)
        ready = self._written[name]
        for position, task in enumerate(self.tasks):
            backlog = ready - self._claimed[name, task]
            pace = 0.5 * arriving if task == self.slow_task else 1.1 * arriving
            claimed = max(0.0, min(backlog, pace))
            self._claimed[name, task] += claimed
            self._count("samples_claimed", claimed, seconds, partition=name, task=task)
            self._count("claim_keys", claimed, seconds, partition=name, task=task)
            waits = self._latencies(2e8, max(1, round(claimed / 16)))
            self._record("op_wait", "ns", waits, op="claim_meta", partition=name, task=task)
            number = max(1, round(claimed / 8))
            self._record(
                "written_to_claimed",
                "ns",
                self._latencies(4e8 * (1 + position), number),
                partition=name,
                task=task,
            )
            stale = self._random.poisson(0.8 + 0.4 * position, number).astype(np.float64)
            self._record("staleness", "versions", stale, partition=name, task=task)
            ready = self._claimed[name, task]
        cleared = max(0.0, ready - self._cleared[name])
        self._cleared[name] += cleared
        self._count("samples_cleared", cleared, seconds, partition=name)
        life = self._latencies(4e8 * (1 + len(self.tasks)), max(1, round(cleared / 8)))
        self._record("written_to_cleared", "ns", life, partition=name)

    def _latencies(self, median: float, number: int) -> npt.NDArray[np.float64]:
        tail = self._random.random(number) < 0.02
        values = median * np.exp(0.45 * self._random.standard_normal(number))
        return np.rint(np.where(tail, values * 12, values))

    def _count(self, name: str, amount: float, seconds: float, **labels: str) -> None:
        entry = self._counters.setdefault((name, tuple(labels.items())), [0.0, 0.0])
        entry[0] += amount
        entry[1] = amount / seconds if seconds else 0.0

    def _record(self, name: str, unit: str, values: npt.NDArray[np.float64], **labels: str) -> None:
        key = (name, (("unit", unit), *labels.items()))
        self._values.setdefault(key, []).append(values)

    def _timeline_point(
        self,
        seconds: float,
        ops: float,
        before: tuple[dict[str, float], dict[tuple[str, str], float], dict[str, float]],
    ) -> TimelinePoint:
        written = sum(self._written.values()) - sum(before[0].values())
        claimed = sum(self._claimed.values()) - sum(before[1].values())
        cleared = sum(self._cleared.values()) - sum(before[2].values())
        held = sum(self._held(name) for name in self.partitions)
        return TimelinePoint(
            elapsed_s=self.elapsed_s - seconds,
            seconds=seconds,
            ops=round(ops),
            keys=round(written + claimed),
            bytes=round((written + claimed) * 26_000),
            busy_ns=round(ops * 450_000),
            written=round(written),
            claimed=round(claimed),
            cleared=round(cleared),
            stale_sum=round(claimed * 1.2),
            stale_count=round(claimed),
            samples_held=held,
            bytes_held=held * 26_000,
        )

    def _held(self, name: str) -> int:
        return round(self._written[name] - self._cleared[name])

    def _snapshot(self) -> MetricsSnapshot:
        now = self.started_ns + int(self.elapsed_s * _SECOND)
        metrics: list[Stat] = [
            CounterStat(name, round(value), dict(labels), rate)
            for (name, labels), (value, rate) in self._counters.items()
        ]
        for (name, labels), chunks in self._values.items():
            (_, unit), *rest = labels
            chunks[:] = [np.concatenate(chunks)]
            metrics.append(series_of(name, chunks[0], unit=unit, **dict(rest)))
        parts = [self._partition(name) for name in self.partitions]
        for name, values in (
            ("samples_held", [part.samples for part in parts]),
            ("bytes_held", [part.bytes for part in parts]),
        ):
            metrics.append(GaugeStat(name, float(sum(values)), {}, float(sum(values))))
        metrics.append(GaugeStat("weight_version", float(int(self.elapsed_s / 2))))
        metrics.append(GaugeStat("workers_alive", float(self.n_workers)))
        return MetricsSnapshot(
            run_id=self.run_id,
            state=self.state,
            seq=self._seq,
            time_ns=now,
            monotonic_ns=int(self.elapsed_s * _SECOND),
            started_ns=self.started_ns,
            elapsed_s=self.elapsed_s,
            exact=self.state is SessionState.COMPLETE,
            refresh_hz=4.0,
            host="node-0",
            pid=4242,
            metrics=metrics,
            partitions=parts,
            workers=[self._worker(number, now) for number in range(self.n_workers)],
            n_in_flight=sum(part.samples for part in parts),
            oldest=self._lifecycles(parts, now, finished=False),
            finished=self._lifecycles(parts, now, finished=True),
            log=list(self._log),
            timeline=list(self._timeline),
            steps=self._steps(),
            step_totals=StepTotals(
                int(self.elapsed_s), self.elapsed_s, int(900 * self.elapsed_s), [self._step_op()]
            ),
        )

    def _steps(self) -> list[StepStat]:
        """A step per second: 40 % of it in the plane, 30 % waiting for samples."""
        last = int(self.elapsed_s)
        return [
            StepStat(
                number,
                float(number),
                "trainer-3",
                1.0,
                0.4,
                0.3,
                0.075,
                0.025,
                900,
                {"reward": 1 - 0.99**number},
            )
            for number in range(max(1, last - 100), last + 1)
        ]

    def _step_op(self) -> StepOpStat:
        spent = [self.elapsed_s * share for share in (0.4, 0.3, 0.075, 0.025)]
        return StepOpStat("claim_meta", 2 * int(self.elapsed_s), *spent)

    def _partition(self, name: str) -> PartitionStat:
        samples = self._held(name)
        self._peak[name] = max(self._peak[name], samples)
        tasks, ready, needed = [], self._written[name], "prompt"
        for task in self.tasks:
            claimed = self._claimed[name, task]
            waiting = 0 if ready - claimed > 1 else 1
            writes = f"{task}_values"
            counts = round(ready - claimed), round(claimed), waiting
            tasks.append(TaskStat(task, *counts, fields=[needed], writes=[writes], wanted=8))
            ready, needed = claimed, writes
        return PartitionStat(
            name,
            samples,
            samples * 26_000,
            self._peak[name],
            self._peak[name] * 26_000,
            self.capacity_samples,
            None if self.capacity_samples is None else self.capacity_samples * 30_000,
            oldest_age_s=2.5 if samples else None,
            reported=True,
            written=round(self._written[name]),
            claimed=round(sum(self._claimed[name, task] for task in self.tasks)),
            cleared=round(self._cleared[name]),
            never_cleared=samples if self.state.is_final else 0,
            tasks=tasks,
            flow=self.flow if name == self.partitions[0] else None,
        )

    def _worker(self, number: int, now: int) -> WorkerStat:
        roles = ("rollout", "rollout", "logprob", "trainer")
        role = roles[number % len(roles)]
        rate = 4.0 * (1 + 0.1 * (number % 7))
        ops = round(rate * self.elapsed_s)
        latency = SeriesSummary(ops, 520_000.0, 480_000.0, 900_000.0, 2_400_000.0, 9_000_000.0)
        return WorkerStat(
            f"{role}-{number}",
            5000 + number,
            f"node-{number // 8}",
            role,
            state="gone" if self.state.is_final else "alive",
            first_seen_ns=self.started_ns,
            last_seen_ns=now - 30_000_000 * (number % 5),
            ops=ops,
            keys=8 * ops,
            bytes=8 * 26_000 * ops,
            failures=self._failures if number == 0 else 0,
            rate=rate,
            bytes_rate=rate * 8 * 26_000,
            written=8 * ops if role == "rollout" else 0,
            by_op=[WorkerOpStat(op, ops // 4, 2 * ops, rate=rate / 4, latency=latency) for op in _OPS],
        )

    def _lifecycles(self, parts: list[PartitionStat], now: int, *, finished: bool) -> list[SampleAge]:
        lifecycles = []
        for part in parts:
            for number in range(min(8, part.cleared if finished else part.samples)):
                age = 3.0 - 0.25 * number
                written = now - int((age + (2.0 if finished else 0.0)) * _SECOND)
                done = len(self.tasks) if finished else number % (len(self.tasks) + 1)
                claims = [written + int((0.2 + 0.5 * place) * _SECOND) for place in range(done)]
                lifecycles.append(
                    SampleAge(
                        f"p{(part.written - number) // 8}_g{number}",
                        part.partition,
                        age,
                        written,
                        "rollout-0",
                        int(self.elapsed_s / 2) - 1,
                        self.tasks[:done],
                        claimed_ns=claims,
                        cleared_ns=written + int(age * _SECOND) if finished else None,
                    )
                )
        lifecycles.sort(key=lambda sample: -sample.age_s)
        return lifecycles[:20]


class SnapshotServer:
    """Publishes snapshots at an address, and the last one again to whoever comes later."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._snapshots: queue.SimpleQueue[MetricsSnapshot | None] = queue.SimpleQueue()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="snapshot-server", daemon=True)
        self._thread.start()
        self._ready.wait()

    def publish(self, snapshot: MetricsSnapshot) -> None:
        """Send a snapshot to all subscribers."""
        self._snapshots.put(snapshot)

    def close(self) -> None:
        """Stop, as an aggregator that dies: nobody is told."""
        self._snapshots.put(None)
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _serve(self) -> None:
        publisher = ZmqMessagePublisher(MetricsSnapshotCodec(), self.address, resend_last=True, linger=0)
        self._ready.set()
        try:
            while True:
                try:
                    snapshot = self._snapshots.get(timeout=0.02)
                except queue.Empty:
                    publisher.handle_subscriptions()
                    continue
                if snapshot is None:
                    return
                publisher.publish(snapshot)
        finally:
            publisher.close()


def series_of(name: str, values: npt.ArrayLike, unit: str = "ns", **labels: str) -> SeriesStat:
    """The statistics of ``values`` as an aggregator gives them."""
    data = np.sort(np.asarray(values, np.float64))
    if not data.size:
        return SeriesStat(name, 0, labels, unit)
    ranks = [max(1, -(-data.size * share // 100_000)) for _, share in PERCENTILES]
    low, high = float(data[0]), float(data[-1])
    edges = np.geomspace(low + 1, high + 1, 33) - 1 if high > low else np.array([low, high])
    edges[0], edges[-1] = low, high
    counts = np.histogram(data, edges)[0] if high > low else np.array([data.size])
    grid = np.array(GRIDS[unit])
    on_grid = np.histogram(np.clip(data, grid[0], np.nextafter(grid[-1], 0)), grid)[0]
    filled = np.flatnonzero(on_grid)
    return SeriesStat(
        name,
        data.size,
        labels,
        unit,
        float(data.sum()),
        low,
        high,
        float(data.mean()),
        float(data.std(ddof=1)) if data.size > 1 else 0.0,
        {label: float(data[rank - 1]) for (label, _), rank in zip(PERCENTILES, ranks, strict=True)},
        edges.tolist(),
        counts.tolist(),
        grid_first=int(filled[0]),
        grid_counts=on_grid[filled[0] : filled[-1] + 1].tolist(),
    )
