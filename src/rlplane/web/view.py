"""A snapshot as the page wants it: one JSON object with what is drawn, and no more.

The snapshot of a large run has a distribution per partition and task, which no page draws: the view of 500
workers and 200 partitions stays around 200 kB.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

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
from rlplane.viewing.operations import by_operation
from rlplane.viewing.runs import figures_of

__all__ = ["VIEW_VERSION", "make_view", "status_view"]

VIEW_VERSION = 1
_MAX_FLOWS = 256
_MAX_FIELD_ROWS = 500


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
        "fields": [
            {
                "id": f"{stat.labels['partition']}/{stat.labels['field']}",
                "partition": stat.labels["partition"],
                "field": stat.labels["field"],
                "bytes": stat.value,
                "bytes_rate": stat.rate,
            }
            for stat in snapshot.counters("field_bytes")
        ][:_MAX_FIELD_ROWS],
        "steps": _steps(snapshot),
        "figures": figures_of(snapshot),
        "lifecycle": {
            "oldest": [_sample(sample) for sample in snapshot.oldest],
            "finished": [_sample(sample) for sample in snapshot.finished],
        },
        "log": [
            {
                "time_ms": line.time_ns / 1e6,
                "first_ms": line.first_ns / 1e6,
                "count": line.count,
                "level": line.level,
                "worker": line.worker,
                "text": line.message,
            }
            for line in snapshot.log[-100:]
        ],
    }


def _totals(snapshot: MetricsSnapshot) -> dict[str, Any]:
    gauges = {stat.name: stat for stat in snapshot.gauges() if not stat.labels}
    stale = sum_counts(map(full_counts, snapshot.series("staleness")))
    latency = sum_counts(map(full_counts, snapshot.series("op_latency")))
    tracked = any(part.tracked for part in snapshot.partitions)
    return {
        "ops": snapshot.total("ops"),
        "ops_rate": snapshot.rate("ops"),
        "bytes": snapshot.total("op_bytes"),
        "bytes_rate": snapshot.rate("op_bytes"),
        "written": snapshot.total("samples_written") if tracked else None,
        "written_rate": snapshot.rate("samples_written") if tracked else None,
        "cleared": snapshot.total("samples_cleared") if tracked else None,
        "cleared_rate": snapshot.rate("samples_cleared") if tracked else None,
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


_PARTS = {"plane": "seconds", "waiting": "waiting_s", "round_trips": "round_trips_s", "bytes": "bytes_s"}


def _steps(snapshot: MetricsSnapshot) -> dict[str, Any]:
    totals = snapshot.step_totals
    seconds, count = totals.seconds or 1.0, totals.count or 1
    return {
        "last": next((step.step for step in reversed(snapshot.steps) if step.step is not None), None),
        "totals": {
            "count": totals.count,
            "tokens_per_s": totals.tokens_per_s,
            **{name: totals.share(part) for name, part in _PARTS.items()},
        },
        "ops": [
            {
                "op": op.op,
                "count": op.count / count,
                **{name: getattr(op, part) / seconds for name, part in _PARTS.items()},
            }
            for op in totals.ops
        ],
        "points": [
            {
                "time_s": step.elapsed_s,
                "seconds": step.seconds,
                "waiting": _share(step.waiting_s, step.seconds),
                "round_trips": _share(step.round_trips_s, step.seconds),
                "bytes": _share(step.bytes_s, step.seconds),
                "scalars": {name: value for name, value in step.scalars.items() if math.isfinite(value)},
            }
            for step in snapshot.steps
        ],
        "scalars": sorted({name for step in snapshot.steps for name in step.scalars}),
    }


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _ops(snapshot: MetricsSnapshot) -> list[dict[str, Any]]:
    return [
        {
            "op": figures.op,
            **figures.counts,
            **{f"{name}_rate": rate for name, rate in figures.rates.items()},
            "latency": None if figures.latency is None else _distribution(figures.latency),
            "wait_mean": figures.waited_s / figures.waits * 1e9 if figures.waits else None,
            "waited_s": figures.waited_s,
        }
        for figures in by_operation(snapshot)
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
                "stage": task.stage,
                "after": task.after,
                "asks": task.asks,
            }
            for task in picture.tasks
        ],
    }


def _partition(part: PartitionStat) -> dict[str, Any]:
    known = [task for task in part.tasks if task.ready is not None]
    return {
        "partition": part.partition,
        "samples": part.samples if part.known else None,
        "bytes": part.bytes if part.known else None,
        "peak_samples": part.peak_samples if part.known else None,
        "peak_bytes": part.peak_bytes if part.known else None,
        "capacity_samples": part.capacity_samples,
        "capacity_bytes": part.capacity_bytes,
        "oldest_age_s": part.oldest_age_s,
        "written": part.written if part.tracked else None,
        "cleared": part.cleared if part.tracked else None,
        "failed": part.failed if part.tracked else None,
        "never_cleared": part.never_cleared if part.tracked else None,
        # Not their sum: a sample may be ready for several tasks.
        "ready": {task.task: task.ready for task in known},
        "waiting": sum(task.waiting or 0 for task in known) if known else None,
        "flow": None if part.flow is None else msgspec.structs.asdict(part.flow),
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


def _sample(sample: SampleAge) -> dict[str, Any]:
    known = len(sample.claimed_ns) == len(sample.claimed_by)
    return {
        "id": sample.sample_id,
        "partition": sample.partition,
        "age_s": sample.age_s,
        "worker": sample.worker,
        "weight_version": sample.weight_version,
        "failed": sample.failed,
        "cleared": sample.cleared_ns is not None,
        "claims": [
            {"task": task, "after_s": (sample.claimed_ns[at] - sample.written_ns) / 1e9 if known else None}
            for at, task in enumerate(sample.claimed_by)
        ],
    }
