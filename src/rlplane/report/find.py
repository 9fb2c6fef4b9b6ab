"""Getting the right snapshot for a report: published, else on disk, else the latest live one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rlplane.errors import NotFoundError
from rlplane.metrics.publisher import read_final_snapshot
from rlplane.report.model import Report

if TYPE_CHECKING:
    from rlplane.metrics.subscriber import MetricsSnapshotSubscriber


def find_report(
    run_id: str | None = None,
    *,
    subscriber: MetricsSnapshotSubscriber | None = None,
    final_path: Path | None = None,
    timeout: float = 2.0,
) -> Report:
    """Return the report of a run, from the first of these that has one:

    1. the final snapshot, if ``subscriber`` gets it within ``timeout``;
    2. the file at ``final_path``;
    3. the latest live snapshot of ``subscriber``: the report says that it is incomplete.

    Only snapshots of ``run_id`` count (None: any), so that a file left by an earlier run is never taken for
    this one's. Raises ``KeyError`` that says what was found instead when there is none.
    """
    found: list[str] = []
    if subscriber is not None:
        final = subscriber.wait_for_complete(timeout)
        if final is not None:
            if run_id in (None, final.run_id):
                return Report.from_snapshot(final, source="published")
            found.append(f"a published snapshot of run {final.run_id!r}")
    if final_path is not None:
        try:
            stored = read_final_snapshot(final_path)
        except (OSError, ValueError) as exc:
            found.append(f"no file ({exc})")
        else:
            if run_id in (None, stored.run_id):
                return Report.from_snapshot(stored, source="file")
            found.append(f"{final_path} of run {stored.run_id!r}")
    latest = subscriber.latest if subscriber is not None else None
    if latest is not None and run_id in (None, latest.run_id):
        return Report.from_snapshot(latest, source="live")
    raise NotFoundError(f"no snapshot of run {run_id!r}; found {', '.join(found) or 'nothing'}")
