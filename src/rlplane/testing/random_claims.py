"""The operations of the state machine that claim, and those of flow control. Needs hypothesis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from rlplane.errors import ClaimTimeoutError
from rlplane.interfaces import KVBatchMeta
from rlplane.testing.expectations import equal, expect, has_samples, refuses
from rlplane.testing.model import ModelClaim, Unit
from rlplane.testing.promises import BrokenPromise
from rlplane.testing.random_operations import RandomOperations
from rlplane.testing.random_values import GROUPS, REQUIRED, claim_options, flows

RANKS = 2
# Which feature an argument of a claim belongs to.
FEATURES = {
    "where": "where",
    "order": "order",
    "max_tokens": "max_tokens",
    "max_uses": "reuse",
    "repeat_where": "reuse",
}


class DataPlaneMachine(RandomOperations):
    """One plane and one model of it."""

    @rule(options=claim_options, data=st.data())
    def claim_what_is_ready(self, options: dict[str, Any], data: st.DataObject) -> None:
        """A claim that does not wait."""
        self._claim_ready(*self._draw_claim(options, data))

    @rule(options=claim_options, data=st.data())
    def claim_a_batch_or_the_tail(self, options: dict[str, Any], data: st.DataObject) -> None:
        """A claim that waits. If the model says that it would wait for ever, it must time out."""
        flow, claim, how = self._draw_claim(options, data)
        part, model = self.parts[flow], self.models[flow]
        if model.fit(claim) is None:
            refuses(ValueError, f"{claim}", part.claim, claim.size, **how)
            return
        wanted = model.full_batch_or_tail(claim)
        if wanted is None:
            too_short = self.plane.short / 10
            error = refuses(ClaimTimeoutError, f"{claim}", part.claim, claim.size, timeout_s=too_short, **how)
            equal("the number that was ready", error.ready, min(model.room(model.units(claim)), claim.size))
            return
        try:
            meta = part.claim(claim.size, **how)
        except ClaimTimeoutError as exc:
            raise BrokenPromise(f"{claim} timed out, and it should have {wanted}: {exc}") from exc
        self._claimed(flow, claim, meta, wanted)

    @precondition(lambda self: self.has("order"))
    @rule(data=st.data())
    def claim_at_random(self, data: st.DataObject) -> None:
        """A claim in an order that the model does not know: any samples that are ready will do."""
        flow, claim, how = self._draw_claim({}, data)
        model = self.models[flow]
        if model.flow.gate(claim.task) is not None or model.group_sizes:
            return  # how many it may have depends on which come first
        units = model.units(claim)
        meta = self.parts[flow].claim_ready(claim.size, order="random:7", **how)
        taken = [unit for unit in units if unit[0] in meta.sample_ids]
        taken.sort(key=lambda unit: meta.sample_ids.index(unit[0]))
        equal("the number that was claimed", model.room(taken), min(model.room(units), claim.size))
        self._claimed(flow, claim, meta, taken)

    @precondition(lambda self: self.has("ranks"))
    @rule(data=st.data())
    def claim_as_two_ranks(self, data: st.DataObject) -> None:
        """A batch that two ranks share, each of which asks twice."""
        flow, claim, how = self._draw_claim({}, data)
        model = self.models[flow]
        if model.flow.gate(claim.task) is not None:
            return  # prompts are begun one by one, and not in equal parts
        claim.ranks, claim.size = RANKS, RANKS * claim.size
        self.next_step += 1
        step = self.next_step
        fitting = model.fit(claim)
        units = None if fitting is None else model.full_batch_or_tail(claim)
        over = [] if not units else units[len(units) - len(units) % RANKS :]
        shared = [] if not units else units[: len(units) - len(over)]
        if fitting is None or (units and not shared):
            refuses(ValueError, f"{claim}", self._ask_as_rank, flow, claim.size, 0, step, how)
            if units:
                model.claim(claim, units)
                model.give_back(claim.task, [i for unit in units for i in unit])
            return
        parts = [self._ask_as_rank(flow, claim.size, rank, step, how) for rank in (1, 0, 1, 0)]
        equal("the parts, asked for again", parts[2:], parts[:2])
        equal("the parts together", sorted(parts[0] + parts[1]), sorted(i for unit in shared for i in unit))
        counts = [sum(unit[0] in part for unit in shared) for part in parts[:2]]
        equal("the number of samples or groups in the parts", counts, [len(shared) // RANKS] * RANKS)
        if units is not None:
            model.share(claim, step, units, [parts[1], parts[0]])
            model.give_back(claim.task, [i for unit in over for i in unit])

    @precondition(lambda self: any(model.steps for model in self.models.values()))
    @rule(rank=st.integers(0, RANKS - 1), data=st.data())
    def ask_for_an_earlier_step(self, rank: int, data: st.DataObject) -> None:
        """A rank gets the same part again, until all samples of it are cleared."""
        known = [
            (flow, *key)
            for flow, model in self.models.items()
            for key in model.steps
            if key[0] in model.tasks
        ]
        if not known:
            return
        flow, task, step = data.draw(st.sampled_from(known), "step")
        model = self.models[flow]
        size = RANKS * (model.group_size or 1)
        how = {"task": task, "required": []}
        if model.is_part_over(task, step, rank):
            refuses(ValueError, "a step that is over", self._ask_as_rank, flow, size, rank, step, how)
        else:
            part = self._ask_as_rank(flow, size, rank, step, how)
            equal("the part of an earlier step", part, model.steps[task, step][rank])

    def _ask_as_rank(self, flow: str, size: int, rank: int, step: int, how: dict[str, Any]) -> list[str]:
        meta = self.parts[flow].claim_ready(size, dp_rank=rank, dp_world=RANKS, step=step, **how)
        return meta.sample_ids

    # Giving back

    @precondition(lambda self: self.claims)
    @rule(finished=st.integers(0, 2), data=st.data())
    def give_a_claim_back(self, finished: int, data: st.DataObject) -> None:
        """What is not finished of a claim, or of a part of it, can be claimed again, before all else."""
        flow, meta = data.draw(st.sampled_from(self.claims), "claim")
        model, task, client = self.models[flow], str(meta.task_name), self.parts[flow].client
        if task not in model.tasks:
            return
        if self.has("short_groups"):
            if data.draw(st.booleans(), "a part"):
                meta = meta.subset(range(data.draw(st.integers(0, meta.size - 1), "from"), meta.size))
        elif model.group_size and len(model.held(task, meta.sample_ids)) < meta.size:
            return  # what would come back of a group is one that is short
        if finished and self.has("finish_claims"):
            done = meta.subset(range(min(finished, meta.size)))
            client.finish_claims(done)
            for sample_id in model.held(task, done.sample_ids):
                model.samples[sample_id].cursor(task).is_held = False
        try:
            client.unclaim(meta)
        except NotImplementedError:
            return  # an optional method
        model.give_back(task, model.held(task, meta.sample_ids))
        model.evict_stale()
        if data.draw(st.booleans(), "claim again"):
            again = ModelClaim(task, meta.fields or [], 8)
            self._claim_ready(flow, again, {"task": task, "required": again.required})

    # Flow control

    @precondition(lambda self: self.has("flow"))
    @rule(flow=flows, by=st.integers(-1, 2))
    def advance_the_version(self, flow: str, by: int) -> None:
        """The trainer publishes weights. A version never goes back."""
        part, model = self.parts[flow], self.models[flow]
        version = model.flow.version + by
        if by < 0:
            refuses(ValueError, f"version {version}", part.client.advance_version, part.name, version)
            return
        part.client.advance_version(part.name, version)
        model.flow.version = version
        model.evict_stale()

    @precondition(lambda self: self.has("flow"))
    @rule(flow=flows, data=st.data())
    def ask_what_is_in_vain(self, flow: str, data: st.DataObject) -> None:
        """Which samples need not be generated any more, and what was evicted since the last time."""
        part, model = self.parts[flow], self.models[flow]
        ids = data.draw(self._some_ids(flow), "ids")
        tags = {i: model.samples[i].tags if i in model.samples else None for i in ids}
        wanted = [i for i in ids if model.flow.is_vain(i, tags[i])]
        equal("what should be aborted", part.client.should_abort(ids, part.name), wanted)
        told = part.client.evicted_meta(part.name)
        # What is evicted at once has no order.
        evicted = sorted(zip(told.sample_ids, told.tags or [], strict=True), key=repr)
        equal("what was evicted", evicted, sorted(model.flow.untold, key=repr))
        model.flow.untold.clear()

    @precondition(lambda self: self.has("short_groups") and self.has("groups"))
    @rule(
        group=st.sampled_from(GROUPS),
        reason=st.sampled_from(["failed", "late"]),
        fields=st.sampled_from([[], ["scalar"], ["tokens"]]),
    )
    def close_a_group(self, group: str, reason: str, fields: list[str]) -> None:
        """A group ends with the members that are finished."""
        part, model = self.parts["grouped"], self.models["grouped"]
        close = part.client.close_group
        if not any(sample.group == group for sample in model.samples.values()):
            refuses(KeyError, "closing an unknown group", close, part.name, group, reason=reason)
            return
        members = close(part.name, group, reason=reason, fields=fields)
        equal("the members of a closed group", members, model.close_group(group, reason, fields))

    @precondition(
        lambda self: self.has("finish_partition") and not all(m.is_finished for m in self.models.values())
    )
    @rule(flow=flows)
    def finish_the_flow(self, flow: str) -> None:
        """Nothing new is to come: whoever waits gets the tail, and then nothing."""
        self.parts[flow].client.finish_partition(self.parts[flow].name)
        self.models[flow].is_finished = True

    # What the rules share

    def _draw_claim(
        self, options: dict[str, Any], data: st.DataObject
    ) -> tuple[str, ModelClaim, dict[str, Any]]:
        """Mostly a claim that finds something: at random, hardly any would."""
        promising = self._promising()
        if not promising:
            self._write_something(data.draw(flows, "flow"), data)
            promising = self._promising()
        if promising and data.draw(st.integers(0, 9), "anything if 9") < 9:
            flow, task, required = data.draw(st.sampled_from(promising), "claim")
        else:
            flow = data.draw(flows, "flow")
            task = data.draw(st.sampled_from(self.models[flow].tasks), "task")
            required = data.draw(st.sampled_from(REQUIRED), "required")
        model = self.models[flow]
        size = data.draw(st.one_of(st.just(8), st.integers(1, 3)), "size") * (model.group_size or 1)
        options = {name: value for name, value in options.items() if self.has(FEATURES[name])}
        if "max_uses" not in options or model.flow.step(task) is not None:
            # A policy that trains step by step does not come back to a step.
            options = {name: options[name] for name in options if name not in ("max_uses", "repeat_where")}
        return (
            flow,
            ModelClaim(task, required, size, **options),
            {"task": task, "required": required, **options},
        )

    def _claim_ready(self, flow: str, claim: ModelClaim, how: dict[str, Any]) -> None:
        fitting = self.models[flow].fit(claim)
        part = self.parts[flow]
        if fitting is None:
            refuses(ValueError, f"{claim}", part.claim_ready, claim.size, **how)
            return
        self._claimed(flow, claim, part.claim_ready(claim.size, **how), fitting[0])

    def _promising(self) -> list[tuple[str, str, tuple[str, ...]]]:
        """Claims that would get something."""
        return [
            (flow, task, required)
            for flow, model in self.models.items()
            for task in model.tasks
            for required in REQUIRED
            if (model.fit(ModelClaim(task, required, 8)) or ([], False))[0]
        ]

    def _write_something(self, flow: str, data: st.DataObject) -> None:
        """New samples, in place of all others if there is no name for more."""
        if all(i in self.models[flow].samples for i in self._writable(flow, self.ids[flow])):
            self._clear_everything(flow)
        self._write_new(flow, 4, ["scalar", "tokens"], data)

    def _claimed(self, flow: str, claim: ModelClaim, meta: KVBatchMeta, wanted: Sequence[Unit]) -> None:
        model = self.models[flow]
        ids = [i for unit in wanted for i in unit]
        has_samples(f"{claim}", meta, ids)
        tags = [model.samples[i].tags for i in ids]
        equal("the tags of a claim", meta.tags or [], tags)
        equal("the task of a claim", meta.task_name, claim.task)
        equal("the fields of a claim", meta.fields, list(claim.required))
        if ids:
            lengths = [tag.get("input_lengths") for tag in tags]
            equal("the lengths of a claim", meta.sequence_lengths, None if None in lengths else lengths)
            self.receipts.append((flow, meta))
            self.claims.append((flow, meta))
        if model.group_size and ids:
            expect(len(meta.groups()) == len(wanted), f"{claim} has the groups {meta.groups()}")
        model.claim(claim, wanted)
