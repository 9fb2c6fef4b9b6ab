"""What the live metrics service costs and sustains: ``rlplane bench --metrics``.

Every figure is measured here and now, with real processes and sockets. The peer is ``hdrhistogram`` used the
straightforward way: one ``record_value`` per event, one ``get_value_at_percentile`` per percentile.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import zmq

from rlplane.metrics.aggregator import start_aggregator
from rlplane.metrics.event_publisher import EventPublisherService
from rlplane.metrics.events import EventBatch, EventRecordCodec, OpRecord, pack_ops
from rlplane.metrics.registry import MetricsRegistry
from rlplane.metrics.snapshot import PERCENTILES, MetricsSnapshot, MetricsSnapshotCodec, SessionState
from rlplane.metrics.subscriber import MetricsSnapshotSubscriber
from rlplane.transport.codec import join_frame
from rlplane_benchmarks.cpu_time import cpu_seconds

__all__ = ["render", "run"]

BATCH = 512
TARGETS = {
    "events_per_cpu_s": 500_000,
    "tick_20_series_ms": 2.0,
    "worker_event_us": 2.0,
}


def run(quick: bool = False) -> dict[str, Any]:
    """Measure, and return plain numbers. ``quick`` takes a few seconds instead of about twenty."""
    n_events = 400_000 if quick else 3_000_000
    ingest = _ingest(n_events, viewers=0)
    viewed = _ingest(n_events, viewers=2)
    return {
        "ingest": ingest,
        "ingest_with_2_viewers": viewed,
        "tick": _tick(n_series=20, rounds=20 if quick else 100),
        "worker": _worker(50_000 if quick else 400_000, viewers=0),
        "worker_with_2_viewers": _worker(50_000 if quick else 400_000, viewers=2),
        "latency": _latency(rounds=8 if quick else 30),
        "hdrhistogram": _hdrhistogram(20_000 if quick else 200_000),
        "targets": TARGETS,
        "load_average": os.getloadavg()[0],
        "cpus": os.cpu_count(),
    }


def render(result: dict[str, Any]) -> str:
    """The figures as lines for people."""
    ingest, viewed, tick = result["ingest"], result["ingest_with_2_viewers"], result["tick"]
    worker, latency, peer = result["worker"], result["latency"], result["hdrhistogram"]
    per_core = "events per second of one core"
    rows = [
        ("aggregator, live percentiles on", f"{ingest['events_per_cpu_s']:,.0f}", f"{per_core} (≥ 500,000)"),
        ("  by the wall clock", f"{ingest['events_per_s']:,.0f}", "events/s"),
        ("  with 2 viewers at 10 Hz", f"{viewed['events_per_cpu_s']:,.0f}", per_core),
        ("tick with 20 series", f"{tick['cpu_ms']:.2f}", "ms of CPU (≤ 2)"),
        ("  by the wall clock", f"{tick['median_ms']:.2f}", "ms"),
        ("record() in the worker", f"{worker['record_us']:.2f}", "µs of CPU (≤ 2)"),
        ("  with its background thread", f"{worker['total_cpu_us']:.2f}", "µs of CPU"),
        (
            "  and with 2 viewers on the run",
            f"{result['worker_with_2_viewers']['total_cpu_us']:.2f}",
            "µs of CPU: what a viewer costs the job",
        ),
        (
            "operation → subscriber's snapshot",
            f"{latency['median_ms']:.0f}",
            f"ms (flush ≤ 100 ms, then a tick at {latency['refresh_hz']:g} Hz)",
        ),
    ]
    if peer is not None:
        rows += [
            ("hdrhistogram: one record_value", f"{peer['record_us']:.2f}", "µs of CPU"),
            ("  percentiles of 20 series", f"{peer['percentiles_20_series_ms']:.1f}", "ms of CPU"),
        ]
    head = (
        f"metrics service ({result['cpus']} CPUs, load average {result['load_average']:.1f} while measured)"
    )
    return "\n".join([head, *(f"  {name:<36}{value:>12} {unit}" for name, value, unit in rows)])


def _records(count: int) -> list[OpRecord]:
    generator = np.random.default_rng(7)
    walls = generator.lognormal(13, 1, count).astype(np.int64).tolist()
    now = time.time_ns()
    ops = ("put", "get", "claim_meta", "clear")
    return [OpRecord(ops[i % 4], f"p{i % 3}", 8, 4096, wall, now) for i, wall in enumerate(walls)]


def _ingest(n_events: int, viewers: int) -> dict[str, float]:
    """Feed a real aggregator as fast as it takes, from another process."""
    handle = start_aggregator(refresh_hz=10.0, set_environment=False)
    watching = [MetricsSnapshotSubscriber(handle.snapshot_address) for _ in range(viewers)]
    try:
        before = cpu_seconds(handle.process.pid)
        started = time.perf_counter()
        feeder = subprocess.run(
            [sys.executable, "-m", "rlplane_benchmarks.metrics", handle.events_address, str(n_events)],
            check=True,
            capture_output=True,
        )
        sent = int(feeder.stdout)
        _wait(lambda: _counted(handle.subscriber.latest) >= sent, 120.0)
        elapsed = time.perf_counter() - started - float(feeder.stderr)
        cpu = cpu_seconds(handle.process.pid) - before
    finally:
        for subscriber in watching:
            subscriber.close()
        handle.interrupt()
    return {"events": sent, "events_per_s": sent / elapsed, "events_per_cpu_s": sent / cpu}


def _counted(snapshot: MetricsSnapshot | None) -> int:
    return 0 if snapshot is None else snapshot.total("ops")


def _feed(address: str, n_events: int) -> None:
    """The feeder's process: batches that are packed once, sent many times, as 4 workers would."""
    started = time.perf_counter()
    codec = EventRecordCodec()
    frames = []
    columns, _ = pack_ops(_records(BATCH))
    for worker in range(4):
        batch = EventBatch(worker=f"w{worker}", pid=1, host="bench", seq=0, sent_ns=0, ops=columns, events=[])
        frames.append(join_frame(*codec.encode(batch)))
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.connect(address)
        ready = time.perf_counter() - started
        sent = 0
        while sent < n_events:
            socket.send(frames[(sent // BATCH) % 4])
            sent += BATCH
    print(sent)
    print(ready, file=sys.stderr)


def _tick(n_series: int, rounds: int) -> dict[str, float]:
    """Fold 1,000 fresh values into each series, make all stats and encode the snapshot."""
    registry = MetricsRegistry()
    series = [registry.register_series("latency", {"op": str(i)}) for i in range(n_series)]
    generator = np.random.default_rng(3)
    codec = MetricsSnapshotCodec()
    times, cpu = [], []
    for seq in range(rounds):
        for sampler in series:
            sampler.record_many(generator.lognormal(13, 1, 1000).astype(np.int64))
        started, begun = time.perf_counter(), time.thread_time()
        codec.encode(
            MetricsSnapshot(
                run_id="bench",
                state=SessionState.LIVE,
                seq=seq,
                time_ns=0,
                monotonic_ns=0,
                metrics=registry.stats(),
            )
        )
        cpu.append((time.thread_time() - begun) * 1e3)
        times.append((time.perf_counter() - started) * 1e3)
    registry.close()
    return {
        "cpu_ms": statistics.median(cpu),
        "median_ms": statistics.median(times),
        "p90_ms": statistics.quantiles(times, n=10)[8],
        "values_per_series": 1000,
    }


def _worker(n_events: int, viewers: int) -> dict[str, float]:
    """The cost of an event where it happens, with a real aggregator at the other end."""
    handle = start_aggregator(set_environment=False)
    sender = EventPublisherService(handle.events_address, "bench", max_queue=n_events + 1)
    watching = [MetricsSnapshotSubscriber(handle.snapshot_address) for _ in range(viewers)]
    try:
        cpu = time.process_time()
        spent = 0.0
        for _ in range(0, n_events, 1000):
            records = _records(1000)
            begun = time.thread_time()
            for record in records:
                sender.record(record)
            spent += time.thread_time() - begun
        made = _cost_of(lambda: _records(1000)) * n_events / 1000
        _wait(lambda: not sender.n_waiting, 60.0)
        total = time.process_time() - cpu - made
        construct = _cost_of(lambda: [OpRecord("put", "p", 8, 4096, 1, 2) for _ in range(1000)]) / 1000
    finally:
        for subscriber in watching:
            subscriber.close()
        sender.close()
        handle.interrupt()
    return {
        "record_us": spent / n_events * 1e6,
        "construct_us": construct * 1e6,
        "total_cpu_us": total / n_events * 1e6,
        "dropped": float(sender.n_dropped),
    }


def _cost_of(work: Callable[[], object]) -> float:
    begun = time.thread_time()
    for _ in range(20):
        work()
    return (time.thread_time() - begun) / 20


def _latency(rounds: int) -> dict[str, float]:
    """From the end of an operation to the snapshot that has it, in a subscriber."""
    refresh_hz = 20.0
    handle = start_aggregator(refresh_hz=refresh_hz, set_environment=False)
    sender = EventPublisherService(handle.events_address, "bench")
    times = []
    try:
        for count in range(1, rounds + 1):
            started = time.perf_counter()
            sender.record(OpRecord("put", "p", 1, 1, 1, time.time_ns()))
            _wait(lambda wanted=count: _counted(handle.subscriber.latest) >= wanted, 30.0)  # type: ignore[misc]
            times.append((time.perf_counter() - started) * 1e3)
    finally:
        sender.close()
        handle.interrupt()
    return {"median_ms": statistics.median(times), "max_ms": max(times), "refresh_hz": refresh_hz}


def _hdrhistogram(n_values: int) -> dict[str, float] | None:
    try:
        from hdrh.histogram import HdrHistogram
    except ImportError:
        return None
    values = np.random.default_rng(7).lognormal(13, 1, n_values).astype(np.int64).tolist()
    histogram = HdrHistogram(1, 3_600_000_000_000, 3)
    begun = time.thread_time()
    for value in values:
        histogram.record_value(value)
    record = time.thread_time() - begun
    begun = time.thread_time()
    for _, share in PERCENTILES:
        histogram.get_value_at_percentile(share / 1000)
    percentiles = time.thread_time() - begun
    return {"record_us": record / n_values * 1e6, "percentiles_20_series_ms": percentiles * 20e3}


def _wait(done: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not done():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the measurement did not end within {timeout_s:g} s")
        time.sleep(0.001)


if __name__ == "__main__":
    _feed(sys.argv[1], int(sys.argv[2]))
