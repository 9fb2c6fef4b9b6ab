"""What a run is made of: its sizes, the names of its partitions and fields, and how a claim is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rlplane import DataPlaneClient, FlowPolicy, KVBatchMeta
from rlplane.demo.problem import MAX_LETTERS

# Partitions. Each is a flow of its own, with its own schema and consumers.
ROLLOUTS, WEIGHTS, PROGRESS = "rollouts", "weights", "progress"

# The columns of a rollout, by the stage that writes them.
PROMPT = ["prompt_ids"]  # the trainer, which feeds the run
ROLLED_OUT = ["input_ids", "response_mask", "generation_logprobs"]  # a rollout worker
SCORED = ["prev_logprobs", "reference_logprobs"]  # the log-prob worker

# What is published with every version: all that the trainer needs to go on, so that each checkpoint of the
# plane is one of the whole job.
WEIGHT_FIELDS = ["parameters", "optimizer"]

# A group whose samples all got the same reward has no advantage to learn from.
TEACHES = {"reward_std": {">": 0.0}}
TEACHES_NOTHING = {"reward_std": 0.0}

WAIT_S = 0.25  # how soon a stage that has nothing to do notices that it should stop

Stop = Callable[[], bool]


@dataclass(frozen=True)
class Settings:
    """All that may differ between two runs. Every worker gets a copy when it starts."""

    seed: int = 0
    steps: int = 80
    letters: int = MAX_LETTERS  # of the longest string
    groups_per_step: int = 64
    group_size: int = 8
    policy: str = "windowed"
    max_staleness: int = 3
    slow_groups: float = 0.0
    dp_world: int = 1
    rollout_workers: int = 2
    learning_rate: float = 1e-3
    kl_weight: float = 0.01
    clip: float = 0.2
    trace_attempts: bool = False

    @property
    def flow(self) -> FlowPolicy:
        """How old a group may be when it is trained, and what follows; the plane sees to it."""
        if self.policy == "windowed":
            return FlowPolicy.windowed(self.max_staleness)
        gated = {"ready_first": FlowPolicy.ready_first, "weight_fifo": FlowPolicy.weight_fifo}
        return gated.get(self.policy, FlowPolicy.in_order)(self.max_staleness, self.groups_per_step)

    @property
    def groups_in_flight(self) -> int:
        """How many groups are between prompt and clear: as many as keep the rollout workers busy while the
        trainer learns. A group beyond them would be too old when the trainer gets to it."""
        return (self.max_staleness + 2) * self.groups_per_step

    @property
    def judged_per_step(self) -> int:
        """A step begins with what it has once this many groups were judged: when most answers are right,
        groups that teach something are rare, and waiting for a full step would take too long. Where prompts
        are admitted for a step, it is as many as that: the next prompts are those of the next step."""
        return self.groups_per_step if self.flow.is_gated else 2 * self.groups_per_step


def register_partitions(client: DataPlaneClient, settings: Settings) -> None:
    """Declare the three flows. ``num_samples`` is 0: none of them has an end that is known now."""
    columns = [*PROMPT, *ROLLED_OUT, *SCORED]
    tasks, size = ["rollout", "score", "train"], settings.group_size
    client.register_partition(ROLLOUTS, columns, 0, tasks, size, flow=settings.flow)
    client.register_partition(WEIGHTS, WEIGHT_FIELDS, 0, [])
    client.register_partition(PROGRESS, [], 0, ["watch"])


def claim_groups(
    client: DataPlaneClient,
    settings: Settings,
    task: str,
    required: list[str],
    most: int,
    *,
    enough: int = 1,
    where: Mapping[str, Any] | None = None,
) -> KVBatchMeta:
    """Whole groups that are ready, at most ``most``. If fewer than ``enough`` are, wait a moment for them."""
    size = settings.group_size
    meta = client.claim_meta(ROLLOUTS, task, required, most * size, blocking=False, where=where)
    missing = enough * size - meta.size
    if missing <= 0:
        return meta
    try:
        return meta.concat(
            client.claim_meta(ROLLOUTS, task, required, missing, timeout_s=WAIT_S, where=where)
        )
    except TimeoutError:
        return meta
