"""One partition of the control state: what is declared of it, how it is written, and what it consists of.

See :mod:`rlplane.control.state` for the whole. The samples are in a table (:mod:`rlplane.control.samples`)
that all parts share; what each part knows beside it is its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplane.control.arrays import in_pieces
from rlplane.control.claims import Claims
from rlplane.control.cursors import Cursors, TaskCursor
from rlplane.control.fields import BlockRows, FieldIndex, Rows
from rlplane.control.flow import FlowState
from rlplane.control.flow_control import FlowControl
from rlplane.control.group_members import GroupMembers
from rlplane.control.group_names import GroupNames
from rlplane.control.looking import Looking
from rlplane.control.names import Names
from rlplane.control.requests import NOBODY, Claim, Effects, LostRows, Put
from rlplane.control.rules import PartitionSpec, group_of, own_group_size
from rlplane.control.samples import NO_ROWS, SampleTable, some
from rlplane.control.snapshots import identity_of, ids_of
from rlplane.errors import (
    DataPlaneError,
    InvalidRequestError,
    MissingDataError,
    UnknownFieldError,
    UnknownTaskError,
)

# Up to this many references are counted faster one by one than by numpy.unique.
_FEW = 256
# Ended in some ten milliseconds. A number and not a time: a journal that is repeated has the same slices.
_GROUPS_AT_ONCE = 512
TIMEOUT = "timeout"
"""Why a group was closed, or given up, that had waited too long."""


class Partition:
    """The samples of one data flow, and everything that is done with them."""

    def __init__(self, spec: PartitionSpec, version: int = 1) -> None:
        self.version = version
        self.nbytes = 0
        # By block: how many rows refer to it, and how large it is.
        self.block_rows: dict[int, int] = {}
        self._block_sizes: dict[int, int] = {}
        self.table = SampleTable(spec)
        self.flow = FlowState(self.table.size)
        self.groups = GroupMembers(self.table)
        self.looking = Looking(self.table)
        self.cursors = Cursors(self.table, self.groups, self.flow, self.looking)
        self.flow_control = FlowControl(self.table, self.groups, self.flow, self.cursors, self.looking)
        self.claims = Claims(
            self.table, self.groups, self.flow, self.cursors, self.looking, self.flow_control
        )

    @property
    def spec(self) -> PartitionSpec:
        """What was registered."""
        return self.table.spec

    @property
    def rows(self) -> Names:
        """The row of each sample."""
        return self.table.rows

    @property
    def ids(self) -> NDArray[Any]:
        """The sample of each row."""
        return self.table.ids

    @property
    def tags(self) -> NDArray[Any]:
        """The tags of each row."""
        return self.table.tags

    @property
    def columns(self) -> dict[str, FieldIndex]:
        """Where the values of each field are."""
        return self.table.columns

    @property
    def tasks(self) -> dict[str, TaskCursor]:
        """The tasks by name."""
        return self.cursors.tasks

    def task(self, name: str) -> TaskCursor:
        """The task of that name, or ``UnknownTaskError``."""
        return self.cursors.task(name)

    def live_rows(self, ids: Sequence[str] | None) -> Rows:
        """See :meth:`~rlplane.control.samples.SampleTable.live_rows`."""
        return self.table.live_rows(ids)

    def names(self) -> Sequence[str]:
        """The ids of all samples, by birth."""
        return ids_of(self.table, self.live_rows(None))

    # Registration

    def register(self, spec: PartitionSpec) -> list[tuple[Claim, DataPlaneError]]:
        """Take a new schema; return the parked claims that it makes impossible, each with its error."""
        table = self.table
        if spec.group_size != self.spec.group_size:
            if spec.group_size:
                # Refused before anything changes when a live sample belongs to no group.
                rows, names = table.live_rows(None), self.looking.group_names or GroupNames(table)
                groups = names(rows)
                table.about_to_differ(rows)
                table.groups[rows] = groups
                self.looking.group_names = None
            for task in self.tasks.values():
                task.queues.clear()
                task.kept.clear()
        self.version += 1
        is_regrouped = spec.group_size != self.spec.group_size
        table.declare(spec)
        if is_regrouped:
            self.groups.begin()
        gone: list[tuple[Claim, DataPlaneError]] = []
        for task in self.tasks.values():
            refused = {claim: error for claim in task.waiting if (error := self._refusal(claim)) is not None}
            gone.extend(refused.items())
            task.waiting = [claim for claim in task.waiting if claim not in refused]
        self.cursors.declare()
        self.flow_control.declare()
        return gone

    def _refusal(self, claim: Claim) -> DataPlaneError | None:
        """Why a claim that waits cannot be answered any more."""
        spec = self.spec
        if claim.task not in spec.tasks:
            return UnknownTaskError(f"task {claim.task!r} was removed by a new registration")
        if not self.columns.keys() >= set(claim.fields):
            text = f"one of the fields {claim.fields} was removed by a new registration"
            return UnknownFieldError(text)
        if spec.group_size and claim.batch_size % spec.group_size:
            text = f"batch_size {claim.batch_size} is not a multiple of the new grpo_group_size"
            return InvalidRequestError(f"{text} {spec.group_size}")
        return None

    # Writing

    def check_put(self, put: Put) -> int:
        """The number of new samples in a put; raises if it cannot be written. What it finds is good until
        the partition changes."""
        if put.staged is not None:
            put.staged.catch_up()
            put.sizes = put.staged.sizes
            if put.must_exist and put.staged.new:
                raise self._missing(put, put.staged.new_ids())
            if put.appends:
                self._check_unfinished(put)
            return put.staged.new
        put.known, put.groups, put.sizes = self.table.rows.find(put.ids), (), {}
        new = put.known.count(None)
        if put.must_exist and new:
            raise self._missing(put, [i for i, row in zip(put.ids, put.known, strict=True) if row is None])
        if put.appends:
            self._check_unfinished(put)
        if self.table.spec.group_size and new:
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

    def _missing(self, put: Put, gone: list[str]) -> MissingDataError:
        return MissingDataError(
            f"partition {self.spec.partition_id!r} does not have {some(gone)} any more "
            f"({len(gone)} of {len(put.ids)} samples of a write with must_exist); nothing was written"
        )

    def _check_unfinished(self, put: Put) -> None:
        rows = _known_rows(put)
        for name in put.blocks:
            column = self.columns.get(name)
            whole = NO_ROWS if column is None else rows[column.block[rows] >= 0]
            if len(whole):
                raise InvalidRequestError(
                    f"field {name!r} of partition {self.spec.partition_id!r} is finished for "
                    f"{some(self.ids[whole[:4]].tolist())} "
                    f"({len(whole)} of {len(put.ids)} samples of an append), so nothing can be appended; "
                    "nothing was written"
                )

    def write(self, put: Put) -> list[BlockRows]:
        """Write a checked put; return what its rows referred to before."""
        if not put.ids:
            return []
        if self.table.savers:
            self.table.about_to_differ(_known_rows(put))
        retagged = NO_ROWS
        if put.tags is not None:
            retagged = _known_rows(put)
        if len(retagged):
            for queue in self.cursors.queues():
                queue.withdraw(retagged)
        rows, fresh = self._add(put)
        stamps = self.table.stamps(len(rows))
        self.table.stamp[fresh] = stamps[: len(fresh)]
        if put.tags is not None:
            # What was staged is known already.
            self.looking.tagged(rows if put.staged is None else retagged, retagged)
        if len(retagged):
            for queue in self.cursors.queues():
                queue.readmit(retagged)
        all_new = len(fresh) == len(rows)
        replaced = self._write_fields(put, rows, stamps, all_new=all_new)
        self.groups.start_clocks(rows, put.clock)
        written = frozenset(put.blocks) if put.finishes else frozenset()
        if put.owner != NOBODY:
            self.table.mark_written(rows, put.owner, all_new=all_new)
            if written and not all_new:
                self.cursors.finish_work(rows, put.owner, written)
        changed = bool(len(fresh)) or put.tags is not None
        self.cursors.offer(rows, written, all_new=all_new, changed=changed)
        return replaced

    def _write_fields(self, put: Put, rows: Rows, stamps: Rows, *, all_new: bool) -> list[BlockRows]:
        positions = np.arange(len(rows), dtype=np.int32)
        replaced: list[BlockRows] = []
        for name, block in put.blocks.items():
            column = self.columns.get(name)
            if column is None:
                column = self.columns[name] = FieldIndex(self.table.size, False)
            column.stamped = True
            if not put.finishes:
                column.turns.add(rows, block, positions)
                continue
            if column.turns and not put.appends:
                replaced.append(column.turns.forget(rows))
            old = column.write(rows, block, positions, stamps, all_new=all_new)
            if old is not None:
                replaced.append(old)
        return replaced

    def _add(self, put: Put) -> tuple[Rows, Rows]:
        """The rows of a put, and those of them that are new."""
        size = self.table.size
        rows, fresh = self.table.add(put) if put.staged is None else put.staged.publish()
        self._follow(size)
        if put.staged is not None:
            self.groups.make_live(fresh, put.sizes)
        elif len(fresh):
            self.groups.add(fresh, put.sizes)
        return rows, fresh

    def stage(
        self, ids: list[str], tags: list[dict[str, Any]] | None, groups: Sequence[str | None]
    ) -> list[int]:
        """See :meth:`~rlplane.control.samples.SampleTable.stage`."""
        size = self.table.size
        rows = self.table.stage(ids, tags, groups)
        self._follow(size)
        self.groups.stage(np.array(rows, np.int64))
        return rows

    def settle(self) -> None:
        """After it was read from a dump: have columns that can grow, before the first put has to wait for
        that."""
        self.table.make_room(self.table.size)
        self._follow(0)

    def _follow(self, before: int) -> None:
        """Grow with the table, if that has more rows than before."""
        if self.table.size > before:
            self.flow.grow(self.table.size)
            for task in self.tasks.values():
                task.grow(self.table.size)

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
        rows, _ = self._add(put) if ids else (NO_ROWS, NO_ROWS)
        self.table.born[rows] = born
        self.looking.tagged(rows, NO_ROWS)
        return rows

    def remove(self, rows: Rows) -> list[BlockRows]:
        """Drop rows; return what they referred to, for each field."""
        self.table.about_to_differ(rows)
        for task in self.tasks.values():
            task.remove(rows)
        self.looking.remove(rows)
        if self.claims.steps:
            self.claims.steps.remove(self.ids[rows].tolist())
        self.flow_control.remove(rows)
        for name in self.groups.remove(rows):
            for task in self.tasks.values():
                task.kept.pop(name, None)
        return self.table.remove(rows)

    # Blocks

    def add_blocks(self, blocks: Iterable[int], rows: int, sizes: Iterable[int]) -> None:
        """So many rows, or so many more, refer to each of these blocks of these sizes."""
        for block, nbytes in zip(blocks, sizes, strict=True):
            if block not in self.block_rows:
                self._block_sizes[block] = nbytes
                self.nbytes += nbytes
            self.block_rows[block] = self.block_rows.get(block, 0) + rows

    def release_rows(self, blocks: NDArray[np.int64], positions: NDArray[np.int32], effects: Effects) -> None:
        """Rows do not refer to these blocks any more; those that no other row refers to are freed."""
        if not len(blocks):
            return
        counts: dict[int, int] = {}
        if len(blocks) <= _FEW:
            numbers = blocks.tolist()
            if numbers.count(numbers[0]) == len(numbers):  # of one write, as most are
                counts[numbers[0]] = len(numbers)
            else:
                for block in numbers:
                    counts[block] = counts.get(block, 0) + 1
        else:
            unique, number = np.unique(blocks, return_counts=True)
            counts = dict(zip(unique.tolist(), number.tolist(), strict=True))
        counts.pop(-1, None)  # rows that had none
        is_part = False
        for block, rows in counts.items():
            left = self.block_rows[block] - rows
            if left:
                self.block_rows[block] = left
                is_part = True
                continue
            del self.block_rows[block]
            self.nbytes -= self._block_sizes.pop(block)
            effects.freed.append(block)
        if is_part:
            effects.dropped.append((blocks, positions))

    # Losses

    def lost_fields(self, lost: LostRows, rows: Rows) -> dict[str, Rows]:
        """By field, those of the rows that have lost their value or a turn of it."""
        fields = {name: column.rows_in(lost, rows) for name, column in self.columns.items()}
        return {name: rows for name, rows in fields.items() if len(rows)}

    def lose(self, name: str, rows: Rows) -> BlockRows:
        """Rows have lost their value of a field; return what they referred to."""
        self.table.about_to_differ(rows)
        whole, gone = self.columns[name].lose(rows)
        for task in self.tasks.values():
            for (required, _), queue in task.queues.items():
                if name in required:
                    queue.discard(whole)
        return gone

    # Groups that end short

    def close_group(self, name: str, reason: str, fields: Sequence[str]) -> Rows:
        """Make the finished members of a group the whole of it; return the rows of the others."""
        members = self.groups.of(name)
        for field in fields:
            self.table.column(field)
        finished = self.groups.finished(members, fields)
        expected = self.groups.size_of(name)
        if finished and len(finished) < expected:
            self.groups.sizes[name] = len(finished)
            self.groups.closed[name] = int(self.table.stamps(1)[0])
            self.flow.closed_short[reason] += 1
            short = {"expected": expected, "members": len(finished), "reason": reason}
            rows = np.array(finished, np.int64)
            self.table.about_to_change(rows)
            self.table.about_to_differ(rows)
            for row in finished:
                self.tags[row] = {**self.tags[row], "short_group": short}
            self.looking.tagged(rows, rows)
            for touched in self.table.watchers:
                touched.update(self.ids[rows].tolist())
        for task in self.tasks.values():
            self.cursors.keep(task, name, finished)
            for queue in task.queues.values():
                queue.look_again(name, members)
        left = set(finished)
        return np.array([row for row in members if row not in left], np.int64)

    def overdue(self, clock: float) -> Rows:
        """Close or give up the first groups that have waited long enough; return the rows that are given up.
        The others are as overdue as before."""
        gone: list[Rows] = []
        policy, clocks = self.spec.flow, self.groups.clocks
        if policy is None or policy.group_timeout_s is None:
            return NO_ROWS
        for name, began in list(itertools.islice(clocks.items(), _GROUPS_AT_ONCE)):
            if began is None:
                clocks[name] = clock
                continue
            if began + policy.group_timeout_s > clock:
                break
            del clocks[name]  # it waits no longer, whole or not
            members = list(self.groups.of(name))
            finished = len(self.groups.finished(members, self.groups.finished_fields))
            if not members or finished >= self.groups.size_of(name):
                continue
            if finished >= policy.min_group_size:
                gone.append(self.close_group(name, TIMEOUT, policy.finished_fields))
            else:
                gone.append(np.array(members, np.int64))
        return np.concatenate(gone) if gone else NO_ROWS

    # What it looks like

    def inspect(self, rows: Rows) -> dict[str, Any]:
        """What is known of samples: a byte per sample says whether it has a field, and whether a task has
        claimed it."""
        columns = {name: column.block for name, column in self.columns.items()}
        pieces = list(in_pieces(rows))
        fields = {name: [(block[at] >= 0).tobytes() for _, at in pieces] for name, block in columns.items()}
        tasks = {name: [task.claimed[at].tobytes() for _, at in pieces] for name, task in self.tasks.items()}
        return {
            **identity_of(self.table, rows),
            "fields": {name: b"".join(parts) for name, parts in fields.items()},
            "tasks": {name: b"".join(parts) for name, parts in tasks.items()},
        }

    def consumed(self, tasks: Sequence[str]) -> bool:
        """Whether something was written and every live sample is claimed by each of the tasks."""
        chosen = [self.task(name) for name in tasks]
        if not self.table.written and not self.rows:
            return False
        return all(task.settled == len(self.rows) for task in chosen)

    def status(self, now: float) -> dict[str, Any]:
        """The counts of ``DataPlaneClient.partition_status``."""
        live = len(self.rows)
        oldest = now - float(self.table.born[self.table.oldest()]) if live else None
        return {
            "partition_id": self.spec.partition_id,
            "num_samples": self.spec.num_samples,
            "samples": live,
            "written": self.table.written,
            "bytes": self.nbytes,
            "oldest_age_s": oldest,
            "grpo_group_size": self.spec.group_size,
            "fields": {
                name: {"declared": column.declared, "produced": column.produced}
                | ({"lost": len(column.lost)} if column.lost else {})
                for name, column in self.columns.items()
            },
            "tasks": {
                name: {
                    "claimed": task.count,
                    "unclaimed": live - task.count,
                    "waiting": len(task.waiting),
                    "writes": sorted({*task.writes, *self.spec.produces.get(name, ())}),
                    **self.claims.readiness(task),
                }
                for name, task in self.tasks.items()
            },
            "flow": self.flow_status(),
            "finished": self.table.finished,
        }

    def flow_status(self) -> dict[str, Any]:
        """What the policy has done so far."""
        policy = self.spec.flow
        ready = None
        if policy is not None and policy.is_gated:
            ready = self.claims.readiness(self.tasks[policy.admitting_task])["ready"]
        return self.flow_control.status(ready or 0)


def _known_rows(put: Put) -> Rows:
    """The rows of those of a checked put's samples that exist."""
    if put.staged is not None:
        return put.staged.known_rows
    return np.array([row for row in put.known if row is not None], np.int64)
