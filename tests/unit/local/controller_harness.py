"""A controller with nothing around it: answers are kept, and time stands still until it is moved."""

from __future__ import annotations

import itertools
from typing import Any

from rlplane.adapters.local import wire
from rlplane.adapters.local.arena import PAGE, Arena
from rlplane.adapters.local.controller import Caller, Controller
from rlplane.adapters.local.wire import Extent, Layout
from rlplane.rules import PartitionSpec

FOREVER = float("inf")


class Desk:
    """Stands where the server stands: delivers requests, keeps answers, lends and revokes spares."""

    def __init__(self, *, limit: int = 16, segment: int = 4, capacity: int = 1000) -> None:
        self.segments: dict[int, int] = {}
        self.arena = Arena(
            limit * PAGE, self.segments.__setitem__, self.segments.__delitem__, segment_size=segment * PAGE
        )
        # The spares that a client may take without asking: its number by owner.
        self.on_offer: dict[int, int] = {}
        self.answers: dict[Caller, Any] = {}
        self.controller = Controller(capacity, self.arena, self._send, self._revoke, self._grant)
        self._numbers = itertools.count(1)

    def _send(self, caller: Caller, answer: Any) -> None:
        assert caller not in self.answers, "answered twice"
        self.answers[caller] = answer

    def _revoke(self, owner: int) -> bool:
        return self.on_offer.pop(owner, None) is not None

    def _grant(self, owner: int, number: int) -> None:
        self.on_offer[owner] = number

    def take_spare(self, owner: int, spare: Extent) -> bool:
        """What a client does before it writes into its spare."""
        if self.on_offer.get(owner) != spare.number:
            return False
        del self.on_offer[owner]
        return True

    def post(self, owner: int, request: Any, *, channel: int = 0, released: tuple[int, ...] = ()) -> Caller:
        """Deliver a request; its answer is in ``answers``, now or later."""
        caller = Caller(owner, next(self._numbers), channel)
        self.controller.handle(caller, wire.Envelope(owner, request, list(released)))
        return caller

    def ask(self, owner: int, request: Any, **more: Any) -> Any:
        """Deliver a request that is answered at once."""
        return self.answers[self.post(owner, request, **more)]

    def pass_time(self, seconds: float) -> None:
        self.controller.now += seconds
        self.controller.expire()

    # Whole operations of a client

    def register(self, owner: int = 0, **spec: Any) -> None:
        defaults = {"partition_id": "p", "fields": ["x"], "num_samples": 10**6, "consumer_tasks": ["t"]}
        assert self.ask(owner, wire.Register(PartitionSpec.checked(**(defaults | spec)))) == wire.Done()

    def reserve(self, owner: int, size: int, timeout_s: float = FOREVER, **more: Any) -> Caller:
        return self.post(owner, wire.Reserve(size * PAGE, timeout_s), **more)

    def commit(
        self, owner: int, ids: list[str], extent: Extent | None, size: int = 1, *, want: int = 0, **more: Any
    ) -> Caller:
        """Commit ``size`` pages of an extent as the field ``x``, or tags alone without one."""
        partition = self.controller.state.partition("p")
        layouts = [] if extent is None else [layout_of(size * PAGE, len(ids))]
        request = wire.Commit(
            "p",
            more.pop("version", partition.version),
            ids,
            [] if extent is None else ["x"],
            layouts,
            None if extent is None else extent.number,
            more.pop("used", size * PAGE),
            more.pop("timeout_s", FOREVER),
            more.pop("tags", None),
            want,
        )
        return self.post(owner, request, **more)

    def put(self, owner: int, ids: list[str], size: int = 1, **more: Any) -> wire.Done:
        """Reserve and commit, with room for it at once."""
        extent = self.answers[self.reserve(owner, size)].extent
        answer = self.answers[self.commit(owner, ids, extent, size, **more)]
        assert isinstance(answer, wire.Done)
        return answer

    def claim(self, owner: int, size: int, *, blocking: bool = False, **more: Any) -> Caller:
        timeout_s = more.pop("timeout_s", FOREVER)
        request = wire.ClaimRequest("p", "t", ["x"], size, blocking, timeout_s, more.pop("where", None))
        return self.post(owner, request, **more)

    def claimed(self, owner: int, size: int) -> list[str]:
        ids: list[str] = self.answers[self.claim(owner, size)].ids
        return ids


def layout_of(nbytes: int, rows: int) -> Layout:
    """A dense column that fills ``nbytes``."""
    return Layout("dense", "torch.uint8", (nbytes // rows,), rows, nbytes)
