"""``rlplane dash``: watch a run on a page, from a browser."""

from __future__ import annotations

import webbrowser
from typing import Annotated

from cyclopts import Parameter

from rlplane.cli.output import note
from rlplane.errors import MissingExtraError
from rlplane.viewing.feed import RunFeed

__all__ = ["dash"]


def dash(
    run: str | None = None,
    /,
    *,
    host: str = "127.0.0.1",
    port: int | None = None,
    token: str | None = None,
    open_browser: Annotated[bool, Parameter(name="--open", negative="", show_default=False)] = False,
) -> None:
    """Watch a run on a page, until Ctrl-C. Prometheus finds the same figures at /metrics.

    Parameters
    ----------
    run
        The address of an aggregator's snapshots, or a finished run's directory.
        Default: the newest run of this machine, and the next one after it.
    host
        Where to listen. Anything but this machine needs a token.
    port
        Which port; 0 for any free one. Default: 7457, or the next free one.
    token
        What every request has to carry; `auto` makes one.
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
    if token == "auto":
        import secrets

        token = secrets.token_urlsafe(24)

    with RunFeed(run) as feed:

        def ready(address: str) -> None:
            note(f"open {address}")
            note(f"{feed.status().text}; Ctrl-C ends this page, never the run")
            if open_browser:
                webbrowser.open(address)

        serve_dashboard(feed, host=host, port=port, token=token, on_ready=ready)
