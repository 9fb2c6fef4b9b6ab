"""``rlplane top``: watch a run on the terminal."""

from __future__ import annotations

import sys
import time
from typing import Annotated

import msgspec
from cyclopts import Parameter

from rlplane.cli.cluster import ClusterRuns
from rlplane.cli.options import Json
from rlplane.cli.outcome import CommandError, ExitCode
from rlplane.cli.output import write_json
from rlplane.errors import MissingExtraError
from rlplane.viewing.feed import RunFeed


def top(
    run: str | None = None,
    /,
    *,
    as_json: Json = False,
    wait: Annotated[float, Parameter(help="With --json: seconds to wait for a run.")] = 5.0,
) -> None:
    """Watch a run on the terminal.

    Parameters
    ----------
    run
        The address of an aggregator's snapshots, or a finished run's directory.
        Default: the newest run of this machine or, if it has none, of its Ray cluster; and the next one.
    """
    if as_json:
        _print_once(run, wait)
        return
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise CommandError(
            "rlplane top draws on a terminal, and this is none; for a script there is rlplane top --json",
            ExitCode.CANNOT_START,
        )
    try:
        from rlplane.tui.app import TopApp
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("rlplane"):
            raise
        raise MissingExtraError(
            f"rlplane top needs {error.name!r}, which is not installed: pip install 'rlplane[tui]'"
        ) from error
    with ClusterRuns() as cluster, RunFeed(run, cluster) as feed:
        TopApp(feed).run()


def _print_once(run: str | None, wait: float) -> None:
    with ClusterRuns() as cluster, RunFeed(run, cluster) as feed:
        if feed.status().state == "searching":
            cluster.wait_for_answer()
        deadline = time.monotonic() + wait
        while feed.latest is None and time.monotonic() < deadline:
            feed.wait(0, min(0.2, wait))
        snapshot, status = feed.latest, feed.status()
    if snapshot is None:
        raise CommandError(f"{status.text} (waited {wait:g} s)", ExitCode.CANNOT_START)
    feed_view = {"state": status.state, "text": status.text, "source": status.source}
    write_json("top", {"feed": feed_view, "snapshot": msgspec.to_builtins(snapshot)})
