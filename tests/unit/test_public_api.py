"""The names of the package: complete, sorted, loaded when used."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.warm_workers import run_warm

import rlplane
from rlplane import errors, interfaces
from rlplane.columns import codec, io

SOURCE = Path(rlplane.__file__)


def test_all_is_sorted_and_has_no_doubles() -> None:
    assert rlplane.__all__ == sorted(set(rlplane.__all__))


@pytest.mark.parametrize("name", rlplane.__all__)
def test_every_public_name_can_be_used(name: str) -> None:
    assert getattr(rlplane, name) is not None


def test_all_names_what_type_checkers_are_shown() -> None:
    shown = {
        alias.name
        for node in ast.walk(ast.parse(SOURCE.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rlplane.")
        for alias in node.names
    }
    assert {*shown, "__version__"} == set(rlplane.__all__)


def test_every_error_and_every_part_of_the_contract_is_public() -> None:
    assert set(errors.__all__) <= set(rlplane.__all__)
    assert set(interfaces.__all__) <= set(rlplane.__all__)
    helpers = {
        "as_column",
        "row_lengths",
        "LENGTH_TAG",
        "PAD_TO",
        "TOKEN_ALIGNED_FIELDS",
    }  # for adapters, from the module that owns them
    assert {*codec.__all__, *io.__all__} - helpers <= set(rlplane.__all__)


def test_a_public_name_is_the_one_of_its_module() -> None:
    assert rlplane.KVBatchMeta is interfaces.KVBatchMeta
    assert rlplane.ConfigError is errors.ConfigError


def test_dir_lists_names_before_they_are_loaded() -> None:
    assert set(rlplane.__all__) <= set(dir(rlplane))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'rlplane' has no attribute 'nope'"):
        _ = rlplane.nope


def test_the_version_is_that_of_the_distribution() -> None:
    from importlib.metadata import version

    assert rlplane.__version__ == version("rlplane")


def layout_comment() -> str:
    return "\n".join(line for line in SOURCE.read_text().splitlines() if line.startswith("#"))


def wrong_in_layout(comment: str) -> dict[str, list[str]]:
    """What a layout comment lacks, and what it names that is not there.

    It names a module as ``name.py`` and a package as ``name/``, with the packages that it is in before it.
    """
    parts = {
        f"{path.name}/" if path.is_dir() else path.name
        for path in SOURCE.parent.iterdir()
        if (path.is_dir() and path.name != "__pycache__") or (path.suffix == ".py" and path != SOURCE)
    }
    named = set(re.findall(r"(?<!\S)([\w/]+(?:\.py|/))(?=[\s,;:.]|$)", comment))
    top = {re.sub(r"/.*", "/", name) for name in named}
    absent = [name for name in sorted(named) if not (SOURCE.parent / name).exists()]
    return {"missing": sorted(parts - top), "not there": absent}


def test_the_layout_comment_names_every_part_of_the_package_and_nothing_else() -> None:
    assert wrong_in_layout(layout_comment()) == {"missing": [], "not there": []}


@pytest.mark.parametrize("name", ["cli/", "demo/", "errors.py"])
def test_a_part_that_the_layout_comment_forgets_is_found(name: str) -> None:
    assert wrong_in_layout(layout_comment().replace(f" {name}", " ")) == {"missing": [name], "not there": []}


@pytest.mark.parametrize("name", ["nosuch.py", "cli/nosuch.py", "nosuch/", "adapters/nosuch/"])
def test_a_name_in_the_layout_comment_that_is_not_there_is_found(name: str) -> None:
    assert wrong_in_layout(f"{layout_comment()}\n#   {name}  what it is") == {
        "missing": [],
        "not there": [name],
    }


@pytest.mark.parametrize(
    "statement",
    [
        "import rlplane",
        "from rlplane import load_config; load_config('shm')",
        "import rlplane.interfaces, rlplane.errors, rlplane.columns.sharding",
        "import rlplane.factory",
    ],
)
def test_what_needs_no_tensors_loads_no_torch(statement: str) -> None:
    script = f"{statement}\nimport sys\nassert 'torch' not in sys.modules and 'yaml' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


DOCS = [SOURCE.parents[2] / "docs" / name for name in ("concepts.md", "configuration.md", "quickstart.md")]
SNIPPETS = [
    pytest.param(snippet, id=f"{path.stem}-{number}")
    for path in DOCS
    for number, snippet in enumerate(re.findall(r"^```python\n(.*?)^```", path.read_text(), re.M | re.S))
]


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_a_snippet_of_the_documentation_runs(snippet: str, tmp_path: Path) -> None:
    # From a file, because a snippet that starts processes has to be importable by them.
    script = tmp_path / "snippet.py"
    script.write_text(snippet)
    done = run_warm([sys.executable, str(script)])
    assert done.returncode == 0, done.stderr
