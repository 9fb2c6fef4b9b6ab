"""``LongWork``: what a request has begun, and the loop goes on with between others until it is done."""

from __future__ import annotations

from collections.abc import Iterable

from rlplane.control.clearing import Clearing
from rlplane.control.requests import Effects
from rlplane.control.state import ControlState
from rlplane.service.clients import PendingRequest

__all__ = ["LongWork"]


class LongWork:
    """Samples that are to be cleared, a slice at a time, and the request that is answered then."""

    __slots__ = ("_clearings", "request")

    def __init__(self, request: PendingRequest, clearings: Iterable[Clearing]) -> None:
        self.request, self._clearings = request, list(clearings)

    def do_slice(self, state: ControlState, effects: Effects) -> bool:
        """Go on; True when nothing is left to do."""
        for clearing in self._clearings:
            if not clearing.is_over:
                state.clear_some(clearing, effects)
                break
        return all(clearing.is_over for clearing in self._clearings)

    @property
    def count(self) -> int:
        """How many samples there were."""
        return sum(clearing.count for clearing in self._clearings)
