"""One thread serves everybody: how long it was busy with one thing, and how it is kept from being so."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator

from rlplane.control.conditions import Look
from rlplane.control.looking_ahead import (
    look_for,
    look_for_claim,
    look_for_registration,
    look_for_status,
    takes_long,
)
from rlplane.control.requests import Claim
from rlplane.control.state import ControlState
from rlplane.errors import DataPlaneError
from rlplane.service import protocol as wire

_WINDOW_S = 10.0
_SLICE_S = 0.01
_SHORT_S = 0.002
MAY_LOOK_LONG: frozenset[type[wire.Request]] = frozenset(
    {wire.ClaimRequest, wire.Peek, wire.Count, wire.Status, wire.Register}
)
"""The kinds of request before which :func:`look_ahead` may find something to do."""


class LookAhead:
    """Looks that come before a request, in slices of time: call it until it returns True."""

    def __init__(self, looks: Iterator[Look]) -> None:
        self._looks = looks
        self._look: Look | None = None

    def __call__(self) -> bool:
        began = time.perf_counter()
        end = began + _SLICE_S

        def is_over() -> bool:
            return time.perf_counter() >= end

        while True:
            if self._look is None:
                self._look = next(self._looks, None)
                if self._look is None:
                    # The request takes its time too: after a long look, others come first.
                    return time.perf_counter() < began + _SHORT_S
            if not self._look(is_over):
                return False
            self._look = None


def look_ahead(state: ControlState, request: wire.Request) -> LookAhead | None:
    """What has to be done before a request is handled, in pieces, so that others are served between them.

    A condition or an order that nobody has asked for yet looks at the tags of many samples. It is called
    until it returns True; None if there is nothing to do. It changes nothing but the time that the request
    will take.
    """
    try:
        match request:
            case wire.ClaimRequest(partition_id, task, fields, size, where=where, order=order) if (
                where
                or takes_long(
                    state,
                    partition_id,
                    task,
                    fields,
                    order,
                    reads_tags=request.max_tokens is not None or bool(request.repeat_where),
                )
            ):
                claim = Claim(
                    partition_id,
                    task,
                    fields,
                    size,
                    where,
                    order=order,
                    max_tokens=request.max_tokens,
                    max_uses=request.max_uses,
                    repeat_where=request.repeat_where,
                )
                looks = look_for_claim(state, claim)
            case wire.Peek(partition_id, where, order=order) if where or order:
                looks = look_for(state, partition_id, where, order)
            case wire.Count(partition_id, where) if where:
                looks = look_for(state, partition_id, where)
            case wire.Register(spec, False):
                looks = look_for_registration(state, spec)
            case wire.Status(partition_id):
                looks = look_for_status(state, partition_id)
            case _:
                return None
    except DataPlaneError:
        return None  # the request will be refused
    return LookAhead(looks)


def collect_young_garbage_only() -> None:
    """Let the garbage collector of this process leave what is old alone: to look at all groups of a million
    samples takes it half a second, in which nobody is served. The state has no cycles, so what is dropped is
    freed without it."""
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, 2**31 - 1)


def collect_new_garbage_only() -> None:
    """The same where others run too, whose garbage has to be collected: leave out what there is so far, above
    all what was imported, which takes longer to look at than the state does later."""
    gc.collect()
    gc.freeze()


def use_small_pages() -> None:
    """Let numpy not ask for large pages in this process. To make room for one in memory that is in pieces
    takes the kernel many milliseconds, which whoever writes to a new array of some megabytes waits for."""
    # Its documented switch is a variable that is read before anything of this runs.
    with contextlib.suppress(ImportError):
        from numpy._core.multiarray import _set_madvise_hugepage  # type: ignore[attr-defined]

        _set_madvise_hugepage(False)


class LoopStall:
    """The longest stall ever, and the longest of the last ten to twenty seconds."""

    def __init__(self) -> None:
        self._longest = self._now = self._before = 0.0
        self._window = 0.0

    def record(self, seconds: float, now: float) -> None:
        """The loop was busy for so long, until ``now``."""
        if now >= self._window + _WINDOW_S:
            self._before = self._now if now < self._window + 2 * _WINDOW_S else 0.0
            self._now, self._window = 0.0, now
        if seconds > self._now:
            self._now = seconds
            self._longest = max(self._longest, seconds)

    def describe(self) -> dict[str, float]:
        """In milliseconds, for people."""
        recent = max(self._now, self._before)
        return {"max": round(1e3 * self._longest, 3), "recent": round(1e3 * recent, 3)}
