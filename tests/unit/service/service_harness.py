"""A control service with nothing around it: answers are kept, and time stands still until it is moved."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplane.control.loading import pieces_of
from rlplane.control.rules import PartitionSpec
from rlplane.errors import CapacityError, InvalidRequestError
from rlplane.service import protocol as wire
from rlplane.service.clients import PendingRequest
from rlplane.service.core import ControlService
from rlplane.service.journal import Journal
from rlplane.service.recovery import JournaledHost, recover
from rlplane.storage.places import Layout, Loss, Place, Stretches
from rlplane.storage.shm.arena import PAGE, Arena

FOREVER = float("inf")
IDLE_SEGMENT_S = 10.0


class ArenaHost:
    """The service's half of shared memory, without the files."""

    def __init__(self, limit: int, segment: int) -> None:
        self.segments: dict[int, int] = {}
        self.arena = Arena(
            limit * PAGE,
            self.segments.__setitem__,
            self.segments.__delitem__,
            lambda number, start, size: None,
            segment_size=segment * PAGE,
        )
        # The spares that a client may take without asking: its number by client.
        self.on_offer: dict[int, int] = {}
        self.clients: set[int] = set()
        self.now = 0.0
        self.limit = self.arena.limit

    @property
    def used(self) -> int:
        return self.arena.used

    def reserve(self, nbytes: int, client: int) -> Place | None:
        try:
            return self.arena.allocate(nbytes, client, self.now)
        except OSError as error:
            raise CapacityError(f"the control service cannot make shared memory: {error}") from error

    def shrink(self, place: Place, nbytes: int) -> Place:
        return self.arena.shrink(place, nbytes)

    def free(self, place: Place) -> None:
        self.arena.free(place, self.now)

    def give_back(self, place: Place, stretches: Stretches) -> Stretches:
        return self.arena.give_back_part(place, stretches)

    def read_numbers(self, place: Place, start: int, count: int) -> NDArray[np.int64]:
        return np.empty(0, np.int64)

    def lose(self, loss: Loss) -> None:
        raise InvalidRequestError("it is in no storage units")

    def offer_spare(self, client: int, place: Place) -> None:
        self.on_offer[client] = place.number

    def revoke_spare(self, client: int) -> bool:
        return self.on_offer.pop(client, None) is not None

    def join(self, client: int) -> None:
        assert client not in self.clients
        self.clients.add(client)

    def leave(self, client: int) -> None:
        self.clients.remove(client)
        self.on_offer.pop(client, None)
        self.arena.leave_home(client)

    def tidy(self, now: float) -> None:
        self.arena.give_back(now - IDLE_SEGMENT_S)

    def describe(self) -> dict[str, int]:
        return self.arena.describe()

    def close(self) -> None:
        pass


class Desk:
    """Stands where the server stands: delivers requests, keeps answers, lends and revokes spares."""

    def __init__(
        self, *, limit: int = 16, segment: int = 4, capacity: int = 1000, reserve_for_live: float = 0.0
    ) -> None:
        self.host = ArenaHost(limit, segment)
        self.answers: dict[PendingRequest, Any] = {}
        self.service = ControlService(capacity, self.host, self._send, reserve_for_live=reserve_for_live)
        self._numbers = itertools.count(1)

    @property
    def used(self) -> int:
        """How many bytes are not free."""
        return self.host.used

    def _send(self, request: PendingRequest, answer: Any) -> None:
        assert request not in self.answers, "answered twice"
        self.answers[request] = answer

    def take_spare(self, client: int, spare: Place) -> bool:
        """What a client does before it writes into its spare."""
        if self.host.on_offer.get(client) != spare.number:
            return False
        del self.host.on_offer[client]
        return True

    def post(
        self,
        client: int,
        body: Any,
        *,
        channel: int = 0,
        released: tuple[int, ...] = (),
        abandoned: tuple[int, ...] = (),
    ) -> PendingRequest:
        """Deliver a request; its answer is in ``answers``, now or later."""
        request = PendingRequest(client, next(self._numbers), channel)
        self.service.handle(request, wire.Envelope(body, list(released), list(abandoned)))
        return request

    def ask(self, client: int, body: Any, **more: Any) -> Any:
        """Deliver a request that is answered at once."""
        return self.answers[self.post(client, body, **more)]

    def freeze(self, client: int) -> tuple[int, wire.FrozenPlane]:
        """Freeze the plane, and read it: the lease, and what was read."""
        lease = self.ask(client, wire.Freeze()).lease
        pieces, is_last = [], False
        while not is_last:
            piece, is_last = self.ask(client, wire.FrozenPiece(lease)).value
            pieces.append(piece)
        return lease, wire.FrozenPlane.read(b"".join(pieces))

    def restore(
        self,
        client: int,
        state: bytes,
        places: list[int],
        blocks: Mapping[int, tuple[int, int, Layout]],
        *,
        cut: Callable[[bytes], Iterable[bytes]] = pieces_of,
    ) -> PendingRequest:
        """Load a checkpoint; the request whose answer says that it is there, or the first that is refused."""
        request = self.post(client, wire.RestorePiece(1, dict(blocks)))
        for piece in cut(state):
            if isinstance(self.answers[request], wire.Failure):
                return request
            request = self.post(client, wire.RestorePiece(1, state=piece))
        if isinstance(self.answers[request], wire.Failure):
            return request
        return self.post(client, wire.Restore(1, places))

    def abandon(self, request: PendingRequest) -> None:
        """What a client says of a request when its caller was interrupted."""
        self.service.abandon(request.client, request.number)

    def pass_time(self, seconds: float) -> None:
        self.service.now += seconds
        self.host.now = self.service.now
        self.service.expire()

    # Whole operations of a client

    def register(self, client: int = 0, **spec: Any) -> None:
        defaults: dict[str, Any] = {
            "partition_id": "p",
            "fields": ["x"],
            "num_samples": 10**6,
            "consumer_tasks": ["t"],
        }
        assert self.ask(client, wire.Register(PartitionSpec.checked(**(defaults | spec)))) == wire.Done()

    def reserve(self, client: int, size: int, timeout_s: float = FOREVER, **more: Any) -> PendingRequest:
        return self.post(client, wire.Reserve(size * PAGE, timeout_s), **more)

    def commit(
        self, client: int, ids: list[str], place: Place | None, size: int = 1, *, want: int = 0, **more: Any
    ) -> PendingRequest:
        """Commit ``size`` pages of a place as the field ``x``, or tags alone without one."""
        partition = self.service.state.partition("p")
        layouts = [] if place is None else [layout_of(size * PAGE, len(ids))]
        body = wire.Commit(
            "p",
            more.pop("version", partition.version),
            ids,
            [] if place is None else ["x"],
            layouts,
            None if place is None else place.number,
            more.pop("used", size * PAGE),
            more.pop("timeout_s", FOREVER),
            more.pop("tags", None),
            want,
        )
        return self.post(client, body, **more)

    def put(self, client: int, ids: list[str], size: int = 1, **more: Any) -> wire.Done:
        """Reserve and commit, with room for it at once."""
        place = self.answers[self.reserve(client, size)].place
        answer = self.answers[self.commit(client, ids, place, size, **more)]
        assert isinstance(answer, wire.Done)
        return answer

    def claim(self, client: int, size: int, *, blocking: bool = False, **more: Any) -> PendingRequest:
        timeout_s = more.pop("timeout_s", FOREVER)
        body = wire.ClaimRequest("p", "t", ["x"], size, blocking, timeout_s, more.pop("where", None))
        return self.post(client, body, **more)

    def claimed(self, client: int, size: int) -> list[str]:
        ids: list[str] = self.answers[self.claim(client, size)].ids
        return ids


class JournaledPlane:
    """A service with a journal; it can be killed, and the next one goes on in its place."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.answers: dict[tuple[int, int], Any] = {}
        journal = Journal(directory)
        self.service = ControlService(1000, JournaledHost(ArenaHost(64, 64), journal), self._deliver, journal)
        self.service.connect(0, "secret")

    def _deliver(self, request: PendingRequest, answer: wire.Answer) -> None:
        assert (request.client, request.number) not in self.answers, "answered twice"
        self.answers[request.client, request.number] = answer

    def ask(self, number: int, request: wire.Request, *, client: int = 0) -> Any:
        body = wire.encode(wire.Envelope(request))
        self.service.handle(PendingRequest(client, number, 7), wire.envelope_decoder.decode(body), body)
        return self.answers.get((client, number))

    def die(self) -> None:
        """Kill the service, and start it again."""
        journal = self.service.journal
        if journal is not None:
            journal.flush()
        self.service = recover(self.directory, 1000, 64 * PAGE).service
        self.service.deliver = self._deliver


def layout_of(nbytes: int, rows: int) -> Layout:
    """A dense column that fills ``nbytes``."""
    return Layout("dense", "torch.uint8", (nbytes // rows,), rows, nbytes)


def finish(desk: Desk, at_once: int = sys.maxsize) -> int:
    """Work off what was begun, of which no slice removes more than ``at_once``; return in how many slices."""
    slices = 0
    while desk.service.has_work:
        before = desk.service.state.live
        desk.service.go_on()
        slices += 1
        assert before - desk.service.state.live <= at_once
    return slices
