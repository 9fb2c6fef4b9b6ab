"""Where the time of one call to the plane went: waiting for others, round trips to the service, bytes.

Whoever measures calls opens an account with :func:`timed_call`; an engine that finds one open enters its
steps. An engine that knows nothing of this leaves the account empty.
"""

from __future__ import annotations

from contextvars import ContextVar, Token


class CallTimes:
    """Seconds of one call. ``waiting_s`` is the time in which the service had the request and waited: a claim
    for samples, a put for room. ``entered`` says that the engine has entered anything."""

    __slots__ = ("bytes_s", "entered", "round_trips_s", "waiting_s")

    def __init__(self) -> None:
        self.waiting_s = self.round_trips_s = self.bytes_s = 0.0
        self.entered = False

    def add_exchange(self, took_s: float, answer: object) -> None:
        """Enter a request and its answer, which says how long the service waited."""
        waited_s = min(getattr(answer, "waited_s", 0.0), took_s)
        self.waiting_s += waited_s
        self.round_trips_s += took_s - waited_s
        self.entered = True

    def add_bytes(self, took_s: float) -> None:
        """Enter the encoding, copying or fetching of columns."""
        self.bytes_s += took_s
        self.entered = True


_open: ContextVar[CallTimes | None] = ContextVar("rlplane_call_times", default=None)

open_account = _open.get
"""The account of the call under way in this thread or task, or None."""


class timed_call:
    """Open an account for the call in this block."""

    __slots__ = ("_token",)

    def __enter__(self) -> CallTimes:
        times = CallTimes()
        self._token: Token[CallTimes | None] = _open.set(times)
        return times

    def __exit__(self, *exc_info: object) -> None:
        _open.reset(self._token)
