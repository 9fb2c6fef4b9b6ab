"""A snapshot as the page wants it: one JSON object with what is drawn, and no more.

The snapshot of a large run has a distribution per partition and task, which no page draws: the view of 500
workers and 200 partitions stays around 200 kB.
"""

from __future__ import annotations

from typing import Any

from rlplane.metrics.snapshot import (
    MetricsSnapshot,
    PartitionStat,
    SampleAge,
    SeriesStat,
    WorkerStat,
)
from rlplane.viewing.feed import FeedStatus
from rlplane.viewing.flow import FlowPicture, flows
from rlplane.viewing.grid import full_counts, percentile, sum_counts
from rlplane.viewing.health import findings, health

__all__ = ["VIEW_VERSION", "make_view", "status_view"]

VIEW_VERSION = 1
_MAX_FLOWS = 256


def status_view(status: FeedStatus) -> dict[str, Any]:
    """What the page says about its source."""
    return {"state": status.state, "text": status.text, "source": status.source, "age_s": status.age_s}


def make_view(snapshot: MetricsSnapshot, status: FeedStatus) -> dict[str, Any]:
    """Everything that the page shows about this moment."""
    found = findings(snapshot)
    pictures = flows(snapshot)
    return {
        "version": VIEW_VERSION,
        "run": {
            "id": snapshot.run_id,
            "state": snapshot.state.value,
            "final": snapshot.state.is_final,
            "started_ms": snapshot.started_ns / 1e6,
            "time_ms": snapshot.time_ns / 1e6,
            "elapsed_s": snapshot.elapsed_s,
            "host": snapshot.host,
            "seq": snapshot.seq,
            "exact": snapshot.exact,
        },
        "feed": status_view(status),
        "health": {
            "level": health(found),
            "findings": [{"level": finding.level, "text": finding.text} for finding in found],
        },
        "totals": _totals(snapshot),
        "ops": _ops(snapshot),
        "flows": [_flow(picture) for picture in pictures[:_MAX_FLOWS]],
        "partitions": [_partition(part) for part in snapshot.partitions],
        "workers": [_worker(worker, snapshot.time_ns) for worker in snapshot.workers],
        "lives": {
            "oldest": [_life(life) for life in snapshot.oldest],
            "finished": [_life(life) for life in snapshot.finished],
        },
        "log": [
            {"time_ms": line.time_ns / 1e6, "level": line.level, "worker": line.worker, "text": line.message}
            for line in snapshot.log[-100:]
        ],
    }


def _totals(snapshot: MetricsSnapshot) -> dict[str, Any]:
    gauges = {stat.name: stat for stat in snapshot.gauges() if not stat.labels}
    stale = sum_counts(map(full_counts, snapshot.series("staleness")))
    latency = sum_counts(map(full_counts, snapshot.series("op_latency")))
    return {
        "ops": snapshot.total("ops"),
        "ops_rate": snapshot.rate("ops"),
        "bytes": snapshot.total("op_bytes"),
        "bytes_rate": snapshot.rate("op_bytes"),
        "written": snapshot.total("samples_written"),
        "written_rate": snapshot.rate("samples_written"),
        "cleared": snapshot.total("samples_cleared"),
        "cleared_rate": snapshot.rate("samples_cleared"),
        "failures": snapshot.total("op_failures") + snapshot.total("transfer_failures"),
        "failures_rate": snapshot.rate("op_failures") + snapshot.rate("transfer_failures"),
        "timeouts": snapshot.total("op_timeouts"),
        "dropped": snapshot.total("events_dropped"),
        "in_flight": snapshot.n_in_flight,
        "stale_p50": percentile(stale, "versions", 0.5) if stale else None,
        "stale_p99": percentile(stale, "versions", 0.99) if stale else None,
        "latency_p50": percentile(latency, "ns", 0.5) if latency else None,
        "latency_p99": percentile(latency, "ns", 0.99) if latency else None,
        "workers": sum(worker.state == "alive" for worker in snapshot.workers),
        "workers_all": len(snapshot.workers),
        **{
            name: gauges[name].value if name in gauges else None
            for name in ("bytes_held", "samples_held", "weight_version")
        },
        "bytes_peak": gauges["bytes_held"].peak if "bytes_held" in gauges else None,
        "samples_peak": gauges["samples_held"].peak if "samples_held" in gauges else None,
    }


def _ops(snapshot: MetricsSnapshot) -> list[dict[str, Any]]:
    by_op: dict[str, dict[str, Any]] = {}
    for source, name in (
        ("ops", "count"),
        ("op_keys", "keys"),
        ("op_bytes", "bytes"),
        ("op_failures", "failures"),
        ("op_timeouts", "timeouts"),
    ):
        for stat in snapshot.counters(source):
            row = by_op.setdefault(stat.labels.get("op", ""), {})
            row[name] = row.get(name, 0) + stat.value
            row[f"{name}_rate"] = row.get(f"{name}_rate", 0.0) + stat.rate
    latency = {stat.labels.get("op", ""): _distribution(stat) for stat in snapshot.series("op_latency")}
    return [
        {"op": op, **row, "latency": latency.get(op)}
        for op, row in sorted(by_op.items(), key=lambda item: -item[1].get("count", 0))
    ]


def _distribution(stat: SeriesStat) -> dict[str, Any]:
    return {
        "count": stat.count,
        "mean": stat.mean,
        "min": stat.min,
        "max": stat.max,
        "percentiles": stat.percentiles,
        "edges": stat.bucket_edges,
        "counts": stat.bucket_counts,
        "exact": stat.exact,
    }


def _flow(picture: FlowPicture) -> dict[str, Any]:
    return {
        "partition": picture.partition,
        "write_rate": picture.write_rate,
        "clear_rate": picture.clear_rate,
        "samples": picture.samples,
        "bytes": picture.bytes,
        "fill": picture.fill,
        "holdup": picture.holdup,
        "tasks": [
            {
                "task": task.task,
                "rate": task.rate,
                "ready": task.ready,
                "claimed": task.claimed,
                "waiting": task.waiting,
            }
            for task in picture.tasks
        ],
    }


def _partition(part: PartitionStat) -> dict[str, Any]:
    known = [task for task in part.tasks if task.ready is not None]
    return {
        "partition": part.partition,
        "samples": part.samples,
        "bytes": part.bytes,
        "peak_samples": part.peak_samples,
        "peak_bytes": part.peak_bytes,
        "capacity_samples": part.capacity_samples,
        "capacity_bytes": part.capacity_bytes,
        "oldest_age_s": part.oldest_age_s,
        "written": part.written,
        "cleared": part.cleared,
        "failed": part.failed,
        "never_cleared": part.never_cleared,
        "ready": sum(task.ready or 0 for task in known) if known else None,
        "waiting": sum(task.waiting or 0 for task in known) if known else None,
    }


def _worker(worker: WorkerStat, now_ns: int) -> dict[str, Any]:
    busiest = max(
        (op for op in worker.by_op if op.latency is not None), key=lambda op: op.count, default=None
    )
    return {
        "worker": worker.worker,
        "role": worker.role,
        "host": worker.host,
        "pid": worker.pid,
        "state": worker.state,
        "rate": worker.rate,
        "bytes_rate": worker.bytes_rate,
        "ops": worker.ops,
        "failures": worker.failures,
        "timeouts": worker.timeouts,
        "dropped": worker.dropped,
        "seen_s": max(0.0, (now_ns - worker.last_seen_ns) / 1e9),
        "p99": busiest.latency.p99 if busiest is not None and busiest.latency is not None else None,
    }


def _life(life: SampleAge) -> dict[str, Any]:
    known = len(life.claimed_ns) == len(life.claimed_by)
    return {
        "id": life.sample_id,
        "partition": life.partition,
        "age_s": life.age_s,
        "worker": life.worker,
        "weight_version": life.weight_version,
        "failed": life.failed,
        "cleared": life.cleared_ns is not None,
        "claims": [
            {"task": task, "after_s": (life.claimed_ns[at] - life.written_ns) / 1e9 if known else None}
            for at, task in enumerate(life.claimed_by)
        ],
    }
