"""``rlplane report``: the report of a run, and what changed between two."""

from __future__ import annotations

from pathlib import Path

import msgspec

from rlplane.cli.cluster import ClusterRuns
from rlplane.cli.compare import compare_runs, render_comparison
from rlplane.cli.options import Flag, Json
from rlplane.cli.outcome import CommandError, ExitCode
from rlplane.cli.output import note, write_json, write_text
from rlplane.metrics.discovery import list_runs
from rlplane.metrics.publisher import FINAL_SNAPSHOT_NAME
from rlplane.metrics.snapshot import MetricsSnapshot
from rlplane.report import Report, render_html, render_text
from rlplane.viewing.feed import HOW_TO_BE_SEEN, RunFeed, read_run
from rlplane.viewing.units import printable

_RUNS = Path("runs")


def report(
    run: str | None = None,
    other: str | None = None,
    /,
    *,
    compare: Flag = False,
    html: Path | None = None,
    as_json: Json = False,
) -> None:
    """Show the report of a run, or compare two runs.

    Parameters
    ----------
    run
        A run's directory, its final_snapshot.json, or the address of a running one.
        Default: the run that goes on now on this machine or in its Ray cluster, else the newest in ./runs.
    other
        With --compare: the run to compare it with.
    compare
        Say what got slower from the first run to the second, by how much, beyond the noise.
    html
        Write the report to this file: one page that needs nothing else.
    """
    if compare != (other is not None):
        raise CommandError(
            "two runs are compared with --compare: rlplane report --compare A B", ExitCode.USAGE
        )
    if other is not None and run is not None:
        if html is not None:
            raise CommandError("--html writes the report of one run, not a comparison", ExitCode.USAGE)
        comparison = compare_runs(read_run(run), read_run(other))
        if as_json:
            write_json("report.compare", msgspec.to_builtins(comparison))
        else:
            write_text("\n".join(map(printable, render_comparison(comparison).splitlines())))
        return
    snapshot = _read(run)
    made = Report.from_snapshot(snapshot, source="file" if snapshot.state.is_final else "live")
    if html is not None:
        try:
            html.write_text(render_html(made), encoding="utf-8")
        except OSError as error:
            raise CommandError(f"cannot write {html}: {error.strerror}") from error
        note(f"wrote {html}")
    if as_json:
        write_json("report", msgspec.to_builtins(made))
    elif html is None:
        write_text("\n".join(map(printable, render_text(made).splitlines())))


def _read(run: str | None) -> MetricsSnapshot:
    with ClusterRuns() as cluster:
        if run is None and not list_runs() and not cluster.wait_for_answer():
            run = _newest_finished_run(cluster.where())
            note(f"the newest run: {run}")
        if run is not None and "://" not in run:
            return read_run(run)
        return _look(run, cluster)


def _look(run: str | None, cluster: ClusterRuns) -> MetricsSnapshot:
    with RunFeed(run, cluster) as feed:
        snapshot = feed.wait(0, 5.0)
        if run is None and snapshot is not None:
            note(f"run {snapshot.run_id}, which goes on now; for a finished one: rlplane report RUN_DIR")
        if snapshot is None:
            raise CommandError(
                f"{feed.status().text}; for a finished run, name its directory: rlplane report RUN_DIR",
                ExitCode.CANNOT_START,
            )
        return snapshot


def _newest_finished_run(where: str) -> str:
    finished = list(_RUNS.glob(f"*/{FINAL_SNAPSHOT_NAME}"))
    if not finished:
        raise CommandError(
            f"nothing runs {where} now, and there is none in ./{_RUNS}; {HOW_TO_BE_SEEN}. For a"
            " finished run elsewhere, name its directory: rlplane report RUN_DIR",
            ExitCode.CANNOT_START,
        )
    return str(max(finished, key=lambda path: path.stat().st_mtime_ns).parent)
