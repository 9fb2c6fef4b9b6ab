"""Sinks are found by name, started at once, fed in batches, and fail alone; each of ours is read back."""

from __future__ import annotations

import json
import logging
import os
import struct
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib import metadata
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from rlplane.adapters.local.memory import MemoryDataPlaneClient
from rlplane.config import load_config
from rlplane.errors import ConfigError, MissingExtraError
from rlplane.observability import MetricsDataPlaneClient
from rlplane.sinks import Sink, build_sink, describe_spec, sink_names
from rlplane.sinks.jsonl import read_records
from rlplane.sinks.log import LoggingSink
from rlplane.sinks.otel import OtelSink
from rlplane.sinks.tensorboard import TensorBoardSink
from rlplane.sinks.trace import trace_events, write_trace


class Collector:
    """A sink of the simplest kind."""

    def __init__(self):
        self.records, self.closed = [], False

    def write(self, records):
        self.records.extend(records)

    def close(self):
        self.closed = True


def run_operations(client: MetricsDataPlaneClient) -> None:
    client.register_partition("rollouts", ["x"], 2, ["train"])
    client.put_samples(["a", "b"], "rollouts", TensorDict({"x": torch.zeros(2, 4)}, batch_size=[2]))
    meta = client.claim_meta("rollouts", "train", ["x"], 2)
    client.get_data(meta)
    with pytest.raises(KeyError):
        client.get_samples(["nobody"], "rollouts", ["x"])
    client.clear_samples(["a"], "rollouts")


@pytest.fixture
def observe(request):
    """Runs a few operations with these sinks, and closes the client."""

    def run(*sinks):
        cfg = load_config("local", {"controller_address": request.node.name})
        client = MetricsDataPlaneClient(MemoryDataPlaneClient(cfg, bootstrap=True), sinks=sinks)
        run_operations(client)
        client.close()
        return client

    return run


def test_a_sink_gets_every_operation_with_who_when_and_why(observe):
    sink = Collector()
    observe(sink)
    assert sink.closed
    kinds = [record["kind"] for record in sink.records]
    assert kinds[0] == "session" and kinds[-1] == "scalars"
    operations = [record for record in sink.records if record["kind"] == "op"]
    assert [record["op"] for record in operations] == [
        "register",
        "put",
        "claim_meta",
        "get_data",
        "get",
        "clear",
        "close",
    ]
    assert {record["pid"] for record in operations} == {os.getpid()}
    assert {record["thread"] for record in operations} == {threading.current_thread().name}
    claim, get = operations[2], operations[4]
    assert claim["task"] == "train"
    assert (get["status"], get["error"]) == ("error", "MissingDataError")
    assert "nobody" in get["error_message"]
    starts = [record["start_ns"] for record in operations]
    assert starts == sorted(starts)


def test_the_last_scalars_say_what_is_held_and_how_fast_it_went(observe):
    sink = Collector()
    observe(sink)
    values = [record for record in sink.records if record["kind"] == "scalars"][-1]["values"]
    assert values["bytes_outstanding"] == 16
    assert values["partition/rollouts/bytes_outstanding"] == 16
    assert values["keys_outstanding"] == 1
    assert values["failed_ops"] == 1
    assert values["put/ops_per_s"] > 0 and values["put/p90_ms"] > 0
    assert values["get/errors"] == 1


def test_a_sink_that_fails_later_disturbs_neither_the_operation_nor_the_other_sinks(observe):
    class Broken(Collector):
        def write(self, records):
            raise OSError("disk full")

    good = Collector()
    client = observe(Broken(), good)
    assert [record["op"] for record in good.records if record["kind"] == "op"][-1] == "close"
    state = client.snapshot()["sinks"]
    assert state["sink Broken"]["failures"] > 0


def test_our_sinks_and_those_of_other_packages_are_found_by_name(monkeypatch):
    points = metadata.EntryPoints(
        [
            metadata.EntryPoint("theirs", "collections:OrderedDict", "rlplane.sinks"),
            metadata.EntryPoint("good", f"{__name__}:Collector", "rlplane.sinks"),
            metadata.EntryPoint("gone", "no_such_package:Sink", "rlplane.sinks"),
        ]
    )
    monkeypatch.setattr(metadata, "entry_points", lambda **wanted: points.select(**wanted))
    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__) or sys.modules["__main__"])
    monkeypatch.setattr(sys.modules[__name__], "Collector", Collector, raising=False)
    assert {"jsonl", "logging", "otel", "tensorboard", "trace", "wandb", "good"} <= set(sink_names())
    assert isinstance(build_sink("good"), Sink)
    with pytest.raises(ConfigError, match="without write and close"):
        build_sink("theirs")
    with pytest.raises(MissingExtraError, match="no_such_package"):
        build_sink("gone")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nonsense", "there is no sink 'nonsense'"),
        ({"path": "x"}, "mapping with 'kind'"),
        ({"kind": "jsonl", "pth": "x"}, "pth"),
        ({"kind": "logging", "level": "LOUD"}, "LOUD"),
        ({"kind": "trace", "path": "trace.txt"}, "must end in .json"),
        ({"kind": "otel", "endpoint": "localhost:4318"}, "no URL"),
        (3, "not 3"),
    ],
)
def test_a_sink_that_cannot_start_says_why(spec, message):
    with pytest.raises(ConfigError, match=message):
        build_sink(spec)


def test_a_sink_whose_package_is_missing_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingExtraError, match=r"rlplane\[wandb\]"):
        build_sink({"kind": "wandb"})


def test_specs_have_short_names():
    assert describe_spec("logging") == "logging"
    assert describe_spec({"kind": "jsonl", "path": "e.jsonl"}) == "jsonl e.jsonl"
    assert describe_spec(Collector()) == "Collector"


def test_sinks_load_no_torch():
    code = (
        "import sys, rlplane.sinks.jsonl, rlplane.sinks.log, rlplane.sinks.otel, rlplane.sinks.tensorboard,"
        " rlplane.sinks.trace, rlplane.sinks.wandb; sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_logging_writes_one_line_per_operation_and_failures_as_warnings(observe, caplog):
    caplog.set_level(logging.INFO, logger="rlplane.events")
    observe("logging")
    lines = [record for record in caplog.records if record.getMessage().startswith("op=")]
    assert len(lines) == 7
    assert "op=put partition=rollouts task=- keys=2 bytes=32" in lines[1].getMessage()
    assert lines[4].levelno == logging.WARNING and "MissingDataError" in lines[4].getMessage()


def test_logging_writes_transfers_as_a_line(caplog):
    caplog.set_level(logging.DEBUG, logger="mine")
    sink = LoggingSink(logger="mine", level="debug")
    sink.write([{"kind": "transfers", "figures": {"Num successful transfers": 3}}])
    assert caplog.messages == ["transfers Num successful transfers=3"]


# wandb


def test_wandb_logs_curves_into_a_run_of_its_own_offline(observe, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    import wandb

    observe({"kind": "wandb", "mode": "offline", "project": "test", "dir": str(tmp_path)})
    assert wandb.run is None, "the run that the sink made is finished with it"
    values = wandb_history(tmp_path)
    assert values["rlplane/bytes_outstanding"] == 16
    assert values["rlplane/put/ops_per_s"] > 0
    assert values["rlplane/time_s"] >= 0


def test_wandb_uses_the_run_that_is_there_and_leaves_its_steps_alone(observe, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    import wandb

    run = wandb.init(mode="offline", project="test", dir=str(tmp_path))
    observe("wandb")
    assert wandb.run is run
    assert run is not None and run.step == 0
    run.log({"loss": 1.0})
    run.finish()
    values = wandb_history(tmp_path)
    assert values["loss"] == 1.0
    assert values["rlplane/bytes_outstanding"] == 16


def wandb_history(directory) -> dict[str, Any]:
    """What an offline run has on disk. wandb may write the end of it after ``finish`` has returned."""
    (path,) = directory.glob("wandb/offline-run-*/run-*.wandb")
    deadline = time.monotonic() + 60
    records: list[Any] = []
    while not any(record.HasField("exit") for record in records):
        assert time.monotonic() < deadline, "the run's file has no end"
        records = wandb_records(path.read_bytes())
    return {
        "/".join(item.nested_key) or item.key: json.loads(item.value_json)
        for record in records
        for item in record.history.item
    }


def wandb_records(data: bytes) -> list[Any]:
    """The messages in a log of LevelDB's format."""
    from wandb.proto import wandb_internal_pb2

    position, message, records = 7, b"", []
    while position + 7 <= len(data):
        if 32768 - position % 32768 < 7:  # No room for a header in the rest of this block.
            position += 32768 - position % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        if position + 7 + length > len(data):
            break
        message += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # A whole message, or its last part.
            records.append(wandb_internal_pb2.Record.FromString(message))
            message = b""
    return records


# tensorboard


def test_tensorboard_scalars_read_back(observe, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    observe({"kind": "tensorboard", "path": str(tmp_path / "runs")})
    accumulator = EventAccumulator(str(tmp_path / "runs"))
    accumulator.Reload()
    tags = accumulator.Tags()["scalars"]
    assert "rlplane/bytes_outstanding" in tags and "rlplane/put/mb_per_s" in tags
    assert accumulator.Scalars("rlplane/bytes_outstanding")[-1].value == 16


def test_tensorboard_has_the_transfers_too(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoardSink(tmp_path)
    sink.write([{"kind": "transfers", "time": 1.0, "figures": {"Throughput (MB/s)": 12.5}}])
    sink.close()
    accumulator = EventAccumulator(str(tmp_path))
    accumulator.Reload()
    assert accumulator.Scalars("rlplane/transfer/Throughput (MB/s)")[0].value == 12.5


# otel


def test_otel_spans_and_metrics_arrive_at_the_providers_given(observe):
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, reader = InMemorySpanExporter(), InMemoryMetricReader()
    tracers = TracerProvider()
    tracers.add_span_processor(SimpleSpanProcessor(exporter))
    observe(OtelSink(tracer_provider=tracers, meter_provider=MeterProvider(metric_readers=[reader])))
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert set(spans) >= {"rlplane.put", "rlplane.claim_meta", "rlplane.get", "rlplane.close"}
    put, get, claim = spans["rlplane.put"], spans["rlplane.get"], spans["rlplane.claim_meta"]
    assert put.attributes["rlplane.partition"] == "rollouts"
    assert put.attributes["rlplane.bytes"] == 32
    assert put.end_time > put.start_time
    assert claim.attributes["rlplane.task"] == "train"
    assert not get.status.is_ok and "MissingDataError" in get.status.description
    assert put.parent is None
    points = {
        metric.name: list(metric.data.data_points)
        for scope in reader.get_metrics_data().resource_metrics[0].scope_metrics
        for metric in scope.metrics
    }
    moved = {point.attributes["op"]: point.value for point in points["rlplane.operation.bytes"]}
    assert moved["put"] == moved["get_data"] == 32
    assert sum(point.count for point in points["rlplane.operation.duration"]) == 7
    assert points["rlplane.operation.errors"][0].attributes["error"] == "MissingDataError"
    assert points["rlplane.bytes_outstanding"][0].value == 16


def test_otel_sends_to_an_otlp_receiver(observe):
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    received: list[tuple[str, str, bytes]] = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self):
            import gzip

            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            received.append((self.path, self.headers["x-team"], body))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Receiver)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        endpoint = f"http://127.0.0.1:{server.server_address[1]}"
        observe({"kind": "otel", "endpoint": endpoint, "service_name": "grpo", "headers": {"x-team": "rl"}})
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert {path for path, _, _ in received} == {"/v1/traces", "/v1/metrics"}
    assert {team for _, team, _ in received} == {"rl"}
    spans, names = set(), set()
    for path, _, body in received:
        if path == "/v1/traces":
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                assert any(a.value.string_value == "grpo" for a in resource.resource.attributes)
                spans |= {span.name for scope in resource.scope_spans for span in scope.spans}
        else:
            for resource in ExportMetricsServiceRequest.FromString(body).resource_metrics:
                names |= {metric.name for scope in resource.scope_metrics for metric in scope.metrics}
    assert "rlplane.put" in spans
    assert {"rlplane.operation.duration", "rlplane.bytes_outstanding"} <= names


def test_otel_with_nowhere_to_send_to_is_an_error_at_start(monkeypatch):
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    with pytest.raises(ConfigError, match="nowhere to send"):
        build_sink("otel")


def test_otel_transfers_become_gauges_with_plain_names():
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    reader = InMemoryMetricReader()
    sink = OtelSink(meter_provider=MeterProvider(metric_readers=[reader]), spans=False)
    sink.write([{"kind": "transfers", "figures": {"P90 xfer time (ms)": 1.5}}])
    sink.close()
    metrics = reader.get_metrics_data().resource_metrics[0].scope_metrics[0].metrics
    assert [(m.name, m.data.data_points[0].value) for m in metrics] == [
        ("rlplane.transfer.p90_xfer_time_ms", 1.5)
    ]


# trace


def test_the_trace_has_every_operation_by_process_thread_and_partition(observe, tmp_path):
    path = tmp_path / "trace.json"
    observe({"kind": "trace", "path": str(path)})
    trace = json.loads(path.read_text())
    check_trace(trace)
    operations = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert [event["name"] for event in operations] == [
        "register",
        "put",
        "claim_meta",
        "get_data",
        "get",
        "clear",
        "close",
    ]
    names = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    thread = threading.current_thread().name
    assert names == {f"{thread} · rollouts", thread}
    counters = [event for event in trace["traceEvents"] if event["ph"] == "C"]
    assert {"bytes_outstanding": 16} in [event["args"] for event in counters]
    assert next(record["kind"] for record in read_records(tmp_path / "trace.jsonl")) == "session"


def test_a_trace_is_made_of_the_records_of_a_run_that_died(tmp_path):
    records = tmp_path / "e.jsonl"
    code = f"""
import os, threading
from rlplane.adapters.local.memory import MemoryDataPlaneClient
from rlplane.config import load_config
from rlplane.observability import MetricsDataPlaneClient
client = MetricsDataPlaneClient(MemoryDataPlaneClient(load_config("local"), bootstrap=True),
    sinks=[{{"kind": "jsonl", "path": {str(records)!r}}}])
client.register_partition("p", ["x"], 1, ["t"])
assert client.flush()
os._exit(9)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == 9
    assert write_trace(read_records(records), tmp_path / "trace.json") == 1
    check_trace(json.loads((tmp_path / "trace.json").read_text()))


def test_the_same_pid_on_two_hosts_is_two_processes():
    record = {
        "kind": "op",
        "op": "put",
        "partition_id": "p",
        "n_keys": 1,
        "n_bytes": 1,
        "status": "ok",
        "start_ns": 1000,
        "wall_ns": 10,
        "pid": 7,
        "thread_id": 1,
        "thread": "Main",
        "task": None,
        "error": None,
        "error_message": None,
    }
    events = list(trace_events([{**record, "host": "a"}, {**record, "host": "b"}]))
    check_trace({"traceEvents": events})
    assert len({event["pid"] for event in events if event["ph"] == "X"}) == 2


def check_trace(trace: dict[str, Any]) -> None:
    """The rules of the trace event format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU"""
    named = set()
    for event in trace["traceEvents"]:
        assert isinstance(event["name"], str) and event["ph"] in "XMC"
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        assert isinstance(event["ts"], (int, float)) and event["ts"] >= 0
        if event["ph"] == "M":
            named.add((event["name"], event["pid"], event["tid"]))
        elif event["ph"] == "X":
            assert event["dur"] >= 0
            assert ("thread_name", event["pid"], event["tid"]) in named
            assert ("process_name", event["pid"], 0) in named
        else:
            assert all(isinstance(value, (int, float)) for value in event["args"].values())
