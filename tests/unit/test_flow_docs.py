"""The snippets of docs/flow.md run, one after the other."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tests.warm_workers import run_warm

GUIDE = Path(__file__).parents[2] / "docs" / "flow.md"


def test_the_snippets_of_the_guide_to_flow_control_run(tmp_path: Path) -> None:
    snippets = re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(encoding="utf-8"), re.M | re.S)
    assert len(snippets) == 7
    script = tmp_path / "guide.py"
    script.write_text("\n".join(snippets), encoding="utf-8")
    done = run_warm([sys.executable, str(script)], timeout=300)
    assert done.returncode == 0, done.stderr
