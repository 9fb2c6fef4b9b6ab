"""Every name of the five source documents, public and private, is here under that name.

Documents 000 to 003 fix their parameters too; of document 004 only the names are known. What document 004
removes itself, or what belongs to its load generator, is at the end, with what there is instead.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest

OBSERVABILITY = "rlplane.observability"
INTERFACES = "rlplane.interfaces"
TRANSFER_QUEUE = "rlplane.adapters.transfer_queue"
TRANSFER_STATS = "rlplane.transfer_stats"

CLIENT_METHODS = {
    "register_partition": "partition_id fields num_samples consumer_tasks grpo_group_size enums",
    "claim_meta": "partition_id task_name required_fields batch_size dp_rank blocking timeout_s",
    "get_data": "meta select_fields",
    "check_consumption_status": "partition_id task_names",
    "put_samples": "sample_ids partition_id fields tags",
    "get_samples": "sample_ids partition_id select_fields",
    "clear_samples": "sample_ids partition_id",
    "close": "",
}

# Document, module, name, and the parameters in their order (None: not a function).
NAMES: list[tuple[str, str, str, str | None]] = [
    ("000", OBSERVABILITY, "EventStatus", None),
    ("000", OBSERVABILITY, "DataPlaneEvent", None),
    ("000", OBSERVABILITY, "logger", None),
    ("000", OBSERVABILITY, "_td_bytes", "td"),
    ("000", OBSERVABILITY, "log_event", "event"),
    ("000", OBSERVABILITY, "DataPlaneStats", None),
    ("000", OBSERVABILITY, "MetricsDataPlaneClient.__init__", "inner on_event"),
    ("000", OBSERVABILITY, "MetricsDataPlaneClient.snapshot", ""),
    ("000", OBSERVABILITY, "MetricsDataPlaneClient.bytes_outstanding_by_partition", ""),
    ("000", OBSERVABILITY, "MetricsDataPlaneClient._record_put", "partition_id keys n_bytes"),
    ("000", OBSERVABILITY, "MetricsDataPlaneClient._record_clear", "partition_id keys"),
    ("000", OBSERVABILITY, "MetricsDataPlaneClient._run", "op partition_id fn *n_keys *n_bytes"),
    ("000", OBSERVABILITY, "MetricsDataPlaneClient._emit", "op partition_id n_keys n_bytes t0 status"),
    *(
        ("000", OBSERVABILITY, f"MetricsDataPlaneClient.{name}", CLIENT_METHODS[name])
        for name in CLIENT_METHODS
    ),
    ("001", INTERFACES, "DataPlaneConfig", None),
    ("001", INTERFACES, "ObservabilityConfig", None),
    (
        "001",
        INTERFACES,
        "KVBatchMeta.__init__",
        "partition_id task_name sample_ids fields sequence_lengths extra_info tags",
    ),
    ("001", INTERFACES, "KVBatchMeta.__post_init__", ""),
    ("001", INTERFACES, "KVBatchMeta.size", None),
    ("001", INTERFACES, "KVBatchMeta.stamp_tags", "scalars"),
    ("001", INTERFACES, "KVBatchMeta._replace", "*sample_ids *sequence_lengths *tags"),
    ("001", INTERFACES, "KVBatchMeta.subset", "indices"),
    ("001", INTERFACES, "KVBatchMeta.slice", "start stop"),
    ("001", INTERFACES, "KVBatchMeta.concat", None),
    *(("001", INTERFACES, f"DataPlaneClient.{name}", CLIENT_METHODS[name]) for name in CLIENT_METHODS),
    ("002", TRANSFER_QUEUE, "_get_local_node_ip", ""),
    ("002", TRANSFER_QUEUE, "_mooncake_transport_config", ""),
    # Documented without ``cfg``: there is one plane per Ray cluster there, and one per namespace here.
    ("002", TRANSFER_QUEUE, "_connect_existing", "cfg"),
    ("002", TRANSFER_QUEUE, "_TQ_RUNTIME_ENV_PATCHED", None),
    ("002", TRANSFER_QUEUE, "_resolve_tq_pin", ""),
    ("002", TRANSFER_QUEUE, "_patch_tq_actor_runtime_env", ""),
    ("002", TRANSFER_QUEUE, "_init_tq", "cfg"),
    ("002", TRANSFER_QUEUE, "_assert_no_key_loss", "src_dict new_td fn"),
    ("002", TRANSFER_QUEUE, "_promote_1d_leaves", "td"),
    ("002", TRANSFER_QUEUE, "_from_wire", "td"),
    ("002", TRANSFER_QUEUE, "TQDataPlaneClient.__init__", "cfg *bootstrap"),
    *(("002", TRANSFER_QUEUE, f"TQDataPlaneClient.{name}", CLIENT_METHODS[name]) for name in CLIENT_METHODS),
    ("003", TRANSFER_STATS, "KVConnectorStats", None),
    ("003", TRANSFER_STATS, "nixlXferTelemetry", None),
    ("003", TRANSFER_STATS, "NixlKVConnectorStats.reset", ""),
    ("003", TRANSFER_STATS, "NixlKVConnectorStats.record_transfer", "res"),
    ("003", TRANSFER_STATS, "NixlKVConnectorStats.record_failed_transfer", ""),
    ("003", TRANSFER_STATS, "NixlKVConnectorStats.record_failed_notification", ""),
    ("003", TRANSFER_STATS, "NixlKVConnectorStats.record_kv_expired_req", ""),
    ("003", TRANSFER_STATS, "NixlKVConnectorStats.clone_and_reset", ""),
    ("003", TRANSFER_STATS, "NixlKVConnectorStats.is_empty", ""),
    ("003", TRANSFER_STATS, "NixlKVConnectorStats.aggregate", "other"),
    ("003", TRANSFER_STATS, "NixlKVConnectorStats.reduce", ""),
    ("003", TRANSFER_STATS, "NixlKVConnectorStats.num_successful_transfers", None),
    ("004", "rlplane.transport.codec", "TOPIC_FRAME_SIZE", None),
    ("004", "rlplane.transport.codec", "MessageCodec.encode", "item"),
    ("004", "rlplane.transport.codec", "MessageCodec.decode", "payload"),
    ("004", "rlplane.transport.codec", "MessageCodec.on_decode_error", "payload exc"),
    ("004", "rlplane.transport.protocol", "MessagePublisher", None),
    ("004", "rlplane.transport.protocol", "MessageSubscriber", None),
    ("004", "rlplane.transport.pubsub", "ZmqMessagePublisher", None),
    ("004", "rlplane.transport.pubsub", "ZmqMessageSubscriber._on_readable", None),
    ("004", "rlplane.metrics.events", "EventRecord", None),
    ("004", "rlplane.metrics.events", "EventRecordCodec.on_decode_error", "payload exc"),
    ("004", "rlplane.metrics.event_publisher", "EventPublisherService", None),
    ("004", "rlplane.metrics.event_logger", "EventLoggerService", None),
    ("004", "rlplane.metrics.metrics_table", "EmitTrigger", None),
    ("004", "rlplane.metrics.metrics_table", "SampleRow", None),
    ("004", "rlplane.metrics.metrics_table", "MetricsTable.in_flight_tasks_count", None),
    ("004", "rlplane.metrics.metrics_table", "MetricsTable.cancel_all_tasks", ""),
    ("004", "rlplane.metrics.metrics_table", "MetricsTable.drain_tasks", None),
    ("004", "rlplane.metrics.registry", "MetricsRegistry.record", None),
    ("004", "rlplane.metrics.registry", "MetricsRegistry.increment", None),
    ("004", "rlplane.metrics.registry", "CounterSampler", None),
    ("004", "rlplane.metrics.registry", "SeriesSampler", None),
    ("004", "rlplane.metrics.snapshot", "MetricsSnapshot", None),
    ("004", "rlplane.metrics.snapshot", "CounterStat", None),
    ("004", "rlplane.metrics.snapshot", "SeriesStat", None),
    ("004", "rlplane.metrics.snapshot", "SessionState.LIVE", None),
    ("004", "rlplane.metrics.snapshot", "SessionState.DRAINING", None),
    ("004", "rlplane.metrics.snapshot", "SessionState.COMPLETE", None),
    ("004", "rlplane.metrics.publisher", "MetricsPublisher.publish_final", None),
    ("004", "rlplane.metrics.subscriber", "MetricsSnapshotSubscriber.latest", None),
    ("004", "rlplane.metrics.subscriber", "MetricsSnapshotSubscriber.wait_for_complete", "timeout"),
    ("004", "rlplane.metrics.aggregator", "MetricsAggregatorService", None),
    ("004", "rlplane.metrics.sample_lifecycle", "TRACKED_SAMPLES_FAILED", None),
    ("004", "rlplane.report", "Report.from_snapshot", None),
]

FIELDS = {
    (OBSERVABILITY, "DataPlaneEvent"): "op partition_id n_keys n_bytes wall_ms status",
    (
        OBSERVABILITY,
        "DataPlaneStats",
    ): "total_bytes total_keys total_ops bytes_outstanding peak_bytes_outstanding"
    " max_bytes_per_key_seen last_put_bytes_per_key",
    (INTERFACES, "DataPlaneConfig"): "enabled impl backend storage_capacity num_storage_units"
    " claim_meta_poll_interval_s global_segment_size local_buffer_size controller_address ack_timeout_ms"
    " observability",
    (INTERFACES, "ObservabilityConfig"): "enabled callback",
    (INTERFACES, "KVBatchMeta"): "partition_id task_name sample_ids fields sequence_lengths extra_info tags",
    (TRANSFER_STATS, "nixlXferTelemetry"): "xferDuration postDuration totalBytes descCount",
    ("rlplane.metrics.snapshot", "MetricsSnapshot"): "state n_pending_tasks metrics",
    ("rlplane.metrics.snapshot", "SeriesStat"): "total",
}

ELSEWHERE = {
    "MetricsTable.set_field": "MetricsTable.apply: one event sets all the fields of a step",
    "MetricsTable._in_flight_tasks": "the same, behind in_flight_tasks_count, as the document's review asks",
    "NixlKVConnectorStats.__post_init__": "__init__: the class locks, so it is no dataclass",
    "SeriesStat.sum_sq": "SeriesStat.std_dev: a sum of squared nanoseconds does not fit msgpack's 64 bits",
    "SampleEventType, ErrorEventType": "SampleEvent.kind and SessionEvent.kind",
    "BenchmarkSession, QueryResult": "the load generator of the document's project",
    "BasicKVStore, from_kv_reader, EventRecordPublisher, EventRecordSubscriber": "removed by the document",
}


def find(module: str, name: str) -> Any:
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = inspect.getattr_static(found, part) if inspect.isclass(found) else getattr(found, part)
    return found


@pytest.mark.parametrize(("document", "module", "name", "parameters"), NAMES, ids=lambda value: str(value))
def test_a_documented_name_is_there_with_its_parameters(
    document: str, module: str, name: str, parameters: str | None
) -> None:
    found = find(module, name)
    if parameters is None:
        return
    signature = inspect.signature(found.__func__ if isinstance(found, (classmethod, staticmethod)) else found)
    own = [parameter for parameter in signature.parameters.values() if parameter.name != "self"]
    names = [("*" if p.kind is p.KEYWORD_ONLY else "") + p.name for p in own]
    expected = parameters.split()
    # What was added since comes later and is never required.
    assert names[: len(expected)] == expected
    assert all(p.default is not p.empty for p in own[len(expected) :])


@pytest.mark.parametrize(("module", "name"), FIELDS)
def test_a_documented_record_has_its_fields(module: str, name: str) -> None:
    found = find(module, name)
    known = {field for part in inspect.getmro(found) for field in getattr(part, "__annotations__", {})}
    assert set(FIELDS[module, name].split()) <= known


def test_the_private_methods_have_exactly_the_documented_signature() -> None:
    for name in ("_run", "_emit", "_record_put", "_record_clear"):
        documented = next(row[3] for row in NAMES if row[2] == f"MetricsDataPlaneClient.{name}")
        parameters = inspect.signature(find(OBSERVABILITY, f"MetricsDataPlaneClient.{name}")).parameters
        assert list(parameters)[1:] == (documented or "").replace("*", "").split()


def test_failed_samples_are_counted_under_the_documented_name() -> None:
    assert find("rlplane.metrics.sample_lifecycle", "TRACKED_SAMPLES_FAILED") == "tracked_samples_failed"
