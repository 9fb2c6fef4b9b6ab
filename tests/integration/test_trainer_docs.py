"""The pages about trainers say what works: their scripts, and TRL's trainer in the example, are run."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from tests.warm_workers import run_warm

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
MODEL = '"Qwen/Qwen3-0.6B"'
# One group of tests runs on one worker of pytest-xdist: these have several processes each.
pytestmark = pytest.mark.xdist_group("trainers")


def scripts(page: str, directory: Path, *changes: tuple[str, str]) -> dict[str, str]:
    """Write the snippets of a page to the files that their first lines name."""
    found = {}
    for text in re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / page).read_text(), re.M | re.S):
        name = re.match(r"# (\w+\.py)\n", text)
        assert name is not None, text
        for old, new in changes:
            text = text.replace(old, new)
        (directory / name[1]).write_text(text)
        found[name[1]] = text
    return found


def run(script: Path, *arguments: str) -> str:
    done = run_warm(
        [sys.executable, str(script), *arguments],
        timeout=250,
        cwd=script.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def rewards(output: str) -> list[float]:
    return [float(value) for value in re.findall(r"^step \d+: reward ([\d.]+)$", output, re.M)]


def test_the_loop_of_ones_own_learns(tmp_path: Path) -> None:
    assert list(scripts("own_loop.md", tmp_path)) == ["job.py"]
    output = run(tmp_path / "job.py")
    assert rewards(output)[-1] > 0.8
    assert "done; evicted" in output


def test_trls_trainer_learns_although_a_rollout_process_is_killed() -> None:
    output = run(EXAMPLES / "trl_async_grpo.py", "--steps", "40", "--kill")
    assert "step 20: killed a rollout process" in output
    first, *_, last = rewards(output)
    assert last > first + 0.1


def test_the_scripts_of_the_page_about_trl_run(tmp_path: Path) -> None:
    model = tmp_path / "model"
    found = scripts(
        "trl.md",
        tmp_path,
        (MODEL, repr(str(model))),
        ("max_steps=100", "max_steps=2, use_cpu=True, bf16=False"),
        ('f"{a} + {b} ="', '"a :"'),  # what the tiny model has tokens for
        ("range(2)", "range(1)"),
    )
    assert list(found) == ["train.py", "rollout.py"]
    assert all(repr(str(model)) in text for text in found.values())
    prelude = (
        f"import sys; sys.path.insert(0, {str(EXAMPLES)!r})\n"
        "from pathlib import Path; from trl_async_grpo import do_without_a_gpu, make_model\n"
        f"do_without_a_gpu(); make_model(Path({str(model)!r}))\n"
    )
    (tmp_path / "train.py").write_text(prelude + found["train.py"])
    assert "train_runtime" in run(tmp_path / "train.py")
