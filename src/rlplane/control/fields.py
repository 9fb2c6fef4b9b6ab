"""``FieldIndex``: where the values of one field are, row by row."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlplane.control.arrays import filled, grown
from rlplane.control.requests import LostRows
from rlplane.control.turns import BlockRows, Rows, Turns

__all__ = ["BlockRows", "FieldIndex", "Pieces", "Rows", "pieces_of"]


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
        self.turns = Turns(size)
        self.lost: set[int] = set()  # rows whose value died with the storage that had it

    def grow(self, size: int) -> None:
        """Make room for rows up to ``size``."""
        self.block = grown(self.block, size, -1)
        self.position = grown(self.position, size, 0)
        self.stamp = grown(self.stamp, size, 0)
        self.turns.grow(size)

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

    def remove(self, rows: Rows) -> list[BlockRows]:
        """Forget rows; return where they were."""
        blocks = self.block[rows]
        self.produced -= int(np.count_nonzero(blocks >= 0))
        self.block[rows] = -1
        if self.lost:
            self.lost.difference_update(rows.tolist())
        gone = [(blocks, self.position[rows])]
        if self.turns:
            gone.append(self.turns.forget(rows))
        return gone

    def rows_in(self, lost: LostRows, rows: Rows) -> Rows:
        """Those of the rows that have lost their value, or a turn of it."""

        gone = rows[_are_lost(lost, self.block[rows], self.position[rows])]
        if self.turns:
            places, (blocks, positions) = self.turns.of(rows)
            gone = np.concatenate((gone, rows[places[_are_lost(lost, blocks, positions)]]))
        return np.unique(gone)

    def lose(self, rows: Rows) -> tuple[Rows, BlockRows]:
        """Rows have lost their value, which is as if it had not been written. Return those that were
        finished, and what all of them referred to."""
        turns = self.turns.forget(rows)
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
    places, (blocks, positions) = column.turns.of(rows)
    last, at = column.block[rows], column.position[rows]
    whole = np.flatnonzero(last >= 0)
    places = np.concatenate((places, whole))
    order = np.argsort(places, kind="stable")
    return Pieces(
        np.concatenate((blocks, last[whole]))[order],
        np.concatenate((positions, at[whole]))[order],
        np.bincount(places, minlength=len(rows)).astype(np.int32),
    )


def _are_lost(lost: LostRows, blocks: NDArray[np.int64], positions: NDArray[np.int32]) -> NDArray[np.bool_]:
    """For each of these rows of blocks, whether it is lost."""

    def is_lost(block: int, position: int) -> bool:
        of_block = lost[block]
        return of_block is None or bool(of_block[position])

    are_lost = np.isin(blocks, [block for block in np.unique(blocks).tolist() if block in lost])
    places = zip(blocks[are_lost].tolist(), positions[are_lost].tolist(), strict=True)
    are_lost[are_lost] = [is_lost(*place) for place in places]
    return are_lost
