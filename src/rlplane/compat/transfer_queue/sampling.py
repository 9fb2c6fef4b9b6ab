"""Batches that a sampler chooses: by one process at a time, with what it remembers kept in the plane."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from rlplane.adapters import many
from rlplane.adapters.calls import PlaneCalls
from rlplane.adapters.link import Link
from rlplane.adapters.steps import Call, Undo, ask
from rlplane.compat.transfer_queue import calls
from rlplane.compat.transfer_queue.metadata import BatchMeta
from rlplane.compat.transfer_queue.sampler import BaseSampler
from rlplane.interfaces import DEFAULT_TIMEOUT_S
from rlplane.service import protocol as wire

T = TypeVar("T")

_MEMORY = "sampler"
_TASK = "sampler"
_IS_MEMORY = {"is_memory": True}


def make_room_for_sampler(plane: PlaneCalls, link: Link) -> Call[None]:
    """Make the sample that holds what the sampler remembers. Whoever has claimed it may use the sampler: a
    process that dies gives it back."""
    yield from plane.declare(link, calls.HIDDEN, [], [_TASK])
    yield from calls.write(plane, link, [_MEMORY], calls.HIDDEN, None, [_IS_MEMORY])


def choose(
    plane: PlaneCalls,
    link: Link,
    sampler: BaseSampler,
    partition_id: str,
    names: list[str],
    batch_size: int,
    task_name: str,
    sampling_config: dict[str, Any],
) -> Call[BatchMeta]:
    """The batch that the sampler chooses; an empty one while it cannot choose."""
    yield from plane.declare(link, partition_id, names, [task_name])

    def look() -> Call[BatchMeta]:
        seen = yield from calls.inspect(plane, link, partition_id, None, with_kinds=True)
        numbers = np.array(seen.numbers, np.int64)
        claimed = seen.tasks[task_name]
        ready = numbers[seen.has(names) & ~claimed].tolist()
        if len(ready) < batch_size and not sampler.has_cached_result(
            partition_id, task_name, sampling_config
        ):
            return BatchMeta.empty()
        view = _PartitionView(dict(zip(seen.numbers, seen.tags, strict=True)))
        chosen, consumed = sampler(ready, batch_size, partition=view, **sampling_config)
        ids = dict(zip(seen.numbers, seen.ids, strict=True))
        free = set(numbers[~claimed].tolist())
        taken = [ids[index] for index in consumed if index in free]
        if taken:
            yield from many.mark_claimed(partition_id, task_name, taken)
        if not chosen:
            return BatchMeta.empty()
        picked = yield from calls.inspect(
            plane, link, partition_id, [ids[index] for index in chosen], with_kinds=True
        )
        return picked.meta(names)

    return (yield from _alone(plane, link, sampler, look))


def forget(plane: PlaneCalls, link: Link, sampler: BaseSampler, partition_id: str) -> Call[None]:
    """Let the sampler forget a partition that was cleared."""

    def clear() -> Call[None]:
        sampler.clear_cache(partition_id)
        yield from ()

    yield from _alone(plane, link, sampler, clear)


def _alone(plane: PlaneCalls, link: Link, sampler: BaseSampler, work: Callable[[], Call[T]]) -> Call[T]:
    """Do something with a sampler that remembers what it did in other processes."""
    wait_s = DEFAULT_TIMEOUT_S
    request = wire.ClaimRequest(calls.HIDDEN, _TASK, [], 1, True, wait_s, where=_IS_MEMORY)
    memory = yield from ask(request, wire.Claimed, waits_s=wait_s)
    give_back = wire.Unclaim(calls.HIDDEN, _TASK, memory.ids)
    try:
        before = memory.tags[0].get("state")
        if before is not None:
            sampler.load_checkpoint(pickle.loads(before))
        result = yield from work()
        after = pickle.dumps(sampler.save_checkpoint())
        if after != before:
            yield from calls.write(plane, link, [_MEMORY], calls.HIDDEN, None, [{"state": after}])
    except GeneratorExit:
        raise
    except BaseException:
        yield Undo(give_back)
        raise
    yield from ask(give_back, wire.Done)
    return result


class _PartitionView:
    """What a sampler may ask of the partition that it chooses from."""

    def __init__(self, tags: dict[int, dict[str, Any]]) -> None:
        self._tags = tags

    def get_custom_meta(self, global_indices: Sequence[int]) -> dict[int, dict[str, Any]]:
        """The tags of samples, by index."""
        return {index: self._tags[index] for index in global_indices if index in self._tags}
