"""What is wrong with a run, in words, from one snapshot: the worst finding is the run's health."""

from __future__ import annotations

from typing import Literal

import msgspec

from rlplane.metrics.snapshot import MetricsSnapshot, SessionState
from rlplane.viewing.flow import flows
from rlplane.viewing.units import format_count, format_percent

Level = Literal["ok", "warning", "error"]
NEARLY_FULL = 0.9
_WORST: dict[Level, int] = {"ok": 0, "warning": 1, "error": 2}


class Finding(msgspec.Struct, frozen=True):
    """Something that a person should know. ``level`` is ``warning`` or ``error``."""

    level: Level
    text: str


def health(found: list[Finding]) -> Level:
    """The level of the worst finding; ``ok`` without any."""
    return max((finding.level for finding in found), key=_WORST.__getitem__, default="ok")


def findings(snapshot: MetricsSnapshot) -> list[Finding]:
    """What stands out, errors first."""
    found = [*_failures(snapshot), *_workers(snapshot), *_capacity(snapshot), *_losses(snapshot)]
    if snapshot.state is SessionState.INTERRUPTED:
        found.append(Finding("error", "the run was interrupted"))
    if snapshot.state is SessionState.COMPLETE and snapshot.n_pending_tasks:
        found.append(Finding("warning", f"the drain timed out with {snapshot.n_pending_tasks} pending"))
    if snapshot.state.is_final and snapshot.n_never_cleared:
        left = _number(snapshot.n_never_cleared, "sample")
        found.append(Finding("warning", f"never cleared: {left}"))
    return sorted(found, key=lambda finding: -_WORST[finding.level])


def _failures(snapshot: MetricsSnapshot) -> list[Finding]:
    found = []
    for name, what in (("op_failures", "operation"), ("transfer_failures", "transfer")):
        total, rate = snapshot.total(name), snapshot.rate(name)
        if total:
            # Failures that have stopped are still worth a look, but they are not an emergency.
            now = f", {rate:.3g} per second now" if rate > 0 else ""
            level: Level = "error" if rate > 0 else "warning"
            found.append(Finding(level, f"{_number(total, what)} failed{now}"))
    wrong = [stat for stat in snapshot.counters("rows_mismatched") if stat.value]
    for stat in wrong:
        rows, where = _number(stat.value, "row"), f"{stat.labels['partition']}/{stat.labels['field']}"
        found.append(Finding("error", f"{rows} of {where} came back with other bytes than were written"))
    errors = snapshot.total("session_errors")
    if errors:
        found.append(Finding("error", f"the job reported {_number(errors, 'error')}"))
    return found


def _workers(snapshot: MetricsSnapshot) -> list[Finding]:
    silent = [worker.worker for worker in snapshot.workers if worker.state == "silent"]
    if not silent or snapshot.state.is_final:
        return []
    names = ", ".join(silent[:3]) + (", …" if len(silent) > 3 else "")
    return [Finding("error", f"no sign of {_number(len(silent), 'worker')}: {names}")]


def _capacity(snapshot: MetricsSnapshot) -> list[Finding]:
    if snapshot.state.is_final:
        return []
    return [
        Finding("warning", f"{flow.partition} is nearly full: {format_percent(flow.fill)} of its capacity")
        for flow in flows(snapshot)
        if flow.fill is not None and flow.fill >= NEARLY_FULL
    ]


def _losses(snapshot: MetricsSnapshot) -> list[Finding]:
    found = []
    for name, what in (
        ("events_dropped", "events dropped by workers"),
        ("batches_lost", "batches of events lost"),
        ("bad_frames", "frames that could not be read"),
        ("values_refused", "values refused"),
        ("trigger_failures", "triggers failed"),
    ):
        total = snapshot.total(name)
        if total:
            found.append(Finding("warning", f"{what}: {format_count(total)}"))
    return found


def _number(count: int, what: str) -> str:
    return f"{format_count(count)} {what}" + ("" if count == 1 else "s")
