"""The cluster engine: TransferQueue's storage units or Mooncake, on Ray.

    client.py       TQDataPlaneClient: a connection over TCP, and a storage that bytes travel to
    plane.py        starting, finding and ending the actors of a plane; the only file that starts Ray
    service.py      the control service inside a Ray actor
    watch.py        UnitWatch: notices storage units that die
    runs.py         the live runs of a cluster, for viewers on any of its nodes
    native.py       NativeTQDataPlaneClient: by TransferQueue's own interface, through native_queue.py
    leaves.py       document 002's functions on the leaves of a TensorDict
    runtime_env.py  the pin for TransferQueue's actors

Nothing here imports Ray or TransferQueue until a client is made.
"""

from __future__ import annotations

from rlplane.adapters.transfer_queue import runtime_env as _runtime_env
from rlplane.adapters.transfer_queue.client import TQDataPlaneClient
from rlplane.adapters.transfer_queue.leaves import _assert_no_key_loss, _from_wire, _promote_1d_leaves
from rlplane.adapters.transfer_queue.plane import _connect_existing, _init_tq
from rlplane.adapters.transfer_queue.runtime_env import _patch_tq_actor_runtime_env, _resolve_tq_pin
from rlplane.storage.mooncake.network import _get_local_node_ip, _mooncake_transport_config

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


def __getattr__(name: str) -> bool:
    # A flag that changes: a name imported here would keep the value of the first import.
    if name == "_TQ_RUNTIME_ENV_PATCHED":
        return _runtime_env._TQ_RUNTIME_ENV_PATCHED
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
