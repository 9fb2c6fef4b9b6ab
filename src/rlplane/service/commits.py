"""How a write becomes part of the control state."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlplane.control.requests import Put
from rlplane.errors import DataPlaneError, InvalidRequestError
from rlplane.service import protocol as wire
from rlplane.service.clients import Client, PendingRequest
from rlplane.service.commit_checks import check_turns, checked_sizes
from rlplane.storage.keyed import lost_chunks
from rlplane.storage.places import Place

if TYPE_CHECKING:
    from rlplane.service.core import ControlService

__all__ = ["StalePlaceError", "StaleSpecError", "commit"]


class StaleSpecError(DataPlaneError):
    """The partition was registered again since the client looked; it asks and encodes anew."""


class StalePlaceError(DataPlaneError):
    """The place was taken back before the commit; the client reserves and writes anew."""


def commit(service: ControlService, request: PendingRequest, held: Client, body: wire.Commit) -> None:
    """A client has filled a place: make what is in it part of the state, or let it wait for room."""
    place = _committed_place(service, held, body)
    blocks: dict[str, int] = {}
    try:
        partition = service.state.partition(body.partition_id)
        if partition.version != body.version:
            raise StaleSpecError(f"partition {body.partition_id!r} was registered again")
        sizes = checked_sizes(body, 0 if place is None else place.size)
        if place is not None:
            blocks = service.table.add(place, body.fields, body.layouts, sizes)
        request.want = body.want
        put = Put(
            body.partition_id,
            body.ids,
            blocks,
            body.tags,
            nbytes=sizes,
            owner=request.client,
            now=service.wall,
            token=request,
            must_exist=body.must_exist,
            clock=service.now,
            appends=body.appends,
            finishes=body.finishes,
        )
        if body.appends:
            check_turns(body, partition.table, service.table.blocks)
        effects = service.state.put(put)
    except DataPlaneError:
        if blocks:
            service.table.forget(blocks.values(), service.storage)
        elif place is not None:
            service.storage.free(place)
        raise
    if all(answered is not request for answered, _ in effects.answers):
        service.set_deadline(request, body.timeout_s)
    service.carry_out(effects)


def _committed_place(service: ControlService, held: Client, body: wire.Commit) -> Place | None:
    if body.place is None:
        if body.layouts:
            raise InvalidRequestError("a commit with fields needs the place that they are in")
        return None
    place = held.pop_reserved(body.place)
    if place is None:
        raise StalePlaceError(f"place {body.place} is not reserved for this client")
    if service.dead and lost_chunks([place], service.dead):
        service.storage.free(place)
        raise StalePlaceError(f"place {body.place} is in a storage unit that has died")
    if not body.layouts or not 0 < body.used <= place.size:
        service.storage.free(place)
        raise InvalidRequestError(
            f"{body.used} bytes of {len(body.layouts)} fields do not fit into a place of {place.size}"
        )
    return service.storage.shrink(place, body.used)
