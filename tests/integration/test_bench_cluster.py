"""The cluster bench, run for real in its smallest form: its own Ray, both engines, Ray actors as clients."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from rlplane_benchmarks.cluster import quick_cluster_plan, run_cluster_bench
from rlplane_benchmarks.cluster.targets import CLUSTER_TARGETS
from rlplane_benchmarks.participants import Participant
from rlplane_benchmarks.results import BenchResult

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(900)]

ENGINES = {"rlplane", "transfer-queue"}


@pytest.mark.parametrize("backend", ["simple", "mooncake_cpu"])
def test_the_command_measures_both_engines_and_checks_every_read(backend: str, tmp_path: Path) -> None:
    json = tmp_path / "cluster.json"
    options = ["--cluster", "--cluster-backend", backend, "--quick", "--json", str(json)]
    done = subprocess.run(
        [sys.executable, "-m", "rlplane.cli", "bench", *options],
        env={**os.environ, "RLPLANE_BENCH_SCALE": "0.01"},
        capture_output=True,
        text=True,
        timeout=850,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = msgspec.json.decode(json.read_bytes(), type=BenchResult)
    assert (result.schema, result.backend, result.quick) == ("rlplane.bench.cluster", backend, True)
    measured = {(series.part, series.participant) for series in result.series}
    assert measured == {(part, name) for part in ("data", "wake", "clients", "control") for name in ENGINES}
    assert {series.workload for series in result.series if series.part == "clients"} == {"1", "2"}
    values = {part: [v for s in result.series if s.part == part for v in s.values] for part, _ in measured}
    assert all(value > 0 for value in values["data"] + values["wake"])
    # In so short a time a busy machine may end no cycle.
    assert any(value > 0 for value in values["clients"]) and any(value > 0 for value in values["control"])
    assert result.right
    assert {check.participant for check in result.checks if check.reads > 0} == ENGINES
    assert [target.what for target in result.targets] == [target.what for target in CLUSTER_TARGETS]
    assert all(target.what in done.stdout for target in result.targets)


def test_a_wrong_read_is_noticed_on_a_cluster_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    plan = quick_cluster_plan().scaled(0.01)
    plan = replace(plan, batches=plan.batches[-1:])
    engines = [
        Participant("wrong-rows", "", "bench_faulty_stores:WrongRows"),
        Participant("another-cycle", "", "bench_faulty_stores:RowsOfAnotherCycle"),
    ]
    result = run_cluster_bench(plan, engines, backend="simple")
    assert not result.right
    wrong = {check.participant: check.wrong for check in result.checks}
    assert any("wake: rows came back with other numbers" in text for text in wrong["wrong-rows"])
    assert any("wake: other rows came back" in text for text in wrong["another-cycle"])
    assert len(wrong["wrong-rows"]) == len(wrong["another-cycle"]) == 5
