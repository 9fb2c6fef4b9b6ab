"""One partition of the control state: its samples by row, where their fields are, and each task's cursor.

See :mod:`rlplane.control.state` for the whole. A row is reused after a clear; its serial number is not.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlplane.control.conditions import Conditions, Look, Matches, key_of
from rlplane.control.flow import FlowState
from rlplane.control.groups import GroupQueue
from rlplane.control.ordered import OrderedQueue
from rlplane.control.policies import LENGTH_TAG, Order, tokens_of
from rlplane.control.queues import Match, ReadyQueue, RowQueue
from rlplane.control.requests import NOBODY, Batch, Claim, Put
from rlplane.control.rules import PartitionSpec, compile_where, group_of, own_group_size, why_nothing_matches
from rlplane.control.steps import StepKey, Steps, divided
from rlplane.control.tag_index import TagIndex
from rlplane.errors import (
    ClaimTimeoutError,
    DataPlaneError,
    InvalidRequestError,
    MissingDataError,
    UnknownFieldError,
    UnknownTaskError,
)

__all__ = ["TIMEOUT", "FieldIndex", "Partition", "Pieces", "TaskCursor"]

Rows = NDArray[np.int64]
BlockRows = tuple[NDArray[np.int64], NDArray[np.int32]]

# A field's production is stamped (put number, position in the put): the order of readiness.
_STAMP_BITS = 32
TIMEOUT = "timeout"
"""Why a group was closed, or given up, that had waited too long."""
# Each queue costs a look at every write.
_MOST_QUEUES = 16
# Samples that match a condition are counted up to this many, for a status.
_MOST_COUNTED = 10_000
_NO_ROWS: Rows = np.empty(0, np.int64)
_NO_TAGS: dict[str, Any] = {}  # one for all that have none: tags are replaced, never changed


class FieldIndex:
    """One field: where each row's value is, and when it was first written.

    ``turns`` has the earlier pieces of rows that were written turn by turn; the last one is where that of any
    other row is, as soon as the row is finished.
    """

    __slots__ = ("block", "declared", "position", "produced", "stamp", "stamped", "turns")

    def __init__(self, size: int, declared: bool) -> None:
        self.declared = declared
        self.stamped = False  # whether it was ever written
        self.produced = 0
        self.block = np.full(size, -1, np.int64)
        self.position = np.zeros(size, np.int32)
        self.stamp = np.zeros(size, np.int64)
        self.turns: dict[int, list[tuple[int, int]]] = {}

    def forget_turns(self, rows: Rows) -> BlockRows:
        """Drop the earlier pieces of rows; return where they were."""
        gone = [piece for row in rows.tolist() for piece in self.turns.pop(row, ())]
        return np.array([block for block, _ in gone], np.int64), np.array([at for _, at in gone], np.int32)


class Pieces(NamedTuple):
    """Where the rows of a field are: the block of each piece, its position there, and how many pieces each
    row has, unless that is one each."""

    blocks: NDArray[np.int64]
    positions: NDArray[np.int32]
    per_row: NDArray[np.int32] | None = None


class TaskCursor:
    """One consumer: its cursor, its queues, and the claims that wait."""

    __slots__ = (
        "claimed",
        "claims",
        "count",
        "kept",
        "last",
        "name",
        "owner",
        "queues",
        "sequence",
        "uses",
        "waiting",
        "writes",
    )

    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self.claimed = np.zeros(size, bool)
        self.count = 0
        # Who holds an unfinished claim on a row, and in which order it was made.
        self.owner = np.full(size, NOBODY, np.int64)
        self.sequence = np.zeros(size, np.int64)
        # How often a row was claimed by claims that allow it more than once; None until one does.
        self.uses: NDArray[np.int64] | None = None
        self.claims = 0
        # By required fields and order.
        self.queues: dict[tuple[tuple[str, ...], str], ReadyQueue] = {}
        # Of groups whose other members were put back: how many members this task has already.
        self.kept: dict[str, int] = {}
        self.waiting: list[Claim] = []
        # The claim that was made last, and the fields that were written by whoever had claimed the samples:
        # what the task waits for, and what others wait for.
        self.last: Claim | None = None
        self.writes: set[str] = set()


class Partition:
    """The samples of one data flow, by row. A row is reused after a clear; its serial number is not."""

    def __init__(self, spec: PartitionSpec, version: int = 1) -> None:
        self.spec = spec
        self.version = version
        self.written = 0
        self.nbytes = 0
        self.rows: dict[str, int] = {}
        self.size = 64
        self._free: list[int] = list(range(self.size - 1, -1, -1))
        self.ids = np.empty(self.size, object)
        self.tags = np.empty(self.size, object)
        self.groups = np.empty(self.size, object)
        self.serial = np.full(self.size, -1, np.int64)
        self.born = np.zeros(self.size, np.float64)
        self.next_serial = 0
        self._writers: dict[int, int] = {}
        self._written_bits: list[NDArray[np.uint64]] = []
        self.indexes: dict[str, TagIndex] = {}
        self._conditions = Conditions(self)
        self.flow = FlowState()
        self.steps = Steps()
        self.finished = False  # nobody writes new samples any more
        self.group_sizes: dict[str, int] = {}  # of groups that have a size of their own
        self.group_clocks: dict[str, float | None] = {}  # when the first member of a group was finished
        self._members: dict[str, dict[int, None]] | None = None
        self.columns = {name: FieldIndex(self.size, True) for name in spec.fields}
        self.tasks = {name: TaskCursor(name, self.size) for name in spec.tasks}

    # Registration

    def register(self, spec: PartitionSpec) -> list[tuple[Claim, DataPlaneError]]:
        """Take a new schema; return the parked claims that it makes impossible, each with its error."""
        if spec.group_size != self.spec.group_size:
            if spec.group_size:
                # Refused before anything changes when a live sample belongs to no group.
                groups = [self.groups[row] or group_of(i, self.tags[row]) for i, row in self.rows.items()]
                for row, group in zip(self.rows.values(), groups, strict=True):
                    self.groups[row] = group
            for task in self.tasks.values():
                task.queues.clear()
                task.kept.clear()
        self.spec = spec
        self.version += 1
        self.written = 0
        self.finished = False
        # A field that was ever written stays known; one that was only declared goes with its declaration.
        kept = {
            name: column for name, column in self.columns.items() if name in spec.fields or column.stamped
        }
        for name, column in kept.items():
            column.declared = name in spec.fields
        declared = {name: kept.get(name) or FieldIndex(self.size, True) for name in spec.fields}
        self.columns = declared | kept
        gone: list[tuple[Claim, DataPlaneError]] = []
        for name, task in self.tasks.items():
            for claim in task.waiting:
                if name not in spec.tasks:
                    gone.append((claim, UnknownTaskError(f"task {name!r} was removed by a new registration")))
                elif not self.columns.keys() >= set(claim.fields):
                    text = f"one of the fields {claim.fields} was removed by a new registration"
                    gone.append((claim, UnknownFieldError(text)))
                elif spec.group_size and claim.batch_size % spec.group_size:
                    text = f"batch_size {claim.batch_size} is not a multiple of the new grpo_group_size"
                    gone.append((claim, InvalidRequestError(f"{text} {spec.group_size}")))
            refused = [claim for claim, _ in gone]
            task.waiting = [claim for claim in task.waiting if claim not in refused]
            task.queues = {
                (required, order): queue
                for (required, order), queue in task.queues.items()
                if self.columns.keys() >= set(required)
            }
        self.tasks = {name: self.tasks.get(name) or TaskCursor(name, self.size) for name in spec.tasks}
        return gone

    def task(self, name: str) -> TaskCursor:
        """The task of that name, or ``UnknownTaskError``."""
        try:
            return self.tasks[name]
        except (KeyError, TypeError):
            raise UnknownTaskError(
                f"partition {self.spec.partition_id!r} has no task {name!r}; it has {sorted(self.tasks)}"
            ) from None

    # Writing

    def check_put(self, put: Put) -> int:
        """The number of new samples in a put; raises if it cannot be written. What it finds is good until
        the partition changes."""
        put.known, put.groups = list(map(self.rows.get, put.ids)), ()
        new = put.known.count(None)
        if put.must_exist and new:
            gone = [i for i, row in zip(put.ids, put.known, strict=True) if row is None]
            raise MissingDataError(
                f"partition {self.spec.partition_id!r} does not have {_some(gone)} any more "
                f"({len(gone)} of {len(put.ids)} samples of a write with must_exist); nothing was written"
            )
        if put.appends:
            self._check_unfinished(put)
        if self.spec.group_size and new:
            tags = put.tags or itertools.repeat(None)
            samples = zip(put.ids, put.known, tags, strict=False)
            fresh = [(i, tag) for i, row, tag in samples if row is None]
            groups = [group_of(i, tag) for i, tag in fresh]
            put.groups = groups
            put.sizes = {
                group: size
                for group, (i, tag) in zip(groups, fresh, strict=True)
                if tag and "group_size" in tag and (size := own_group_size(i, tag)) is not None
            }
        return new

    def _check_unfinished(self, put: Put) -> None:
        rows = np.array([row for row in put.known if row is not None], np.int64)
        for name in put.blocks:
            column = self.columns.get(name)
            whole = [] if column is None else self.ids[rows[column.block[rows] >= 0]].tolist()
            if whole:
                raise InvalidRequestError(
                    f"field {name!r} of partition {self.spec.partition_id!r} is finished for {_some(whole)} "
                    f"({len(whole)} of {len(put.ids)} samples of an append), so nothing can be appended; "
                    "nothing was written"
                )

    def last_turns(self, ids: Sequence[str], field: str) -> set[int]:
        """The blocks with the last pieces of samples that are being written turn by turn."""
        turns = self.columns[field].turns if field in self.columns else {}
        return {turns[row][-1][0] for row in map(self.rows.get, ids) if row in turns} if turns else set()

    def write(self, put: Put, stamp: int) -> list[BlockRows]:
        """Write a checked put; return what its rows referred to before."""
        count = len(put.ids)
        if not count:
            return []
        retagged = _NO_ROWS
        if put.tags is not None:
            retagged = np.array([row for row in put.known if row is not None], np.int64)
        if len(retagged):
            for queue in self._queues():
                queue.withdraw(retagged)
        rows, new = self._rows_for(put)
        if len(retagged):
            self._conditions.forget(retagged)
            for queue in self._queues():
                queue.readmit(retagged)
        if put.tags is not None:
            for index in self.indexes.values():
                index.set(rows.tolist(), self.tags[rows].tolist())
        order = (stamp << _STAMP_BITS) + np.arange(count)
        positions = np.arange(count, dtype=np.int32)
        replaced: list[BlockRows] = []
        for name, block in put.blocks.items():
            column = self.columns.get(name)
            if column is None:
                column = self.columns[name] = FieldIndex(self.size, False)
            column.stamped = True
            if not put.finishes:
                for position, row in enumerate(rows.tolist()):
                    column.turns.setdefault(row, []).append((block, position))
                continue
            if column.turns and not put.appends:
                replaced.append(column.forget_turns(rows))
            # The rows of new samples have nothing in any column.
            old = column.block[rows] if new < count else None
            if old is None or (old < 0).all():
                column.stamp[rows] = order
                column.produced += count
            else:
                fresh = old < 0
                column.stamp[rows[fresh]] = order[fresh]
                column.produced += int(fresh.sum())
                replaced.append((old, column.position[rows]))
            column.block[rows] = block
            column.position[rows] = positions
        policy = self.spec.flow
        if policy is not None and policy.group_timeout_s is not None and self.spec.group_size:
            self._start_clocks(rows, put.clock)
        if put.owner != NOBODY:
            self._mark_written(rows, put.owner)
        written = put.blocks.keys() if put.finishes else frozenset()
        if written and put.owner != NOBODY and new < count:
            for task in self.tasks.values():
                # Whoever writes a field of what it claimed has done its work: the claim is finished. A task
                # that has declared what it produces is done when all of that is there.
                mine = rows[task.owner[rows] == put.owner]
                if len(mine):
                    task.writes.update(written)
                for name in self.spec.produces.get(task.name, ()):
                    mine = mine[self.columns[name].block[mine] >= 0]
                task.owner[mine] = NOBODY
        for task in self.tasks.values():
            for (required, _), queue in task.queues.items():
                if new == count and written >= set(required):
                    queue.offer(rows)  # new and whole: there is nothing to look up
                elif new or put.tags is not None or not written.isdisjoint(required):
                    self._offer(task, required, queue, rows)
        return replaced

    def adopt(
        self,
        ids: list[str],
        tags: list[dict[str, Any]],
        groups: list[str | None],
        born: NDArray[np.float64],
    ) -> Rows:
        """Make the samples of a checkpoint, without fields; return their rows."""
        put = Put(self.spec.partition_id, ids, {}, tags)
        if groups:
            put.known, put.groups = [None] * len(ids), groups
        else:
            self.check_put(put)
        rows, _ = self._rows_for(put) if ids else (_NO_ROWS, 0)
        self.born[rows] = born
        return rows

    # Who wrote what: a bit per writer and row, because a sample can have several writers.

    def _mark_written(self, rows: Rows, owner: int) -> None:
        slot = self._writers.get(owner)
        if slot is None:
            taken = set(self._writers.values())
            slot = next(slot for slot in range(len(taken) + 1) if slot not in taken)
            self._writers[owner] = slot
            while len(self._written_bits) <= slot // 64:
                self._written_bits.append(np.zeros(self.size, np.uint64))
        self._written_bits[slot // 64][rows] |= np.uint64(1 << slot % 64)

    def written_by(self, owner: int) -> Rows | None:
        """The live rows that an owner wrote to, by birth; None if it never wrote here."""
        slot = self._writers.get(owner)
        if slot is None:
            return None
        rows = self.live_rows(None)
        mine: Rows = rows[(self._written_bits[slot // 64][rows] >> np.uint64(slot % 64) & np.uint64(1)) != 0]
        return mine

    def forget_writer(self, owner: int) -> None:
        """Free the slot of an owner that is gone."""
        slot = self._writers.pop(owner, None)
        if slot is not None:
            self._written_bits[slot // 64] &= ~np.uint64(1 << slot % 64)

    def _rows_for(self, put: Put) -> tuple[Rows, int]:
        """The rows of a checked put's samples, made where they are new, with their tags merged."""
        ids, tags, known = put.ids, put.tags, put.known
        new = known.count(None)
        if new == 0:
            rows = np.array(known, np.int64)
            if tags is not None:
                for row, tag in zip(known, tags, strict=True):
                    if tag:
                        self.tags[row] = self.tags[row] | tag
            return rows, 0
        numbers = self._allocate(new)
        rows = fresh = np.array(numbers, np.int64)
        new_ids, new_tags = ids, tags
        if new < len(ids):
            places = [place for place, row in enumerate(known) if row is None]
            new_ids = [ids[place] for place in places]
            rows = np.array([-1 if row is None else row for row in known], np.int64)
            rows[places] = fresh
            if tags is not None:
                new_tags = [tags[place] for place in places]
                for row, tag in zip(known, tags, strict=True):
                    if row is not None and tag:
                        self.tags[row] = self.tags[row] | tag
        self.rows.update(zip(new_ids, numbers, strict=True))
        self.ids[fresh] = new_ids
        self.tags[fresh] = _NO_TAGS if new_tags is None else _object_array(new_tags)
        if put.groups:
            self.groups[fresh] = put.groups
            if put.sizes:
                for name, size in put.sizes.items():
                    self.group_sizes.setdefault(name, size)
        if self._members is not None:
            for row in numbers:
                self._members.setdefault(self.groups[row], {})[row] = None
        self.serial[fresh] = np.arange(self.next_serial, self.next_serial + new)
        self.next_serial += new
        self.born[fresh] = put.now
        self.written += new
        return rows, new

    def _allocate(self, count: int) -> list[int]:
        if len(self._free) < count:
            self._grow(self.size - len(self._free) + count)
        rows = self._free[: -count - 1 : -1]
        del self._free[-count:]
        return rows

    def _grow(self, needed: int) -> None:
        old, size = self.size, max(needed, 2 * self.size)
        self._free[:0] = range(size - 1, old - 1, -1)
        self.size = size
        self.ids, self.tags, self.groups = (_grown(a, size, None) for a in (self.ids, self.tags, self.groups))
        self.serial, self.born = _grown(self.serial, size, -1), _grown(self.born, size, 0)
        self._written_bits = [_grown(bits, size, 0) for bits in self._written_bits]
        for column in self.columns.values():
            column.block = _grown(column.block, size, -1)
            column.position = _grown(column.position, size, 0)
            column.stamp = _grown(column.stamp, size, 0)
        for task in self.tasks.values():
            task.claimed = _grown(task.claimed, size, False)
            task.owner = _grown(task.owner, size, NOBODY)
            task.sequence = _grown(task.sequence, size, 0)
            if task.uses is not None:
                task.uses = _grown(task.uses, size, 0)
            for queue in task.queues.values():
                queue.grow(size)

    # Readiness and claims

    def queue(self, task: TaskCursor, claim: Claim) -> ReadyQueue:
        """The queue of what is ready for a claim of this task, built when first asked for."""
        required, order = self._wanted(task, claim)
        key = (required, "" if order is None else order.text)
        queue = task.queues.pop(key, None)
        if queue is not None:
            task.queues[key] = queue  # the last one that was asked for
        else:
            if len(task.queues) >= _MOST_QUEUES:
                self._drop_a_queue(task)
            size = self.spec.group_size
            if order is not None:
                queue = OrderedQueue(self, size, order, self.group_sizes, task.kept)
            elif size:
                queue = GroupQueue(self, size, self.group_sizes, task.kept)
            else:
                queue = RowQueue(self)
            task.queues[key] = queue
            rows = self.live_rows(None)
            if len(rows):
                stamps = [self.columns[name].stamp[rows] for name in required] or [self.serial[rows]]
                rows = rows[np.argsort(np.maximum.reduce(stamps), kind="stable")]
                self._offer(task, required, queue, rows)
        return queue

    def _wanted(self, task: TaskCursor, claim: Claim) -> tuple[tuple[str, ...], Order | None]:
        """Which queue a claim takes from."""
        order, policy = claim.order, self.spec.flow
        if order is None and policy is not None and task.name == policy.training_task:
            order = policy.training_order
        return tuple(sorted(set(claim.fields))), order

    def _queues(self) -> Iterator[ReadyQueue]:
        for task in self.tasks.values():
            yield from task.queues.values()

    @staticmethod
    def _drop_a_queue(task: TaskCursor) -> None:
        """Forget the queue that nobody has asked for longest; it is built again if somebody does."""
        awaited = {tuple(sorted(set(claim.fields))) for claim in task.waiting}
        unused = next((key for key in task.queues if key[0] not in awaited), None)
        if unused is not None:
            del task.queues[unused]

    def _offer(self, task: TaskCursor, required: Sequence[str], queue: ReadyQueue, rows: Rows) -> None:
        ready = ~task.claimed[rows]
        for name in required:
            ready &= self.columns[name].block[rows] >= 0
        queue.offer(rows[ready])

    def claim(self, task: TaskCursor, queue: ReadyQueue, claim: Claim, count: int) -> Batch:
        """Hand up to ``count`` ready samples to the task."""
        rows = queue.pop(count, self._match_of(task, claim))
        if len(rows):
            if self.spec.flow is not None:
                self._note_claim(task, rows.tolist())
            if task.kept:
                for name in self.groups[rows].tolist():
                    task.kept.pop(name, None)
            # What the ranks of a step share belongs to none of them: one that dies gets its part again.
            self.take_rows(task, rows, claim.owner if claim.step is None else NOBODY, popped_from=queue)
            if claim.max_uses > 1:
                self._line_up_again(task, rows, claim)
        return Batch(self.ids[rows].tolist(), self.tags[rows].tolist())

    def _line_up_again(self, task: TaskCursor, rows: Rows, claim: Claim) -> None:
        """Let what was claimed be claimed again, behind all others, as often as the claim says."""
        if task.uses is None:
            task.uses = np.zeros(self.size, np.int64)
        task.uses[rows] += 1
        again = task.uses[rows] < claim.max_uses
        if claim.repeats is not None:
            again &= np.fromiter(map(claim.repeats, self.tags[rows].tolist()), bool, len(rows))
            if self.spec.group_size:
                # A group stays whole: it is used again if all of its members are.
                groups = self.groups[rows].tolist()
                ended = {name for name, goes_on in zip(groups, again, strict=True) if not goes_on}
                again = np.array([name not in ended for name in groups], bool)
        rows = rows[again]
        task.claimed[rows] = False
        task.count -= len(rows)
        # Nobody has to give back what can be claimed anyway.
        task.owner[rows] = NOBODY
        for (required, _), queue in task.queues.items():
            self._offer(task, required, queue, rows)

    @staticmethod
    def take_rows(task: TaskCursor, rows: Rows, owner: int, popped_from: ReadyQueue | None = None) -> None:
        """Move the task's cursor past these rows, which are no longer in the queue they were popped from."""
        for queue in task.queues.values():
            if queue is not popped_from:
                queue.discard(rows)
        task.claimed[rows] = True
        task.count += len(rows)
        task.owner[rows] = owner
        task.sequence[rows] = task.claims + np.arange(len(rows))
        task.claims += len(rows)

    def is_limited(self, task: TaskCursor, claim: Claim) -> bool:
        """Whether a claim has other limits than its batch size, so that ``fit`` has to look."""
        return claim.max_tokens is not None or bool(self.group_sizes) or self._gate(task) is not None

    def fit(self, task: TaskCursor, queue: ReadyQueue, claim: Claim) -> tuple[int, bool]:
        """How many of the next samples fit into the claim's limits, and whether one is used up."""
        count = tokens = 0
        gate = self._gate(task)
        for rows in queue.units(self._match_of(task, claim)):
            room = queue.room_of(rows)
            if count + room > claim.batch_size:
                if not count:
                    raise InvalidRequestError(
                        f"the group of sample {self.ids[rows[0]]!r} has {len(rows)} members, and a claim of "
                        f"task {claim.task!r} takes batch_size={claim.batch_size}"
                    )
                return count, True
            if gate is not None and rows[0] not in self.flow.tickets:
                if gate <= 0:
                    return count, count > 0  # with nothing admitted yet, it waits
                gate -= 1
            if claim.max_tokens is not None:
                try:
                    tokens += self._tokens(rows, claim.max_tokens)
                except InvalidRequestError:
                    if count:
                        return count, True  # it is an error when it comes first
                    raise
                if tokens > claim.max_tokens:
                    return count, True
            count += room
        return count, count == claim.batch_size

    def _tokens(self, rows: list[int], most: int) -> int:
        ids = self.ids[rows].tolist()
        tokens = sum(map(tokens_of, ids, self.tags[rows].tolist()))
        if tokens > most:
            what = f"the group of sample {ids[0]!r}" if self.spec.group_size else f"sample {ids[0]!r}"
            raise InvalidRequestError(f"{what} has {tokens} tokens, and a claim takes max_tokens={most}")
        return tokens

    def answer_claims(self, task: TaskCursor) -> list[tuple[object, Batch | DataPlaneError]]:
        """Answer the waiting claims that can be answered, first come, first served.

        A claim that cannot be answered yet holds back the later ones that want the same: those
        of the same fields, or, if it has conditions, those with the same conditions.
        """
        answers: list[tuple[object, Batch | DataPlaneError]] = []
        held: list[tuple[ReadyQueue, Mapping[str, Any] | None]] = []
        left = []
        for claim in task.waiting:
            queue = self.queue(task, claim)
            if claim.step is not None:
                part = self.part_of(task, claim)
                if part is not None:
                    answers.append((claim.token, part))
                    continue
            behind = any(q is queue and (where is None or where == claim.where) for q, where in held)
            try:
                count = 0 if behind else self._grantable(task, queue, claim)
            except InvalidRequestError as error:
                answers.append((claim.token, error))
                continue
            if count and claim.step is not None:
                answers.append((claim.token, self.divide(task, queue, claim, count)))
            elif count:
                answers.append((claim.token, self.claim(task, queue, claim, count)))
            elif not behind and self._is_over(task, claim):
                if claim.step is not None:
                    self.steps.add(StepKey(task.name, claim.step), [[] for _ in range(claim.dp_world)])
                answers.append((claim.token, Batch([], [])))
            else:
                left.append(claim)
                if not behind:
                    held.append((queue, claim.where))
        has_more = any(claim.max_uses > 1 for claim in task.waiting) and len(left) < len(task.waiting)
        task.waiting = left
        for queue in task.queues.values():
            queue.keep_counts(left)
        # What has lined up again may be what an earlier claim waits for.
        return answers + self.answer_claims(task) if has_more else answers

    def _grantable(self, task: TaskCursor, queue: ReadyQueue, claim: Claim) -> int:
        """How many samples a waiting claim may have now: a full batch, the tail, or 0."""
        simple = claim.condition is None and claim.max_tokens is None and not self.group_sizes
        if simple and self.spec.flow is None:
            match = None
            ready = queue.count(claim.batch_size, None, claim)
            if ready >= claim.batch_size:
                return claim.batch_size
        elif not self.is_limited(task, claim):
            match = self._match_of(task, claim)
            # What is of the step changes with the step: it is not remembered.
            ready = queue.count(claim.batch_size, match, claim if self._step_of(task) is None else None)
            if ready >= claim.batch_size:
                return claim.batch_size
        else:
            match = self._match_of(task, claim)
            ready, is_full = self.fit(task, queue, claim)
            if is_full:
                return ready
        if self.spec.flow is not None and self._step_of(task) is not None:
            return ready if ready and self._is_rest_of_step(task, ready, match) else 0
        if not ready or not (self.written == self.spec.num_samples or self._has_ended(claim)):
            return 0
        if ready != self._remaining(task, match):
            return 0
        if claim.step is not None:
            # What cannot be divided is left over.
            ready -= ready % (claim.dp_world * (self.spec.group_size or 1))
        return ready

    def _has_ended(self, claim: Claim) -> bool:
        """Whether nothing new is expected. Ranks must agree on the end, so they also stop at a flow that went
        past ``num_samples``."""
        return self.finished or (claim.step is not None and 0 < self.spec.num_samples <= self.written)

    def _is_over(self, task: TaskCursor, claim: Claim) -> bool:
        """Whether a claim would wait for ever: nothing is left for it, and nothing is to come."""
        if not self._has_ended(claim):
            return False
        # Whatever step it is of.
        left = self._remaining(task, self._matches(claim))
        return left < (claim.dp_world * (self.spec.group_size or 1) if claim.step is not None else 1)

    def part_of(self, task: TaskCursor, claim: Claim) -> Batch | DataPlaneError | None:
        """What a rank has of a step that was divided already."""
        assert claim.step is not None
        key = StepKey(task.name, claim.step)
        step = self.steps.get(key)
        if step is None:
            if self.steps.is_finished(key):
                return InvalidRequestError(f"step {claim.step!r} is over: its samples have been cleared")
            return None
        if len(step.parts) != claim.dp_world:
            text = f"step {claim.step!r} was divided over {len(step.parts)} ranks, not {claim.dp_world}"
            return InvalidRequestError(text)
        ids = step.parts[claim.dp_rank]
        rows = [self.rows.get(sample_id) for sample_id in ids]
        return Batch(list(ids), [{} if row is None else self.tags[row] for row in rows])

    def divide(self, task: TaskCursor, queue: ReadyQueue, claim: Claim, count: int) -> Batch | DataPlaneError:
        """Claim a batch for all ranks of a step; return the part of the one that asks."""
        assert claim.step is not None
        batch = self.claim(task, queue, claim, count)
        units: dict[Any, list[int]] = {}
        for place, sample_id in enumerate(batch.ids):
            name = self.groups[self.rows[sample_id]] if self.spec.group_size else sample_id
            units.setdefault(name, []).append(place)
        places = list(units.values())
        over = places[len(places) - len(places) % claim.dp_world :]
        if over:
            ids = [batch.ids[place] for unit in over for place in unit]
            self.return_rows(task, self.live_rows(ids))
            places = places[: -len(over)]
        if not places:
            return InvalidRequestError(
                f"step {claim.step!r}: within max_tokens={claim.max_tokens} there is not one for each of "
                f"{claim.dp_world} ranks"
            )
        lengths = [sum(self._length(batch.tags[place]) for place in unit) for unit in places]
        parts = [
            [batch.ids[place] for unit in part for place in places[unit]]
            for part in divided(lengths, claim.dp_world)
        ]
        self.steps.add(StepKey(task.name, claim.step), parts)
        part = self.part_of(task, claim)
        assert part is not None
        return part

    @staticmethod
    def _length(tags: Mapping[str, Any]) -> int:
        length = tags.get(LENGTH_TAG)
        return length if type(length) is int else 1

    def _remaining(self, task: TaskCursor, match: Match | None) -> int:
        """How many samples this claim could still get, ready or not, if nothing new is written."""
        if match is None and not self.spec.group_size:
            return len(self.rows) - task.count
        unclaimed = self.live_rows(None)
        unclaimed = unclaimed[~task.claimed[unclaimed]]
        rows = unclaimed if match is None else unclaimed[match(unclaimed)]
        if not self.spec.group_size:
            return len(rows)
        # A group that lacks members cannot become whole any more.
        size, room = self.spec.group_size, 0
        for name, count in Counter(self.groups[rows].tolist()).items():
            needed = self.group_sizes.get(name, size) - task.kept.get(name, 0)
            room += count // size * size if needed == size else max(needed, size) * (count >= needed)
        return room

    def timeout_error(self, task: TaskCursor, claim: Claim) -> ClaimTimeoutError:
        """What a claim is told that has waited in vain."""
        queue = self.queue(task, claim)
        ready = queue.count(claim.batch_size, self._match_of(task, claim), None)
        text = (
            f"task {task.name!r} waited for {claim.batch_size} samples of partition "
            f"{self.spec.partition_id!r} with fields {claim.fields}; {ready} were ready"
        )
        if claim.where:
            text += f" that match where={claim.where!r}, of {queue.ready} without it"
        text += f" ({len(self.rows)} live, {task.count} claimed already)"
        if claim.where and not ready:
            some = self.live_rows(None)[:_MOST_COUNTED]
            reason = why_nothing_matches(claim.where, self.tags[some].tolist())
            text += f"; {reason}" if reason else ""
        return ClaimTimeoutError(text, ready)

    def _readiness(self, task: TaskCursor) -> dict[str, Any]:
        """How many samples satisfy the claim that waits first, or that was made last, and what it asks
        for."""
        claim = next(iter(task.waiting), task.last)
        if claim is None or not self.columns.keys() >= set(claim.fields):
            return {"ready": None, "wanted": None, "fields": [], "where": None}
        queue, match = self.queue(task, claim), self._match_of(task, claim)
        ready = queue.ready if match is None else queue.count(_MOST_COUNTED, match, (claim, "status"))
        return {"ready": ready, "wanted": claim.batch_size, "fields": claim.fields, "where": claim.where}

    def return_claims(self, task: TaskCursor, owner: int) -> int:
        """Put the unfinished claims of an owner back to the front of the queues."""
        return self.return_rows(task, np.flatnonzero(task.owner == owner))

    def return_rows(self, task: TaskCursor, rows: Rows) -> int:
        """Make claimed rows claimable again, ahead of all others."""
        rows = rows[task.claimed[rows]]
        if not len(rows):
            return 0
        rows = rows[np.argsort(task.sequence[rows])]
        task.owner[rows] = NOBODY
        task.claimed[rows] = False
        task.count -= len(rows)
        if self.spec.flow is not None and task.name == self.spec.flow.training_task:
            self.flow.untrain(rows.tolist())
        if self.spec.group_size:
            self.count_kept(task, rows)
        for (required, _), queue in task.queues.items():
            ready = np.ones(len(rows), bool)
            for name in required:
                ready &= self.columns[name].block[rows] >= 0
            queue.restore(rows[ready])
        return len(rows)

    def count_kept(self, task: TaskCursor, returned: Rows) -> None:
        """How many members the task keeps of the groups of rows that come back: the others finish them."""
        for name in dict.fromkeys(self.groups[returned].tolist()):
            size = self.group_sizes.get(name, self.spec.group_size or 1)
            kept = sum(bool(task.claimed[row]) for row in self.members(name)) % size
            if kept:
                task.kept[name] = kept
            else:
                task.kept.pop(name, None)

    def _match_of(self, task: TaskCursor, claim: Claim) -> Match | None:
        """Which rows a claim may have; None: any."""
        matches, policy = self._matches(claim), self.spec.flow
        step = None if policy is None else self._step_of(task)
        if step is None or policy is None:
            return matches
        tickets, batch = self.flow.tickets, policy.batch

        def of_step(rows: Rows) -> NDArray[np.bool_]:
            numbers = (tickets.get(row, -1) // batch == step for row in rows.tolist())
            chosen = np.fromiter(numbers, bool, len(rows))
            return chosen if matches is None else chosen & matches(rows)

        return of_step

    def _matches(self, claim: Claim) -> Matches | None:
        """Which rows satisfy a claim's condition, as far as it is known from earlier claims."""
        if claim.condition is None:
            return None
        return self._conditions.get(claim.condition_key, claim.condition)

    def look_for_claim(self, task: TaskCursor, claim: Claim) -> Iterator[Look]:
        """A look at the tags that a claim will ask about."""
        matches = self._matches(claim)
        if matches is None:
            return
        required, order = self._wanted(task, claim)
        # A queue that is not there yet is left to the claim: a look changes nothing.
        queue = task.queues.get((required, "" if order is None else order.text))
        rows, together = (self.live_rows(None), 1) if queue is None else queue.candidates()

        def see(rows: Rows) -> int:
            found = matches(rows)
            if together > 1:
                if len(found) % together or not len(found):
                    return 0  # of some group a member is gone; no matter, this says only when to stop
                found = np.logical_and.reduceat(found, np.arange(0, len(found), together))
            return int(np.count_nonzero(found)) * together

        yield Look(self, rows, see, claim.batch_size, together)

    # The flow policy

    def _gate(self, task: TaskCursor) -> int | None:
        """How many prompts may be admitted now; None where the policy does not hold this task back."""
        policy = self.spec.flow
        if policy is None or not policy.is_gated or task.name != policy.admitting_task:
            return None
        return policy.admissible(self.flow.version) - self.flow.admitted

    def _step_of(self, task: TaskCursor) -> int | None:
        """The step that the task trains now, where the policy keeps steps apart."""
        policy = self.spec.flow
        if policy is None or policy.kind != "in_order" or task.name != policy.training_task:
            return None
        return self.flow.current_step(policy.batch)

    def _is_rest_of_step(self, task: TaskCursor, ready: int, match: Match | None) -> bool:
        """Whether what is ready is all that is left of the step."""
        policy, step = self.spec.flow, self._step_of(task)
        if policy is None or step is None:
            return False
        if not self.flow.is_issued(step, policy.batch):
            # Its missing prompts may never come.
            admitting = self.tasks[policy.admitting_task]
            may_come = not self.finished and self.written != self.spec.num_samples
            if may_come or admitting.count < len(self.rows):
                return False
        return ready == self._remaining(task, match)

    def _note_claim(self, task: TaskCursor, rows: list[int]) -> None:
        policy = self.spec.flow
        assert policy is not None
        if task.name == policy.admitting_task:
            if policy.is_gated:
                prompts: dict[Any, list[int]] = {}
                for row in rows:
                    prompts.setdefault(self.groups[row] if self.spec.group_size else row, []).append(row)
                self.flow.admit(list(prompts.values()))
            else:
                self.flow.begun.update(dict.fromkeys(rows, self.flow.version))
        if task.name == policy.training_task:
            self.flow.train(rows)

    def stale(self, rows: Sequence[int] | None = None) -> Rows:
        """Of these rows (of all, for None) those that are too old to be trained, with the rest of their
        groups. What is being trained stays."""
        policy = self.spec.flow
        oldest = None if policy is None else policy.oldest(self.flow.version)
        if policy is None or oldest is None:
            return _NO_ROWS
        claimed = self.tasks[policy.training_task].claimed
        if rows is None:
            rows = list(self.tag_index(policy.version_tag).candidates({"<": oldest}))
        found: dict[int, None] = {}
        for row in rows:
            version = policy.version_of(self.tags[row])
            if version is not None and version < oldest and not claimed[row]:
                found[row] = None
                if self.spec.group_size:
                    found.update(dict.fromkeys(r for r in self.members(self.groups[row]) if not claimed[r]))
        return np.array(list(found), np.int64)

    def should_abort(self, ids: Sequence[str]) -> list[str]:
        """Those whose generation is in vain: they are gone, or would be too old when they are done."""
        policy = self.spec.flow
        oldest = None if policy is None else policy.oldest(self.flow.version)
        vain = []
        for sample_id in ids:
            row = self.rows.get(sample_id)
            if row is None:
                vain.append(sample_id)
            elif policy is not None and oldest is not None:
                version = policy.version_of(self.tags[row])
                version = self.flow.begun.get(row) if version is None else version
                if version is not None and version < oldest:
                    vain.append(sample_id)
        return vain

    def members(self, name: str) -> dict[int, None]:
        """The rows of a group. Known from the first time that any group is asked for."""
        if self._members is None:
            self._members = {}
            for row in self.rows.values():
                self._members.setdefault(self.groups[row], {})[row] = None
        return self._members.get(name, {})

    # Groups that end short

    def close_group(self, name: str, reason: str, fields: Sequence[str]) -> Rows:
        """Make the finished members of a group the whole of it; return the rows of the others."""
        members = list(self.members(name))
        for field in fields:
            if field not in self.columns:
                raise UnknownFieldError(f"partition {self.spec.partition_id!r} has no field {field!r}")
        finished = self._finished(members, fields)
        expected = self.group_sizes.get(name, self.spec.group_size or 1)
        if finished and len(finished) < expected:
            self.group_sizes[name] = len(finished)
            self.flow.closed_short[reason] += 1
            short = {"expected": expected, "members": len(finished), "reason": reason}
            for row in finished:
                self.tags[row] = {**self.tags[row], "short_group": short}
            self._conditions.forget(np.array(finished, np.int64))
            for index in self.indexes.values():
                index.set(finished, self.tags[finished].tolist())
        for task in self.tasks.values():
            task.kept.pop(name, None)
            for queue in task.queues.values():
                queue.look_again(name)
        return np.array([row for row in members if row not in set(finished)], np.int64)

    def _finished(self, members: list[int], fields: Sequence[str]) -> list[int]:
        """The members that have ``fields``, or without any, all fields that one of them has."""
        rows = np.array(members, np.int64)
        columns = [self.columns[name] for name in fields] or list(self.columns.values())
        has = np.ones(len(rows), bool)
        for column in columns:
            written = column.block[rows] >= 0
            if fields or written.any():
                has &= written
        found: list[int] = rows[has].tolist()
        return found

    def _start_clocks(self, rows: Rows, clock: float) -> None:
        assert self.spec.flow is not None
        for row in self._finished(rows.tolist(), self._finished_fields()):
            self.group_clocks.setdefault(self.groups[row], clock)

    def _finished_fields(self) -> list[str]:
        """What a member must have to be finished; a field that nobody knows yet is one that nobody has."""
        policy = self.spec.flow
        names = [] if policy is None else policy.finished_fields
        return names if all(name in self.columns for name in names) else []

    def resume_clocks(self) -> None:
        """After a load: the groups that wait begin to wait anew, at the first look at the clock."""
        policy = self.spec.flow
        if policy is not None and policy.group_timeout_s is not None and self.spec.group_size:
            for row in self._finished(list(self.rows.values()), self._finished_fields()):
                self.group_clocks.setdefault(self.groups[row], None)

    def next_deadline(self) -> float:
        """When a group has waited long enough, by the clock of the puts."""
        policy = self.spec.flow
        if not self.group_clocks or policy is None or policy.group_timeout_s is None:
            return math.inf
        # Clocks are started one after the other, so the first is the first to end.
        began = next(iter(self.group_clocks.values()))
        return -math.inf if began is None else began + policy.group_timeout_s

    def overdue(self, clock: float) -> Rows:
        """Close or give up the groups that have waited long enough; return the rows that are given up."""
        policy = self.spec.flow
        if policy is None or policy.group_timeout_s is None:
            return _NO_ROWS
        gone: list[Rows] = []
        for name, began in list(self.group_clocks.items()):
            if began is None:
                self.group_clocks[name] = clock
            elif began + policy.group_timeout_s <= clock:
                del self.group_clocks[name]
                members = list(self.members(name))
                finished = self._finished(members, self._finished_fields())
                size = self.group_sizes.get(name, self.spec.group_size or 1)
                if not members or len(finished) >= size:
                    continue  # it was whole in time
                if len(finished) >= policy.min_group_size:
                    gone.append(self.close_group(name, TIMEOUT, policy.finished_fields))
                else:
                    gone.append(np.array(members, np.int64))
            else:
                break
        return np.concatenate(gone) if gone else _NO_ROWS

    def flow_status(self) -> dict[str, Any]:
        """What the policy has done so far."""
        policy, flow = self.spec.flow, self.flow
        waiting = 0
        if policy is not None and policy.is_gated:
            admitting = self.tasks[policy.admitting_task]
            waiting = self._readiness(admitting)["ready"] or 0
            room = max(policy.admissible(flow.version) - flow.admitted, 0)
            waiting = max(waiting - room * (self.spec.group_size or 1), 0)
        return {
            "policy": None if policy is None else policy.kind,
            "version": flow.version,
            "max_staleness": None if policy is None or policy.kind == "unbounded" else policy.max_staleness,
            "admitted": flow.admitted,
            "waiting_for_admission": waiting,
            "evicted": dict(flow.evicted),
            "closed_short": dict(flow.closed_short),
        }

    # Looking

    def matching(self, where: Mapping[str, Any]) -> Rows:
        """The live rows that match, in no order. A tag that is asked for a value is indexed from then on."""
        rows, matches = self._candidates(where)
        matching: Rows = rows[matches(rows)]
        return matching

    def look_for(self, where: Mapping[str, Any]) -> Iterator[Look]:
        """Looks at the tags that :meth:`matching` will ask about, one after the other."""
        tag = _tag_with_value(where)
        if tag is not None and not (index := self.indexes.setdefault(tag, TagIndex(tag))).is_whole:
            yield Look(self, self.live_rows(None), lambda rows: self._add_to(index, rows), math.inf)
            index.is_whole = True
        rows, matches = self._candidates(where)
        yield Look(self, rows, lambda rows: int(matches(rows).sum()), math.inf)

    def _candidates(self, where: Mapping[str, Any]) -> tuple[Rows, Matches]:
        condition, tag = compile_where(where), _tag_with_value(where)
        assert condition is not None
        if tag is None:
            rows = self.live_rows(None)
        else:
            rows = np.fromiter(self.tag_index(tag).candidates(where[tag]), np.int64)
        return rows, self._conditions.get(key_of(where), condition)

    def _add_to(self, index: TagIndex, rows: Rows) -> int:
        index.set(rows.tolist(), self.tags[rows].tolist())
        return len(rows)

    def tag_index(self, tag: str) -> TagIndex:
        """The index of a tag, made when it is first asked for."""
        index = self.indexes.setdefault(tag, TagIndex(tag))
        if not index.is_whole:
            self._add_to(index, self.live_rows(None))
            index.is_whole = True
        return index

    def peek(
        self, where: Mapping[str, Any] | None, fields: Sequence[str], limit: int | None, order: Order
    ) -> Batch:
        """Ids and tags of what is there and matches, in order."""
        rows = self.matching(where) if where else self.live_rows(None)
        for name in fields:
            if name not in self.columns:
                raise UnknownFieldError(
                    f"partition {self.spec.partition_id!r} has no field {name!r}; "
                    f"it has {sorted(self.columns)}"
                )
            rows = rows[self.columns[name].block[rows] >= 0]
        if order.kind in ("fifo", "lifo"):
            serials = self.serial[rows]
            rows = rows[np.argsort(serials if order.kind == "fifo" else -serials)][:limit]
        else:
            keys = {
                row: (order.key([self.ids[row]], [self.tags[row]]), self.serial[row]) for row in rows.tolist()
            }
            rows = np.array(heapq.nsmallest(len(keys) if limit is None else limit, keys, keys.__getitem__))
            rows = rows.astype(np.int64)
        return Batch(self.ids[rows].tolist(), self.tags[rows].tolist())

    def inspect(self, rows: Rows) -> dict[str, Any]:
        """What is known of samples: a byte per sample says whether it has a field, and whether a task has
        claimed it."""
        return {
            "ids": self.ids[rows].tolist(),
            "numbers": self.serial[rows].tolist(),
            "tags": self.tags[rows].tolist(),
            "fields": {name: (column.block[rows] >= 0).tobytes() for name, column in self.columns.items()},
            "tasks": {name: task.claimed[rows].tobytes() for name, task in self.tasks.items()},
        }

    # Reading and removing

    def live_rows(self, ids: Sequence[str] | None) -> Rows:
        """The rows of those ids that are there, in the order asked (in order of birth for None)."""
        if ids is None:
            return np.fromiter(self.rows.values(), np.int64, len(self.rows))
        found = [row for row in map(self.rows.get, dict.fromkeys(ids)) if row is not None]
        return np.array(found, np.int64)

    def rows_numbered(self, numbers: Sequence[int]) -> Rows:
        """The rows of the samples that have these serial numbers and are there, in the order asked."""
        rows = self.live_rows(None)
        wanted = np.array([number for number in numbers if 0 <= number < self.next_serial], np.int64)
        serials = np.append(self.serial[rows], self.next_serial)  # they ascend with birth
        places = np.searchsorted(serials, wanted)
        found: Rows = rows[places[serials[places] == wanted]]
        return found

    def locate(self, ids: Sequence[str], fields: Sequence[str]) -> dict[str, Pieces]:
        """Where each field of the samples is."""
        known = list(map(self.rows.get, ids))
        if None in known:
            missing = list(dict.fromkeys(i for i, row in zip(ids, known, strict=True) if row is None))
            raise MissingDataError(
                f"partition {self.spec.partition_id!r} does not have {_some(missing)} "
                f"({len(missing)} of {len(set(ids))} samples asked for)"
            )
        rows = np.array(known, np.int64)
        places = {}
        for name in fields:
            column = self.columns.get(self.field_of(name))
            if column is None:
                raise UnknownFieldError(
                    f"partition {self.spec.partition_id!r} has no field {name!r}; "
                    f"it has {sorted(self.columns)}"
                )
            blocks = column.block[rows]
            unwritten = blocks < 0
            if column.turns and not column.turns.keys().isdisjoint(known):
                places[name] = _pieces(column, rows)
                unwritten &= ~np.isin(rows, list(column.turns))
            else:
                places[name] = Pieces(blocks, column.position[rows])
            if np.count_nonzero(unwritten):
                missing = list(dict.fromkeys(self.ids[rows[unwritten]].tolist()))
                raise MissingDataError(
                    f"field {name!r} of partition {self.spec.partition_id!r} is not written for "
                    f"{_some(missing)} ({len(missing)} of {len(set(ids))} samples asked for)"
                )
        return places

    def field_of(self, name: str) -> str:
        """The field that ``name`` is, or is a leaf of: ``mm`` for ``mm.pixel_values``."""
        field = name
        while field not in self.columns and "." in field:
            field = field.rpartition(".")[0]
        return field if field in self.columns else name

    def remove(self, rows: Rows) -> BlockRows:
        """Drop rows; return what they referred to, for each field."""
        released, positions = [], []
        for column in self.columns.values():
            blocks = column.block[rows]
            column.produced -= int(np.count_nonzero(blocks >= 0))
            column.block[rows] = -1
            released.append(blocks)
            positions.append(column.position[rows])
            if column.turns:
                turns = column.forget_turns(rows)
                released.append(turns[0])
                positions.append(turns[1])
        for task in self.tasks.values():
            task.count -= int(np.count_nonzero(task.claimed[rows]))
            for queue in task.queues.values():
                queue.discard(rows)
            task.claimed[rows] = False
            task.owner[rows] = NOBODY
            if task.uses is not None:
                task.uses[rows] = 0
        for index in self.indexes.values():
            index.remove(rows.tolist())
        if self.steps:
            self.steps.remove(self.ids[rows].tolist())
        if self.flow.tickets or self.flow.begun:
            policy = self.spec.flow
            self.flow.remove(rows.tolist(), reuse=policy is not None and policy.training_task in self.tasks)
        if self.group_sizes or self.group_clocks or self._members is not None:
            self._forget_members(rows)
        for sample_id in self.ids[rows].tolist():
            del self.rows[sample_id]
        self.ids[rows] = self.tags[rows] = self.groups[rows] = None
        self.serial[rows] = -1
        self._conditions.forget(rows)
        for bits in self._written_bits:
            bits[rows] = 0
        self._free.extend(rows[::-1].tolist())
        if not released:
            return np.empty(0, np.int64), np.empty(0, np.int32)
        return np.concatenate(released), np.concatenate(positions)

    def _forget_members(self, rows: Rows) -> None:
        for row, name in zip(rows.tolist(), self.groups[rows].tolist(), strict=True):
            members = self.members(name)
            members.pop(row, None)
            if not members:
                assert self._members is not None
                self._members.pop(name, None)
                self.group_sizes.pop(name, None)
                self.group_clocks.pop(name, None)
                for task in self.tasks.values():
                    task.kept.pop(name, None)

    def consumed(self, tasks: Sequence[str]) -> bool:
        """Whether something was written and every live sample is claimed by each of the tasks."""
        chosen = [self.task(name) for name in tasks]
        if not self.written and not self.rows:
            return False
        return all(task.count == len(self.rows) for task in chosen)

    def status(self, now: float) -> dict[str, Any]:
        """The counts of ``DataPlaneClient.partition_status``."""
        live = len(self.rows)
        oldest = now - float(self.born[next(iter(self.rows.values()))]) if live else None
        return {
            "partition_id": self.spec.partition_id,
            "num_samples": self.spec.num_samples,
            "samples": live,
            "written": self.written,
            "bytes": self.nbytes,
            "oldest_age_s": oldest,
            "grpo_group_size": self.spec.group_size,
            "fields": {
                name: {"declared": column.declared, "produced": column.produced}
                for name, column in self.columns.items()
            },
            "tasks": {
                name: {
                    "claimed": task.count,
                    "unclaimed": live - task.count,
                    "waiting": len(task.waiting),
                    "writes": sorted({*task.writes, *self.spec.produces.get(name, ())}),
                    **self._readiness(task),
                }
                for name, task in self.tasks.items()
            },
            "flow": self.flow_status(),
            "finished": self.finished,
        }


def _pieces(column: FieldIndex, rows: Rows) -> Pieces:
    """Where the pieces of rows are of which some were written turn by turn."""
    last = zip(column.block[rows].tolist(), column.position[rows].tolist(), strict=True)
    found = [
        [*column.turns.get(row, ()), *([place] if place[0] >= 0 else [])]
        for row, place in zip(rows.tolist(), last, strict=True)
    ]
    every = np.array([place for pieces in found for place in pieces], np.int64).reshape(-1, 2)
    return Pieces(
        np.ascontiguousarray(every[:, 0]),
        every[:, 1].astype(np.int32),
        np.array([len(pieces) for pieces in found], np.int32),
    )


def _grown(array: NDArray[Any], size: int, fill: Any) -> NDArray[Any]:
    bigger = np.full(size, fill, array.dtype)
    bigger[: len(array)] = array
    return bigger


def _object_array(values: list[Any]) -> NDArray[Any]:
    array = np.empty(len(values), object)
    array[:] = values
    return array


def _tag_with_value(where: Mapping[str, Any]) -> str | None:
    """A tag of a condition that must have a certain value."""
    return next((tag for tag, condition in where.items() if not isinstance(condition, Mapping)), None)


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:3]))
    return shown if len(names) <= 3 else f"{shown}, …"
