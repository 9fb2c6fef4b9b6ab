"""Who is served when far more clients are busy than there are cores.

After each answer a client runs for some tenth of a millisecond, in caches that all the others have used since
it last ran. With sixty-four busy clients on two cores that takes as long as the work itself. So of such a
crowd only a few are busy at a time, each for a turn of some milliseconds, and the others wait in line:
together they do more, and each gets the same share.

Who was quiet has its turn at once. Only clients that ask without a pause ever wait here.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

__all__ = ["CROWD_PER_CORE", "IDLE_S", "SEATS_PER_CORE", "Turns"]

Request = TypeVar("Request")

# Up to so many busy clients do not get into each other's way; of more, so many are busy at a time.
CROWD_PER_CORE = 8
SEATS_PER_CORE = 2
TURN_S = 0.015
# Who has not asked for so long is quiet. A crowd that gets into its own way is slow to ask, and must not pass
# for quiet clients that are served at once: hence more for each that is busy, twice what one of them costs.
QUIET_S = 0.01
QUIET_PER_CLIENT_S = 0.0004
IDLE_S = 0.001


class _Turn:
    __slots__ = ("began", "seen")

    def __init__(self, now: float) -> None:
        self.began = self.seen = now


class Turns(Generic[Request]):
    """Of more than ``crowd`` busy clients, ``seats`` have a turn at a time. The caller has the clock."""

    def __init__(self, crowd: int, seats: int) -> None:
        self.crowd, self.seats = crowd, seats
        # The line never stands still for longer, however many are served at once: turns end as often anyway.
        self.pace_s = TURN_S / seats
        self._busy: dict[int, _Turn] = {}
        self._line: OrderedDict[int, list[Request]] = OrderedDict()
        self._looked = self._advanced = 0.0

    def __len__(self) -> int:
        """How many clients wait."""
        return len(self._line)

    def take(self, owner: int, request: Request, now: float) -> bool:
        """Whether to serve a request at once; if not, it is in line until :meth:`next` returns it."""
        in_line = self._line.get(owner)
        if in_line is not None:
            in_line.append(request)
            return False
        turn = self._busy.get(owner)
        if turn is None or now - turn.seen >= self._quiet_s():
            self._busy[owner] = _Turn(now)
            return True
        turn.seen = now
        if now - turn.began < TURN_S:
            return True
        self._forget_who_is_quiet(now, self._quiet_s())
        if not self._is_crowded():
            turn.began = now
            return True
        del self._busy[owner]
        if not self._line:
            self._advanced = now
        self._line[owner] = [request]
        return False

    def next(self, now: float, *, idle: bool = False) -> list[Request]:
        """What the first client in line has asked, if it may go on; nothing otherwise.

        ``idle`` says that nobody has asked anything for ``IDLE_S``: whoever is busy is so elsewhere.
        """
        if not self._line:
            return []
        if len(self._busy) >= self.seats and (idle or now - self._looked >= IDLE_S):
            self._looked = now
            self._forget_who_is_quiet(now, IDLE_S if idle else self._quiet_s())
        late = now - self._advanced >= self.pace_s
        if len(self._busy) >= self.seats and self._is_crowded() and not late:
            return []
        owner, requests = self._line.popitem(last=False)
        self._busy[owner] = _Turn(now)
        self._advanced = now
        return requests

    def rest(self, owner: int) -> None:
        """A client waits for others, or has gone: its seat is free."""
        self._busy.pop(owner, None)

    def pull(self, owner: int) -> list[Request]:
        """Take a client out of line, with what it has asked."""
        return self._line.pop(owner, [])

    def _quiet_s(self) -> float:
        return max(QUIET_S, QUIET_PER_CLIENT_S * (len(self._busy) + len(self._line)))

    def _is_crowded(self) -> bool:
        return len(self._busy) + len(self._line) > self.crowd

    def _forget_who_is_quiet(self, now: float, quiet_s: float) -> None:
        for owner in [owner for owner, turn in self._busy.items() if now - turn.seen >= quiet_s]:
            del self._busy[owner]
