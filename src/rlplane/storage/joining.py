"""Several answers to one read, which was asked for a part at a time, as if they had been one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from rlplane.storage.places import FieldRows, Located, Place


def joined(parts: Sequence[Located]) -> Located | None:
    """Where the rows of all parts are, one after the other. None if they are not of one moment: some of the
    rows were written after the first part was asked for, so those of the others may have been too."""
    first = parts[0]
    order: dict[int, int] = {}
    places: list[Place] = []
    blocks = {}
    for part in parts:
        if part.paths != first.paths or any(number >= first.next_block for number in part.blocks):
            return None
        for place in part.places:
            if place.number not in order:
                order[place.number] = len(places)
                places.append(place)
        for number, (index, start, layout) in part.blocks.items():
            blocks[number] = (order[part.places[index].number], start, layout)
    rows = [_joined_rows(fields) for fields in zip(*(part.rows for part in parts), strict=True)]
    return Located(first.lease, places, blocks, rows, first.paths, first.next_block)


def _joined_rows(parts: Iterable[FieldRows]) -> FieldRows:
    parts = [part for part in parts if part.count]
    if not parts:
        return FieldRows(0)
    count = sum(part.count for part in parts)
    if all(part.blocks is None for part in parts):
        ends = [(part.block, part.start + part.count) for part in parts]
        if [(part.block, part.start) for part in parts[1:]] == ends[:-1]:
            return FieldRows(count, parts[0].block, parts[0].start)  # neighbours, all of them
    blocks, positions, turns = [], [], []
    for part in parts:
        if part.blocks is None or part.positions is None:
            blocks.append(np.full(part.count, part.block, np.int64).tobytes())
            positions.append(np.arange(part.start, part.start + part.count, dtype=np.int32).tobytes())
        else:
            blocks.append(part.blocks)
            positions.append(part.positions)
        turns.append(np.ones(part.count, np.int32).tobytes() if part.turns is None else part.turns)
    has_turns = any(part.turns is not None for part in parts)
    return FieldRows(
        count,
        blocks=b"".join(blocks),
        positions=b"".join(positions),
        turns=b"".join(turns) if has_turns else None,
    )
