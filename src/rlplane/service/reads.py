"""How a client finds what it reads, and keeps it while it does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlplane.service import protocol as wire
from rlplane.service.clients import Client, PendingRequest
from rlplane.service.field_rows import field_rows

if TYPE_CHECKING:
    from rlplane.service.core import ControlService


def locate(service: ControlService, request: PendingRequest, held: Client, body: wire.Locate) -> wire.Located:
    """Where the fields of samples are, under a lease."""
    found = service.state.locate(body.partition_id, body.ids, body.fields)
    rows = []
    used: dict[int, None] = {}
    for pieces in found.values():
        field, numbers = field_rows(pieces)
        rows.append(field)
        used.update(dict.fromkeys(numbers))
    places, located = service.table.lease(used)
    lease = service.new_lease(held, [place.number for place in places])
    held.grant(request, lease)
    partition = service.state.partition(body.partition_id)
    paths = None
    if not partition.columns.keys() >= set(body.fields):
        paths = [name[len(partition.table.field_of(name)) + 1 :] for name in body.fields]
    return wire.Located(lease, places, located, rows, paths, service.table.next_number)
