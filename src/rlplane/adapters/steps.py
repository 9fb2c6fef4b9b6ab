"""What a call to the plane consists of, without saying how each step is waited for.

A call is a generator that yields its steps and is sent their results. ``PlaneClient`` performs them one after
the other in the calling thread, and ``AsyncPlaneClient`` on an event loop. So what a put or a read does is
written once.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, TypeAlias, TypeVar

import msgspec

from rlplane.service import protocol as wire

T = TypeVar("T")
A = TypeVar("A")


class Exchange(msgspec.Struct, frozen=True):
    """Send a request and get its answer, a failure among them. ``waits_s`` is how long the service may take
    because it waits for somebody else."""

    request: wire.Request
    waits_s: float = 0.0


class MoveBytes(msgspec.Struct, frozen=True):
    """Call ``function``, which encodes, copies or fetches bytes, and get what it returns. ``about`` says
    about how many those are, for a client that does not want to wait for many."""

    function: Callable[[], Any]
    about: Callable[[], int]


class Undo(msgspec.Struct, frozen=True):
    """Send a request that gives something back, because the call has failed. Its answer is of no interest."""

    request: wire.Request


Step: TypeAlias = Exchange | MoveBytes | Undo

Call: TypeAlias = Generator[Step, Any, T]
"""A call under way. An error in a step, a cancellation among them, is thrown into it. From then on it yields
nothing but :class:`Undo`, which nobody has to wait for."""


def ask(request: wire.Request, expected: type[A], *, waits_s: float = 0.0) -> Call[A]:
    """Send a request and return its answer; a failure is raised."""
    answer = yield Exchange(request, waits_s)
    if isinstance(answer, wire.Failure):
        raise wire.error_of(answer)
    assert isinstance(answer, expected)
    return answer
