"""A queue of whole groups that is not first come, first served: the same groups, by a key.

:mod:`rlplane.control.ordered_rows` does it for samples that come one by one.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rlplane.control.groups import Group, GroupQueue
from rlplane.control.policies import Order
from rlplane.control.queues import Rows, RowTable

_STALE = Group([], 0)
_STALE.whole = False


class _Line:
    """Groups in the order of their keys. It does what a queue of groups wants of a deque."""

    def __init__(self, order: Order, table: RowTable) -> None:
        self._newest_first = order.kind == "lifo"
        self._order, self._table = order, table
        self._heap: list[tuple[Any, int, Group]] = []
        self._current: dict[Group, tuple[Any, int]] = {}
        self._count = 0

    def append(self, group: Group) -> None:
        self._push(group, at_front=False)

    def extendleft(self, groups: Iterable[Group]) -> None:
        for group in groups:
            self._push(group, at_front=True)

    def popleft(self) -> Group:
        key, number, group = heapq.heappop(self._heap)
        if self._current.get(group) != (key, number):
            return _STALE
        del self._current[group]
        return group

    def move(self, group: Group) -> None:
        """Look at the key again: what it is made of may have changed."""
        place = self._current.get(group)
        if place is not None and (key := self._key(group.rows)) != place[0]:
            # Of equal ones it comes where it always would have come.
            self._current[group] = (key, place[1])
            heapq.heappush(self._heap, (key, place[1], group))

    def remove_broken(self) -> None:
        self._current = {group: place for group, place in self._current.items() if group.whole}
        self._heap = [(*place, group) for group, place in self._current.items()]
        heapq.heapify(self._heap)

    def _key(self, rows: list[int]) -> Any:
        return self._order.key(self._table.ids[rows].tolist(), self._table.tags[rows].tolist())

    def _push(self, group: Group, *, at_front: bool) -> None:
        self._count += 1
        number = -self._count if at_front or self._newest_first else self._count
        place = self._current[group] = (self._key(group.rows), number)
        heapq.heappush(self._heap, (*place, group))

    def contents(self) -> list[dict[Any, Any] | deque[Any] | list[Any]]:
        return [self._current, self._heap]

    def in_about_this_order(self) -> list[Group]:
        """All groups, without the cost of sorting them."""
        return list(self._current)

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Group]:
        seen: dict[Group, tuple[Any, int, Group]] = {}
        try:
            while self._heap:
                entry = heapq.heappop(self._heap)
                group = entry[2]
                if self._current.get(group) == entry[:2] and group not in seen:
                    seen[group] = entry
                    yield group
        finally:
            for entry in seen.values():
                heapq.heappush(self._heap, entry)


class OrderedQueue(GroupQueue):
    """Whole groups in another order than that in which they became ready."""

    def __init__(
        self,
        table: RowTable,
        group_size: int,
        order: Order,
        sizes: Mapping[str, int],
        kept: Mapping[str, int],
    ) -> None:
        super().__init__(table, group_size, sizes, kept)
        self._line = self._groups = _Line(order, table)  # type: ignore[assignment]

    def offer(self, rows: Rows) -> None:
        self.move(rows)
        super().offer(rows)

    def move(self, rows: Rows) -> None:
        numbers = rows.tolist()
        if not self._group_of.keys().isdisjoint(numbers):
            for group in self._groups_of(numbers):
                self._line.move(group)

    def contents(self) -> list[dict[Any, Any] | deque[Any] | list[Any]]:
        return [self._group_of, self._gathering, *self._line.contents()]

    def _remove_broken(self) -> None:
        self._line.remove_broken()

    def _in_about_this_order(self) -> Iterable[Group]:
        return self._line.in_about_this_order()
