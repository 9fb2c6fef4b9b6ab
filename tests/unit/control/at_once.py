"""What the service does in slices, in one go: a clear, and the drop of a partition."""

from __future__ import annotations

from collections.abc import Sequence

from rlplane.control.clearing import Clearing
from rlplane.control.requests import Effects
from rlplane.control.state import ControlState

__all__ = ["clear", "clear_written_by", "drop"]


def clear(state: ControlState, partition_id: str, ids: Sequence[str] | None) -> tuple[int, Effects]:
    """Drop samples (all of them for None); also returns how many there were."""
    return _all_slices(state, state.begin_clear(partition_id, ids), Effects())


def clear_written_by(state: ControlState, partition_id: str, owner: int) -> tuple[int, Effects]:
    """Drop what ``owner`` wrote and is still there, or everything if it never wrote here."""
    return _all_slices(state, state.begin_clear_written_by(partition_id, owner), Effects())


def drop(state: ControlState, partition_id: str) -> tuple[int, Effects]:
    """Forget a partition; also returns how many samples there were."""
    return _all_slices(state, *state.begin_drop(partition_id))


def _all_slices(state: ControlState, clearing: Clearing, effects: Effects) -> tuple[int, Effects]:
    while not clearing.is_over:
        state.clear_some(clearing, effects)
    return clearing.count, effects
