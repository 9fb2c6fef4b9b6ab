"""What the control state of a plane does, done with dictionaries and loops: a model for its tests.

It follows the sentences of ``docs/contract.md`` and knows nothing of rows, serials, stamps in arrays or lazy
deletes. Whatever an operation answers, for its caller and for others, is added to ``answers``, in the order
of the real one's effects.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tests.unit.control.list_queues import ListOfGroups, ListOfRows

from rlplane.control.requests import Batch, Claim, Put
from rlplane.control.rules import PartitionSpec
from rlplane.errors import (
    CapacityError,
    CapacityTimeoutError,
    ClaimTimeoutError,
    DataPlaneError,
    InvalidRequestError,
    UnknownFieldError,
    UnknownPartitionError,
    UnknownTaskError,
)


@dataclass
class Sample:
    born_at: tuple[int, int]
    tags: dict[str, Any]
    group: str | None = None
    places: dict[str, tuple[int, int]] = field(default_factory=dict)
    ready_at: dict[str, tuple[int, int]] = field(default_factory=dict)
    writers: set[int] = field(default_factory=set)


@dataclass
class Cursor:
    """One task: who has claimed what, and in which order."""

    claimed: dict[str, tuple[int | None, int]] = field(default_factory=dict)
    queues: dict[tuple[str, ...], Any] = field(default_factory=dict)
    waiters: list[Claim] = field(default_factory=list)
    kept: dict[str, int] = field(default_factory=dict)
    # When a sample was given back last, and its place among those that were given back with it.
    back_at: dict[str, tuple[int, int]] = field(default_factory=dict)
    claims: int = 0


class Flow:
    """One partition."""

    def __init__(self, spec: PartitionSpec) -> None:
        self.spec = spec
        self.written = 0
        self.events = 0  # writes and samples that were given back, so far
        self.samples: dict[str, Sample] = {}
        self.ever_written: set[str] = set()
        self.writers: set[int] = set()
        self.tasks = {name: Cursor() for name in spec.tasks}

    @property
    def fields(self) -> set[str]:
        return set(self.spec.fields) | self.ever_written

    def is_ready(self, sample_id: str, required: tuple[str, ...]) -> bool:
        return self.samples[sample_id].places.keys() >= set(required)

    def groups(self) -> dict[str, str]:
        return {sample_id: str(sample.group) for sample_id, sample in self.samples.items()}

    def queue(self, task: Cursor, required: tuple[str, ...]) -> Any:
        if required not in task.queues:
            size = self.spec.group_size
            queue = task.queues[required] = ListOfGroups(size, task.kept) if size else ListOfRows()
            ready = [i for i in self.samples if i not in task.claimed and self.is_ready(i, required)]
            # What would have been done to it, had it been there from the beginning.
            last = {i: max(self._ready_at(i, required), task.back_at.get(i, (0, 0))) for i in ready}
            for event in sorted({at for at, _ in last.values()}):
                ids = sorted((i for i in ready if last[i][0] == event), key=lambda i: last[i])
                is_back = any(task.back_at.get(i, (0, 0))[0] == event for i in ids)
                (queue.restore if is_back else queue.offer)(ids, self.groups())
        return task.queues[required]

    def _ready_at(self, sample_id: str, required: tuple[str, ...]) -> tuple[int, int]:
        sample = self.samples[sample_id]
        return max((sample.ready_at[name] for name in required), default=sample.born_at)

    def matching(self, claim: Claim) -> set[str] | None:
        if claim.condition is None:
            return None
        return {i for i, sample in self.samples.items() if claim.condition(sample.tags)}

    def take(self, task: Cursor, claim: Claim, count: int) -> list[str]:
        queue = self.queue(task, _required(claim))
        ids: list[str] = queue.take(count, self.matching(claim))
        for other in task.queues.values():
            if other is not queue:
                other.discard(ids, self.groups())
        for sample_id in ids:
            task.kept.pop(str(self.samples[sample_id].group), None)
            task.claimed[sample_id] = (claim.owner, task.claims)
            task.claims += 1
        return ids

    def grantable(self, task: Cursor, claim: Claim) -> int:
        match = self.matching(claim)
        ready = self.queue(task, _required(claim)).room(match)
        if ready >= claim.batch_size:
            return claim.batch_size
        left = [i for i in self.samples if i not in task.claimed and (match is None or i in match)]
        size = self.spec.group_size
        if size:
            whole = 0
            for group, n in Counter(self.samples[i].group for i in left).items():
                kept = task.kept.get(str(group), 0)
                whole += size * (n >= size - kept) if kept else n // size * size
        else:
            whole = len(left)
        return ready if ready == whole and self.written == self.spec.num_samples else 0

    def give_back(self, task: Cursor, ids: list[str]) -> int:
        back = sorted((i for i in ids if i in task.claimed), key=lambda i: task.claimed[i][1])
        self.events += 1
        for place, sample_id in enumerate(back):
            del task.claimed[sample_id]
            task.back_at[sample_id] = (self.events, place)
        size = self.spec.group_size or 0
        for group in dict.fromkeys(self.samples[i].group for i in back) if size else ():
            mine = sum(self.samples[i].group == group for i in task.claimed)
            task.kept.pop(str(group), None)
            if mine % size:
                task.kept[str(group)] = mine % size
            for queue in task.queues.values():
                queue.look_again(str(group), self.groups())
        for required, queue in task.queues.items():
            queue.restore([i for i in back if self.is_ready(i, required)], self.groups())
        return len(back)


class PlaneModel:
    """All partitions."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.flows: dict[str, Flow] = {}
        self.waiting_puts: list[Put] = []
        self.answers: list[tuple[Any, Any]] = []
        # Blocks that the state has been given for good and has not yet handed back.
        self.given: dict[int, tuple[str, int]] = {}

    @property
    def live(self) -> int:
        return sum(len(flow.samples) for flow in self.flows.values())

    def references(self) -> Counter[int]:
        return Counter(
            block
            for flow in self.flows.values()
            for sample in flow.samples.values()
            for block, _ in sample.places.values()
        )

    def freed(self) -> set[int]:
        """The blocks that nobody refers to any more; each is told once."""
        used = self.references()
        free = {block for block in self.given if block not in used}
        for block in free:
            del self.given[block]
        return free

    def waiting(self) -> list[Any]:
        claims = [
            claim.token
            for flow in self.flows.values()
            for task in flow.tasks.values()
            for claim in task.waiters
        ]
        return [put.token for put in self.waiting_puts] + claims

    def flow(self, partition_id: str) -> Flow:
        if partition_id not in self.flows:
            raise UnknownPartitionError
        return self.flows[partition_id]

    def register(self, spec: PartitionSpec) -> None:
        flow = self.flows.get(spec.partition_id)
        if flow is None:
            self.flows[spec.partition_id] = Flow(spec)
            return
        if spec.group_size != flow.spec.group_size:
            if spec.group_size:
                groups = {i: s.group or group_name(i, s.tags) for i, s in flow.samples.items()}
                for sample_id, group in groups.items():
                    flow.samples[sample_id].group = group
            for task in flow.tasks.values():
                task.queues.clear()
                task.kept.clear()
        flow.spec, flow.written = spec, 0
        for name, task in flow.tasks.items():
            for claim in list(task.waiters):
                error = _made_impossible(flow, name, claim)
                if error is not None:
                    task.waiters.remove(claim)
                    self.answers.append((claim.token, error))
            task.queues = {r: queue for r, queue in task.queues.items() if flow.fields >= set(r)}
        flow.tasks = {name: flow.tasks.get(name) or Cursor() for name in spec.tasks}
        for put in [put for put in self.waiting_puts if put.partition_id == spec.partition_id]:
            try:
                self._new_samples(put)
            except DataPlaneError as error:
                self._refuse(put, error)
        self._serve(flow)
        self._retry()

    def put(self, put: Put) -> None:
        new = self._new_samples(put)
        if new > self.capacity:
            raise CapacityError
        if new and (self.waiting_puts or self.live + new > self.capacity):
            self.waiting_puts.append(put)
            return
        self.answers.append((put.token, None))
        self._write(put)

    def claim(self, claim: Claim, *, blocking: bool) -> None:
        flow = self.flow(claim.partition_id)
        if claim.task not in flow.tasks:
            raise UnknownTaskError
        if claim.batch_size < 1 or (flow.spec.group_size and claim.batch_size % flow.spec.group_size):
            raise InvalidRequestError
        if not flow.fields >= set(claim.fields):
            raise UnknownFieldError
        task = flow.tasks[claim.task]
        if not blocking:
            self.answers.append((claim.token, flow.take(task, claim, claim.batch_size)))
            return
        flow.queue(task, _required(claim))
        task.waiters.append(claim)
        self._serve(flow)

    def give_up(self, token: Any) -> None:
        for put in self.waiting_puts:
            if put.token is token:
                self._refuse(put, CapacityTimeoutError())
                self._retry()
                return
        for flow in self.flows.values():
            for task in flow.tasks.values():
                for claim in task.waiters:
                    if claim.token is token:
                        task.waiters.remove(claim)
                        self.answers.append((token, ClaimTimeoutError("", 0)))
                        self._serve(flow)
                        return

    def clear(self, partition_id: str, ids: list[str] | None) -> int:
        flow = self.flow(partition_id)
        gone = [i for i in dict.fromkeys(flow.samples if ids is None else ids) if i in flow.samples]
        if gone:
            groups = flow.groups()
            for task in flow.tasks.values():
                for queue in task.queues.values():
                    queue.discard(gone, groups)
                for sample_id in gone:
                    task.claimed.pop(sample_id, None)
                    task.back_at.pop(sample_id, None)
            for sample_id in gone:
                del flow.samples[sample_id]
            live = {str(sample.group) for sample in flow.samples.values()}
            for task in flow.tasks.values():
                for group in task.kept.keys() - live:
                    del task.kept[group]
            self._serve(flow)
            self._retry()
        return len(gone)

    def clear_written_by(self, partition_id: str, owner: int) -> int:
        flow = self.flow(partition_id)
        if owner not in flow.writers:
            return self.clear(partition_id, None)
        return self.clear(partition_id, [i for i, s in flow.samples.items() if owner in s.writers])

    def unclaim(self, partition_id: str, task: str, ids: list[str], owner: int) -> None:
        flow = self.flow(partition_id)
        if task in flow.tasks:
            claimed = flow.tasks[task].claimed
            flow.give_back(flow.tasks[task], [i for i in ids if i in claimed and claimed[i][0] == owner])
            self._serve(flow)

    def release_owner(self, owner: int) -> int:
        for put in [put for put in self.waiting_puts if put.owner == owner]:
            self.waiting_puts.remove(put)
            self._give(put)
        returned = 0
        for flow in self.flows.values():
            for task in flow.tasks.values():
                task.waiters = [claim for claim in task.waiters if claim.owner != owner]
                held = [i for i, (holder, _) in task.claimed.items() if holder == owner]
                returned += flow.give_back(task, held)
            flow.writers.discard(owner)
            for sample in flow.samples.values():
                sample.writers.discard(owner)
            self._serve(flow)
        self._retry()
        return returned

    def abort(self, error: DataPlaneError, owner: int | None) -> None:
        for put in [put for put in self.waiting_puts if owner in (None, put.owner)]:
            self._refuse(put, error)
        for flow in self.flows.values():
            for task in flow.tasks.values():
                for claim in [claim for claim in task.waiters if owner in (None, claim.owner)]:
                    task.waiters.remove(claim)
                    self.answers.append((claim.token, error))
            self._serve(flow)
        self._retry()

    def _new_samples(self, put: Put) -> int:
        flow = self.flow(put.partition_id)
        new = [i for i in put.ids if i not in flow.samples]
        if flow.spec.group_size:
            for sample_id in new:
                group_name(sample_id, put.tags[put.ids.index(sample_id)] if put.tags else {})
        return len(new)

    def _refuse(self, put: Put, error: DataPlaneError) -> None:
        self.waiting_puts.remove(put)
        self._give(put)
        self.answers.append((put.token, error))

    def _give(self, put: Put) -> None:
        sizes = put.nbytes or [0] * len(put.blocks)
        self.given.update(
            {block: (put.partition_id, size) for block, size in zip(put.blocks.values(), sizes, strict=True)}
        )

    def _write(self, put: Put) -> None:
        flow = self.flow(put.partition_id)
        flow.events += 1
        self._give(put)
        for place, sample_id in enumerate(put.ids):
            tags = put.tags[place] if put.tags else {}
            if sample_id not in flow.samples:
                group = group_name(sample_id, tags) if flow.spec.group_size else None
                flow.samples[sample_id] = Sample((flow.events, place), {}, group)
                flow.written += 1
            sample = flow.samples[sample_id]
            sample.tags = sample.tags | tags
            sample.writers.add(put.owner)
            flow.writers.add(put.owner)
            for name, block in put.blocks.items():
                flow.ever_written.add(name)
                sample.places[name] = (block, place)
                sample.ready_at.setdefault(name, (flow.events, place))
                for task in flow.tasks.values():
                    holder, turn = task.claimed.get(sample_id, (None, 0))
                    if holder == put.owner:
                        task.claimed[sample_id] = (None, turn)
        for task in flow.tasks.values():
            for required, queue in task.queues.items():
                ready = [i for i in put.ids if i not in task.claimed and flow.is_ready(i, required)]
                queue.offer(ready, flow.groups())
        self._serve(flow)

    def _serve(self, flow: Flow) -> None:
        """First come, first served; a claim that waits holds back the later ones that want the same."""
        for task in flow.tasks.values():
            waiting: list[Claim] = []
            for claim in list(task.waiters):
                held_back = any(
                    _required(first) == _required(claim)
                    and (first.where is None or first.where == claim.where)
                    for first in waiting
                )
                count = 0 if held_back else flow.grantable(task, claim)
                if count:
                    task.waiters.remove(claim)
                    self.answers.append((claim.token, flow.take(task, claim, count)))
                else:
                    waiting.append(claim)

    def _retry(self) -> None:
        while self.waiting_puts:
            put = self.waiting_puts[0]
            try:
                new = self._new_samples(put)
                if new > self.capacity:
                    raise CapacityError
            except DataPlaneError as error:
                self._refuse(put, error)
                continue
            if self.live + new > self.capacity:
                return
            self.waiting_puts.pop(0)
            self.answers.append((put.token, None))
            self._write(put)


def plain(result: Any) -> Any:
    """An answer as something that can be compared: ids, None for a put, or the kind of error."""
    if isinstance(result, Batch):
        return result.ids
    return type(result) if isinstance(result, DataPlaneError) else result


def group_name(sample_id: str, tags: dict[str, Any]) -> str:
    if "group" in tags:
        return f"{tags['group']}"
    head, mark, number = sample_id.rpartition("_g")
    if not mark or not number.isdigit():
        raise InvalidRequestError
    return head


def _required(claim: Claim) -> tuple[str, ...]:
    return tuple(sorted(claim.fields))


def _made_impossible(flow: Flow, task: str, claim: Claim) -> DataPlaneError | None:
    if task not in flow.spec.tasks:
        return UnknownTaskError()
    if not flow.fields >= set(claim.fields):
        return UnknownFieldError()
    if flow.spec.group_size and claim.batch_size % flow.spec.group_size:
        return InvalidRequestError()
    return None
