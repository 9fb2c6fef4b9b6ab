"""What the rollout and log-prob workers do: claim, read, compute, write. Nothing else connects them.

A stage is a function of a client, the settings, its own name and a ``stop`` that it asks between two
batches. It runs as well in a thread as in a process or in a Ray actor.
"""

from __future__ import annotations

import time
from zlib import crc32

import torch
from tensordict import TensorDict
from torch import Tensor

from rlplane import DataPlaneClient, KVBatchMeta, MissingDataError, materialize, pack_jagged_fields
from rlplane.demo.model import Policy, sample, token_logprobs, unflatten
from rlplane.demo.problem import PAD, reward
from rlplane.demo.settings import PROMPT, ROLLOUTS, TEACHES, WEIGHTS, Settings, Stop, claim_groups

SLOWNESS = 10  # how many times longer a slow group takes


def rollout(client: DataPlaneClient, settings: Settings, name: str, stop: Stop) -> None:
    """Answer prompts with the newest weights there are, and judge the answers."""
    policy, version = Policy(), -1
    generator = torch.Generator().manual_seed(crc32(f"{settings.seed}/{name}".encode()))
    slow: list[tuple[float, KVBatchMeta, TensorDict]] = []  # answers that are not there before their time
    while not stop():
        while slow and slow[0][0] <= time.monotonic():
            _, meta, answers = slow.pop(0)
            client.put_samples(meta.sample_ids, ROLLOUTS, answers, meta.tags)
        meta = claim_groups(client, settings, "rollout", PROMPT, most=8)
        if not meta.size:
            continue
        began = time.monotonic()
        if settings.trace_attempts:
            note_attempt(client, meta, name)
        version = refresh(client, policy, version)
        prompts = [row.tolist() for row in client.get_data(meta)["prompt_ids"].unbind()]
        responses, logprobs = sample(policy, prompts, generator)
        rewards = [reward(prompt, response) for prompt, response in zip(prompts, responses, strict=True)]
        meta.stamp_tags(
            {
                "weight_version": [version] * meta.size,
                "reward": rewards,
                "reward_std": group_spread(rewards, settings.group_size),
                "input_lengths": [len(p) + len(r) for p, r in zip(prompts, responses, strict=True)],
                "response_tokens": [len(response) for response in responses],
            }
        )
        now = time.monotonic()
        for is_late in (False, True):
            rows = [row for row, i in enumerate(meta.sample_ids) if is_slow(i, settings) == is_late]
            if not rows:
                continue
            part = meta.subset(rows)
            answers = packed(
                [prompts[row] for row in rows],
                [responses[row] for row in rows],
                [logprobs[row] for row in rows],
            )
            if is_late:
                slow.append((now + (SLOWNESS - 1) * (now - began), part, answers))
                slow.sort(key=lambda entry: entry[0])
            else:
                # One put: the columns and tags of whole groups are there together, or not at all.
                client.put_samples(part.sample_ids, ROLLOUTS, answers, part.tags)


def packed(prompts: list[list[int]], responses: list[list[int]], logprobs: list[list[float]]) -> TensorDict:
    """The columns that a rollout worker writes."""
    pairs = list(zip(prompts, responses, strict=True))
    columns = {
        "input_ids": [torch.tensor(p + r) for p, r in pairs],
        "response_mask": [torch.tensor([0.0] * len(p) + [1.0] * len(r)) for p, r in pairs],
        "generation_logprobs": [
            torch.tensor([0.0] * len(p) + row) for p, row in zip(prompts, logprobs, strict=True)
        ],
    }
    lengths = [len(p) + len(r) for p, r in pairs]
    return pack_jagged_fields(columns, lengths=lengths, token_aligned_fields=list(columns))


def is_slow(sample_id: str, settings: Settings) -> bool:
    """Whether the prompt of a sample is one of the slow ones, however often it is issued."""
    return crc32(f"{settings.seed}/{prompt_number(sample_id)}".encode()) % 1000 < 1000 * settings.slow_groups


def score(client: DataPlaneClient, settings: Settings, name: str, stop: Stop) -> None:
    """The log-probabilities of the sampled tokens under the newest weights and under the reference."""
    policy, version = Policy(), -1
    reference: Policy | None = None
    while not stop():
        # What teaches nothing is not worth a forward pass: the trainer drops it by its tags.
        meta = claim_groups(client, settings, "score", ["input_ids"], most=16, where=TEACHES)
        if not meta.size:
            continue
        if reference is None:
            reference = Policy()
            load(client, reference, 0)
        version = refresh(client, policy, version)
        try:
            if settings.trace_attempts:
                note_attempt(client, meta, name)
            rows = materialize(client.get_data(meta), pad_value_dict={"input_ids": PAD})
            tokens: Tensor = rows["input_ids"]
            with torch.no_grad():
                columns = {
                    "prev_logprobs": token_logprobs(policy, tokens),
                    "reference_logprobs": token_logprobs(reference, tokens),
                }
            lengths = meta.sequence_lengths or []
            scores = pack_jagged_fields(columns, lengths=lengths, token_aligned_fields=list(columns))
            client.put_samples(meta.sample_ids, ROLLOUTS, scores, must_exist=True)
        except MissingDataError:
            # Some became too old meanwhile, and the plane has evicted them: the others come again.
            client.unclaim(meta)


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


def prompt_number(name: str) -> int:
    """The number of a prompt, from the name of its group (``p7``, or ``p7.1`` when it was issued again), or
    of one of its samples (``p7.1_g0``)."""
    return int(name.partition("_")[0].partition(".")[0][1:])


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
    attempts = [{"attempts": tag["attempts"]} for tag in meta.tags or []]
    client.put_samples(meta.sample_ids, ROLLOUTS, None, attempts, must_exist=True)
