"""Calls that name very many samples: divided into requests of fewer, between which the service serves others.

What has to happen at one moment still does. A read notices when something that it asks for was written
between two of its requests, and asks again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from rlplane.adapters.link import Link
from rlplane.adapters.steps import Call, ask
from rlplane.service import protocol as wire
from rlplane.service.parts import in_parts
from rlplane.storage.joining import joined
from rlplane.storage.places import Located

__all__ = ["locate_many", "should_abort", "unclaim"]

# How often a read is made anew that others have written into. Then it is asked for in one go, and holds them
# up.
_ATTEMPTS = 4


def unclaim(partition_id: str, task: str, ids: list[str], is_finished: bool = False) -> Call[None]:
    """End a claim. The last samples are given back first: each part goes to the front of the queue."""
    for part in reversed(in_parts(ids)):
        yield from ask(wire.Unclaim(partition_id, task, part, is_finished), wire.Done)


def should_abort(partition_id: str, ids: list[str]) -> Call[list[str]]:
    """Those of the samples that nobody will train any more."""
    vain: list[str] = []
    for part in in_parts(ids):
        vain += (yield from ask(wire.ShouldAbort(partition_id, part), wire.Done)).value
    return vain


def locate_many(
    link: Link, partition_id: str, ids: list[str], fields: list[str]
) -> Call[tuple[Located, Callable[[], None]]]:
    """Where the rows of very many samples are, and what gives the leases back that keep them there."""
    for _ in range(_ATTEMPTS):
        parts = yield from _locate_parts(link, partition_id, ids, fields)
        located = joined(parts)
        if located is not None:
            return located, partial(_release, link, parts)
        _release(link, parts)
    whole = yield from ask(wire.Locate(partition_id, ids, fields), Located)
    return whole, partial(_release, link, [whole])


def _locate_parts(link: Link, partition_id: str, ids: list[str], fields: list[str]) -> Call[list[Located]]:
    parts: list[Located] = []
    try:
        for part in in_parts(ids):
            located = yield from ask(wire.Locate(partition_id, part, fields), Located)
            parts.append(located)
    except BaseException:
        _release(link, parts)
        raise
    return parts


def _release(link: Link, parts: Sequence[Located]) -> None:
    for part in parts:
        link.connection.release(part.lease)
