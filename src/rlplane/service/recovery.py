"""How a control service comes back: a storage that notes what it answered, and one that repeats it."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlplane.errors import CapacityError, CheckpointError
from rlplane.service import protocol as wire
from rlplane.service.clients import PendingRequest
from rlplane.service.core import ControlService
from rlplane.service.journal import (
    Abandoned,
    Asked,
    Expired,
    Freed,
    GivenBack,
    HungUp,
    Joined,
    Journal,
    Left,
    Lost,
    Outcome,
    Record,
    Retried,
    WentOn,
    read_records,
)
from rlplane.storage.places import Loss, Place, StorageHost, Stretches

logger = logging.getLogger(__name__)


class JournaledHost:
    """A storage host whose answers go into the journal, because a service that starts again cannot ask for
    them."""

    def __init__(self, host: StorageHost, journal: Journal, recovered: Recovered | None = None) -> None:
        self._host, self._journal = host, journal
        self.in_use: dict[int, Place] = {} if recovered is None else dict(recovered.places)
        self.last_place = None if recovered is None else recovered.last_place
        self.given_back = {} if recovered is None else recovered.given_back

    @property
    def limit(self) -> int | None:
        """See :class:`~rlplane.storage.places.StorageHost`."""
        return self._host.limit

    @property
    def used(self) -> int:
        """See :class:`~rlplane.storage.places.StorageHost`."""
        used = self._host.used
        self._journal.add(Outcome(used))
        return used

    def reserve(self, nbytes: int, client: int) -> Place | None:
        """See :class:`~rlplane.storage.places.StorageHost`."""
        try:
            place = self._host.reserve(nbytes, client)
        except CapacityError:
            self._journal.add(Outcome(False))
            raise
        self._journal.add(Outcome(place))
        if place is not None:
            self.in_use[place.number] = self.last_place = place
        return place

    def shrink(self, place: Place, nbytes: int) -> Place:
        """See :class:`~rlplane.storage.places.StorageHost`."""
        shrunk = self._host.shrink(place, nbytes)
        self._journal.add(Outcome(shrunk))
        self.in_use[shrunk.number] = shrunk
        return shrunk

    def free(self, place: Place) -> None:
        """See :class:`~rlplane.storage.places.StorageHost`."""
        self._journal.add(Freed(place.number))
        self.in_use.pop(place.number, None)
        self.given_back.pop(place.number, None)
        self._host.free(place)

    def give_back(self, place: Place, stretches: Stretches) -> Stretches:
        """See :class:`~rlplane.storage.places.StorageHost`."""
        given = self._host.give_back(place, stretches)
        if given:
            self._journal.add(GivenBack(place.number, given))
            self.given_back.setdefault(place.number, []).extend(given)
        return given

    def read_numbers(self, place: Place, start: int, count: int) -> NDArray[np.int64]:
        """See :class:`~rlplane.storage.places.StorageHost`."""
        return self._host.read_numbers(place, start, count)

    def lose(self, loss: Loss) -> None:
        """See :class:`~rlplane.storage.places.StorageHost`."""
        self._host.lose(loss)

    def offer_spare(self, client: int, place: Place) -> None:
        """See :class:`~rlplane.storage.places.StorageHost`."""
        self._host.offer_spare(client, place)

    def revoke_spare(self, client: int) -> bool:
        """See :class:`~rlplane.storage.places.StorageHost`."""
        revoked = self._host.revoke_spare(client)
        self._journal.add(Outcome(revoked))
        return revoked

    def join(self, client: int) -> None:
        """See :class:`~rlplane.storage.places.StorageHost`."""
        self._host.join(client)

    def leave(self, client: int) -> None:
        """See :class:`~rlplane.storage.places.StorageHost`."""
        self._host.leave(client)

    def tidy(self, now: float) -> None:
        """See :class:`~rlplane.storage.places.StorageHost`."""
        self._host.tidy(now)

    def describe(self) -> dict[str, int]:
        """See :class:`~rlplane.storage.places.StorageHost`."""
        return self._host.describe()

    def close(self) -> None:
        """See :class:`~rlplane.storage.places.StorageHost`."""
        self._journal.close()
        self._journal.remove()
        self._host.close()


class _RepeatingHost:
    """Answers as the journal says that the storage has answered."""

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.outcomes: deque[Place | bool | int | None] = deque()
        self.in_use: dict[int, Place] = {}

    def _next(self) -> Place | bool | int | None:
        try:
            return self.outcomes.popleft()
        except IndexError:
            raise CheckpointError("the journal lacks what the storage answered") from None

    @property
    def used(self) -> int:
        used = self._next()
        assert isinstance(used, int)
        return used

    def reserve(self, nbytes: int, client: int) -> Place | None:
        place = self._next()
        if place is False:
            raise CapacityError("the storage had no memory")
        assert place is None or isinstance(place, Place)
        return place

    def shrink(self, place: Place, nbytes: int) -> Place:
        shrunk = self._next()
        assert isinstance(shrunk, Place)
        return shrunk

    def revoke_spare(self, client: int) -> bool:
        return bool(self._next())

    def free(self, place: Place) -> None: ...

    def give_back(self, place: Place, stretches: Stretches) -> Stretches:
        return []

    def read_numbers(self, place: Place, start: int, count: int) -> NDArray[np.int64]:
        return np.empty(0, np.int64)

    def lose(self, loss: Loss) -> None: ...

    def offer_spare(self, client: int, place: Place) -> None: ...

    def join(self, client: int) -> None: ...

    def leave(self, client: int) -> None: ...

    def tidy(self, now: float) -> None: ...

    def describe(self) -> dict[str, int]:
        return {}

    def close(self) -> None: ...


class About(NamedTuple):
    """What a dump says beside the service itself."""

    secrets: dict[int, str]
    bootstrap: int | None
    next_client: int
    next_channel: int
    places: dict[int, Place]
    last_place: Place | None
    given_back: dict[int, Stretches]


class Recovered:
    """A service that was built from a journal, and what is to be known about its clients and places."""

    def __init__(self, service: ControlService) -> None:
        self.service = service
        self.secrets: dict[int, str] = {}
        self.bootstrap: int | None = None
        self.next_client = 0
        self.next_channel = 1
        self.places: dict[int, Place] = {}
        self.freed: list[Place] = []  # perhaps not discarded yet when the service died
        self.last_place: Place | None = None
        self.given_back: dict[int, Stretches] = {}
        self.generation = 0

    def load(self, about: About) -> None:
        """Begin with what a dump says."""
        self.secrets, self.bootstrap = about.secrets, about.bootstrap
        self.next_client, self.next_channel = about.next_client, about.next_channel
        self.places, self.last_place = about.places, about.last_place
        self.given_back = about.given_back


def recover(directory: Path, capacity: int, limit: int | None, reserve_for_live: float = 0.0) -> Recovered:
    """Build the service whose journal is in ``directory``. Its storage is still the one that repeats
    answers."""
    state, records, generation = read_records(directory)
    host = _RepeatingHost(limit)
    service = ControlService(capacity, host, lambda request, answer: None, reserve_for_live=reserve_for_live)
    service.is_journaled = True
    recovered = Recovered(service)
    recovered.generation = generation
    if state is not None:
        about, service_state = state
        recovered.load(About(*about))
        service.load(service_state)
        for partition in service.state.partitions.values():
            partition.settle()
    for record in _with_outcomes(records, host, recovered):
        try:
            _repeat(record, recovered)
        except CheckpointError:
            raise
        except Exception:
            # It did the same the first time, and the service went on.
            logger.exception("a %s record failed when it was repeated", type(record).__name__)
    # Leases of this life must not have the numbers of an earlier one; time goes on in between.
    begin_again(service, set(recovered.places), first_lease=int(time.time() * 1000) << 20)
    return recovered


def _with_outcomes(records: Iterator[Record], host: _RepeatingHost, recovered: Recovered) -> Iterator[Record]:
    """The inputs, each when all the outcomes that belong to it are at hand."""
    pending: Record | None = None
    for record in records:
        match record:
            case Outcome(value):
                host.outcomes.append(value)
                if isinstance(value, Place):
                    recovered.places[value.number] = value
                    if recovered.last_place is None or value.number >= recovered.last_place.number:
                        recovered.last_place = value
            case Freed(number):
                recovered.given_back.pop(number, None)
                place = recovered.places.pop(number, None)
                if place is not None:
                    recovered.freed.append(place)
            case GivenBack(number, stretches):
                recovered.given_back.setdefault(number, []).extend(stretches)
            case _:
                if pending is not None:
                    yield pending
                host.outcomes.clear()
                pending = record
    if pending is not None:
        yield pending


def _repeat(record: Record, recovered: Recovered) -> None:
    service = recovered.service
    match record:
        case Joined(client, secret, bootstrap):
            recovered.secrets[client] = secret
            recovered.next_client = client + 1
            if bootstrap:
                recovered.bootstrap = client
            service.connect(client)
        case Left(client, died, now):
            service.now = now
            recovered.secrets.pop(client, None)
            service.disconnect(client, died=died)
        case Asked(client, number, channel, now, wall, envelope):
            service.now, service.wall = now, wall
            recovered.next_channel = max(recovered.next_channel, channel + 1)
            decoded = wire.envelope_decoder.decode(bytes(envelope))
            # What else was in the envelope has records of its own.
            alone = wire.Envelope(decoded.request, read=decoded.read)
            service.handle(PendingRequest(client, number, channel), alone)
        case Abandoned(client, number, now):
            service.now = now
            service.abandon(client, number)
        case HungUp(client, numbers, now):
            service.now = now
            service.withdraw(client, numbers)
        case Expired(now):
            service.now = now
            service.expire()
        case Retried(now):
            service.now = now
            service.retry_reservations()
        case Lost(loss, now):
            service.now = now
            service.lose(loss)
        case WentOn(now):
            service.now = now
            service.go_on()


def begin_again(service: ControlService, in_use: set[int], first_lease: int) -> None:
    """After a recovery: which leases there are is known to the clients that hold them, and they will say
    so; until all have, none of the places ``in_use`` is freed. Nobody is connected, so nothing is sent
    to a channel of before."""
    service.table.keep(
        in_use, [places for held in service.clients.values() for places in held.leases.values()]
    )
    for held in service.clients.values():
        held.leases.clear()
        held.granted = {
            channel: grant for channel, grant in held.granted.items() if not isinstance(grant[1], int)
        }
    service.next_lease = max(service.next_lease, first_lease)
    begun = [request for work in service.work for request in work.requests]
    for request in [*service.unanswered.values(), *begun]:
        # None that there is. Each has one of its own, because by it is noted what a request was given.
        request.channel = -request.number


def resume(
    service: ControlService,
    client: int,
    leases: Mapping[int, list[int]],
    abandoned: Iterable[int],
    in_use: Mapping[int, Place],
) -> None:
    """A client of before is there again, holds these leases on these places and no others, and has abandoned
    these requests."""
    held = service.clients[client]
    for lease in held.leases.keys() - leases.keys():
        service.release(client, lease)  # it could not say so
    for lease, numbers in leases.items():
        if lease in held.leases:
            continue  # only the connection was lost
        held.leases[lease] = service.table.lease_again(numbers, in_use)
    for number in abandoned:
        service.abandon(client, number)


def unreferenced(service: ControlService, in_use: Mapping[int, Place]) -> list[Place]:
    """Those of the places that are in use for nobody: no sample, lease or reservation refers to them."""
    reserved = {place.number for held in service.clients.values() for place in held.places}
    return [
        place
        for number, place in in_use.items()
        if number not in service.table.places and number not in reserved
    ]
