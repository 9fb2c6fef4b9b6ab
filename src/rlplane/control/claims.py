"""``Claims``: how the claims of a partition's tasks are answered.

What a claim may have follows from its queue, its conditions and budgets, the flow policy, and the ranks that
share it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplane.control.arrays import starts_of_runs
from rlplane.control.conditions import Look, Matches
from rlplane.control.cursors import Cursors, TaskCursor
from rlplane.control.fields import Rows
from rlplane.control.flow import NO_TICKET, FlowState
from rlplane.control.flow_control import FlowControl
from rlplane.control.group_members import GroupMembers
from rlplane.control.groups import GroupQueue
from rlplane.control.looking import Looking
from rlplane.control.ordered_rows import LongFront, MatchingFront, OrderedRowQueue
from rlplane.control.policies import LENGTH_TAG, tokens_of
from rlplane.control.queues import Match, ReadyQueue
from rlplane.control.requests import NOBODY, Batch, Claim
from rlplane.control.rules import why_nothing_matches
from rlplane.control.samples import SampleTable
from rlplane.control.snapshots import ids_and_tags_of
from rlplane.control.steps import StepKey, Steps, divided
from rlplane.errors import ClaimTimeoutError, DataPlaneError, InvalidRequestError, StepOverError

# Samples that match a condition are counted up to this many, for a status.
_MOST_COUNTED = 10_000
_LOOKED_AT_ONCE = 1024


class Claims:
    """Answers claims, those that wait among them."""

    def __init__(
        self,
        table: SampleTable,
        groups: GroupMembers,
        flow: FlowState,
        cursors: Cursors,
        looking: Looking,
        flow_control: FlowControl,
    ) -> None:
        self._table, self._groups, self._flow = table, groups, flow
        self._cursors, self._looking, self._flow_control = cursors, looking, flow_control
        self.steps = Steps()

    @property
    def keeps_steps(self) -> bool:
        """Whether a claim of one task may be what one of another waits for: it admits prompts of a step."""
        policy = self._table.spec.flow
        return policy is not None and policy.kind == "in_order"

    def claim(self, task: TaskCursor, queue: ReadyQueue, claim: Claim, count: int) -> Batch:
        """Hand up to ``count`` ready samples to the task."""
        return Batch(*ids_and_tags_of(self._table, self._take(task, queue, claim, count)))

    def _take(self, task: TaskCursor, queue: ReadyQueue, claim: Claim, count: int) -> Rows:
        step = self._flow_control.step_of(task)
        if step is None or self._table.spec.group_size:
            rows = queue.pop(count, self._match_of(claim, step))
        else:
            rows = self._ready_in_step(queue, claim, step)[:count]
            queue.take(rows)
        if len(rows):
            if self._table.savers:
                self._table.about_to_differ(rows)
            self._flow_control.note_claim(task, rows)
            # What the ranks of a step share belongs to none of them: one that dies gets its part again.
            task.take(rows, claim.owner if claim.step is None else NOBODY, popped_from=queue)
            if task.kept:
                self._cursors.forget_kept(task, rows)
            if claim.max_uses > 1:
                self._cursors.line_up_again(task, rows, claim)
        return rows

    def available(self, task: TaskCursor, queue: ReadyQueue, claim: Claim) -> int:
        """How many samples, or more than are there, a claim that does not wait may have."""
        if self._is_limited(task, claim):
            return self._fit(task, queue, claim)[0]
        return claim.batch_size

    def _is_limited(self, task: TaskCursor, claim: Claim) -> bool:
        """Whether a claim has other limits than its batch size, so that ``_fit`` has to look."""
        if claim.max_tokens is not None or self._groups.sizes:
            return True
        gate = self._flow_control.gate(task)
        return gate is not None and gate * (self._table.spec.group_size or 1) < claim.batch_size

    def _fit(self, task: TaskCursor, queue: ReadyQueue, claim: Claim) -> tuple[int, bool]:
        """How many of the next samples fit into the claim's limits, and whether one is used up."""
        count, tokens = 0, 0.0
        gate = self._flow_control.gate(task)
        for units in queue.pieces(self._match_of(claim, self._flow_control.step_of(task))):
            if not len(units.lengths):
                continue
            starts = units.starts
            # For each unit, what it and all that come before it need.
            room = count + np.cumsum(queue.rooms(units))
            fits = end = int(np.searchsorted(room, claim.batch_size, "right"))
            if gate is not None:
                admitted = np.cumsum(self._flow.places[units.rows[starts]] == NO_TICKET)
                end = min(end, admissible := int(np.searchsorted(admitted, max(gate, 0), "right")))
            if claim.max_tokens is not None:
                needed = tokens + np.cumsum(np.add.reduceat(self._looking.tokens(units.rows), starts))
                end = min(end, int(np.searchsorted(needed, claim.max_tokens, "right")))
            if end:
                count = int(room[end - 1])
            if end < len(starts):
                if gate is not None and end == admissible and end < fits:
                    return count, count > 0  # with nothing admitted yet, it waits
                if not count:
                    # It is an error when it comes first.
                    raise self._never_fits(units.rows[: units.lengths[0]], claim)
                return count, True
            if gate is not None:
                gate -= int(admitted[-1])
            if claim.max_tokens is not None:
                tokens = float(needed[-1])
        return count, count == claim.batch_size

    def _never_fits(self, rows: Rows, claim: Claim) -> InvalidRequestError:
        """Why a sample, or a group, is too large for a claim."""
        ids, is_group = self._table.ids[rows].tolist(), self._table.spec.group_size
        what = f"the group of sample {ids[0]!r}" if is_group else f"sample {ids[0]!r}"
        if len(rows) > claim.batch_size:
            text = f"{what} has {len(rows)} members, and a claim of task {claim.task!r} takes batch_size="
            return InvalidRequestError(f"{text}{claim.batch_size}")
        try:
            tokens = sum(map(tokens_of, ids, self._table.tags[rows].tolist()))
        except InvalidRequestError as error:
            return error
        return InvalidRequestError(
            f"{what} has {tokens} tokens, and a claim takes max_tokens={claim.max_tokens}"
        )

    # Claims that wait

    def answer(self, task: TaskCursor) -> list[tuple[object, Batch | DataPlaneError]]:
        """Answer the waiting claims that can be answered, first come, first served.

        A claim that cannot be answered yet holds back the later ones that want the same: those
        of the same fields, or, if it has conditions, those with the same conditions.
        """
        answers: list[tuple[object, Batch | DataPlaneError]] = []
        while task.waiting and not task.to_line_up:
            is_shared = any(claim.max_uses > 1 or claim.step is not None for claim in task.waiting)
            some = self._answer(task)
            answers += some
            # What was claimed may be all that stood between an earlier claim and the next step or its tail,
            # and what has lined up again, or was divided, may be what it waits for.
            if not some or not (is_shared or self.keeps_steps or self._is_written):
                break
        return answers

    def _answer(self, task: TaskCursor) -> list[tuple[object, Batch | DataPlaneError]]:
        answers: list[tuple[object, Batch | DataPlaneError]] = []
        held: list[tuple[ReadyQueue, Mapping[str, Any] | None]] = []
        left = []
        for claim in task.waiting:
            queue = self._cursors.queue(task, claim)
            if claim.step is not None:
                part = self._part_of(task, claim)
                if part is not None:
                    answers.append((claim.token, part))
                    continue
            behind = any(q is queue and (where is None or where == claim.where) for q, where in held)
            answer = None if behind else self._attempt(task, queue, claim)
            if answer is not None:
                answers.append((claim.token, answer))
                continue
            left.append(claim)
            if not behind:
                held.append((queue, claim.where))
        task.waiting = left
        for queue in task.queues.values():
            queue.keep_counts(left)
        return answers

    def answer_first(
        self, task: TaskCursor, queue: ReadyQueue, claim: Claim
    ) -> Batch | DataPlaneError | None:
        """The answer to a claim before which none of its task waits, as :meth:`answer` would give it; None,
        and it waits, if it cannot be answered yet."""
        answer = self._attempt(task, queue, claim)
        if answer is None:
            task.waiting.append(claim)
        else:
            queue.keep_counts(())
        return answer

    def _attempt(self, task: TaskCursor, queue: ReadyQueue, claim: Claim) -> Batch | DataPlaneError | None:
        """The answer to a claim whose turn it is; None if it has to wait."""
        try:
            count = self._grantable(task, queue, claim)
        except InvalidRequestError as error:
            return error
        if count:
            give = self.claim if claim.step is None else self._divide
            return give(task, queue, claim, count)
        if not self._is_over(task, claim):
            return None
        if claim.step is not None:
            self.steps.add(StepKey(task.name, claim.step), [[] for _ in range(claim.dp_world)])
        return Batch([], [])

    def _grantable(self, task: TaskCursor, queue: ReadyQueue, claim: Claim) -> int:
        """How many samples a waiting claim may have now: a full batch, the tail, or 0."""
        spec = self._table.spec
        simple = claim.condition is None and claim.max_tokens is None and not self._groups.sizes
        step = None if spec.flow is None else self._flow_control.step_of(task)
        if simple and spec.flow is None:
            match = None
            ready = queue.count(claim.batch_size, None, claim)
            if ready >= claim.batch_size:
                return claim.batch_size
        elif not self._is_limited(task, claim):
            match = self._match_of(claim, step)
            if step is not None and not spec.group_size:
                ready = len(self._ready_in_step(queue, claim, step))
            else:
                # What is of the step changes with the step: it is not remembered.
                ready = queue.count(claim.batch_size, match, claim if step is None else None)
            if ready >= claim.batch_size:
                return claim.batch_size
        else:
            match = self._match_of(claim, step)
            ready, is_full = self._fit(task, queue, claim)
            if is_full:
                return ready
        if not ready:
            return 0
        if step is not None:
            is_last = self._flow_control.is_issued(step)
        else:
            is_last = self._table.written == spec.num_samples or self._has_ended(claim)
        if not is_last:
            return 0
        left = 0
        is_all = match is None and queue.ready == len(self._table.rows) - task.settled
        for room, _ in () if is_all else self._remaining(task, match, step):
            left += room
            if left > ready:
                return 0
        # Less than one for each rank is left over.
        return ready if claim.step is None or not self._is_over(task, claim) else 0

    @property
    def _is_written(self) -> bool:
        """Whether all that was announced has been written."""
        table = self._table
        return table.finished or 0 < table.spec.num_samples <= table.written

    def _has_ended(self, claim: Claim) -> bool:
        """Whether nothing new is expected. Ranks must agree on the end, so they also stop at a flow that went
        past ``num_samples``."""
        return self._is_written if claim.step is not None else self._table.finished

    def _is_over(self, task: TaskCursor, claim: Claim) -> bool:
        """Whether a claim would wait for ever: nothing is left for it, and nothing is to come."""
        if not self._has_ended(claim):
            return False
        # Whatever step it is of.
        least = claim.dp_world if claim.step is not None else 1
        for _, found in self._remaining(task, self._matches(claim), in_samples=claim.split_groups):
            least -= found
            if least <= 0:
                return False
        return True

    def _ready_in_step(self, queue: ReadyQueue, claim: Claim, step: int) -> Rows:
        """The samples of a step that are ready for a claim, in the order of the queue, without a look at what
        is not of the step."""
        rows, matches = queue.among(self._flow_control.rows_of_step(step)), self._matches(claim)
        return rows if matches is None else rows[matches(rows)]

    def _remaining(
        self, task: TaskCursor, match: Match | None, step: int | None = None, *, in_samples: bool = False
    ) -> Iterator[tuple[int, int]]:
        """How much (of a step) this claim could still get, ready or not, if nothing new is written: what it
        takes of a batch, and how many samples or groups it is; in parts, so that one can stop early."""
        table, size = self._table, self._table.spec.group_size
        if match is None and not size:
            left = len(table.rows) - task.settled
            yield left, left
            return
        if step is None:
            unclaimed = np.flatnonzero(table.serial >= 0)
        else:
            unclaimed = self._flow_control.rows_of_step(step)
        unclaimed = unclaimed[~task.keeps(unclaimed)]
        rows = unclaimed if match is None else unclaimed[match(unclaimed)]
        if not size:
            yield len(rows), len(rows)
            return
        is_left = np.zeros(table.size, bool)
        is_left[rows] = True
        seen: set[str] = set()
        for at in range(0, len(rows), _LOOKED_AT_ONCE):
            groups = table.groups[rows[at : at + _LOOKED_AT_ONCE]]
            names = [n for n in dict.fromkeys(groups[starts_of_runs(groups)].tolist()) if n not in seen]
            seen.update(names)
            counts = self._groups.count(names, is_left.__getitem__)
            if not (self._groups.sizes or self._groups.clocks or task.kept):  # as it mostly is
                whole = sum(count // size for count in counts)
                yield whole * size, whole * (size if in_samples else 1)
                continue
            for name, count in zip(names, counts, strict=True):
                own = self._groups.size_of(name)
                needed = own - task.kept.get(name, 0)
                # One that lacks members cannot become whole any more, unless it ends by itself.
                if count >= needed or name in self._groups.clocks:
                    yield max(needed, size), needed if in_samples else 1
                # Further ones of the same name.
                for _ in range((count - needed) // own):
                    yield max(own, size), own if in_samples else 1

    # Ranks that share a step

    def _part_of(self, task: TaskCursor, claim: Claim) -> Batch | DataPlaneError | None:
        """What a rank has of a step that was divided already."""
        assert claim.step is not None
        key = StepKey(task.name, claim.step)
        step = self.steps.get(key)
        if step is None:
            if self.steps.is_finished(key):
                return StepOverError(f"step {claim.step!r} is over: its samples have been cleared")
            return None
        if len(step.parts) != claim.dp_world:
            text = f"step {claim.step!r} was divided over {len(step.parts)} ranks, not {claim.dp_world}"
            return InvalidRequestError(text)
        ids = step.parts[claim.dp_rank]
        if ids and not step.left[claim.dp_rank]:
            return StepOverError(
                f"step {claim.step!r} is over for rank {claim.dp_rank}: its samples have been cleared"
            )
        rows = self._table.rows.find(ids)
        return Batch(list(ids), [{} if row is None else self._table.tags[row] for row in rows])

    def _divide(
        self, task: TaskCursor, queue: ReadyQueue, claim: Claim, count: int
    ) -> Batch | DataPlaneError:
        """Claim a batch for all ranks of a step; return the part of the one that asks."""
        assert claim.step is not None
        table = self._table
        rows = self._take(task, queue, claim, count)
        units = [[row] for row in rows.tolist()]
        if table.spec.group_size and not claim.split_groups:
            groups: dict[str, list[int]] = {}
            for row, name in zip(rows.tolist(), table.groups[rows].tolist(), strict=True):
                groups.setdefault(name, []).append(row)
            units = list(groups.values())
        over = len(units) % claim.dp_world
        if over:
            self._cursors.put_back(task, np.array([row for unit in units[-over:] for row in unit], np.int64))
            units = units[:-over]
        if not units:
            return InvalidRequestError(
                f"step {claim.step!r}: within batch_size={claim.batch_size} and max_tokens="
                f"{claim.max_tokens} there is not one for each of {claim.dp_world} ranks"
            )
        tags = iter(table.tags[[row for unit in units for row in unit]].tolist())
        lengths = [sum(map(_length, itertools.islice(tags, len(unit)))) for unit in units]
        parts: list[list[str]] = [
            table.ids[[row for unit in part for row in units[unit]]].tolist()
            for part in divided(lengths, claim.dp_world)
        ]
        self.steps.add(StepKey(task.name, claim.step), parts)
        part = self._part_of(task, claim)
        assert part is not None
        return part

    # Which rows a claim may have

    def _match_of(self, claim: Claim, step: int | None) -> Match | None:
        """Which rows a claim may have, of a step if the policy keeps steps apart; None: any."""
        matches, policy = self._matches(claim), self._table.spec.flow
        if step is None or policy is None:
            return matches
        flow, batch = self._flow, policy.batch

        def of_step(rows: Rows) -> NDArray[np.bool_]:
            chosen = flow.are_of_step(rows, step, batch)
            if matches is not None:
                chosen[chosen] = matches(rows[chosen])
            return chosen

        return of_step

    def _matches(self, claim: Claim) -> Matches | None:
        """Which rows satisfy a claim's condition, as far as it is known from earlier claims."""
        if claim.condition is None:
            return None
        return self._looking.conditions.get(claim.condition_key, claim.condition)

    def look_for(self, task: TaskCursor, claim: Claim) -> Iterator[Look]:
        """Looks at the tags that a claim will ask about."""
        key, order = self._cursors.wanted(task, claim)
        if self._table.spec.group_size:
            yield from self._cursors.look_at_groups(task, key, order)
        elif order is not None:
            yield from self._cursors.look_at_queue(task, key, order)
        else:
            yield from self._cursors.look_at_rows(task, key)
        matches, queue, size = self._matches(claim), task.queues.get(key), claim.batch_size
        if isinstance(queue, OrderedRowQueue):
            yield LongFront(queue, size) if matches is None else MatchingFront(queue, matches, size)
            matches = None
        elif isinstance(queue, GroupQueue) and isinstance(queue.line, OrderedRowQueue):
            yield LongFront(queue.line, size // queue.group_size)
        if matches is None and claim.max_tokens is None and claim.repeats is None:
            return
        # A queue that is not there yet is left to the claim.
        rows, together = (self._table.live_rows(None), 1) if queue is None else queue.candidates()
        yield Look(self._table, rows, partial(self._see, claim, together), claim.batch_size, together)

    def _see(self, claim: Claim, together: int, rows: Rows) -> int:
        """Look at rows of which so many belong together; how many a claim may have."""
        matches, repeats = self._matches(claim), self._looking.repeats(claim)
        found = np.ones(len(rows), bool) if matches is None else matches(rows)
        if claim.max_tokens is not None:
            self._looking.tokens(rows[found])
        if repeats is not None:
            repeats(rows[found])
        if together > 1:
            if len(found) % together or not len(found):
                return 0  # of some group a member is gone; no matter, this says only when to stop
            found = np.logical_and.reduceat(found, np.arange(0, len(found), together))
        return int(np.count_nonzero(found)) * together

    # What people are told

    def timeout_error(self, task: TaskCursor, claim: Claim) -> ClaimTimeoutError:
        """What a claim is told that has waited in vain."""
        table, queue = self._table, self._cursors.queue(task, claim)
        ready = queue.count(claim.batch_size, self._match_of(claim, self._flow_control.step_of(task)), None)
        text = (
            f"task {task.name!r} waited for {claim.batch_size} samples of partition "
            f"{table.spec.partition_id!r} with fields {claim.fields}; {ready} were ready"
        )
        if claim.where:
            text += f" that match where={claim.where!r}, of {queue.ready} without it"
        text += f" ({len(table.rows)} live, {task.count} claimed already)"
        unwritten = [
            name for name in claim.fields if not (field := table.columns.get(name)) or not field.produced
        ]
        if unwritten and table.rows:
            text += f"; no live sample has {unwritten} yet"
        elif claim.where and not ready:
            some = table.live_rows(None)[:_MOST_COUNTED]
            reason = why_nothing_matches(claim.where, table.tags[some].tolist())
            text += f"; {reason}" if reason else ""
        return ClaimTimeoutError(text, ready)

    def readiness(self, task: TaskCursor) -> dict[str, Any]:
        """How many samples satisfy the claim that waits first, or that was made last, and what it asks
        for."""
        claim = next(iter(task.waiting), task.last)
        if claim is None or not self._table.columns.keys() >= set(claim.fields):
            return {"ready": None, "wanted": None, "fields": [], "where": None}
        key, order = self._cursors.wanted(task, claim)
        # A new one is not kept, because a look must not change in which order samples are handed out later.
        queue = self._cursors.known_queue(task, key) or self._cursors.new_queue(task, key[0], order)
        match = self._match_of(claim, self._flow_control.step_of(task))
        ready = queue.ready if match is None else queue.count(_MOST_COUNTED, match, (claim, "status"))
        return {"ready": ready, "wanted": claim.batch_size, "fields": claim.fields, "where": claim.where}


def _length(tags: Mapping[str, Any]) -> int:
    length = tags.get(LENGTH_TAG)
    return length if type(length) is int else 1
