"""Requests that change nothing, and what they are answered."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlplane.control.arrays import in_pieces
from rlplane.control.partition import Partition
from rlplane.control.requests import Batch
from rlplane.errors import InvalidRequestError
from rlplane.service import protocol as wire

if TYPE_CHECKING:
    from rlplane.service.core import ControlService


def answer_question(service: ControlService, body: wire.Request) -> wire.Answer:
    """The answer to a question about the state."""
    state = service.state
    match body:
        case wire.Describe(partition_id):
            partition = state.partition(partition_id)
            return wire.Described(partition.version, partition.spec)
        case wire.Inspect(partition_id, ids, with_kinds, numbers):
            partition = state.partition(partition_id)
            rows = partition.live_rows(ids) if numbers is None else partition.table.rows_numbered(numbers)
            kinds = {"kinds": _kinds(service, partition, rows)} if with_kinds else {}
            return wire.Done(partition.inspect(rows) | kinds)
        case wire.Consumed(partition_id, tasks):
            return wire.Done(state.partition(partition_id).consumed(tasks))
        case wire.Status(partition_id):
            status = state.partition(partition_id).status(service.wall)
            return wire.Done(status | {"capacity": state.capacity, "capacity_bytes": service.storage.limit})
        case wire.ServiceStatus():
            return wire.Done(status_of(service))
        case wire.ListIds(partition_id):
            return wire.Done(state.partition(partition_id).names())
        case wire.Peek(partition_id, where, fields, limit, order):
            return claimed(state.peek(partition_id, where, fields, limit, order))
        case wire.ShouldAbort(partition_id, ids):
            return wire.Done(state.partition(partition_id).flow_control.should_abort(ids))
        case wire.Count(partition_id, where):
            return wire.Done(state.count(partition_id, where))
        case _:
            raise InvalidRequestError(f"the service does not serve {type(body).__name__} here")


def claimed(batch: Batch) -> wire.Claimed:
    """The answer with a batch, whose columns may have to be read some at a time."""
    return wire.Claimed(batch.ids, batch.tags)  # type: ignore[arg-type]


def status_of(service: ControlService) -> dict[str, Any]:
    """What the service holds, for people and for tests."""
    clients = service.clients.values()
    return {
        "pid": os.getpid(),
        "requests": service.requests,
        "refused": service.refused,
        "malformed": service.malformed,
        "samples": service.state.live,
        "partitions": list(service.state.partitions),
        "clients": len(clients),
        "leases": sum(len(held.leases) for held in clients),
        "loop_stall_ms": service.stall.describe(),
        "reserved": sum(place.size for held in clients for place in held.places),
        "storage": service.storage.describe(),
        "dead_units": list(service.dead.units),
        "lost_samples": service.lost,
    }


def _kinds(
    service: ControlService, partition: Partition, rows: NDArray[np.int64]
) -> dict[str, list[tuple[str, str, tuple[int, ...]]]]:
    """By field, what its blocks hold: kind, dtype and shape of a row, each combination once."""
    kinds = {}
    for name, column in partition.columns.items():
        # What came together is of one block: then few numbers are left to be sorted.
        blocks = [column.block[at] for _, at in in_pieces(rows)]
        numbers = np.unique(
            np.concatenate([some[np.diff(some, prepend=-1) != 0] for some in blocks])
        ).tolist()
        layouts = [service.table.blocks[number][2] for number in numbers if number >= 0]
        kinds[name] = list(dict.fromkeys((each.kind, each.dtype, each.shape) for each in layouts))
    return kinds
