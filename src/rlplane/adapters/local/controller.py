"""The brain of the shared-memory engine: control state, arena and leases, without sockets or files.

Every request comes through :meth:`Controller.handle` and is answered through ``send``, at once or when
another request completes it. A client is an owner number; when it goes, what it held comes back.
"""

from __future__ import annotations

import heapq
import itertools
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplane.adapters.local import wire
from rlplane.adapters.local.arena import Arena
from rlplane.adapters.local.wire import Extent, Layout
from rlplane.errors import (
    CapacityError,
    CapacityTimeoutError,
    CheckpointError,
    DataPlaneError,
    InvalidRequestError,
    PlaneConnectionError,
)
from rlplane.index import Batch, Claim, ControlState, Put
from rlplane.persist import dump_state, restore_state

__all__ = ["Caller", "Controller", "StaleSpecError"]

logger = logging.getLogger(__name__)

IDLE_SEGMENT_S = 10.0
_CHANNELS_REMEMBERED = 1024


class StaleSpecError(DataPlaneError):
    """The partition was registered again since the client looked; it asks and lays out anew."""


@dataclass(eq=False, slots=True)
class Caller:
    """Who waits for an answer: a request of a client. Compared by identity."""

    owner: int
    number: int
    channel: int = 0
    extent: Extent | None = None
    want: int = 0
    claim: tuple[str, str] | None = None


@dataclass(slots=True)
class _Room:
    """A reservation that waits for bytes."""

    caller: Caller
    nbytes: int


class _Owner:
    """What one client holds."""

    def __init__(self) -> None:
        self.reserved: dict[int, Extent] = {}
        self.spare: Extent | None = None
        self.leases: dict[int, list[int]] = {}
        # What the last request of each of its channels was given, so that one that was interrupted can be
        # undone: the request's number, and an extent, a lease, or a claim (partition, task, ids).
        self.given: dict[int, tuple[int, Extent | int | tuple[str, str, list[str]]]] = {}

    def give(self, caller: Caller, what: Extent | int | tuple[str, str, list[str]]) -> None:
        self.given.pop(caller.channel, None)  # so that the first is always the one not used for longest
        self.given[caller.channel] = (caller.number, what)
        if len(self.given) > _CHANNELS_REMEMBERED:
            del self.given[next(iter(self.given))]


class Controller:
    """One plane. ``send(caller, answer)`` delivers; ``grant(owner, number)`` lets a client take that extent
    as its spare, and ``revoke(owner)`` tries to take it back."""

    def __init__(
        self,
        capacity: int,
        arena: Arena,
        send: Callable[[Caller, wire.Answer], None],
        revoke: Callable[[int], bool],
        grant: Callable[[int, int], None],
    ) -> None:
        self.state = ControlState(capacity)
        self.arena = arena
        self._send, self._revoke, self._grant = send, revoke, grant
        self._owners: dict[int, _Owner] = {}
        self._blocks: dict[int, tuple[int, int, Layout]] = {}
        self._extents: dict[int, Extent] = {}
        self._extent_refs: dict[int, int] = {}
        self._next_block = 0
        self._next_lease = 1
        self._waiting_room: deque[_Room] = deque()
        self._deadlines: list[tuple[float, int, Caller]] = []
        self._tick = itertools.count()
        self.now = 0.0
        self.wall = 0.0
        self.requests = 0

    # Clients come and go

    def connect(self, owner: int) -> None:
        """A client has come."""
        self._owners[owner] = _Owner()

    def disconnect(self, owner: int, *, died: bool) -> None:
        """A client has gone. If it died, its unfinished claims go back to the front of the queue."""
        held = self._owners.pop(owner, None)
        if held is None:
            return
        self._waiting_room = deque(room for room in self._waiting_room if room.caller.owner != owner)
        if died:
            returned = self.state.release_owner(owner)
            if returned:
                logger.warning("client %d died; %d claimed samples are handed out again", owner, returned)
        else:
            self.state.abort(PlaneConnectionError("the client was closed"), owner)
        for extent in [*held.reserved.values(), *filter(None, [held.spare])]:
            self.arena.free(extent, self.now)
        for extents in held.leases.values():
            self._unlease(extents)
        self.arena.abandon_home(owner)
        self.settle()
        self._retry_room()

    def release(self, owner: int, lease: int) -> None:
        """A client has dropped what it read."""
        held = self._owners.get(owner)
        extents = held.leases.pop(lease, None) if held else None
        if extents:
            self._unlease(extents)
            self._retry_room()

    # Requests

    def handle(self, caller: Caller, envelope: wire.Envelope) -> None:
        """Serve one request. Errors of the request are answers too."""
        self.requests += 1
        held = self._owners.get(envelope.owner)
        try:
            if held is None:
                raise PlaneConnectionError(f"client {envelope.owner} is not connected to this controller")
            for lease in envelope.released:
                self.release(envelope.owner, lease)
            for number in envelope.abandoned:
                self.abandon(envelope.owner, number)
            answer = self._serve(caller, held, envelope.request)
            if answer is not None:
                self._send(caller, answer)
        except (DataPlaneError, OSError) as error:
            if isinstance(error, OSError) and not isinstance(error, DataPlaneError):
                error = CapacityError(f"the controller cannot make shared memory: {error}")
            self._send(caller, wire.failure_of(error))
        self.settle()
        if self._waiting_room:
            # A commit gives back what it does not use, and all of it when it fails.
            self._retry_room()

    def _serve(self, caller: Caller, held: _Owner, request: wire.Request) -> wire.Answer | None:
        match request:
            case wire.Commit():
                return self._commit(caller, held, request)
            case wire.ClaimRequest():
                return self._claim(caller, held, request)
            case wire.Locate():
                return self._locate(caller, held, request)
            case wire.Clear(partition_id, ids):
                if ids is None:
                    return wire.Done(self.state.clear_written_by(partition_id, caller.owner))
                return wire.Done(self.state.clear(partition_id, ids))
            case wire.Reserve():
                return self._reserve(caller, held, request)
            case wire.Unreserve(number):
                extent = self._reserved(held, number)
                if extent is not None:
                    self.arena.free(extent, self.now)
                return wire.Done()
            case wire.Describe(partition_id):
                partition = self.state.partition(partition_id)
                return wire.Described(partition.version, partition.spec)
            case wire.Register(spec):
                self.state.register(spec)
                return wire.Done()
            case wire.Consumed(partition_id, tasks):
                return wire.Done(self.state.partition(partition_id).consumed(tasks))
            case wire.Status(partition_id):
                return wire.Done(self._status(partition_id))
            case wire.ListIds(partition_id):
                return wire.Done(list(self.state.partition(partition_id).rows))
            case wire.Freeze():
                return self._freeze(caller, held)
            case wire.Restore():
                return self._restore(held, request)
            case _:
                raise InvalidRequestError(f"the controller does not serve {type(request).__name__} here")

    def settle(self) -> None:
        """Free what the last change released, and send the answers that it completed."""
        state = self.state
        while state.freed or state.answers:
            freed, state.freed = state.freed, []
            for block in freed:
                self._unlease([self._blocks.pop(block)[0]])
            answers, state.answers = state.answers, []
            for caller, result in answers:
                self._answer(caller, result)
            if freed:
                self._retry_room()

    def _answer(self, caller: Caller, result: Any) -> None:
        if isinstance(result, Batch):
            self._send(caller, self._claimed(caller, result))
        elif isinstance(result, DataPlaneError):
            if caller.extent is not None:
                self._forget_blocks(caller.extent)
            self._send(caller, wire.failure_of(result))
        else:
            self._send(caller, wire.Done(spare=self._spare(caller)))

    # Writing

    def _reserve(self, caller: Caller, held: _Owner, request: wire.Reserve) -> wire.Answer | None:
        if request.nbytes > self.arena.limit:
            raise CapacityError(
                f"a put of {request.nbytes:,} bytes can never fit into "
                f"global_segment_size {self.arena.limit:,}"
            )
        extent = None if self._waiting_room else self._allocate(request.nbytes, caller.owner)
        if extent is None:
            self._waiting_room.append(_Room(caller, request.nbytes))
            self._set_deadline(caller, request.timeout_s)
            return None
        held.reserved[extent.number] = extent
        held.give(caller, extent)
        return wire.Reserved(extent)

    def _allocate(self, nbytes: int, owner: int) -> Extent | None:
        extent = self.arena.allocate(nbytes, owner, self.now)
        if extent is None and self._reclaim_spares():
            extent = self.arena.allocate(nbytes, owner, self.now)
        return extent

    def _reclaim_spares(self) -> bool:
        """Take back what clients hold for a next put that they may never make."""
        reclaimed = False
        for owner, held in self._owners.items():
            if held.spare is not None and self._revoke(owner):
                self.arena.free(held.spare, self.now)
                held.spare = None
                reclaimed = True
        return reclaimed

    def _spare(self, caller: Caller) -> Extent | None:
        """Memory for the client's next put, sent along so that it need not ask; only if there is plenty."""
        held = self._owners.get(caller.owner)
        if held is None or not caller.want:
            return None
        if held.spare is not None:
            if held.spare.size >= caller.want or not self._revoke(caller.owner):
                return None
            self.arena.free(held.spare, self.now)
            held.spare = None
        if self._waiting_room or self.arena.used + caller.want > self.arena.limit // 2:
            return None
        try:
            held.spare = self.arena.allocate(caller.want, caller.owner, self.now)
        except OSError:
            return None
        if held.spare is not None:
            self._grant(caller.owner, held.spare.number)
        return held.spare

    def _retry_room(self) -> None:
        while self._waiting_room:
            room = self._waiting_room[0]
            held = self._owners[room.caller.owner]
            try:
                extent = self._allocate(room.nbytes, room.caller.owner)
            except OSError as error:
                self._waiting_room.popleft()
                reason = CapacityError(f"the controller cannot make shared memory: {error}")
                self._send(room.caller, wire.failure_of(reason))
                continue
            if extent is None:
                return
            self._waiting_room.popleft()
            held.reserved[extent.number] = extent
            held.give(room.caller, extent)
            self._send(room.caller, wire.Reserved(extent))

    def _commit(self, caller: Caller, held: _Owner, request: wire.Commit) -> wire.Answer | None:
        extent = self._take_reserved(held, request)
        try:
            partition = self.state.partition(request.partition_id)
            if partition.version != request.version:
                raise StaleSpecError(f"partition {request.partition_id!r} was registered again")
            blocks, sizes = self._add_blocks(extent, request)
        except DataPlaneError:
            if extent is not None:
                self.arena.free(extent, self.now)
            raise
        caller.extent, caller.want = extent, request.want
        put = Put(request.partition_id, request.ids, blocks, request.tags, owner=caller.owner, now=self.wall)
        put.nbytes, put.token = sizes, caller
        try:
            done = self.state.put(put)
        except DataPlaneError:
            if extent is not None:
                self._forget_blocks(extent)
            raise
        if done is None:
            self._set_deadline(caller, request.timeout_s)
            return None
        return wire.Done(spare=self._spare(caller))

    def _take_reserved(self, held: _Owner, request: wire.Commit) -> Extent | None:
        if request.extent is None:
            if request.layouts:
                raise InvalidRequestError("a commit with fields needs the extent that they are in")
            return None
        extent = self._reserved(held, request.extent)
        if extent is None:
            raise InvalidRequestError(f"extent {request.extent} is not reserved for this client")
        if not 0 < request.used <= extent.size:
            self.arena.free(extent, self.now)
            raise InvalidRequestError(f"{request.used} bytes do not fit into an extent of {extent.size}")
        return self.arena.shrink(extent, request.used)

    def _reserved(self, held: _Owner, number: int) -> Extent | None:
        """Take an extent from what a client has reserved, or its spare, which it has taken without asking."""
        extent = held.reserved.pop(number, None)
        if extent is None and held.spare is not None and held.spare.number == number:
            extent, held.spare = held.spare, None
        return extent

    def _add_blocks(self, extent: Extent | None, request: wire.Commit) -> tuple[dict[str, int], list[int]]:
        if len(request.fields) != len(request.layouts) or len(set(request.fields)) != len(request.fields):
            raise InvalidRequestError("a commit has one layout per field")
        sizes = [layout.nbytes for layout in request.layouts]
        if sum(sizes) > (extent.size if extent else 0):
            raise InvalidRequestError("the layouts of a commit do not fit into its extent")
        count = len(request.ids)
        if any(layout.rows != count or layout.values_nbytes < 0 for layout in request.layouts):
            raise InvalidRequestError("the layouts of a commit have another number of rows than ids")
        if len(set(request.ids)) != count or "" in request.ids or not count:
            raise InvalidRequestError("the ids of a commit are not distinct, non-empty strings")
        if request.tags is not None and len(request.tags) != len(request.ids):
            raise InvalidRequestError("a commit has one tag per id")
        numbers = {}
        start = 0
        for field, layout, size in zip(request.fields, request.layouts, sizes, strict=True):
            assert extent is not None
            numbers[field] = self._next_block
            self._blocks[self._next_block] = (extent.number, start, layout)
            self._next_block += 1
            start += size
        if extent is not None:
            self._extents[extent.number] = extent
            self._extent_refs[extent.number] = len(numbers)
            if not numbers:
                self._extents.pop(extent.number)
                self._extent_refs.pop(extent.number)
                self.arena.free(extent, self.now)
        return numbers, sizes

    def _forget_blocks(self, extent: Extent) -> None:
        """Drop the blocks of a put that was not written."""
        gone = [number for number, (home, _, _) in self._blocks.items() if home == extent.number]
        for number in gone:
            self._unlease([self._blocks.pop(number)[0]])
        self._retry_room()

    def _unlease(self, extents: list[int]) -> None:
        for number in extents:
            left = self._extent_refs[number] - 1
            if left:
                self._extent_refs[number] = left
            else:
                del self._extent_refs[number]
                self.arena.free(self._extents.pop(number), self.now)

    # Claims and reads

    def _claim(self, caller: Caller, held: _Owner, request: wire.ClaimRequest) -> wire.Answer | None:
        caller.claim = (request.partition_id, request.task)
        claim = Claim(
            request.partition_id,
            request.task,
            request.fields,
            request.batch_size,
            request.where,
            owner=caller.owner,
            token=caller,
        )
        batch = self.state.claim(claim, blocking=request.blocking)
        if batch is None:
            self._set_deadline(caller, request.timeout_s)
            return None
        return self._claimed(caller, batch)

    def _claimed(self, caller: Caller, batch: Batch) -> wire.Claimed:
        held = self._owners.get(caller.owner)
        if held is not None and caller.claim is not None:
            held.give(caller, (*caller.claim, batch.ids))
        return wire.Claimed(batch.ids, batch.tags)

    def abandon(self, owner: int, number: int) -> None:
        """The caller of a request was interrupted: it will not read the answer, or has not understood it."""
        for _, _, waiting in self._deadlines:
            if waiting.owner == owner and waiting.number == number:
                if self.state.give_up(waiting) is not None and waiting.extent is not None:
                    self._forget_blocks(waiting.extent)
                self._waiting_room = deque(r for r in self._waiting_room if r.caller is not waiting)
        held = self._owners.get(owner)
        for channel, (answered, what) in [] if held is None else list(held.given.items()):
            if held is None or answered != number:
                continue
            del held.given[channel]
            if isinstance(what, Extent):
                if held.reserved.pop(what.number, None) is not None:
                    self.arena.free(what, self.now)
            elif isinstance(what, int):
                self.release(owner, what)
            elif what[0] in self.state.partitions:
                self.state.unclaim(*what, owner)
        self.settle()
        self._retry_room()

    def _locate(self, caller: Caller, held: _Owner, request: wire.Locate) -> wire.Located:
        found = self.state.locate(request.partition_id, request.ids, request.fields)
        places = []
        used: dict[int, None] = {}
        for blocks, positions in found.values():
            place, numbers = _place(blocks, positions)
            places.append(place)
            used.update(dict.fromkeys(numbers))
        lease, extents, located = self._lease(held, list(used))
        held.give(caller, lease)
        return wire.Located(lease, extents, located, places)

    def _lease(
        self, held: _Owner, numbers: list[int]
    ) -> tuple[int, list[Extent], dict[int, tuple[int, int, Layout]]]:
        """Keep the extents of blocks from being recycled until the client drops them."""
        order: dict[int, int] = {}
        located = {}
        for number in numbers:
            extent, start, layout = self._blocks[number]
            located[number] = (order.setdefault(extent, len(order)), start, layout)
        for extent in order:
            self._extent_refs[extent] += 1
        lease, self._next_lease = self._next_lease, self._next_lease + 1
        held.leases[lease] = list(order)
        return lease, [self._extents[extent] for extent in order], located

    def _status(self, partition_id: str | None) -> dict[str, Any]:
        if partition_id is None:
            return self.arena.describe() | {
                "samples": self.state.live,
                "clients": len(self._owners),
                "leases": sum(len(held.leases) for held in self._owners.values()),
                "reserved": sum(
                    extent.size
                    for held in self._owners.values()
                    for extent in [*held.reserved.values(), *filter(None, [held.spare])]
                ),
                "requests": self.requests,
            }
        status = self.state.partition(partition_id).status(self.wall)
        return status | {"capacity": self.state.capacity, "capacity_bytes": self.arena.limit}

    # Checkpoints

    def _freeze(self, caller: Caller, held: _Owner) -> wire.Frozen:
        lease, extents, located = self._lease(held, list(self.state.blocks()))
        held.give(caller, lease)
        return wire.Frozen(lease, dump_state(self.state), extents, located)

    def _restore(self, held: _Owner, request: wire.Restore) -> wire.Done:
        missing = [number for number in request.extents if number not in held.reserved]
        if missing:
            raise InvalidRequestError(f"extents {missing[:3]} are not reserved for this client")
        for number, (home, start, layout) in request.blocks.items():
            if home not in request.extents:
                raise InvalidRequestError(f"block {number} is in extent {home}, which is not of this restore")
            if start < 0 or start + layout.nbytes > held.reserved[home].size:
                raise InvalidRequestError(f"block {number} does not fit into extent {home}")
        numbers = {}
        for number in request.blocks:
            numbers[number] = self._next_block
            self._next_block += 1
        restored = restore_state(
            request.state,
            numbers,
            {number: layout.nbytes for number, (_, _, layout) in request.blocks.items()},
            self.state.capacity,
            release_claims=request.release_claims,
        )
        if restored.blocks().keys() != set(numbers.values()):
            raise CheckpointError("the checkpoint has blocks that its control state does not refer to")
        # Clients that know a partition as it was before must notice that it is another one.
        latest = max((partition.version for partition in self.state.partitions.values()), default=0)
        for partition in restored.partitions.values():
            partition.version = latest + 1
        self.state.abort(PlaneConnectionError("the plane was replaced by a checkpoint"))
        self.settle()
        old = list(self._blocks)
        for number in request.extents:
            extent = held.reserved.pop(number)
            ends = [
                start + layout.nbytes for home, start, layout in request.blocks.values() if home == number
            ]
            if not ends:
                self.arena.free(extent, self.now)
                continue
            self._extents[number] = self.arena.shrink(extent, max(ends))
            self._extent_refs[number] = len(ends)
        for number, (home, start, layout) in request.blocks.items():
            self._blocks[numbers[number]] = (home, start, layout)
        self.state = restored
        for block in old:
            self._unlease([self._blocks.pop(block)[0]])
        self._retry_room()
        return wire.Done()

    # Time

    def _set_deadline(self, caller: Caller, timeout_s: float) -> None:
        if timeout_s < 1e9:
            heapq.heappush(self._deadlines, (self.now + timeout_s, next(self._tick), caller))
        else:
            heapq.heappush(self._deadlines, (float("inf"), next(self._tick), caller))

    def next_deadline(self) -> float:
        """When something times out next, in the controller's time."""
        return self._deadlines[0][0] if self._deadlines else float("inf")

    def expire(self) -> None:
        """Answer the parked requests whose time is over."""
        while self._deadlines and self._deadlines[0][0] <= self.now:
            caller = heapq.heappop(self._deadlines)[2]
            error: DataPlaneError | None = self.state.give_up(caller)
            for room in self._waiting_room:
                if room.caller is caller:
                    self._waiting_room.remove(room)
                    error = CapacityTimeoutError(
                        f"no room for {room.nbytes:,} bytes: {self.arena.used:,} of global_segment_size "
                        f"{self.arena.limit:,} are in use; nothing was written"
                    )
                    break
            if error is not None:
                self._answer(caller, error)
            self.settle()
            self._retry_room()
        # Requests that were answered in time are still in the heap; drop them before it grows.
        if len(self._deadlines) > 1024 + 4 * len(self._waiting_room):
            parked = {room.caller for room in self._waiting_room} | set(self.state.parked())
            if len(self._deadlines) > 4 * len(parked):
                self._deadlines = [entry for entry in self._deadlines if entry[2] in parked]
                heapq.heapify(self._deadlines)

    def give_back_idle(self) -> None:
        """Return segments that have been idle for a while to the machine."""
        self.arena.give_back(self.now - IDLE_SEGMENT_S)


def _place(blocks: NDArray[np.int64], positions: NDArray[np.int32]) -> tuple[wire.Place, list[int]]:
    count = len(blocks)
    if not count:
        return wire.Place(0), []
    first, start = int(blocks[0]), int(positions[0])
    if not np.count_nonzero(blocks != first):
        if not np.count_nonzero(positions[1:] - positions[:-1] != 1):
            return wire.Place(count, first, start), [first]
        numbers = [first]
    else:
        numbers = np.unique(blocks).tolist()
    return wire.Place(count, blocks=blocks.tobytes(), positions=positions.tobytes()), numbers
