"""What a run of the cluster bench measures, and how often."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rlplane_benchmarks.plan import MB, Workload, scaled_plan

__all__ = ["ClusterPlan", "full_cluster_plan", "quick_cluster_plan"]

_LEAST = {"batch_rounds": 2, "wakes": 3, "client_rounds": 2, "client_seconds": 0.2}


@dataclass(frozen=True)
class ClusterPlan:
    """Everything that a run does. The first round of each part warms up and does not count."""

    batches: tuple[Workload, ...]
    batch_rounds: int
    wakes: int
    clients: tuple[int, ...]
    client_rounds: int
    client_seconds: float
    client_rows: int = 8

    def scaled(self, scale: float) -> ClusterPlan:
        """The same plan with bytes, counts and times multiplied, each kept large enough to work."""
        return self if scale == 1 else scaled_plan(self, scale, _LEAST)


def full_cluster_plan() -> ClusterPlan:
    """The whole cluster bench: some three minutes."""
    return ClusterPlan(
        batches=(
            Workload("grpo-13MB", "GRPO batch, 13 MB: 512 ragged rows × 6 fields", 512, 6, 13 * MB, True),
            Workload("grpo-52MB", "GRPO batch, 52 MB: 512 ragged rows × 6 fields", 512, 6, 52 * MB, True),
            Workload("dense-26MB", "dense batch, 26 MB: 512 rows × 6 fields", 512, 6, 26 * MB, False),
            Workload("rows-8", "8 ragged rows × 6 fields, 0.2 MB", 8, 6, MB // 5, True),
        ),
        batch_rounds=15,
        wakes=300,
        clients=(1, 4, 12),
        client_rounds=5,
        client_seconds=2.0,
    )


def quick_cluster_plan() -> ClusterPlan:
    """The same parts with fewer rounds, and without the two larger batches."""
    plan = full_cluster_plan()
    return replace(
        plan,
        batches=(plan.batches[0], plan.batches[-1]),
        batch_rounds=5,
        wakes=80,
        client_rounds=3,
        client_seconds=1.0,
    )
