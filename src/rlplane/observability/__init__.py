"""Observability on the client: every operation, every byte, every transfer.

The way of an operation, module by module:

``client``          ``MetricsDataPlaneClient``: runs the operation and queues what it saw of it
``async_client``    ``AsyncMetricsDataPlaneClient``: the same around the asyncio client
``calls``           what is recorded of each operation, for both
``operation``       the queue's entry: one operation, and what it did to the samples
``dispatcher``      the queue and the thread behind it; tells the callback, the sinks and the aggregator
``accounting``      what operations add up to
``counters``        counts and times by operation
``outstanding``     bytes that this client put and that are still held, by partition
``sizes``           the bytes of the columns of a batch
``own_aggregator``  the aggregator that the bootstrap client starts, and how others find it
``engine_monitor``  what the engine itself says, once a second: its counts, its transfers

This package is the only bridge from the data plane to ``rlplane.metrics`` and ``rlplane.sinks``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rlplane.errors import DataPlaneError
from rlplane.interfaces import DataPlaneClient
from rlplane.metrics.event_publisher import OFF
from rlplane.observability.client import MetricsDataPlaneClient, log_event, logger
from rlplane.observability.operation import DataPlaneEvent, EventStatus
from rlplane.observability.outstanding import DataPlaneStats
from rlplane.observability.own_aggregator import (
    OF_THE_PLANE,
    OwnAggregator,
    SpansMachines,
    find_address,
    plane_name,
)
from rlplane.observability.sizes import _td_bytes as _td_bytes
from rlplane.storage.mooncake.network import _get_local_node_ip

if TYPE_CHECKING:
    from rlplane.interfaces import DataPlaneConfig

__all__ = [
    "DataPlaneEvent",
    "DataPlaneStats",
    "EventStatus",
    "MetricsDataPlaneClient",
    "log_event",
    "logger",
    "wrap_with_observability",
]


def wrap_with_observability(
    client: DataPlaneClient, cfg: DataPlaneConfig | Mapping[str, Any], *, bootstrap: bool = False
) -> DataPlaneClient:
    """Wrap ``client`` as ``cfg["observability"]`` says; without ``enabled`` it is returned as it is.

    Without a ``callback`` each operation is logged by :func:`log_event`. The aggregator's address is
    ``metrics_address``, else the environment variable ``RLPLANE_METRICS_ADDRESS``, else that of the run on
    this machine that has the plane, else what the plane says, if it spans machines. When there is none, the
    ``bootstrap`` client starts one, and ends it.

    Raises:
        ConfigError: A sink or the address cannot be used.
        MissingExtraError: A sink's package is not installed.
    """
    wanted: Mapping[str, Any] = cfg.get("observability") or {}
    if not wanted.get("enabled", False):
        return client
    plane = plane_name(client, cfg)
    address, aggregator = find_address(wanted, "" if bootstrap else plane), None
    cluster = client if cfg.get("impl") == "transfer_queue" and isinstance(client, SpansMachines) else None
    if address is None and bootstrap:
        try:
            host = None if cluster is None else _remote_host(cfg)
            aggregator = OwnAggregator(plane, wanted.get("run_dir"), host)
            address = aggregator.events_address
            if cluster is not None and host is not None:
                aggregator.publish_through(cluster)
        except (DataPlaneError, OSError) as error:
            logger.warning("rlplane top and dash will not see this run: no aggregator could start: %s", error)
    elif address is None and cluster is not None:
        address = OF_THE_PLANE
    tracked = wanted.get("track_partitions")
    try:
        return MetricsDataPlaneClient(
            client,
            wanted.get("callback") or log_event,
            sinks=wanted.get("sinks") or (),
            metrics_address=None if address == OFF else address,
            role=wanted.get("role") or "",
            track_partitions=["*"] if tracked is None else tracked,
            transfer_log_interval_s=wanted.get("transfer_log_interval_s"),
            capacity={
                "capacity_samples": cfg.get("storage_capacity"),
                "capacity_bytes": cfg.get("global_segment_size"),
            },
            aggregator=aggregator,
        )
    except BaseException:
        if aggregator is not None:
            aggregator.close()
        raise


def _remote_host(cfg: DataPlaneConfig | Mapping[str, Any]) -> str | None:
    """The address of this machine for the others of the cluster."""
    options: Mapping[str, Any] = cfg.get("transfer_queue") or {}
    try:
        return options.get("node_ip") or _get_local_node_ip()
    except DataPlaneError as error:
        logger.warning("rlplane top and dash will not see processes on other machines: %s", error)
        return None
