"""How processes that share a TransferQueue find its plane.

Children of the process that started the plane inherit its address in the environment. Processes of one Ray
cluster find it in the cluster's key-value store, wherever they were started from. Ray is used where a process
has it already, and is never loaded for this.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Mapping
from typing import Any

from rlplane.config import load_config
from rlplane.errors import PlaneConnectionError
from rlplane.interfaces import ADDRESS_VARIABLE, DataPlaneConfig
from rlplane.storage.shm.directory import PlaneDirectory

_KEY = b"plane"
_NAMESPACE = b"rlplane.transfer_queue"


def find() -> DataPlaneConfig | None:
    """The config with which to join the plane that there is, or None."""
    kv = _ray_kv()
    found = None if kv is None else kv._internal_kv_get(_KEY, namespace=_NAMESPACE)
    if found is not None:
        entry = json.loads(found)
        if entry["config"]["impl"] == "local" and entry["host"] != socket.gethostname():
            raise PlaneConnectionError(
                f"this job's plane is in the shared memory of {entry['host']!r}, and this process runs on "
                f"{socket.gethostname()!r}: over several machines, give init() a config with "
                "rlplane.backend: simple or mooncake_cpu"
            )
        if _is_alive(entry["config"]):
            return load_config(entry["config"])
        withdraw()  # the process that started it has died
    address = os.environ.get(ADDRESS_VARIABLE)
    if address and address.startswith("shm://") and _is_alive({"controller_address": address}):
        return load_config("shm", {"controller_address": address, "allow_pickle": True})
    return None


def _is_alive(config: Mapping[str, Any]) -> bool:
    """Whether a plane of this machine is there; those of a cluster are found out about by joining them."""
    address = config.get("controller_address") or ""
    if not address.startswith("shm://"):
        return True
    try:
        return not PlaneDirectory.at(address).is_dead
    except PlaneConnectionError:
        return False


def publish(config: Mapping[str, Any]) -> bool:
    """Tell the processes of this Ray cluster; False if another process has told them of its plane before."""
    kv = _ray_kv()
    if kv is None or config["backend"] == "memory":
        return True  # nobody to tell, or nobody who could join
    entry = json.dumps({"config": config, "host": socket.gethostname()}).encode()
    return not kv._internal_kv_put(_KEY, entry, overwrite=False, namespace=_NAMESPACE)


def withdraw() -> None:
    """The plane that was found or published is gone."""
    kv = _ray_kv()
    if kv is not None:
        kv._internal_kv_del(_KEY, namespace=_NAMESPACE)


def ray_nodes() -> int:
    """How many machines this job has, as far as Ray knows; 1 without Ray."""
    ray = _ray()
    return 1 if ray is None else sum(bool(node["Alive"]) for node in ray.nodes())


def _ray_kv() -> Any:
    ray = _ray()
    return None if ray is None else ray.experimental.internal_kv


def _ray() -> Any:
    ray = sys.modules.get("ray")
    return ray if ray is not None and ray.is_initialized() else None
