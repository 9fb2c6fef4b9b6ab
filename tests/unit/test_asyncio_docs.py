"""The snippets of docs/asyncio.md run, and the asyncio client has every method of the blocking one."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rlplane.adapters.async_client import AsyncPlaneClient
from rlplane.async_interface import AsyncDataPlaneClient
from rlplane.interfaces import DataPlaneClient
from rlplane.observability.async_client import AsyncMetricsDataPlaneClient
from rlplane.testing.async_adapter import BlockingClient

DOCUMENT = Path(__file__).parents[2] / "docs" / "asyncio.md"
METHODS = [name for name in vars(DataPlaneClient) if not name.startswith("_")]


def test_the_snippets_run():
    snippets = re.findall(r"^```python\n(.*?)^```", DOCUMENT.read_text(), re.DOTALL | re.MULTILINE)
    assert len(snippets) == 3
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", "\n".join(snippets)],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("method", METHODS)
def test_a_method_has_the_same_arguments_on_either_client(method):
    expected = inspect.signature(getattr(DataPlaneClient, method)).parameters
    for kind in (AsyncDataPlaneClient, AsyncPlaneClient, AsyncMetricsDataPlaneClient, BlockingClient):
        assert inspect.signature(getattr(kind, method)).parameters == expected, kind.__name__
        is_awaited = kind is not BlockingClient and method not in ("step", "mark_step", "log")
        assert inspect.iscoroutinefunction(getattr(kind, method)) is is_awaited
