"""What the service does in slices, in one go: a clear, the drop of a partition, the end of a claim, the
death of a client."""

from __future__ import annotations

from collections.abc import Sequence

from rlplane.control.clearing import Clearing
from rlplane.control.requests import Effects
from rlplane.control.state import ControlState
from rlplane.control.unclaiming import Unclaiming

__all__ = [
    "advance",
    "clear",
    "clear_written_by",
    "drop",
    "finish_claims",
    "mark",
    "release_owner",
    "unclaim",
    "unmark",
]


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


def unclaim(state: ControlState, partition_id: str, task: str, ids: Sequence[str], owner: int) -> Effects:
    """Take a claim back: what that owner still holds of it goes to the front of the queue."""
    return _end(state, state.begin_unclaim(partition_id, task, ids, owner))


def finish_claims(
    state: ControlState, partition_id: str, task: str, ids: Sequence[str], owner: int
) -> Effects:
    """That owner is done with these samples: they are not handed out again when it goes."""
    return _end(state, state.begin_unclaim(partition_id, task, ids, owner, is_finished=True))


def unmark(state: ControlState, partition_id: str, task: str, ids: Sequence[str] | None) -> Effects:
    """Move a task's cursor back by hand."""
    return _end(state, state.begin_unmark(partition_id, task, ids))


def mark(state: ControlState, partition_id: str, task: str, ids: Sequence[str] | None) -> bool:
    """Move a task's cursor by hand past samples, if that can be done."""
    marking = state.begin_mark(partition_id, task, ids)
    while not marking.is_over:
        state.mark_some(marking, Effects())
    return marking.is_marked


def release_owner(state: ControlState, owner: int) -> tuple[int, Effects]:
    """Forget a client that is gone; also returns how many samples come back."""
    leaving, effects = state.begin_release(owner)
    while not leaving.is_over:
        state.release_some(leaving, effects)
    return leaving.count, effects


def advance(state: ControlState, partition_id: str, version: int) -> Effects:
    """The trainer has published weights: what is too old now is evicted, and the gate opens."""
    advancing, effects = state.begin_advance(partition_id, version), Effects()
    while not advancing.is_over:
        state.advance_some(advancing, effects)
    return effects


def _end(state: ControlState, unclaiming: Unclaiming) -> Effects:
    effects = Effects()
    while not unclaiming.is_over:
        state.unclaim_some(unclaiming, effects)
    return effects
