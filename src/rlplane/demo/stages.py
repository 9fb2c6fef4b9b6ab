"""What the rollout and log-prob workers do: claim, read, compute, write. Nothing else connects them.

A stage is a function of a client, the settings, its own name and a ``stop`` that it asks between two
batches. It runs as well in a thread as in a process or in a Ray actor.
"""

from __future__ import annotations

from zlib import crc32

import torch
from torch import Tensor

from rlplane import DataPlaneClient, KVBatchMeta, MissingDataError, materialize, pack_jagged_fields
from rlplane.demo.model import Policy, sample, token_logprobs, unflatten
from rlplane.demo.problem import PAD, reward
from rlplane.demo.settings import PROMPT, ROLLOUTS, TEACHES, WEIGHTS, Settings, Stop, claim_groups


def rollout(client: DataPlaneClient, settings: Settings, name: str, stop: Stop) -> None:
    """Answer prompts with the newest weights there are, and judge the answers."""
    policy, version = Policy(), -1
    generator = torch.Generator().manual_seed(crc32(f"{settings.seed}/{name}".encode()))
    while not stop():
        meta = claim_groups(client, settings, "rollout", PROMPT, most=8)
        if not meta.size:
            continue
        if settings.trace_attempts:
            note_attempt(client, meta, name)
        version = refresh(client, policy, version)
        prompts = [row.tolist() for row in client.get_data(meta)["prompt_ids"].unbind()]
        responses, logprobs = sample(policy, prompts, generator)
        pairs = list(zip(prompts, responses, strict=True))
        rewards = [reward(prompt, response) for prompt, response in pairs]
        lengths = [len(prompt) + len(response) for prompt, response in pairs]
        meta.stamp_tags(
            {
                "weight_version": [version] * meta.size,
                "reward": rewards,
                "reward_std": group_spread(rewards, settings.group_size),
                "input_lengths": lengths,
                "response_tokens": [len(response) for response in responses],
            }
        )
        columns = {
            "input_ids": [torch.tensor(p + r) for p, r in pairs],
            "response_mask": [torch.tensor([0.0] * len(p) + [1.0] * len(r)) for p, r in pairs],
            "generation_logprobs": [
                torch.tensor([0.0] * len(p) + row) for p, row in zip(prompts, logprobs, strict=True)
            ],
        }
        # One put: the columns and tags of whole groups are there together, or not at all.
        packed = pack_jagged_fields(columns, lengths=lengths, token_aligned_fields=list(columns))
        client.put_samples(meta.sample_ids, ROLLOUTS, packed, meta.tags)


def score(client: DataPlaneClient, settings: Settings, name: str, stop: Stop) -> None:
    """The log-probabilities of the sampled tokens under the newest weights and under the reference."""
    policy, version = Policy(), -1
    reference: Policy | None = None
    while not stop():
        # What teaches nothing is not worth a forward pass: the trainer drops it by its tags.
        meta = claim_groups(client, settings, "score", ["input_ids"], most=16, where=TEACHES)
        if not meta.size:
            continue
        if settings.trace_attempts:
            note_attempt(client, meta, name)
        version = refresh(client, policy, version)
        if reference is None:
            reference = Policy()
            load(client, reference, 0)
        tokens: Tensor = materialize(client.get_data(meta), pad_value_dict={"input_ids": PAD})["input_ids"]
        with torch.no_grad():
            columns = {
                "prev_logprobs": token_logprobs(policy, tokens),
                "reference_logprobs": token_logprobs(reference, tokens),
            }
        lengths = meta.sequence_lengths or []
        packed = pack_jagged_fields(columns, lengths=lengths, token_aligned_fields=list(columns))
        client.put_samples(meta.sample_ids, ROLLOUTS, packed)


def refresh(client: DataPlaneClient, policy: Policy, version: int) -> int:
    """Load the newest weights, if they are newer than ``version``, and return theirs."""
    while True:
        newest = version_of(client.list_sample_ids(WEIGHTS)[-1])
        if newest == version:
            return version
        try:
            load(client, policy, newest)
        except MissingDataError:
            continue  # the trainer has published again and cleared this one meanwhile
        return newest


def load(client: DataPlaneClient, policy: Policy, version: int) -> None:
    unflatten(policy, client.get_samples([weights_id(version)], WEIGHTS, ["parameters"])["parameters"][0])


def weights_id(version: int) -> str:
    return f"v{version}"


def version_of(sample_id: str) -> int:
    return int(sample_id[1:])


def group_spread(rewards: list[float], group_size: int) -> list[float]:
    """The standard deviation of each sample's group: exactly 0.0 when its rewards are all the same."""
    groups = torch.tensor(rewards, dtype=torch.float64).view(-1, group_size)
    spread = groups.std(1, unbiased=False).where(groups.min(1).values < groups.max(1).values, 0.0)
    return spread.repeat_interleave(group_size).tolist()


def note_attempt(client: DataPlaneClient, meta: KVBatchMeta, name: str) -> None:
    """Leave this worker's name on what it claims: when it dies, the next one and the report can see it.

    A tag is not a field, so it does not count as the work that ends a claim.
    """
    tags = meta.tags or [{} for _ in meta.sample_ids]
    meta.stamp_tags({"attempts": [[*tag.get("attempts", []), name] for tag in tags]})
    client.put_samples(
        meta.sample_ids, ROLLOUTS, None, [{"attempts": t["attempts"]} for t in meta.tags or []]
    )
