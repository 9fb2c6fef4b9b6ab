"""The tutorial and the examples do what they say: every snippet is run, and the notebook is the same text."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.warm_workers import run_warm

ROOT = Path(__file__).parents[2]
TUTORIAL = ROOT / "docs" / "tutorial.md"
NOTEBOOK = ROOT / "docs" / "tutorial.ipynb"


def snippets(path: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE)


def cells(path: Path) -> list[tuple[str, str]]:
    """The markdown and code of a document, in order."""
    parts = re.split(r"^```python\n(.*?)^```\n", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    kinds = ("markdown", "code")
    return [(kinds[i % 2], part.strip()) for i, part in enumerate(parts) if part.strip()]


def run_together(path: Path) -> None:
    code = "\n".join(snippets(path))
    done = run_warm([sys.executable, "-c", code], timeout=240)
    assert done.returncode == 0, done.stderr


def test_the_seven_steps_run_from_top_to_bottom() -> None:
    assert len(snippets(TUTORIAL)) == 7
    run_together(TUTORIAL)


def test_the_notebook_is_the_tutorial_and_runs() -> None:
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert [(cell.cell_type, cell.source.strip()) for cell in notebook.cells] == cells(TUTORIAL)
    assert not any(cell.get("outputs") for cell in notebook.cells), "committed without outputs"
    # In a process of its own: a kernel's event loop leaves things behind that pytest warns about.
    code = (
        "import nbformat, nbclient, sys\n"
        "notebook = nbformat.read(sys.argv[1], as_version=4)\n"
        "nbclient.NotebookClient(notebook, timeout=200, kernel_name='python3').execute()\n"
        "assert 'the best action' in str(notebook.cells)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(NOTEBOOK)], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr


def run_example(name: str, **environment: Any) -> str:
    done = run_warm(
        [sys.executable, str(ROOT / "examples" / name)],
        timeout=280,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_minimal_example_runs_and_is_minimal() -> None:
    assert len(run_example("minimal.py").splitlines()) == 2
    assert len((ROOT / "examples" / "minimal.py").read_text().splitlines()) <= 30


def test_every_kind_of_row_is_as_its_page_says() -> None:
    run_together(ROOT / "docs" / "rows.md")


def test_the_multimodal_example_stores_shared_images_once() -> None:
    *groups, summary = run_example("multimodal.py").splitlines()
    assert [line.split()[0] for line in groups] == ["p0_g0", "p1_g0", "p2_g0", "p3_g0"]
    sent, held = (float(word) for word in summary.split() if word[0].isdigit())
    assert held <= sent * (1 / 8 + 0.05)


def test_the_loader_example_reads_every_sample() -> None:
    assert run_example("torch_dataloader.py").splitlines()[-1] == "64 of 64 samples; 0 are left"


def test_the_agents_example_trains_on_every_episode_that_was_finished() -> None:
    lines = run_example("agents_asyncio.py").splitlines()
    assert lines[0].startswith("48 of 50 agents finished; trained on 48 episodes with ")
    assert lines[1] == "0 samples are left"


@pytest.mark.cluster
def test_the_ray_example_hands_out_whole_groups() -> None:
    lines = run_example("ray_actors.py").splitlines()
    assert len(lines) == 4
    assert all(line.endswith("(8, 5)") for line in lines)
