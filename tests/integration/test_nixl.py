"""Real NIXL, in a process of its own that ends without unloading it.

A process that has made a NIXL agent, and does nothing else, crashes in the unloading of the libnl that NIXL
brings along. The code of the tests is in ``nixl_transfers.py``.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from tests.warm_workers import run_warm


@pytest.mark.skipif(
    importlib.util.find_spec("nixl") is None, reason="the extra rlplane[nixl] is not installed"
)
def test_real_transfers_are_measured() -> None:
    tests = str(Path(__file__).with_name("nixl_transfers.py"))
    program = f"import os, pytest; code = pytest.main(['-q', '-p', 'no:cacheprovider', {tests!r}])"
    done = run_warm(
        [sys.executable, "-c", f"{program}; print(flush=True); os._exit(code)"],
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout
