"""Prometheus on a real run: the aggregator's own port, and what the dashboard and the rules ask for."""

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from rlplane.web.app import listen

RUN = Path(__file__).with_name("viewed_run.py")
DASHBOARDS = Path(__file__).parents[2] / "dashboards" / "grafana"
SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}


@pytest.fixture
def scrape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The exposition of a run that has moved some samples."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("RLPLANE_METRICS_ADDRESS", raising=False)
    with listen("127.0.0.1", 0) as probe:
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, str(RUN), str(tmp_path / "run"), str(port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        assert process.stdout.readline(), "the run did not start"
        deadline = time.monotonic() + 60
        while True:
            answer = httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False, timeout=30).text
            cleared = re.search(r"^rlplane_samples_cleared_total\S* (\S+)$", answer, re.MULTILINE)
            if cleared is not None and float(cleared[1]) > 100 and "rlplane_task_ready_samples{" in answer:
                break
            assert time.monotonic() < deadline, answer
            time.sleep(0.1)
        yield answer
    finally:
        process.stdin.close()
        assert process.wait(60) == 0
        process.stdout.close()


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


def test_promtool_finds_nothing_wrong_with_a_real_scrape(scrape: str) -> None:
    promtool = shutil.which("promtool")
    assert promtool, "promtool is missing: it is in Debian's package prometheus"
    done = subprocess.run(
        [promtool, "check", "metrics"], input=scrape, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
