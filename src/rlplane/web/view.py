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
from rlplane.viewing.flow import flows
from rlplane.viewing.grid import full_counts, percentile, sum_counts
from rlplane.viewing.health import findings, health
from rlplane.viewing.operations import by_operation
from rlplane.viewing.runs import figures_of

VIEW_VERSION = 1
_MAX_FLOWS = 256
_MAX_FIELD_ROWS = 500


def make_view(snapshot: MetricsSnapshot, status: FeedStatus) -> dict[str, Any]:
    """Everything that the page shows about this moment, to be encoded by msgspec."""
    found = findings(snapshot)
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
        "feed": status,
        "health": {"level": health(found), "findings": found},
        "totals": _totals(snapshot),
        "ops": _ops(snapshot),
        "flows": flows(snapshot)[:_MAX_FLOWS],
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


def _pick(source: object, *names: str) -> dict[str, Any]:
    """These attributes by name; None for all of them where there is no source."""
    return {name: None if source is None else getattr(source, name) for name in names}


def _totals(snapshot: MetricsSnapshot) -> dict[str, Any]:
    gauges = {stat.name: stat for stat in snapshot.gauges() if not stat.labels}
    stale = sum_counts(map(full_counts, snapshot.series("staleness")))
    latency = sum_counts(map(full_counts, snapshot.series("op_latency")))
    tracked = any(part.tracked for part in snapshot.partitions)
    counted: dict[str, float | None] = {}
    for name, counters, known in (
        ("ops", ["ops"], True),
        ("bytes", ["op_bytes"], True),
        ("written", ["samples_written"], tracked),
        ("cleared", ["samples_cleared"], tracked),
        ("failures", ["op_failures", "transfer_failures"], True),
    ):
        counted[name] = sum(map(snapshot.total, counters)) if known else None
        counted[f"{name}_rate"] = sum(map(snapshot.rate, counters)) if known else None
    return {
        **counted,
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
        **_pick(stat, "count", "mean", "min", "max", "percentiles", "exact"),
        "edges": stat.bucket_edges,
        "counts": stat.bucket_counts,
    }


def _partition(part: PartitionStat) -> dict[str, Any]:
    known = [task for task in part.tasks if task.ready is not None]
    return {
        "partition": part.partition,
        **_pick(part if part.known else None, "samples", "bytes", "peak_samples", "peak_bytes"),
        **_pick(part, "capacity_samples", "capacity_bytes", "oldest_age_s"),
        **_pick(part if part.tracked else None, "written", "cleared", "failed", "never_cleared"),
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
        **_pick(worker, "worker", "role", "host", "pid", "state", "rate", "bytes_rate"),
        **_pick(worker, "ops", "failures", "timeouts", "dropped"),
        "seen_s": max(0.0, (now_ns - worker.last_seen_ns) / 1e9),
        "p99": busiest.latency.p99 if busiest is not None and busiest.latency is not None else None,
    }


def _sample(sample: SampleAge) -> dict[str, Any]:
    known = len(sample.claimed_ns) == len(sample.claimed_by)
    return {
        "id": sample.sample_id,
        **_pick(sample, "partition", "age_s", "worker", "weight_version", "failed"),
        "cleared": sample.cleared_ns is not None,
        "claims": [
            {"task": task, "after_s": (sample.claimed_ns[at] - sample.written_ns) / 1e9 if known else None}
            for at, task in enumerate(sample.claimed_by)
        ],
    }
