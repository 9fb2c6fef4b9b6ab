"""One partition of the control state: its samples by row, where their fields are, and each task's cursor.

See :mod:`rlplane.index` for the whole. A row is reused after a clear; its serial number is not.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplane.errors import (
    ClaimTimeoutError,
    DataPlaneError,
    InvalidRequestError,
    MissingDataError,
    UnknownFieldError,
    UnknownTaskError,
)
from rlplane.ready import GroupQueue, ReadyQueue, RowQueue
from rlplane.rules import Condition, PartitionSpec, compile_where, group_of

__all__ = ["NOBODY", "Batch", "Claim", "Column", "Partition", "Put", "Task"]

Rows = NDArray[np.int64]

# A field's production is stamped (put number, position in the put): the order of readiness.
_STAMP_BITS = 32
NOBODY = -1
_NO_ROWS: Rows = np.empty(0, np.int64)
_NO_TAGS: dict[str, Any] = {}  # one for all that have none: tags are replaced, never changed


class Put:
    """A write, complete but for the room it may have to wait for."""

    def __init__(
        self,
        partition_id: str,
        ids: list[str],
        blocks: dict[str, int],
        tags: list[dict[str, Any]] | None = None,
        *,
        nbytes: Sequence[int] = (),
        owner: int = NOBODY,
        now: float = 0.0,
        token: Any = None,
    ) -> None:
        self.partition_id, self.ids, self.blocks, self.tags = partition_id, ids, blocks, tags
        self.nbytes, self.owner, self.now, self.token = nbytes, owner, now, token
        # What the check has found: the row of each sample that is there, and the groups of the others.
        self.known: list[int | None] = []
        self.groups: Sequence[str | None] = ()


class Claim:
    """A request for samples; ``token`` is the engine's handle for the answer when it has to wait."""

    def __init__(
        self,
        partition_id: str,
        task: str,
        fields: Iterable[str],
        batch_size: int,
        where: Mapping[str, Any] | None = None,
        *,
        owner: int = NOBODY,
        token: Any = None,
    ) -> None:
        self.partition_id, self.task, self.batch_size = partition_id, task, batch_size
        self.fields = list(fields)
        self.where, self.condition = where, compile_where(where)
        self.owner, self.token = owner, token


class Batch:
    """What a claim got: ids and tags, row by row. The tags are the state's own: copy before changing."""

    __slots__ = ("ids", "tags")

    def __init__(self, ids: list[str], tags: list[dict[str, Any]]) -> None:
        self.ids, self.tags = ids, tags


class Column:
    """One field: where each row's value is, and when it was first written."""

    __slots__ = ("block", "declared", "position", "produced", "stamp", "stamped")

    def __init__(self, size: int, declared: bool) -> None:
        self.declared = declared
        self.stamped = False  # whether it was ever written
        self.produced = 0
        self.block = np.full(size, -1, np.int64)
        self.position = np.zeros(size, np.int32)
        self.stamp = np.zeros(size, np.int64)


class Task:
    """One consumer: its cursor, its queues, and the claims that wait."""

    __slots__ = ("claimed", "claims", "count", "name", "owner", "queues", "sequence", "waiters")

    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self.claimed = np.zeros(size, bool)
        self.count = 0
        # Who holds an unfinished claim on a row, and in which order it was made.
        self.owner = np.full(size, NOBODY, np.int64)
        self.sequence = np.zeros(size, np.int64)
        self.claims = 0
        self.queues: dict[tuple[str, ...], ReadyQueue] = {}
        self.waiters: list[Claim] = []


class Partition:
    """The samples of one data flow, by row. A row is reused after a clear; its serial number is not."""

    def __init__(self, spec: PartitionSpec) -> None:
        self.spec = spec
        self.version = 1
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
        self._next_serial = 0
        self._writers: dict[int, int] = {}
        self._signed: list[NDArray[np.uint64]] = []
        self.columns = {name: Column(self.size, True) for name in spec.fields}
        self.tasks = {name: Task(name, self.size) for name in spec.tasks}

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
        self.spec = spec
        self.version += 1
        self.written = 0
        # A field that was ever written stays known; one that was only declared goes with its declaration.
        kept = {
            name: column for name, column in self.columns.items() if name in spec.fields or column.stamped
        }
        for name, column in kept.items():
            column.declared = name in spec.fields
        declared = {name: kept.get(name) or Column(self.size, True) for name in spec.fields}
        self.columns = declared | kept
        gone: list[tuple[Claim, DataPlaneError]] = []
        for name, task in self.tasks.items():
            for claim in task.waiters:
                if name not in spec.tasks:
                    gone.append((claim, UnknownTaskError(f"task {name!r} was removed by a new registration")))
                elif not self.columns.keys() >= set(claim.fields):
                    text = f"one of the fields {claim.fields} was removed by a new registration"
                    gone.append((claim, UnknownFieldError(text)))
                elif spec.group_size and claim.batch_size % spec.group_size:
                    text = f"batch_size {claim.batch_size} is not a multiple of the new grpo_group_size"
                    gone.append((claim, InvalidRequestError(f"{text} {spec.group_size}")))
            refused = [claim for claim, _ in gone]
            task.waiters = [claim for claim in task.waiters if claim not in refused]
            task.queues = {
                required: queue
                for required, queue in task.queues.items()
                if self.columns.keys() >= set(required)
            }
        self.tasks = {name: self.tasks.get(name) or Task(name, self.size) for name in spec.tasks}
        return gone

    def task(self, name: str) -> Task:
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
        if self.spec.group_size and new:
            tags = put.tags or itertools.repeat(None)
            samples = zip(put.ids, put.known, tags, strict=False)
            put.groups = [group_of(i, tag) for i, row, tag in samples if row is None]
        return new

    def write(self, put: Put, stamp: int) -> list[NDArray[np.int64]]:
        """Write a checked put; return the blocks that its rows referred to before."""
        count = len(put.ids)
        if not count:
            return []
        rows, new = self._rows_for(put)
        order = (stamp << _STAMP_BITS) + np.arange(count)
        positions = np.arange(count, dtype=np.int32)
        replaced = []
        for name, block in put.blocks.items():
            column = self.columns.get(name)
            if column is None:
                column = self.columns[name] = Column(self.size, False)
            column.stamped = True
            # The rows of new samples have nothing in any column.
            old = column.block[rows] if new < count else None
            if old is None or (old < 0).all():
                column.stamp[rows] = order
                column.produced += count
            else:
                fresh = old < 0
                column.stamp[rows[fresh]] = order[fresh]
                column.produced += int(fresh.sum())
                replaced.append(old)
            column.block[rows] = block
            column.position[rows] = positions
        if put.owner != NOBODY:
            self._sign(rows, put.owner)
        if put.blocks and put.owner != NOBODY and new < count:
            for task in self.tasks.values():
                # Whoever writes a field of what it claimed has done its work: the claim is finished.
                mine = rows[task.owner[rows] == put.owner]
                task.owner[mine] = NOBODY
        for task in self.tasks.values():
            for required, queue in task.queues.items():
                if new == count and put.blocks.keys() >= set(required):
                    queue.touched()
                    queue.offer(rows)  # new and whole: there is nothing to look up
                elif new or put.tags is not None or not put.blocks.keys().isdisjoint(required):
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

    def _sign(self, rows: Rows, owner: int) -> None:
        slot = self._writers.get(owner)
        if slot is None:
            taken = set(self._writers.values())
            slot = next(slot for slot in range(len(taken) + 1) if slot not in taken)
            self._writers[owner] = slot
            while len(self._signed) <= slot // 64:
                self._signed.append(np.zeros(self.size, np.uint64))
        self._signed[slot // 64][rows] |= np.uint64(1 << slot % 64)

    def written_by(self, owner: int) -> Rows | None:
        """The live rows that an owner wrote to, by birth; None if it never wrote here."""
        slot = self._writers.get(owner)
        if slot is None:
            return None
        rows = self.live_rows(None)
        mine: Rows = rows[(self._signed[slot // 64][rows] >> np.uint64(slot % 64) & np.uint64(1)) != 0]
        return mine

    def forget_writer(self, owner: int) -> None:
        """Free the slot of an owner that is gone."""
        slot = self._writers.pop(owner, None)
        if slot is not None:
            self._signed[slot // 64] &= ~np.uint64(1 << slot % 64)

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
        self.serial[fresh] = np.arange(self._next_serial, self._next_serial + new)
        self._next_serial += new
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
        self._signed = [_grown(bits, size, 0) for bits in self._signed]
        for column in self.columns.values():
            column.block = _grown(column.block, size, -1)
            column.position = _grown(column.position, size, 0)
            column.stamp = _grown(column.stamp, size, 0)
        for task in self.tasks.values():
            task.claimed = _grown(task.claimed, size, False)
            task.owner = _grown(task.owner, size, NOBODY)
            task.sequence = _grown(task.sequence, size, 0)
            for queue in task.queues.values():
                queue.grow(size)

    # Readiness and claims

    def queue(self, task: Task, fields: Sequence[str]) -> ReadyQueue:
        """The queue of what is ready for this task with these fields, built when first asked for."""
        required = tuple(sorted(set(fields)))
        queue = task.queues.get(required)
        if queue is None:
            queue = GroupQueue(self, self.spec.group_size) if self.spec.group_size else RowQueue(self)
            task.queues[required] = queue
            rows = self.live_rows(None)
            if len(rows):
                stamps = [self.columns[name].stamp[rows] for name in required] or [self.serial[rows]]
                rows = rows[np.argsort(np.maximum.reduce(stamps), kind="stable")]
                self._offer(task, required, queue, rows)
        return queue

    def _offer(self, task: Task, required: Sequence[str], queue: ReadyQueue, rows: Rows) -> None:
        ready = ~task.claimed[rows]
        for name in required:
            ready &= self.columns[name].block[rows] >= 0
        queue.touched()
        queue.offer(rows[ready])

    def take(self, task: Task, queue: ReadyQueue, claim: Claim, count: int) -> Batch:
        """Claim up to ``count`` ready samples for the task."""
        rows = queue.take(count, self._match(claim.condition))
        if len(rows):
            for other in task.queues.values():
                if other is not queue:
                    other.discard(rows)
            task.claimed[rows] = True
            task.count += len(rows)
            task.owner[rows] = claim.owner
            task.sequence[rows] = task.claims + np.arange(len(rows))
            task.claims += len(rows)
        return Batch(self.ids[rows].tolist(), self.tags[rows].tolist())

    def serve(self, task: Task) -> list[tuple[Any, Batch]]:
        """Answer the waiting claims that can be answered, first come, first served.

        A claim that cannot be answered yet holds back the later ones that want the same: those
        of the same fields, or, if it has conditions, those with the same conditions.
        """
        answers = []
        held: list[tuple[ReadyQueue, Mapping[str, Any] | None]] = []
        left = []
        for claim in task.waiters:
            queue = self.queue(task, claim.fields)
            behind = any(q is queue and (where is None or where == claim.where) for q, where in held)
            count = 0 if behind else self._grantable(task, queue, claim)
            if count:
                answers.append((claim.token, self.take(task, queue, claim, count)))
            else:
                left.append(claim)
                if not behind:
                    held.append((queue, claim.where))
        task.waiters = left
        return answers

    def _grantable(self, task: Task, queue: ReadyQueue, claim: Claim) -> int:
        """How many samples a waiting claim may have now: a full batch, the tail, or 0."""
        match = self._match(claim.condition)
        ready = queue.count(claim.batch_size, match, claim)
        if ready >= claim.batch_size:
            return claim.batch_size
        if not ready or self.written != self.spec.num_samples:
            return 0
        return ready if ready == self._remaining(task, match) else 0

    def _remaining(self, task: Task, match: Callable[[int], bool] | None) -> int:
        """How many samples this claim could still get, ready or not, if nothing new is written."""
        if match is None and not self.spec.group_size:
            return len(self.rows) - task.count
        unclaimed = self.live_rows(None)
        unclaimed = unclaimed[~task.claimed[unclaimed]]
        rows = [row for row in unclaimed.tolist() if match is None or match(row)]
        if not self.spec.group_size:
            return len(rows)
        # A group that lacks members cannot become whole any more.
        size = self.spec.group_size
        return sum(count // size * size for count in Counter(self.groups[rows]).values())

    def timeout_error(self, task: Task, claim: Claim) -> ClaimTimeoutError:
        """What a claim is told that has waited in vain."""
        queue = self.queue(task, claim.fields)
        ready = queue.count(claim.batch_size, self._match(claim.condition), claim)
        text = (
            f"task {task.name!r} waited for {claim.batch_size} samples of partition "
            f"{self.spec.partition_id!r} with fields {claim.fields}; {ready} were ready"
        )
        if claim.where:
            text += f" that match where={claim.where!r}, of {queue.ready} without it"
        text += f" ({len(self.rows)} live, {task.count} claimed already)"
        return ClaimTimeoutError(text, ready)

    def return_claims(self, task: Task, owner: int) -> int:
        """Put the unfinished claims of an owner back to the front of the queues."""
        return self.return_rows(task, np.flatnonzero(task.owner == owner))

    def return_rows(self, task: Task, rows: Rows) -> int:
        """Make claimed rows claimable again, ahead of all others."""
        rows = rows[task.claimed[rows]]
        if not len(rows):
            return 0
        rows = rows[np.argsort(task.sequence[rows])]
        task.owner[rows] = NOBODY
        task.claimed[rows] = False
        task.count -= len(rows)
        for required, queue in task.queues.items():
            ready = np.ones(len(rows), bool)
            for name in required:
                ready &= self.columns[name].block[rows] >= 0
            queue.restore(rows[ready])
        return len(rows)

    def _match(self, condition: Condition | None) -> Callable[[int], bool] | None:
        if condition is None:
            return None
        tags = self.tags
        return lambda row: condition(tags[row])

    # Reading and removing

    def live_rows(self, ids: Sequence[str] | None) -> Rows:
        """The rows of those ids that are there, in the order asked (in order of birth for None)."""
        if ids is None:
            return np.fromiter(self.rows.values(), np.int64, len(self.rows))
        found = [row for row in map(self.rows.get, dict.fromkeys(ids)) if row is not None]
        return np.array(found, np.int64)

    def locate(
        self, ids: Sequence[str], fields: Sequence[str]
    ) -> dict[str, tuple[NDArray[np.int64], NDArray[np.int32]]]:
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
            column = self.columns.get(name)
            if column is None:
                raise UnknownFieldError(
                    f"partition {self.spec.partition_id!r} has no field {name!r}; "
                    f"it has {sorted(self.columns)}"
                )
            blocks = column.block[rows]
            if np.count_nonzero(blocks < 0):
                missing = list(dict.fromkeys(self.ids[rows[blocks < 0]].tolist()))
                raise MissingDataError(
                    f"field {name!r} of partition {self.spec.partition_id!r} is not written for "
                    f"{_some(missing)} ({len(missing)} of {len(set(ids))} samples asked for)"
                )
            places[name] = (blocks, column.position[rows])
        return places

    def remove(self, rows: Rows) -> NDArray[np.int64]:
        """Drop rows; return the blocks they referred to, once per row and field."""
        released = []
        for column in self.columns.values():
            blocks = column.block[rows]
            column.produced -= int(np.count_nonzero(blocks >= 0))
            column.block[rows] = -1
            released.append(blocks)
        for task in self.tasks.values():
            task.count -= int(np.count_nonzero(task.claimed[rows]))
            for queue in task.queues.values():
                queue.discard(rows)
            task.claimed[rows] = False
            task.owner[rows] = NOBODY
        for sample_id in self.ids[rows].tolist():
            del self.rows[sample_id]
        self.ids[rows] = self.tags[rows] = self.groups[rows] = None
        self.serial[rows] = -1
        for bits in self._signed:
            bits[rows] = 0
        self._free.extend(rows[::-1].tolist())
        return np.concatenate(released) if released else np.empty(0, np.int64)

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
                    "ready": max((queue.ready for queue in task.queues.values()), default=0),
                    "waiting": len(task.waiters),
                }
                for name, task in self.tasks.items()
            },
        }


def _grown(array: NDArray[Any], size: int, fill: Any) -> NDArray[Any]:
    bigger = np.full(size, fill, array.dtype)
    bigger[: len(array)] = array
    return bigger


def _object_array(values: list[Any]) -> NDArray[Any]:
    array = np.empty(len(values), object)
    array[:] = values
    return array


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:3]))
    return shown if len(names) <= 3 else f"{shown}, …"
