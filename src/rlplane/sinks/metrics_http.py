"""``/metrics`` over HTTP, on a thread of its own. No connection costs a thread, and none stays for ever."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from http import HTTPStatus

from rlplane.errors import PlaneConnectionError
from rlplane.transport.gate import Gate, HalfOpenConnections

_LONGEST_REQUEST = 16 * 1024
_PATIENCE_S = 10.0


class MetricsHttpServer:
    """Answers one request per connection, until it is closed.

    Args:
        port: Which port of this machine; 0 picks a free one.
        render: Makes the exposition for an Accept header, and says its content type. Called on a thread.
        token: Required from every request; None: from none.
        patience_s: How long a connection may take for its request, and how long for reading the answer.
        most_half_open: The most connections that have not sent their request.

    Raises:
        PlaneConnectionError: The port cannot be had.
    """

    def __init__(
        self,
        port: int,
        render: Callable[[str], tuple[bytes, str]],
        token: str | None = None,
        *,
        patience_s: float = _PATIENCE_S,
        most_half_open: int = 64,
    ) -> None:
        host = "127.0.0.1"
        try:
            listening = socket.create_server((host, port))
        except OSError as error:
            raise PlaneConnectionError(f"cannot serve metrics on {host}:{port}: {error.strerror}") from error
        self.port: int = listening.getsockname()[1]
        self.address = f"http://{host}:{self.port}/metrics"
        self._render = render
        self._gate = Gate(token, host)
        self._patience_s = patience_s
        self._half_open = HalfOpenConnections(most_half_open, patience_s)
        self._loop = asyncio.new_event_loop()
        self._end = asyncio.Event()
        self._thread = threading.Thread(
            target=self._run, args=(listening,), name="rlplane-metrics-http", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop serving. Idempotent."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._end.set)
            self._thread.join()

    def _run(self, listening: socket.socket) -> None:
        async def serve() -> None:
            server = await asyncio.start_server(self._serve, sock=listening, limit=_LONGEST_REQUEST)
            await self._end.wait()
            server.close()
            connections = asyncio.all_tasks() - {asyncio.current_task()}
            for connection in connections:
                connection.cancel()
            await asyncio.gather(*connections, return_exceptions=True)

        with contextlib.closing(self._loop), contextlib.closing(listening):
            self._loop.run_until_complete(serve())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._half_open.add(writer.transport)
        try:
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except asyncio.LimitOverrunError:
                head = b""
            self._half_open.remove(writer.transport)
            writer.write(await self._answer(head.decode("latin-1")))
            async with asyncio.timeout(self._patience_s):
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except TimeoutError:
            # Reset it: the kernel would keep what was not read, for a client that never reads.
            reset = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
        except (OSError, EOFError):
            pass  # Whoever asked is gone.
        finally:
            self._half_open.remove(writer.transport)
            writer.transport.abort()

    async def _answer(self, head: str) -> bytes:
        first, *lines = head.removesuffix("\r\n\r\n").split("\r\n")
        try:
            method, target, version = first.split(" ")
            headers = {name.lower(): value.strip() for name, value in (line.split(":", 1) for line in lines)}
        except ValueError:
            return _response(400, "this is not HTTP\n")
        # Of two Host headers one would be checked, and the other perhaps believed.
        if not version.startswith("HTTP/1.") or len(headers) < len(lines):
            return _response(400, "this is not a request that is understood here\n")
        path, _, query = target.partition("?")
        refusal = self._gate.check(method, path, query, headers)
        if refusal is not None:
            return _response(refusal.status, f"{refusal.text}\n", refusal.headers)
        if method not in ("GET", "HEAD"):
            return _response(405, "only GET and HEAD\n", {"allow": "GET, HEAD"})
        if path != "/metrics":
            return _response(404, "the figures are at /metrics\n")
        body, content_type = await asyncio.to_thread(self._render, headers.get("accept", ""))
        return _response(200, body, {"content-type": content_type}, head_only=method == "HEAD")


def _response(
    status: int, body: str | bytes, headers: dict[str, str] | None = None, *, head_only: bool = False
) -> bytes:
    content = body.encode() if isinstance(body, str) else body
    lines = {
        "content-type": "text/plain; charset=utf-8",
        "content-length": str(len(content)),
        "connection": "close",
        "cache-control": "no-store",
        "x-content-type-options": "nosniff",
        **(headers or {}),
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    start = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n{head}\r\n".encode("latin-1")
    return start if head_only else start + content
