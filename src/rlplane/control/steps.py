"""Claims that data-parallel ranks share: one batch for a step, divided once and for all."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from rlplane.control.requests import Claim
from rlplane.control.rules import PartitionSpec
from rlplane.errors import InvalidRequestError


class StepKey(NamedTuple):
    """A step of a task."""

    task: str
    step: str


class SavedStep(msgspec.Struct):
    """A divided step as a checkpoint has it."""

    task: str
    step: str
    parts: list[list[str]]


class Step:
    """A batch that was divided: the ids of each rank, and how many of each are still there."""

    def __init__(self, parts: list[list[str]]) -> None:
        self.parts = parts
        self.left = list(map(len, parts))


class Steps:
    """The steps of a partition that were divided and are not finished: a step ends with its last sample."""

    def __init__(self) -> None:
        self._steps: dict[StepKey, Step] = {}
        self._parts_of: dict[str, list[tuple[StepKey, int]]] = {}
        self.finished: dict[StepKey, None] = {}  # the last of those that are

    def get(self, key: StepKey) -> Step | None:
        return self._steps.get(key)

    def is_finished(self, key: StepKey) -> bool:
        """Whether all samples of the step have been cleared."""
        return key in self.finished

    def add(self, key: StepKey, parts: list[list[str]]) -> Step:
        step = self._steps[key] = Step(parts)
        for rank, part in enumerate(parts):
            for sample_id in part:
                self._parts_of.setdefault(sample_id, []).append((key, rank))
        return step

    def remove(self, ids: Sequence[str]) -> None:
        """Samples are gone."""
        for sample_id in ids:
            for key, rank in self._parts_of.pop(sample_id, ()):
                step = self._steps[key]
                step.left[rank] -= 1
                if not any(step.left):
                    del self._steps[key]
                    self.finished[key] = None
                    if len(self.finished) > _FINISHED_REMEMBERED:
                        del self.finished[next(iter(self.finished))]

    def saved(self) -> list[SavedStep]:
        return [SavedStep(*key, step.parts) for key, step in self._steps.items()]

    def __bool__(self) -> bool:
        return bool(self._parts_of)


_FINISHED_REMEMBERED = 4096


def divided(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Places ``0 … len(lengths)`` over the ranks: equally many for each, and about equally much.

    The longest goes first, to whoever has least of those who may have more. A part is in ascending order.
    """
    each = len(lengths) // ranks
    parts: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]  # a heap
    for place in sorted(range(each * ranks), key=lambda place: -lengths[place]):
        load, rank = loads[0]
        parts[rank].append(place)
        if len(parts[rank]) < each:
            heapq.heapreplace(loads, (load + lengths[place], rank))
        else:
            heapq.heappop(loads)
    return [sorted(part) for part in parts]


def check_ranks(spec: PartitionSpec, claim: Claim) -> None:
    """The numbers of a claim that ranks share."""
    if claim.dp_world < 1 or not 0 <= claim.dp_rank < claim.dp_world:
        raise InvalidRequestError(f"dp_rank {claim.dp_rank} is not one of {claim.dp_world} ranks (dp_world)")
    size = 1 if claim.split_groups else spec.group_size or 1
    if claim.batch_size % (claim.dp_world * size):
        what = f"{claim.dp_world} ranks" + (f" of groups of {size}" if size > 1 else "")
        raise InvalidRequestError(f"batch_size {claim.batch_size} cannot be divided over {what}")
