"""The control state as bytes: what a checkpoint keeps of it. :mod:`rlplane.control.loading` reads it.

Rows are written in the order of their birth, so row numbers do not survive; block numbers are mapped to
those of the plane that loads. Queues are not kept: they follow from the stamps of fields and tasks.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from rlplane.control.copies import Copies
from rlplane.control.cursors import TaskCursor
from rlplane.control.fields import FieldIndex, Rows
from rlplane.control.flow import NEVER, NO_TICKET, SavedFlow
from rlplane.control.partition import Partition
from rlplane.control.requests import LEAVING, NOBODY
from rlplane.control.rules import PartitionSpec
from rlplane.control.samples import NO_ROWS, STAMP_BITS, by_number
from rlplane.control.state import ControlState
from rlplane.control.steps import SavedStep

SCHEMA_VERSION = 2


class SavedField(msgspec.Struct):
    """One field of a partition: where its rows are."""

    name: str
    declared: bool
    blocks: bytes
    positions: bytes
    stamps: bytes
    stamped: bool
    # The earlier pieces of rows that were written turn by turn: row, block and position of each, as int64.
    turns: bytes = b""


class SavedTask(msgspec.Struct):
    """The cursor of a task."""

    name: str
    claimed: bytes
    unfinished: bytes
    kept: dict[str, int] = {}
    uses: bytes = b""
    places: bytes = b""


class SavedPartition(msgspec.Struct):
    """A partition; lists and bytes have an entry per sample."""

    spec: PartitionSpec
    written: int
    ids: list[str]
    tags: list[dict[str, Any]]
    born: bytes
    columns: list[SavedField]
    tasks: list[SavedTask]
    # A sample keeps the group of its first write, whatever its tags say later. None: it never had one.
    groups: list[str | None] = []
    flow: SavedFlow = msgspec.field(default_factory=SavedFlow)
    group_sizes: dict[str, int] = {}
    steps: list[SavedStep] = []
    finished: bool = False
    # The numbers of the samples, by which TransferQueue's interface names them. Empty: numbered anew.
    serials: bytes = b""
    next_serial: int = 0
    stamps: bytes = b""
    closed: dict[str, int] = {}
    finished_steps: list[tuple[str, str]] = []


class SavedState(msgspec.Struct):
    """All partitions."""

    version: int
    stamp: int
    partitions: list[SavedPartition]


class StateDump:
    """The state as it is when this is made, whatever happens to it while it is written.

    Columns are copied a slice at a time. Tags are replaced and never changed, so they need not be.
    """

    def __init__(self, state: ControlState) -> None:
        self._stamp = max((partition.table.events for partition in state.partitions.values()), default=0)
        if any(task.is_returning for part in state.partitions.values() for task in part.tasks.values()):
            self._stamp += 1  # what is about to come back is as if it did now
        self._partitions = [_PartitionDump(partition) for partition in state.partitions.values()]

    def pieces(self) -> Iterator[bytes]:
        """What :func:`~rlplane.control.loading.pieces_of` takes, in pieces of some milliseconds. Some are
        empty, and took as long."""
        for each in self._partitions:
            while not each.copies.copy_some():
                yield b""
        partitions = itertools.chain(
            [_header(_ARRAY, len(self._partitions))], *(each.pieces() for each in self._partitions)
        )
        saved = SavedState(SCHEMA_VERSION, self._stamp, [])
        yield from _pieces_of_struct(saved, {"partitions": partitions})


class _PartitionDump:
    def __init__(self, partition: Partition) -> None:
        table, flow = partition.table, partition.flow
        self.copies = copies = Copies(table)
        self._ids, self._tags = copies.column(table, "ids"), copies.column(table, "tags")
        self._groups, self._serials = copies.column(table, "groups"), copies.column(table, "serial")
        self._born, self._stamp = copies.column(table, "born"), copies.column(table, "stamp")
        self._fields = [_FieldDump(copies, name, column) for name, column in table.columns.items()]
        next_event = table.events + 1
        self._tasks = [
            _TaskDump(copies, partition, task, self._groups, next_event) for task in partition.tasks.values()
        ]
        self._flow = flow.saved(NO_ROWS)
        self._by_row = {}
        if flow.is_used:
            self._by_row = {
                "tickets": (copies.column_read_by(flow.tickets), NO_TICKET),
                "begun": (copies.column(flow, "begun"), NEVER),
            }
        # What is small is here already.
        self._saved = SavedPartition(
            table.spec,
            table.written,
            ids=[],
            tags=[],
            born=b"",
            columns=[],
            tasks=[],
            group_sizes=dict(partition.groups.sizes),
            steps=partition.claims.steps.saved(),
            finished=table.finished,
            next_serial=table.next_serial,
            closed=dict(partition.groups.closed),
            finished_steps=list(partition.claims.steps.finished),
        )

    def pieces(self) -> Iterator[bytes]:
        # In steps, each of which takes memory that the system has to find first.
        rows = np.flatnonzero(self._serials >= 0)
        yield b""
        numbers = self._serials[rows]
        yield b""
        rows = by_number(rows, numbers)
        yield b""
        yield from _pieces_of_struct(
            self._saved,
            {
                "ids": _pieces_of_list(self._ids, rows),
                "tags": _pieces_of_list(self._tags, rows),
                "groups": _pieces_of_list(self._groups, rows),
                "born": _pieces_of_column(self._born, rows),
                "serials": _pieces_of_column(self._serials, rows),
                "stamps": _pieces_of_column(self._stamp, rows),
                "columns": itertools.chain(
                    [_header(_ARRAY, len(self._fields))], *(field.pieces(rows) for field in self._fields)
                ),
                "tasks": itertools.chain(
                    [_header(_ARRAY, len(self._tasks))], *(task.pieces(rows) for task in self._tasks)
                ),
                "flow": _pieces_of_struct(
                    self._flow,
                    {name: _pieces_of_map(column, rows, no) for name, (column, no) in self._by_row.items()},
                ),
            },
        )


class _FieldDump:
    def __init__(self, copies: Copies, name: str, column: FieldIndex) -> None:
        self._saved = SavedField(name, column.declared, b"", b"", b"", column.stamped)
        self._block, self._position = copies.column(column, "block"), copies.column(column, "position")
        self._stamp = copies.column(column, "stamp")
        self._turns = copies.turns(column.turns)

    def pieces(self, rows: Rows) -> Iterator[bytes]:
        large = {
            "blocks": _pieces_of_column(self._block, rows),
            "positions": _pieces_of_column(self._position, rows),
            "stamps": _pieces_of_column(self._stamp, rows),
            "turns": self._pieces_of_turns(rows),
        }
        return _pieces_of_struct(self._saved, large)

    def _pieces_of_turns(self, rows: Rows) -> Iterator[bytes]:
        yield _header_of_bytes(24 * self._turns.count)
        for at in range(0, len(rows) if self._turns else 0, _NUMBERS_AT_ONCE):
            places, (blocks, positions) = self._turns.of(rows[at : at + _NUMBERS_AT_ONCE])
            yield np.column_stack((at + places, blocks, positions)).tobytes()


class _TaskDump:
    def __init__(
        self, copies: Copies, partition: Partition, task: TaskCursor, groups: NDArray[Any], next_event: int
    ) -> None:
        self._saved = SavedTask(task.name, b"", b"", dict(task.kept))
        self._next_event, self._groups, self._group_size = next_event, groups, partition.spec.group_size
        self._sizes = dict(partition.groups.sizes)
        self._is_returning = task.is_returning
        self._claimed, self._owner = copies.column(task, "claimed"), copies.column(task, "owner")
        self._sequence = copies.column(task, "sequence")
        self._uses = None if task.uses is None else copies.column(task, "uses")
        self._places = None if task.places is None else copies.column(task, "places")

    def pieces(self, rows: Rows) -> Iterator[bytes]:
        unfinished = self._owner != NOBODY
        held = np.flatnonzero(unfinished)
        if len(held):
            # As if they came back now, for a load that releases them. Otherwise the place of what is claimed
            # means nothing.
            if self._places is None:
                self._places = np.zeros(len(self._claimed), np.int64)
            held = held[np.argsort(self._sequence[held])]
            self._places[held] = -((self._next_event << STAMP_BITS) + np.arange(len(held)))
        if self._is_returning:
            returning = np.flatnonzero(self._owner == LEAVING)
            unfinished[returning] = False
            self._return(returning)
        yield b""
        large = {
            "claimed": _pieces_of_column(self._claimed, rows),
            "unfinished": _pieces_of_column(unfinished, rows),
        }
        if self._uses is not None:
            large["uses"] = _pieces_of_column(self._uses, rows)
        if self._places is not None:
            large["places"] = _pieces_of_column(self._places, rows)
        yield from _pieces_of_struct(self._saved, large)

    def _return(self, rows: Rows) -> None:
        """Let what is about to come back be back."""
        self._claimed[rows] = False
        if not self._group_size:
            return
        kept = Counter(self._groups[self._claimed].tolist())
        for name in set(self._groups[rows].tolist()):
            left = kept[name] % self._sizes.get(name, self._group_size)
            self._saved.kept.pop(name, None)
            if left:
                self._saved.kept[name] = left


# MessagePack, so far as it has to be put together from pieces: the first byte of short arrays and maps, and
# the first bytes of longer ones.
_ARRAY, _MAP = (0x90, 0xDC), (0x80, 0xDE)
_SAMPLES_AT_ONCE = 8192
_NUMBERS_AT_ONCE = 65_536
_encode = msgspec.msgpack.Encoder().encode


def _header(kind: tuple[int, int], count: int) -> bytes:
    short, long = kind
    if count < 16:
        return bytes([short | count])
    if count < 2**16:
        return bytes([long]) + count.to_bytes(2, "big")
    return bytes([long + 1]) + count.to_bytes(4, "big")


def _header_of_bytes(count: int) -> bytes:
    first, width = (0xC4, 1) if count < 2**8 else (0xC5, 2) if count < 2**16 else (0xC6, 4)
    return bytes([first]) + count.to_bytes(width, "big")


def _pieces_of_struct(struct: msgspec.Struct, large: Mapping[str, Iterable[bytes]]) -> Iterator[bytes]:
    """A struct, some fields of which are given as pieces."""
    names = struct.__struct_fields__
    yield _header(_MAP, len(names))
    for name in names:
        yield _encode(name)
        if name in large:
            yield from large[name]
        else:
            yield _encode(getattr(struct, name))


def _pieces_of_list(column: NDArray[Any], rows: Rows) -> Iterator[bytes]:
    yield _header(_ARRAY, len(rows))
    for at in range(0, len(rows), _SAMPLES_AT_ONCE):
        some = column[rows[at : at + _SAMPLES_AT_ONCE]].tolist()
        yield _encode(some)[len(_header(_ARRAY, len(some))) :]


def _pieces_of_map(column: NDArray[np.int64], rows: Rows, nothing: int) -> Iterator[bytes]:
    """Places of samples, and what the column has for them."""
    values = column[rows]
    places = np.flatnonzero(values != nothing)
    yield _header(_MAP, len(places))
    for at in range(0, len(places), _SAMPLES_AT_ONCE):
        some = places[at : at + _SAMPLES_AT_ONCE]
        yield _encode(dict(zip(some.tolist(), values[some].tolist(), strict=True)))[
            len(_header(_MAP, len(some))) :
        ]


def _pieces_of_column(column: NDArray[Any], rows: Rows) -> Iterator[bytes]:
    yield _header_of_bytes(column.itemsize * len(rows))
    for at in range(0, len(rows), _NUMBERS_AT_ONCE):
        yield column[rows[at : at + _NUMBERS_AT_ONCE]].tobytes()


def block_names(data: bytes) -> dict[int, str]:
    """For each block in ``data``, the partition and field that it belongs to."""
    names = {}
    for partition in msgspec.msgpack.decode(data, type=SavedState).partitions:
        for column in partition.columns:
            blocks = np.concatenate((np.frombuffer(column.blocks, np.int64), read_turns(column.turns)[:, 1]))
            for block in np.unique(blocks).tolist():
                names[block] = f"{partition.spec.partition_id}/{column.name}"
    return names


def read_turns(data: bytes) -> NDArray[np.int64]:
    """Row, block and position of each turn."""
    return np.frombuffer(data, np.int64).reshape(-1, 3)
