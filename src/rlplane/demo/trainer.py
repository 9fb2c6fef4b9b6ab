"""The trainer: feeds prompts, claims whole groups, learns from them, publishes weights.

How old a group may be is the plane's business, by the policy of the partition. The trainer keeps count of
every sample: one that it wrote is in flight until it is cleared, for a stated reason. With each version of
the weights it publishes all that a trainer needs to go on, in one put: a checkpoint of the plane, at whatever
moment it was saved, is a checkpoint of the job.
"""

from __future__ import annotations

import io
import time
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from tensordict import TensorDict

from rlplane import DataPlaneClient, KVBatchMeta, materialize, pack_jagged_fields, shard_meta_for_dp
from rlplane.demo.loss import group_advantages, grpo_loss
from rlplane.demo.model import Policy, flatten, token_logprobs, unflatten
from rlplane.demo.problem import make_prompt
from rlplane.demo.settings import (
    PROGRESS,
    PROMPT,
    ROLLED_OUT,
    ROLLOUTS,
    SCORED,
    TEACHES_NOTHING,
    WEIGHT_FIELDS,
    WEIGHTS,
    Settings,
    Stop,
    claim_groups,
)
from rlplane.demo.stages import prompt_number, version_of, weights_id

KEPT_VERSIONS = 3
TRAINED, TOO_OLD, NO_VARIANCE = "trained", "too old", "no reward variance"
ISSUED_AGAIN = "issued again on resume"


@dataclass
class SampleCounts:
    """What became of every sample. A sample that is cleared twice, or was never written, is an error."""

    prompts: int = 0
    written: int = 0
    in_flight: set[str] = field(default_factory=set)
    cleared: dict[str, int] = field(default_factory=lambda: {TRAINED: 0, TOO_OLD: 0, NO_VARIANCE: 0})

    def write(self, ids: list[str]) -> None:
        self.written += len(ids)
        self.in_flight.update(ids)

    def clear(self, ids: list[str], reason: str) -> None:
        strange = set(ids) - self.in_flight
        if strange:
            raise RuntimeError(f"{len(strange)} samples came twice or were never written: {min(strange)} …")
        self.in_flight.difference_update(ids)
        self.cleared[reason] += len(ids)


@dataclass
class Gathered:
    """What a step has claimed: groups to learn from, and groups that teach nothing."""

    good: list[KVBatchMeta] = field(default_factory=list)
    flat: list[KVBatchMeta] = field(default_factory=list)

    @property
    def everything(self) -> list[KVBatchMeta]:
        return [*self.good, *self.flat]


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
        self.again: list[str] = []  # groups that are to be issued again, by the name that they will have
        self.evicted: list[str] = []  # groups that were too old, since the last step
        self.line: dict[str, Any] | None = None  # what the last step was like

    def start(self) -> None:
        """Publish the first weights, which stay as the reference, or go on with the newest that are there;
        then have as many prompts in the plane as it should have."""
        if self.client.list_sample_ids(WEIGHTS):
            self.restore()
        else:
            self.publish()
        here = len(self.counts.in_flight) // self.settings.group_size
        self.feed(max(self.settings.groups_in_flight - here, len(self.again)))

    def feed(self, groups: int) -> None:
        """Write the prompts of groups, ``group_size`` samples of each, for the other stages to fill: first of
        those that have to be issued again."""
        if groups <= 0:
            return
        again, self.again = self.again[:groups], self.again[groups:]
        fresh = range(self.counts.prompts, self.counts.prompts + groups - len(again))
        names = [*again, *(f"p{number}" for number in fresh)]
        s, size = self.settings, self.settings.group_size
        prompts = [make_prompt(s.seed, prompt_number(name), s.letters) for name in names for _ in range(size)]
        ids = [f"{name}_g{i}" for name in names for i in range(size)]
        rows = {PROMPT[0]: [torch.tensor(prompt) for prompt in prompts]}
        packed = pack_jagged_fields(rows, lengths=[len(p) for p in prompts], token_aligned_fields=PROMPT)
        self.client.put_samples(ids, ROLLOUTS, packed)
        self.counts.prompts += len(fresh)
        self.counts.write(ids)

    def publish(self) -> None:
        """Put the weights of this version, say so, and clear one that nobody will ask for any more."""
        saved = io.BytesIO()
        torch.save(self.optimizer.state_dict(), saved)
        optimizer = torch.frombuffer(saved.getbuffer(), dtype=torch.uint8)
        columns = TensorDict({"parameters": flatten(self.policy)[None], "optimizer": optimizer[None]}, [1])
        self.client.put_samples([weights_id(self.version)], WEIGHTS, columns, [self.state()])
        self.client.advance_version(ROLLOUTS, self.version)
        if self.version > KEPT_VERSIONS:
            self.client.clear_samples([weights_id(self.version - KEPT_VERSIONS)], WEIGHTS)

    def state(self) -> dict[str, Any]:
        """What goes with the weights as tags, beside the tensors."""
        unfinished = {prompt_number(name) for name in (*self.counts.in_flight, *self.again)}
        counts = {"prompts": self.counts.prompts, "cleared": dict(self.counts.cleared)}
        return {**counts, "unfinished": sorted(unfinished), "line": self.line}

    def restore(self) -> None:
        """Go on with the newest weights, from whatever moment the plane is.

        Since they were published, groups may have been cleared, and prompts written. What is there counts;
        a prompt that was neither finished then nor is there now is issued again.
        """
        newest = self.client.peek_meta(WEIGHTS, order="lifo", limit=1)
        (state,) = newest.tags or []
        data = self.client.get_samples(newest.sample_ids, WEIGHTS, WEIGHT_FIELDS)
        unflatten(self.policy, data["parameters"][0])
        saved = io.BytesIO(data["optimizer"][0].numpy().tobytes())
        self.optimizer.load_state_dict(torch.load(saved, weights_only=True))
        self.version, self.line = version_of(newest.sample_ids[0]), state["line"]
        self.client.advance_version(ROLLOUTS, self.version)
        evicted = self.client.evicted_meta(ROLLOUTS).sample_ids
        here = {*self.client.list_sample_ids(ROLLOUTS), *evicted}
        open_then, issued_then = set(state["unfinished"]), state["prompts"]
        # What the weights know already, and only the clear is missing.
        used = {i for i in here if prompt_number(i) < issued_then and prompt_number(i) not in open_then}
        here -= used
        self.clear_used([sample_id for sample_id in sorted(used) if sample_id not in evicted])
        there = {prompt_number(name) for name in here}
        issued = max([issued_then, *(number + 1 for number in there)])
        self.again = [f"p{n}" for n in sorted((open_then | set(range(issued_then, issued))) - there)]
        written, cleared = self.client.partition_status(ROLLOUTS)["written"], dict(state["cleared"])
        rest = written - len(here) - sum(cleared.values())
        if rest:
            cleared[ISSUED_AGAIN] = cleared.get(ISSUED_AGAIN, 0) + rest
        self.counts = SampleCounts(issued, written, here, cleared)
        self.note_evicted([sample_id for sample_id in evicted if sample_id in here])

    def clear_used(self, sample_ids: list[str]) -> None:
        """Clear what earlier weights were trained on: claimed first, because a prompt that is cleared before
        it was claimed has failed, and the plane would admit another in its place."""
        if sample_ids:
            self.client.put_samples(sample_ids, ROLLOUTS, None, [{"used": True}] * len(sample_ids))
            size = len(sample_ids)
            self.client.claim_meta(ROLLOUTS, "train", [], size, blocking=False, where={"used": True})
            self.client.clear_samples(sample_ids, ROLLOUTS)

    def note_evicted(self, sample_ids: list[str]) -> int:
        """Count samples that the plane evicted as too old; return of how many groups, to be issued again."""
        names = list(dict.fromkeys(sample_id.rpartition("_g")[0] for sample_id in sample_ids))
        self.counts.clear(sample_ids, TOO_OLD)
        self.evicted += [f"{name}_g0" for name in names]
        for name in names:
            # Another name: whoever still works on the old one must not write to the new one.
            number, _, attempt = name.partition(".")
            self.again.append(f"{number}.{int(attempt or 0) + 1}")
        return len(names)

    def gather(self, stop: Stop) -> Gathered:
        """Claim until there is enough to learn from, or most groups teach nothing, or it is to stop."""
        s, got = self.settings, Gathered()
        trained = judged = 0
        while (missing := min(s.groups_per_step - trained, s.judged_per_step - judged)) and not stop():
            flat = claim_groups(self.client, s, "train", ROLLED_OUT, missing, where=TEACHES_NOTHING, enough=0)
            got.flat.append(flat)
            groups = flat.size // s.group_size
            if groups < missing:
                missing -= groups
                good = claim_groups(self.client, s, "train", SCORED, missing, enough=missing)
                got.good.append(good)
                trained += good.size // s.group_size
                groups += good.size // s.group_size
            judged += groups
            # Replaced before the gradient step, during which rollouts go on.
            self.feed(groups + self.note_evicted(self.client.evicted_meta(ROLLOUTS).sample_ids))
        return got

    def learn(self, batch: KVBatchMeta) -> None:
        """One step of the optimizer. The gradient is the sum over the shards of the data-parallel ranks."""
        s = self.settings
        # Advantages need rewards alone, and those are tags: they are made and travel without a tensor.
        advantages = group_advantages(torch.tensor([tag["reward"] for tag in batch.tags or []]), s.group_size)
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
        got, size = self.gather(stop), self.settings.group_size
        if stop():
            for meta in got.everything:
                self.client.unclaim(meta)
            return None
        flat, batch = joined(got.flat), joined(got.good)
        if batch is not None:
            self.learn(batch)
        trained = [] if batch is None else batch.sample_ids
        dropped = [] if flat is None else flat.sample_ids  # by what their tags say: no tensor was read
        again: dict[str, list[str]] = {}
        for meta in got.everything:
            note_repeats(meta, again)
        tags = [tag for meta in got.everything for tag in meta.tags or []]
        staleness = [self.version - tag["weight_version"] for tag in tags]
        self.version += 1
        self.line = {
            "step": self.version,
            "reward": sum(tag["reward"] for tag in tags) / len(tags),
            "judged": len(tags),
            "trained": len(trained),
            "groups": [sample_id.rpartition("_g")[0] for sample_id in trained[::size]],
            "tokens": 0 if batch is None else sum(tag["input_lengths"] for tag in batch.tags or []),
            # As in every view: at the claim, the newest weight version minus the sample's.
            "claimed": len(staleness),
            "staleness": sum(staleness) / len(staleness),
            "oldest": max(staleness),
            "late": sum(age > self.settings.max_staleness for age in staleness),
            "dropped": {TOO_OLD: self.evicted, NO_VARIANCE: dropped[::size]},
            "handed_out_again": again,
            **self.timed.lap(),
        }
        self.evicted = []
        self.counts.clear(trained, TRAINED)
        self.counts.clear(dropped, NO_VARIANCE)
        # Cleared after the weights are there: a job that resumes from what is saved in between knows that
        # they were used, and one from before uses them again.
        self.publish()
        self.client.clear_samples([*trained, *dropped], ROLLOUTS)
        return self.line

    def save(self) -> None:
        """Bring what is in the plane about the newest weights up to date."""
        self.client.put_samples([weights_id(self.version)], WEIGHTS, None, [self.state()])

    def report(self) -> None:
        """Tell the job how the last step was; through the plane too, as the tags of a tiny sample."""
        if self.line is not None:
            self.client.put_samples([f"step-{self.version}"], PROGRESS, None, [self.line])


def train(client: DataPlaneClient, settings: Settings, name: str, stop: Stop) -> None:
    """The trainer as a stage."""
    trainer = Trainer(client, settings)
    trainer.start()
    trainer.report()  # if the plane was saved when it was published and not yet told
    trainer.timed.lap()  # what came before is not part of the first step
    while trainer.version < settings.steps and not stop():
        with client.step(trainer.version + 1) as step:
            line = trainer.step(stop)
            if line is not None:
                step.tokens = line["tokens"]
                client.log({"reward": line["reward"], "trained": line["trained"]})
        if line is not None:
            trainer.report()
    trainer.save()
    counts = trainer.counts
    last = {"done": True, "prompts": counts.prompts, "written": counts.written, "cleared": counts.cleared}
    client.put_samples(["done"], PROGRESS, None, [{**last, "in_flight": sorted(counts.in_flight)}])


def joined(metas: list[KVBatchMeta]) -> KVBatchMeta | None:
    """One meta of all that have samples; None if none has."""
    some = [meta for meta in metas if meta.size]
    return some[0].concat(*some[1:]) if some else None


def note_repeats(meta: KVBatchMeta, again: dict[str, list[str]]) -> None:
    """Add, for each worker that died with samples in hand, those that another worker then finished."""
    for sample_id, tag in zip(meta.sample_ids, meta.tags or [], strict=True):
        last: dict[str, str] = {}
        for worker in tag.get("attempts", []):
            stage = worker.split("-")[0]
            if stage in last:
                again.setdefault(last[stage], []).append(sample_id)
            last[stage] = worker
