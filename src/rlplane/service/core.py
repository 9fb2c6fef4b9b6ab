"""``ControlService``: the control state, the places of a storage and the leases on them, without sockets.

Every request comes through :meth:`ControlService.handle` and is answered through ``send``, at once or when
another request completes it. A client is a number; when it goes, what it held comes back.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection
from typing import Any

import msgspec

from rlplane.control.requests import Batch, Claim, Effects
from rlplane.control.state import ControlState
from rlplane.errors import (
    CapacityTimeoutError,
    DataPlaneError,
    PlaneConnectionError,
)
from rlplane.service import protocol as wire
from rlplane.service.block_table import BlockTable
from rlplane.service.checkpoints import Checkpoints
from rlplane.service.clients import Client, PendingRequest
from rlplane.service.commits import commit
from rlplane.service.deadlines import Deadlines
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
from rlplane.service.long_work import (
    AdvanceWork,
    ClearWork,
    LeaveWork,
    LineUpWork,
    LongWork,
    LossWork,
    UnclaimWork,
    mark_work,
)
from rlplane.service.naming import note_names, take_names
from rlplane.service.questions import answer_question, claimed
from rlplane.service.reads import locate
from rlplane.service.reservations import Reservations
from rlplane.service.stall import LoopStall
from rlplane.storage.places import Loss, Place, StorageHost

__all__ = ["ControlService"]

logger = logging.getLogger(__name__)

_FOREVER_S = 1e9
# Monotonic clocks of one boot agree with the time of day to within this; it is set by hand at times.
_ANOTHER_CLOCK_S = 300.0


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
        self.next_lease = 1
        self.reservations = Reservations(self, int((storage.limit or 0) * reserve_for_live))
        self.deadlines = Deadlines()
        self.unanswered: dict[tuple[int, int], PendingRequest] = {}
        self.work: deque[LongWork] = deque()
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
        reservations = [w for w in self.reservations.waiting if w.request.client == client]
        for waiting in reservations:
            self.reservations.waiting.remove(waiting)
        if not died:
            closed = PlaneConnectionError("the client was closed")
            self.carry_out(self.state.abort(closed, client))
            for waiting in reservations:
                self.send(waiting.request, wire.failure_of(closed))
        self._give_up_work(
            [request for work in self.work for request in work.requests if request.client == client]
        )
        leaving, effects = self.state.begin_release(client)
        if leaving.count:
            level, how = (logging.WARNING, "died") if died else (logging.INFO, "closed")
            text = "client %d %s; %d claimed samples are handed out again"
            logger.log(level, text, client, how, leaving.count)
        if not leaving.is_over:
            self.work.append(LeaveWork(leaving))
        for place in held.places:
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
        """A client needs what it has leased no longer; False if it has not."""
        places = held.leases.pop(lease, None)
        if places:
            self.table.unlease(places, self.storage)
        return self.checkpoints.thaw(lease) or bool(places)

    def room_came_free(self) -> None:
        """Something outside of any request has given room back to the storage."""
        if self.reservations.waiting:
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
        state = self.state
        if state.next_deadline() <= state.now:
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
                        state.now,
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
        if self.reservations.waiting and changes:
            # A commit gives back what it does not use, and all of it when it fails.
            self.retry_reservations()

    def _is_repeated(self, request: PendingRequest, held: Client) -> bool:
        answer = held.answers.get(request.number)
        if answer is not None:
            self.deliver(request, answer)
            return True
        waiting = self.unanswered.get((request.client, request.number))
        if waiting is None and self.work:
            waiting = self._at_work_for(request.client, request.number)
        if waiting is not None:
            waiting.channel = request.channel
            return True
        return False

    def _at_work_for(self, client: int, number: int) -> PendingRequest | None:
        """The request of that number, if it has been begun."""
        for request in (request for work in self.work for request in work.requests):
            if (request.client, request.number) == (client, number):
                return request
        return None

    def send(self, request: PendingRequest, answer: wire.Answer) -> None:
        """Answer a request."""
        self.unanswered.pop((request.client, request.number), None)
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
                commit(self, request, held, body)
                return None
            case wire.ClaimRequest():
                self._claim(request, body)
                return None
            case wire.Locate():
                return locate(self, request, held, body)
            case wire.Clear(partition_id):
                if body.named is not None:
                    take_names(held, body)
                if body.ids is None:
                    clearing = self.state.begin_clear_written_by(partition_id, request.client)
                else:
                    clearing = self.state.begin_clear(partition_id, body.ids)
                self.begin(ClearWork(request, [clearing]))
                return None
            case wire.Unclaim(partition_id, task, ids, done):
                ending = self.state.begin_unclaim(partition_id, task, ids, request.client, is_finished=done)
                self.begin(UnclaimWork([request], ending))
                return None
            case wire.DropPartition(partition_id):
                clearing, effects = self.state.begin_drop(partition_id)
                self.carry_out(effects)
                self.begin(ClearWork(request, [clearing]))
                return None
            case wire.Reserve():
                return self.reservations.ask(request, held, body)
            case wire.Unreserve(number, out_of_pages):
                place = held.pop_reserved(number)
                if place is not None:
                    self.storage.free(place)
                if out_of_pages:
                    self.reservations.reclaim_spares()
                return wire.Done()
            case wire.Lost(loss):
                self.lose(loss, request)
                return None
            case wire.Register(spec, extend):
                self.carry_out(self.state.register(spec, extend=extend))
                self.begin(AdvanceWork(request, [self.state.begin_advance(spec.partition_id)]))
                return None
            case wire.MarkClaimed():
                self.begin(mark_work(self, request, held, body))
                return None
            case wire.Advance(partition_id, version):
                self.begin(AdvanceWork(request, [self.state.begin_advance(partition_id, version)]))
                return None
            case wire.CloseGroup(partition_id, group, reason, fields):
                left, effects = self.state.close_group(partition_id, group, reason, fields)
                self.send(request, wire.Done(left))
                self.carry_out(effects)
                return None
            case wire.Finish(partition_id):
                self.carry_out(self.state.finish(partition_id))
                return wire.Done()
            case wire.Evicted(partition_id, limit):
                return claimed(self.state.evicted(partition_id, limit))
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
            case wire.Naming() | wire.Unname():
                return note_names(held, body)
            case wire.Withdraw(numbers):
                self.withdraw(request.client, numbers)
                return wire.Done()
            case _:
                return answer_question(self, body)

    def carry_out(self, effects: Effects) -> None:
        """Do what follows from a change of the state: send the answers, free the blocks."""
        for request, answer in effects.answers:
            assert isinstance(request, PendingRequest)
            if isinstance(answer, Batch):
                self.send(request, self._claimed(request, answer))
            elif answer is None:
                self.send(request, wire.Done(spare=self.reservations.spare_for(request)))
            else:
                self.send(request, wire.failure_of(answer))
        self.work.extend(LineUpWork(*where) for where in effects.lining_up)
        if effects.freed or effects.dropped:
            self.table.drop(effects, self.storage)
            self.retry_reservations()

    # Long work

    @property
    def has_work(self) -> bool:
        """Whether something was begun that :meth:`go_on` goes on with."""
        return bool(self.work)

    def go_on(self) -> None:
        """Do the next slice of what was begun. It is an input like any other: what others ask comes before
        it or after it, also when it is repeated from a journal."""
        if self.journal is not None:
            self.journal.add(WentOn(self.now))
        work = self.work.popleft()
        try:
            self.begin(work)
        except Exception as error:
            for request in work.requests:
                self.send(request, wire.Failure("", f"{type(error).__name__}: {error}"))
            raise

    def begin(self, work: LongWork) -> None:
        """Do the first slice, or the next. What was begun takes turns, so that a short clear does not wait
        for a long one."""
        effects = Effects()
        if work.do_slice(self, effects):
            for request in work.requests:
                self.send(request, wire.Done(work.answer))
        else:
            self.work.append(work)
        self.carry_out(effects)

    def _give_up_work(self, ended: Collection[PendingRequest]) -> None:
        """Nobody waits for what was begun for these requests. A put is undone; a clear is done all the same,
        as a short one is."""
        for work in [work for work in self.work if any(request in ended for request in work.requests)]:
            if work.give_up(self):
                self.work.remove(work)

    # Places

    def retry_reservations(self) -> None:
        """Serve the reservations that wait, as far as it is their turn and there is room."""
        if self.reservations.waiting:
            self.reservations.retry()

    def lose(self, loss: Loss, request: PendingRequest | None = None) -> None:
        """Storage has died: nothing is placed there any more, and what was there is cleared, or counts as
        not written, as its partition says. Whoever has asked for that is answered then."""
        self.storage.lose(loss)  # first, because it may refuse
        units = set(loss.units) - set(self.dead.units)
        if not units and not loss.chunks:
            if request is not None:
                # Others have said it before. What was there may not all have been found yet.
                under_way = [work for work in self.work if isinstance(work, LossWork)]
                if under_way:
                    under_way[-1].requests.append(request)
                else:
                    self.send(request, wire.Done())
            return
        if self.journal is not None:
            self.journal.add(Lost(loss, self.now))
        if units:
            self.dead = Loss(tuple(sorted({*self.dead.units, *units})), loss.of)
            logger.warning("storage units %s have died: nothing is written there any more", sorted(units))
        self.reservations.reclaim_spares()
        self.begin(LossWork([] if request is None else [request], loss, self.table.blocks))
        self.retry_reservations()

    def committed_places(self) -> list[Place]:
        """The places that samples refer to."""
        table = self.table
        return [table.places[number] for number in {place for place, _, _ in table.blocks.values()}]

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
            self.set_deadline(request, body.timeout_s)
        self.carry_out(effects)

    def _claimed(self, request: PendingRequest, batch: Batch) -> wire.Claimed:
        held = self.clients.get(request.client)
        if held is not None and request.claim is not None:
            held.grant(request, (*request.claim, batch.ids))
        return claimed(batch)

    def abandon(self, client: int, number: int) -> None:
        """Whoever made this request was interrupted: it will not read the answer. Undo what it was given."""
        held = self.clients.get(client)
        if held is None:
            return
        if self.journal is not None:
            self.journal.add(Abandoned(client, number, self.now))
        held.abandoned.append(number)
        held.answers.pop(number, None)
        waiting = self.unanswered.get((client, number))
        if waiting is not None:
            self.carry_out(self.state.give_up(waiting))
            self._stop_waiting({waiting})
        begun = self._at_work_for(client, number)
        if begun is not None:
            begun.remembered = False
            self._give_up_work([begun])
        for channel, (answered, what) in list(held.granted.items()):
            if answered != number:
                continue
            del held.granted[channel]
            if isinstance(what, Place):
                if held.reserved.pop(what.number, None) is not None:
                    self.storage.free(what)
            elif isinstance(what, int):
                self.drop_lease(held, what)
            elif what[0] in self.state.partitions and what[1] in self.state.partition(what[0]).tasks:
                self.begin(UnclaimWork([], self.state.begin_unclaim(*what, client)))
        self.retry_reservations()

    def _drop_abandoned(self, held: Client, body: wire.Request) -> None:
        """The place of a commit that will not be made, and the names of its samples."""
        held.named.pop(getattr(body, "named", None) or 0, None)
        if isinstance(body, wire.Commit) and body.place is not None:
            place = held.pop_reserved(body.place)
            if place is not None:
                self.storage.free(place)

    def withdraw(self, client: int, numbers: Collection[int]) -> None:
        """End the waiting requests among these without an answer. What others were given, their client has
        been told, and gives back itself."""
        waiting = (self.unanswered.pop((client, number), None) for number in numbers)
        ended = {request for request in waiting if request is not None}
        if not ended:
            return
        self._stop_waiting(ended)
        self.carry_out(self.state.withdraw(ended))
        self.retry_reservations()

    def _stop_waiting(self, ended: Collection[PendingRequest]) -> None:
        for reservation in self.reservations.waiting:
            if reservation.request in ended:
                self.reservations.waiting.remove(reservation)

    def hang_up(self, channel: int) -> None:
        """A channel, which is one client's, has ended: nobody reads the answers of what waits behind it."""
        waiting = [request for request in self.unanswered.values() if request.channel == channel]
        if waiting:
            client, numbers = waiting[0].client, [request.number for request in waiting]
            if self.journal is not None:
                self.journal.add(HungUp(client, numbers, self.now))
            self.withdraw(client, numbers)

    def new_lease(self, held: Client, places: list[int]) -> int:
        """A number for a lease on these places."""
        lease, self.next_lease = self.next_lease, self.next_lease + 1
        held.leases[lease] = places
        return lease

    # Time

    def set_deadline(self, request: PendingRequest, timeout_s: float) -> None:
        """A request waits, and for how long."""
        request.parked = self.now
        self.unanswered[request.client, request.number] = request
        self.deadlines.add(request, self.now + timeout_s if timeout_s < _FOREVER_S else float("inf"))
        if self.deadlines.are_many:
            parked: set[object] = {waiting.request for waiting in self.reservations.waiting}
            self.deadlines.keep(parked.union(self.state.waiting()))

    def next_deadline(self) -> float:
        """When :meth:`expire` has something to do next, by the clock of ``now``."""
        return min(self.deadlines.first, self.reservations.waiting.due, self.state.next_deadline())

    @property
    def is_short_of_room(self) -> bool:
        """Whether a put waits for room, so that what others do can bring its turn nearer."""
        return bool(self.reservations.waiting) or self.state.is_short_of_room

    def expire(self) -> None:
        """Answer the waiting requests whose time is over, end groups that have waited too long, and let puts
        overtake larger ones whose time for that has come."""
        if self.journal is not None and self.next_deadline() <= self.now:
            self.journal.add(Expired(self.now))
        if self.state.next_deadline() <= self.now:
            self.carry_out(self.state.expire(self.now))
        while self.deadlines.first <= self.now:
            request = self.deadlines.pop()
            self.carry_out(self.state.give_up(request))
            for waiting in self.reservations.waiting:
                if waiting.request is request:
                    self.reservations.waiting.remove(waiting)
                    error = CapacityTimeoutError(
                        f"no room for {waiting.nbytes:,} bytes: {self.storage.used:,} of global_segment_size "
                        f"{self.storage.limit or 0:,} are in use; nothing was written"
                    )
                    self.send(request, wire.failure_of(error))
                    break
            self.retry_reservations()
        if self.reservations.waiting.due <= self.now:
            self.retry_reservations()

    # Recovery

    def dump(self) -> dict[str, Any]:
        """Everything that this service knows, for :meth:`load`."""
        return {name: value for name, value in vars(self).items() if name not in _NOT_DUMPED}

    def load(self, dumped: dict[str, Any]) -> None:
        """Become the service that was dumped."""
        vars(self).update(dumped)
        self.reservations.belong_to(self)

    def set_clock(self, now: float, wall: float) -> None:
        """Set the time. Deadlines of before are moved if they were set by another machine's clock."""
        jump = (now - wall) - (self.now - self.wall)
        if self.deadlines and abs(jump) > _ANOTHER_CLOCK_S:
            self.deadlines.move_clock(jump)
            self.reservations.waiting.move_clock(jump)
            self.state.move_clock(jump)
        self.now, self.wall = now, wall


_NOT_DUMPED = frozenset({"storage", "deliver", "journal", "is_journaled", "stall", "checkpoints"})
