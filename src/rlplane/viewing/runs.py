"""The finished runs of this machine, and the figures by which runs are compared at a glance."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from rlplane.errors import ConfigError
from rlplane.metrics.discovery import list_finished
from rlplane.metrics.publisher import FINAL_SNAPSHOT_NAME
from rlplane.metrics.snapshot import MetricsSnapshot
from rlplane.viewing.feed import read_run
from rlplane.viewing.grid import full_counts, percentile, sum_counts
from rlplane.viewing.units import format_bytes, format_count, format_duration, format_ns, format_share

RUNS = Path("runs")
_MOST = 50


class FinishedRun(msgspec.Struct, frozen=True):
    """A run that has left its final snapshot in ``directory``."""

    run_id: str
    directory: str
    ended_ns: int


def finished_runs() -> list[FinishedRun]:
    """Those that ended on this machine and are still there, and those in ``./runs``; newest first."""
    directories = [Path(run.out_dir) for run in list_finished()]
    directories += [path.parent.absolute() for path in RUNS.glob(f"*/{FINAL_SNAPSHOT_NAME}")]
    found = {}
    for directory in dict.fromkeys(directories):
        try:
            ended_ns = (directory / FINAL_SNAPSHOT_NAME).stat().st_mtime_ns
        except OSError:
            continue
        found[directory] = FinishedRun(directory.name, str(directory), ended_ns)
    return sorted(found.values(), key=lambda run: -run.ended_ns)[:_MOST]


def read_finished(name: str) -> MetricsSnapshot | None:
    """The final snapshot of a run of :func:`finished_runs`, by its name there or by its run id."""
    # One that is called so comes before a newer one that only says so of itself.
    for run in sorted(finished_runs(), key=lambda run: run.run_id != name):
        try:
            snapshot = read_run(run.directory)
        except ConfigError:
            continue
        if name in (run.run_id, snapshot.run_id):
            return snapshot
    return None


def figures_of(snapshot: MetricsSnapshot) -> dict[str, str]:
    """Rates and shares of the whole run, as text, so that runs of any length stand side by side."""
    return dict(_figures(snapshot))


def _figures(snapshot: MetricsSnapshot) -> Iterator[tuple[str, str]]:
    seconds = snapshot.elapsed_s or 1.0
    ops, waits = snapshot.total("ops"), list(snapshot.series("op_wait"))
    latency = sum_counts(map(full_counts, snapshot.series("op_latency")))
    stale = list(snapshot.series("staleness"))
    count = sum(stat.count for stat in stale)
    steps = snapshot.step_totals
    tracked = any(part.tracked for part in snapshot.partitions)
    written = snapshot.total("samples_written") / seconds if tracked else None
    yield "state", snapshot.state.value
    yield "lasted", format_duration(snapshot.elapsed_s)
    yield "operations per second", format_count(ops / seconds)
    yield "bytes per second", f"{format_bytes(snapshot.total('op_bytes') / seconds)}/s"
    yield "samples written per second", format_count(written)
    yield "latency, p50", format_ns(percentile(latency, "ns", 0.5) if latency else None)
    yield "latency, p99", format_ns(percentile(latency, "ns", 0.99) if latency else None)
    yield "operations that wait, on average", format_count(sum(stat.total for stat in waits) / 1e9 / seconds)
    yield "staleness at the claim, mean", format_count(sum(s.total for s in stale) / count if count else None)
    yield "operations that failed", format_share(snapshot.total("op_failures") / ops if ops else None)
    yield "share of a training step in the plane", format_share(steps.share() if steps.count else None)
    yield "tokens per second", format_count(steps.tokens_per_s if steps.count else None)
    for name, value in {k: v for step in snapshot.steps for k, v in step.scalars.items()}.items():
        yield f"{name}, last", f"{value:.4g}"
