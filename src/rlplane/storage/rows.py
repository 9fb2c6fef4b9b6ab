"""Where the rows of a block lie in it, for blocks whose layout says so; without torch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlplane.storage.places import Layout

# A row of Layout.pieces: a row, the number of a leaf, and the bytes that it refers to.
PIECE = np.dtype([("row", np.int64), ("leaf", np.int64), ("begin", np.int64), ("end", np.int64)])

Bounds = tuple[NDArray[np.int64], NDArray[np.int64]]


def stretches(layout: Layout, positions: NDArray[np.int64], path: str = "") -> Bounds:
    """Where the bytes begin and end, in their block, that have to be there to read these rows. A row of
    which only the leaf at ``path`` is read needs fewer. The first of them are one for each row."""
    begins, ends = row_bounds(layout, positions)
    if layout.pieces is None:
        return begins, ends
    more_begins, more_ends, _ = pieces_in(layout, positions, path)
    return np.concatenate((begins, more_begins)), np.concatenate((ends, more_ends))


def pieces_in(
    layout: Layout, positions: NDArray[np.int64], path: str = ""
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Where the bytes begin and end that the rows at ``positions`` refer to, at and below ``path``, and which
    of the positions each is for."""
    pieces = np.frombuffer(layout.pieces or b"", PIECE)
    if path:
        under = [leaf == path or leaf.startswith(path + ".") for leaf in layout.leaves or ()]
        pieces = pieces[np.array(under, bool)[pieces["leaf"]]] if len(pieces) else pieces
    # They are sorted by row, so each row's are neighbours.
    first = np.searchsorted(pieces["row"], positions, "left")
    counts = np.searchsorted(pieces["row"], positions, "right") - first
    at = np.arange(int(counts.sum())) + np.repeat(first - (np.cumsum(counts) - counts), counts)
    return pieces["begin"][at], pieces["end"][at], np.repeat(np.arange(len(positions)), counts)


def row_bounds(layout: Layout, positions: NDArray[np.int64]) -> Bounds:
    if layout.kind in ("dense", "enum"):
        size = layout.values_nbytes // max(layout.rows, 1)
        return positions * size, (positions + 1) * size
    assert layout.offsets is not None
    offsets = np.frombuffer(layout.offsets, np.int64)
    # Those of tensors are counted in elements, all others in bytes.
    size = layout.values_nbytes // max(int(offsets[-1]), 1) if layout.kind == "jagged" else 1
    return offsets[positions] * size, offsets[positions + 1] * size
