"""The snippets of docs/observability.md run, in their order, as a reader would run them."""

from __future__ import annotations

import json
import re
from pathlib import Path

DOCUMENT = Path(__file__).parents[2] / "docs" / "observability.md"


def test_the_snippets_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for name in ("DIR", "CACHE_DIR", "CONFIG_DIR"):
        monkeypatch.setenv(f"WANDB_{name}", str(tmp_path))
    snippets = re.findall(r"^```python\n(.*?)^```", DOCUMENT.read_text(), re.DOTALL | re.MULTILINE)
    assert len(snippets) == 7
    names: dict[str, object] = {"__name__": "snippets"}
    try:
        for snippet in snippets:
            exec(compile(snippet, str(DOCUMENT), "exec"), names)
    finally:
        if "run" in names:
            names["run"].finish()  # type: ignore[attr-defined]
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
