"""rlplane: the data plane for RL post-training of language models."""

# Where things are:
#
#   interfaces.py      DataPlaneClient, KVBatchMeta and the config types: all that a trainer needs to know
#   errors.py          every error, its hierarchy drawn in the docstring
#   config.py          load_config: a file, a mapping or one of exemplars/, with environment and overrides
#   factory.py         build_data_plane_client: engines by name, loaded when asked for
#   codec.py           padded <-> jagged columns
#   columns.py         kv_first_write, read_columns, write_columns
#   sharding.py        shard_meta_for_dp
#
#   rules.py           what a request may be, and tag conditions
#   objects.py         how objects in columns and tags travel
#   index.py           the control state of a plane, without I/O; its parts are partition.py and ready.py,
#                      and persist.py turns it into bytes and back
#   adapters/local/    one machine: memory (inside the process) and shm (many processes)
#   adapters/transfer_queue/   a cluster, on Ray
#
#   observability/     the wrapper that measures every operation
#   transfer_stats.py  transfers between workers, mergeable
#   transport/         typed messages over ZMQ
#   metrics/           the live metrics service
#   viewing/           what the views of a running plane share
#   report/, sinks/, tui/, web/, cli/   what people look at
#
#   testing/           the conformance suite for any engine
#   bench/             us, the peers and the machine's limit, side by side
#
# The names below are loaded when they are first used: `import rlplane.metrics` runs this file too, and must
# not load torch.

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlplane.codec import (
        materialize,
        pack_jagged_fields,
        pack_per_token_field,
        response_from_nested,
        stack_or_nest,
        to_nested_by_length,
    )
    from rlplane.columns import kv_first_write, read_columns, write_columns
    from rlplane.config import load_config
    from rlplane.errors import (
        CapacityError,
        CapacityTimeoutError,
        CheckpointError,
        ClaimTimeoutError,
        ClientClosedError,
        ConfigError,
        DataPlaneError,
        InvalidRequestError,
        MissingDataError,
        MissingExtraError,
        NotFoundError,
        PlaneConnectionError,
        UnknownFieldError,
        UnknownPartitionError,
        UnknownTaskError,
        UnsupportedOperationError,
        UnsupportedValueError,
    )
    from rlplane.factory import build_data_plane_client
    from rlplane.interfaces import DataPlaneClient, DataPlaneConfig, KVBatchMeta, ObservabilityConfig
    from rlplane.sharding import shard_meta_for_dp

    __version__: str

__all__ = [
    "CapacityError",
    "CapacityTimeoutError",
    "CheckpointError",
    "ClaimTimeoutError",
    "ClientClosedError",
    "ConfigError",
    "DataPlaneClient",
    "DataPlaneConfig",
    "DataPlaneError",
    "InvalidRequestError",
    "KVBatchMeta",
    "MissingDataError",
    "MissingExtraError",
    "NotFoundError",
    "ObservabilityConfig",
    "PlaneConnectionError",
    "UnknownFieldError",
    "UnknownPartitionError",
    "UnknownTaskError",
    "UnsupportedOperationError",
    "UnsupportedValueError",
    "__version__",
    "build_data_plane_client",
    "kv_first_write",
    "load_config",
    "materialize",
    "pack_jagged_fields",
    "pack_per_token_field",
    "read_columns",
    "response_from_nested",
    "shard_meta_for_dp",
    "stack_or_nest",
    "to_nested_by_length",
    "write_columns",
]

_HOMES = {
    "build_data_plane_client": "factory",
    "load_config": "config",
    "shard_meta_for_dp": "sharding",
    **dict.fromkeys(
        ["DataPlaneClient", "DataPlaneConfig", "KVBatchMeta", "ObservabilityConfig"], "interfaces"
    ),
    **dict.fromkeys(["kv_first_write", "read_columns", "write_columns"], "columns"),
    **dict.fromkeys(
        [
            "materialize",
            "pack_jagged_fields",
            "pack_per_token_field",
            "response_from_nested",
            "stack_or_nest",
            "to_nested_by_length",
        ],
        "codec",
    ),
    **dict.fromkeys((name for name in __all__ if name.endswith("Error")), "errors"),
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("rlplane")
    elif name in _HOMES:
        value = getattr(import_module(f"rlplane.{_HOMES[name]}"), name)
    else:
        raise AttributeError(f"module 'rlplane' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
