"""``rlplane dash``: watch a run on a page, from a browser."""

from __future__ import annotations

import contextlib
import html
import os
import signal
import webbrowser
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from rlplane.atomic_file import write_atomically
from rlplane.cli.cluster import ClusterRuns
from rlplane.cli.options import Flag
from rlplane.cli.output import note
from rlplane.errors import MissingExtraError
from rlplane.metrics.discovery import runtime_directory
from rlplane.transport.gate import choose_token
from rlplane.viewing.feed import RunFeed


def dash(
    run: str | None = None,
    /,
    *,
    host: str = "127.0.0.1",
    port: int | None = None,
    token_file: Path | None = None,
    no_token: Flag = False,
    allow_host: Annotated[tuple[str, ...], Parameter(negative="")] = (),
    open_browser: Annotated[bool, Parameter(name="--open", negative="", show_default=False)] = False,
) -> None:
    """Watch a run on a page, until Ctrl-C. Prometheus finds the same figures at /metrics.

    Every request has to carry a token, which is in the address that is printed.

    Parameters
    ----------
    run
        The address of an aggregator's snapshots, or a finished run's directory.
        Default: the newest run of this machine or, if it has none, of its Ray cluster; and the next one.
    host
        Where to listen. Anything but this machine needs a token.
    port
        Which port; 0 for any free one. Default: 7457, or the next free one.
    token_file
        A file with the token. Default: RLPLANE_TOKEN, else a new one at each start.
    no_token
        Let every process and user of this machine see the page.
    allow_host
        Another name by which a browser may ask for it, such as that of a proxy.
    open_browser
        Open it in the browser of this machine.
    """
    try:
        from rlplane.web.app import serve_dashboard
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("rlplane"):
            raise
        raise MissingExtraError(
            f"rlplane dash needs {error.name!r}, which is not installed: pip install 'rlplane[web]'"
        ) from error
    token = choose_token(token_file, none=no_token)

    with ClusterRuns() as cluster, RunFeed(run, cluster) as feed, _browser(open_browser) as browser:

        def ready(address: str) -> None:
            note(f"open {address}")
            note(f"{feed.status().text}; Ctrl-C ends this page, never the run")
            if browser is not None:
                _show(address, browser)

        serve_dashboard(feed, host=host, port=port, token=token, names=allow_host, on_ready=ready)


@contextlib.contextmanager
def _browser(wanted: bool) -> Iterator[Path | None]:
    """The file by which a browser is sent to the page, for as long as the page is there."""
    if not wanted:
        yield None
        return
    path = runtime_directory() / f"dash-{os.getpid()}.html"

    def end(number: int, _: object) -> None:
        path.unlink(missing_ok=True)
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)

    # The server ends in order on SIGTERM, and then the process by it, without coming back here.
    signal.signal(signal.SIGTERM, end)
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def _show(address: str, path: Path) -> None:
    # The address has the token, and every user of the machine can read a browser's command line.
    page = f'<!DOCTYPE html><meta http-equiv="refresh" content="0; url={html.escape(address)}">'
    write_atomically(path, page.encode(), mode=0o600)
    webbrowser.open(path.as_uri())
