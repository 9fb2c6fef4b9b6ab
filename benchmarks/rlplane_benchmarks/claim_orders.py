"""What a claim costs the control state in each order and under each flow policy, in CPU time.

The state alone, without a service: what is compared is a few microseconds, which a round trip would hide.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Iterator

from rlplane.control.policies import FlowPolicy
from rlplane.control.requests import Batch, Claim, Put
from rlplane.control.rules import PartitionSpec
from rlplane.control.state import ControlState

__all__ = ["PLAIN", "claim_costs"]

PLAIN = "fifo"
_PARTITION, _TRAIN, _ROLLOUT, _FIELD = "p", "train", "rollout", "x"
_PUT_AT_ONCE = 1000
_AHEAD = 10**6  # so far ahead that admission never holds anything back


def claim_costs(resident: int, size: int, claims: int) -> Iterator[tuple[str, list[float]]]:
    """For each way to claim, its name and the seconds of single claims of ``size`` samples, ``resident`` of
    which are ready. The first is :data:`PLAIN`."""
    orders = {PLAIN: None, "lifo": "lifo", "priority": "priority:priority", "random": "random:7"}
    for name, order in orders.items():
        yield name, _costs(None, _TRAIN, order, resident, size, claims)
    policies = {
        "windowed": FlowPolicy.windowed(_AHEAD),
        "windowed, freshest first": FlowPolicy.windowed(_AHEAD, freshest_first=True),
        "ready_first": FlowPolicy.ready_first(_AHEAD, size),
        "weight_fifo": FlowPolicy.weight_fifo(_AHEAD, size),
        "in_order": FlowPolicy.in_order(_AHEAD, size),
    }
    for name, policy in policies.items():
        yield name, _costs(policy, _TRAIN, None, resident, size, claims)
    yield "admission", _costs(policies["ready_first"], _ROLLOUT, None, resident, size, claims)


def _costs(
    flow: FlowPolicy | None, task: str, order: str | None, resident: int, size: int, claims: int
) -> list[float]:
    state = ControlState()
    state.register(PartitionSpec.checked(_PARTITION, [_FIELD], 0, [_TRAIN, _ROLLOUT], flow=flow))
    claim = Claim(_PARTITION, task, [_FIELD], size, order=order)
    state.claim(claim, blocking=False)  # from here on there is a queue, which the puts feed
    values = random.Random(7)
    for start in range(0, resident, _PUT_AT_ONCE):
        ids = [f"s{number}" for number in range(start, min(start + _PUT_AT_ONCE, resident))]
        # As a flow makes them: most of one version, and some late ones of the version before.
        version = start // (16 * _PUT_AT_ONCE)
        tags = [
            {"weight_version": max(version - (values.random() < 0.1), 0), "priority": values.random()}
            for _ in ids
        ]
        state.put(Put(_PARTITION, ids, {_FIELD: start}, tags))
    if flow is not None and flow.is_gated and task == _TRAIN:
        while _taken(state, Claim(_PARTITION, _ROLLOUT, [_FIELD], _PUT_AT_ONCE)):
            pass
    gc.collect()
    costs = []
    for _ in range(claims):
        wanted = Claim(_PARTITION, task, [_FIELD], size, order=order)
        began = time.process_time()
        taken = _taken(state, wanted)
        costs.append(time.process_time() - began)
        if taken != size:
            raise RuntimeError(f"a claim of {size} samples got {taken} with {resident} ready")
    return costs


def _taken(state: ControlState, claim: Claim) -> int:
    ((_, batch),) = state.claim(claim, blocking=False).answers
    assert isinstance(batch, Batch)
    return len(batch.ids)
