"""Who may see the page (``rlplane.transport.gate``), and what a browser may do with it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from uvicorn.protocols.http.h11_impl import H11Protocol

from rlplane.transport.gate import Gate, HalfOpenConnections

if TYPE_CHECKING:
    import asyncio

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self';"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}


class Guard:
    """ASGI middleware around the whole application; nothing but HTTP passes, and that only by the gate."""

    def __init__(self, app: ASGIApp, gate: Gate) -> None:
        self._app = app
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        if scope["type"] != "http":
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        query = scope["query_string"].decode("latin-1")
        answer = self._gate.check(scope["method"], scope["path"], query, Headers(scope=scope))
        respond = (
            self._app
            if answer is None
            else PlainTextResponse(f"{answer.text}\n", answer.status, answer.headers)
        )
        await respond(scope, receive, send_with_headers)


class GuardedProtocol(H11Protocol):
    """HTTP on one connection, which is closed when it does not send its request in time.

    uvicorn by itself waits for ever for the first request, and for the rest of any.
    """

    def __init__(self, half_open: HalfOpenConnections, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._half_open = half_open

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._half_open.add(transport)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._note()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._note()

    def connection_lost(self, exc: Exception | None) -> None:
        self._half_open.remove(self.transport)
        super().connection_lost(exc)

    def _note(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self._half_open.add(self.transport)
        else:
            self._half_open.remove(self.transport)
