"""The files that carry the project are what GitHub and the release expect."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))


def schema_faults(schema: str, *files: Path) -> str:
    """What check-jsonschema has to say; its schemas come with it, so that nothing is fetched."""
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def load(path: Path) -> dict[str, Any]:
    content = yaml.safe_load(path.read_text())
    assert isinstance(content, dict)
    return content


@pytest.mark.parametrize(
    ("schema", "files"),
    [
        ("vendor.github-workflows", WORKFLOWS),
        ("custom.github-workflows-require-timeout", WORKFLOWS),
        ("vendor.dependabot", [GITHUB / "dependabot.yml"]),
        ("vendor.github-issue-config", [GITHUB / "ISSUE_TEMPLATE" / "config.yml"]),
        ("vendor.github-issue-forms", [GITHUB / "ISSUE_TEMPLATE" / name for name in ("bug.yml", "idea.yml")]),
    ],
)
def test_github_can_read_its_files(schema: str, files: list[Path]) -> None:
    assert files
    assert not schema_faults(schema, *files)


def test_a_workflow_with_a_typing_mistake_would_be_noticed(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yml"
    wrong.write_text((GITHUB / "workflows" / "ci.yml").read_text().replace("runs-on:", "run-on:"))
    assert "run-on" in schema_faults("vendor.github-workflows", wrong)


def test_the_workflows_run_targets_and_scripts_that_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for path in WORKFLOWS:
        text = path.read_text()
        assert set(re.findall(r"run: make ([a-z]+)", text)) <= targets, path.name
        for script in re.findall(r"\bscripts/[\w.]+", text):
            assert (ROOT / script).exists(), f"{path.name} runs {script}"
    used = "".join(path.read_text() for path in WORKFLOWS)
    assert {"lint", "test", "docs"} <= set(re.findall(r"run: make ([a-z]+)", used))


def test_the_tests_run_on_python_3_11_to_3_14() -> None:
    job = load(GITHUB / "workflows" / "ci.yml")["jobs"]["test"]
    assert job["strategy"]["matrix"]["python"] == ["3.11", "3.12", "3.13", "3.14"]


def test_only_the_job_that_publishes_can_prove_who_it_is_to_the_package_index() -> None:
    release = load(GITHUB / "workflows" / "release.yml")
    assert release["permissions"] == {"contents": "read"}
    can = [name for name, job in release["jobs"].items() if "id-token" in job.get("permissions", {})]
    assert can == ["publish"]
    assert release["jobs"]["publish"]["environment"] == "release"
    assert "secrets." not in (GITHUB / "workflows" / "release.yml").read_text()


def test_the_hooks_before_a_commit_are_the_linters_of_the_project() -> None:
    repos = load(ROOT / ".pre-commit-config.yaml")["repos"]
    local = {hook["id"]: hook for repo in repos if repo["repo"] == "local" for hook in repo["hooks"]}
    assert local.keys() == {"ruff", "ruff-format", "mypy"}
    for name, hook in local.items():
        assert hook["entry"].startswith(f".venv/bin/{name.partition('-')[0]}"), name
        assert hook["language"] == "system"
    shared = {hook["id"] for repo in repos if repo["repo"] != "local" for hook in repo["hooks"]}
    assert {"end-of-file-fixer", "trailing-whitespace", "check-yaml", "check-toml"} <= shared


def test_every_file_that_has_an_owner_exists() -> None:
    lines = [line.split() for line in (GITHUB / "CODEOWNERS").read_text().splitlines()]
    rules = [line for line in lines if line and line[0] != "#"]
    assert rules[0][0] == "*"
    for path, *owners in rules:
        assert owners and all(owner.startswith("@") for owner in owners), path
        assert path == "*" or (ROOT / path.lstrip("/")).exists(), path


def release_notes(*args: str) -> str:
    spec = importlib.util.spec_from_file_location("release_notes", ROOT / "scripts" / "release_notes.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    notes: str = module.release_notes(*args)
    return notes


CHANGELOG = """# Changelog

## Unreleased

- later

## 1.2.0 - 2030-05-01

### Added

- a thing

## 1.1.0 - 2030-04-01

- older
"""


def test_the_notes_of_a_release_are_its_section_of_the_changelog() -> None:
    assert release_notes("v1.2.0", "1.2.0", CHANGELOG) == "### Added\n\n- a thing\n"
    assert release_notes("v1.1.0", "1.1.0", CHANGELOG) == "- older\n"


@pytest.mark.parametrize(
    ("tag", "version", "reason"),
    [
        ("v1.2.0", "1.3.0", "the tag must be v1.3.0"),
        ("1.2.0", "1.2.0", "the tag must be v1.2.0"),
        ("v1.3.0", "1.3.0", "CHANGELOG.md needs a section"),
    ],
)
def test_a_release_with_the_wrong_version_or_without_notes_is_refused(
    tag: str, version: str, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        release_notes(tag, version, CHANGELOG)


def test_the_changelog_has_a_place_for_what_comes_next() -> None:
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0].startswith("Unreleased")
    version = re.compile(r"\d+\.\d+\.\d+ - (\d{4}-\d{2}-\d{2}( \[YANKED\])?|not published)")
    for heading in headings[1:]:
        assert version.fullmatch(heading), heading
