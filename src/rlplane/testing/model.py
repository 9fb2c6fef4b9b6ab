"""A partition as a dictionary: what a correct plane would answer, in the fewest words.

The state machine does everything twice, once on the plane and once here. Rows are opaque to the model.
Where the contract leaves room, the model takes one reading and says so; :mod:`rlplane.testing.state_machine`
avoids what is left open.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["ModelPartition", "ModelSample"]

_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "in": lambda value, options: value in options,
    "not in": lambda value, options: value not in options,
}


@dataclass
class ModelSample:
    """One live sample: its rows, and the turn in which each field was first written."""

    born: int
    group: str | None
    rows: dict[str, Any] = field(default_factory=dict)
    turns: dict[str, int] = field(default_factory=dict)
    tags: dict[str, Any] = field(default_factory=dict)
    claimed_by: set[str] = field(default_factory=set)

    def ready_turn(self, required: Sequence[str]) -> int | None:
        """When it became ready for a claim on ``required``, or None if it is not."""
        if any(name not in self.turns for name in required):
            return None
        return max((self.turns[name] for name in required), default=self.born)


@dataclass
class ModelPartition:
    """A partition with its samples in the order of their first write."""

    group_size: int | None = None
    num_samples: int = 0
    tasks: list[str] = field(default_factory=list)
    samples: dict[str, ModelSample] = field(default_factory=dict)
    written: int = 0
    turn: int = 0

    def register(self, num_samples: int, tasks: list[str]) -> None:
        """Register it again: samples stay, and so do the cursors of tasks that stay."""
        self.num_samples, self.tasks, self.written = num_samples, tasks, 0
        for sample in self.samples.values():
            sample.claimed_by &= set(tasks)

    def put(
        self, ids: Sequence[str], columns: Mapping[str, Sequence[Any]], tags: Sequence[Mapping[str, Any]]
    ) -> None:
        """Write rows and tags."""
        for index, sample_id in enumerate(ids):
            self.turn += 1
            if sample_id not in self.samples:
                group = sample_id.rpartition("_g")[0] if self.group_size else None
                self.samples[sample_id] = ModelSample(self.turn, group)
                self.written += 1
            sample = self.samples[sample_id]
            for name, rows in columns.items():
                sample.rows[name] = rows[index]
                sample.turns.setdefault(name, self.turn)
            sample.tags.update(tags[index])

    def ready(self, task: str, required: Sequence[str], where: Mapping[str, Any]) -> list[str]:
        """What a claim may take now, in order. A condition hides samples; it does not move them."""
        turns = {
            sample_id: turn
            for sample_id in self.remaining(task, where)
            if (turn := self.samples[sample_id].ready_turn(required)) is not None
        }
        ordered = sorted(turns, key=turns.__getitem__)
        if self.group_size is None:
            return ordered
        groups: dict[str | None, list[str]] = {}
        for sample_id in ordered:
            groups.setdefault(self.samples[sample_id].group, []).append(sample_id)
        whole = [members for members in groups.values() if len(members) == self.group_size]
        whole.sort(key=lambda members: turns[members[-1]])
        return [sample_id for members in whole for sample_id in members]

    def remaining(self, task: str, where: Mapping[str, Any]) -> list[str]:
        """The live samples that match and that the task has not claimed.

        A group that lacks a member, or has one that does not match, remains for nobody.
        """
        left = [
            sample_id
            for sample_id, sample in self.samples.items()
            if task not in sample.claimed_by and _holds(sample, where)
        ]
        if self.group_size is None:
            return left
        members = Counter(self.samples[sample_id].group for sample_id in left)
        return [i for i in left if members[self.samples[i].group] == self.group_size]

    def full_batch_or_tail(
        self, task: str, required: Sequence[str], batch_size: int, where: Mapping[str, Any]
    ) -> list[str] | None:
        """What a blocking claim takes now, or None if it has to wait."""
        ready = self.ready(task, required, where)
        if len(ready) >= batch_size:
            return ready[:batch_size]
        is_tail = self.written == self.num_samples and len(ready) == len(self.remaining(task, where))
        return ready if ready and is_tail else None

    def take(self, task: str, ids: Sequence[str]) -> None:
        """Move the cursor of ``task`` over ``ids``."""
        for sample_id in ids:
            self.samples[sample_id].claimed_by.add(task)

    def clear(self, ids: Sequence[str]) -> None:
        """Drop samples."""
        for sample_id in ids:
            self.samples.pop(sample_id, None)

    def is_consumed(self, tasks: Sequence[str]) -> bool:
        """What ``check_consumption_status`` says."""
        if not self.written and not self.samples:
            return False
        return all(set(tasks) <= sample.claimed_by for sample in self.samples.values())


def _holds(sample: ModelSample, where: Mapping[str, Any]) -> bool:
    for name, condition in where.items():
        if name not in sample.tags:
            return False
        conditions = condition if isinstance(condition, dict) else {"==": condition}
        for symbol, value in conditions.items():
            try:
                if not _OPERATORS[symbol](sample.tags[name], value):
                    return False
            except TypeError:
                return False
    return True
