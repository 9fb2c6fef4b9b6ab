"""The control state as bytes: what a checkpoint keeps of it, and how it is built again.

Rows are written in the order of their birth, so row numbers do not survive; block numbers are mapped to
those of the plane that loads. Queues are not kept: they follow from the stamps of the fields.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from rlplane.errors import CheckpointError
from rlplane.index import ControlState
from rlplane.partition import NOBODY, Column, Partition
from rlplane.rules import PartitionSpec, check_ids

__all__ = ["SCHEMA_VERSION", "block_names", "dump_state", "restore_state"]

SCHEMA_VERSION = 1


class _Column(msgspec.Struct):
    name: str
    declared: bool
    blocks: bytes
    positions: bytes
    stamps: bytes
    stamped: bool


class _Task(msgspec.Struct):
    name: str
    claimed: bytes
    unfinished: bytes


class _Partition(msgspec.Struct):
    spec: PartitionSpec
    written: int
    ids: list[str]
    tags: list[dict[str, Any]]
    born: bytes
    columns: list[_Column]
    tasks: list[_Task]
    # A sample keeps the group of its first write, whatever its tags say later. None: it never had one.
    groups: list[str | None] = []


class _State(msgspec.Struct):
    version: int
    stamp: int
    partitions: list[_Partition]


def dump_state(state: ControlState) -> bytes:
    """All partitions with their samples, tags, places, cursors and unfinished claims."""
    partitions = []
    for partition in state.partitions.values():
        rows = partition.live_rows(None)
        columns = [
            _Column(
                name,
                column.declared,
                column.block[rows].tobytes(),
                column.position[rows].tobytes(),
                column.stamp[rows].tobytes(),
                column.stamped,
            )
            for name, column in partition.columns.items()
        ]
        tasks = [
            _Task(name, task.claimed[rows].tobytes(), (task.owner[rows] != NOBODY).tobytes())
            for name, task in partition.tasks.items()
        ]
        ids, tags = partition.ids[rows].tolist(), partition.tags[rows].tolist()
        born, groups = partition.born[rows].tobytes(), partition.groups[rows].tolist()
        partitions.append(
            _Partition(partition.spec, partition.written, ids, tags, born, columns, tasks, groups)
        )
    return msgspec.msgpack.encode(_State(SCHEMA_VERSION, state.stamp, partitions))


def block_names(data: bytes) -> dict[int, str]:
    """For each block in ``data``, the partition and field that it belongs to."""
    names = {}
    for partition in msgspec.msgpack.decode(data, type=_State).partitions:
        for column in partition.columns:
            for block in np.unique(np.frombuffer(column.blocks, np.int64)).tolist():
                names[block] = f"{partition.spec.partition_id}/{column.name}"
    return names


def restore_state(
    data: bytes,
    numbers: dict[int, int],
    sizes: dict[int, int],
    capacity: int | None,
    *,
    release_claims: bool = False,
) -> ControlState:
    """Build a state from ``data``.

    Args:
        data: What :func:`dump_state` made.
        numbers: The block numbers of this plane for those in ``data``.
        sizes: The size in bytes of each block in ``data``.
        capacity: Of this plane.
        release_claims: Hand out again what had been claimed and not finished.
    """
    try:
        dump = msgspec.msgpack.decode(data, type=_State)
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
        new_sizes = {numbers[old]: size for old, size in sizes.items()}
        for saved in dump.partitions:
            _restore_partition(state, saved, numbers, new_sizes, release_claims)
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
    saved: _Partition,
    numbers: dict[int, int],
    sizes: dict[int, int],
    release_claims: bool,
) -> None:
    spec = saved.spec
    if spec.partition_id in state.partitions:
        raise ValueError(f"it has partition {spec.partition_id!r} twice")
    PartitionSpec.checked(
        spec.partition_id, spec.fields, spec.num_samples, spec.tasks, spec.group_size, spec.enums
    )
    count = len(check_ids(saved.ids))
    if len(saved.tags) != count or len(saved.groups) not in (0, count):
        raise ValueError(f"{count} samples have {len(saved.tags)} tags and {len(saved.groups)} groups")
    partition = state.partitions[spec.partition_id] = Partition(spec)
    rows = partition.adopt(saved.ids, saved.tags, saved.groups, _read(saved.born, np.float64, count))
    partition.written = saved.written
    for item in saved.columns:
        column = partition.columns.setdefault(item.name, Column(partition.size, item.declared))
        if column.produced:
            raise ValueError(f"it has field {item.name!r} twice")
        blocks = _renumbered(_read(item.blocks, np.int64, count), numbers)
        column.block[rows] = blocks
        column.position[rows] = _read(item.positions, np.int32, count)
        column.stamp[rows] = _read(item.stamps, np.int64, count)
        column.produced = int((blocks >= 0).sum())
        column.stamped = item.stamped
        state.adopt_blocks(partition, blocks, sizes)
    for cursor in saved.tasks:
        claimed = _read(cursor.claimed, np.bool_, count).copy()
        if release_claims:
            claimed &= ~_read(cursor.unfinished, np.bool_, count)
        task = partition.tasks[cursor.name]
        task.claimed[rows] = claimed
        task.count = int(claimed.sum())


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
