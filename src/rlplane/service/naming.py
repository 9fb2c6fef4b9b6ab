"""The samples of requests that name very many: they come before the request, some at a time."""

from __future__ import annotations

from rlplane.errors import InvalidRequestError
from rlplane.service import protocol as wire
from rlplane.service.clients import Client


def note_names(held: Client, body: wire.Naming | wire.Unname) -> wire.Done:
    """Take some more names, or forget those that have come."""
    if isinstance(body, wire.Unname):
        held.named.pop(body.named, None)
        return wire.Done()
    ids, tags = held.named.setdefault(body.named, ([], None if body.tags is None else []))
    if body.at > len(ids) or (tags is None) != (body.tags is None):
        raise InvalidRequestError(f"the samples from the {body.at}th on do not belong to those before them")
    ids[body.at :] = body.ids  # they may come twice, over a connection that broke
    if tags is not None and body.tags is not None:
        tags[body.at :] = body.tags
    return wire.Done()


def names_of(held: Client, body: wire.Reserve) -> list[str]:
    """The samples of a request that others with the same names will follow."""
    return body.ids if body.named is None else held.named.get(body.named, ([], None))[0]


def take_names(held: Client, body: wire.Commit | wire.Clear | wire.MarkClaimed) -> None:
    """Let a request have the samples that were named before it. A commit without them is of none, which is
    refused where its place is given back."""
    assert body.named is not None
    if not isinstance(body, wire.Commit) and body.named not in held.named:
        raise InvalidRequestError(f"the names of the samples of a {type(body).__name__} have not come")
    body.ids, tags = held.named.pop(body.named, ([], None))
    if isinstance(body, wire.Commit):
        body.tags = tags
