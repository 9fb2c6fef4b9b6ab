"""``otel``: OpenTelemetry metrics and spans of every operation, over OTLP or to providers that are there."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from rlplane.errors import ConfigError
from rlplane.sinks import Record, found_nothing


class OtelSink:
    """Spans named ``rlplane.put`` and so on; ``rlplane.operation.duration`` (s, without waiting),
    ``rlplane.operation.wait`` (s, of those that waited for samples or room), ``rlplane.operation.bytes``,
    ``rlplane.operation.keys``, ``rlplane.operation.errors`` and ``rlplane.operation.timeouts`` (claims that
    found nothing in time) by operation and partition; and the scalars as gauges.

    Args:
        endpoint: The base URL of an OTLP/HTTP receiver, such as ``http://localhost:4318``. Else
            ``OTEL_EXPORTER_OTLP_ENDPOINT``; without either, the providers that the process has set up.
        service_name: The resource's ``service.name``, for an endpoint.
        headers: Sent with every request to the endpoint.
        spans: Whether operations become spans; metrics alone are much less traffic.
        tracer_provider: To use instead of an endpoint.
        meter_provider: To use instead of an endpoint.
    """

    def __init__(
        self,
        *,
        endpoint: str | None = None,
        service_name: str = "rlplane",
        headers: Mapping[str, str] | None = None,
        spans: bool = True,
        tracer_provider: Any = None,
        meter_provider: Any = None,
    ) -> None:
        from opentelemetry import metrics, trace

        self._owned: list[Any] = []
        endpoint = endpoint or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
        if tracer_provider is None and meter_provider is None and endpoint:
            tracer_provider, meter_provider = _providers(endpoint, service_name, dict(headers or {}))
            self._owned = [tracer_provider, meter_provider]
        if tracer_provider is None and meter_provider is None:
            tracer_provider, meter_provider = trace.get_tracer_provider(), metrics.get_meter_provider()
            if not any(hasattr(provider, "shutdown") for provider in (tracer_provider, meter_provider)):
                raise ConfigError(
                    "sink otel: nowhere to send to. Give it an endpoint, such as http://localhost:4318, set"
                    " OTEL_EXPORTER_OTLP_ENDPOINT, or set up OpenTelemetry's providers before the client"
                )
        self._trace = trace
        self._tracer = trace.get_tracer("rlplane", tracer_provider=tracer_provider) if spans else None
        meter = metrics.get_meter("rlplane", meter_provider=meter_provider)
        self._duration = meter.create_histogram("rlplane.operation.duration", unit="s")
        self._wait = meter.create_histogram("rlplane.operation.wait", unit="s")
        self._timeouts = meter.create_counter("rlplane.operation.timeouts", unit="{operation}")
        self._bytes = meter.create_counter("rlplane.operation.bytes", unit="By")
        self._keys = meter.create_counter("rlplane.operation.keys", unit="{sample}")
        self._errors = meter.create_counter("rlplane.operation.errors", unit="{operation}")
        self._meter = meter
        self._gauges: dict[str, Any] = {}

    def write(self, records: Sequence[Record]) -> None:
        for record in records:
            if record["kind"] == "op":
                self._measure(record)
                if self._tracer is not None:
                    self._span(record)
            elif record["kind"] in ("scalars", "step", "log"):
                for name, value in record["values"].items():
                    self._gauge(f"rlplane.{name.replace('/', '.')}").set(value)
            elif record["kind"] == "transfers":
                for name, value in record["figures"].items():
                    self._gauge(f"rlplane.transfer.{_plain(name)}").set(value)

    def close(self) -> None:
        for provider in self._owned:
            provider.shutdown()

    def _measure(self, record: Record) -> None:
        labels = {"op": record["op"], "partition": record["partition_id"], "status": record["status"]}
        self._duration.record((record["wall_ns"] - record["wait_ns"]) / 1e9, labels)
        if record["wait_ns"]:
            task = {"task": record["task"]} if record["task"] else {}
            self._wait.record(record["wait_ns"] / 1e9, {**labels, **task})
        if record["status"] == "ok":
            self._bytes.add(record["n_bytes"], labels)
            self._keys.add(record["n_keys"], labels)
        elif found_nothing(record):
            self._timeouts.add(1, labels)
        else:
            self._errors.add(1, {**labels, "error": record["error"] or ""})

    def _span(self, record: Record) -> None:
        attributes = {
            "rlplane.partition": record["partition_id"],
            "rlplane.keys": record["n_keys"],
            "rlplane.bytes": record["n_bytes"],
            "rlplane.wait_s": record["wait_ns"] / 1e9,
            "process.pid": record["pid"],
            "thread.name": record["thread"],
            **({"rlplane.task": record["task"]} if record["task"] else {}),
        }
        assert self._tracer is not None
        span = self._tracer.start_span(
            f"rlplane.{record['op']}",
            context=self._trace.set_span_in_context(self._trace.INVALID_SPAN),
            start_time=record["start_ns"],
            attributes=attributes,
        )
        if record["status"] != "ok" and not found_nothing(record):
            message = f"{record['error']}: {record['error_message']}"
            span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, message))
        span.end(end_time=record["start_ns"] + record["wall_ns"])

    def _gauge(self, name: str) -> Any:
        gauge = self._gauges.get(name)
        if gauge is None:
            gauge = self._gauges[name] = self._meter.create_gauge(name)
        return gauge


def _providers(endpoint: str, service_name: str, headers: dict[str, str]) -> tuple[Any, Any]:
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError(f"sink otel: the endpoint {endpoint!r} is no URL such as http://localhost:4318")
    base = endpoint.rstrip("/")
    resource = Resource.create({"service.name": service_name})
    tracers = TracerProvider(resource=resource)
    exporter = OTLPSpanExporter(endpoint=f"{base}/v1/traces", headers=headers)
    tracers.add_span_processor(BatchSpanProcessor(exporter))
    reader = PeriodicExportingMetricReader(
        OTLPMetricExporter(endpoint=f"{base}/v1/metrics", headers=headers), export_interval_millis=10_000
    )
    return tracers, MeterProvider(resource=resource, metric_readers=[reader])


def _plain(name: str) -> str:
    """``P90 xfer time (ms)`` as a metric's name: ``p90_xfer_time_ms``."""
    return "_".join("".join(char if char.isalnum() else " " for char in name.lower()).split())
