"""``ControlState``: which samples exist, what is ready, who has claimed what.

Pure bookkeeping: no lock, no thread, no clock and no I/O, so that it can be tested by itself and owned
by whoever serialises access to it: a lock inside one process, or a service that many processes ask.

The state holds no data. A put names, for each field, a *block*: the number of a piece of storage
that has already been filled, in which row ``i`` of the put is at position ``i``. The state
remembers (block, position) per sample and field, counts the rows that still need a block, and reports
a block as freed when none does.

Everything that happens per row happens in numpy: a put or claim of 512 rows costs tens of
microseconds, whatever the number of resident samples. For each (task, required fields) that was
ever asked for there is a queue of ready samples, fed by the writes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplane.control.advancing import Advancing
from rlplane.control.clearing import Clearing
from rlplane.control.cursors import TaskCursor
from rlplane.control.fields import Pieces
from rlplane.control.leaving import Leaving
from rlplane.control.line import WaitingLine
from rlplane.control.losing import Losing
from rlplane.control.marking import Marking
from rlplane.control.partition import TIMEOUT, Partition
from rlplane.control.policies import Order
from rlplane.control.requests import Batch, Claim, Effects, LostRows, Put
from rlplane.control.rules import PartitionSpec, check_capacity, check_claim, group_name
from rlplane.control.staging import Staging
from rlplane.control.steps import check_ranks
from rlplane.control.unclaiming import Unclaiming
from rlplane.errors import (
    CapacityTimeoutError,
    DataPlaneError,
    InvalidRequestError,
    MissingDataError,
    UnknownPartitionError,
)

__all__ = ["LOST", "STALE", "ControlState"]

STALE = "stale"
"""Why a sample was evicted that had become too old."""
LOST = "lost"
"""Why a sample was evicted whose bytes are gone."""


class ControlState:
    """All partitions of one plane.

    A call that changes something returns its :class:`~rlplane.control.requests.Effects`. A call that raises
    has changed nothing. Whoever owns the state sets ``now`` (a monotonic clock) before a call.
    """

    def __init__(self, capacity: int | None = None) -> None:
        self.capacity = capacity
        self.partitions: dict[str, Partition] = {}
        self.live = 0
        self.has_clocks = False  # whether a policy has groups that end by themselves
        self.latest_dropped = 0  # the highest version of a partition that was dropped
        self.now = 0.0
        self._waiting_puts: WaitingLine[Put] = WaitingLine()

    def partition(self, partition_id: str) -> Partition:
        """The partition of that name, or ``UnknownPartitionError``."""
        try:
            return self.partitions[partition_id]
        except (KeyError, TypeError):
            known = ", ".join(map(repr, sorted(self.partitions)[:8])) or "none yet"
            raise UnknownPartitionError(
                f"partition {partition_id!r} is not registered; registered are: {known}"
            ) from None

    # Changes

    def register(self, spec: PartitionSpec, *, extend: bool = False) -> Effects:
        """Create a partition, or replace the schema and task list of one that exists.

        With ``extend``, one that exists keeps what it has, and gets the fields and tasks that it lacks.
        """
        effects = Effects()
        if extend and spec.partition_id in self.partitions:
            known = self.partitions[spec.partition_id].spec
            if set(spec.fields) <= set(known.fields) and set(spec.tasks) <= set(known.tasks):
                return effects
            spec = known.extended(spec.fields, spec.tasks)
        self.has_clocks |= spec.flow is not None and spec.flow.group_timeout_s is not None
        partition = self.partitions.get(spec.partition_id)
        if partition is None:
            # A client that still knows a partition of that name which was dropped must notice.
            self.partitions[spec.partition_id] = Partition(spec, self.latest_dropped + 1)
            return effects
        effects.answers.extend((claim.token, error) for claim, error in partition.register(spec))
        self._refuse_invalid_puts(partition, effects)
        self.advance_some(Advancing(partition, partition.flow.version), effects)
        return effects

    def put(self, put: Put) -> Effects:
        """Write at once, which answers the put with None, or keep it waiting until there is room."""
        partition = self.partition(put.partition_id)
        new = partition.check_put(put)
        effects = Effects()
        if self.capacity is not None and new:
            check_capacity(new, self.capacity)
            # Behind the puts that already wait, or a large one would starve.
            if self._waiting_puts or self.live + new > self.capacity:
                self._waiting_puts.append(put, self.now)
                self._retry_puts(effects)
                return effects
        effects.answers.append((put.token, None))
        self._write(partition, put, effects)
        self._retry_puts(effects)  # what was written may have been too old, and have been evicted
        return effects

    def begin_put(self, put: Put) -> Staging:
        """Make a put of very many samples ready, some at a time. Then it takes little time to :meth:`put`
        it; one that raises is to be undone."""
        put.staged = Staging(self.partition(put.partition_id), put)
        return put.staged

    def line_up(self, partition: Partition, task: TaskCursor, effects: Effects) -> bool:
        """A slice has passed since a put of very many for which claims wait; with the last one they are
        answered, and it is True."""
        known = self.partitions.get(partition.spec.partition_id)
        is_there = known is partition and partition.tasks.get(task.name) is task
        task.to_line_up = task.to_line_up - 1 if is_there else 0
        if is_there and not task.to_line_up:
            self._answer_claims(partition, effects)
        return not task.to_line_up

    def claim(self, claim: Claim, *, blocking: bool) -> Effects:
        """Answer a claim with a batch at once, or, when ``blocking`` and not enough is ready, later."""
        partition = self.partition(claim.partition_id)
        task = partition.task(claim.task)
        check_claim(partition.spec, claim.batch_size, partition.columns, claim.fields, claim.max_tokens)
        queue = partition.cursors.queue(task, claim)
        effects = Effects()
        if claim.step is not None:
            check_ranks(partition.spec, claim)
        if blocking and not task.waiting and claim.step is None:
            task.last = claim
            answer = partition.claims.answer_first(task, queue, claim)
            if answer is not None:
                effects.answers.append((claim.token, answer))
            if partition.claims.keeps_steps:
                self._answer_claims(partition, effects)
        elif blocking:
            # Behind one that wants the same and waits already, it waits too: no need to look at all of them.
            # Not so a rank's: its part of a step may be there already.
            behind = claim.step is None and any(
                earlier.fields == claim.fields
                and (earlier.order and earlier.order.text) == (claim.order and claim.order.text)
                and (earlier.where is None or earlier.where == claim.where)
                for earlier in task.waiting
            )
            task.waiting.append(claim)
            task.last = claim
            if not behind:
                self._answer_claims_of(partition, task, effects)
        else:
            if claim.step is not None:
                # Like one that waits, and is answered with nothing instead.
                task.waiting.append(claim)
                task.last = claim
                self._answer_claims_of(partition, task, effects)
                if claim in task.waiting:
                    task.waiting.remove(claim)
                    effects.answers.append((claim.token, Batch([], [])))
                return effects
            count = partition.claims.available(task, queue, claim)
            task.last = claim
            effects.answers.append((claim.token, partition.claims.claim(task, queue, claim, count)))
            self._answer_claims_of(partition, task, effects)
        return effects

    def give_up(self, token: object) -> Effects:
        """End a waiting request: it is answered with the error that its caller gets. Nothing if it does
        not wait (any more)."""
        effects = Effects()
        for put in self._waiting_puts:
            if put.token is token:
                self._waiting_puts.remove(put)
                error = CapacityTimeoutError(
                    f"no room for {len(put.ids)} samples in partition {put.partition_id!r}: "
                    f"{self.live} of storage_capacity {self.capacity} are in use; nothing was written"
                )
                self._refuse(put, error, effects)
                self._retry_puts(effects)
                return effects
        for partition in self.partitions.values():
            for task in partition.tasks.values():
                for claim in task.waiting:
                    if claim.token is token:
                        task.waiting.remove(claim)
                        effects.answers.append((token, partition.claims.timeout_error(task, claim)))
                        self._answer_claims(partition, effects)
                        return effects
        return effects

    def withdraw(self, tokens: Collection[object]) -> Effects:
        """End waiting requests without an answer, because nobody waits for it any more."""
        effects = Effects()
        for put in [put for put in self._waiting_puts if put.token in tokens]:
            self._waiting_puts.remove(put)
            self._forget(put, effects)
        for partition in self.partitions.values():
            for task in partition.tasks.values():
                left = [claim for claim in task.waiting if claim.token not in tokens]
                if len(left) < len(task.waiting):
                    # It may have held back others.
                    task.waiting = left
                    effects.answers.extend(partition.claims.answer(task))
        self._retry_puts(effects)
        return effects

    def begin_clear(self, partition_id: str, ids: Sequence[str] | None) -> Clearing:
        """Drop samples (all of them for None) with :meth:`clear_some`, a slice at a time."""
        partition = self.partition(partition_id)
        return Clearing(partition, partition.live_rows(None) if ids is None else ids)

    def begin_clear_written_by(self, partition_id: str, owner: int) -> Clearing:
        """The same for what ``owner`` wrote and is still there, or for everything if it never wrote here."""
        partition = self.partition(partition_id)
        rows = partition.table.written_by(owner)
        return Clearing(partition, partition.live_rows(None) if rows is None else rows)

    def clear_some(self, clearing: Clearing, effects: Effects) -> None:
        """Go on with a clear, until it is over. In between others see that some of the samples are gone: each
        slice is a clear of its own."""
        partition, rows = clearing.partition, clearing.next_rows()
        if len(rows):
            self._remove(partition, rows, effects)
            # A sample that is gone may have been all that stood between a claim and its tail.
            self._answer_claims(partition, effects)
            self._retry_puts(effects)

    def begin_advance(self, partition_id: str, version: int | None = None) -> Advancing:
        """The trainer has published weights: with :meth:`advance_some`, a slice at a time, what is too old
        then is evicted, and the gate opens. Without a version, for what has become too old otherwise."""
        partition = self.partition(partition_id)
        if version is None:
            version = partition.flow.version
        if type(version) is not int or not partition.flow.version <= version < 2**63:
            raise InvalidRequestError(
                f"version {version!r} of partition {partition_id!r} is not an integer of at least "
                f"{partition.flow.version}, which it has now"
            )
        return Advancing(partition, version)

    def advance_some(self, advancing: Advancing, effects: Effects) -> None:
        """Go on with a new version, until it is over."""
        partition = advancing.partition
        if self.partitions.get(partition.spec.partition_id) is not partition:
            advancing.is_over = True  # it was dropped meanwhile
            return
        for rows in advancing.next_rows():
            self._evict(partition, rows, STALE, effects)
        self._answer_claims(partition, effects)
        self._retry_puts(effects)

    def begin_lose(self, lost: LostRows, refusal: DataPlaneError, effects: Effects) -> Losing:
        """Bytes are gone: samples that had some there are evicted or, if their partition wants to keep them,
        are as if those fields had not been written, with :meth:`lose_some`, a slice at a time. A put that
        waits for room with such bytes is refused."""
        for put in [put for put in self._waiting_puts if not lost.keys().isdisjoint(put.blocks.values())]:
            self._waiting_puts.remove(put)
            self._refuse(put, refusal, effects)
        self._retry_puts(effects)
        return Losing(self.partitions.values(), lost)

    def lose_some(self, losing: Losing, most: int, effects: Effects) -> int:
        """Go on with a loss; return how many rows were looked at."""
        partition, rows = losing.next_rows(most)
        fields = partition.lost_fields(losing.lost, rows)
        if fields:
            gone = np.unique(np.concatenate(list(fields.values())))
            losing.count += len(gone)
            if partition.spec.flow is not None and partition.spec.flow.on_lost == "keep":
                for name, those in fields.items():
                    partition.release_rows(*partition.lose(name, those), effects)
            else:
                partition.table.note_lost(gone)
                self._evict(partition, gone, LOST, effects)
            self._answer_claims(partition, effects)
            self._retry_puts(effects)
        return max(len(rows), 1)

    def close_group(
        self, partition_id: str, group: str | int, reason: str, fields: Sequence[str] = ()
    ) -> tuple[int, Effects]:
        """End a group with the members that it has; also returns how many those are."""
        partition = self.partition(partition_id)
        name = group_name(group)
        if not partition.spec.group_size:
            raise InvalidRequestError(f"partition {partition_id!r} was registered without grpo_group_size")
        if not partition.groups.of(name):
            raise MissingDataError(f"partition {partition_id!r} has no group {group!r}")
        effects = Effects()
        policy = partition.spec.flow
        fields = fields or ([] if policy is None else policy.finished_fields)
        self._evict(partition, partition.close_group(name, reason, fields), reason, effects)
        self._answer_claims(partition, effects)
        self._retry_puts(effects)
        return len(partition.groups.of(name)), effects

    def next_deadline(self) -> float:
        """When :meth:`expire` has something to do, by the clock of the puts."""
        due = self._waiting_puts.due
        if not self.has_clocks:
            return due
        return min([due, *(partition.groups.next_deadline() for partition in self.partitions.values())])

    def expire(self, clock: float) -> Effects:
        """End the groups that have waited long enough for their last members, and write the puts that may
        overtake a larger one by now."""
        effects = Effects()
        is_due = self._waiting_puts.due <= clock
        for partition in self.partitions.values():
            if partition.groups.next_deadline() <= clock:
                self._evict(partition, partition.overdue(clock), TIMEOUT, effects)
                self._answer_claims(partition, effects)
        if effects or is_due:
            self._retry_puts(effects)
        return effects

    @property
    def is_short_of_room(self) -> bool:
        """Whether a put waits for room."""
        return bool(self._waiting_puts)

    def move_clock(self, seconds: float) -> None:
        """What is to come was set by another clock, which this one is ahead of by so much."""
        self._waiting_puts.move_clock(seconds)

    def finish(self, partition_id: str) -> Effects:
        """Nothing new comes to a partition: claims that wait get the tail, and then an empty batch."""
        partition = self.partition(partition_id)
        effects = Effects()
        partition.table.finished = True
        self._answer_claims(partition, effects)
        return effects

    def evicted(self, partition_id: str, limit: int | None = None) -> Batch:
        """Evicted samples that nobody was told of yet; each is told once."""
        told = self.partition(partition_id).flow.take_reported(limit)
        return Batch([sample_id for sample_id, _ in told], [tags for _, tags in told])

    def begin_drop(self, partition_id: str) -> tuple[Clearing, Effects]:
        """Forget a partition with its samples, schema and tasks. Whoever waits for it gets an error. What its
        samples have, which nobody can name any more, is still to be freed with :meth:`clear_some`, a slice at
        a time."""
        partition = self.partition(partition_id)
        gone = UnknownPartitionError(f"partition {partition_id!r} was dropped")
        effects = Effects()
        for put in [put for put in self._waiting_puts if put.partition_id == partition_id]:
            self._waiting_puts.remove(put)
            self._refuse(put, gone, effects)
        for task in partition.tasks.values():
            effects.answers.extend((claim.token, gone) for claim in task.waiting)
            task.waiting = []
        del self.partitions[partition_id]
        self.latest_dropped = max(self.latest_dropped, partition.version)
        self._retry_puts(effects)
        return Clearing.of_all(partition), effects

    def begin_unclaim(
        self, partition_id: str, task: str, ids: Sequence[str], owner: int, *, is_finished: bool = False
    ) -> Unclaiming:
        """End a claim with :meth:`unclaim_some`, a slice at a time: what that owner still holds of it goes to
        the front of the queue or, if the owner is done with it, is not handed out again when that goes."""
        partition = self.partition(partition_id)
        return Unclaiming(partition, partition.task(task), ids, owner, is_finished=is_finished)

    def unclaim_some(self, unclaiming: Unclaiming, effects: Effects) -> None:
        """Go on with the end of a claim, until it is over. Each slice is one of its own."""
        partition, cursor, rows = unclaiming.partition, unclaiming.cursor, unclaiming.next_rows()
        if self.partitions.get(partition.spec.partition_id) is not partition:
            return  # it was dropped meanwhile
        if unclaiming.is_finished:
            partition.cursors.finish(cursor, rows)
            return
        partition.cursors.put_back(cursor, rows)
        self._evict(partition, partition.flow_control.stale(rows), STALE, effects)
        self._answer_claims(partition, effects)
        self._retry_puts(effects)

    def begin_mark(self, partition_id: str, task: str, ids: Sequence[str] | None) -> Marking:
        """Move a task's cursor by hand past samples that somebody else chose (None: past all), with
        :meth:`mark_some`. If one of them is gone or claimed already, none is marked."""
        partition = self.partition(partition_id)
        return Marking(partition, partition.task(task), ids)

    def mark_some(self, marking: Marking, effects: Effects) -> None:
        """Go on with it, until it is over. Before the last slice nothing has changed."""
        partition = marking.partition
        marking.mark_some(is_there=self.partitions.get(partition.spec.partition_id) is partition)
        if marking.is_marked:
            self._answer_claims(partition, effects)
            self._retry_puts(effects)

    def begin_unmark(self, partition_id: str, task: str, ids: Sequence[str] | None) -> Unclaiming:
        """Move it back, whoever has claimed these samples, with :meth:`unclaim_some`, a slice at a time."""
        partition = self.partition(partition_id)
        return Unclaiming.of_all(partition, partition.task(task), ids)

    def abort(self, error: DataPlaneError, owner: int | None = None) -> Effects:
        """Answer every waiting request (of one owner) with an error."""
        effects = Effects()
        for put in [put for put in self._waiting_puts if owner in (None, put.owner)]:
            self._waiting_puts.remove(put)
            self._refuse(put, error, effects)
        for partition in self.partitions.values():
            for task in partition.tasks.values():
                ended = [claim for claim in task.waiting if owner in (None, claim.owner)]
                task.waiting = [claim for claim in task.waiting if claim not in ended]
                effects.answers.extend((claim.token, error) for claim in ended)
            self._answer_claims(partition, effects)
        self._retry_puts(effects)
        return effects

    def begin_release(self, owner: int) -> tuple[Leaving, Effects]:
        """Forget a client that is gone: its waiting requests end, and its unfinished claims return to the
        front of the queues, with :meth:`release_some` a slice at a time, of which the first is done."""
        effects = Effects()
        for put in [put for put in self._waiting_puts if put.owner == owner]:
            self._waiting_puts.remove(put)
            self._forget(put, effects)
        for partition in self.partitions.values():
            for task in partition.tasks.values():
                task.waiting = [claim for claim in task.waiting if claim.owner != owner]
            partition.table.forget_writer(owner)
        leaving = Leaving(self.partitions.values(), owner)
        self._give_back(leaving, effects)
        for partition in self.partitions.values():
            self._answer_claims(partition, effects)
        self._retry_puts(effects)
        return leaving, effects

    def release_some(self, leaving: Leaving, effects: Effects) -> None:
        """Go on with what comes back, until it is over."""
        for partition in self._give_back(leaving, effects):
            self._answer_claims(partition, effects)
        self._retry_puts(effects)

    def _give_back(self, leaving: Leaving, effects: Effects) -> list[Partition]:
        """Do a slice; return the partitions that got something back."""
        touched = []
        for partition, task, rows in leaving.next_rows():
            if self.partitions.get(partition.spec.partition_id) is partition:  # or it was dropped meanwhile
                partition.cursors.put_back(task, rows)
                self._evict(partition, partition.flow_control.stale(rows), STALE, effects)
                touched.append(partition)
        return list(dict.fromkeys(touched))

    # Questions

    @property
    def latest_version(self) -> int:
        """The highest version that a partition has or had."""
        return max([self.latest_dropped, *(part.version for part in self.partitions.values())])

    def waiting(self) -> list[object]:
        """The tokens of all requests that wait."""
        claims = [
            claim.token
            for partition in self.partitions.values()
            for task in partition.tasks.values()
            for claim in task.waiting
        ]
        return [put.token for put in self._waiting_puts] + claims

    def peek(
        self,
        partition_id: str,
        where: Mapping[str, Any] | None = None,
        fields: Sequence[str] = (),
        limit: int | None = None,
        order: str | None = None,
    ) -> Batch:
        """What is there and matches, without claiming it."""
        return self.partition(partition_id).looking.peek(where, fields, limit, Order(order))

    def count(self, partition_id: str, where: Mapping[str, Any] | None = None) -> int:
        """How many samples are there that match."""
        partition = self.partition(partition_id)
        return len(partition.rows) if not where else len(partition.looking.matching(where))

    def locate(self, partition_id: str, ids: Sequence[str], fields: Sequence[str]) -> dict[str, Pieces]:
        """For each field, the block and the position of every sample asked for."""
        return self.partition(partition_id).table.locate(ids, fields)

    def blocks(self) -> dict[int, int]:
        """Every block that samples refer to, with the number of rows that do."""
        found: dict[int, int] = {}
        for partition in self.partitions.values():
            found.update(partition.block_rows)
        return found

    # How writes, waits and blocks work together

    def _write(self, partition: Partition, put: Put, effects: Effects) -> None:
        before = len(partition.rows)
        replaced = partition.write(put)
        lining_up, partition.cursors.lining_up = partition.cursors.lining_up, []
        effects.lining_up.extend((partition, task) for task in lining_up)
        self.live += len(partition.rows) - before
        if self._waiting_puts and len(partition.rows) > before:
            self._waiting_puts.reconsider()  # it may have made samples that another was to make
        if put.ids:
            partition.add_blocks(put.blocks.values(), len(put.ids), put.nbytes or [0] * len(put.blocks))
        else:
            effects.freed.extend(put.blocks.values())
        for blocks, positions in replaced:
            partition.release_rows(blocks, positions, effects)
        if put.tags is not None and partition.spec.flow is not None:
            rows = partition.live_rows(put.ids) if put.staged is None else put.staged.rows
            self._evict(partition, partition.flow_control.stale(rows), STALE, effects)
        self._answer_claims(partition, effects)

    def _remove(self, partition: Partition, rows: NDArray[np.int64], effects: Effects) -> None:
        for blocks, positions in partition.remove(rows):
            partition.release_rows(blocks, positions, effects)
        self.live -= len(rows)

    def _evict(self, partition: Partition, rows: NDArray[np.int64], reason: str, effects: Effects) -> None:
        """Clear what the policy gives up, count it and remember it for whoever asks."""
        if len(rows):
            for row in rows.tolist():
                partition.flow.report(partition.ids[row], partition.tags[row], reason)
            self._remove(partition, rows, effects)

    def _refuse(self, put: Put, error: DataPlaneError, effects: Effects) -> None:
        effects.answers.append((put.token, error))
        self._forget(put, effects)

    @staticmethod
    def _forget(put: Put, effects: Effects) -> None:
        effects.freed.extend(put.blocks.values())
        if put.staged is not None:
            put.staged.undo()

    def _refuse_invalid_puts(self, partition: Partition, effects: Effects) -> None:
        """Refuse the waiting puts that a new registration does not allow any more."""
        for put in self._waiting_puts:
            if put.partition_id == partition.spec.partition_id:
                try:
                    partition.check_put(put)
                except DataPlaneError as error:
                    self._waiting_puts.remove(put)
                    self._refuse(put, error, effects)

    @staticmethod
    def _answer_claims(partition: Partition, effects: Effects) -> None:
        before = -1
        while len(effects.answers) > before:
            before = len(effects.answers)
            for task in partition.tasks.values():
                if task.waiting:
                    effects.answers.extend(partition.claims.answer(task))
            if not partition.claims.keeps_steps:
                break

    def _answer_claims_of(self, partition: Partition, task: TaskCursor, effects: Effects) -> None:
        """Answer those that a claim of this task has made possible."""
        if partition.claims.keeps_steps:
            self._answer_claims(partition, effects)
        elif task.waiting:
            effects.answers.extend(partition.claims.answer(task))

    def _retry_puts(self, effects: Effects) -> None:
        if self._waiting_puts:
            capacity = self.capacity or 0
            self._waiting_puts.serve(
                self.now, lambda: capacity - self.live, lambda put: self._write_if_it_fits(put, effects)
            )

    def _write_if_it_fits(self, put: Put, effects: Effects) -> bool:
        """False if the put has to go on waiting."""
        capacity = self.capacity or 0
        try:
            partition = self.partition(put.partition_id)
            new = partition.check_put(put)
            # A clear of samples that it was to overwrite may have made it larger than it was.
            check_capacity(new, capacity)
            if self.live + new > capacity:
                return False
            effects.answers.append((put.token, None))
            self._write(partition, put, effects)
        except DataPlaneError as error:
            self._refuse(put, error, effects)
        return True
