"""A Ray of one's own, on this machine alone, for a contestant that needs one."""

from __future__ import annotations

import logging
import os
from typing import Any

__all__ = ["join_ray", "start_ray"]

# Logical ones: TransferQueue's actors ask for one each, and wait for ever if there are too few.
_CPUS = 6
_QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}


def start_ray(store_bytes: int, **options: Any) -> str:
    """Start Ray, and return the address at which other processes join it. Ends with ``ray.shutdown``."""
    import ray

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(
        address="local",
        num_cpus=_CPUS,
        include_dashboard=False,
        object_store_memory=store_bytes,
        **_QUIET,
        **options,
    )
    return str(ray.get_runtime_context().gcs_address)


def join_ray(address: str, **options: Any) -> None:
    """Connect this process to a Ray that :func:`start_ray` started."""
    import ray

    ray.init(address=address, **_QUIET, **options)
