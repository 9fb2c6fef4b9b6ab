"""The page's routes, and the server around them.

Use::

    serve_dashboard(feed, token=choose_token(None), port=0, on_ready=print)   # until SIGINT or SIGTERM
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any, cast

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from rlplane.errors import ConfigError, MissingExtraError, PlaneConnectionError
from rlplane.metrics.snapshot import MetricsSnapshot
from rlplane.transport.gate import Gate, HalfOpenConnections, is_loopback, with_token
from rlplane.viewing.feed import RunFeed
from rlplane.viewing.runs import figures_of, finished_runs, read_finished
from rlplane.web.broadcast import Broadcast
from rlplane.web.guard import Guard, GuardedProtocol
from rlplane.web.view import make_view

DEFAULT_PORT = 7457
_PORTS_TO_TRY = 20
# The report is one file that also has to work when it is opened from a disk, so its style is inside it. It
# has no script, and may not have one.
_REPORT_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'"
)


def static_directory() -> Path:
    """Where the page's files are, in a checkout and in a wheel."""
    return Path(str(resources.files("rlplane.web") / "static"))


def make_app(feed: RunFeed, gate: Gate) -> Starlette:
    """The application. The caller owns the feed and closes it."""
    broadcast = Broadcast(feed)
    static = static_directory()

    async def page(_: Request) -> Response:
        return FileResponse(static / "index.html", media_type="text/html")

    async def events(_: Request) -> Response:
        headers = {"x-accel-buffering": "no"}
        return StreamingResponse(broadcast.listen(), media_type="text/event-stream", headers=headers)

    async def view(_: Request) -> Response:
        snapshot = feed.latest
        status = feed.status()
        return _json(make_view(snapshot, status) if snapshot is not None else {"feed": status})

    async def history(request: Request) -> Response:
        try:
            start = float(request.query_params.get("start_s", "-inf"))
            end = float(request.query_params.get("end_s", "inf"))
            most = min(5000, int(request.query_params.get("points", "600")))
        except ValueError as error:
            return PlainTextResponse(f"start_s, end_s and points must be numbers: {error}\n", 400)
        if math.isnan(start) or math.isnan(end) or most < 2:
            return PlainTextResponse("start_s and end_s must be numbers, points at least 2\n", 400)
        broadcast.catch_up()
        snapshot = feed.latest
        run = snapshot.run_id if snapshot is not None else None
        return _json({"run_id": run, "columns": broadcast.history.columns(start, end, most)})

    async def runs(_: Request) -> Response:
        shown = feed.latest.run_id if feed.latest is not None else None
        found = await asyncio.to_thread(finished_runs)
        return _json([{"id": run.run_id} for run in found if run.run_id != shown])

    async def run_figures(request: Request) -> Response:
        name = request.path_params["name"]
        snapshot = await asyncio.to_thread(read_finished, name)
        if snapshot is None:
            return PlainTextResponse(f"no finished run {name!r} is known here\n", 404)
        return _json({"id": name, "figures": figures_of(snapshot)})

    async def latest_report(_: Request) -> Response:
        snapshot = feed.latest
        if snapshot is None:
            return PlainTextResponse("there is no run yet\n", 404)
        return _report(snapshot, download=False)

    async def report_of(request: Request) -> Response:
        broadcast.catch_up()
        wanted = request.path_params["run_id"]
        latest = feed.latest
        snapshot = broadcast.finished.get(wanted)
        if snapshot is None and latest is not None and latest.run_id == wanted:
            snapshot = latest
        if snapshot is None:
            snapshot = await asyncio.to_thread(read_finished, wanted)
        if snapshot is None:
            return PlainTextResponse(f"no run {wanted!r} is known here\n", 404)
        return _report(snapshot, download="download" in request.query_params)

    async def metrics(request: Request) -> Response:
        from rlplane.sinks.prometheus import render

        try:
            body, content_type = render(lambda: feed.latest, request.headers.get("accept", ""))
        except MissingExtraError as error:
            return PlainTextResponse(f"{error}\n", 501)
        return Response(body, headers={"content-type": content_type})

    async def favicon(_: Request) -> Response:
        return RedirectResponse("/static/mark.svg")

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(broadcast.run())
        try:
            yield
        finally:
            broadcast.close()
            await task

    app = Starlette(
        routes=[
            Route("/", page),
            Route("/events", events),
            Route("/api/view", view),
            Route("/api/history", history),
            Route("/api/runs", runs),
            Route("/api/runs/{name:path}", run_figures),
            Route("/report", latest_report),
            Route("/report/{run_id:path}.html", report_of),
            Route("/metrics", metrics),
            Route("/favicon.ico", favicon),
            Mount("/static", StaticFiles(directory=static)),
        ],
        middleware=[Middleware(Guard, gate=gate)],
        lifespan=lifespan,
    )
    app.state.broadcast = broadcast
    return app


def _json(content: Any) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")


def _report(snapshot: MetricsSnapshot, *, download: bool) -> Response:
    from rlplane.report import Report, render_html

    source = "published" if snapshot.state.is_final else "live"
    headers = {"content-security-policy": _REPORT_POLICY}
    if download:
        safe = "".join(char if char.isalnum() or char in "-_." else "_" for char in snapshot.run_id)
        headers["content-disposition"] = f'attachment; filename="rlplane-{safe}.html"'
    html = render_html(Report.from_snapshot(snapshot, source=source))
    return Response(html, media_type="text/html; charset=utf-8", headers=headers)


class DashboardServer(uvicorn.Server):
    """The page on a socket that already listens. ``run()`` serves until a signal, or ``should_exit``.

    Args:
        feed: What is shown.
        listening: Where.
        gate: Who may see it.
        on_ready: Called once the page can be opened.
        half_open: What bounds connections that do not ask for anything.
    """

    def __init__(
        self,
        feed: RunFeed,
        listening: socket.socket,
        gate: Gate,
        on_ready: Callable[[], None] = lambda: None,
        half_open: HalfOpenConnections | None = None,
    ) -> None:
        app = make_app(feed, gate)
        # An empty one is false.
        protocol = partial(GuardedProtocol, HalfOpenConnections() if half_open is None else half_open)
        super().__init__(
            uvicorn.Config(
                app,
                http=cast(type[asyncio.Protocol], protocol),
                ws="none",
                log_level="warning",
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=2,
            )
        )
        self._listening = listening
        self._broadcast: Broadcast = app.state.broadcast
        self._on_ready = on_ready

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        super().run(sockets or [self._listening])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # The event streams first: uvicorn waits for open answers, and a stream never ends by itself.
        self._broadcast.close()
        await super().shutdown(sockets)


def serve_dashboard(
    feed: RunFeed,
    *,
    token: str | None,
    host: str = "127.0.0.1",
    port: int | None = None,
    names: Sequence[str] = (),
    on_ready: Callable[[str], None] = lambda address: None,
) -> None:
    """Serve the page until SIGINT or SIGTERM.

    Args:
        feed: What is shown.
        token: Required from every request; None: from none.
        host: Where to listen. Anything but this machine needs a token.
        port: Which port; 0 for any free one, None for :data:`DEFAULT_PORT` or the next free one.
        names: Names, beside this machine's own, by which the page may be asked for.
        on_ready: Called with the address once it can be opened; with the token in it, if there is one.

    Raises:
        ConfigError: Another host without a token.
        PlaneConnectionError: The port cannot be had.
    """
    if not is_loopback(host) and token is None:
        raise ConfigError(f"listening on {host!r} needs a token: anybody who can reach it would see the run")
    with listen(host, port) as listening:
        shown = f"[{host}]" if ":" in host else host
        address = with_token(f"http://{shown}:{listening.getsockname()[1]}/", token)
        DashboardServer(feed, listening, Gate(token, host, names), lambda: on_ready(address)).run()


def listen(host: str, port: int | None) -> socket.socket:
    """A listening socket; None for the port means the default one, or the next that is free."""
    candidates = range(DEFAULT_PORT, DEFAULT_PORT + _PORTS_TO_TRY) if port is None else (port,)
    error: OSError | None = None
    for candidate in candidates:
        try:
            family, *_, address = socket.getaddrinfo(host, candidate, type=socket.SOCK_STREAM)[0]
            return socket.create_server(address[:2], family=family)
        except OSError as failure:
            error = failure
    raise PlaneConnectionError(
        f"cannot listen on {host}:{candidates[0]}: {error.strerror if error else 'no port'}"
    ) from error
