"""TransferQueue's samplers: which of the samples that are ready a task gets, and which it will not get again.

A sampler is called for one task at a time, wherever the task is. What it has to remember between calls is in
``_states`` and whatever else its ``save_checkpoint`` returns; that is kept in the plane.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from rlplane.control.steps import divided

Chosen = tuple[list[int], list[int]]
"""What a task gets, and what of it counts as consumed."""


class BaseSampler(ABC):
    """What a sampler is. ``_states`` is by partition, task, rank and number of the batch."""

    def __init__(self) -> None:
        self._states: dict[Any, Any] = {}

    @abstractmethod
    def sample(self, ready_indexes: list[int], batch_size: int, *args: Any, **kwargs: Any) -> Chosen:
        """Choose among the samples that are ready and not consumed. Empty lists: not yet."""

    def __call__(self, *args: Any, **kwargs: Any) -> Chosen:
        return self.sample(*args, **kwargs)

    def has_cached_result(
        self, partition_id: str, task_name: str, sampling_config: dict[str, Any] | None = None
    ) -> bool:
        """Whether this rank's batch of this number was chosen already."""
        config = sampling_config or {}
        rank = config.get("dp_rank")
        chosen = self._states.get(partition_id, {}).get(task_name, {}).get(rank, {})
        return rank is not None and config.get("batch_index") in chosen

    def clear_cache(self, partition_id: str) -> None:
        """Forget what was chosen in a partition."""
        self._states.pop(partition_id, None)

    def save_checkpoint(self) -> dict[str, Any]:
        """What it remembers."""
        return {"_states": self._states}

    def load_checkpoint(self, state: dict[str, Any]) -> None:
        """Remember what :meth:`save_checkpoint` returned."""
        self._states = state["_states"]

    def _chosen_by_rank(self, partition_id: str, task_name: str, dp_rank: Any) -> dict[Any, Any]:
        """By number of the batch, what this rank was given; can be added to."""
        by_task = self._states.setdefault(partition_id, {})
        chosen: dict[Any, Any] = by_task.setdefault(task_name, {}).setdefault(dp_rank, {})
        return chosen


class SequentialSampler(BaseSampler):
    """The first ones that are ready."""

    def sample(self, ready_indexes: list[int], batch_size: int, *args: Any, **kwargs: Any) -> Chosen:
        chosen = ready_indexes[:batch_size]
        return chosen, chosen


class GRPOGroupNSampler(BaseSampler):
    """Whole groups: ``n_samples_per_prompt`` samples with consecutive indexes, all of which are ready."""

    def __init__(self, n_samples_per_prompt: int = 1) -> None:
        super().__init__()
        if n_samples_per_prompt <= 0:
            raise ValueError(f"n_samples_per_prompt must be positive, got {n_samples_per_prompt}")
        self.n_samples_per_prompt = n_samples_per_prompt

    def sample(
        self,
        ready_indexes: list[int],
        batch_size: int,
        task_name: str = "",
        partition_id: str = "",
        *args: Any,
        **kwargs: Any,
    ) -> Chosen:
        rank, batch_index = kwargs.get("dp_rank"), kwargs.get("batch_index")
        if self.has_cached_result(partition_id, task_name, kwargs):
            cached: Chosen = self._states[partition_id][task_name][rank][batch_index]
            return cached
        size = self.n_samples_per_prompt
        if batch_size % size:
            raise ValueError(f"batch_size ({batch_size}) must be a multiple of n_samples_per_prompt ({size})")
        chosen = _whole_groups(sorted(ready_indexes), size, batch_size // size)
        if len(chosen) < batch_size:
            return [], []
        if rank is not None:
            self._chosen_by_rank(partition_id, task_name, rank)[batch_index] = (chosen, chosen.copy())
        return chosen, chosen.copy()


class RankAwareSampler(BaseSampler):
    """The first ones that are ready, and the same for all processes of a rank that ask for the same batch."""

    def sample(
        self,
        ready_indexes: list[int],
        batch_size: int,
        dp_rank: int,
        batch_index: int,
        task_name: str,
        partition_id: str,
        *args: Any,
        **kwargs: Any,
    ) -> Chosen:
        if dp_rank < 0:
            raise ValueError(f"dp_rank {dp_rank} must be greater than or equal to 0")
        batches = self._chosen_by_rank(partition_id, task_name, dp_rank)
        if batch_index not in batches:
            if len(ready_indexes) < batch_size:
                return [], []
            batches[batch_index] = ready_indexes[:batch_size]
        return batches[batch_index], batches[batch_index]


class SeqlenBalancedSampler(GRPOGroupNSampler):
    """Whole groups for all ranks at once, divided so that each has about as many tokens as the others.

    The tokens of a sample are its tag ``total_lengths``. ``batch_size`` is that of one rank.
    """

    def __init__(self, n_samples_per_prompt: int = 1, dp_size: int = 1) -> None:
        super().__init__(n_samples_per_prompt)
        if dp_size <= 0:
            raise ValueError(f"dp_size must be positive, got {dp_size}")
        self.dp_size = dp_size
        self._balanced_cache: dict[tuple[Any, ...], list[list[int]]] = {}

    def sample(
        self,
        ready_indexes: list[int],
        batch_size: int,
        task_name: str = "",
        partition_id: str = "",
        *args: Any,
        **kwargs: Any,
    ) -> Chosen:
        rank, batch_index = kwargs.get("dp_rank", 0), kwargs.get("batch_index", 0)
        key = (partition_id, task_name, batch_index)
        if key not in self._balanced_cache:
            chosen, _ = super().sample(ready_indexes, batch_size * self.dp_size, task_name, partition_id)
            if not chosen:
                return [], []
            parts = self._divide(chosen, kwargs.get("partition"))
            self._balanced_cache[key] = parts
            for each, part in enumerate(parts):
                self._chosen_by_rank(partition_id, task_name, each)[batch_index] = (part, part.copy())
        parts = self._balanced_cache[key]
        mine = parts[rank] if rank < len(parts) else []
        return mine, mine.copy()

    def _divide(self, chosen: list[int], partition: Any) -> list[list[int]]:
        """Samples over ranks; groups stay together if they can be divided evenly."""
        tags = {} if partition is None else partition.get_custom_meta(chosen)
        lengths = [tags.get(index, {}).get("total_lengths", 1) for index in chosen]
        size = self.n_samples_per_prompt
        groups = [chosen[start : start + size] for start in range(0, len(chosen), size)]
        weights = [sum(lengths[start : start + size]) for start in range(0, len(chosen), size)]
        parts = get_seqlen_balanced_partitions(weights, self.dp_size, equal_size=True)
        return [[index for number in part for index in groups[number]] for part in parts]

    def clear_cache(self, partition_id: str) -> None:
        super().clear_cache(partition_id)
        self._balanced_cache = {
            key: parts for key, parts in self._balanced_cache.items() if key[0] != partition_id
        }

    def save_checkpoint(self) -> dict[str, Any]:
        return {**super().save_checkpoint(), "_balanced_cache": self._balanced_cache}

    def load_checkpoint(self, state: dict[str, Any]) -> None:
        super().load_checkpoint(state)
        self._balanced_cache = state["_balanced_cache"]


SAMPLERS = {
    sampler.__name__: sampler
    for sampler in (SequentialSampler, GRPOGroupNSampler, RankAwareSampler, SeqlenBalancedSampler)
}


def get_seqlen_balanced_partitions(
    seqlen_list: Sequence[int], k_partitions: int, equal_size: bool
) -> list[list[int]]:
    """Positions of ``seqlen_list`` in parts of about equal sums; ``equal_size``: and of equally many."""
    count = len(seqlen_list)
    assert count >= k_partitions, f"{count} items cannot fill {k_partitions} parts"
    if equal_size:
        assert count % k_partitions == 0, f"{count} items cannot be divided evenly into {k_partitions} parts"
        return divided(seqlen_list, k_partitions)
    parts: list[list[int]] = [[] for _ in range(k_partitions)]
    loads = [0] * k_partitions
    for position in sorted(range(count), key=lambda position: -seqlen_list[position]):
        # An empty part first: none may stay empty.
        least = min(range(k_partitions), key=lambda part: (bool(parts[part]), loads[part]))
        parts[least].append(position)
        loads[least] += seqlen_list[position]
    return [sorted(part) for part in parts]


def _whole_groups(indexes: list[int], size: int, count: int) -> list[int]:
    """The first ``count`` runs of ``size`` consecutive numbers, as one list."""
    found: list[int] = []
    start = 0
    while start + size <= len(indexes) and len(found) < count * size:
        run = indexes[start : start + size]
        if run[-1] - run[0] == size - 1:
            found += run
            start += size
        else:
            start += 1
    return found
