"""What has to be looked at before a request, in pieces, so that the request itself takes little time. Nothing
changes but that."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlplane.control.claims import Claims
from rlplane.control.conditions import Look
from rlplane.control.cursors import TaskCursor
from rlplane.control.policies import Order
from rlplane.control.requests import Claim
from rlplane.control.rules import PartitionSpec, check_claim, compile_where
from rlplane.control.state import ControlState

# Samples that are looked at within some milliseconds.
_MANY = 20_000


def look_for_claim(state: ControlState, claim: Claim) -> Iterator[Look]:
    """What a claim with a condition or an order will ask about."""
    partition = state.partition(claim.partition_id)
    task = partition.task(claim.task)
    check_claim(partition.spec, claim.batch_size, partition.columns, claim.fields, claim.max_tokens)
    return partition.claims.look_for(task, claim)


def takes_long(
    state: ControlState,
    partition_id: str,
    task: str,
    fields: Sequence[str],
    order: str | None,
    *,
    reads_tags: bool,
) -> bool:
    """Whether a claim in this order may have to sort so many samples, to read the tags of so many, to gather
    so many groups or to build so long a queue, that others would wait."""
    partition = state.partitions.get(partition_id)
    if partition is None or len(partition.rows) <= _MANY:
        return False
    if reads_tags:
        return True
    flow = partition.spec.flow
    if order is not None or (flow is not None and flow.training_order is not None):
        return True
    cursor = partition.tasks.get(task)
    if cursor is None:
        return False
    queue = cursor.queues.get((tuple(sorted(set(fields))), ""))
    return queue is None or not queue.is_whole


def look_for_waiting(task: TaskCursor, claims: Claims) -> Iterator[Look]:
    """What the claims of a task that wait will ask about."""
    for claim in list(task.waiting):
        if claim in task.waiting:
            yield from claims.look_for(task, claim)


def look_for_status(state: ControlState, partition_id: str) -> Iterator[Look]:
    """What the status of a partition will ask about: how much is ready for each task."""
    partition = state.partition(partition_id)
    for task in list(partition.tasks.values()) if len(partition.rows) > _MANY else ():
        claim = next(iter(task.waiting), task.last)
        if claim is not None and partition.columns.keys() >= set(claim.fields):
            yield from partition.claims.look_for(task, claim)


def look_for_registration(state: ControlState, spec: PartitionSpec) -> Iterator[Look]:
    """What a registration will ask about: the groups of samples, if they had none or others."""
    partition = state.partitions.get(spec.partition_id)
    if partition is None or not spec.group_size or spec.group_size == partition.spec.group_size:
        return
    if len(partition.rows) > _MANY:
        yield from partition.looking.look_at_groups()


def look_for(
    state: ControlState, partition_id: str, where: Mapping[str, Any] | None, order: str | None = None
) -> Iterator[Look]:
    """What a peek or a count will ask about."""
    compile_where(where)
    return state.partition(partition_id).looking.look_for(where, Order(order))
