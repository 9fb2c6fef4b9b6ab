"""Observability on the client: every operation, every byte, every transfer.

Where things are: ``client.py`` has the wrapper; ``journal.py`` what it writes its notes into and the
thread that works them out; ``sizes.py`` and ``books.py`` count bytes; ``tally.py`` counts operations;
``watch.py`` looks at the engine once a second. This package is the only bridge from the data plane to
``rlplane.metrics`` and ``rlplane.sinks``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rlplane.interfaces import DataPlaneClient
from rlplane.metrics.sender import METRICS_ADDRESS_VARIABLE
from rlplane.observability.books import DataPlaneStats
from rlplane.observability.client import MetricsDataPlaneClient, log_event
from rlplane.observability.journal import DataPlaneEvent, EventStatus
from rlplane.observability.sizes import total_bytes as _td_bytes  # noqa: F401  (of the documented module)

if TYPE_CHECKING:
    from rlplane.interfaces import DataPlaneConfig

__all__ = [
    "DataPlaneEvent",
    "DataPlaneStats",
    "EventStatus",
    "MetricsDataPlaneClient",
    "log_event",
    "wrap_with_observability",
]


def wrap_with_observability(
    client: DataPlaneClient, cfg: DataPlaneConfig | Mapping[str, Any]
) -> DataPlaneClient:
    """Wrap ``client`` as ``cfg["observability"]`` says; without ``enabled`` it is returned as it is.

    Without a ``callback`` each operation is logged by :func:`log_event`. The aggregator's address is
    ``metrics_address``, else the environment variable ``RLPLANE_METRICS_ADDRESS``.

    Raises:
        ConfigError: A sink or the address cannot be used.
        MissingExtraError: A sink's package is not installed.
    """
    wanted: Mapping[str, Any] = cfg.get("observability") or {}
    if not wanted.get("enabled", False):
        return client
    return MetricsDataPlaneClient(
        client,
        wanted.get("callback") or log_event,
        sinks=wanted.get("sinks") or (),
        metrics_address=wanted.get("metrics_address") or os.environ.get(METRICS_ADDRESS_VARIABLE) or None,
        role=wanted.get("role") or "",
        track_partitions=wanted.get("track_partitions") or (),
        transfer_log_interval_s=wanted.get("transfer_log_interval_s"),
        capacity={
            "capacity_samples": cfg.get("storage_capacity"),
            "capacity_bytes": cfg.get("global_segment_size"),
        },
    )
