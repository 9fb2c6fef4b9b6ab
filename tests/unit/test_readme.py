"""The README's example runs and prints what a reader would expect; its links lead somewhere."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tests.warm_workers import run_warm

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_example_of_twenty_lines_runs():
    (snippet,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len([line for line in snippet.splitlines() if line.strip()]) <= 20
    done = run_warm([sys.executable, "-c", snippet], timeout=300)
    assert done.returncode == 0, done.stderr
    assert (
        done.stdout.strip() == "['b', 'c', 'd'] tensor([0.0000, 1.0000, 0.5000]) [[0], [0, 1, 2, 3], [0, 1]]"
    )


def test_every_link_of_the_documents_leads_to_a_file():
    for document in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", document.read_text()):
            if "://" not in target:
                assert (document.parent / target).exists(), f"{document.name} links to {target}"
