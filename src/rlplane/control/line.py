"""``WaitingLine``: the order in which requests that wait for room get it.

Used for samples by the control state and for bytes by the service. It has no clock: whoever asks says what
time it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

FIRST_PATIENCE_S = 0.1
"""For how long nothing has to have been given back before others overtake a request for the first time."""


class _Entry(Generic[T]):
    __slots__ = ("item", "overtaken", "patience", "refused_at")

    def __init__(self, item: T) -> None:
        self.item = item
        self.patience = FIRST_PATIENCE_S
        self.overtaken = False
        # The rank at which it did not fit into the room that there is now; None if it has to be tried.
        self.refused_at: int | None = None


class WaitingLine(Generic[T]):
    """Requests that wait for room, first come, first served, within ranks: rank 0 comes before rank 1.

    The first that does not fit holds up the others, so that what is given back adds up for it. It does not do
    so for ever, because what it waits for may depend on the others: when nothing was given back for as long
    as its patience, whoever fits overtakes it. Each pause in which that happens doubles its patience, which
    therefore outgrows the pauses between the clears of any plane that goes on, and it is served.
    """

    def __init__(self) -> None:
        self._entries: list[_Entry[T]] = []
        self._room = 0
        self._quiet_since = 0.0
        self.due = float("inf")
        """When :meth:`serve` has to be called again although nothing was given back."""

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[T]:
        """The requests in the order in which they came; safe against removal on the way."""
        return iter([entry.item for entry in self._entries])

    def append(self, item: T, now: float) -> None:
        """Let a request wait. Call :meth:`serve` afterwards: it may fit where others do not."""
        if not self._entries:
            self._quiet_since = now
        self._entries.append(_Entry(item))

    def remove(self, item: T) -> None:
        """A request waits no longer. Call :meth:`serve` afterwards: it may have held up others."""
        self._entries = [entry for entry in self._entries if entry.item is not item]
        if not self._entries:
            self.due = float("inf")

    def reconsider(self) -> None:
        """What the requests need may have changed: :meth:`serve` asks those again that did not fit."""
        for entry in self._entries:
            entry.refused_at = None

    def serve(
        self,
        now: float,
        room: Callable[[], int],
        admit: Callable[[T], bool],
        rank: Callable[[T], int] = lambda item: 0,
    ) -> None:
        """Serve those whose turn it is and who fit.

        Args:
            now: The time, by any clock that does not go back.
            room: How much is free. More than after the last call means that something was given back.
            admit: Serves a request, and returns True when it has to wait no longer, False when it does not
                fit. One that did not fit is asked again when its rank changes or there is more room.
            rank: Who comes before whom, whenever they came.
        """
        self.due = float("inf")
        if room() > self._room:
            self._quiet_since = now
            for entry in self._entries:
                entry.refused_at = None
                if entry.overtaken:
                    entry.overtaken = False
                    entry.patience *= 2
        first: _Entry[T] | None = None
        for place, entry in self._in_order(rank):
            if first is not None and now < self._quiet_since + first.patience:
                self.due = self._quiet_since + first.patience
                break
            if entry.refused_at != place and admit(entry.item):
                self.remove(entry.item)
                if first is not None:
                    first.overtaken = True
                continue
            entry.refused_at = place
            first = first or entry
        self._room = room()

    def move_clock(self, seconds: float) -> None:
        """The times of before were told by another clock, which this one is ahead of by so much."""
        self._quiet_since += seconds
        self.due += seconds

    def _in_order(self, rank: Callable[[T], int]) -> list[tuple[int, _Entry[T]]]:
        ranked = [(rank(entry.item), entry) for entry in self._entries]
        return sorted(ranked, key=lambda pair: pair[0])
