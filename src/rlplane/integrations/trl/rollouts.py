"""``run_rollouts``: what a rollout process does until the training ends."""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlplane.columns.codec import pack_jagged_fields
from rlplane.factory import build_data_plane_client
from rlplane.integrations.trl.generation import Completion, Generate
from rlplane.integrations.trl.weights import VERSION_TAG, newer_weights
from rlplane.interfaces import DataPlaneClient

PROMPT_FIELD = "prompt"
TOKEN_FIELDS = ("input_ids", "completion_mask", "old_log_probs")
ROLLOUT_FIELDS = (*TOKEN_FIELDS, "advantage", "completion", "metrics")
_WAIT_S = 1.0
_log = logging.getLogger(__name__)

RewardFunction = Callable[..., Any]


def run_rollouts(
    plane: DataPlaneClient | Mapping[str, Any],
    generate: Generate,
    reward_funcs: RewardFunction | Sequence[RewardFunction],
    *,
    load_weights: Callable[[dict[str, Tensor]], None] | None = None,
    partition_id: str = "trl",
    stop: Callable[[], bool] = lambda: False,
) -> int:
    """Generate and score groups for a :class:`PlaneRolloutWorker` until the training ends.

    Any number of processes may do so, and come and go. A prompt is handed to one of them; if that one dies,
    to another.

    Args:
        plane: A client, or the config of one, which then joins the plane as a worker.
        generate: Called with a prompt and the number of completions.
        reward_funcs: As TRL's: called with ``prompts``, ``completions``, ``completion_ids`` and the other
            columns of the dataset, they return one number (or None) per completion. They may be coroutine
            functions.
        load_weights: Called with the trainer's weights before the next prompt when there are newer ones.
            Without it, ``generate`` has the weights by other means, and rollouts carry the version that the
            trainer has published when they begin.
        partition_id: As that of the worker.
        stop: Asked between two prompts whether to end.

    Returns:
        How many groups were made.
    """
    if not isinstance(plane, DataPlaneClient):
        with build_data_plane_client(plane, bootstrap=False) as client:
            return run_rollouts(
                client,
                generate,
                reward_funcs,
                load_weights=load_weights,
                partition_id=partition_id,
                stop=stop,
            )
    rewards = [reward_funcs] if callable(reward_funcs) else list(reward_funcs)
    version = groups = 0
    try:
        size = plane.partition_status(partition_id)["grpo_group_size"] or 1
        while not stop():
            try:
                meta = plane.claim_meta(partition_id, "rollout", [PROMPT_FIELD], size, timeout_s=_WAIT_S)
            except TimeoutError:
                continue
            if not meta.size:  # the trainer has finished the partition
                break
            if load_weights is None:
                version = plane.partition_status(partition_id)["flow"]["version"]
            elif (newer := newer_weights(plane, partition_id, version)) is not None:
                version, state = newer
                load_weights(state)
            example = plane.get_data(meta.slice(0, 1)).get(PROMPT_FIELD).tolist()[0]
            completions = generate(example["prompt"], meta.size)
            if len(completions) != meta.size:
                raise ValueError(
                    f"generate returned {len(completions)} completions; {meta.size} were asked for"
                )
            columns = _score(example, completions, rewards)
            lengths = [len(row) for row in columns["input_ids"]]
            rows = pack_jagged_fields(columns, lengths=lengths, token_aligned_fields=TOKEN_FIELDS)
            tags = [{VERSION_TAG: version, "input_lengths": length} for length in lengths]
            try:
                plane.put_samples(meta.sample_ids, partition_id, rows, tags, must_exist=True)
            except KeyError:
                _log.info("the group of %s was given up while it was generated", meta.sample_ids[0])
            else:
                groups += 1
    except ConnectionError as error:
        _log.info("the plane has ended: %s", error)
    return groups


def _score(
    example: Mapping[str, Any], completions: Sequence[Completion], rewards: Sequence[RewardFunction]
) -> dict[str, Any]:
    """The columns of a group: its tokens, and each member's advantage over the others."""
    count = len(completions)
    by_name = {
        getattr(reward, "__name__", type(reward).__name__): _rewards(reward, example, completions)
        for reward in rewards
    }
    totals = []
    for row in range(count):
        known = [values[row] for values in by_name.values() if not math.isnan(values[row])]
        totals.append(sum(known) if known else math.nan)
    scored = torch.tensor([total for total in totals if not math.isnan(total)], dtype=torch.float64)
    mean = scored.mean().item() if len(scored) else math.nan
    spread = scored.std(correction=0).item() if len(scored) else math.nan
    advantages = [0.0 if math.isnan(total) else (total - mean) / (spread + 1e-8) for total in totals]
    metrics = [
        {
            "reward": totals[row],
            "reward_std": spread,
            **{f"rewards/{name}": values[row] for name, values in by_name.items()},
        }
        for row in range(count)
    ]
    tokens = [[*one.prompt_ids, *one.completion_ids] for one in completions]
    return {
        "input_ids": [torch.tensor(row) for row in tokens],
        "completion_mask": [
            torch.tensor([0] * len(one.prompt_ids) + [1] * len(one.completion_ids)) for one in completions
        ],
        "old_log_probs": [
            torch.tensor([0.0] * len(one.prompt_ids) + list(one.logprobs)) for one in completions
        ],
        "advantage": torch.tensor(advantages),
        "completion": [one.content for one in completions],
        "metrics": metrics,
    }


def _rewards(
    reward: RewardFunction, example: Mapping[str, Any], completions: Sequence[Completion]
) -> list[float]:
    """One number per completion; NaN where the function has none."""
    count = len(completions)
    found = reward(
        prompts=[example["prompt"]] * count,
        completions=[one.content for one in completions],
        completion_ids=[list(one.completion_ids) for one in completions],
        **{name: [value] * count for name, value in example.items() if name != "prompt"},
    )
    if inspect.isawaitable(found):
        found = asyncio.run(_result(found))
    if len(found) != count:
        raise ValueError(f"{reward!r} returned {len(found)} rewards for {count} completions")
    return [math.nan if value is None else float(value) for value in found]


async def _result(awaitable: Any) -> Any:
    return await awaitable
