"""What a commit says about its bytes. It comes from another process, and is not trusted."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from rlplane.control.fields import Rows
from rlplane.control.samples import SampleTable
from rlplane.errors import InvalidRequestError
from rlplane.service import protocol as wire
from rlplane.service.block_table import Block
from rlplane.storage.places import Layout


def checked_sizes(body: wire.Commit, room: int, *, checks_ids: bool = True) -> list[int]:
    """The size of each block of a commit, which comes from another process and is not trusted. Very many ids
    are checked elsewhere, some at a time."""
    count = len(body.ids)
    if len(body.fields) != len(body.layouts) or len(set(body.fields)) != len(body.fields):
        raise InvalidRequestError("a commit has one layout per field")
    sizes = []
    for layout in body.layouts:
        sizes.append(layout.nbytes)
        if layout.rows != count or layout.values_nbytes < 0:
            raise InvalidRequestError("the layouts of a commit have another number of rows than ids")
        if layout.offsets is not None and len(layout.offsets) != 8 * (count + 1):
            raise InvalidRequestError("the offsets of a commit are not one more than its ids")
        if layout.pieces is not None:
            # Rows in order, leaves that have a name, and bytes of the block.
            pieces = np.frombuffer(layout.pieces, np.int64) if len(layout.pieces) % 32 == 0 else None
            if pieces is None or not _are_pieces(pieces.reshape(-1, 4), layout):
                raise InvalidRequestError("the pieces of a commit are not parts of its block")
    if sum(sizes) > room:
        raise InvalidRequestError("the layouts of a commit do not fit into its place")
    if checks_ids and (len(set(body.ids)) != count or "" in body.ids or not count):
        raise InvalidRequestError("the ids of a commit are not distinct, non-empty strings")
    if body.tags is not None and len(body.tags) != count:
        raise InvalidRequestError("a commit has one tag per id")
    return sizes


def check_turns(body: wire.Commit, table: SampleTable, rows: Rows, blocks: Mapping[int, Block]) -> None:
    """What is appended to ``rows`` must be of one kind with what is there, or nobody could read the two
    together."""
    for field, layout in zip(body.fields, body.layouts, strict=True):
        turn = layout.turn
        if turn is None:
            raise InvalidRequestError(
                f"field {field!r} holds {layout.kind} rows, to which nothing can be appended: a turn is "
                "a tensor of at least one dimension, the first of which grows"
            )
        for block in table.columns[field].turns.last_blocks(rows) if field in table.columns else ():
            before = blocks[block][2].turn
            if before != turn:
                raise InvalidRequestError(
                    f"field {field!r} grows by tokens of dtype and shape {before}, not {turn}"
                )


def _are_pieces(pieces: NDArray[np.int64], layout: Layout) -> bool:
    """Whether what says which bytes the rows of trees refer to can be true."""
    rows, leaves, begins, ends = pieces.T
    return not (
        (rows < 0)
        | (rows >= layout.rows)
        | (leaves < 0)
        | (leaves >= len(layout.leaves or ()))
        | (begins < 0)
        | (begins > ends)
        | (ends > layout.values_nbytes)
    ).any() and not bool((rows[1:] < rows[:-1]).any())
