"""The trainer: feeds prompts, claims whole groups that are fresh enough, learns from them, publishes weights.

It also keeps count of every sample: one that it wrote is in flight until it is cleared, for a stated reason.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from tensordict import TensorDict

from rlplane import DataPlaneClient, KVBatchMeta, materialize, pack_jagged_fields, shard_meta_for_dp
from rlplane.demo.loss import group_advantages, grpo_loss
from rlplane.demo.model import Policy, flatten, token_logprobs
from rlplane.demo.problem import make_prompt
from rlplane.demo.settings import (
    PROGRESS,
    PROMPT,
    ROLLED_OUT,
    ROLLOUTS,
    SCORED,
    TEACHES,
    TEACHES_NOTHING,
    WEIGHTS,
    Settings,
    Stop,
    claim_groups,
)
from rlplane.demo.stages import weights_id

KEPT_VERSIONS = 3
TRAINED, TOO_OLD, NO_VARIANCE = "trained", "too old", "no reward variance"


@dataclass
class SampleCounts:
    """What became of every sample. A sample that is cleared twice, or was never written, is an error."""

    prompts: int = 0
    in_flight: set[str] = field(default_factory=set)
    cleared: dict[str, int] = field(default_factory=lambda: {TRAINED: 0, TOO_OLD: 0, NO_VARIANCE: 0})

    def write(self, ids: list[str]) -> None:
        self.in_flight.update(ids)

    def clear(self, ids: list[str], reason: str) -> None:
        strange = set(ids) - self.in_flight
        if strange:
            raise RuntimeError(f"{len(strange)} samples came twice or were never written: {min(strange)} …")
        self.in_flight.difference_update(ids)
        self.cleared[reason] += len(ids)


@dataclass
class Gathered:
    """What a step found: groups to learn from, the rewards of all that it judged, how many weight versions
    old everything was that it claimed, what it dropped (the first sample of each group, by reason), and what
    was handed out again after a worker's death."""

    batch: KVBatchMeta | None = None
    rewards: list[float] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)
    dropped: dict[str, list[str]] = field(default_factory=lambda: {TOO_OLD: [], NO_VARIANCE: []})
    handed_out_again: dict[str, list[str]] = field(default_factory=dict)


class TimedClient:
    """A client that adds up the time spent in its calls, and separately in claims that wait for samples."""

    def __init__(self, client: DataPlaneClient) -> None:
        self._client = client
        self._began, self._busy_s, self._waiting_s = time.perf_counter(), 0.0, 0.0

    def lap(self) -> dict[str, float]:
        """The seconds since the last lap, and how many of them were spent in calls and in waiting."""
        now = time.perf_counter()
        lap = {
            "seconds": now - self._began,
            "plane_seconds": self._busy_s,
            "waiting_seconds": self._waiting_s,
        }
        self._began, self._busy_s, self._waiting_s = now, 0.0, 0.0
        return lap

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._client, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                took = time.perf_counter() - began
                if name == "claim_meta" and kwargs.get("blocking", True):
                    self._waiting_s += took
                else:
                    self._busy_s += took

        return timed


class Trainer:
    """The state of a training run, and its steps."""

    def __init__(self, client: DataPlaneClient, settings: Settings) -> None:
        self.timed = TimedClient(client)
        self.client = cast(DataPlaneClient, self.timed)
        self.settings = settings
        torch.manual_seed(settings.seed)
        self.policy = Policy()
        self.optimizer: torch.optim.Optimizer = torch.optim.Adam(
            self.policy.parameters(), settings.learning_rate, (0.9, 0.95)
        )
        self.version = 0
        self.counts = SampleCounts()

    def start(self) -> None:
        """Publish the first weights, which stay as the reference, and the first prompts."""
        self.publish()
        self.feed(self.settings.groups_in_flight)

    def feed(self, groups: int) -> None:
        """Write the prompts of new groups: ``group_size`` samples of each, for the other stages to fill."""
        if not groups:
            return
        size, numbers = self.settings.group_size, range(self.counts.prompts, self.counts.prompts + groups)
        prompts = [make_prompt(self.settings.seed, n) for n in numbers for _ in range(size)]
        ids = [f"p{n}_g{i}" for n in numbers for i in range(size)]
        rows = {PROMPT[0]: [torch.tensor(prompt) for prompt in prompts]}
        packed = pack_jagged_fields(rows, lengths=[len(p) for p in prompts], token_aligned_fields=PROMPT)
        self.client.put_samples(ids, ROLLOUTS, packed)
        self.counts.prompts += groups
        self.counts.write(ids)

    def publish(self) -> None:
        """Put the weights of this version, say so, and clear one that nobody will ask for any more."""
        columns = TensorDict({"parameters": flatten(self.policy)[None]}, batch_size=[1])
        self.client.put_samples([weights_id(self.version)], WEIGHTS, columns)
        self.client.advance_version(ROLLOUTS, self.version)
        if self.version > KEPT_VERSIONS:
            self.client.clear_samples([weights_id(self.version - KEPT_VERSIONS)], WEIGHTS)

    def drop(self, meta: KVBatchMeta, reason: str) -> list[str]:
        """Clear groups by what their tags say. No tensor is read."""
        if meta.size:
            self.client.clear_samples(meta.sample_ids, ROLLOUTS)
            self.counts.clear(meta.sample_ids, reason)
        return meta.sample_ids[:: self.settings.group_size]

    def gather(self, stop: Stop) -> Gathered:
        """Claim until there is enough to learn from. Groups that teach nothing are dropped on the way."""
        s, got = self.settings, Gathered()
        oldest = self.version - s.max_staleness
        stale, fresh = {"weight_version": {"<": oldest}}, {"weight_version": {">=": oldest}, **TEACHES}
        trained, enough = 0, s.judged_per_step * s.group_size
        while trained < s.groups_per_step and len(got.rewards) < enough and not stop():
            # A group that teaches is dropped as too old only once it is scored: before, the log-prob
            # worker may have it in hand, and its late write would bring a cleared sample back.
            most = s.judged_per_step
            flat = claim_groups(self.client, s, "train", ROLLED_OUT, most, enough=0, where=TEACHES_NOTHING)
            old = claim_groups(self.client, s, "train", SCORED, most, enough=0, where=stale)
            got.dropped[NO_VARIANCE] += self.drop(flat, NO_VARIANCE)
            got.dropped[TOO_OLD] += self.drop(old, TOO_OLD)
            missing = s.groups_per_step - trained
            good = claim_groups(self.client, s, "train", SCORED, missing, enough=missing, where=fresh)
            if good.size:
                got.batch = good if got.batch is None else got.batch.concat(good)
                trained += good.size // s.group_size
            got.rewards += rewards_of(flat) + rewards_of(good)
            for meta in (flat, old, good):
                got.staleness += [self.version - tag["weight_version"] for tag in meta.tags or []]
                note_repeats(meta, got.handed_out_again)
            # Replaced before the gradient step, during which rollouts go on.
            self.feed((flat.size + old.size + good.size) // s.group_size)
        return got

    def learn(self, batch: KVBatchMeta) -> None:
        """One step of the optimizer. The gradient is the sum over the shards of the data-parallel ranks."""
        s = self.settings
        # Advantages need rewards alone, and those are tags: they are made and travel without a tensor.
        advantages = group_advantages(torch.tensor(rewards_of(batch)), s.group_size)
        batch.stamp_tags({"advantage": advantages.tolist()})
        tokens = sum(tag["response_tokens"] for tag in batch.tags or [])
        shards, _ = shard_meta_for_dp(batch, dp_world=s.dp_world)
        self.optimizer.zero_grad()
        for shard in shards:
            if not shard.size:
                continue
            data = materialize(self.client.get_data(shard, [*ROLLED_OUT, *SCORED]))
            loss = grpo_loss(
                token_logprobs(self.policy, data["input_ids"]),
                data["prev_logprobs"],
                data["generation_logprobs"],
                data["reference_logprobs"],
                torch.tensor([tag["advantage"] for tag in shard.tags or []]),
                data["response_mask"],
                clip=s.clip,
                kl_weight=s.kl_weight,
            )
            # Each shard's loss is a mean over its tokens: weigh it, so that the sum is the batch's mean.
            (loss * (data["response_mask"].sum() / tokens)).backward()
        torch.nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
        self.optimizer.step()

    def step(self, stop: Stop) -> dict[str, Any] | None:
        """Gather, learn, publish, clear; what the step was like, or None when it was stopped before."""
        got = self.gather(stop)
        if not got.rewards:
            return None
        if got.batch is not None:
            self.learn(got.batch)
        self.version += 1
        self.publish()
        if got.batch is not None:
            self.client.clear_samples(got.batch.sample_ids, ROLLOUTS)
            self.counts.clear(got.batch.sample_ids, TRAINED)
        tags = [] if got.batch is None else got.batch.tags or []
        return {
            "step": self.version,
            "reward": sum(got.rewards) / len(got.rewards),
            "judged": len(got.rewards),
            "trained": len(tags),
            "tokens": sum(tag["input_lengths"] for tag in tags),
            # As in every view: at the claim, the newest weight version minus the sample's.
            "claimed": len(got.staleness),
            "staleness": sum(got.staleness) / max(len(got.staleness), 1),
            "dropped": got.dropped,
            "handed_out_again": got.handed_out_again,
            **self.timed.lap(),
        }

    def save(self, path: str) -> None:
        """Write all that a later run needs beside the plane's own checkpoint."""
        state = {"policy": self.policy.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save({**state, "version": self.version, "counts": vars(self.counts)}, path)

    def restore(self, path: str) -> None:
        """Go on where :meth:`save` was called."""
        state = torch.load(path, weights_only=True)
        self.policy.load_state_dict(state["policy"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.version, self.counts = state["version"], SampleCounts(**state["counts"])


def train(
    client: DataPlaneClient, settings: Settings, name: str, stop: Stop, *, checkpoint: str, resume: bool
) -> None:
    """The trainer as a stage. What it has to say goes through the plane too, as tags of tiny samples."""
    trainer = Trainer(client, settings)
    if resume:
        trainer.restore(checkpoint)
    else:
        trainer.start()
    trainer.timed.lap()  # what came before is not part of the first step
    while trainer.version < settings.steps and not stop():
        with client.step(trainer.version + 1) as step:
            line = trainer.step(stop)
            if line is not None:
                step.tokens = line["tokens"]
                client.log({"reward": line["reward"], "trained": line["trained"]})
        if line is not None:
            trainer.client.put_samples([f"step-{trainer.version}"], PROGRESS, None, [line])
    trainer.save(checkpoint)
    counts = trainer.counts
    last = {"done": True, "version": trainer.version, "prompts": counts.prompts, "cleared": counts.cleared}
    client.put_samples(["done"], PROGRESS, None, [{**last, "in_flight": sorted(counts.in_flight)}])


def rewards_of(meta: KVBatchMeta) -> list[float]:
    return [tag["reward"] for tag in meta.tags or []]


def note_repeats(meta: KVBatchMeta, again: dict[str, list[str]]) -> None:
    """Add, for each worker that died with samples in hand, those that another worker then finished."""
    for sample_id, tag in zip(meta.sample_ids, meta.tags or [], strict=True):
        last: dict[str, str] = {}
        for worker in tag.get("attempts", []):
            stage = worker.split("-")[0]
            if stage in last:
                again.setdefault(last[stage], []).append(sample_id)
            last[stage] = worker
