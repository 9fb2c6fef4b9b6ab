"""``FlowControl``: what a partition's flow policy says of its rows: which may be admitted, which are of the
step that is trained now, and which are too old."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlplane.control.arrays import starts_of_runs
from rlplane.control.cursors import Cursors, TaskCursor
from rlplane.control.fields import Rows
from rlplane.control.flow import NEVER, FlowState
from rlplane.control.group_members import GroupMembers
from rlplane.control.looking import Looking
from rlplane.control.samples import NO_ROWS, SampleTable


class FlowControl:
    """The policy of a partition (:class:`~rlplane.control.policies.FlowPolicy`), applied."""

    def __init__(
        self, table: SampleTable, groups: GroupMembers, flow: FlowState, cursors: Cursors, looking: Looking
    ) -> None:
        self._table, self._groups, self._flow = table, groups, flow
        self._cursors, self._looking = cursors, looking
        self.declare()

    def gate(self, task: TaskCursor) -> int | None:
        """How many prompts may be admitted now; None where the policy does not hold this task back."""
        policy = self._table.spec.flow
        if policy is None or not policy.is_gated or task.name != policy.admitting_task:
            return None
        return policy.admissible(self._flow.version) - self._flow.admitted

    def step_of(self, task: TaskCursor) -> int | None:
        """The step that the task trains now, where the policy keeps steps apart."""
        policy = self._table.spec.flow
        if policy is None or policy.kind != "in_order" or task.name != policy.training_task:
            return None
        return self._flow.current_step(policy.batch)

    def rows_of_step(self, step: int) -> Rows:
        """The rows of the prompts that were admitted for a step."""
        policy = self._table.spec.flow
        assert policy is not None
        return self._flow.rows_of_step(step, policy.batch)

    def is_issued(self, step: int) -> bool:
        """Whether a step has all the prompts that it will ever have."""
        policy = self._table.spec.flow
        assert policy is not None
        if self._flow.is_issued(step, policy.batch):
            return True
        # Its missing prompts may never come.
        admitting = self._cursors.tasks[policy.admitting_task]
        may_come = not self._table.finished and self._table.written != self._table.spec.num_samples
        return not may_come and admitting.settled >= len(self._table.rows)

    def note_claim(self, task: TaskCursor, rows: Rows) -> None:
        """Rows were claimed: for generation they get tickets, for training they use them."""
        policy = self._table.spec.flow
        if policy is None:
            return
        if task.name == policy.admitting_task:
            if not policy.is_gated:
                self._flow.begin(rows)
            elif not self._table.spec.group_size:
                self._flow.admit(rows)
            else:
                places: dict[str, int] = {}
                names = self._table.groups[rows]
                starts = starts_of_runs(names)
                prompts = [places.setdefault(name, len(places)) for name in names[starts].tolist()]
                self._flow.admit(rows, np.repeat(prompts, np.diff(starts, append=len(rows))))
        if task.name == policy.training_task and self._flow.is_used:
            self._flow.train(rows)

    def declare(self) -> None:
        """Follow a new policy."""
        policy = self._table.spec.flow
        evicts = policy is not None and policy.oldest(0) is not None
        self._looking.keep_versions(policy.version_tag if policy is not None and evicts else None)

    def stale(self, rows: Rows) -> Rows:
        """Of these rows those that are too old to be trained, with the rest of their groups. What is being
        trained stays."""
        policy, versions = self._table.spec.flow, self._looking.versions
        oldest = None if policy is None else policy.oldest(self._flow.version)
        if policy is None or oldest is None or versions is None:
            return NO_ROWS
        claimed = self._cursors.tasks[policy.training_task].claimed
        return self._with_groups(rows[(versions(rows) < oldest) & ~claimed[rows]])

    def know_versions(self, most: int) -> bool:
        """Look up the versions of so many samples; True if all of them are known now."""
        return self._looking.versions is None or self._looking.versions.learn(most)

    def next_stale(self, version: int, most: int) -> Rows:
        """The same of all rows whose versions are known, at a version of the partition: about so many."""
        policy, versions = self._table.spec.flow, self._looking.versions
        oldest = None if policy is None else policy.oldest(version)
        if policy is None or oldest is None or versions is None:
            return NO_ROWS
        claimed = self._cursors.tasks[policy.training_task].claimed
        rows = np.flatnonzero(versions.before(oldest) & ~claimed)
        return self._with_groups(rows[:most], most)

    def _with_groups(self, rows: Rows, most: float = math.inf) -> Rows:
        """Rows that are too old with the rest of their groups, or about so many of them."""
        policy = self._table.spec.flow
        if policy is None or not self._table.spec.group_size or not len(rows):
            return rows
        claimed = self._cursors.tasks[policy.training_task].claimed
        found: dict[int, None] = {}
        for row in rows.tolist():
            if row not in found:
                members = self._groups.of(self._table.groups[row])
                found.update(dict.fromkeys(member for member in members if not claimed[member]))
                if len(found) >= most:
                    break
        return np.array(list(found), np.int64)

    def should_abort(self, ids: Sequence[str]) -> list[str]:
        """Those whose generation is in vain: they are gone, or would be too old when they are done."""
        policy = self._table.spec.flow
        oldest = None if policy is None else policy.oldest(self._flow.version)
        vain = []
        for sample_id in ids:
            row = self._table.rows.get(sample_id)
            if row is None:
                vain.append(sample_id)
            elif policy is not None and oldest is not None:
                version = policy.version_of(self._table.tags[row])
                if version is None and self._flow.begun[row] != NEVER:
                    version = int(self._flow.begun[row])
                if version is not None and version < oldest:
                    vain.append(sample_id)
        return vain

    def remove(self, rows: Rows) -> None:
        """Samples are gone, and their tickets free if they were not used."""
        if self._flow.is_used:
            policy = self._table.spec.flow
            reuse = policy is not None and policy.training_task in self._cursors.tasks
            self._flow.remove(rows, reuse=reuse)

    def status(self, ready_to_admit: int) -> dict[str, Any]:
        """What the policy has done so far."""
        policy, flow = self._table.spec.flow, self._flow
        waiting = 0
        if policy is not None and policy.is_gated:
            room = max(policy.admissible(flow.version) - flow.admitted, 0)
            waiting = max(ready_to_admit - room * (self._table.spec.group_size or 1), 0)
        return {
            "policy": None if policy is None else policy.kind,
            "version": flow.version,
            "max_staleness": None if policy is None or policy.kind == "unbounded" else policy.max_staleness,
            "admitted": flow.admitted,
            "waiting_for_admission": waiting,
            "evicted": dict(flow.evicted),
            "closed_short": dict(flow.closed_short),
        }
