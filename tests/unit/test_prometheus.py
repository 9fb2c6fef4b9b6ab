"""The latest snapshot as Prometheus metrics, and what Grafana and the alert rules make of it."""

import json
import re
import select
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import httpx
import pytest
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families
from tests.simulated_run import SimulatedRun, series_of

from rlplane.errors import PlaneConnectionError
from rlplane.metrics.snapshot import CounterStat, MetricsSnapshot, PartitionStat, SessionState
from rlplane.sinks.metrics_http import MetricsHttpServer
from rlplane.sinks.prometheus import render, start_http

DASHBOARDS = Path(__file__).parents[2] / "dashboards" / "grafana"
RULES = DASHBOARDS / "rlplane-alerts.yml"
PROMTOOL = shutil.which("promtool")
OPENMETRICS = {"accept": "application/openmetrics-text; version=1.0.0"}
_NAME = re.compile(r"\brlplane_[a-z_]+")


@pytest.fixture
def snapshot() -> MetricsSnapshot:
    run = SimulatedRun(['rollouts "A"\n', "<script>"], slow_task="logprob")
    run.fail("boom")
    for _ in range(5):
        picture = run.step()
    picture.metrics += [
        CounterStat("transfers", 10),
        CounterStat("transfer_failures", 3, {"kind": "transfer"}),
        CounterStat("transfer_failures", 2, {"kind": "notification"}),
        CounterStat("transfer_failures", 1, {"kind": "expired"}),
        series_of("transfer_duration", [90_000, 250_000, 4_000_000]),
        series_of("transfer_post_duration", [9_000, 20_000, 40_000]),
        series_of("transfer_size", [4096, 1 << 20], unit="bytes"),
        series_of("transfer_descriptors", [1, 8, 64], unit="1"),
        CounterStat("op_timeouts", 1, {"op": "claim_meta", "partition": "<script>"}),
        CounterStat("samples_reclaimed", 1, {"partition": "<script>", "task": "train"}),
        CounterStat("tracked_samples_failed", 1, {"partition": "<script>"}),
    ]
    return picture


def exposition(picture: MetricsSnapshot | None) -> str:
    return render(lambda: picture)[0].decode()


def samples(picture: MetricsSnapshot | None) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(exposition(picture))
        for sample in family.samples
    }


def names_in(text: str) -> set[str]:
    return set(_NAME.findall(text))


def expressions(panels: list[dict]) -> Iterator[str]:  # type: ignore[type-arg]
    for panel in panels:
        yield from (target["expr"] for target in panel.get("targets", ()))
        yield from expressions(panel.get("panels", []))


def test_counters_and_gauges_have_the_snapshots_values(snapshot: MetricsSnapshot) -> None:
    found = samples(snapshot)
    put = (("op", "put"), ("partition", "<script>"))
    assert (
        found["rlplane_operations_total", put]
        == next(snapshot.counters("ops", op="put", partition="<script>")).value
    )
    assert (
        found["rlplane_partition_samples", (("partition", 'rollouts "A"\n'),)]
        == snapshot.partitions[0].samples
    )
    assert found["rlplane_run_state", (("state", "LIVE"),)] == 1
    assert found["rlplane_workers", (("state", "alive"),)] == 4


def test_what_nobody_says_about_a_partition_is_not_zero(snapshot: MetricsSnapshot) -> None:
    snapshot.partitions = [
        PartitionStat("silent", tracked=False),
        PartitionStat("reported", samples=3, bytes=12, reported=True, tracked=False),
    ]
    found = {key[0]: key[1] for key in samples(snapshot) if key[0].startswith("rlplane_partition_")}
    assert found == {
        "rlplane_partition_samples": (("partition", "reported"),),
        "rlplane_partition_bytes": (("partition", "reported"),),
    }


def test_the_transfer_statistics_failure_counters_are_there(snapshot: MetricsSnapshot) -> None:
    found = samples(snapshot)
    assert found["rlplane_failed_transfers_total", ()] == 3
    assert found["rlplane_failed_notifications_total", ()] == 2
    assert found["rlplane_expired_requests_total", ()] == 1
    none = samples(SimulatedRun().step())
    assert none["rlplane_failed_transfers_total", ()] == 0


def test_histograms_are_cumulative_in_seconds_and_start_below_a_millisecond(
    snapshot: MetricsSnapshot,
) -> None:
    for family in text_string_to_metric_families(exposition(snapshot)):
        if family.type != "histogram":
            continue
        by_labels: dict[tuple[tuple[str, str], ...], list[tuple[float, float]]] = {}
        for sample in family.samples:
            if sample.name.endswith("_bucket"):
                labels = tuple(item for item in sorted(sample.labels.items()) if item[0] != "le")
                by_labels.setdefault(labels, []).append((float(sample.labels["le"]), sample.value))
        assert by_labels, family.name
        for buckets in by_labels.values():
            bounds, counts = zip(*buckets, strict=True)
            assert list(bounds) == sorted(bounds)
            assert list(counts) == sorted(counts)
            assert bounds[-1] == float("inf")
        if family.name in ("rlplane_transfer_duration_seconds", "rlplane_operation_duration_seconds"):
            assert sum(bound < 1e-3 for bound in bounds) >= 6


def test_a_histograms_counts_never_fall_from_one_scrape_to_the_next() -> None:
    run = SimulatedRun()
    before = samples(run.step())
    for _ in range(5):
        after = samples(run.step())
        for key, value in before.items():
            if key[0].endswith(("_bucket", "_count", "_total", "_sum")):
                assert after[key] >= value, key
        before = after


def test_a_value_counts_in_the_bucket_that_its_bound_names() -> None:
    picture = SimulatedRun().step()
    picture.metrics = [series_of("transfer_duration", [300_000, 300_000, 2_000_000_000])]
    found = samples(picture)
    assert found["rlplane_transfer_duration_seconds_bucket", (("le", "0.00025"),)] == 0
    assert found["rlplane_transfer_duration_seconds_bucket", (("le", "0.0005"),)] == 2
    assert found["rlplane_transfer_duration_seconds_bucket", (("le", "2.5"),)] == 3
    assert found["rlplane_transfer_duration_seconds_sum", ()] == pytest.approx(2.0006)
    picture.metrics = [series_of("staleness", [0, 0, 1, 9], unit="versions", partition="p", task="t")]
    found = samples(picture)
    labels = (("partition", "p"), ("task", "t"))
    assert found["rlplane_sample_staleness_versions_bucket", (("le", "0"), *labels)] == 2
    assert found["rlplane_sample_staleness_versions_bucket", (("le", "1"), *labels)] == 3


def test_no_sample_id_and_no_worker_gets_into_a_label(snapshot: MetricsSnapshot) -> None:
    text = exposition(snapshot)
    assert all(life.sample_id not in text for life in snapshot.oldest)
    assert all(worker.worker not in text for worker in snapshot.workers)
    allowed = {"op", "partition", "task", "field", "reason", "state", "le", "run_id", "host", "name"}
    labels = {label for (_, pairs) in samples(snapshot) for label, _ in pairs}
    assert labels <= allowed


def test_before_the_first_snapshot_it_says_that_there_is_none() -> None:
    assert samples(None) == {("rlplane_up", ()): 0}


def test_openmetrics_is_given_to_whoever_asks_for_it(snapshot: MetricsSnapshot) -> None:
    body, content_type = render(lambda: snapshot, "application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    families = {family.name for family in openmetrics.text_string_to_metric_families(body.decode())}
    assert "rlplane_operations" in families


def test_it_is_served_on_loopback_until_it_is_closed(snapshot: MetricsSnapshot) -> None:
    server = start_http(0, lambda: snapshot)
    try:
        answer = httpx.get(server.address, trust_env=False, timeout=300)
        assert answer.status_code == 200 and "rlplane_operations_total" in answer.text
        assert "openmetrics" in httpx.get(server.address, headers=OPENMETRICS).headers["content-type"]
        head = httpx.head(server.address, trust_env=False, timeout=300)
        assert int(head.headers["content-length"]) > 1000 and not head.content
        assert httpx.get(server.address.removesuffix("metrics"), trust_env=False).status_code == 404
        assert httpx.post(server.address, trust_env=False).status_code == 405
        with pytest.raises(PlaneConnectionError, match=f"cannot serve metrics on 127.0.0.1:{server.port}"):
            start_http(server.port, lambda: snapshot)
    finally:
        server.close()
        server.close()
    with pytest.raises(httpx.ConnectError, match="refused"):
        httpx.get(server.address, trust_env=False)


def test_with_a_token_it_is_served_to_those_who_have_it(snapshot: MetricsSnapshot) -> None:
    token = "t0ken-of-a-scraper"
    server = start_http(0, lambda: snapshot, token)
    with closing(server), httpx.Client(trust_env=False, timeout=300) as client:
        for wrong in ({}, {"authorization": "Bearer wrong"}, {"cookie": "rlplane_token=wrong"}):
            answer = client.get(server.address, headers=wrong)
            assert answer.status_code == 401 and "rlplane_" not in answer.text
        right = {"authorization": f"Bearer {token}"}
        assert "rlplane_up 1.0" in client.get(server.address, headers=right).text
        for host in ("evil.example", "10.0.0.7", ""):
            assert client.get(server.address, headers={**right, "host": host}).status_code == 421
        visit = client.get(f"{server.address}?token={token}", headers={"accept": "text/html"})
        assert (visit.status_code, visit.headers["location"]) == (303, "/metrics")
        assert "rlplane_up 1.0" in client.get(server.address).text  # By the cookie.


@pytest.mark.parametrize(
    "request_head",
    [
        b"HELLO\r\n\r\n",
        b"GET /metrics SPDY/9\r\nHost: localhost\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\nno header\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\nX: " + b"x" * 20_000,
    ],
)
def test_what_is_no_request_is_refused(request_head: bytes) -> None:
    with closing(start_http(0, lambda: None)) as server, connect(server) as connection:
        connection.sendall(request_head)
        assert connection.recv(64).startswith(b"HTTP/1.1 400 Bad Request")


def connect(server: MetricsHttpServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=300)


def test_connections_that_ask_for_nothing_are_bounded_in_time_and_number() -> None:
    def render(accept: str) -> tuple[bytes, str]:
        return b"figures", "text/plain"

    with closing(MetricsHttpServer(0, render, patience_s=0.2)) as server, connect(server) as silent:
        silent.sendall(b"GET /metrics HTTP/1.1\r\nHost: loc")
        assert received(silent) == b""
    with closing(MetricsHttpServer(0, render, patience_s=600, most_half_open=4)) as server:
        crowd = [connect(server) for _ in range(12)]
        assert httpx.get(server.address, trust_env=False, timeout=300).text == "figures"
        assert [received(connection) for connection in crowd[:8]] == [b""] * 8
        for connection in crowd:
            connection.close()


def test_an_answer_that_nobody_reads_does_not_hold_a_connection() -> None:
    large = b"x" * (64 << 20)
    made = MetricsHttpServer(0, lambda _: (large, "text/plain"), patience_s=0.2)
    with closing(made) as server, connect(server) as deaf:
        deaf.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
        wait_until(lambda: is_reset(deaf))


def received(connection: socket.socket) -> bytes:
    try:
        return connection.recv(1)
    except ConnectionResetError:
        return b""


def is_reset(connection: socket.socket) -> bool:
    """Whether the other side is gone; what it sent before stays unread."""
    watch = select.poll()
    watch.register(connection, select.POLLHUP | select.POLLERR)
    return bool(watch.poll(0))


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_every_metric_that_the_dashboard_and_the_rules_name_exists(snapshot: MetricsSnapshot) -> None:
    snapshot.state = SessionState.COMPLETE
    there = {name for name, _ in samples(snapshot)}
    dashboard = json.loads((DASHBOARDS / "rlplane.json").read_text())
    drawn = set().union(*(names_in(text) for text in expressions(dashboard["panels"])))
    asked = names_in(json.dumps(dashboard["templating"]))
    alerting = names_in("\n".join(re.findall(r"expr: (.*(?:\n {10}.*)*)", RULES.read_text())))
    assert len(drawn) > 20 and len(alerting) > 8
    assert drawn | asked | alerting <= there


def test_panels_of_the_dashboard_do_not_overlap() -> None:
    panels = json.loads((DASHBOARDS / "rlplane.json").read_text())["panels"]
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in panels}) == len(panels)


def promtool(*arguments: str, stdin: str | None = None) -> None:
    assert PROMTOOL is not None, "promtool is missing: it is in Debian's package prometheus"
    done = subprocess.run(
        [PROMTOOL, *arguments], input=stdin, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_finds_nothing_wrong_with_the_metrics(snapshot: MetricsSnapshot) -> None:
    promtool("check", "metrics", stdin=exposition(snapshot))


def test_promtool_accepts_the_alert_rules() -> None:
    promtool("check", "rules", str(RULES))


def test_the_alerts_fire_on_what_they_are_for_and_not_on_a_healthy_run() -> None:
    promtool("test", "rules", str(DASHBOARDS / "rlplane-alerts.test.yml"))


def test_without_the_package_the_extra_is_named() -> None:
    code = (
        "import sys; sys.modules['prometheus_client'] = None\n"
        "from rlplane.sinks.prometheus import start_http\n"
        "start_http(0, lambda: None)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode != 0
    assert "pip install 'rlplane[prometheus]'" in done.stderr
