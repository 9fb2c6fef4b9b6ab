"""Which rows of which blocks were lost with a part of the storage; pure."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from rlplane.control.requests import LostRows
from rlplane.storage import keyed
from rlplane.storage.places import Layout, Loss, Place
from rlplane.storage.rows import pieces_in, row_bounds


def lost_rows(
    blocks: Mapping[int, tuple[int, int, Layout]], places: Mapping[int, Place], loss: Loss
) -> LostRows:
    """For every block that has lost something, which of its rows are gone; None for all of them.

    ``blocks`` says where each is (place, start, layout). A row is gone if one of the chunks that a read of
    it needs is. The only chunk of a place is needed for each of its rows.
    """
    gone = keyed.lost_chunks(places.values(), loss)
    found: LostRows = {}
    for block, (number, start, layout) in blocks.items():
        chunks = gone.get(number)
        if chunks is None:
            continue
        is_known = not layout.has_offsets or layout.offsets is not None
        rows = _rows_in(layout, start, chunks) if is_known and len(chunks) > 1 else None
        if rows is None or rows.any():
            found[block] = rows
    return found


def _rows_in(layout: Layout, start: int, chunks: NDArray[np.bool_]) -> NDArray[np.bool_]:
    # How many chunks before each are gone: a stretch has lost something if that differs between its ends.
    before = np.concatenate(([0], np.cumsum(chunks)))

    def touched(begins: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.bool_]:
        # A client has said where they are, and nobody has looked since.
        first, last = (
            np.clip(edge, 0, len(chunks))
            for edge in ((start + begins) // keyed.CHUNK_BYTES, -(-(start + ends) // keyed.CHUNK_BYTES))
        )
        hit: NDArray[np.bool_] = (ends > begins) & (before[last] > before[first])
        return hit

    positions = np.arange(layout.rows)
    rows = touched(*row_bounds(layout, positions))
    if layout.pieces is not None:
        begins, ends, of = pieces_in(layout, positions)
        rows[of[touched(begins, ends)]] = True
    return rows
