"""The cluster engine: TransferQueue on Ray, behind the contract of :mod:`rlplane.interfaces`.

    client.py       TQDataPlaneClient: reserve, store, commit; locate, fetch, assemble
    control.py      the control state behind one Ray actor, and the garbage it collects
    writes.py       what is known about a write: to its writer, to readers, in a checkpoint
    checkpoint.py   TransferQueue's dump, with the control state beside it
    liveness.py     how the control actor notices that a client has died
    plane.py        starting, finding and ending the actors; the only file that starts Ray
    storage.py      bytes in and out of TransferQueue's units, or of Mooncake
    wire.py         columns as chunks of bytes
    mooncake.py     Mooncake's master and units as actors
    network.py      this host's address; tcp or rdma
    runtime_env.py  the pin for TransferQueue's actors

Nothing here imports Ray or TransferQueue until a client is made.
"""

from __future__ import annotations

from typing import Any

from rlplane.adapters.transfer_queue import runtime_env as _runtime_env
from rlplane.adapters.transfer_queue.client import TQDataPlaneClient
from rlplane.adapters.transfer_queue.network import _get_local_node_ip, _mooncake_transport_config
from rlplane.adapters.transfer_queue.plane import _connect_existing, _init_tq
from rlplane.adapters.transfer_queue.runtime_env import _patch_tq_actor_runtime_env, _resolve_tq_pin
from rlplane.adapters.transfer_queue.wire import _assert_no_key_loss, _from_wire, _promote_1d_leaves

__all__ = [
    "TQDataPlaneClient",
    "_assert_no_key_loss",
    "_connect_existing",
    "_from_wire",
    "_get_local_node_ip",
    "_init_tq",
    "_mooncake_transport_config",
    "_patch_tq_actor_runtime_env",
    "_promote_1d_leaves",
    "_resolve_tq_pin",
]


def __getattr__(name: str) -> Any:
    # A flag that changes: a name imported here would keep the value of the first import.
    if name == "_TQ_RUNTIME_ENV_PATCHED":
        return _runtime_env._TQ_RUNTIME_ENV_PATCHED
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
