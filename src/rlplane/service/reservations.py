"""``Reservations``: who gets a place in storage, and when.

What does not fit waits, and is served by whatever gives room back. A client that writes gets a spare place
along with the answer, so that it need not ask for the next one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlplane.control.line import WaitingLine
from rlplane.errors import CapacityError, InvalidRequestError
from rlplane.service import protocol as wire
from rlplane.service.admission import WaitingReservation, is_for_live_samples, may_use
from rlplane.service.clients import Client, PendingRequest
from rlplane.service.naming import names_of
from rlplane.storage.places import Place

if TYPE_CHECKING:
    from rlplane.service.core import ControlService


class Reservations:
    """The reservations of one service, those that wait among them. So many bytes are kept for samples that
    exist."""

    def __init__(self, service: ControlService, kept_for_live: int) -> None:
        self._service, self._kept_for_live = service, kept_for_live
        self.waiting: WaitingLine[WaitingReservation] = WaitingLine()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_service"}

    def belong_to(self, service: ControlService) -> None:
        """After a dump was read: of which service they are."""
        self._service = service

    def ask(self, request: PendingRequest, held: Client, body: wire.Reserve) -> wire.Answer | None:
        """A client wants room: it gets it now, or waits for it."""
        limit = self._service.storage.limit
        if body.nbytes < 1:
            raise InvalidRequestError(f"a reservation is of at least one byte, and not of {body.nbytes}")
        if limit is not None and body.nbytes > limit:
            raise CapacityError(
                f"a put of {body.nbytes:,} bytes can never fit into global_segment_size {limit:,}"
            )
        wanted = WaitingReservation(request, body.nbytes, body.partition_id, names_of(held, body))
        place = None if self.waiting else self._allocate(wanted)
        if place is None:
            self.waiting.append(wanted, self._service.now)
            self._service.set_deadline(request, body.timeout_s)
            self.retry()
            return None
        held.reserved[place.number] = place
        held.grant(request, place)
        return wire.Reserved(place)

    def _allocate(self, wanted: WaitingReservation) -> Place | None:
        if self._service.dead and len(self._service.dead.units) == self._service.dead.of:
            raise CapacityError(
                f"all {self._service.dead.of} storage units have died: there is nowhere to write to"
            )
        place = self._allocate_if_free(wanted)
        if place is None and self.reclaim_spares():
            place = self._allocate_if_free(wanted)
        return place

    def _allocate_if_free(self, wanted: WaitingReservation) -> Place | None:
        limit = self._service.storage.limit
        if (
            limit is not None
            and not may_use(wanted.nbytes, self._service.storage.used, limit, self._kept_for_live)
            and not is_for_live_samples(wanted, self._service.state.partitions)
        ):
            return None
        return self._service.storage.reserve(wanted.nbytes, wanted.request.client)

    def _rank(self, waiting: WaitingReservation) -> int:
        return 0 if is_for_live_samples(waiting, self._service.state.partitions) else 1

    def reclaim_spares(self) -> bool:
        """Take back what clients hold for a next put that they may never make."""
        reclaimed = False
        for client, held in self._service.clients.items():
            if held.spare is not None and self._service.storage.revoke_spare(client):
                self._service.storage.free(held.spare)
                held.spare = None
                reclaimed = True
        return reclaimed

    def spare_for(self, request: PendingRequest) -> Place | None:
        """Room for the client's next put, sent along so that it need not ask; only if there is plenty."""
        held = self._service.clients.get(request.client)
        if held is None or request.want < 1:
            return None
        if held.spare is not None:
            if held.spare.size >= request.want or not self._service.storage.revoke_spare(request.client):
                return None
            self._service.storage.free(held.spare)
            held.spare = None
        limit = self._service.storage.limit
        if self.waiting or (limit is not None and self._service.storage.used + request.want > limit // 2):
            return None
        try:
            held.spare = self._service.storage.reserve(request.want, request.client)
        except CapacityError:
            return None
        if held.spare is not None:
            self._service.storage.offer_spare(request.client, held.spare)
        return held.spare

    def retry(self) -> None:
        """Serve the reservations that wait, as far as it is their turn and there is room."""
        self.waiting.serve(
            self._service.now, lambda: -self._service.storage.used, self._grant_if_it_fits, self._rank
        )

    def _grant_if_it_fits(self, waiting: WaitingReservation) -> bool:
        """False if the reservation has to go on waiting."""
        try:
            place = self._allocate(waiting)
        except CapacityError as error:
            self._service.send(waiting.request, wire.failure_of(error))
            return True
        if place is None:
            return False
        held = self._service.clients[waiting.request.client]
        held.reserved[place.number] = place
        held.grant(waiting.request, place)
        self._service.send(waiting.request, wire.Reserved(place))
        return True
