"""A control state saved and restored in one go. A service does both piece by piece."""

from __future__ import annotations

from collections.abc import Mapping

from rlplane.control.dump import StateDump
from rlplane.control.loading import BlockSize, StateLoader, pieces_of
from rlplane.control.state import ControlState


def dump_state(state: ControlState) -> bytes:
    """All partitions with their samples, tags, places, cursors and unfinished claims."""
    return b"".join(StateDump(state).pieces())


def restore_state(
    data: bytes,
    numbers: Mapping[int, int],
    blocks: Mapping[int, BlockSize],
    capacity: int | None,
    *,
    release_claims: bool = False,
) -> ControlState:
    """The state in ``data``, in a plane that has ``numbers`` for its blocks, of these sizes."""
    loader = StateLoader(capacity)
    loader.add_blocks(numbers, blocks)
    for piece in pieces_of(data):
        loader.add(piece)
    return loader.finish(release_claims=release_claims)
