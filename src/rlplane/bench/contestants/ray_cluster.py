"""A Ray of one's own, on this machine alone, for a contestant that needs one."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
from typing import Any

__all__ = ["LOOPBACK", "end_ray", "join_ray", "start_ray"]

# Ray replaces 127.0.0.1 by an address that other hosts can reach; this one is as much loopback, and stays.
LOOPBACK = "127.0.0.2"

# Logical ones: TransferQueue's actors ask for one each, and wait for ever if there are too few.
_CPUS = 6
_QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
_directories: list[str] = []


def start_ray(store_bytes: int) -> str:
    """Start Ray, and return the address at which other processes join it."""
    import ray

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # By default Ray's workers give way to all other processes: that would slow the peers, and nobody else.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # Short: Ray puts Unix sockets below it, and their paths have little room.
    _directories.append(tempfile.mkdtemp(prefix="rlpb-"))
    ray.init(
        address="local",
        num_cpus=_CPUS,
        include_dashboard=False,
        object_store_memory=store_bytes,
        _node_ip_address=LOOPBACK,
        _temp_dir=_directories[-1],
        **_QUIET,
    )
    return str(ray.get_runtime_context().gcs_address)


def join_ray(address: str) -> None:
    """Connect this process to a Ray that :func:`start_ray` started elsewhere."""
    import ray

    ray.init(address=address, _node_ip_address=LOOPBACK, **_QUIET)


def end_ray() -> None:
    """Disconnect; end the Ray that this process started, and remove its files."""
    import ray

    with contextlib.suppress(Exception):
        ray.shutdown()
    for directory in _directories:
        shutil.rmtree(directory, ignore_errors=True)
    _directories.clear()
