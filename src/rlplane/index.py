"""The control state of a plane: which samples exist, what is ready, who has claimed what.

Pure bookkeeping: no lock, no thread, no clock and no I/O, so that it can be tested by itself and owned
by whoever serialises access to it: a lock inside one process, or a controller process that serves many.

The state holds no data. A put names, for each field, a *block*: the number of a piece of storage
that the engine has already filled, in which row ``i`` of the put is at position ``i``. The state
remembers (block, position) per sample and field, counts the rows that still need a block, and reports
a block as freed when none does.

Everything that happens per row happens in numpy: a put or claim of 512 rows costs tens of
microseconds, whatever the number of resident samples. For each (task, required fields) that was
ever asked for there is a queue of ready samples, fed by the writes.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplane.errors import (
    CapacityError,
    CapacityTimeoutError,
    DataPlaneError,
    UnknownPartitionError,
)
from rlplane.partition import NOBODY, Batch, Claim, Partition, Put
from rlplane.rules import PartitionSpec, check_claim

__all__ = ["NOBODY", "Batch", "Claim", "ControlState", "Put"]

# So many blocks are counted faster without numpy.
_FEW = 256


class ControlState:
    """All partitions of one plane.

    Calls that may have to wait (``put``, ``claim``) return None when they were parked. What an operation
    completed for others is in ``answers`` afterwards, as (token, result or error) pairs, and the
    blocks that nobody refers to any more are in ``freed``; the owner of the state empties both.
    """

    def __init__(self, capacity: int | None = None) -> None:
        self.capacity = capacity
        self.partitions: dict[str, Partition] = {}
        self.live = 0
        self.answers: list[tuple[Any, Any]] = []
        self.freed: list[int] = []
        self._waiting_puts: deque[Put] = deque()
        self.stamp = 0
        self._block_rows: dict[int, int] = {}
        self._block_home: dict[int, tuple[Partition, int]] = {}

    def partition(self, partition_id: str) -> Partition:
        """The partition of that name, or ``UnknownPartitionError``."""
        try:
            return self.partitions[partition_id]
        except (KeyError, TypeError):
            known = ", ".join(map(repr, sorted(self.partitions)[:8])) or "none yet"
            raise UnknownPartitionError(
                f"partition {partition_id!r} is not registered; registered are: {known}"
            ) from None

    def register(self, spec: PartitionSpec) -> None:
        """Create a partition, or replace the schema and task list of one that exists."""
        partition = self.partitions.get(spec.partition_id)
        if partition is None:
            self.partitions[spec.partition_id] = Partition(spec)
            return
        self.answers.extend((claim.token, error) for claim, error in partition.register(spec))
        self._serve(partition)

    def put(self, put: Put) -> bool | None:
        """Write at once (True), or park until there is room (None). Raises with nothing changed."""
        partition = self.partition(put.partition_id)
        new = partition.check_put(put)
        if self.capacity is not None and new:
            self._refuse_impossible(new, self.capacity)
            # Behind the puts that already wait, or a large one would starve.
            if self._waiting_puts or self.live + new > self.capacity:
                self._waiting_puts.append(put)
                return None
        self._write(partition, put)
        return True

    def claim(self, claim: Claim, *, blocking: bool) -> Batch | None:
        """Claim at once, or park (None) when ``blocking`` and not enough is ready."""
        partition = self.partition(claim.partition_id)
        task = partition.task(claim.task)
        check_claim(partition.spec, claim.batch_size, partition.columns, claim.fields)
        queue = partition.queue(task, claim.fields)
        if not blocking:
            return partition.take(task, queue, claim, claim.batch_size)
        task.waiters.append(claim)
        before = len(self.answers)
        self._serve(partition)
        # Our own answer, if there is one, is returned and not announced.
        for place in range(before, len(self.answers)):
            if self.answers[place][0] is claim.token:
                result = self.answers.pop(place)[1]
                assert isinstance(result, Batch)
                return result
        return None

    def give_up(self, token: Any) -> DataPlaneError | None:
        """Take a parked request back and return the error that its caller gets; None if it is not parked."""
        for put in self._waiting_puts:
            if put.token is token:
                self._waiting_puts.remove(put)
                self._retry_puts()
                return CapacityTimeoutError(
                    f"no room for {len(put.ids)} samples in partition {put.partition_id!r}: "
                    f"{self.live} of storage_capacity {self.capacity} are in use; nothing was written"
                )
        for partition in self.partitions.values():
            for task in partition.tasks.values():
                for claim in task.waiters:
                    if claim.token is token:
                        task.waiters.remove(claim)
                        error = partition.timeout_error(task, claim)
                        self._serve(partition)
                        return error
        return None

    def clear(self, partition_id: str, ids: Sequence[str] | None) -> int:
        """Drop samples (all of them for None) and return how many there were."""
        partition = self.partition(partition_id)
        rows = partition.live_rows(ids)
        if len(rows):
            self._release_blocks(partition.remove(rows))
            self.live -= len(rows)
            # A sample that is gone may have been all that stood between a claim and its tail.
            self._serve(partition)
            self._retry_puts()
        return len(rows)

    def clear_written_by(self, partition_id: str, owner: int) -> int:
        """Drop what ``owner`` wrote and is still there, or everything if it never wrote here."""
        partition = self.partition(partition_id)
        rows = partition.written_by(owner)
        return self.clear(partition_id, None if rows is None else partition.ids[rows].tolist())

    def unclaim(self, partition_id: str, task: str, ids: Sequence[str], owner: int) -> None:
        """Take back a claim that never reached its caller: what that owner still holds of it goes to the
        front of the queue."""
        partition = self.partition(partition_id)
        if task in partition.tasks:
            rows = partition.live_rows(ids)
            partition.return_rows(partition.tasks[task], rows[partition.tasks[task].owner[rows] == owner])
            self._serve(partition)

    def adopt_blocks(self, partition: Partition, blocks: NDArray[np.int64], sizes: dict[int, int]) -> None:
        """Count the rows of blocks that a restored column refers to."""
        used, rows = np.unique(blocks[blocks >= 0], return_counts=True)
        for block, count in zip(used.tolist(), rows.tolist(), strict=True):
            self._block_rows[block] = count
            self._block_home[block] = (partition, sizes[block])
            partition.nbytes += sizes[block]

    def parked(self) -> list[Any]:
        """The tokens of all requests that wait."""
        claims = [
            claim.token
            for partition in self.partitions.values()
            for task in partition.tasks.values()
            for claim in task.waiters
        ]
        return [put.token for put in self._waiting_puts] + claims

    def holds(self, block: int) -> bool:
        """Whether a sample refers to the block."""
        return block in self._block_rows

    def abort(self, error: DataPlaneError, owner: int | None = None) -> None:
        """Answer every parked request (of one owner) with an error."""
        for put in [put for put in self._waiting_puts if owner in (None, put.owner)]:
            self._waiting_puts.remove(put)
            self.answers.append((put.token, error))
        for partition in self.partitions.values():
            for task in partition.tasks.values():
                ended = [claim for claim in task.waiters if owner in (None, claim.owner)]
                task.waiters = [claim for claim in task.waiters if claim not in ended]
                self.answers.extend((claim.token, error) for claim in ended)
            self._serve(partition)
        self._retry_puts()

    def release_owner(self, owner: int) -> int:
        """Forget a client that died: its parked requests go, its unfinished claims return to the front."""
        parked = [put for put in self._waiting_puts if put.owner == owner]
        for put in parked:
            self._waiting_puts.remove(put)
            self.freed.extend(put.blocks.values())
        returned = 0
        for partition in self.partitions.values():
            for task in partition.tasks.values():
                task.waiters = [claim for claim in task.waiters if claim.owner != owner]
                returned += partition.return_claims(task, owner)
            partition.forget_writer(owner)
            self._serve(partition)
        self._retry_puts()
        return returned

    def locate(
        self, partition_id: str, ids: Sequence[str], fields: Sequence[str]
    ) -> dict[str, tuple[NDArray[np.int64], NDArray[np.int32]]]:
        """For each field, the block and the position of every sample asked for."""
        return self.partition(partition_id).locate(ids, fields)

    def blocks(self) -> dict[int, int]:
        """Every block that samples refer to, with the number of rows that do."""
        return dict(self._block_rows)

    # How writes, waits and blocks work together.

    def _write(self, partition: Partition, put: Put) -> None:
        self.stamp += 1
        before = len(partition.rows)
        replaced = partition.write(put, self.stamp)
        self.live += len(partition.rows) - before
        if put.ids:
            sizes = put.nbytes or [0] * len(put.blocks)
            for block, nbytes in zip(put.blocks.values(), sizes, strict=True):
                self._block_rows[block] = len(put.ids)
                self._block_home[block] = (partition, nbytes)
                partition.nbytes += nbytes
        else:
            self.freed.extend(put.blocks.values())
        for blocks in replaced:
            self._release_blocks(blocks)
        self._serve(partition)

    def _release_blocks(self, blocks: NDArray[np.int64]) -> None:
        if len(blocks) <= _FEW:
            counts = dict(Counter(blocks.tolist()))
        else:
            unique, number = np.unique(blocks, return_counts=True)
            counts = dict(zip(unique.tolist(), number.tolist(), strict=True))
        counts.pop(-1, None)  # rows that had none
        for block, rows in counts.items():
            left = self._block_rows[block] - rows
            if left:
                self._block_rows[block] = left
                continue
            del self._block_rows[block]
            partition, nbytes = self._block_home.pop(block)
            partition.nbytes -= nbytes
            self.freed.append(block)

    @staticmethod
    def _refuse_impossible(new: int, capacity: int) -> None:
        if new > capacity:
            raise CapacityError(f"a put of {new} new samples can never fit into storage_capacity {capacity}")

    def _serve(self, partition: Partition) -> None:
        for task in partition.tasks.values():
            if task.waiters:
                self.answers.extend(partition.serve(task))

    def _retry_puts(self) -> None:
        while self._waiting_puts:
            put = self._waiting_puts[0]
            try:
                partition = self.partition(put.partition_id)
                new = partition.check_put(put)
                # A clear of samples that it was to overwrite may have made it larger than it was.
                self._refuse_impossible(new, self.capacity or 0)
                if self.live + new > (self.capacity or 0):
                    return
                self._waiting_puts.popleft()
                self._write(partition, put)
                self.answers.append((put.token, True))
            except DataPlaneError as error:
                self._waiting_puts.popleft()
                self.answers.append((put.token, error))
