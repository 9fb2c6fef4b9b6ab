"""``FieldIndex``: where the values of one field are, row by row."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlplane.control.arrays import filled, grown
from rlplane.control.requests import LostRows

Rows = NDArray[np.int64]
BlockRows = tuple[NDArray[np.int64], NDArray[np.int32]]
"""Rows of blocks: the block of each, and its position there."""


class FieldIndex:
    """One field: where each row's value is, and when it was first written.

    ``turns`` has the earlier pieces of rows that were written turn by turn; the last one is where that of any
    other row is, as soon as the row is finished.
    """

    __slots__ = ("block", "declared", "lost", "position", "produced", "stamp", "stamped", "turns")

    def __init__(self, size: int, declared: bool) -> None:
        self.declared = declared
        self.stamped = False  # whether it was ever written
        self.produced = 0
        self.block = filled(size, np.int64, -1)
        self.position = filled(size, np.int32, 0)
        self.stamp = filled(size, np.int64, 0)
        self.turns: dict[int, list[tuple[int, int]]] = {}
        self.lost: set[int] = set()  # rows whose value died with the storage that had it

    def grow(self, size: int) -> None:
        """Make room for rows up to ``size``."""
        self.block = grown(self.block, size, -1)
        self.position = grown(self.position, size, 0)
        self.stamp = grown(self.stamp, size, 0)

    def write(
        self, rows: Rows, block: int, positions: NDArray[np.int32], stamps: Rows, *, all_new: bool
    ) -> BlockRows | None:
        """Rows are in a block from now on; return where they were before, if any was somewhere. Rows that are
        ``all_new`` have nothing in any field."""
        replaced = None
        old = None if all_new else self.block[rows]
        if old is None or (old < 0).all():
            self.stamp[rows] = stamps
            self.produced += len(rows)
        else:
            fresh = old < 0
            self.stamp[rows[fresh]] = stamps[fresh]
            self.produced += int(fresh.sum())
            replaced = (old, self.position[rows])
        self.block[rows] = block
        self.position[rows] = positions
        if self.lost:
            self.lost.difference_update(rows.tolist())
        return replaced

    def add_turn(self, rows: Rows, block: int) -> None:
        """Rows go on in a block, and are not finished with it."""
        for position, row in enumerate(rows.tolist()):
            self.turns.setdefault(row, []).append((block, position))

    def forget_turns(self, rows: Rows) -> BlockRows:
        """Drop the earlier pieces of rows; return where they were."""
        gone = [piece for row in rows.tolist() for piece in self.turns.pop(row, ())]
        return np.array([block for block, _ in gone], np.int64), np.array([at for _, at in gone], np.int32)

    def remove(self, rows: Rows) -> list[BlockRows]:
        """Forget rows; return where they were."""
        blocks = self.block[rows]
        self.produced -= int(np.count_nonzero(blocks >= 0))
        self.block[rows] = -1
        if self.lost:
            self.lost.difference_update(rows.tolist())
        gone = [(blocks, self.position[rows])]
        if self.turns:
            gone.append(self.forget_turns(rows))
        return gone

    def rows_in(self, lost: LostRows, rows: Rows) -> Rows:
        """Those of the rows that have lost their value, or a turn of it."""

        def is_lost(block: int, position: int) -> bool:
            of_block = lost[block]
            return of_block is None or bool(of_block[position])

        blocks = self.block[rows]
        touched = rows[np.isin(blocks, [block for block in np.unique(blocks).tolist() if block in lost])]
        places = zip(self.block[touched].tolist(), self.position[touched].tolist(), strict=True)
        gone = touched[np.fromiter((is_lost(*place) for place in places), bool, len(touched))].tolist()
        gone += [
            row
            for row in (rows.tolist() if self.turns else ())
            if any(block in lost and is_lost(block, position) for block, position in self.turns.get(row, ()))
        ]
        return np.unique(np.array(gone, np.int64))

    def lose(self, rows: Rows) -> tuple[Rows, BlockRows]:
        """Rows have lost their value, which is as if it had not been written. Return those that were
        finished, and what all of them referred to."""
        turns = self.forget_turns(rows)
        whole = rows[self.block[rows] >= 0]
        blocks, positions = self.block[whole], self.position[whole]
        self.block[whole] = -1
        self.produced -= len(whole)
        self.lost.update(rows.tolist())
        return whole, (np.concatenate((blocks, turns[0])), np.concatenate((positions, turns[1])))


class Pieces(NamedTuple):
    """Where the rows of a field are: the block of each piece, its position there, and how many pieces each
    row has, unless that is one each."""

    blocks: NDArray[np.int64]
    positions: NDArray[np.int32]
    per_row: NDArray[np.int32] | None = None


def pieces_of(column: FieldIndex, rows: Rows) -> Pieces:
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
