"""How a control state is built again from its bytes: piece by piece, so that whoever builds it can do other
things between."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from rlplane.control.arrays import filled
from rlplane.control.dump import (
    SCHEMA_VERSION,
    SavedField,
    SavedPartition,
    SavedState,
    SavedTask,
    read_turns,
)
from rlplane.control.fields import FieldIndex, Rows
from rlplane.control.flow import SavedFlow
from rlplane.control.partition import Partition
from rlplane.control.rules import PartitionSpec, check_ids
from rlplane.control.samples import NO_ROWS
from rlplane.control.state import ControlState
from rlplane.control.steps import StepKey
from rlplane.errors import CheckpointError

# Built within some ten milliseconds.
_SAMPLES_AT_ONCE = 4096
_encode = msgspec.msgpack.Encoder().encode
_Sliced = TypeVar("_Sliced", bytes, list[Any])


class BlockSize(NamedTuple):
    """How large a block is."""

    nbytes: int
    rows: int


class SavedPiece(msgspec.Struct):
    """Some samples of a partition, with everything that a checkpoint says of them. What is not of samples is
    in the last piece."""

    stamp: int
    partition: SavedPartition
    is_first: bool
    is_last: bool


def pieces_of(data: bytes) -> Iterator[bytes]:
    """What a ``StateDump`` wrote, in pieces for a :class:`StateLoader`."""
    with _refusals():
        saved = msgspec.msgpack.decode(data, type=SavedState)
        if saved.version != SCHEMA_VERSION:
            raise CheckpointError(
                f"the checkpoint has schema version {saved.version}; this rlplane reads {SCHEMA_VERSION}"
            )
        for partition in saved.partitions:
            for start in range(0, max(len(partition.ids), 1), _SAMPLES_AT_ONCE):
                stop = start + _SAMPLES_AT_ONCE
                is_last = stop >= len(partition.ids)
                some = _Cut(start, None if is_last else stop).partition(partition)
                yield _encode(SavedPiece(saved.stamp, some, start == 0, is_last))


class _Cut:
    """Samples from ``start`` to ``stop``, to the end for None, so that what is too long is noticed."""

    def __init__(self, start: int, stop: int | None) -> None:
        self._start, self._stop = start, stop

    def partition(self, saved: SavedPartition) -> SavedPartition:
        if len(saved.groups) not in (0, len(saved.ids)):
            raise ValueError(f"{len(saved.ids)} samples have {len(saved.groups)} groups")
        rest: dict[str, Any] = {}
        if self._stop is not None:
            rest = {"flow": SavedFlow(), "group_sizes": {}, "steps": [], "closed": {}, "finished_steps": []}
        return msgspec.structs.replace(
            saved,
            ids=self._of(saved.ids),
            tags=self._of(saved.tags),
            groups=self._of(saved.groups),
            born=self._of(saved.born, 8),
            serials=self._of(saved.serials, 8),
            stamps=self._of(saved.stamps, 8),
            columns=[self._field(field) for field in saved.columns],
            tasks=[self._task(task) for task in saved.tasks],
            **rest,
        )

    def _of(self, column: _Sliced, size: int = 1) -> _Sliced:
        return column[self._start * size : None if self._stop is None else self._stop * size]

    def _field(self, saved: SavedField) -> SavedField:
        turns = read_turns(saved.turns)
        chosen = turns[:, 0] >= self._start if self._start else np.ones(len(turns), bool)
        if self._stop is not None:
            chosen = chosen & (turns[:, 0] < self._stop)
        return msgspec.structs.replace(
            saved,
            blocks=self._of(saved.blocks, 8),
            positions=self._of(saved.positions, 4),
            stamps=self._of(saved.stamps, 8),
            turns=(turns[chosen] - [self._start, 0, 0]).tobytes(),
        )

    def _task(self, saved: SavedTask) -> SavedTask:
        return msgspec.structs.replace(
            saved,
            claimed=self._of(saved.claimed),
            unfinished=self._of(saved.unfinished),
            kept={} if self._stop is not None else saved.kept,
            uses=self._of(saved.uses, 8),
            places=self._of(saved.places, 8),
        )


class _LoadedPartition:
    """A partition so far as its pieces have come."""

    def __init__(self, partition: Partition) -> None:
        self.partition = partition
        self.rows: list[Rows] = []
        self.unfinished: dict[str, list[Rows]] = {name: [] for name in partition.tasks}
        self.is_whole = False


class StateLoader:
    """Builds a state from the pieces of a dump, given in order, and the blocks that they refer to, which come
    first."""

    def __init__(self, capacity: int | None) -> None:
        self._state = ControlState(capacity)
        self._numbers: dict[int, int] = {}
        self._sizes: dict[int, BlockSize] = {}
        self._loaded: list[_LoadedPartition] = []
        self._stamp = 0

    def add_blocks(self, numbers: Mapping[int, int], sizes: Mapping[int, BlockSize]) -> None:
        """Blocks of the dump have these numbers in this plane, and are so large."""
        self._numbers.update(numbers)
        self._sizes.update({numbers[block]: size for block, size in sizes.items()})

    def add(self, data: bytes) -> None:
        """Take the next piece."""
        with _refusals():
            piece = msgspec.msgpack.decode(data, type=SavedPiece)
            if piece.is_first:
                self._begin(piece.partition.spec)
            self._stamp = max(self._stamp, piece.stamp)
            loaded = self._loaded[-1]
            if loaded.is_whole or loaded.partition.spec != piece.partition.spec:
                raise ValueError("its pieces are not in order")
            self._add_samples(loaded, piece.partition)
            if piece.is_last:
                self._complete(loaded, piece.partition)

    def finish(self, *, release_claims: bool = False) -> ControlState:
        """The state that was built."""
        with _refusals():
            if not all(loaded.is_whole for loaded in self._loaded):
                raise ValueError("its last piece is missing")
            for loaded in self._loaded:
                # That it is released is one more.
                loaded.partition.table.events = self._stamp + release_claims
                if release_claims:
                    _release_claims(loaded)
            if sum(len(loaded.partition.block_rows) for loaded in self._loaded) != len(self._numbers):
                raise CheckpointError("the checkpoint has blocks that its control state does not refer to")
        return self._state

    def _begin(self, spec: PartitionSpec) -> None:
        state = self._state
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
        partition = state.partitions[spec.partition_id] = Partition(spec)
        self._loaded.append(_LoadedPartition(partition))

    def _add_samples(self, loaded: _LoadedPartition, saved: SavedPartition) -> None:
        partition, table = loaded.partition, loaded.partition.table
        count = len(check_ids(saved.ids))
        if len(saved.tags) != count or len(saved.groups) not in (0, count):
            raise ValueError(f"{count} samples have {len(saved.tags)} tags and {len(saved.groups)} groups")
        if not table.rows.keys().isdisjoint(saved.ids):
            raise ValueError("it has a sample twice")
        state = self._state
        state.live += count
        if state.capacity is not None and state.live > state.capacity:
            raise CheckpointError(
                f"the checkpoint has {state.live} samples; storage_capacity is {state.capacity}"
            )
        rows = partition.adopt(saved.ids, saved.tags, saved.groups, _read(saved.born, np.float64, count))
        loaded.rows.append(rows)
        if saved.serials:
            table.serial[rows] = _read(saved.serials, np.int64, count)
        if saved.stamps:
            table.stamp[rows] = _read(saved.stamps, np.int64, count)
        if len({item.name for item in saved.columns}) < len(saved.columns):
            raise ValueError("it has a field twice")
        for item in saved.columns:
            column = table.columns.get(item.name)
            if column is None:
                column = table.columns[item.name] = FieldIndex(table.size, item.declared)
            column.stamped = item.stamped
            self._add_places(partition, column, item, rows)
        for cursor in saved.tasks:
            claimed = _read(cursor.claimed, np.bool_, count)
            task = partition.tasks[cursor.name]
            task.claimed[rows] = claimed
            task.count += int(claimed.sum())
            loaded.unfinished[cursor.name].append(rows[_read(cursor.unfinished, np.bool_, count)])
            if cursor.uses:
                if task.uses is None:
                    task.uses = filled(table.size, np.int64, 0)
                task.uses[rows] = _read(cursor.uses, np.int64, count)
            if cursor.places:
                task.place(rows, _read(cursor.places, np.int64, count))

    def _add_places(self, partition: Partition, column: FieldIndex, item: SavedField, rows: Rows) -> None:
        """Where the rows of a field are."""
        count = len(rows)
        blocks = _renumbered(_read(item.blocks, np.int64, count), self._numbers)
        positions = _read(item.positions, np.int32, count)
        turns = read_turns(item.turns).copy()
        turns[:, 1] = _renumbered(turns[:, 1], self._numbers)
        every = np.concatenate((blocks, turns[:, 1]))
        _check_positions(item.name, every, np.concatenate((positions, turns[:, 2])), self._sizes)
        if len(turns):
            places = turns[:, 0]
            if places.min() < 0 or places.max() >= count or turns[:, 1].min() < 0:
                raise ValueError(f"a turn of field {item.name!r} belongs to no sample")
            column.turns.add_in_order(rows[places], turns[:, 1], turns[:, 2].astype(np.int32))
        column.block[rows] = blocks
        column.position[rows] = positions
        column.stamp[rows] = _read(item.stamps, np.int64, count)
        column.produced += int((blocks >= 0).sum())
        used, numbers = np.unique(every[every >= 0], return_counts=True)
        for block, number in zip(used.tolist(), numbers.tolist(), strict=True):
            partition.add_blocks([block], number, [self._sizes[block].nbytes])

    def _complete(self, loaded: _LoadedPartition, saved: SavedPartition) -> None:
        """What is not of samples, when all of these are there."""
        partition, table = loaded.partition, loaded.partition.table
        rows = np.concatenate(loaded.rows) if loaded.rows else NO_ROWS
        # Also when nothing is left of what had the numbers below.
        table.next_serial = max(table.next_serial, saved.next_serial)
        serials = table.serial[rows]
        if len(rows) and not (
            serials[0] >= 0 and (np.diff(serials) > 0).all() and serials[-1] < table.next_serial
        ):
            raise ValueError("the numbers of its samples are not in order")
        table.written, table.finished = saved.written, saved.finished
        partition.groups.sizes.update(saved.group_sizes)
        partition.groups.closed.update(saved.closed)
        steps = partition.claims.steps
        for step in saved.steps:
            steps.add(StepKey(step.task, step.step), step.parts)
            steps.remove([i for part in step.parts for i in part if i not in table.rows])
        steps.finished.update((StepKey(*key), None) for key in saved.finished_steps)
        partition.flow.load(saved.flow, rows)
        for cursor in saved.tasks:
            partition.tasks[cursor.name].kept.update(cursor.kept)
        flow = partition.spec.flow
        if flow is not None and flow.group_timeout_s is not None:
            self._state.has_clocks = True
            partition.groups.resume_clocks()
        loaded.is_whole = True


def _release_claims(loaded: _LoadedPartition) -> None:
    """Hand out again what was claimed and not finished."""
    partition, spec = loaded.partition, loaded.partition.spec
    for name, parts in loaded.unfinished.items():
        unfinished = np.concatenate(parts) if parts else NO_ROWS
        task = partition.tasks[name]
        task.count -= int(task.claimed[unfinished].sum())
        task.claimed[unfinished] = False
        if spec.group_size:
            partition.cursors.count_kept(task, unfinished)
        if spec.flow is not None and name == spec.flow.training_task:
            partition.flow.untrain(unfinished)


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """Whatever is wrong with the bytes is the checkpoint's fault."""
    try:
        yield
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
