"""What the demo says about a run: its display, its balance of samples and its results."""

from __future__ import annotations

import io
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rlplane.cli.demo import _resolve, how_to_go_on
from rlplane.cli.outcome import CommandError
from rlplane.demo.display import LineDisplay, LiveDisplay, curve
from rlplane.demo.job import Death, RunOutcome, SampleBalance
from rlplane.demo.results import summarise, write_results
from rlplane.demo.settings import Settings
from rlplane.metrics.snapshot import SessionState
from rlplane.report import Report


def a_step(number: int, **changes: Any) -> dict[str, Any]:
    return {
        "step": number,
        "reward": number / 10,
        "judged": 8,
        "trained": 8,
        "tokens": 100,
        "claimed": 8,
        "staleness": 1.5,
        "oldest": 2,
        "late": 0,
        "dropped": {"too old": [f"p{number}_g0"], "no reward variance": []},
        "handed_out_again": {},
        "seconds": 0.5,
        "plane_seconds": 0.005,
        "waiting_seconds": 0.1,
        "bytes_held": 2048,
        **changes,
    }


def some_balance(**changes: Any) -> SampleBalance:
    cleared = {"trained": 30, "too old": 10}
    values = {"prompts": 5, "written": 40, "written_by_plane": 40, "cleared": cleared, "kept": 0}
    return SampleBalance(**{**values, "lost": [], "unknown": [], "left": 0, **changes})


def an_outcome(**changes: Any) -> RunOutcome:
    report = Report(run_id="r", state=SessionState.COMPLETE, complete=True, exact=True)
    values = {"state": "COMPLETE", "seconds": 9.0, "steps": [a_step(n) for n in range(1, 5)]}
    values |= {"deaths": [], "service_deaths": []}
    return RunOutcome(
        **{**values, "balance": some_balance(), "resumable": False, "report": report, **changes}
    )


def write_journal(run_dir: Path) -> None:
    (run_dir / "events.jsonl").write_text("")


def test_samples_balance_only_when_every_sample_is_accounted_for() -> None:
    assert some_balance().balanced
    assert some_balance(cleared={"trained": 30}, kept=10).balanced
    assert not some_balance(written_by_plane=41).balanced
    assert not some_balance(cleared={"trained": 30}).balanced
    assert not some_balance(lost=["a"]).balanced
    assert not some_balance(unknown=["a"]).balanced
    assert not some_balance(left=1).balanced


def test_the_summary_has_the_share_of_time_that_the_plane_took() -> None:
    summary = summarise(an_outcome())
    assert summary["plane_share"] == pytest.approx(0.01)
    assert summary["waiting_share"] == pytest.approx(0.2)
    assert summary["tokens_per_second"] == pytest.approx(200)


def test_the_first_and_the_last_steps_of_a_short_run_do_not_overlap() -> None:
    summary = summarise(an_outcome())
    assert (summary["reward_first"], summary["reward_last"]) == (pytest.approx(0.15), pytest.approx(0.35))
    three = summarise(an_outcome(steps=[a_step(n) for n in range(1, 4)]))
    assert (three["reward_first"], three["reward_last"]) == (pytest.approx(0.1), pytest.approx(0.3))


def test_the_staleness_of_a_run_is_that_of_its_samples_and_not_of_its_steps() -> None:
    steps = [a_step(1, staleness=0.0, claimed=30), a_step(2, staleness=4.0, claimed=10)]
    assert summarise(an_outcome(steps=steps))["staleness"] == pytest.approx(1.0)


def test_a_run_whose_policy_trains_late_groups_says_how_many(tmp_path: Path) -> None:
    write_journal(tmp_path)
    steps = [a_step(1), a_step(2, oldest=5, late=8)]
    summary = write_results(an_outcome(steps=steps), tmp_path)
    assert (summary["oldest"], summary["late"]) == (5, 8)
    assert "5 at most; 8 samples were older than the bound" in (tmp_path / "report.txt").read_text()


def test_results_name_every_death_every_drop_and_what_is_missing(tmp_path: Path) -> None:
    death = Death("rollout-0", 77, 1.5, "rollout-0.1", ["p1_g0"])
    write_journal(tmp_path)
    (tmp_path / "engine.log").write_text("WARNING:x:client 3 died; 8 claimed samples are handed out again\n")
    balance = some_balance(lost=["p9_g0"], cleared={"trained": 39})
    summary = write_results(an_outcome(deaths=[death], balance=balance), tmp_path)
    assert not summary["books"]["balanced"]
    text = (tmp_path / "report.txt").read_text()
    assert "rollout-0 (process 77), replaced by rollout-0.1; 1 samples" in text
    assert "client 3 died; 8 claimed samples are handed out again" in text
    assert "check FAILED" in text and "p9_g0" in text
    dropped = [json.loads(line) for line in (tmp_path / "dropped.jsonl").read_text().splitlines()]
    assert [line["group_of"] for line in dropped] == ["p1_g0", "p2_g0", "p3_g0", "p4_g0"]
    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg ") >= 3 and "check FAILED" in page


def test_a_run_without_a_step_has_results_too(tmp_path: Path) -> None:
    write_journal(tmp_path)
    summary = write_results(an_outcome(state="INTERRUPTED", steps=[], balance=None), tmp_path)
    assert summary["steps"] == 0 and summary["books"] is None
    assert "before the trainer had begun" in (tmp_path / "report.txt").read_text()
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"] == []


def test_the_curve_shows_equal_shares_of_all_steps() -> None:
    assert curve([0.0, 0.5, 1.0], 10) == " ▄█"
    assert curve([0.0] * 50 + [1.0] * 50, 2) == " █"
    assert curve([], 10) == ""


def test_without_a_terminal_there_is_a_line_every_few_steps(capsys: pytest.CaptureFixture[str]) -> None:
    with LineDisplay(20) as display:
        for number in range(1, 21):
            display.step(a_step(number, reward=0.5))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 10
    assert lines[-1].startswith("step   20/20  reward 0.500, tokens/s 200, staleness 1.5, held 2")


def test_the_panel_shows_what_people_watch() -> None:
    display = LiveDisplay(8)
    for number in range(1, 5):
        display.step(a_step(number))
    display.death(Death("score-0", 5, 1.0, "score-0.1"))
    screen = io.StringIO()
    Console(file=screen, width=100, force_terminal=False).print(display._panel())
    shown = screen.getvalue()
    for text in ("step 4 of 8", "0.250", "tokens/s", "staleness", "held", "1.0%", "▂", "killed score-0"):
        assert text in shown


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"balance": None}, "it was interrupted before the trainer had begun"),
        ({"resumable": True}, "to go on: rlplane demo --resume runs/1"),
    ],
)
def test_an_interrupted_run_says_how_to_go_on_or_truly_why_it_cannot(
    changes: dict[str, Any], says: str
) -> None:
    outcome = an_outcome(state="INTERRUPTED", **changes)
    assert says in how_to_go_on(outcome, Path("runs/1"))


def test_a_run_goes_on_as_it_began(tmp_path: Path) -> None:
    given = {"steps": 9, "policy": None, "seed": None, "max_staleness": None}
    with pytest.raises(CommandError, match="it has no checkpoint"):
        _resolve(given, None, None, tmp_path, tmp_path)
    (tmp_path / "checkpoints" / "checkpoint-00000003").mkdir(parents=True)
    run = {"impl": "local", "backend": "shm", "settings": asdict(Settings(policy="in_order", steps=3))}
    (tmp_path / "run.json").write_text(json.dumps(run))
    settings, engine, directory = _resolve(given, None, None, tmp_path, tmp_path)
    assert (settings.steps, settings.policy, engine) == (9, "in_order", ("local", "shm"))
    assert directory == tmp_path
    for change in ({"policy": "windowed"}, {"seed": 7}, {"max_staleness": 9}):
        with pytest.raises(CommandError, match="of a run that goes on cannot be changed"):
            _resolve({**given, **change}, None, None, tmp_path, tmp_path)
