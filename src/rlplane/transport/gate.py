"""Who may ask an HTTP server of ours: ``rlplane dash``, and the aggregator's ``/metrics``.

Every request has to carry the token: in a cookie, in a bearer header or, for the first visit, in the address.
That one is turned into a cookie and taken out of the address bar. The Host header has to be a name of this
machine: a web page elsewhere that makes its own name resolve to 127.0.0.1 gets nothing.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import os
import secrets
import socket
from collections.abc import Iterable, Mapping
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qsl, quote, urlencode

from rlplane.errors import ConfigError

TOKEN_VARIABLE = "RLPLANE_TOKEN"
COOKIE = "rlplane_token"
_COOKIE_AGE_S = 7 * 24 * 3600
_SHORTEST_TOKEN = 8


def choose_token(file: Path | None, *, none: bool = False) -> str | None:
    """The token of ``file``, else of the environment variable ``RLPLANE_TOKEN``, else a new one.

    It never comes from a command line, which every user of the machine can read.

    Args:
        file: Holds the token and nothing else; space around it does not count.
        none: There shall be no token.

    Raises:
        ConfigError: The file cannot be read, or the token can be guessed.
    """
    if none:
        if file is not None:
            raise ConfigError("--token-file and --no-token exclude each other")
        return None
    if file is not None:
        try:
            return _checked(file.read_text(encoding="utf-8"), str(file))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the token from {file}: {error}") from error
    if TOKEN_VARIABLE in os.environ:
        return _checked(os.environ[TOKEN_VARIABLE], TOKEN_VARIABLE)
    return secrets.token_urlsafe(32)


def _checked(text: str, source: str) -> str:
    token = text.strip()
    if not token:
        raise ConfigError(f"the token in {source} is blank")
    if len(token) < _SHORTEST_TOKEN:
        raise ConfigError(
            f"the token in {source} has {len(token)} characters; a guess must be hopeless:"
            f" at least {_SHORTEST_TOKEN}"
        )
    if not token.isprintable():
        raise ConfigError(f"the token in {source} must be one line of printable characters")
    return token


def with_token(address: str, token: str | None) -> str:
    """The address as it is shown to the person who started the server."""
    return address if token is None else f"{address}?token={quote(token, safe='')}"


def is_loopback(host: str) -> bool:
    """Whether a host name or address can only be this machine."""
    address = _address(host.strip("[]"))
    return host == "localhost" or (address is not None and address.is_loopback)


class HttpAnswer(NamedTuple):
    """What is answered instead of what was asked for."""

    status: int
    text: str
    headers: dict[str, str]


class Gate:
    """Decides about requests.

    Args:
        token: Required from everybody; None: from nobody.
        host: Where the server listens.
        names: Names, beside this machine's own, by which it may be asked.
    """

    def __init__(self, token: str | None, host: str = "127.0.0.1", names: Iterable[str] = ()) -> None:
        self._token = None if token is None else token.encode()
        self._on_loopback = is_loopback(host)
        self._names = {name.lower() for name in names}
        if not self._on_loopback:
            self._names |= {host.lower(), socket.gethostname().lower()}

    def check(self, method: str, path: str, query: str, headers: Mapping[str, str]) -> HttpAnswer | None:
        """What to answer instead; None if the request may pass. The keys of ``headers`` are in lower case."""
        name, port = _host_and_port(headers.get("host", ""))
        if not self._is_own_name(name):
            return HttpAnswer(421, f"this machine is not asked by the name {name!r}", {})
        if self._token is None:
            return None
        cookie = f"{COOKIE}_{port}"  # A browser sends the cookies of a machine to all of its ports.
        pairs = parse_qsl(query, keep_blank_values=True)
        offered = [value for key, value in pairs if key == "token"]
        if offered and self._fits(offered[0]):
            if method != "GET" or "text/html" not in headers.get("accept", ""):
                return None  # A script asked: it needs no cookie, and may not follow a redirect.
            return self._move_into_cookie(cookie, path, [pair for pair in pairs if pair[0] != "token"])
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self._fits(bearer.strip()):
            return None
        if self._fits(_read_cookie(headers.get("cookie", ""), cookie)):
            return None
        return HttpAnswer(
            401,
            "a token is needed: open the address that was printed at the start, add ?token=…,"
            " or send the header Authorization: Bearer …",
            {"www-authenticate": "Bearer"},
        )

    def _is_own_name(self, name: str) -> bool:
        if is_loopback(name) or name in self._names:
            return True
        # An address is no name that somebody could make resolve to this machine.
        return not self._on_loopback and _address(name) is not None

    def _move_into_cookie(self, cookie: str, path: str, rest: list[tuple[str, str]]) -> HttpAnswer:
        assert self._token is not None
        # A path that begins with two slashes would be an address on another host.
        location = quote("/" + path.lstrip("/"))
        # Lax: with "strict" a link from another page, such as a chat, would lead to a page without cookie.
        # In hexadecimal, because a token may have characters that a cookie may not.
        kept = f"{cookie}={self._token.hex()}; Max-Age={_COOKIE_AGE_S}; Path=/; HttpOnly; SameSite=lax"
        where = f"{location}?{urlencode(rest)}" if rest else location
        return HttpAnswer(303, "", {"location": where, "set-cookie": kept})

    def _fits(self, offered: str) -> bool:
        # Bytes, because compare_digest refuses text that is not ASCII. Its time does not depend on where
        # the two differ.
        assert self._token is not None
        return hmac.compare_digest(offered.encode("utf-8", "surrogatepass"), self._token)


class HalfOpenConnections:
    """The connections of a server that have not sent a whole request. Use it from its event loop.

    Each is closed when its time is over, and the oldest one when there are too many: whoever asks at once
    is never kept out by those who say nothing.
    """

    def __init__(self, most: int = 64, patience_s: float = 10.0) -> None:
        self._most = most
        self._patience_s = patience_s
        self._timers: dict[asyncio.WriteTransport, asyncio.TimerHandle] = {}

    def __len__(self) -> int:
        return len(self._timers)

    def add(self, transport: asyncio.WriteTransport) -> None:
        """A request is awaited on this connection. A second call does not give it more time."""
        if transport in self._timers or transport.is_closing():
            return
        while len(self._timers) >= self._most:
            self._close(next(iter(self._timers)))
        loop = asyncio.get_running_loop()
        self._timers[transport] = loop.call_later(self._patience_s, self._close, transport)

    def remove(self, transport: asyncio.WriteTransport) -> None:
        """Its request is there, or the connection is gone."""
        timer = self._timers.pop(transport, None)
        if timer is not None:
            timer.cancel()

    def _close(self, transport: asyncio.WriteTransport) -> None:
        self.remove(transport)
        transport.abort()


def _host_and_port(header: str) -> tuple[str, str]:
    if header.startswith("["):
        name, _, rest = header[1:].partition("]")
        return name, rest.removeprefix(":")
    name, _, port = header.partition(":")
    return name.lower(), port


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def _read_cookie(header: str, name: str) -> str:
    try:
        morsel = SimpleCookie(header).get(name)
        return bytes.fromhex(morsel.value).decode() if morsel is not None else ""
    except (CookieError, ValueError):
        return ""
