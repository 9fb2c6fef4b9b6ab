"""``LongWork``: what was begun for a request, and the loop goes on with between others until it is done.

A slice is a number of samples and not a time, because a journal that is repeated must have the same slices.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rlplane.control.advancing import Advancing
from rlplane.control.clearing import Clearing
from rlplane.control.cursors import TaskCursor
from rlplane.control.leaving import Leaving
from rlplane.control.looking_ahead import look_for_waiting
from rlplane.control.losing import Losing
from rlplane.control.marking import Marking
from rlplane.control.partition import Partition
from rlplane.control.requests import Effects, LostRows
from rlplane.control.unclaiming import Unclaiming
from rlplane.errors import DataPlaneError
from rlplane.service import protocol as wire
from rlplane.service.clients import Client, PendingRequest
from rlplane.service.lost_rows import lost_rows
from rlplane.service.naming import take_names
from rlplane.service.stall import LookAhead
from rlplane.storage.places import Loss

if TYPE_CHECKING:
    from rlplane.service.core import ControlService

logger = logging.getLogger(__name__)

_AT_ONCE = 8192  # blocks or rows that are looked at within some ten milliseconds


class StalePlaceError(DataPlaneError):
    """The place was taken back before the commit; the client reserves and writes anew."""


class LongWork(ABC):
    """Something to do, a slice at a time, and the requests that are answered when it is done."""

    def __init__(self, requests: Iterable[PendingRequest]) -> None:
        self.requests = list(requests)
        self.answer: int | bool | None = 0

    @abstractmethod
    def do_slice(self, service: ControlService, effects: Effects) -> bool:
        """Go on; True when nothing is left to do."""

    def give_up(self, service: ControlService) -> bool:
        """Nobody waits for it any more; False if it is done to its end all the same."""
        return False

    def lose(self, lost: LostRows, refusal: DataPlaneError) -> None:  # noqa: B027 - most write nothing
        """Bytes are gone, perhaps such as it is about to write."""


class ClearWork(LongWork):
    """Samples that are cleared."""

    def __init__(self, request: PendingRequest, clearings: list[Clearing]) -> None:
        super().__init__([request])
        self._clearings = clearings

    def do_slice(self, service: ControlService, effects: Effects) -> bool:
        """See :class:`LongWork`."""
        if self._clearings:
            clearing = self._clearings[0]
            service.state.clear_some(clearing, effects)
            if clearing.is_over:
                self.answer = (self.answer or 0) + clearing.count
                del self._clearings[0]
        return not self._clearings


class AdvanceWork(LongWork):
    """New versions of partitions."""

    def __init__(self, request: PendingRequest, advancings: list[Advancing]) -> None:
        super().__init__([request])
        self.answer = None
        self._advancings = advancings

    def do_slice(self, service: ControlService, effects: Effects) -> bool:
        """See :class:`LongWork`."""
        while self._advancings:
            advancing = self._advancings[0]
            service.state.advance_some(advancing, effects)
            if not advancing.is_over:
                return False
            del self._advancings[0]
        return True


class RestoreWork(ClearWork):
    """A plane that was replaced by a checkpoint, some of which may be too old to be handed out again."""

    def __init__(
        self, request: PendingRequest, clearings: list[Clearing], advancings: list[Advancing]
    ) -> None:
        super().__init__(request, clearings)
        self._advance = AdvanceWork(request, advancings)

    def do_slice(self, service: ControlService, effects: Effects) -> bool:
        """See :class:`LongWork`."""
        return self._advance.do_slice(service, effects) and super().do_slice(service, effects)


class UnclaimWork(LongWork):
    """Claims that end."""

    def __init__(self, requests: Iterable[PendingRequest], unclaiming: Unclaiming) -> None:
        super().__init__(requests)
        self._unclaiming = unclaiming

    def do_slice(self, service: ControlService, effects: Effects) -> bool:
        """See :class:`LongWork`."""
        service.state.unclaim_some(self._unclaiming, effects)
        return self._unclaiming.is_over


class MarkWork(LongWork):
    """Samples that somebody else chose, and that are marked as claimed."""

    def __init__(self, request: PendingRequest, marking: Marking) -> None:
        super().__init__([request])
        self._marking = marking

    def do_slice(self, service: ControlService, effects: Effects) -> bool:
        """See :class:`LongWork`."""
        service.state.mark_some(self._marking, effects)
        self.answer = self._marking.is_marked
        return self._marking.is_over

    def give_up(self, service: ControlService) -> bool:
        """See :class:`LongWork`."""
        return True


def mark_work(
    service: ControlService, request: PendingRequest, held: Client, body: wire.MarkClaimed
) -> LongWork:
    """What a cursor that is moved by hand takes."""
    if body.named is not None:
        take_names(held, body)
    if body.is_claimed:
        return MarkWork(request, service.state.begin_mark(body.partition_id, body.task, body.ids))
    work = UnclaimWork([request], service.state.begin_unmark(body.partition_id, body.task, body.ids))
    work.answer = True
    return work


class LeaveWork(LongWork):
    """What a client held that is gone."""

    def __init__(self, leaving: Leaving) -> None:
        super().__init__([])
        self._leaving = leaving

    def do_slice(self, service: ControlService, effects: Effects) -> bool:
        """See :class:`LongWork`."""
        service.state.release_some(self._leaving, effects)
        return self._leaving.is_over


class LineUpWork(LongWork):
    """Claims that wait for what came with a put of very many, until that is in their queues. How long a slice
    looks is not repeated: it changes nothing that anybody is answered."""

    def __init__(self, partition: Partition, task: TaskCursor) -> None:
        super().__init__([])
        self._partition, self._task = partition, task
        self._ahead: LookAhead | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_ahead": None}  # it is begun anew

    def do_slice(self, service: ControlService, effects: Effects) -> bool:
        """See :class:`LongWork`."""
        if self._ahead is None:
            self._ahead = LookAhead(look_for_waiting(self._task, self._partition.claims))
        self._ahead()
        return service.state.line_up(self._partition, self._task, effects)


class LossWork(LongWork):
    """Samples that have lost bytes with a part of the storage. Their blocks are found first, and then they
    are."""

    def __init__(self, requests: Iterable[PendingRequest], loss: Loss, blocks: Iterable[int]) -> None:
        super().__init__(requests)
        self._loss, self._blocks = loss, list(blocks)
        self._lost: LostRows = {}
        self._losing: Losing | None = None

    def do_slice(self, service: ControlService, effects: Effects) -> bool:
        """See :class:`LongWork`."""
        state, table = service.state, service.table
        some, self._blocks = self._blocks[-_AT_ONCE:], self._blocks[:-_AT_ONCE]
        known = {block: table.blocks[block] for block in some if block in table.blocks}
        places = {home: table.places[home] for home, _, _ in known.values()}
        self._lost |= lost_rows(known, places, self._loss)
        if self._blocks:
            return False
        if self._losing is None:
            stale = StalePlaceError("the storage that it was written to has died")
            self._losing = state.begin_lose(self._lost, stale, effects)
            for work in service.work:
                work.lose(self._lost, stale)
        left = _AT_ONCE - len(some)
        while left > 0 and not self._losing.is_over:
            left -= state.lose_some(self._losing, left, effects)
        if not self._losing.is_over:
            return False
        self.answer = self._losing.count
        if self.answer:
            service.lost += self.answer
            logger.warning("%d samples were lost with the storage that had them", self.answer)
        return True
