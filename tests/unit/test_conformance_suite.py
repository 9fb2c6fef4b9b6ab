"""The suite as a product: it quotes the whole contract, its table is current, and its plugin runs."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from tests.warm_workers import run_warm

import rlplane.testing
from rlplane.testing import checks

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
CONTRACT = (ROOT / "docs" / "contract.md").read_text(encoding="utf-8")
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "promises_table.py"))


def run_pytest(*arguments, cwd):
    command = [sys.executable, "-m", "pytest", "-p", "no:slipcover", "-p", "no:cacheprovider", *arguments]
    return run_warm(command, cwd=cwd, timeout=280)


def test_listing_the_checks_does_not_hide_the_function_that_lists_them():
    assert checks() == rlplane.testing.checks()


def test_every_sentence_of_the_contract_is_quoted_by_a_check():
    assert SCRIPT["unproven"](CONTRACT) == []


def test_every_quote_is_in_the_contract_or_in_the_docstrings():
    assert SCRIPT["quotes_from_nowhere"](CONTRACT) == []


def test_the_table_of_promises_is_up_to_date():
    table = (ROOT / "docs" / "promises.md").read_text(encoding="utf-8")
    assert table == SCRIPT["promises_table"](CONTRACT), "run: python scripts/promises_table.py"


def test_a_sentence_that_no_check_quotes_is_found():
    added = CONTRACT.replace("## Reading\n", "## Reading\n\n- It also makes coffee.\n")
    assert SCRIPT["unproven"](added) == ["It also makes coffee."]


def test_the_name_of_a_check_is_a_sentence():
    for check in checks():
        assert re.fullmatch(r"[a-z0-9]+(_[a-z0-9]+){2,}", check.name), check.name


def test_the_plugin_loads_nothing_heavy_into_a_run_that_does_not_ask_for_it():
    heavy = "{'torch', 'tensordict', 'hypothesis'}"
    code = f"import rlplane.testing.plugin, sys; assert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_plugin_runs_each_promise_as_a_test_and_nothing_else(tmp_path):
    (tmp_path / "test_other.py").write_text("def test_other(): assert False\n")
    planes = f"--data-plane={HERE / 'reference_adapter.py'}:ReferencePlanes"
    result = run_pytest(planes, "-v", "-rs", "-k", "tail or device", cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "::the_last_samples_come_as_a_tail PASSED" in result.stdout
    assert (
        "not applicable: this machine has no accelerator" in result.stdout or "device PASSED" in result.stdout
    )
    assert "test_other" not in result.stdout


def test_the_plugin_quotes_the_promise_that_an_adapter_breaks(tmp_path):
    (tmp_path / "planes.py").write_text(
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from tests.unit.broken_adapters import ForgetsTheTail\n"
        "from tests.unit.reference_adapter import ReferencePlanes\n"
        "planes = ReferencePlanes(ForgetsTheTail, time_scale=0.05)\n"
    )
    result = run_pytest("--data-plane=planes.py:planes", "-k", "the_last_samples", cwd=tmp_path)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "ForgetsTheTail breaks a promise: the last samples come as a tail" in result.stdout
    assert "promised: `blocking=True` waits for `batch_size` samples, or for the tail" in result.stdout
    assert "1 failed" in result.stdout


def test_the_plugin_runs_promises_beside_the_tests_that_are_named(tmp_path):
    (tmp_path / "test_other.py").write_text("def test_tags_of_ours(): pass\n")
    planes = f"--data-plane={HERE / 'reference_adapter.py'}:make_client"
    result = run_pytest(planes, "test_other.py", "-k", "tags_of_ours or tags_are_merged", cwd=tmp_path)
    assert "2 passed" in result.stdout, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nonsense", "it should be like mypkg.planes:make_client"),
        ("no_such_module:make", "cannot import 'no_such_module'"),
        ("nowhere.py:make", "there is no file"),
        ("os:no_such_factory", "'os' has no 'no_such_factory'"),
    ],
)
def test_a_factory_that_cannot_be_found_is_a_usage_error(spec, message, tmp_path):
    result = run_pytest(f"--data-plane={spec}", cwd=tmp_path)
    assert result.returncode == 4
    assert message in result.stderr


def test_the_snippets_of_the_guide_run(tmp_path):
    guide = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")
    snippets = re.findall(r"^```python\n(.*?)^```$", guide, flags=re.MULTILINE | re.DOTALL)
    assert len(snippets) == 5
    (tmp_path / "test_guide.py").write_text("\n".join(snippets), encoding="utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    # All checks have run when the module was imported; of the tests, the state machine and a few will do.
    result = run_pytest("test_guide.py", "-v", "-k", "MyPlane or tags_are_merged", cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "2 passed" in result.stdout
