"""What a flow policy does, as a dictionary model: versions, tickets of admitted prompts, and evictions.

A prompt that is admitted gets a ticket, the lowest number that is free. ``batch`` tickets make a step. The
ticket of a prompt that is cleared before it was trained goes to another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

TRAINING, ADMITTING = "train", "rollout"


@dataclass
class ModelFlow:
    """The policy of a partition (None: it has none), and what came of it so far."""

    policy: Mapping[str, Any] | None = None
    version: int = 0
    tickets: dict[str, int] = field(default_factory=dict)  # of live samples
    begun: dict[str, int] = field(default_factory=dict)  # the version at which a sample was first claimed
    next_ticket: int = 0
    free: set[int] = field(default_factory=set)
    trained: set[int] = field(default_factory=set)
    evicted: Counter[str] = field(default_factory=Counter)
    closed_short: Counter[str] = field(default_factory=Counter)
    untold: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    @property
    def kind(self) -> str:
        """The kind of the policy."""
        return "unbounded" if self.policy is None else self.policy["kind"]

    @property
    def batch(self) -> int:
        """How many prompts a step has."""
        return 0 if self.policy is None else self.policy.get("batch", 0)

    @property
    def tasks(self) -> list[str]:
        """The tasks that the policy cannot do without."""
        needed = {"windowed": [TRAINING], "ready_first": [ADMITTING]}
        return [] if self.policy is None else needed.get(self.kind, [TRAINING, ADMITTING])

    def gate(self, task: str) -> int | None:
        """How many more prompts the task may begin; None: any number."""
        if self.policy is None or self.kind == "windowed" or task != ADMITTING:
            return None
        admissible: int = (self.version + self.policy["max_staleness"] + 1) * self.batch
        return admissible - self.admitted

    @property
    def admitted(self) -> int:
        """How many prompts were admitted, without those that were cleared before they were trained."""
        return self.next_ticket - len(self.free)

    @property
    def oldest(self) -> int | None:
        """The oldest version that may be trained; None: any."""
        return (
            None
            if self.policy is None or self.kind != "windowed"
            else self.version - self.policy["max_staleness"]
        )

    def is_stale(self, tags: Mapping[str, Any]) -> bool:
        """Whether a sample with these tags is too old."""
        return self.oldest is not None and tags.get("weight_version", self.oldest) < self.oldest

    def order(self, task: str) -> str | None:
        """In which order the policy hands out samples, if not first ready, first claimed."""
        if self.policy is None or task != TRAINING:
            return None
        if self.policy.get("freshest_first"):
            return "freshest"
        return "oldest" if self.kind == "weight_fifo" else None

    def step(self, task: str) -> int | None:
        """The step that the task trains now; None where the policy does not keep steps apart."""
        if self.kind != "in_order" or task != TRAINING:
            return None
        still_open = [ticket for ticket in self.tickets.values() if ticket not in self.trained]
        return min(still_open, default=self.next_ticket) // self.batch

    def is_of_step(self, sample_id: str, step: int) -> bool:
        """Whether a sample was admitted for a step."""
        return self.tickets.get(sample_id, -1) // self.batch == step

    def is_issued(self, step: int) -> bool:
        """Whether all tickets of a step are with prompts."""
        is_whole = self.next_ticket >= (step + 1) * self.batch
        return is_whole and not any(ticket // self.batch <= step for ticket in self.free)

    def claim(self, task: str, prompts: Sequence[Sequence[str]]) -> None:
        """A task has claimed prompts: samples, or groups."""
        if self.policy is None:
            return
        if task == ADMITTING:
            self.begun.update({i: self.version for prompt in prompts for i in prompt})
            for prompt in prompts:
                if self.gate(task) is not None and prompt[0] not in self.tickets:
                    ticket = min(self.free, default=self.next_ticket)
                    self.free.discard(ticket)
                    self.next_ticket = max(self.next_ticket, ticket + 1)
                    self.tickets.update(dict.fromkeys(prompt, ticket))
        if task == TRAINING:
            self.trained.update(self.tickets[i] for prompt in prompts for i in prompt if i in self.tickets)

    def give_back(self, task: str, ids: Sequence[str]) -> None:
        """Claimed samples came back."""
        if self.policy is not None and task == TRAINING:
            self.trained.difference_update(self.tickets[i] for i in ids if i in self.tickets)

    def remove(self, ids: Sequence[str], is_trained_here: bool) -> None:
        """Samples are gone; ``is_trained_here``: there is a task that could have trained them."""
        for sample_id in ids:
            self.begun.pop(sample_id, None)
            ticket = self.tickets.pop(sample_id, None)
            if ticket is None or ticket in self.tickets.values():
                continue
            if ticket in self.trained:
                self.trained.discard(ticket)
            elif is_trained_here:
                self.free.add(ticket)

    def evict(self, sample_id: str, tags: Mapping[str, Any], reason: str) -> None:
        """Count a sample that the plane clears, and remember it for whoever asks."""
        self.evicted[reason] += 1
        self.untold.append((sample_id, {**tags, "evicted": reason}))

    def is_vain(self, sample_id: str, tags: Mapping[str, Any] | None) -> bool:
        """What ``should_abort`` says of a sample; ``tags`` are None when it is not there."""
        if tags is None:
            return True
        version = tags.get("weight_version", self.begun.get(sample_id))
        return self.oldest is not None and version is not None and version < self.oldest
