"""The snippets of docs/observability.md run, in their order, as a reader would run them."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

from tests.warm_workers import run_warm

DOCUMENT = Path(__file__).parents[2] / "docs" / "observability.md"


def test_the_snippets_run(tmp_path):
    snippets = re.findall(r"^```python\n(.*?)^```", DOCUMENT.read_text(), re.DOTALL | re.MULTILINE)
    assert len(snippets) == 9
    # In a process of its own, as a reader would: wandb looks at its environment once per process.
    environment = os.environ | {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    environment |= {f"WANDB_{name}": str(tmp_path) for name in ("DIR", "CACHE_DIR", "CONFIG_DIR")}
    code = "\n".join(snippets)
    done = run_warm(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    trace = json.loads((tmp_path / "run" / "trace.json").read_text())
    assert "register" in [event["name"] for event in trace["traceEvents"]]


def test_the_tables_name_what_there_is():
    from rlplane.config import load_config
    from rlplane.factory import build_data_plane_client
    from rlplane.observability import DataPlaneEvent, MetricsDataPlaneClient
    from rlplane.sinks import _OURS

    text = DOCUMENT.read_text()
    with MetricsDataPlaneClient(build_data_plane_client(load_config("local"))) as client:
        snapshot = client.snapshot()
    for name in (*DataPlaneEvent.__annotations__, *_OURS, *snapshot):
        assert f"`{name}`" in text
