"""The control state as bytes: what a checkpoint keeps of it, and how it is built again.

Rows are written in the order of their birth, so row numbers do not survive; block numbers are mapped to
those of the plane that loads. Queues are not kept: they follow from the stamps of the fields.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from rlplane.control.fields import FieldIndex
from rlplane.control.flow import SavedFlow
from rlplane.control.partition import Partition
from rlplane.control.requests import NOBODY
from rlplane.control.rules import PartitionSpec, check_ids
from rlplane.control.state import ControlState
from rlplane.control.steps import SavedStep, StepKey
from rlplane.errors import CheckpointError

__all__ = ["SCHEMA_VERSION", "BlockSize", "block_names", "dump_state", "restore_state"]

SCHEMA_VERSION = 2


class BlockSize(NamedTuple):
    """How large a block is."""

    nbytes: int
    rows: int


class _SavedField(msgspec.Struct):
    name: str
    declared: bool
    blocks: bytes
    positions: bytes
    stamps: bytes
    stamped: bool
    # The earlier pieces of rows that were written turn by turn: row, block and position of each, as int64.
    turns: bytes = b""


class _SavedTask(msgspec.Struct):
    name: str
    claimed: bytes
    unfinished: bytes
    kept: dict[str, int] = {}
    uses: bytes = b""


class _SavedPartition(msgspec.Struct):
    spec: PartitionSpec
    written: int
    ids: list[str]
    tags: list[dict[str, Any]]
    born: bytes
    columns: list[_SavedField]
    tasks: list[_SavedTask]
    # A sample keeps the group of its first write, whatever its tags say later. None: it never had one.
    groups: list[str | None] = []
    flow: SavedFlow = msgspec.field(default_factory=SavedFlow)
    group_sizes: dict[str, int] = {}
    steps: list[SavedStep] = []
    finished: bool = False
    # The numbers of the samples, by which TransferQueue's interface names them. Empty: numbered anew.
    serials: bytes = b""
    next_serial: int = 0


class _SavedState(msgspec.Struct):
    version: int
    stamp: int
    partitions: list[_SavedPartition]


def dump_state(state: ControlState) -> bytes:
    """All partitions with their samples, tags, places, cursors and unfinished claims."""
    partitions = []
    for partition in state.partitions.values():
        table = partition.table
        rows = table.live_rows(None)
        columns = [
            _SavedField(
                name,
                column.declared,
                column.block[rows].tobytes(),
                column.position[rows].tobytes(),
                column.stamp[rows].tobytes(),
                column.stamped,
                _saved_turns(column, rows),
            )
            for name, column in table.columns.items()
        ]
        tasks = [
            _SavedTask(
                name,
                task.claimed[rows].tobytes(),
                (task.owner[rows] != NOBODY).tobytes(),
                task.kept,
                b"" if task.uses is None else task.uses[rows].tobytes(),
            )
            for name, task in partition.tasks.items()
        ]
        ids, tags = table.ids[rows].tolist(), table.tags[rows].tolist()
        born, groups = table.born[rows].tobytes(), table.groups[rows].tolist()
        flow = partition.flow.saved(rows)
        partitions.append(
            _SavedPartition(
                table.spec,
                table.written,
                ids,
                tags,
                born,
                columns,
                tasks,
                groups,
                flow,
                partition.groups.sizes,
                partition.claims.steps.saved(),
                table.finished,
                table.serial[rows].tobytes(),
                table.next_serial,
            )
        )
    return msgspec.msgpack.encode(_SavedState(SCHEMA_VERSION, state.stamp, partitions))


def block_names(data: bytes) -> dict[int, str]:
    """For each block in ``data``, the partition and field that it belongs to."""
    names = {}
    for partition in msgspec.msgpack.decode(data, type=_SavedState).partitions:
        for column in partition.columns:
            blocks = np.concatenate((np.frombuffer(column.blocks, np.int64), _read_turns(column.turns)[:, 1]))
            for block in np.unique(blocks).tolist():
                names[block] = f"{partition.spec.partition_id}/{column.name}"
    return names


def restore_state(
    data: bytes,
    numbers: dict[int, int],
    blocks: dict[int, BlockSize],
    capacity: int | None,
    *,
    release_claims: bool = False,
) -> ControlState:
    """Build a state from ``data``.

    Args:
        data: What :func:`dump_state` made.
        numbers: The block numbers of this plane for those in ``data``.
        blocks: How large each block in ``data`` is.
        capacity: Of this plane.
        release_claims: Hand out again what had been claimed and not finished.
    """
    try:
        dump = msgspec.msgpack.decode(data, type=_SavedState)
        if dump.version != SCHEMA_VERSION:
            raise CheckpointError(
                f"the checkpoint has schema version {dump.version}; this rlplane reads {SCHEMA_VERSION}"
            )
        total = sum(len(partition.ids) for partition in dump.partitions)
        if capacity is not None and total > capacity:
            raise CheckpointError(f"the checkpoint has {total} samples; storage_capacity is {capacity}")
        state = ControlState(capacity)
        state.stamp = dump.stamp
        state.live = total
        sizes = {numbers[old]: size for old, size in blocks.items()}
        for saved in dump.partitions:
            _restore_partition(state, saved, numbers, sizes, release_claims)
    except CheckpointError:
        raise
    except (
        msgspec.MsgspecError,
        LookupError,
        ValueError,
        TypeError,
        ArithmeticError,
        RecursionError,
    ) as error:
        raise CheckpointError(f"the checkpoint's control state cannot be used: {error}") from error
    return state


def _restore_partition(
    state: ControlState,
    saved: _SavedPartition,
    numbers: dict[int, int],
    sizes: dict[int, BlockSize],
    release_claims: bool,
) -> None:
    spec = saved.spec
    if spec.partition_id in state.partitions:
        raise ValueError(f"it has partition {spec.partition_id!r} twice")
    PartitionSpec.checked(
        spec.partition_id,
        spec.fields,
        spec.num_samples,
        spec.tasks,
        spec.group_size,
        spec.enums,
        spec.flow,
        spec.produces,
    )
    count = len(check_ids(saved.ids))
    if len(saved.tags) != count or len(saved.groups) not in (0, count):
        raise ValueError(f"{count} samples have {len(saved.tags)} tags and {len(saved.groups)} groups")
    partition = state.partitions[spec.partition_id] = Partition(spec)
    table = partition.table
    rows = partition.adopt(saved.ids, saved.tags, saved.groups, _read(saved.born, np.float64, count))
    if saved.serials:
        table.serial[rows] = _read(saved.serials, np.int64, count)
    # Also when nothing is left of what had the numbers below.
    table.next_serial = max(table.next_serial, saved.next_serial)
    table.written = saved.written
    table.finished = saved.finished
    partition.groups.sizes.update(saved.group_sizes)
    for step in saved.steps:
        partition.claims.steps.add(StepKey(step.task, step.step), step.parts)
    partition.flow.load(saved.flow, rows)
    for item in saved.columns:
        column = table.columns.setdefault(item.name, FieldIndex(table.size, item.declared))
        if column.produced:
            raise ValueError(f"it has field {item.name!r} twice")
        blocks = _renumbered(_read(item.blocks, np.int64, count), numbers)
        positions = _read(item.positions, np.int32, count)
        turns = _read_turns(item.turns).copy()
        turns[:, 1] = _renumbered(turns[:, 1], numbers)
        every = np.concatenate((blocks, turns[:, 1]))
        _check_positions(item.name, every, np.concatenate((positions, turns[:, 2])), sizes)
        for place, block, position in turns.tolist():
            if not 0 <= place < count or block < 0:
                raise ValueError(f"a turn of field {item.name!r} belongs to no sample")
            column.turns.setdefault(int(rows[place]), []).append((block, position))
        column.block[rows] = blocks
        column.position[rows] = positions
        column.stamp[rows] = _read(item.stamps, np.int64, count)
        column.produced = int((blocks >= 0).sum())
        column.stamped = item.stamped
        state.adopt_blocks(partition, every, {block: size.nbytes for block, size in sizes.items()})
    for cursor in saved.tasks:
        claimed = _read(cursor.claimed, np.bool_, count).copy()
        unfinished = _read(cursor.unfinished, np.bool_, count)
        if release_claims:
            claimed &= ~unfinished
        task = partition.tasks[cursor.name]
        task.claimed[rows] = claimed
        task.count = int(claimed.sum())
        task.kept.update(cursor.kept)
        if cursor.uses:
            task.uses = np.zeros(table.size, np.int64)
            task.uses[rows] = _read(cursor.uses, np.int64, count)
        if release_claims and spec.group_size:
            partition.cursors.count_kept(task, rows[unfinished])
        if release_claims and spec.flow is not None and cursor.name == spec.flow.training_task:
            partition.flow.untrain(rows[unfinished].tolist())
    if spec.flow is not None and spec.flow.group_timeout_s is not None:
        state.has_clocks = True
        partition.groups.resume_clocks()


def _saved_turns(column: FieldIndex, rows: NDArray[np.int64]) -> bytes:
    if not column.turns:
        return b""
    turns = [
        (place, block, position)
        for place, row in enumerate(rows.tolist())
        for block, position in column.turns.get(row, ())
    ]
    return np.array(turns, np.int64).tobytes()


def _read_turns(data: bytes) -> NDArray[np.int64]:
    return np.frombuffer(data, np.int64).reshape(-1, 3)


def _check_positions(
    field: str, blocks: NDArray[np.int64], positions: NDArray[Any], sizes: dict[int, BlockSize]
) -> None:
    """Refuse rows that lie outside of their block: a reader would read other memory."""
    produced = blocks >= 0
    used, place = np.unique(blocks[produced], return_inverse=True)
    rows = np.array([sizes[block].rows for block in used.tolist()], np.int64)
    at = positions[produced]
    if len(at) and bool(((at < 0) | (at >= rows[place])).any()):
        raise ValueError(f"a row of field {field!r} lies outside of its block")


def _read(data: bytes, dtype: type[np.generic], count: int) -> NDArray[Any]:
    array = np.frombuffer(data, dtype)
    if len(array) != count:
        # numpy would stretch a single value over all samples.
        raise ValueError(f"{len(array)} values for {count} samples")
    return array


def _renumbered(blocks: NDArray[np.int64], numbers: dict[int, int]) -> NDArray[np.int64]:
    old, place = np.unique(blocks, return_inverse=True)
    missing = [block for block in old.tolist() if block >= 0 and block not in numbers]
    if missing:
        raise CheckpointError(f"the checkpoint lacks block {missing[0]} that its control state refers to")
    new = np.array([-1 if block < 0 else numbers[block] for block in old.tolist()], np.int64)
    renumbered: NDArray[np.int64] = new[place] if len(blocks) else blocks
    return renumbered
