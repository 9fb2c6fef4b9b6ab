"""The service's half of storages that address bytes by a key: it counts bytes, and has freed places
discarded.

Numbers of places are never used again, so a place that was taken back does no harm: whoever writes to it
writes what nobody will read, and is told so at the commit. That is why a spare place can be revoked without
asking.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from rlplane.errors import InvalidRequestError
from rlplane.storage.places import Loss, Place, Stretches

logger = logging.getLogger(__name__)

CHUNK_BYTES = 256 * 1024
"""How much of a place is one value of the store. Smaller chunks would cost more, because each
value costs a store as much as copying some 30 KB. Larger ones would make a read of a single row slower,
because it fetches the whole chunk that the row is in."""

# Freed places are discarded together, because one call to the store costs as much as many: those of this
# long, unless somebody waits for their bytes.
_COLLECT_S = 0.05


def chunk_count(nbytes: int) -> int:
    """How many chunks a place of so many bytes has."""
    return max(1, -(-nbytes // CHUNK_BYTES))


def unit_of(key: int, units: int, dead: Sequence[int]) -> int:
    """Which of so many storage units a chunk is in; ``dead`` are those that had died before its place was
    reserved."""
    if not dead:
        return key % units
    live = [unit for unit in range(units) if unit not in dead]
    return live[key % len(live)]


def lost_chunks(places: Iterable[Place], loss: Loss) -> dict[int, NDArray[np.bool_]]:
    """Which chunks are gone, for each of the places that have lost some."""
    units, chunks = frozenset(loss.units), frozenset(loss.chunks)
    found = {}
    for place in places:
        live = [unit for unit in range(loss.of) if unit not in place.at] if units else []
        lost = [
            key in chunks or (bool(live) and live[key % len(live)] in units)
            for key in range(place.number, place.number + chunk_count(place.size))
        ]
        if any(lost):
            found[place.number] = np.array(lost)
    return found


class KeyedHost:
    """A ``StorageHost`` over a store that is addressed by key; ``discard(place)`` is called for each
    place that is freed.

    ``discard`` returns True if the place is gone, and False if :meth:`discarded` will be called when it is:
    until then its bytes count as used. ``hurry`` is called when there is no room: somebody waits for what is
    being discarded. A store that consists of ``units`` goes on with those that live: the share of one that
    died counts as used from then on.
    """

    def __init__(
        self,
        limit: int | None,
        discard: Callable[[Place], bool],
        units: int = 0,
        hurry: Callable[[], None] = lambda: None,
    ) -> None:
        self.limit = limit
        self._hurry = hurry
        self._used = 0
        self._units = units
        self._dead: tuple[int, ...] = ()
        self._discard = discard
        # Anywhere but where another plane began: the numbers of two planes must not meet in one store. The
        # chunks of a place have consecutive keys, which fit into 63 bits.
        self._next = secrets.randbits(38) << 24
        self._places = 0

    def adopt(self, places: Sequence[Place], last_place: Place | None) -> None:
        """Go on from the service of before, whose places are these."""
        self._used = sum(place.size for place in places)
        self._places = len(places)
        if last_place is not None:
            # A spare that was shrunk has more keys than it shows.
            self._next = last_place.number + 2**20

    @property
    def used(self) -> int:
        return self._used + (len(self._dead) * (self.limit or 0) // self._units if self._dead else 0)

    def lose(self, loss: Loss) -> None:
        if loss.units and (loss.of != self._units or not set(loss.units) <= set(range(self._units))):
            raise InvalidRequestError(
                f"the storage has {self._units} units, and not units {list(loss.units)[:8]} of {loss.of}"
            )
        self._dead = tuple(sorted({*self._dead, *loss.units}))

    def reserve(self, nbytes: int, client: int) -> Place | None:
        if self.limit is not None and self.used + nbytes > self.limit:
            self._hurry()
            return None
        place = Place(self._next, nbytes, self._dead)
        self._next += chunk_count(nbytes)
        self._used += nbytes
        self._places += 1
        return place

    def shrink(self, place: Place, nbytes: int) -> Place:
        self._used -= place.size - nbytes
        return Place(place.number, nbytes, place.at)

    def free(self, place: Place) -> None:
        self._places -= 1
        if self._discard(place):
            self.discarded([place])

    def give_back(self, place: Place, stretches: Stretches) -> Stretches:
        """See :class:`~rlplane.storage.places.StorageHost`: a chunk goes when its place does."""
        return []

    def read_numbers(self, place: Place, start: int, count: int) -> NDArray[np.int64]:
        return np.empty(0, np.int64)

    def discarded(self, places: Sequence[Place]) -> None:
        """These places are gone from the store: their bytes can be used again."""
        self._used -= sum(place.size for place in places)

    def offer_spare(self, client: int, place: Place) -> None:
        """See :class:`~rlplane.storage.places.StorageHost`."""

    def revoke_spare(self, client: int) -> bool:
        return True

    def join(self, client: int) -> None:
        """See :class:`~rlplane.storage.places.StorageHost`."""

    def leave(self, client: int) -> None:
        """See :class:`~rlplane.storage.places.StorageHost`."""

    def tidy(self, now: float) -> None:
        """See :class:`~rlplane.storage.places.StorageHost`."""

    def describe(self) -> dict[str, int]:
        return {"limit": self.limit or 0, "used": self.used, "places": self._places}

    def close(self) -> None:
        """See :class:`~rlplane.storage.places.StorageHost`."""


class BackgroundDiscard:
    """Discards places in a thread, many at a time, and says when they are gone.

    Args:
        discard: Drops places from the store. May take its time.
        done: Called in the thread with the places that are gone.
    """

    def __init__(
        self, discard: Callable[[Sequence[Place]], None], done: Callable[[Sequence[Place]], None]
    ) -> None:
        self._discard, self._done = discard, done
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._garbage: list[tuple[Place, bool]] = []
        self._is_hurried = False
        self._closed = False
        threading.Thread(target=self._run, name="rlplane-discard", daemon=True).start()

    def add(self, place: Place, *, counted: bool = True) -> bool:
        """Have a place discarded. Returns False: it is not gone yet. ``done`` hears only of ``counted``
        ones."""
        with self._lock:
            self._garbage.append((place, counted))
            if len(self._garbage) == 1:
                self._work.notify()
        return False

    def hurry(self) -> None:
        """Do not wait for more before the next are discarded: somebody waits for their bytes."""
        with self._lock:
            self._is_hurried = True
            self._work.notify()

    def close(self) -> None:
        """Stop the thread. What it has not discarded goes with the store."""
        with self._lock:
            self._closed = True
            self._work.notify()

    def _run(self) -> None:
        while True:
            with self._lock:
                self._work.wait_for(lambda: self._garbage or self._closed)
                self._work.wait_for(lambda: self._is_hurried or self._closed, _COLLECT_S)
                if self._closed:
                    return
                garbage, self._garbage = self._garbage, []
                self._is_hurried = False
            places = [place for place, _ in garbage]
            try:
                self._discard(places)
            except Exception:
                # Their bytes are leaked, and that is logged; what it must not do is stop this thread.
                logger.exception("%d places could not be discarded from the store", len(places))
            self._done([place for place, counted in garbage if counted])
