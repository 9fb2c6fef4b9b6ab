"""What a control service knows of its clients: their requests that are not answered yet, and what each
holds."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlplane.service import protocol as wire
from rlplane.storage.places import Place

if TYPE_CHECKING:
    from rlplane.service.checkpoints import Loading

_CHANNELS_REMEMBERED = 1024
_ABANDONED_REMEMBERED = 256


@dataclass(eq=False, slots=True)
class PendingRequest:
    """A request that has not been answered yet: whose it is, and where the answer goes."""

    client: int
    number: int
    channel: int = 0
    want: int = 0
    claim: tuple[str, str] | None = None
    remembered: bool = False  # whether the answer is kept until the client has it
    parked: float | None = None  # since when it waits for others, if it had to


Granted = Place | int | tuple[str, str, Sequence[str]]
"""What a request was given that has to be undone if nobody reads the answer: a place, a lease, or a claim
(partition, task, ids)."""


NamedSamples = tuple[list[str], list[dict[str, Any]] | None]
"""The ids and the tags of samples."""


class Client:
    """What one client holds."""

    def __init__(self) -> None:
        self.reserved: dict[int, Place] = {}
        self.spare: Place | None = None
        self.leases: dict[int, list[int]] = {}
        # For each channel the number of its last request, with what that was given.
        self.granted: dict[int, tuple[int, Granted]] = {}
        # Requests that were abandoned before they arrived: over TCP, connections overtake each other.
        self.abandoned: deque[int] = deque(maxlen=_ABANDONED_REMEMBERED)
        # Answers that the client may not have read yet, by the number of the request. After a restart of the
        # service it asks again, and what was done once is not done twice.
        self.answers: dict[int, wire.Answer] = {}
        # Checkpoints that it is loading, by a number of its own.
        self.loading: dict[int, Loading] = {}
        # Samples of requests that are still to come, by a number of its own too.
        self.named: dict[int, NamedSamples] = {}

    @property
    def places(self) -> list[Place]:
        """The places that it may write to."""
        return [*self.reserved.values(), *filter(None, [self.spare])]

    def grant(self, request: PendingRequest, what: Granted) -> None:
        """Note what a request was given."""
        self.granted.pop(request.channel, None)  # so that the first is always the one not used for longest
        self.granted[request.channel] = (request.number, what)
        if len(self.granted) > _CHANNELS_REMEMBERED:
            del self.granted[next(iter(self.granted))]

    def pop_reserved(self, number: int) -> Place | None:
        """A place that it has reserved, or its spare, which it has taken without asking."""
        place = self.reserved.pop(number, None)
        if place is None and self.spare is not None and self.spare.number == number:
            place, self.spare = self.spare, None
        return place
