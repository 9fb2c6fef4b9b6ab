"""Calls that name very many samples: divided into requests of fewer, between which the service serves others.

What has to happen at one moment still does. A read notices when something that it asks for was written
between two of its requests, and asks again.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rlplane.adapters.link import Link
from rlplane.adapters.steps import Call, Undo, ask
from rlplane.service import protocol as wire
from rlplane.service.parts import are_many, in_parts
from rlplane.storage.joining import joined
from rlplane.storage.places import Located

# How often a read is made anew that others have written into. Then it is asked for in one go, and holds them
# up.
_ATTEMPTS = 4


def name(ids: list[str], tags: list[dict[str, Any]] | None = None) -> Call[int]:
    """Name the samples of a request that follows; return what it says instead. If it does not follow, it has
    to be said (:class:`~rlplane.service.protocol.Unname`)."""
    named, at = secrets.randbits(62), 0
    try:
        for part in in_parts(ids):
            of_part = None if tags is None else tags[at : at + len(part)]
            yield from ask(wire.Naming(named, at, part, of_part), wire.Done)
            at += len(part)
    except GeneratorExit:
        raise  # nobody drives this call any more
    except BaseException:
        yield Undo(wire.Unname(named))
        raise
    return named


def clear(partition_id: str, ids: list[str]) -> Call[int]:
    """Clear samples; return how many there were. A clear that was begun is done to its end."""
    request = wire.Clear(partition_id, ids)
    if are_many(ids):
        request = wire.Clear(partition_id, [], (yield from name(ids)))
    cleared: int = (yield from ask(request, wire.Done)).value
    return cleared


def mark_claimed(partition_id: str, task: str, ids: list[str]) -> Call[bool]:
    """Mark samples as claimed by a task; return whether that could be done, of all of them or of none."""
    request = wire.MarkClaimed(partition_id, task, ids, True)
    if are_many(ids):
        request = wire.MarkClaimed(partition_id, task, [], True, (yield from name(ids)))
    marked: bool = (yield from ask(request, wire.Done)).value
    return marked


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
