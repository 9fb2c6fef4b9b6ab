"""The files that a run leaves in its directory: a summary, the report as text, HTML and JSON, plots of the
reward, the list of dropped groups, and a trace for Perfetto."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlplane.demo.job import ENGINE_LOG_NAME, RunOutcome
from rlplane.report import render_html, render_text
from rlplane.report.svg import line_plot
from rlplane.viewing.trace import find_records, write_run_trace

_ENDS = 20
_SVG_STYLE = (
    "<style>svg{background:#fff;font-family:sans-serif}.line{fill:none;stroke:#2563eb;stroke-width:1.5}"
    ".area{fill:#2563eb;opacity:.15}.grid{stroke:#dfe3ea}.tick{font-size:9px;fill:#687083}</style>"
)


def mean(steps: Sequence[dict[str, Any]], key: str) -> float:
    return sum(float(step[key]) for step in steps) / max(len(steps), 1)


def ends_of(steps: int) -> int:
    """How many steps the first and the last reward are averaged over; none belongs to both."""
    return min(_ENDS, max(steps // 2, 1))


def summarise(outcome: RunOutcome) -> dict[str, Any]:
    """The run in figures, for a script."""
    steps, balance = outcome.steps, outcome.balance
    training = sum(step["seconds"] for step in steps)
    claimed = sum(step["claimed"] for step in steps)
    ends = ends_of(len(steps))
    return {
        "state": outcome.state,
        "resumable": outcome.resumable,
        "steps": len(steps),
        "seconds": round(outcome.seconds, 2),
        "training_seconds": round(training, 2),
        "reward_first": mean(steps[:ends], "reward"),
        "reward_last": mean(steps[len(steps) - ends :], "reward"),
        "tokens_per_second": sum(step["tokens"] for step in steps) / max(training, 1e-9),
        "claimed": claimed,
        "staleness": sum(step["staleness"] * step["claimed"] for step in steps) / max(claimed, 1),
        "oldest": max((step["oldest"] for step in steps), default=0),
        "late": sum(step["late"] for step in steps),
        "plane_share": sum(step["plane_seconds"] for step in steps) / max(training, 1e-9),
        "waiting_share": sum(step["waiting_seconds"] for step in steps) / max(training, 1e-9),
        "plane_seconds_per_step": mean(steps, "plane_seconds"),
        "deaths": [asdict(death) for death in outcome.deaths],
        "service_deaths": [asdict(death) for death in outcome.service_deaths],
        # The key is older than the class: within a schema version, keys keep their names.
        "books": None if balance is None else {**asdict(balance), "balanced": balance.balanced},
    }


def write_results(outcome: RunOutcome, run_dir: Path) -> dict[str, Any]:
    """Write everything, and return the summary."""
    summary = {**summarise(outcome), "engine_log": _engine_log(run_dir)}
    (run_dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    _write_lines(
        run_dir / "steps.jsonl", ({k: v for k, v in s.items() if k != "dropped"} for s in outcome.steps)
    )
    _write_lines(run_dir / "dropped.jsonl", _dropped(outcome))
    (run_dir / "report.json").write_bytes(outcome.report.to_json())
    text = "\n".join(story(summary))
    (run_dir / "report.txt").write_text(f"{text}\n\n{render_text(outcome.report)}\n")
    plots = _plots(outcome.steps)
    (run_dir / "report.html").write_text(_with_section(render_html(outcome.report), text, plots))
    for name, figure in plots.items():
        found = re.search(r"<svg .*</svg>", figure, re.DOTALL)
        if found:
            svg = found[0].replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
            (run_dir / f"{name}.svg").write_text(svg.replace(">", ">" + _SVG_STYLE, 1))
    write_run_trace(find_records(run_dir), run_dir / "trace.json")
    return summary


def story(summary: dict[str, Any]) -> Iterator[str]:
    """The run in sentences, for people."""
    yield (
        f"{summary['state']}: {summary['steps']} steps in {summary['training_seconds']:.0f} s"
        f" (with setup {summary['seconds']:.0f} s)"
    )
    ends = ends_of(summary["steps"])
    yield (
        f"reward: {summary['reward_first']:.3f} in the first {ends} steps,"
        f" {summary['reward_last']:.3f} in the last {ends}"
    )
    yield (
        f"trained on {summary['tokens_per_second']:.0f} tokens/s;"
        f" what it claimed was {summary['staleness']:.1f} weight versions old on average,"
        f" {summary['oldest']} at most"
        + (f"; {summary['late']} samples were older than the bound" if summary["late"] else "")
    )
    yield (
        f"data plane: {summary['plane_share']:.2%} of the trainer's step"
        f" ({summary['plane_seconds_per_step'] * 1e3:.1f} ms),"
        f" waiting for samples {summary['waiting_share']:.1%}"
    )
    for death in summary["deaths"]:
        again = len(death["handed_out_again"])
        yield (
            f"killed at {death['at_s']:.1f} s: {death['worker']} (process {death['pid']}), replaced by"
            f" {death['replaced_by']}; {again} samples that it had in hand were finished by others"
        )
    for death in summary["service_deaths"]:
        yield (
            f"killed at {death['at_s']:.1f} s: {death['worker']} (process {death['pid']}), replaced by"
            f" {death['replaced_by']}; nothing was lost"
        )
    for line in summary["engine_log"]:
        yield f"engine: {line}"
    yield from _balance_story(summary["books"])


def _balance_story(balance: dict[str, Any] | None) -> Iterator[str]:
    if balance is None:
        yield "samples: the run was interrupted before the trainer had begun"
        return
    parts = [f"{count} {reason}" for reason, count in balance["cleared"].items()]
    if balance["kept"]:
        parts.append(f"{balance['kept']} kept in the checkpoint")
    yield f"samples: {balance['written']} written = {' + '.join(parts)}"
    if balance["balanced"]:
        yield "check: nothing was lost, and the plane is empty"
    else:
        lost, unknown = balance["lost"], balance["unknown"]
        yield (
            f"check FAILED: the plane counted {balance['written_by_plane']} written; {len(lost)} lost,"
            f" {len(unknown)} unknown, {balance['left']} left: {[*lost, *unknown][:4]}"
        )


def _engine_log(run_dir: Path) -> list[str]:
    """What the engine said about clients that died: what it has handed out again."""
    log = run_dir / ENGINE_LOG_NAME
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return [line.rpartition(":")[2] for line in lines if "handed out again" in line]


def _dropped(outcome: RunOutcome) -> Iterator[dict[str, Any]]:
    """A line for each group that was dropped. The sample named is its first."""
    for step in outcome.steps:
        for reason, samples in step["dropped"].items():
            for sample in samples:
                yield {"step": step["step"], "reason": reason, "group_of": sample}


def _plots(steps: list[dict[str, Any]]) -> dict[str, str]:
    if len(steps) < 2:
        return {}

    def plot(title: str, value: Callable[[dict[str, Any]], float], form: str) -> str:
        points = [(float(step["step"]), value(step)) for step in steps]
        return line_plot(title, points, lambda y: format(y, form), lambda x: f"step {x:.0f}")

    return {
        "reward": plot("Mean reward", lambda step: step["reward"], ".2f"),
        "staleness": plot("Staleness, in weight versions", lambda step: step["staleness"], ".1f"),
        "plane_share": plot(
            "Data plane's share of the step", lambda step: step["plane_seconds"] / step["seconds"], ".1%"
        ),
    }


def _with_section(page: str, text: str, plots: dict[str, str]) -> str:
    lines = "".join(f"<p>{html.escape(line)}</p>" for line in text.splitlines())
    section = f'<h2>Training</h2>{lines}<div class="plots">{"".join(plots.values())}</div>'
    return page.replace("</h1>", f"</h1>\n{section}\n", 1)


def _write_lines(path: Path, records: Iterable[dict[str, Any]]) -> None:
    with path.open("w") as file:
        for record in records:
            file.write(json.dumps(record) + "\n")
