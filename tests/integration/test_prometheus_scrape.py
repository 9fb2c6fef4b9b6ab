"""Prometheus on a real run: the aggregator's own port, and what the dashboard and the rules ask for."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.warm_workers import WarmProcess

from rlplane.web.app import listen

RUN = Path(__file__).with_name("viewed_run.py")
DOCS = Path(__file__).parents[2] / "docs" / "dashboards.md"
DASHBOARDS = Path(__file__).parents[2] / "dashboards" / "grafana"
SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}


class Run(NamedTuple):
    """A run that has moved some samples: its address, the file with its token, and what it answers."""

    address: str
    token_file: Path
    exposition: str


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    directory = tmp_path_factory.mktemp("x")
    environment = {name: value for name, value in os.environ.items() if name != "RLPLANE_METRICS_ADDRESS"}
    process = WarmProcess(
        [sys.executable, str(RUN), str(directory / "run"), "0"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**environment, "XDG_RUNTIME_DIR": str(directory)},
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        _, address, token_file = process.stdout.readline().split()
        assert httpx.get(address, trust_env=False, timeout=30).status_code == 401
        bearer = {"authorization": f"Bearer {Path(token_file).read_text()}"}
        deadline = time.monotonic() + 120
        while True:
            answer = httpx.get(address, headers=bearer, trust_env=False, timeout=30).text
            cleared = re.search(r"^rlplane_samples_cleared_total\S* (\S+)$", answer, re.MULTILINE)
            if cleared is not None and float(cleared[1]) > 100 and "rlplane_task_ready_samples{" in answer:
                break
            assert time.monotonic() < deadline, answer
            time.sleep(0.1)
        yield Run(address, Path(token_file), answer)
    finally:
        process.stdin.close()
        assert process.wait(60) == 0
        process.stdout.close()


@pytest.fixture
def scrape(run: Run) -> str:
    return run.exposition


def test_prometheus_scrapes_it_with_the_config_that_the_docs_show(run: Run, tmp_path: Path) -> None:
    prometheus = shutil.which("prometheus")
    assert prometheus, "prometheus is missing: it is in Debian's package prometheus"
    config = re.findall(r"```yaml\n(scrape_configs:.*?)```", DOCS.read_text(), re.DOTALL)[0]
    for shown, real in (
        ("/etc/prometheus/rlplane.token", str(run.token_file)),
        ("127.0.0.1:9464", run.address.split("/")[2]),
        ("5s", "1s"),
    ):
        assert shown in config
        config = config.replace(shown, real)
    (tmp_path / "prometheus.yml").write_text(config)
    with listen("127.0.0.1", 0) as probe:
        port = probe.getsockname()[1]
    command = [
        prometheus,
        f"--config.file={tmp_path}/prometheus.yml",
        f"--storage.tsdb.path={tmp_path}/data",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (tmp_path / "log").open("w+") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 120
        while True:
            with contextlib.suppress(httpx.TransportError):
                found = httpx.get(
                    f"http://127.0.0.1:{port}/api/v1/query", params={"query": "rlplane_up"}, trust_env=False
                ).json()["data"]["result"]
                if found and found[0]["value"][1] == "1":
                    break
            assert time.monotonic() < deadline, (tmp_path / "log").read_text()
            time.sleep(0.2)
    finally:
        server.terminate()
        server.wait(60)


def test_a_real_run_has_every_metric_that_the_dashboard_and_the_rules_name(scrape: str) -> None:
    families = {family.name: family for family in text_string_to_metric_families(scrape)}
    there = {
        name + suffix for name, family in families.items() for suffix in SUFFIXES.get(family.type, ("",))
    }
    dashboard = (DASHBOARDS / "rlplane.json").read_text()
    rules = (DASHBOARDS / "rlplane-alerts.yml").read_text()
    asked = set(re.findall(r"\brlplane_[a-z_]+", dashboard)) | set(re.findall(r"\brlplane_[a-z_]+", rules))
    assert len(asked) > 25 and json.loads(dashboard)["uid"] == "rlplane"
    assert asked <= there
    samples = {
        (sample.name, sample.labels.get("op"), sample.labels.get("task")): sample.value
        for family in families.values()
        for sample in family.samples
    }
    assert samples["rlplane_operations_total", "put", None] > 0
    assert samples["rlplane_operation_failures_total", "get", None] == 1
    assert samples["rlplane_samples_claimed_total", None, "train"] > 0
    assert samples["rlplane_sample_claim_delay_seconds_count", None, "train"] > 0
    assert samples["rlplane_sample_staleness_versions_count", None, "train"] > 0
    assert samples["rlplane_steps_total", None, None] > 0
    in_plane = samples["rlplane_step_plane_seconds_total", "claim_meta", None]
    assert 0 < in_plane <= samples["rlplane_step_seconds_total", None, None]
    assert samples["rlplane_logged_value", None, None] == 0.5


def test_promtool_finds_nothing_wrong_with_a_real_scrape(scrape: str) -> None:
    promtool = shutil.which("promtool")
    assert promtool, "promtool is missing: it is in Debian's package prometheus"
    done = subprocess.run(
        [promtool, "check", "metrics"], input=scrape, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
