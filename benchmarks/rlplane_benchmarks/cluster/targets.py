"""The targets of the cluster engine."""

from __future__ import annotations

from rlplane_benchmarks.participants import RLPLANE, TRANSFER_QUEUE
from rlplane_benchmarks.targets import Target, ratio_between, value_of

__all__ = ["CLUSTER_TARGETS"]

_CLIENTS = "4"
_BATCHES = {"grpo-13MB": "13 MB", "grpo-52MB": "52 MB", "dense-26MB": "dense 26 MB"}

CLUSTER_TARGETS = (
    Target(
        f"cycles per second, {_CLIENTS} clients ÷ plain TransferQueue",
        "≥",
        4.0,
        ratio_between((_CLIENTS, RLPLANE, "cycles"), (_CLIENTS, TRANSFER_QUEUE, "cycles")),
        unit=" ×",
    ),
    Target(
        f"control service, CPU time for a cycle, {_CLIENTS} clients",
        "≤",
        0.6,
        value_of((_CLIENTS, RLPLANE, "CPU per cycle"), unit_s=1e-3),
        unit=" ms",
    ),
    Target(
        "put → waiting claim returns, p50",
        "≤",
        3.0,
        value_of(("wake", RLPLANE, "put to claim"), unit_s=1e-3),
        unit=" ms",
    ),
    *(
        Target(
            f"{op} {title}, time ÷ plain TransferQueue",
            "≤",
            1.1,
            ratio_between((name, RLPLANE, op), (name, TRANSFER_QUEUE, op)),
        )
        for name, title in _BATCHES.items()
        for op in ("put", "get")
    ),
)
