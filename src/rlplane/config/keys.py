"""Every config key, once: its type, its bounds, its default and what it means.

The checks, the error messages, the environment variables and the tables in ``docs/configuration.md`` are made
from the structs below. To add a key, add it here and to the ``TypedDict`` in ``rlplane.interfaces``, then run
``python scripts/config_tables.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, inspect

_FINITE = sys.float_info.max
Text = Annotated[str, Meta(min_length=1)]
Count = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(gt=0, le=_FINITE)]
Size = Annotated[int, Meta(ge=1, extra={"size": True})]
Table = type[msgspec.Struct]


def _doc(description: str) -> Meta:
    return Meta(description=description)


class ObservabilitySettings(msgspec.Struct, frozen=True):
    """What is measured on the client, and where the measurements go."""

    enabled: Annotated[bool, _doc("wrap the client, so that every operation is measured")]
    callback: Annotated[
        Callable[[dict[str, Any]], None] | None, _doc("called with one event per operation")
    ] = None
    metrics_address: Annotated[
        Text | None,
        _doc(
            "the aggregator to send events to; see also `RLPLANE_METRICS_ADDRESS`. Not set: the one that the"
            " bootstrap client starts, and ends; `off`: none"
        ),
    ] = None
    run_dir: Annotated[
        Text | None,
        _doc(
            "the directory for the final snapshot of an aggregator that the bootstrap client starts; not set:"
            " a new one in `./runs`"
        ),
    ] = None
    role: Annotated[
        Text | None,
        _doc("what this process is to the job, such as `rollout`; the viewers show it beside the worker"),
    ] = None
    track_partitions: Annotated[
        list[Text] | None, _doc("partitions whose samples are followed one by one; not set: all")
    ] = None
    sinks: Annotated[
        list[Any] | None,
        _doc("where measurements go beside the aggregator: a name, or a table with `kind` and its options"),
    ] = None
    verify: Annotated[
        bool,
        _doc(
            "compute a checksum of every row of every field on write, check it on read, and count those that"
            " differ"
        ),
    ] = False
    transfer_log_interval_s: Annotated[
        Seconds | None, _doc("how often a line about the engine's transfers is logged; not set: never")
    ] = None


class TransferQueueSettings(msgspec.Struct, frozen=True):
    """Read with `impl = "transfer_queue"` only."""

    ray_address: Annotated[
        Text | None,
        _doc(
            "the Ray cluster to join. Not set: `controller_address`, else `RAY_ADDRESS`, else Ray on this"
            " machine, which the bootstrap client starts when there is none"
        ),
    ] = None
    namespace: Annotated[
        Text | None, _doc("the Ray namespace of the plane; planes in different ones do not see each other")
    ] = None
    node_ip: Annotated[
        Text | None, _doc("this machine's address for others, when the one found is not the right one")
    ] = None
    native: Annotated[
        bool,
        _doc(
            "speak TransferQueue's own interface, to share samples with programs that do. A TransferQueue"
            " that runs already is joined. It keeps fewer promises: see [verl](verl.md)"
        ),
    ] = False
    log_to_driver: Annotated[bool, _doc("let Ray's and TransferQueue's logs through")] = False
    pin_runtime_env: Annotated[
        bool, _doc("have Ray install TransferQueue, in our version, for its actors on nodes that lack it")
    ] = False
    mooncake_protocol: Annotated[Literal["tcp", "rdma"], _doc("how Mooncake moves bytes")] = "tcp"
    mooncake_device: Annotated[Text | None, _doc("the RDMA device, such as `mlx5_0`")] = None
    mooncake_master_port: Annotated[
        Count | None, _doc("the port of Mooncake's master; not set: a free one")
    ] = None


class CheckpointSettings(msgspec.Struct, frozen=True):
    """With this table, the bootstrap client saves the plane every `every_s` seconds."""

    dir: Annotated[Text, _doc("the directory that the checkpoints go to")]
    every_s: Annotated[Seconds, _doc("how often one is saved")]
    keep: Annotated[Count, _doc("how many of the newest are kept")] = 2


class PlaneSettings(msgspec.Struct, frozen=True):
    """How a plane is built. The first eight keys are required, so that no size is hidden in the code."""

    enabled: Annotated[bool, _doc("`build_data_plane_client` refuses a config where it is false")]
    impl: Annotated[Text, _doc("`local`, `transfer_queue`, or the name of an entry point")]
    backend: Annotated[
        Text, _doc("`memory` or `shm` for `local`; `simple` or `mooncake_cpu` for `transfer_queue`")
    ]
    storage_capacity: Annotated[
        Count,
        _doc(
            "the most samples that the plane holds. A put that would exceed it waits for a clear, then raises"
        ),
    ]
    num_storage_units: Annotated[Count, _doc("storage actors of `transfer_queue`; `local` does not read it")]
    claim_meta_poll_interval_s: Annotated[
        Seconds,
        _doc(
            "the longest pause between two looks of a waiting claim, for an engine that has to look. None of"
            " ours does: a write wakes the claim"
        ),
    ]
    global_segment_size: Annotated[
        Size,
        _doc(
            "the most bytes that all columns hold. `transfer_queue`: for each storage unit; with"
            " `mooncake_cpu` that is what it lends to the store"
        ),
    ]
    local_buffer_size: Annotated[
        Size,
        _doc(
            "the most that a client keeps reserved for its next put. `mooncake_cpu`: also a process's"
            " transfer buffer"
        ),
    ]
    controller_address: Annotated[
        Text | None,
        _doc(
            "where the plane is. `shm`: what the bootstrap client was given or picked. `memory`: the name of"
            " a plane inside the process (`default`). `transfer_queue`: the address of the Ray cluster"
        ),
    ] = None
    ack_timeout_ms: Annotated[
        Count, _doc("how long an answer from the plane may take before it counts as gone")
    ] = 30_000
    allow_pickle: Annotated[
        bool,
        _doc(
            "let objects travel that are not plain data, by pickle. Off: they are a `TypeError`. Turn it on"
            " only where everybody who can write to the plane is trusted"
        ),
    ] = False
    segment_size: Annotated[
        Size | None,
        _doc("`shm`: how many addresses one segment of the arena has; the engine picks if it is not set"),
    ] = None
    reserve_for_live: Annotated[
        float,
        Meta(ge=0, le=0.5),
        _doc(
            "the share of the bytes that only columns of existing samples may use, so that samples can be"
            " finished and cleared when the plane is full"
        ),
    ] = 0.1
    reconnect_timeout_s: Annotated[
        float,
        Meta(ge=0, le=_FINITE),
        _doc(
            "how long clients and a control service that lost each other wait for one another; 0: a service"
            " that dies takes the plane with it"
        ),
    ] = 30.0
    journal: Annotated[
        bool,
        _doc("the control service writes down what it does, so that it can be started again when it dies"),
    ] = True
    journal_dir: Annotated[
        Text | None,
        _doc(
            "where it writes that. Not set: `shm`: the plane's directory; `transfer_queue`: the temporary"
            " directory of its node"
        ),
    ] = None
    checkpoint: CheckpointSettings | None = None
    observability: ObservabilitySettings | None = None
    transfer_queue: TransferQueueSettings = msgspec.field(default_factory=TransferQueueSettings)


class SimpleTable(msgspec.Struct, frozen=True):
    """NeMo-RL's table for `backend = "simple"`."""

    storage_capacity: Count | None = None
    num_storage_units: Count | None = None


class MooncakeTable(msgspec.Struct, frozen=True):
    """NeMo-RL's table for `backend = "mooncake_cpu"`."""

    global_segment_size: Size | None = None
    local_buffer_size: Size | None = None
    num_storage_units: Count | None = None


TABLES: dict[str, Table] = {
    "": PlaneSettings,
    "checkpoint": CheckpointSettings,
    "observability": ObservabilitySettings,
    "transfer_queue": TransferQueueSettings,
    "simple": SimpleTable,
    "mooncake_cpu": MooncakeTable,
}

# What NeMo-RL writes beside those, about its own way to move bytes: accepted, and left out of the result.
NOT_READ = (
    "simple.storage_unit_placement",
    "mooncake_cpu.checkpoint",
    "mooncake_cpu.cpu_staging_buffer_mb",
    "mooncake_cpu.cpu_staging_slots",
    "mooncake_cpu.gdr_staging_buffer_mb",
    "mooncake_cpu.reuse_registered_buffers",
    "mooncake_cpu.staging_buffer_size",
    "mooncake_cpu.storage_unit_placement",
    "mooncake_cpu.storage_unit_segment_size",
    "mooncake_cpu.use_gdr",
    "observability.verify_tensor_hash",
)

REMOVED = {
    "client_timeout_s": "the service notices by the connection that a client died, and"
    " 'reconnect_timeout_s' says how long clients try to reach a service that went away"
}


@dataclass(frozen=True)
class Key:
    """One key, as the structs describe it. ``expected`` completes the sentence "must be …"."""

    name: str
    annotation: object
    type: inspect.Type
    expected: str
    description: str
    required: bool
    default: object
    is_size: bool


def _describe(name: str, field: msgspec.structs.FieldInfo) -> Key:
    found: inspect.Type = inspect.type_info(field.type)
    notes: dict[str, Any] = {}
    while isinstance(found, (inspect.Metadata, inspect.UnionType)):
        if isinstance(found, inspect.Metadata):
            notes |= (found.extra_json_schema or {}) | (found.extra or {})
            found = found.type
        else:  # the key or None
            found = next(item for item in found.types if not isinstance(item, inspect.NoneType))
    is_size, description = "size" in notes, notes.get("description", "")
    default = None if field.required else field.default
    return Key(
        name, field.type, found, _expected(found, is_size), description, field.required, default, is_size
    )


_WORDS: dict[type[inspect.Type], str] = {
    inspect.BoolType: "true or false",
    inspect.IntType: "a whole number",
    inspect.FloatType: "a number",
    inspect.StrType: "text",
    inspect.ListType: "a list",
    inspect.CustomType: "a function, set in code",
}


def _expected(found: inspect.Type, is_size: bool) -> str:
    if isinstance(found, inspect.LiteralType):
        return "one of " + ", ".join(map(str, found.values))
    words = "a size in bytes, as a whole number or text such as '8 GiB'" if is_size else _WORDS[type(found)]
    if isinstance(found, inspect.ListType) and not isinstance(found.item_type, inspect.AnyType):
        return words + " of names"
    return words + (_bounds(found) if isinstance(found, (inspect.IntType, inspect.FloatType)) else "")


def _bounds(number: inspect.IntType | inspect.FloatType) -> str:
    bounds = {"at least": number.ge, "more than": number.gt, "at most": number.le}
    named = [f"{words} {bound:g}" for words, bound in bounds.items() if bound not in (None, _FINITE)]
    return "".join(f", {words}" for words in named)


KEYS: dict[str, Key] = {
    name: _describe(name, field)
    for table, struct in TABLES.items()
    for field in msgspec.structs.fields(struct)
    if (name := f"{table}.{field.name}".lstrip(".")) not in TABLES
}
