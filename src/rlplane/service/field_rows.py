"""Which rows of which blocks a field is read from, as it goes over the wire."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlplane.control.fields import Pieces
from rlplane.service import protocol as wire

_FEW_ROWS = 64


def field_rows(pieces: Pieces) -> tuple[wire.FieldRows, list[int]]:
    blocks, positions, per_row = pieces
    count = len(blocks)
    if per_row is not None:
        numbers = np.unique(blocks).tolist()
        return wire.FieldRows(
            count, blocks=blocks.tobytes(), positions=positions.tobytes(), turns=per_row.tobytes()
        ), numbers
    if not count:
        return wire.FieldRows(0), []
    if count <= _FEW_ROWS:
        return _few_field_rows(blocks, positions)
    first, start = int(blocks[0]), int(positions[0])
    if not np.count_nonzero(blocks != first):
        if not np.count_nonzero(positions[1:] - positions[:-1] != 1):
            return wire.FieldRows(count, first, start), [first]
        numbers = [first]
    else:
        numbers = np.unique(blocks).tolist()
    return wire.FieldRows(count, blocks=blocks.tobytes(), positions=positions.tobytes()), numbers


def _few_field_rows(
    blocks: NDArray[np.int64], positions: NDArray[np.int32]
) -> tuple[wire.FieldRows, list[int]]:
    """The same without numpy, whose fixed costs are most of it for a few rows."""
    numbers, at = blocks.tolist(), positions.tolist()
    distinct = set(numbers)
    if len(distinct) == 1 and at == list(range(at[0], at[0] + len(at))):
        return wire.FieldRows(len(at), numbers[0], at[0]), [numbers[0]]
    found = wire.FieldRows(len(at), blocks=blocks.tobytes(), positions=positions.tobytes())
    return found, sorted(distinct)
