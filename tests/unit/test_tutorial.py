"""The tutorial and the examples do what they say: every snippet is run, and the notebook is the same text."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

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
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
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


def test_the_snippet_for_nemo_rl_runs() -> None:
    run_together(ROOT / "examples" / "nemo_rl.md")


def run_example(name: str, **environment: Any) -> str:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name)],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_minimal_example_runs_and_is_minimal() -> None:
    assert len(run_example("minimal.py").splitlines()) == 2
    assert len((ROOT / "examples" / "minimal.py").read_text().splitlines()) <= 30


def test_the_loader_example_reads_every_sample() -> None:
    assert run_example("torch_dataloader.py").splitlines()[-1] == "64 of 64 samples; 0 are left"


@pytest.mark.cluster
def test_the_ray_example_hands_out_whole_groups() -> None:
    lines = run_example("ray_actors.py").splitlines()
    assert len(lines) == 4
    assert all(line.endswith("(8, 5)") for line in lines)
