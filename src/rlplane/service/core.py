"""``ControlService``: the control state, the places of a storage and the leases on them, without sockets.

Every request comes through :meth:`ControlService.handle` and is answered through ``send``, at once or when
another request completes it. A client is a number; when it goes, what it held comes back.
"""

from __future__ import annotations

import heapq
import logging
import os
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from rlplane.control.line import WaitingLine
from rlplane.control.partition import Partition
from rlplane.control.requests import Batch, Claim, Effects, Put
from rlplane.control.state import ControlState
from rlplane.errors import (
    CapacityError,
    CapacityTimeoutError,
    DataPlaneError,
    InvalidRequestError,
    PlaneConnectionError,
)
from rlplane.service import protocol as wire
from rlplane.service.admission import WaitingReservation, is_for_live_samples, may_use
from rlplane.service.block_table import Block, BlockTable
from rlplane.service.checkpoints import Checkpoints
from rlplane.service.clients import Client, PendingRequest
from rlplane.service.commit_checks import checked_sizes
from rlplane.service.field_rows import field_rows
from rlplane.service.journal import (
    Abandoned,
    Asked,
    Expired,
    HungUp,
    Joined,
    Journal,
    Left,
    Lost,
    Retried,
    WentOn,
)
from rlplane.service.long_work import LongWork
from rlplane.service.lost_rows import lost_rows
from rlplane.service.stall import LookAhead, LoopStall
from rlplane.storage.keyed import lost_chunks
from rlplane.storage.places import Loss, Place, StorageHost

__all__ = ["ControlService", "PendingRequest", "StaleSpecError"]

logger = logging.getLogger(__name__)

_FOREVER_S = 1e9
# Monotonic clocks of one boot agree with the time of day to within this; it is set by hand at times.
_ANOTHER_CLOCK_S = 300.0


class StaleSpecError(DataPlaneError):
    """The partition was registered again since the client looked; it asks and encodes anew."""


class StalePlaceError(DataPlaneError):
    """The place was taken back before the commit; the client reserves and writes anew."""


class ControlService:
    """One plane. ``send(request, answer)`` delivers an answer. Not thread-safe: its owner serialises calls,
    and sets ``now`` (a monotonic clock) and ``wall`` (the time of day) before each. The share
    ``reserve_for_live`` of the bytes is for samples that exist."""

    def __init__(
        self,
        capacity: int,
        storage: StorageHost,
        send: Callable[[PendingRequest, wire.Answer], None],
        journal: Journal | None = None,
        *,
        reserve_for_live: float = 0.0,
    ) -> None:
        self.state = ControlState(capacity)
        self.storage, self.deliver, self.journal = storage, send, journal
        # While a journal is replayed there is none to write to, and the answers are the point of it.
        self.is_journaled = journal is not None
        self.clients: dict[int, Client] = {}
        self.table = BlockTable()
        self.dead = Loss()  # the storage units that have died
        self.lost = 0  # samples that were lost with them
        self.checkpoints = Checkpoints(self)
        self._next_lease = 1
        self._kept_for_live = int((storage.limit or 0) * reserve_for_live)
        self._waiting_reservations: WaitingLine[WaitingReservation] = WaitingLine()
        self._deadlines: list[tuple[float, int, PendingRequest]] = []
        self._most_deadlines = 1024
        self._ticks = 0
        self._unanswered: dict[tuple[int, int], PendingRequest] = {}
        self._work: deque[LongWork] = deque()
        self.wall = 0.0
        self.stall = LoopStall()
        self.requests = 0
        # Counted by whoever serves it over a socket.
        self.refused = 0
        self.malformed = 0

    @property
    def now(self) -> float:
        """The time, by a monotonic clock."""
        return self.state.now

    @now.setter
    def now(self, now: float) -> None:
        self.state.now = now

    # Clients come and go

    def connect(self, client: int, secret: str = "", *, bootstrap: bool = False) -> None:
        """A client has come."""
        self.storage.join(client)  # first, because it may fail
        if self.journal is not None:
            self.journal.add(Joined(client, secret, bootstrap))
        self.clients[client] = Client()

    def disconnect(self, client: int, *, died: bool) -> None:
        """A client has gone. Its unfinished claims go back to the front of the queue."""
        held = self.clients.pop(client, None)
        if held is None:
            return
        if self.journal is not None:
            self.journal.add(Left(client, died, self.now))
        reservations = [w for w in self._waiting_reservations if w.request.client == client]
        for waiting in reservations:
            self._waiting_reservations.remove(waiting)
        if not died:
            closed = PlaneConnectionError("the client was closed")
            self.carry_out(self.state.abort(closed, client))
            for waiting in reservations:
                self.send(waiting.request, wire.failure_of(closed))
        returned, effects = self.state.release_owner(client)
        if returned:
            level, how = (logging.WARNING, "died") if died else (logging.INFO, "closed")
            logger.log(level, "client %d %s; %d claimed samples are handed out again", client, how, returned)
        for place in [*held.reserved.values(), *filter(None, [held.spare])]:
            self.storage.free(place)
        for lease in list(held.leases):
            self.drop_lease(held, lease)
        self.storage.leave(client)
        self.carry_out(effects)
        self.retry_reservations()

    def release(self, client: int, lease: int) -> None:
        """A client has dropped what it read."""
        held = self.clients.get(client)
        if held is not None and self.drop_lease(held, lease):
            self.room_came_free()

    def drop_lease(self, held: Client, lease: int) -> bool:
        places = held.leases.pop(lease, None)
        if places:
            self.table.unlease(places, self.storage)
        return self.checkpoints.thaw(lease) or bool(places)

    def room_came_free(self) -> None:
        """Something outside of any request has given room back to the storage."""
        if self._waiting_reservations:
            if self.journal is not None:
                self.journal.add(Retried(self.now))
            self.retry_reservations()

    # Requests

    def handle(self, request: PendingRequest, envelope: wire.Envelope, body: bytes = b"") -> None:
        """Serve one request. Errors of the request are answers too.

        ``body`` is the envelope as it came, for the journal. A request that is made a second time, because
        the service was started again meanwhile, is answered as the first time, or goes on waiting.
        """
        self.requests += 1
        held = self.clients.get(request.client)
        if held is None:
            gone = PlaneConnectionError(f"client {request.client} is not connected to this service")
            self.send(request, wire.failure_of(gone))
            return
        for lease in envelope.released:
            self.release(request.client, lease)
        for number in envelope.abandoned:
            self.abandon(request.client, number)
        if self.state.next_deadline() <= self.now:
            self.expire()
        changes = type(envelope.request) in wire.CHANGES
        if changes:
            for number in envelope.read:
                held.answers.pop(number, None)
            if self._is_repeated(request, held):
                return
            request.remembered = self.is_journaled
            if self.journal is not None:
                self.journal.add(
                    Asked(
                        request.client,
                        request.number,
                        request.channel,
                        self.now,
                        self.wall,
                        msgspec.Raw(body),
                    )
                )
        try:
            if request.number in held.abandoned:
                self._drop_abandoned(held, envelope.request)
                raise PlaneConnectionError("the request was abandoned by its caller")
            answer = self._serve(request, held, envelope.request)
            if answer is not None:
                self.send(request, answer)
        except DataPlaneError as error:
            self.send(request, wire.failure_of(error))
        if self._waiting_reservations and changes:
            # A commit gives back what it does not use, and all of it when it fails.
            self.retry_reservations()

    def look_ahead(self, envelope: wire.Envelope) -> Callable[[], bool] | None:
        """What has to be done before a request is handled, in pieces, so that others are served between them.

        A condition or an order that nobody has asked for yet looks at the tags of many samples. It is called
        until it returns True; None if there is nothing to do. It changes nothing but the time that the
        request will take.
        """
        try:
            match envelope.request:
                case wire.ClaimRequest(partition_id, task, fields, size, where=where, order=order) if (
                    where or self.state.sorts_many(partition_id, order)
                ):
                    claim = Claim(partition_id, task, fields, size, where, order=order)
                    looks = self.state.look_for_claim(claim)
                case wire.Peek(partition_id, where) | wire.Count(partition_id, where) if where:
                    looks = self.state.look_for(partition_id, where)
                case _:
                    return None
        except DataPlaneError:
            return None  # the request will be refused
        return LookAhead(looks)

    def _is_repeated(self, request: PendingRequest, held: Client) -> bool:
        answer = held.answers.get(request.number)
        if answer is not None:
            self.deliver(request, answer)
            return True
        waiting = self._unanswered.get((request.client, request.number)) or self._at_work_for(
            request.client, request.number
        )
        if waiting is not None:
            waiting.channel = request.channel
            return True
        return False

    def _at_work_for(self, client: int, number: int) -> PendingRequest | None:
        """The request of that number, if it has been begun."""
        for work in self._work:
            if (work.request.client, work.request.number) == (client, number):
                return work.request
        return None

    def send(self, request: PendingRequest, answer: wire.Answer) -> None:
        self._unanswered.pop((request.client, request.number), None)
        if request.remembered:
            held = self.clients.get(request.client)
            if held is not None:
                held.answers[request.number] = answer
        if request.parked is not None and isinstance(
            answer, wire.Claimed | wire.Done | wire.Failure | wire.Reserved
        ):
            # Of what is delivered alone: a service that is started again is at another time.
            answer = msgspec.structs.replace(answer, waited_s=max(self.now - request.parked, 0.0))
        self.deliver(request, answer)

    def _serve(self, request: PendingRequest, held: Client, body: wire.Request) -> wire.Answer | None:
        match body:
            case wire.Commit():
                self._commit(request, held, body)
                return None
            case wire.ClaimRequest():
                self._claim(request, body)
                return None
            case wire.Locate():
                return self._locate(request, held, body)
            case wire.Clear(partition_id, ids):
                if ids is None:
                    clearing = self.state.begin_clear_written_by(partition_id, request.client)
                else:
                    clearing = self.state.begin_clear(partition_id, ids)
                self.begin(LongWork(request, [clearing]))
                return None
            case wire.Unclaim(partition_id, task, ids, is_finished):
                self.state.partition(partition_id).task(task)
                if is_finished:
                    self.state.finish_claims(partition_id, task, ids, request.client)
                else:
                    self.carry_out(self.state.unclaim(partition_id, task, ids, request.client))
                return wire.Done()
            case wire.DropPartition(partition_id):
                clearing, effects = self.state.begin_drop(partition_id)
                self.carry_out(effects)
                self.begin(LongWork(request, [clearing]))
                return None
            case wire.Reserve():
                return self._reserve(request, held, body)
            case wire.Unreserve(number, out_of_pages):
                place = held.pop_reserved(number)
                if place is not None:
                    self.storage.free(place)
                if out_of_pages:
                    self._reclaim_spares()
                return wire.Done()
            case wire.Lost(loss):
                self.lose(loss)
                return wire.Done()
            case wire.Describe(partition_id):
                partition = self.state.partition(partition_id)
                return wire.Described(partition.version, partition.spec)
            case wire.Register(spec, extend):
                self.carry_out(self.state.register(spec, extend=extend))
                return wire.Done()
            case wire.MarkClaimed(partition_id, task, ids, is_claimed):
                marked, effects = self.state.mark_claimed(partition_id, task, ids, is_claimed=is_claimed)
                self.carry_out(effects)
                return wire.Done(marked)
            case wire.Inspect(partition_id, ids, with_kinds, numbers):
                partition = self.state.partition(partition_id)
                rows = partition.live_rows(ids) if numbers is None else partition.table.rows_numbered(numbers)
                kinds = {"kinds": self._kinds(partition, rows)} if with_kinds else {}
                return wire.Done(partition.inspect(rows) | kinds)
            case wire.Consumed(partition_id, tasks):
                return wire.Done(self.state.partition(partition_id).consumed(tasks))
            case wire.Status(partition_id):
                status = self.state.partition(partition_id).status(self.wall)
                return wire.Done(
                    status | {"capacity": self.state.capacity, "capacity_bytes": self.storage.limit}
                )
            case wire.ServiceStatus():
                return wire.Done(self.status())
            case wire.ListIds(partition_id):
                return wire.Done(list(self.state.partition(partition_id).rows))
            case wire.Peek(partition_id, where, fields, limit, order):
                batch = self.state.peek(partition_id, where, fields, limit, order)
                return wire.Claimed(batch.ids, batch.tags)
            case wire.Advance(partition_id, version):
                self.carry_out(self.state.advance(partition_id, version))
                return wire.Done()
            case wire.CloseGroup(partition_id, group, reason, fields):
                left, effects = self.state.close_group(partition_id, group, reason, fields)
                self.send(request, wire.Done(left))
                self.carry_out(effects)
                return None
            case wire.Finish(partition_id):
                self.carry_out(self.state.finish(partition_id))
                return wire.Done()
            case wire.ShouldAbort(partition_id, ids):
                return wire.Done(self.state.partition(partition_id).flow_control.should_abort(ids))
            case wire.Evicted(partition_id, limit):
                told = self.state.evicted(partition_id, limit)
                return wire.Claimed(told.ids, told.tags)
            case wire.Count(partition_id, where):
                return wire.Done(self.state.count(partition_id, where))
            case wire.Freeze():
                self.checkpoints.freeze(request, held)
                return None
            case wire.FrozenPiece(lease):
                return wire.Done(self.checkpoints.next_piece(held, lease))
            case wire.RestorePiece():
                self.checkpoints.add_piece(held, body)
                return wire.Done()
            case wire.Restore():
                self.checkpoints.restore(request, held, body)
                return None
            case wire.Unload(load):
                held.loading.pop(load, None)
                return wire.Done()
            case wire.Withdraw(numbers):
                self.withdraw(request.client, numbers)
                return wire.Done()
            case _:
                raise InvalidRequestError(f"the service does not serve {type(body).__name__} here")

    def status(self) -> dict[str, Any]:
        """What the service holds, for people and for tests."""
        clients = self.clients.values()
        return {
            "pid": os.getpid(),
            "requests": self.requests,
            "refused": self.refused,
            "malformed": self.malformed,
            "samples": self.state.live,
            "partitions": list(self.state.partitions),
            "clients": len(clients),
            "leases": sum(len(held.leases) for held in clients),
            "loop_stall_ms": self.stall.describe(),
            "reserved": sum(
                place.size
                for held in clients
                for place in [*held.reserved.values(), *filter(None, [held.spare])]
            ),
            "storage": self.storage.describe(),
            "dead_units": list(self.dead.units),
            "lost_samples": self.lost,
        }

    def carry_out(self, effects: Effects) -> None:
        """Do what follows from a change of the state: send the answers, free the blocks."""
        for request, answer in effects.answers:
            assert isinstance(request, PendingRequest)
            if isinstance(answer, Batch):
                self.send(request, self._claimed(request, answer))
            elif answer is None:
                self.send(request, wire.Done(spare=self._spare_for(request)))
            else:
                self.send(request, wire.failure_of(answer))
        if effects.freed or effects.dropped:
            self.table.drop(effects, self.storage)
            self.retry_reservations()

    # Long work

    @property
    def has_work(self) -> bool:
        """Whether something was begun that :meth:`go_on` goes on with."""
        return bool(self._work)

    def go_on(self) -> None:
        """Do the next slice of what was begun. It is an input like any other: what others ask comes before
        it or after it, also when it is repeated from a journal."""
        if self.journal is not None:
            self.journal.add(WentOn(self.now))
        work = self._work.popleft()
        try:
            self.begin(work)
        except Exception as error:
            self.send(work.request, wire.Failure("", f"{type(error).__name__}: {error}"))
            raise

    def begin(self, work: LongWork) -> None:
        """Do the first slice, or the next. What was begun takes turns, so that a short clear does not wait
        for a long one."""
        effects = Effects()
        if work.do_slice(self.state, effects):
            self.send(work.request, wire.Done(work.count))
        else:
            self._work.append(work)
        self.carry_out(effects)

    # Places

    def _reserve(self, request: PendingRequest, held: Client, body: wire.Reserve) -> wire.Answer | None:
        limit = self.storage.limit
        if limit is not None and body.nbytes > limit:
            raise CapacityError(
                f"a put of {body.nbytes:,} bytes can never fit into global_segment_size {limit:,}"
            )
        wanted = WaitingReservation(request, body.nbytes, body.partition_id, body.ids)
        place = None if self._waiting_reservations else self._allocate(wanted)
        if place is None:
            self._waiting_reservations.append(wanted, self.now)
            self._set_deadline(request, body.timeout_s)
            self.retry_reservations()
            return None
        held.reserved[place.number] = place
        held.grant(request, place)
        return wire.Reserved(place)

    def _allocate(self, wanted: WaitingReservation) -> Place | None:
        if self.dead and len(self.dead.units) == self.dead.of:
            raise CapacityError(f"all {self.dead.of} storage units have died: there is nowhere to write to")
        place = self._allocate_if_free(wanted)
        if place is None and self._reclaim_spares():
            place = self._allocate_if_free(wanted)
        return place

    def _allocate_if_free(self, wanted: WaitingReservation) -> Place | None:
        limit = self.storage.limit
        if (
            limit is not None
            and not may_use(wanted.nbytes, self.storage.used, limit, self._kept_for_live)
            and not is_for_live_samples(wanted, self.state.partitions)
        ):
            return None
        return self.storage.reserve(wanted.nbytes, wanted.request.client)

    def _rank(self, waiting: WaitingReservation) -> int:
        return 0 if is_for_live_samples(waiting, self.state.partitions) else 1

    def _reclaim_spares(self) -> bool:
        """Take back what clients hold for a next put that they may never make."""
        reclaimed = False
        for client, held in self.clients.items():
            if held.spare is not None and self.storage.revoke_spare(client):
                self.storage.free(held.spare)
                held.spare = None
                reclaimed = True
        return reclaimed

    def _spare_for(self, request: PendingRequest) -> Place | None:
        """Room for the client's next put, sent along so that it need not ask; only if there is plenty."""
        held = self.clients.get(request.client)
        if held is None or not request.want:
            return None
        if held.spare is not None:
            if held.spare.size >= request.want or not self.storage.revoke_spare(request.client):
                return None
            self.storage.free(held.spare)
            held.spare = None
        limit = self.storage.limit
        if self._waiting_reservations or (
            limit is not None and self.storage.used + request.want > limit // 2
        ):
            return None
        try:
            held.spare = self.storage.reserve(request.want, request.client)
        except CapacityError:
            return None
        if held.spare is not None:
            self.storage.offer_spare(request.client, held.spare)
        return held.spare

    def retry_reservations(self) -> None:
        """Serve the reservations that wait, as far as it is their turn and there is room."""
        self._waiting_reservations.serve(
            self.now, lambda: -self.storage.used, self._grant_if_it_fits, self._rank
        )

    def _grant_if_it_fits(self, waiting: WaitingReservation) -> bool:
        """False if the reservation has to go on waiting."""
        try:
            place = self._allocate(waiting)
        except CapacityError as error:
            self.send(waiting.request, wire.failure_of(error))
            return True
        if place is None:
            return False
        held = self.clients[waiting.request.client]
        held.reserved[place.number] = place
        held.grant(waiting.request, place)
        self.send(waiting.request, wire.Reserved(place))
        return True

    def lose(self, loss: Loss) -> None:
        """Storage has died: nothing is placed there any more, and what was there is cleared, or counts as
        not written, as its partition says."""
        self.storage.lose(loss)  # first, because it may refuse
        units = set(loss.units) - set(self.dead.units)
        if not units and not loss.chunks:
            return
        if self.journal is not None:
            self.journal.add(Lost(loss, self.now))
        if units:
            self.dead = Loss(tuple(sorted({*self.dead.units, *units})), loss.of)
            logger.warning("storage units %s have died: nothing is written there any more", sorted(units))
        self._reclaim_spares()
        stale = StalePlaceError("the storage that it was written to has died")
        count, effects = self.state.lose(lost_rows(self.table.blocks, self.table.places, loss), stale)
        if count:
            self.lost += count
            logger.warning("%d samples were lost with the storage that had them", count)
        self.carry_out(effects)
        self.retry_reservations()

    def committed_places(self) -> list[Place]:
        """The places that samples refer to."""
        table = self.table
        return [table.places[number] for number in {place for place, _, _ in table.blocks.values()}]

    # Writing

    def _commit(self, request: PendingRequest, held: Client, body: wire.Commit) -> None:
        place = self._committed_place(held, body)
        blocks: dict[str, int] = {}
        try:
            partition = self.state.partition(body.partition_id)
            if partition.version != body.version:
                raise StaleSpecError(f"partition {body.partition_id!r} was registered again")
            sizes = checked_sizes(body, 0 if place is None else place.size)
            if place is not None:
                blocks = self.table.add(place, body.fields, body.layouts, sizes)
            request.want = body.want
            put = Put(
                body.partition_id,
                body.ids,
                blocks,
                body.tags,
                nbytes=sizes,
                owner=request.client,
                now=self.wall,
                token=request,
                must_exist=body.must_exist,
                clock=self.now,
                appends=body.appends,
                finishes=body.finishes,
            )
            if body.appends:
                self._check_turns(body)
            effects = self.state.put(put)
        except DataPlaneError:
            if blocks:
                self.table.forget(blocks.values(), self.storage)
            elif place is not None:
                self.storage.free(place)
            raise
        if all(answered is not request for answered, _ in effects.answers):
            self._set_deadline(request, body.timeout_s)
        self.carry_out(effects)

    def _check_turns(self, body: wire.Commit) -> None:
        """What is appended must be of one kind with what is there, or nobody could read the two together."""
        partition = self.state.partition(body.partition_id)
        for field, layout in zip(body.fields, body.layouts, strict=True):
            turn = layout.turn
            if turn is None:
                raise InvalidRequestError(
                    f"field {field!r} holds {layout.kind} rows, to which nothing can be appended: a turn is "
                    "a tensor of at least one dimension, the first of which grows"
                )
            for block in partition.table.last_turns(body.ids, field):
                before = self.table.blocks[block][2].turn
                if before != turn:
                    raise InvalidRequestError(
                        f"field {field!r} grows by tokens of dtype and shape {before}, not {turn}"
                    )

    def _committed_place(self, held: Client, body: wire.Commit) -> Place | None:
        if body.place is None:
            if body.layouts:
                raise InvalidRequestError("a commit with fields needs the place that they are in")
            return None
        place = held.pop_reserved(body.place)
        if place is None:
            raise StalePlaceError(f"place {body.place} is not reserved for this client")
        if self.dead and lost_chunks([place], self.dead):
            self.storage.free(place)
            raise StalePlaceError(f"place {body.place} is in a storage unit that has died")
        if not body.layouts or not 0 < body.used <= place.size:
            self.storage.free(place)
            raise InvalidRequestError(
                f"{body.used} bytes of {len(body.layouts)} fields do not fit into a place of {place.size}"
            )
        return self.storage.shrink(place, body.used)

    # Claims and reads

    def _claim(self, request: PendingRequest, body: wire.ClaimRequest) -> None:
        request.claim = (body.partition_id, body.task)
        claim = Claim(
            body.partition_id,
            body.task,
            body.fields,
            body.batch_size,
            body.where,
            owner=request.client,
            token=request,
            max_tokens=body.max_tokens,
            order=body.order,
            step=body.step,
            dp_rank=body.dp_rank,
            dp_world=body.dp_world,
            max_uses=body.max_uses,
            repeat_where=body.repeat_where,
            split_groups=body.split_groups,
        )
        effects = self.state.claim(claim, blocking=body.blocking)
        if not effects.answers:
            self._set_deadline(request, body.timeout_s)
        self.carry_out(effects)

    def _claimed(self, request: PendingRequest, batch: Batch) -> wire.Claimed:
        held = self.clients.get(request.client)
        if held is not None and request.claim is not None:
            held.grant(request, (*request.claim, batch.ids))
        return wire.Claimed(batch.ids, batch.tags)

    def abandon(self, client: int, number: int) -> None:
        """Whoever made this request was interrupted: it will not read the answer. Undo what it was given."""
        held = self.clients.get(client)
        if held is None:
            return
        if self.journal is not None:
            self.journal.add(Abandoned(client, number, self.now))
        held.abandoned.append(number)
        held.answers.pop(number, None)
        waiting = self._unanswered.get((client, number))
        if waiting is not None:
            self.carry_out(self.state.give_up(waiting))
            self._stop_waiting({waiting})
        begun = self._at_work_for(client, number)
        if begun is not None:
            begun.remembered = False  # it is done all the same, as a short one is
        for channel, (answered, what) in list(held.granted.items()):
            if answered != number:
                continue
            del held.granted[channel]
            if isinstance(what, Place):
                if held.reserved.pop(what.number, None) is not None:
                    self.storage.free(what)
            elif isinstance(what, int):
                self.drop_lease(held, what)
            elif what[0] in self.state.partitions:
                self.carry_out(self.state.unclaim(*what, client))
        self.retry_reservations()

    def _drop_abandoned(self, held: Client, body: wire.Request) -> None:
        """The place of a commit that will not be made."""
        if isinstance(body, wire.Commit) and body.place is not None:
            place = held.pop_reserved(body.place)
            if place is not None:
                self.storage.free(place)

    def withdraw(self, client: int, numbers: Collection[int]) -> None:
        """End the waiting requests among these without an answer. What others were given, their client has
        been told, and gives back itself."""
        waiting = (self._unanswered.pop((client, number), None) for number in numbers)
        ended = {request for request in waiting if request is not None}
        if not ended:
            return
        self._stop_waiting(ended)
        self.carry_out(self.state.withdraw(ended))
        self.retry_reservations()

    def _stop_waiting(self, ended: Collection[PendingRequest]) -> None:
        for reservation in self._waiting_reservations:
            if reservation.request in ended:
                self._waiting_reservations.remove(reservation)

    def hang_up(self, channel: int) -> None:
        """A channel, which is one client's, has ended: nobody reads the answers of what waits behind it."""
        waiting = [request for request in self._unanswered.values() if request.channel == channel]
        if waiting:
            client, numbers = waiting[0].client, [request.number for request in waiting]
            if self.journal is not None:
                self.journal.add(HungUp(client, numbers, self.now))
            self.withdraw(client, numbers)

    def _locate(self, request: PendingRequest, held: Client, body: wire.Locate) -> wire.Located:
        found = self.state.locate(body.partition_id, body.ids, body.fields)
        rows = []
        used: dict[int, None] = {}
        for pieces in found.values():
            field, numbers = field_rows(pieces)
            rows.append(field)
            used.update(dict.fromkeys(numbers))
        lease, places, located = self._lease(held, list(used))
        held.grant(request, lease)
        partition = self.state.partition(body.partition_id)
        paths = [name[len(partition.table.field_of(name)) + 1 :] for name in body.fields]
        return wire.Located(lease, places, located, rows, paths if any(paths) else None)

    def _lease(self, held: Client, numbers: list[int]) -> tuple[int, list[Place], dict[int, Block]]:
        """Keep the places of blocks from being recycled until the client drops them."""
        places, located = self.table.lease(numbers)
        return self.new_lease(held, [place.number for place in places]), places, located

    def new_lease(self, held: Client, places: list[int]) -> int:
        lease, self._next_lease = self._next_lease, self._next_lease + 1
        held.leases[lease] = places
        return lease

    def _kinds(
        self, partition: Partition, rows: NDArray[np.int64]
    ) -> dict[str, list[tuple[str, str, tuple[int, ...]]]]:
        """By field, what its blocks hold: kind, dtype and shape of a row, each combination once."""
        kinds = {}
        for name, column in partition.columns.items():
            numbers = np.unique(column.block[rows]).tolist()
            layouts = [self.table.blocks[number][2] for number in numbers if number >= 0]
            kinds[name] = list(dict.fromkeys((each.kind, each.dtype, each.shape) for each in layouts))
        return kinds

    # Time

    def _set_deadline(self, request: PendingRequest, timeout_s: float) -> None:
        due = self.now + timeout_s if timeout_s < _FOREVER_S else float("inf")
        self._ticks += 1
        request.parked = self.now
        self._unanswered[request.client, request.number] = request
        heapq.heappush(self._deadlines, (due, self._ticks, request))
        # Requests that were answered in time are still in the heap; drop them before it grows.
        if len(self._deadlines) > self._most_deadlines:
            parked: set[object] = {waiting.request for waiting in self._waiting_reservations}
            parked.update(self.state.waiting())
            if len(self._deadlines) > 4 * len(parked):
                self._deadlines = [entry for entry in self._deadlines if entry[2] in parked]
                heapq.heapify(self._deadlines)
            self._most_deadlines = 1024 + 2 * len(self._deadlines)

    def next_deadline(self) -> float:
        """When :meth:`expire` has something to do next, by the clock of ``now``."""
        first = self._deadlines[0][0] if self._deadlines else float("inf")
        return min(first, self._waiting_reservations.due, self.state.next_deadline())

    @property
    def is_short_of_room(self) -> bool:
        """Whether a put waits for room, so that what others do can bring its turn nearer."""
        return bool(self._waiting_reservations) or self.state.is_short_of_room

    def expire(self) -> None:
        """Answer the waiting requests whose time is over, end groups that have waited too long, and let puts
        overtake larger ones whose time for that has come."""
        if self.journal is not None and self.next_deadline() <= self.now:
            self.journal.add(Expired(self.now))
        if self.state.next_deadline() <= self.now:
            self.carry_out(self.state.expire(self.now))
        while self._deadlines and self._deadlines[0][0] <= self.now:
            request = heapq.heappop(self._deadlines)[2]
            self.carry_out(self.state.give_up(request))
            for waiting in self._waiting_reservations:
                if waiting.request is request:
                    self._waiting_reservations.remove(waiting)
                    error = CapacityTimeoutError(
                        f"no room for {waiting.nbytes:,} bytes: {self.storage.used:,} of global_segment_size "
                        f"{self.storage.limit or 0:,} are in use; nothing was written"
                    )
                    self.send(request, wire.failure_of(error))
                    break
            self.retry_reservations()
        if self._waiting_reservations.due <= self.now:
            self.retry_reservations()

    # Recovery

    def dump(self) -> dict[str, Any]:
        """Everything that this service knows, for :meth:`load`."""
        return {name: value for name, value in vars(self).items() if name not in _NOT_DUMPED}

    def load(self, dumped: dict[str, Any]) -> None:
        """Become the service that was dumped."""
        vars(self).update(dumped)

    def begin_again(self, in_use: set[int], first_lease: int) -> None:
        """After a recovery: which leases there are is known to the clients that hold them, and they will say
        so; until all have, none of the places ``in_use`` is freed. Nobody is connected, so nothing is sent
        to a channel of before."""
        self.table.keep(in_use, [places for held in self.clients.values() for places in held.leases.values()])
        for held in self.clients.values():
            held.leases.clear()
            held.granted = {
                channel: grant for channel, grant in held.granted.items() if not isinstance(grant[1], int)
            }
        self._next_lease = max(self._next_lease, first_lease)
        for request in [*self._unanswered.values(), *(work.request for work in self._work)]:
            request.channel = 0

    def set_clock(self, now: float, wall: float) -> None:
        """Set the time. Deadlines of before are moved if they were set by another machine's clock."""
        jump = (now - wall) - (self.now - self.wall)
        if self._deadlines and abs(jump) > _ANOTHER_CLOCK_S:
            self._deadlines = [(due + jump, tick, request) for due, tick, request in self._deadlines]
            self._waiting_reservations.move_clock(jump)
            self.state.move_clock(jump)
        self.now, self.wall = now, wall

    def resume(
        self,
        client: int,
        leases: Mapping[int, list[int]],
        abandoned: Iterable[int],
        in_use: Mapping[int, Place],
    ) -> None:
        """A client of before is there again, holds these leases on these places, and has abandoned these
        requests."""
        held = self.clients[client]
        for lease, numbers in leases.items():
            if lease in held.leases:
                continue  # only the connection was lost
            held.leases[lease] = self.table.lease_again(numbers, in_use)
        for number in abandoned:
            self.abandon(client, number)

    def all_have_resumed(self) -> None:
        """The clients of before have come back or were given up: what they hold is known."""
        self.table.stop_keeping(self.storage)

    def unreferenced(self, in_use: Mapping[int, Place]) -> list[Place]:
        """Those of the places that are in use for nobody: no sample, lease or reservation refers to them."""
        reserved = {number for held in self.clients.values() for number in held.reserved}
        reserved |= {held.spare.number for held in self.clients.values() if held.spare is not None}
        return [
            place
            for number, place in in_use.items()
            if number not in self.table.places and number not in reserved
        ]


_NOT_DUMPED = frozenset({"storage", "deliver", "journal", "is_journaled", "stall", "checkpoints"})
