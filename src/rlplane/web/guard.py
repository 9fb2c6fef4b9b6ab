"""Who may see the page, and what a browser may do with it.

Without a token only this machine can connect, and the Host header has to be this machine's: a web page
elsewhere that makes its own name resolve to 127.0.0.1 gets nothing. With a token every request has to carry
it, in a cookie, a bearer header or, for the first visit, in the address: that one is turned into a cookie and
taken out of the address bar.
"""

from __future__ import annotations

import hmac
import ipaddress
from http.cookies import CookieError, SimpleCookie
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse, Response

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["COOKIE", "Guard", "is_loopback"]

COOKIE = "rlplane_token"
_COOKIE_AGE_S = 7 * 24 * 3600

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


def is_loopback(host: str) -> bool:
    """Whether a host name or address can only be this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class Guard:
    """ASGI middleware around the whole application.

    Args:
        app: What is guarded.
        token: Required from everybody; None when only this machine can connect.
    """

    def __init__(self, app: ASGIApp, token: str | None = None) -> None:
        self._app = app
        self._token = token.encode() if token is not None else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        answer = self._refuse(scope)
        await (answer or self._app)(scope, receive, send_with_headers)

    def _refuse(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        if self._token is None:
            host = _host_name(headers.get("host", ""))
            if not is_loopback(host):
                return PlainTextResponse(f"this page is served to localhost, not to {host!r}\n", 421)
            return None
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        offered = [value for name, value in query if name == "token"]
        if offered and self._fits(offered[0]):
            return self._admit(scope, headers, [pair for pair in query if pair[0] != "token"])
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self._fits(bearer.strip()):
            return None
        if self._fits(_cookie(headers.get("cookie", ""))):
            return None
        return PlainTextResponse(
            "a token is needed: open the address that `rlplane dash` printed, or add ?token=…\n",
            401,
            {"www-authenticate": "Bearer"},
        )

    def _admit(self, scope: Scope, headers: Headers, rest: list[tuple[str, str]]) -> Response | None:
        if scope["method"] != "GET" or "text/html" not in headers.get("accept", ""):
            return None  # A script asked: it needs no cookie, and may not follow a redirect.
        # A path that begins with two slashes would be an address on another host.
        path = "/" + scope["path"].lstrip("/")
        answer = RedirectResponse(f"{path}?{urlencode(rest)}" if rest else path, 303)
        assert self._token is not None
        answer.set_cookie(
            COOKIE, self._token.hex(), max_age=_COOKIE_AGE_S, httponly=True, samesite="strict", path="/"
        )
        return answer

    def _fits(self, offered: str) -> bool:
        # Bytes, because compare_digest refuses text that is not ASCII. Its time does not depend on where
        # the two differ.
        assert self._token is not None
        return hmac.compare_digest(offered.encode("utf-8", "surrogatepass"), self._token)


def _host_name(header: str) -> str:
    if header.startswith("["):
        return header.partition("]")[0].lstrip("[")
    return header.partition(":")[0].lower()


def _cookie(header: str) -> str:
    try:
        morsel = SimpleCookie(header).get(COOKIE)
        # In hexadecimal, because a token may have characters that a cookie may not.
        return bytes.fromhex(morsel.value).decode() if morsel is not None else ""
    except (CookieError, ValueError):
        return ""
