"""How a write becomes part of the control state."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from rlplane.control.requests import Effects, LostRows, Put
from rlplane.control.staging import Staging
from rlplane.errors import DataPlaneError, InvalidRequestError
from rlplane.service import protocol as wire
from rlplane.service.clients import Client, PendingRequest
from rlplane.service.commit_checks import check_turns, checked_sizes
from rlplane.service.long_work import LongWork, StalePlaceError
from rlplane.service.naming import take_names
from rlplane.storage.keyed import lost_chunks
from rlplane.storage.places import Place

if TYPE_CHECKING:
    from rlplane.service.core import ControlService

__all__ = ["PutWork", "StalePlaceError", "StaleSpecError", "commit", "is_long_commit"]

_MANY_TO_FREE = 65_536  # what was said of more than these is freed some at a time
_MANY_SAMPLES = 8192  # more than these take longer than some ten milliseconds


class StaleSpecError(DataPlaneError):
    """The partition was registered again since the client looked; it asks and encodes anew."""


def commit(service: ControlService, request: PendingRequest, held: Client, body: wire.Commit) -> None:
    """A client has filled a place: make what is in it part of the state, or let it wait for room."""
    if body.named is not None:
        take_names(held, body)
    place = _committed_place(service, held, body)
    blocks: dict[str, int] = {}
    try:
        partition = service.state.partition(body.partition_id)
        if partition.version != body.version:
            raise StaleSpecError(f"partition {body.partition_id!r} was registered again")
        is_long = is_long_commit(body)
        sizes = checked_sizes(body, 0 if place is None else place.size, checks_ids=not is_long)
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
        if is_long:
            service.work.append(PutWork(request, put, service.state.begin_put(put), body))
            return
        if body.appends:
            check_turns(body, partition.table, partition.live_rows(body.ids), service.table.blocks)
        effects = service.state.put(put)
    except DataPlaneError:
        if blocks:
            service.table.forget(blocks.values(), service.storage)
        elif place is not None:
            service.storage.free(place)
        raise
    _carry_out(service, request, effects, body.timeout_s)


def is_long_commit(body: wire.Commit) -> bool:
    """Whether a commit is of so many samples that it is made ready some at a time."""
    return len(body.ids) > _MANY_SAMPLES


class PutWork(LongWork):
    """A put of very many samples, which is made ready in slices and written in the last one."""

    def __init__(self, request: PendingRequest, put: Put, staging: Staging, body: wire.Commit) -> None:
        super().__init__([request])
        self._put, self._staging, self._timeout_s = put, staging, body.timeout_s
        self._appended = msgspec.structs.replace(body, ids=[], tags=None) if body.appends else None
        self._version = staging.partition.version
        self._refusal: DataPlaneError | None = None
        self._is_written = False

    def do_slice(self, service: ControlService, effects: Effects) -> bool:
        """See :class:`~rlplane.service.long_work.LongWork`."""
        if self._is_written:
            return self._staging.free_some()
        (request,), partition = self.requests, self._staging.partition
        try:
            if (
                service.state.partitions.get(self._put.partition_id) is not partition
                or partition.version != self._version
            ):
                raise StaleSpecError(f"partition {self._put.partition_id!r} is not what it was")
            if self._refusal is not None:
                raise self._refusal
            if not self._staging.is_over:
                self._staging.make_some_ready()
                return False
            if self._appended is not None:
                self._staging.catch_up()
                check_turns(self._appended, partition.table, self._staging.known_rows, service.table.blocks)
            written = service.state.put(self._put)
        except DataPlaneError as error:
            self.give_up(service)
            service.send(request, wire.failure_of(error))
        else:
            self._is_written = any(answered is request for answered, _ in written.answers)
            _carry_out(service, request, written, self._timeout_s)
        self.requests = []  # it is answered, or waits for room as any other
        return not self._is_written or len(self._staging.rows) <= _MANY_TO_FREE

    def lose(self, lost: LostRows, refusal: DataPlaneError) -> None:
        """See :class:`~rlplane.service.long_work.LongWork`."""
        if not lost.keys().isdisjoint(self._put.blocks.values()):
            self._refusal = refusal

    def give_up(self, service: ControlService) -> bool:
        """See :class:`~rlplane.service.long_work.LongWork`."""
        self._staging.undo()
        if self._put.blocks:
            service.table.forget(self._put.blocks.values(), service.storage)
        return True


def _carry_out(service: ControlService, request: PendingRequest, effects: Effects, timeout_s: float) -> None:
    if all(answered is not request for answered, _ in effects.answers):
        service.set_deadline(request, timeout_s)
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
