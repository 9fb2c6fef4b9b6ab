"""``Cursors``: the tasks of a partition, what each has claimed, and the queues of what is ready for it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import reduce

import numpy as np
from numpy.typing import NDArray

from rlplane.control.arrays import filled, grown, in_pieces, starts_of_runs
from rlplane.control.conditions import Look, Pause
from rlplane.control.fields import Rows
from rlplane.control.flow import FlowState
from rlplane.control.group_members import GroupMembers
from rlplane.control.groups import GroupQueue
from rlplane.control.looking import Looking
from rlplane.control.making import GroupsInMaking
from rlplane.control.ordered_rows import OrderedRowQueue
from rlplane.control.policies import Order
from rlplane.control.queues import ReadyQueue, RowQueue
from rlplane.control.requests import LEAVING, NOBODY, Claim
from rlplane.control.samples import STAMP_BITS, SampleTable
from rlplane.errors import UnknownTaskError

# Each queue costs a look at every write.
_MOST_QUEUES = 16
# Sorted into a queue within some ten milliseconds.
_SORTED_AT_ONCE = 1 << 16
_MANY_ROWS = 8192  # to gather the groups of more takes longer than some ten milliseconds
_VERY_MANY_ROWS = 1 << 16  # to sort more into a queue than these does
# How often a queue of groups is begun, until it is made at once.
_MOST_ATTEMPTS = 4

# So many rows are lined up for claims that wait within some ten milliseconds, whatever the order. Only the
# number of slices counts, so that a journal that is repeated has as many: what is left is done in the last.
_ROWS_A_SLICE = 4096
_FEWEST_SLICES = 4

QueueKey = tuple[tuple[str, ...], str]
"""Which fields a queue's samples have, and in which order they are; empty: first ready, first claimed."""


class TaskCursor:
    """One consumer: its cursor, its queues, and the claims that wait."""

    __slots__ = (
        "claimed",
        "claims",
        "count",
        "is_returning",
        "kept",
        "last",
        "name",
        "owner",
        "places",
        "queues",
        "sequence",
        "to_line_up",
        "uses",
        "waiting",
        "writes",
    )

    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self.claimed = filled(size, bool, False)
        self.count = 0
        # Who holds an unfinished claim on a row, and in which order it was made.
        self.owner = filled(size, np.int64, NOBODY)
        self.sequence = filled(size, np.int64, 0)
        self.is_returning = False  # whether some of what is claimed is about to come back
        # How often a row was claimed by claims that allow it more than once; None until one does.
        self.uses: NDArray[np.int64] | None = None
        # The stamp of when a row came back last: to the front if it is negative, and 0 if it never did. None
        # until one does.
        self.places: NDArray[np.int64] | None = None
        self.claims = 0
        self.queues: dict[QueueKey, ReadyQueue] = {}
        # Of groups whose other members were put back: how many members this task has already.
        self.kept: dict[str, int] = {}
        self.waiting: list[Claim] = []
        # How many slices are left until what came with a put of very many is in the queues, and the claims
        # that wait are answered.
        self.to_line_up = 0
        # The claim that was made last, and the fields that were written by whoever had claimed the samples:
        # what the task waits for, and what others wait for.
        self.last: Claim | None = None
        self.writes: set[str] = set()

    def grow(self, size: int) -> None:
        """Make room for rows up to ``size``."""
        self.claimed = grown(self.claimed, size, False)
        self.owner = grown(self.owner, size, NOBODY)
        self.sequence = grown(self.sequence, size, 0)
        if self.uses is not None:
            self.uses = grown(self.uses, size, 0)
        if self.places is not None:
            self.places = grown(self.places, size, 0)
        for queue in self.queues.values():
            queue.grow(size)

    @property
    def is_waited_for(self) -> bool:
        """Whether a claim waits, and is to be answered as soon as it can be."""
        return bool(self.waiting) and not self.to_line_up

    @property
    def settled(self) -> int:
        """How many rows are claimed, without those that are about to come back."""
        leaving = int(np.count_nonzero(self.owner == LEAVING)) if self.is_returning else 0
        return self.count - leaving

    def keeps(self, rows: Rows) -> NDArray[np.bool_]:
        """For each row, whether it is claimed and not about to come back."""
        kept: NDArray[np.bool_] = self.claimed[rows]
        return kept & (self.owner[rows] != LEAVING) if self.is_returning else kept

    def end_return(self) -> None:
        """What was about to come back is there, unless others are too."""
        self.is_returning = bool((self.owner == LEAVING).any())

    def take(self, rows: Rows, owner: int, popped_from: ReadyQueue | None = None) -> None:
        """Move the cursor past these rows, which are no longer in the queue they were popped from."""
        for queue in self.queues.values():
            if queue is not popped_from:
                queue.discard(rows)
        self.claimed[rows] = True
        self.count += len(rows)
        self.owner[rows] = owner
        self.sequence[rows] = np.arange(self.claims, self.claims + len(rows))
        self.claims += len(rows)

    def remove(self, rows: Rows) -> None:
        """Forget rows."""
        claimed = int(np.count_nonzero(self.claimed[rows]))
        if claimed < len(rows):  # what is claimed is in no queue
            for queue in self.queues.values():
                queue.discard(rows)
        if claimed:
            self.count -= claimed
            self.claimed[rows] = False
            self.owner[rows] = NOBODY
        if self.uses is not None:
            self.uses[rows] = 0
        if self.places is not None:
            self.places[rows] = 0

    def place(self, rows: Rows, stamps: Rows) -> None:
        """Rows have come back."""
        if self.places is None:
            self.places = filled(len(self.claimed), np.int64, 0)
        self.places[rows] = stamps


class Cursors:
    """All tasks of a partition by name."""

    def __init__(self, table: SampleTable, groups: GroupMembers, flow: FlowState, looking: Looking) -> None:
        self.table, self._groups, self._flow, self._looking = table, groups, flow, looking
        self.tasks = {name: TaskCursor(name, table.size) for name in table.spec.tasks}
        self.lining_up: list[TaskCursor] = []  # whose claims are not answered with what came last

    def task(self, name: str) -> TaskCursor:
        """The task of that name, or ``UnknownTaskError``."""
        try:
            return self.tasks[name]
        except (KeyError, TypeError):
            raise UnknownTaskError(
                f"partition {self.table.spec.partition_id!r} has no task {name!r}; it has "
                f"{sorted(self.tasks)}"
            ) from None

    def declare(self) -> None:
        """Follow a new schema: its tasks are there, and queues of fields that are gone are not."""
        columns = self.table.columns.keys()
        for task in self.tasks.values():
            task.queues = {key: queue for key, queue in task.queues.items() if columns >= set(key[0])}
        self.tasks = {
            name: self.tasks.get(name) or TaskCursor(name, self.table.size) for name in self.table.spec.tasks
        }

    # What is ready

    def queue(self, task: TaskCursor, claim: Claim) -> ReadyQueue:
        """The queue of what is ready for a claim of this task, built when first asked for."""
        key, order = self.wanted(task, claim)
        queue = self.known_queue(task, key) or self.new_queue(task, key[0], order)
        task.queues.pop(key, None)
        self._keep(task, key, queue)
        return queue

    def known_queue(self, task: TaskCursor, key: QueueKey) -> ReadyQueue | None:
        """The queue that a task has for a key, whole; None if it has none."""
        queue = task.queues.get(key)
        if isinstance(queue, GroupQueue) and not queue.is_whole:
            if queue.making is None or not (queue.making(lambda: False) and queue.is_whole):
                task.queues.pop(key, None)
                return None
        elif queue is not None and not queue.is_whole:
            self._fill_unless_whole(task, key[0], queue, self.table.live_rows(None))
            queue.is_whole = True
        return queue

    def new_queue(self, task: TaskCursor, required: tuple[str, ...], order: Order | None) -> ReadyQueue:
        """A queue of what is ready, which the task does not keep."""
        queue: ReadyQueue
        table = self.table
        rows = table.live_rows(None)
        if order is not None and not table.spec.group_size:
            ordered = OrderedRowQueue(table, self._looking.keys(order))
            self._fill_ordered(ordered, task, required, rows)
            return ordered
        queue = self._new_groups(task, order) if table.spec.group_size else RowQueue(table)
        rows = self.ready(task, required, rows)
        if len(rows):
            self.fill(queue, task, required, rows)
        return queue

    def _new_groups(self, task: TaskCursor, order: Order | None) -> GroupQueue:
        size, sizes = self.table.spec.group_size, self._groups.sizes
        assert size
        keys = None if order is None else self._looking.keys(order)
        return GroupQueue(self.table, size, sizes, task.kept, order, keys)

    def look_at_groups(self, task: TaskCursor, key: QueueKey, order: Order | None) -> Iterator[Look]:
        """Looks that build a queue of groups, before a claim asks for it."""
        for _ in range(_MOST_ATTEMPTS):
            queue = task.queues.get(key)
            if queue is not None and queue.is_whole:
                return
            if not isinstance(queue, GroupQueue) or queue.making is None:
                queue = self._new_groups(task, order)
                self._keep(task, key, queue)
                live = np.flatnonzero(self.table.serial >= 0)
                queue.make_of(GroupsInMaking(self, task, key, queue, live))
            assert queue.making is not None
            yield queue.making

    def look_at_rows(self, task: TaskCursor, key: QueueKey) -> Iterator[Look]:
        """Looks that build a queue of very many rows, before a claim asks for it."""
        table = self.table
        if key in task.queues or len(table.rows) <= _VERY_MANY_ROWS:
            return
        queue = RowQueue(table)  # most of this is getting memory from the system
        yield Pause()
        queue.grow(table.size)
        is_wanted = self.tasks.get(task.name) is task and key not in task.queues
        if is_wanted and not table.spec.group_size and table.columns.keys() >= set(key[0]):
            self.fill(queue, task, key[0], self.ready(task, key[0], table.live_rows(None)))
            self._keep(task, key, queue)
            yield Pause()

    def look_at_queue(self, task: TaskCursor, key: QueueKey, order: Order) -> Iterator[Look]:
        """Looks that build the queue of an order, before a claim asks for it. It is there meanwhile, so that
        it takes part in all that happens, and what was there before comes to it a slice at a time."""
        table = self.table
        if key not in task.queues:
            yield from self._looking.look_at_keys(order)
        queue = task.queues.get(key)
        if queue is None:
            queue = OrderedRowQueue(table, self._looking.keys(order))
            queue.is_whole = False
            self._keep(task, key, queue)
            yield Pause()
        if queue.is_whole:
            return
        built = queue

        def see(rows: Rows) -> int:
            # A new registration may have ended the task, or the queue.
            if self.tasks.get(task.name) is task and task.queues.get(key) is built:
                self._fill_unless_whole(task, key[0], built, rows)
            return 0

        yield Look(table, np.arange(table.size), see, math.inf, _SORTED_AT_ONCE)
        built.is_whole = True

    @staticmethod
    def _keep(task: TaskCursor, key: QueueKey, queue: ReadyQueue) -> None:
        if len(task.queues) >= _MOST_QUEUES:
            _drop_a_queue(task)
        task.queues[key] = queue  # the last one that was asked for

    def ready(self, task: TaskCursor, required: Sequence[str], rows: Rows) -> Rows:
        """Those of live rows that a claim may have."""
        if len(rows) <= _SORTED_AT_ONCE:
            ready: Rows = rows[~task.claimed[rows] & self.table.have(rows, required)]
            return ready
        found = []
        for some, at in in_pieces(rows, _SORTED_AT_ONCE):
            has = ~task.claimed[at]
            for name in required:
                has &= self.table.columns[name].block[at] >= 0
            found.append(some[has])
        return np.concatenate(found)

    def since(self, task: TaskCursor, required: Sequence[str], rows: Rows) -> tuple[Rows, NDArray[np.bool_]]:
        """The stamps of when rows became ready or came back, and whether they came back to the front."""
        table = self.table
        columns = [table.columns[name].stamp for name in required] or [table.stamp]
        if len(rows) <= _SORTED_AT_ONCE:
            stamps = reduce(np.maximum, [column[rows] for column in columns])
        else:
            stamps = np.concatenate(
                [
                    reduce(np.maximum, [column[at] for column in columns])
                    for _, at in in_pieces(rows, _SORTED_AT_ONCE)
                ]
            )
        if task.places is None:
            return stamps, np.zeros(len(rows), bool)
        places = task.places[rows]
        return np.maximum(stamps, np.abs(places)), places < -stamps

    def _fill_ordered(
        self, queue: OrderedRowQueue, task: TaskCursor, required: Sequence[str], rows: Rows
    ) -> None:
        """Put those of live rows that are ready into a new queue."""
        rows = self.ready(task, required, rows)
        queue.fill(rows, _in_line(*self.since(task, required, rows)))

    def fill(self, queue: ReadyQueue, task: TaskCursor, required: Sequence[str], rows: Rows) -> None:
        """Do to a new queue what was done to those that were there when its rows became ready, came back, or
        were left over in a group that was closed."""
        for piece, is_return in self.in_line(task, required, rows):
            if is_return:
                queue.restore(piece)
                continue
            for some, _ in in_pieces(piece, _SORTED_AT_ONCE):
                queue.offer(some)

    def in_line(self, task: TaskCursor, required: Sequence[str], rows: Rows) -> list[tuple[Rows, bool]]:
        """Rows that are ready in the order in which they became so, and whether they came back."""
        if not len(rows):
            return []
        table, closed = self.table, self._groups.closed
        stamps, returned = self.since(task, required, rows)
        is_in_order = bool((stamps[1:] >= stamps[:-1]).all())
        if task.places is None and not closed:
            return [(rows if is_in_order else rows[np.argsort(stamps, kind="stable")], False)]
        if closed:
            closings = np.array([closed.get(name, 0) for name in table.groups[rows].tolist()], np.int64)
            late = closings > stamps
            # What was put back stood before the others of its group when that was closed.
            in_line = _in_line(stamps, returned)
            stamps, returned = np.where(late, closings, stamps), returned & ~late
            order = np.lexsort((in_line, stamps))
        else:
            order = np.argsort(stamps, kind="stable")
        rows, returned, stamps = rows[order], returned[order], stamps[order]
        returns = np.where(returned, stamps >> STAMP_BITS, 0)
        cuts = np.flatnonzero(np.diff(returns)) + 1
        return list(zip(np.split(rows, cuts), returned[[0, *cuts]].tolist(), strict=True))

    def wanted(self, task: TaskCursor, claim: Claim) -> tuple[QueueKey, Order | None]:
        """Which queue a claim takes from, and its order if that is not first ready, first claimed."""
        order, policy = claim.order, self.table.spec.flow
        if order is None and policy is not None and task.name == policy.training_task:
            order = policy.training_order
        return (claim.required, "" if order is None else order.text), order

    def queues(self) -> Iterator[ReadyQueue]:
        """Those of all tasks."""
        for task in self.tasks.values():
            yield from task.queues.values()

    def offer(self, rows: Rows, written: frozenset[str], *, all_new: bool, changed: bool) -> None:
        """These rows were written. Those that are ``all_new`` have exactly the fields that were written;
        ``changed``: not only their fields are different."""
        for task in self.tasks.values():
            if task.waiting and len(rows) > (_MANY_ROWS if self.table.spec.group_size else _VERY_MANY_ROWS):
                self._postpone(task)
            if len(rows) > _VERY_MANY_ROWS and not task.is_waited_for:
                # To sort them in takes long. The next claim builds the queue anew, a slice at a time.
                task.queues = {
                    key: queue
                    for key, queue in task.queues.items()
                    if not isinstance(queue, OrderedRowQueue) or not queue.is_whole
                }
            for key, queue in task.queues.items():
                required = key[0]
                if self._offer_later(task, key, queue, rows):
                    continue
                if all_new and written.issuperset(required):
                    self._offer_ready(task, required, queue, rows)  # new and whole: nothing to look up
                elif changed or not written.isdisjoint(required):
                    self._offer(task, required, queue, rows)

    def _offer_later(self, task: TaskCursor, key: QueueKey, queue: ReadyQueue, rows: Rows) -> bool:
        """Let the next claim take in very many members of groups, a slice at a time, if nobody waits for
        them; whether that is so."""
        if len(rows) <= _MANY_ROWS or task.is_waited_for:
            return False
        if not isinstance(queue, GroupQueue) or not queue.is_whole:
            return False
        queue.move(rows)
        queue.make_of(GroupsInMaking(self, task, key, queue, queue.missing(rows)))
        return True

    def _postpone(self, task: TaskCursor) -> None:
        """Let the claims that wait be answered some slices later, when the queues are whole again."""
        if not task.to_line_up:
            self.lining_up.append(task)
        task.to_line_up = _FEWEST_SLICES + len(self.table.rows) // _ROWS_A_SLICE

    def _offer(self, task: TaskCursor, required: Sequence[str], queue: ReadyQueue, rows: Rows) -> None:
        self._offer_ready(task, required, queue, self.ready(task, required, rows))

    def _offer_ready(self, task: TaskCursor, required: Sequence[str], queue: ReadyQueue, rows: Rows) -> None:
        if not self._fill_unless_whole(task, required, queue, rows) or isinstance(queue, OrderedRowQueue):
            queue.offer(rows)

    def _fill_unless_whole(
        self, task: TaskCursor, required: Sequence[str], queue: ReadyQueue, rows: Rows
    ) -> bool:
        """To a queue that is being built rows come by their stamps, which say where they belong. They may
        have been ready before, and not have come to it yet."""
        if queue.is_whole:
            return False
        if isinstance(queue, GroupQueue):
            if queue.making is not None:
                queue.making.touch(rows)
            return True
        assert isinstance(queue, OrderedRowQueue)
        self._fill_ordered(queue, task, required, rows)
        return True

    # What was claimed

    def finish(self, task: TaskCursor, rows: Rows) -> None:
        """Whoever has claimed these rows is done with them."""
        self.table.about_to_differ(rows)
        task.owner[rows] = NOBODY

    def finish_work(self, rows: Rows, owner: int, written: frozenset[str]) -> None:
        """Whoever writes a field of what it claimed has done its work: the claim is finished. A task that has
        declared what it produces is done when all of that is there."""
        for task in self.tasks.values():
            mine = rows[task.owner[rows] == owner]
            if len(mine):
                task.writes.update(written)
                produces = self.table.spec.produces.get(task.name, ())
                task.owner[mine[self.table.have(mine, produces)]] = NOBODY

    def line_up_again(self, task: TaskCursor, rows: Rows, claim: Claim) -> None:
        """Let what was claimed be claimed again, behind all others, as often as the claim says."""
        table = self.table
        if task.uses is None:
            task.uses = filled(table.size, np.int64, 0)
        uses = task.uses[rows] + 1
        task.uses[rows] = uses
        again = uses < claim.max_uses
        repeats = self._looking.repeats(claim)
        if repeats is not None:
            again &= repeats(rows)
            if table.spec.group_size:
                # A group stays whole: it is used again if all of its members are.
                names, starts = table.groups[rows], starts_of_runs(table.groups[rows])
                runs = zip(names[starts].tolist(), np.logical_and.reduceat(again, starts), strict=True)
                ended = {name for name, goes_on in runs if not goes_on}
                goes_on = [name not in ended for name in names[starts].tolist()]
                again = np.repeat(goes_on, np.diff(starts, append=len(rows)))
        rows = rows[again]
        task.place(rows, table.stamps(len(rows)))
        task.claimed[rows] = False
        task.count -= len(rows)
        # Nobody has to give back what can be claimed anyway.
        task.owner[rows] = NOBODY
        for key, queue in task.queues.items():
            if not self._offer_later(task, key, queue, rows):
                self._offer(task, key[0], queue, rows)

    def begin_return(self, task: TaskCursor, rows: Rows) -> None:
        """Claimed rows are about to come back, one slice after the other, with :meth:`put_back`. Nobody can
        have them before, and who waits for what is left waits for them too."""
        self.table.about_to_differ(rows)
        task.owner[rows], task.is_returning = LEAVING, True
        self._untrain(task, rows)

    def put_back(self, task: TaskCursor, rows: Rows) -> int:
        """Make claimed rows claimable again, ahead of all others; return how many."""
        rows = rows[task.claimed[rows]]
        if not len(rows):
            return 0
        self.table.about_to_differ(rows)
        rows = rows[np.argsort(task.sequence[rows])]
        task.place(rows, -self.table.stamps(len(rows)))
        task.owner[rows] = NOBODY
        task.claimed[rows] = False
        task.count -= len(rows)
        self._untrain(task, rows)
        if self.table.spec.group_size:
            self.count_kept(task, rows)
        for (required, _), queue in task.queues.items():
            if not self._fill_unless_whole(task, required, queue, rows):
                queue.restore(rows[self.table.have(rows, required)])
        return len(rows)

    def _untrain(self, task: TaskCursor, rows: Rows) -> None:
        policy = self.table.spec.flow
        if policy is not None and task.name == policy.training_task:
            self._flow.untrain(rows)

    def count_kept(self, task: TaskCursor, returned: Rows) -> None:
        """How many members the task keeps of the groups of rows that come back: the others finish them. Those
        that came back earlier, and were all that was missing, wait for these."""
        names = list(dict.fromkeys(self.table.groups[returned].tolist()))
        for name, count in zip(names, self._groups.count(names, task.keeps), strict=True):
            # A size of its own may be news to a queue.
            if self._keep_count(task, name, count) or name in self._groups.sizes:
                for queue in task.queues.values():
                    queue.look_again(name, self._groups.of(name))

    def forget_kept(self, task: TaskCursor, finishing: Rows) -> None:
        """The members that were missing from groups are claimed. One that came in the place of a member that
        was cleared is not of these groups, and waits for others."""
        for name in dict.fromkeys(self.table.groups[finishing].tolist()):
            if task.kept.pop(name, 0):
                members = self._groups.of(name)
                for queue in task.queues.values():
                    queue.look_again(name, members)

    def keep(self, task: TaskCursor, name: str, members: Iterable[int]) -> None:
        """Note how many of these members of a group the task has claimed: the others finish it."""
        self._keep_count(task, name, int(np.count_nonzero(task.keeps(np.fromiter(members, np.int64)))))

    def _keep_count(self, task: TaskCursor, name: str, claimed: int) -> bool:
        """Whether that is another number than before."""
        kept, before = claimed % self._groups.size_of(name), task.kept.pop(name, 0)
        if kept:
            task.kept[name] = kept
        return kept != before


def _in_line(stamps: Rows, returned: NDArray[np.bool_]) -> Rows:
    """Numbers in the order of which rows became ready. What came back to the front is before all others, and
    the last that did is first."""
    event = stamps >> STAMP_BITS << STAMP_BITS
    return np.where(returned, stamps - 2 * event, stamps)


def _drop_a_queue(task: TaskCursor) -> None:
    """Forget the queue that nobody has asked for longest; it is built again if somebody does."""
    awaited = {claim.required for claim in task.waiting}
    unused = next((key for key in task.queues if key[0] not in awaited), None)
    if unused is not None:
        del task.queues[unused]
