"""The snippets of docs/metrics.md run, from top to bottom."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

import pytest

from rlplane.metrics.aggregator import _parser
from rlplane.metrics.snapshot import (
    MAX_OPS,
    MAX_PARTITIONS,
    MAX_TASKS,
    MAX_TIMELINE,
    MAX_WORKERS,
    SessionState,
)

PAGE = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()


def test_the_snippets_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # Runs of others on this machine must not be found; and a Unix socket's path must be short.
    with tempfile.TemporaryDirectory() as runtime:
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
        run_snippets(monkeypatch)
    assert os.path.exists("run/report.html")


def run_snippets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RLPLANE_METRICS_ADDRESS", raising=False)
    snippets = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    subscriber = next(code for code in snippets if "list_runs" in code)
    assert len(subscriber.strip().splitlines()) <= 10, "the subscriber is promised in ten lines"
    # On the page it comes after the end of the run; it needs one that goes on.
    order = [code for code in snippets if code is not subscriber]
    order.insert(2, subscriber)
    names: dict[str, object] = {}
    for code in order:
        exec(compile(code, "docs/metrics.md", "exec"), names)


def test_the_page_names_every_state_bound_and_option() -> None:
    for state in SessionState:
        assert f"| {state.value} |" in PAGE
    for bound in (MAX_PARTITIONS, MAX_WORKERS, MAX_OPS, MAX_TASKS, MAX_TIMELINE):
        assert str(bound) in PAGE
    for action in _parser()._actions:
        if action.help and action.help != "==SUPPRESS==" and action.dest != "help":
            assert action.option_strings[0] in PAGE, f"{action.option_strings[0]} is not documented"
