"""``rlplane bench``: what it refuses before it measures anything."""

import subprocess
import sys
from pathlib import Path

import pytest

from rlplane.cli import ExitCode, run
from rlplane.errors import InvalidRequestError, MissingExtraError
from rlplane_benchmarks import PEERS, participants_for
from rlplane_benchmarks.participants import PARTICIPANTS


def test_without_peers_there_are_rlplane_and_the_limits() -> None:
    chosen, notes = participants_for([])
    assert [participant.name for participant in chosen] == ["copy", "copy-1", "zmq", "rlplane"]
    assert notes == []


def test_ray_is_measured_as_one_object_and_as_a_row_per_object() -> None:
    chosen, _ = participants_for(["ray"])
    assert [participant.name for participant in chosen if participant.peer] == ["ray-batch", "ray-rows"]


def test_an_unknown_peer_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(InvalidRequestError, match=r"'rai'.*ray, redis, tq-simple, tq-mooncake and all"):
        participants_for(["redis", "rai"])
    assert PEERS == ("ray", "redis", "tq-simple", "tq-mooncake")


def test_a_named_peer_that_is_not_installed_is_an_error_and_all_leaves_it_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(MissingExtraError, match="redis-server"):
        participants_for(["redis"])
    chosen, notes = participants_for(["all"])
    assert "redis" not in [participant.name for participant in chosen]
    assert len(chosen) == len(PARTICIPANTS) - 1
    assert any("redis was left out" in note for note in notes)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--peers", "rai"], "no peer is named 'rai'"),
        (["--observability", "--metrics"], "one at a time"),
        (["--metrics", "--peers", "redis"], "one at a time"),
        (["--cluster", "--plot", "plot.svg"], "one at a time"),
        (["--cluster", "--cluster-backend", "simpel"], "'simpel'; there are simple and mooncake_cpu"),
        (["--cluster-backend", "mooncake_cpu"], "--cluster-backend is for --cluster"),
        (["--json", "/nowhere/at/all.json"], "no directory /nowhere/at"),
    ],
)
def test_usage_errors_come_before_the_first_measurement(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", *arguments]) == ExitCode.USAGE
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import rlplane.cli.bench", "rlplane_benchmarks"),
        ("import rlplane_benchmarks.cluster, rlplane_benchmarks.table", "torch"),
    ],
)
def test_the_command_loads_the_benchmarks_when_it_runs_and_torch_only_in_its_workers(
    statement: str, absent: str
) -> None:
    script = f"import sys\n{statement}\nassert {absent!r} not in sys.modules"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_scale_that_is_no_scale_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RLPLANE_BENCH_SCALE", "big")
    assert run(["bench", "--quick"]) == ExitCode.USAGE
    assert "'big'" in capsys.readouterr().err


def test_another_bench_is_run_rendered_and_saved(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from rlplane_benchmarks import metrics

    monkeypatch.setattr(metrics, "run", lambda quick: {"quick": quick, "seconds": 1.5})
    monkeypatch.setattr(metrics, "render", lambda found: f"{found['seconds']} s")
    assert run(["bench", "--metrics", "--quick", "--json", str(tmp_path / "m.json")]) == ExitCode.OK
    assert capsys.readouterr().out == "1.5 s\n"
    saved = (tmp_path / "m.json").read_text()
    assert '"schema": "rlplane.bench.metrics"' in saved
    assert '"quick": true' in saved
