"""What a run measures: the batches, how many rounds of each, and the counts of the control-plane parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

__all__ = ["Plan", "Workload", "full_plan", "quick_plan", "scaled_plan"]

AnyPlan = TypeVar("AnyPlan", bound=Any)

MB = 10**6
_IMAGES = 280  # MB, as many as 512 images of 224 × 196 pixels have
# Below these, counts and times would mean nothing.
_LEAST = {
    "grpo_rounds": 2,
    "wide_rounds": 2,
    "warm_up": 1,
    "pings": 20,
    "wakes": 5,
    "image_rounds": 2,
    "lag_tasks": 8,
    "lag_bytes": 2**16,
    "lag_rounds": 1,
    "lag_seconds": 0.1,
    "claims": 3,
    "client_rounds": 2,
    "client_seconds": 0.1,
    "listed": 50,
    "listings": 3,
    "ordered": 4096,
}


@dataclass(frozen=True)
class Workload:
    """A batch that is put, read twice and cleared in every round.

    ``repeat`` is how often in one round: a short operation needs more measurements than a long one.
    """

    name: str
    title: str
    rows: int
    fields: int
    nbytes: int
    ragged: bool
    repeat: int = 1
    is_trees: bool = False
    """Rows that are trees, with an image each."""
    shared_by: int = 1
    """How many rows have the same image."""

    def scaled(self, scale: float) -> Workload:
        """The same batch with fewer bytes, but at least 64 for every row and field."""
        least = self.rows * self.fields * 64
        return replace(self, nbytes=max(int(self.nbytes * scale), least))


@dataclass(frozen=True)
class Plan:
    """Everything that a run does. Workloads of one group alternate with each other."""

    grpo: tuple[Workload, ...]
    grpo_rounds: int
    wide: tuple[Workload, ...]
    wide_rounds: int
    warm_up: int
    pings: int
    wakes: int
    resident: tuple[int, ...]
    images: tuple[Workload, ...]
    image_rounds: int
    lag_tasks: int
    lag_bytes: int
    lag_rounds: int
    lag_seconds: float
    claims: int
    claim_size: int
    clients: tuple[int, ...]
    client_rounds: int
    client_seconds: float
    client_rows: int = 8
    listed: int = 10_000
    listings: int = 30
    ordered: int = 1_000_000

    def scaled(self, scale: float) -> Plan:
        """The same plan with bytes, counts and times multiplied, each kept large enough to mean something."""
        if scale == 1:
            return self
        resident = dict.fromkeys(max(int(count * scale), self.claim_size * 2) for count in self.resident)
        return replace(scaled_plan(self, scale, _LEAST), resident=tuple(resident))


def scaled_plan(plan: AnyPlan, scale: float, least: Mapping[str, float]) -> AnyPlan:
    """A plan with smaller batches and fewer clients, and with what ``least`` names multiplied, but not below
    what it has there. One client stays one, and several stay several."""
    changes: dict[str, Any] = {
        name: max(type(bound)(getattr(plan, name) * scale), bound) for name, bound in least.items()
    }
    for name, value in vars(plan).items():
        if isinstance(value, tuple) and isinstance(value[0], Workload):
            changes[name] = tuple(workload.scaled(scale) for workload in value)
    clients = dict.fromkeys(max(int(count * scale), 1 + (count > 1)) for count in plan.clients)
    return replace(plan, **changes, clients=tuple(clients))


def full_plan() -> Plan:
    """The whole bench: some minutes, more with peers."""
    return Plan(
        grpo=(
            Workload("grpo-13MB", "GRPO batch, 13 MB: 512 ragged rows × 6 fields", 512, 6, 13 * MB, True),
            Workload("grpo-52MB", "GRPO batch, 52 MB: 512 ragged rows × 6 fields", 512, 6, 52 * MB, True),
            Workload("rows-8", "8 rows of the 13 MB batch", 8, 6, 13 * MB * 8 // 512, True, repeat=20),
        ),
        grpo_rounds=15,
        wide=_wide((1, 8, 32)),
        wide_rounds=9,
        warm_up=2,
        pings=2000,
        wakes=500,
        resident=(1_000, 10_000, 100_000, 1_000_000),
        images=_images(),
        image_rounds=9,
        lag_tasks=256,
        lag_bytes=52 * MB,
        lag_rounds=5,
        lag_seconds=2.0,
        claims=100,
        claim_size=64,
        clients=(1, 4, 16, 64),
        client_rounds=5,
        client_seconds=2.0,
    )


def quick_plan() -> Plan:
    """The same parts with fewer rounds: under a minute for rlplane and the limits."""
    plan = full_plan()
    return replace(
        plan,
        grpo_rounds=7,
        wide_rounds=3,
        warm_up=1,
        pings=500,
        wakes=150,
        image_rounds=5,
        lag_rounds=2,
        lag_seconds=1.0,
        claims=40,
        listings=10,
        ordered=100_000,
        client_rounds=3,
        client_seconds=0.4,
    )


def _images() -> tuple[Workload, ...]:
    of = f"{_IMAGES} MB: 64 prompts × 8 rows"
    own = Workload("images", f"Images, {of}, each with its own", 512, 1, _IMAGES * MB, False, is_trees=True)
    shared = replace(own, name="images-shared", title=f"Images, {of} that share one", shared_by=8)
    title = f"The bytes of the images, {_IMAGES} MB, as one dense field"
    return own, shared, replace(own, name="images-dense", title=title, is_trees=False)


def _wide(fields: Sequence[int]) -> tuple[Workload, ...]:
    return tuple(
        Workload(f"wide-{n}", f"256 MB as {n} field{'s' * (n > 1)}: 512 equal rows", 512, n, 256 * MB, False)
        for n in fields
    )
