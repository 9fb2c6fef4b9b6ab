"""rlplane: the data plane for RL post-training of language models."""

# Where things are (docs/architecture.md has the picture, the glossary and the way of each call):
#
#   interfaces.py      DataPlaneClient, KVBatchMeta and the config types: all that a trainer needs to know
#   batch_meta.py      KVBatchMeta itself
#   async_interface.py AsyncDataPlaneClient: its methods as coroutines
#   threaded_claim.py  a claim of a blocking client in an asyncio program
#   errors.py          every error, its hierarchy drawn in the docstring
#   config/            load_config: a file, a mapping or one of exemplars/, with environment and overrides
#   factory.py         build_data_plane_client: engines by name, loaded when asked for
#   columns/           padded <-> jagged columns, kv_first_write and its like, shard_meta_for_dp
#   data.py            StreamingDataset: a partition in a torch DataLoader
#
#   control/           the control state: what exists, what is ready, who has claimed what; pure
#   service/           that state behind a socket, with a journal: protocol, server, connection
#   storage/           where the bytes are: layout, memory, shared memory, TransferQueue's units, Mooncake
#   adapters/          the one client, and how each engine gives it a connection and a storage
#
#   observability/     the wrapper that measures every operation
#   transfer_stats.py  transfers between workers, mergeable
#   caller.py          warnings that point at the line which called rlplane
#   call_times.py      where the time of one call went: waiting, round trips, bytes
#   atomic_file.py     files that are there whole or not at all
#   transport/         typed messages over ZMQ
#   metrics/           the live metrics service
#   viewing/           what the views of a running plane share
#   report/, sinks/, tui/, web/, cli/   what people look at
#   demo/              the job that `rlplane demo` runs
#
#   compat/            other people's interfaces on our engines: nemo_rl, transfer_queue
#   integrations/      a plane in other people's trainers: trl
#   testing/           the conformance suite for any engine
#
# The names below are loaded when they are first used: `import rlplane.metrics` runs this file too, and must
# not load torch.

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlplane.async_interface import AsyncDataPlaneClient
    from rlplane.columns.codec import (
        materialize,
        pack_jagged_fields,
        pack_per_token_field,
        response_from_nested,
        stack_or_nest,
        to_nested_by_length,
    )
    from rlplane.columns.io import kv_first_write, read_columns, write_columns
    from rlplane.columns.sharding import shard_meta_for_dp
    from rlplane.config import load_config
    from rlplane.control.policies import FlowPolicy
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
        SamplesLostError,
        StepOverError,
        UnknownFieldError,
        UnknownPartitionError,
        UnknownTaskError,
        UnsupportedOperationError,
        UnsupportedValueError,
    )
    from rlplane.factory import build_async_data_plane_client, build_data_plane_client
    from rlplane.interfaces import (
        DataPlaneClient,
        DataPlaneConfig,
        FieldStatus,
        FlowStatus,
        KVBatchMeta,
        ObservabilityConfig,
        PartitionStatus,
        SampleGroup,
        TaskStatus,
    )
    from rlplane.threaded_claim import claim_in_thread

    __version__: str

__all__ = [
    "AsyncDataPlaneClient",
    "CapacityError",
    "CapacityTimeoutError",
    "CheckpointError",
    "ClaimTimeoutError",
    "ClientClosedError",
    "ConfigError",
    "DataPlaneClient",
    "DataPlaneConfig",
    "DataPlaneError",
    "FieldStatus",
    "FlowPolicy",
    "FlowStatus",
    "InvalidRequestError",
    "KVBatchMeta",
    "MissingDataError",
    "MissingExtraError",
    "NotFoundError",
    "ObservabilityConfig",
    "PartitionStatus",
    "PlaneConnectionError",
    "SampleGroup",
    "SamplesLostError",
    "StepOverError",
    "TaskStatus",
    "UnknownFieldError",
    "UnknownPartitionError",
    "UnknownTaskError",
    "UnsupportedOperationError",
    "UnsupportedValueError",
    "__version__",
    "build_async_data_plane_client",
    "build_data_plane_client",
    "claim_in_thread",
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

_NAMES = {
    "async_interface": "AsyncDataPlaneClient",
    "columns.codec": "materialize pack_jagged_fields pack_per_token_field response_from_nested stack_or_nest"
    " to_nested_by_length",
    "columns.io": "kv_first_write read_columns write_columns",
    "columns.sharding": "shard_meta_for_dp",
    "config": "load_config",
    "control.policies": "FlowPolicy",
    "errors": " ".join(name for name in __all__ if name.endswith("Error")),
    "factory": "build_async_data_plane_client build_data_plane_client",
    "interfaces": "DataPlaneClient DataPlaneConfig FieldStatus FlowStatus KVBatchMeta ObservabilityConfig"
    " PartitionStatus SampleGroup TaskStatus",
    "threaded_claim": "claim_in_thread",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}


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
