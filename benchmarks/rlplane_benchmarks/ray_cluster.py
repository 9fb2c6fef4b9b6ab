"""A Ray on this machine alone, for participants that need one and for the cluster bench."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import tempfile
from typing import Any

__all__ = ["LOOPBACK", "end_ray", "join_ray", "ray_environment", "start_ray"]

# Ray replaces 127.0.0.1 by an address that other hosts can reach. It keeps this one, which is loopback too.
LOOPBACK = "127.0.0.2"

# These are logical: TransferQueue's actors ask for one each, and wait for ever if there are too few.
_CPUS = 6
_QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
_directories: list[str] = []


def ray_environment() -> dict[str, str]:
    """What the processes that start a Ray or join it need in their environment.

    A Ray that finds a token in the user's home asks for it, but a process that joins does not look there. So
    this Ray has a token of its own, which only its own processes know.
    """
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


def start_ray(store_bytes: int) -> str:
    """Start Ray, and return the address at which other processes join it."""
    import ray

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # By default Ray's workers run at a lower priority than all other processes, which would slow only them.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # A short path: Ray puts Unix sockets below it, whose paths must not be long.
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
