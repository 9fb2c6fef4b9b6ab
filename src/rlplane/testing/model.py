"""A partition as a dictionary: what a correct plane would answer, in as little code as possible.

The state machine does everything twice, once on the plane and once here. Rows are opaque to the model.
Where the contract leaves room, the model takes one reading and says so; the random operations avoid what is
left open. :mod:`rlplane.testing.model_flow` has the policies.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlplane.testing.model_flow import TRAINING, ModelFlow

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

Unit = list[str]
"""What is claimed together: a sample, or the members of a group."""


@dataclass
class ModelClaim:
    """What a claim asks for. ``ranks``: how many share it; 0: it is nobody else's."""

    task: str
    required: Sequence[str]
    size: int
    where: Mapping[str, Any] = field(default_factory=dict)
    order: str | None = None
    max_tokens: int | None = None
    max_uses: int = 1
    repeat_where: Mapping[str, Any] = field(default_factory=dict)
    ranks: int = 0


@dataclass
class ModelCursor:
    """What one task has done with one sample. Times are by the partition's clock."""

    is_claimed: bool = False
    is_held: bool = False  # claimed, and neither finished nor given back
    claimed_at: int = 0
    uses: int = 0
    lined_up_at: int = 0  # when it could be claimed once more
    given_back_at: int = 0


@dataclass
class ModelSample:
    """One live sample: its rows, and when each field was finished first, by the partition's clock."""

    created_at: int
    group: str | None
    rows: dict[str, Any] = field(default_factory=dict)
    written_at: dict[str, int] = field(default_factory=dict)
    tags: dict[str, Any] = field(default_factory=dict)
    cursors: dict[str, ModelCursor] = field(default_factory=dict)

    def cursor(self, task: str) -> ModelCursor:
        """What a task has done with it."""
        return self.cursors.setdefault(task, ModelCursor())

    def has(self, fields: Sequence[str]) -> bool:
        """Whether all these fields are finished."""
        return all(name in self.written_at for name in fields)

    def place(self, task: str, required: Sequence[str]) -> tuple[int, int]:
        """Where it stands in the line of a task: first what was given back, the latest in front, then by
        the time at which it became ready."""
        cursor = self.cursor(task)
        times = [self.written_at[name] for name in required]
        ready_at = max([self.created_at, cursor.lined_up_at, *times])
        return (0, -cursor.given_back_at) if cursor.given_back_at > ready_at else (1, ready_at)


@dataclass
class ModelPartition:
    """A partition with its samples in the order of their first write. Its clock counts what happens to
    samples."""

    group_size: int | None = None
    num_samples: int = 0
    tasks: list[str] = field(default_factory=list)
    flow: ModelFlow = field(default_factory=ModelFlow)
    samples: dict[str, ModelSample] = field(default_factory=dict)
    group_sizes: dict[str | None, int] = field(default_factory=dict)  # of groups with a size of their own
    closed_at: dict[str | None, int] = field(default_factory=dict)
    # How many members a task keeps of a group whose other members were given back.
    kept: dict[tuple[str, str | None], int] = field(default_factory=dict)
    steps: dict[tuple[str, int], list[list[str]]] = field(default_factory=dict)
    steps_left: dict[tuple[str, int], set[str]] = field(default_factory=dict)
    is_finished: bool = False
    written: int = 0
    clock: int = 0

    def register(self, num_samples: int, tasks: list[str]) -> None:
        """Register it again: samples stay, and so do the cursors of tasks that stay."""
        self.num_samples, self.tasks, self.written, self.is_finished = num_samples, tasks, 0, False
        self.kept = {key: count for key, count in self.kept.items() if key[0] in tasks}
        for sample in self.samples.values():
            sample.cursors = {task: cursor for task, cursor in sample.cursors.items() if task in tasks}
        self.evict_stale()

    def put(
        self,
        ids: Sequence[str],
        columns: Mapping[str, Sequence[Any]],
        tags: Sequence[Mapping[str, Any]],
        is_finished: bool = True,
    ) -> None:
        """Write rows and tags. Rows of a turn that is not the last one are there, and not finished."""
        for index, sample_id in enumerate(ids):
            self.clock += 1
            if sample_id not in self.samples:
                group = sample_id.rpartition("_g")[0] if self.group_size else None
                self.samples[sample_id] = ModelSample(self.clock, group)
                self.written += 1
                if group and "group_size" in tags[index]:
                    self.group_sizes.setdefault(group, tags[index]["group_size"])
            sample = self.samples[sample_id]
            for name, rows in columns.items():
                sample.rows[name] = rows[index]
                if is_finished:
                    sample.written_at.setdefault(name, self.clock)
                    for cursor in sample.cursors.values():
                        cursor.is_held = False
            sample.tags.update(tags[index])
        self.evict_stale()

    # Claims

    def units(self, claim: ModelClaim) -> list[Unit]:
        """What a claim may get now, in order. A condition hides samples; it does not move them."""
        step = self.flow.step(claim.task)
        places = {
            i: self.samples[i].place(claim.task, claim.required)
            for i in self._unclaimed(claim, step)
            if self.samples[i].has(claim.required)
        }
        units: dict[str, Unit] = {}
        for i in sorted(places, key=places.__getitem__):
            units.setdefault(str(self.samples[i].group) if self.group_size else i, []).append(i)
        # A group stands where the last thing that happened to it has put it.
        last = {
            name: max((places[i] for i in unit), key=lambda place: abs(place[1]))
            for name, unit in units.items()
        }
        for name, unit in units.items():
            # A group that was closed has become whole by that.
            closed_at = self.closed_at.get(self.samples[unit[0]].group, 0)
            if closed_at > abs(last[name][1]):
                last[name] = (1, closed_at)
        whole = [name for name, unit in units.items() if len(unit) >= self._needed(claim.task, unit[0])]
        whole.sort(key=last.__getitem__)
        if claim.order == "lifo":
            whole.sort(key=lambda name: -abs(last[name][1]))
        order = claim.order or self.flow.order(claim.task)
        if order not in (None, "lifo"):
            whole.sort(key=lambda name: self._rank(units[name], str(order)))
        return [units[name] for name in whole]

    def room(self, units: Sequence[Unit]) -> int:
        """What they take of a batch: a short group as much as one of full size."""
        return sum(max(len(unit), self.group_size or 1) for unit in units)

    def fit(self, claim: ModelClaim) -> tuple[list[Unit], bool] | None:
        """The first that fit into all limits of the claim, and whether one of the limits is reached. None:
        the very first is too large, or has no length."""
        taken: list[Unit] = []
        gate = self.flow.gate(claim.task)
        for unit in self.units(claim):
            if self.room([*taken, unit]) > claim.size:
                return (taken, True) if taken else None
            if gate is not None and unit[0] not in self.flow.tickets:
                if gate <= 0:
                    return taken, bool(taken)
                gate -= 1
            if claim.max_tokens is not None:
                lengths = [self.samples[i].tags.get("input_lengths") for i in unit]
                alone = None if None in lengths else sum(n or 0 for n in lengths)
                if alone is None or alone > claim.max_tokens:
                    return (taken, True) if taken else None
                so_far = sum(self.samples[i].tags["input_lengths"] for other in taken for i in other)
                if so_far + alone > claim.max_tokens:
                    return taken, True
            taken.append(unit)
        return taken, self.room(taken) == claim.size

    def full_batch_or_tail(self, claim: ModelClaim) -> list[Unit] | None:
        """What a claim that fits gets when it waits, or None if it has to go on waiting."""
        fitting = self.fit(claim)
        assert fitting is not None
        taken, is_full = fitting
        if is_full:
            return taken
        step, has_ended = self.flow.step(claim.task), self._has_ended(claim)
        # Of less than one for each rank none gets any.
        if has_ended and len(self.remaining(claim, any_step=True)) < max(claim.ranks, 1):
            return []
        if step is not None:
            is_last = self._is_rest_of_step(step)
        else:
            is_last = has_ended or self.written == self.num_samples
        return taken if taken and is_last and self.room(taken) == sum(self.remaining(claim)) else None

    def remaining(self, claim: ModelClaim, any_step: bool = False) -> list[int]:
        """What the claim could still get, ready or not, if nothing new were written: the room of each."""
        left = self._unclaimed(claim, None if any_step else self.flow.step(claim.task))
        if self.group_size is None:
            return [1] * len(left)
        members = Counter(self.samples[i].group for i in left)
        firsts = {self.samples[i].group: i for i in left}
        needed = {group: self._needed(claim.task, i) for group, i in firsts.items()}
        return [max(needed[g], self.group_size) for g, n in members.items() if n >= needed[g]]

    def claim(self, claim: ModelClaim, units: Sequence[Unit]) -> None:
        """Move the cursor of the task over what it was given."""
        self.flow.claim(claim.task, units)
        for unit in units:
            self.kept.pop((claim.task, self.samples[unit[0]].group), None)
            for i in unit:
                self.clock += 1
                cursor = self.samples[i].cursor(claim.task)
                cursor.is_claimed, cursor.claimed_at, cursor.given_back_at = True, self.clock, 0
                cursor.is_held = not claim.ranks  # what ranks share belongs to none of them
        if claim.max_uses > 1:
            self._line_up_again(claim, units)

    def _line_up_again(self, claim: ModelClaim, units: Sequence[Unit]) -> None:
        for unit in units:
            cursors = [self.samples[i].cursor(claim.task) for i in unit]
            for cursor in cursors:
                cursor.uses += 1
            if all(cursor.uses < claim.max_uses for cursor in cursors) and all(
                _matches(self.samples[i].tags, claim.repeat_where) for i in unit
            ):
                for cursor in cursors:
                    self.clock += 1
                    cursor.is_claimed = cursor.is_held = False
                    cursor.lined_up_at = self.clock

    def held(self, task: str, ids: Sequence[str]) -> list[str]:
        """Those that the task has claimed and is not finished with, in the order of the claims."""
        live = [i for i in dict.fromkeys(ids) if i in self.samples and self.samples[i].cursor(task).is_held]
        return sorted(live, key=lambda i: self.samples[i].cursor(task).claimed_at)

    def give_back(self, task: str, ids: Sequence[str]) -> None:
        """Samples that were claimed can be claimed again, before all others and in the same order."""
        for i in reversed(ids):
            self.clock += 1
            cursor = self.samples[i].cursor(task)
            cursor.is_claimed = cursor.is_held = False
            cursor.given_back_at = self.clock
        self.flow.give_back(task, ids)
        for group in {self.samples[i].group for i in ids if self.group_size}:
            self._count_kept(task, group)

    def share(self, claim: ModelClaim, step: int, units: Sequence[Unit], parts: list[list[str]]) -> None:
        """The ranks of a step have claimed units together, and each has its part."""
        self.claim(claim, units)
        self.steps[claim.task, step] = parts
        self.steps_left[claim.task, step] = {i for part in parts for i in part}

    def is_part_over(self, task: str, step: int, rank: int) -> bool:
        """Whether all samples of a rank's part, if it had some, have been cleared."""
        part = self.steps[task, step][rank]
        return bool(part) and self.steps_left[task, step].isdisjoint(part)

    # Groups that end short

    def close_group(self, group: str, reason: str, fields: Sequence[str]) -> int:
        """Make the finished members of a group the whole of it; return how many they are."""
        members = [i for i, sample in self.samples.items() if sample.group == group]
        fields = fields or list({n for i in members for n in self.samples[i].written_at})
        finished = [i for i in members if self.samples[i].has(fields)]
        expected = self._size_of(group)
        self.clock += 1
        if finished and len(finished) < expected:
            self.group_sizes[group], self.closed_at[group] = len(finished), self.clock
            self.flow.closed_short[reason] += 1
            short = {"expected": expected, "members": len(finished), "reason": reason}
            for i in finished:
                self.samples[i].tags["short_group"] = short
        self.evict([i for i in members if i not in finished], reason)
        for task in self.tasks:
            self._count_kept(task, group)
        return len(finished)

    # What is there

    def matching(self, where: Mapping[str, Any]) -> list[str]:
        """The live samples that match, claimed or not, in the order of their first write."""
        return [sample_id for sample_id, sample in self.samples.items() if _matches(sample.tags, where)]

    def ordered(self, ids: Sequence[str], order: str | None) -> list[str]:
        """Samples in the order of a look: ``lifo`` or ``priority:<tag>``, else that of their first write."""
        if order == "lifo":
            return list(reversed(ids))
        return sorted(ids, key=lambda i: self._rank([i], order)) if order else list(ids)

    def clear(self, ids: Sequence[str]) -> None:
        """Remove samples."""
        gone = [i for i in ids if i in self.samples]
        self.flow.remove(gone, TRAINING in self.tasks)
        for sample_id in gone:
            group = self.samples.pop(sample_id).group
            for left in self.steps_left.values():
                left.discard(sample_id)
            if group and not any(sample.group == group for sample in self.samples.values()):
                self.group_sizes.pop(group, None)
                self.closed_at.pop(group, None)
                self.kept = {key: count for key, count in self.kept.items() if key[1] != group}

    def evict(self, ids: Sequence[str], reason: str) -> None:
        """Remove samples, count them and remember them for whoever asks."""
        for sample_id in ids:
            self.flow.evict(sample_id, self.samples[sample_id].tags, reason)
        self.clear(ids)

    def evict_stale(self) -> None:
        """Evict what is too old, with the rest of its group, unless it is being trained."""
        idle = [i for i, sample in self.samples.items() if not sample.cursor(TRAINING).is_claimed]
        stale = [i for i in idle if self.flow.is_stale(self.samples[i].tags)]
        groups = {self.samples[i].group for i in stale if self.group_size}
        self.evict([i for i in idle if i in stale or self.samples[i].group in groups], "stale")

    def is_consumed(self, tasks: Sequence[str]) -> bool:
        """What ``check_consumption_status`` says."""
        if not self.written and not self.samples:
            return False
        return all(sample.cursor(task).is_claimed for sample in self.samples.values() for task in tasks)

    def _unclaimed(self, claim: ModelClaim, step: int | None) -> list[str]:
        return [
            i
            for i, sample in self.samples.items()
            if not sample.cursor(claim.task).is_claimed
            and _matches(sample.tags, claim.where)
            and (step is None or self.flow.is_of_step(i, step))
        ]

    def _size_of(self, group: str | None) -> int:
        return self.group_sizes.get(group, self.group_size or 1)

    def _needed(self, task: str, sample_id: str) -> int:
        group = self.samples[sample_id].group
        return self._size_of(group) - self.kept.get((task, group), 0)

    def _count_kept(self, task: str, group: str | None) -> None:
        """How many members a task keeps of a group, unless it has all or none of them."""
        members = [sample for sample in self.samples.values() if sample.group == group]
        kept = sum(sample.cursor(task).is_claimed for sample in members)
        self.kept.pop((task, group), None)
        if 0 < kept < self._size_of(group):
            self.kept[task, group] = kept

    def _rank(self, unit: Unit, order: str) -> float:
        """The lowest comes first."""
        kind, _, tag = order.partition(":")
        none = float("inf") if kind == "oldest" else -float("inf")
        values: list[float] = [self.samples[i].tags.get(tag or "weight_version", none) for i in unit]
        return {"priority": -max(values), "freshest": -min(values), "oldest": min(values)}[kind]

    def _has_ended(self, claim: ModelClaim) -> bool:
        """Nothing new is expected; ranks also stop at a flow that went past ``num_samples``."""
        return self.is_finished or (claim.ranks > 0 and 0 < self.num_samples <= self.written)

    def _is_rest_of_step(self, step: int) -> bool:
        """Whether a step has all the prompts that it will ever have."""
        if self.flow.is_issued(step):
            return True
        # Its missing prompts may still come, unless all that there are have been admitted.
        may_come = not self.is_finished and self.written != self.num_samples
        return not may_come and all(s.cursor("rollout").is_claimed for s in self.samples.values())


def _matches(tags: Mapping[str, Any], where: Mapping[str, Any]) -> bool:
    for name, condition in where.items():
        if name not in tags:
            return False
        conditions = condition if isinstance(condition, dict) else {"==": condition}
        for symbol, value in conditions.items():
            try:
                if not _OPERATORS[symbol](tags[name], value):
                    return False
            except TypeError:
                return False
    return True
