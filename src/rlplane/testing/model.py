"""A partition as a dictionary: what a correct plane would answer, in as little code as possible.

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
    """One live sample: its rows, and when each field was first written, by the partition's clock."""

    created_at: int
    group: str | None
    rows: dict[str, Any] = field(default_factory=dict)
    written_at: dict[str, int] = field(default_factory=dict)
    tags: dict[str, Any] = field(default_factory=dict)
    claimed_by: set[str] = field(default_factory=set)

    def ready_at(self, required: Sequence[str]) -> int | None:
        """When it became ready for a claim on ``required``, or None if it is not."""
        if any(name not in self.written_at for name in required):
            return None
        return max((self.written_at[name] for name in required), default=self.created_at)


@dataclass
class ModelPartition:
    """A partition with its samples in the order of their first write. Its clock counts written rows."""

    group_size: int | None = None
    num_samples: int = 0
    tasks: list[str] = field(default_factory=list)
    samples: dict[str, ModelSample] = field(default_factory=dict)
    written: int = 0
    clock: int = 0

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
            self.clock += 1
            if sample_id not in self.samples:
                group = sample_id.rpartition("_g")[0] if self.group_size else None
                self.samples[sample_id] = ModelSample(self.clock, group)
                self.written += 1
            sample = self.samples[sample_id]
            for name, rows in columns.items():
                sample.rows[name] = rows[index]
                sample.written_at.setdefault(name, self.clock)
            sample.tags.update(tags[index])

    def ready(self, task: str, required: Sequence[str], where: Mapping[str, Any]) -> list[str]:
        """What a claim may get now, in order. A condition hides samples; it does not move them."""
        ready_at = {
            sample_id: time
            for sample_id in self.remaining(task, where)
            if (time := self.samples[sample_id].ready_at(required)) is not None
        }
        ordered = sorted(ready_at, key=ready_at.__getitem__)
        if self.group_size is None:
            return ordered
        groups: dict[str | None, list[str]] = {}
        for sample_id in ordered:
            groups.setdefault(self.samples[sample_id].group, []).append(sample_id)
        whole = [members for members in groups.values() if len(members) == self.group_size]
        whole.sort(key=lambda members: ready_at[members[-1]])
        return [sample_id for members in whole for sample_id in members]

    def remaining(self, task: str, where: Mapping[str, Any]) -> list[str]:
        """The live samples that match and that the task has not claimed.

        A group that lacks a member, or has one that does not match, remains for nobody.
        """
        unclaimed = [
            sample_id
            for sample_id, sample in self.samples.items()
            if task not in sample.claimed_by and _matches(sample, where)
        ]
        if self.group_size is None:
            return unclaimed
        members = Counter(self.samples[sample_id].group for sample_id in unclaimed)
        return [i for i in unclaimed if members[self.samples[i].group] == self.group_size]

    def full_batch_or_tail(
        self, task: str, required: Sequence[str], batch_size: int, where: Mapping[str, Any]
    ) -> list[str] | None:
        """What a blocking claim gets now, or None if it has to wait."""
        ready = self.ready(task, required, where)
        if len(ready) >= batch_size:
            return ready[:batch_size]
        is_tail = self.written == self.num_samples and len(ready) == len(self.remaining(task, where))
        return ready if ready and is_tail else None

    def in_order(self, ready: Sequence[str], order: str) -> list[str]:
        """``ready`` in another order: ``lifo`` or ``priority:<tag>``."""
        size = self.group_size or 1
        units = [list(ready[at : at + size]) for at in range(0, len(ready), size)]
        if order == "lifo":
            units.reverse()
        else:
            tag = order.partition(":")[2]
            least = float("-inf")
            units.sort(key=lambda unit: -max(self.samples[i].tags.get(tag, least) for i in unit))
        return [sample_id for unit in units for sample_id in unit]

    def shared(self, task: str, required: Sequence[str], batch_size: int, ranks: int) -> list[str]:
        """What the ranks of a step get together now: a full batch, or at the end what can be divided."""
        ready = self.ready(task, required, {})
        if len(ready) >= batch_size:
            return ready[:batch_size]
        has_ended = self.written == self.num_samples or 0 < self.num_samples <= self.written
        if not has_ended or len(ready) != len(self.remaining(task, {})):
            return []
        return ready[: len(ready) - len(ready) % (ranks * (self.group_size or 1))]

    def fitting(
        self, ready: Sequence[str], batch_size: int, max_tokens: int
    ) -> tuple[list[str] | None, bool]:
        """The first of ``ready`` that fit into both, and whether the next one does not. None: the very first
        is too long, or has no length."""
        taken: list[str] = []
        size = self.group_size or 1
        for at in range(0, len(ready), size):
            unit = list(ready[at : at + size])
            if len(taken) + size > batch_size:
                return taken, True
            lengths = [self.samples[i].tags.get("input_lengths") for i in taken + unit]
            alone = lengths[len(taken) :]
            if None in alone or sum(n or 0 for n in alone) > max_tokens:
                return (taken, True) if taken else (None, True)
            if sum(n or 0 for n in lengths) > max_tokens:
                return taken, True
            taken += unit
        return taken, len(taken) == batch_size

    def matching(self, where: Mapping[str, Any]) -> list[str]:
        """The live samples that match, claimed or not, in the order of their first write."""
        return [sample_id for sample_id, sample in self.samples.items() if _matches(sample, where)]

    def mark_claimed(self, task: str, ids: Sequence[str]) -> None:
        """Move the cursor of ``task`` over ``ids``."""
        for sample_id in ids:
            self.samples[sample_id].claimed_by.add(task)

    def clear(self, ids: Sequence[str]) -> None:
        """Remove samples."""
        for sample_id in ids:
            self.samples.pop(sample_id, None)

    def is_consumed(self, tasks: Sequence[str]) -> bool:
        """What ``check_consumption_status`` says."""
        if not self.written and not self.samples:
            return False
        return all(set(tasks) <= sample.claimed_by for sample in self.samples.values())


def _matches(sample: ModelSample, where: Mapping[str, Any]) -> bool:
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
