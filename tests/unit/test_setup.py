"""What ``make demo`` and ``make test`` install, and that they announce it, with commands that only print."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOR_TESTS_ONLY = ("ray", "wandb", "chromium", "redis", "prometheus", "pytest", "TransferQueue", "nixl")


def set_up(purpose: str, directory: Path) -> str:
    """What ``scripts/setup.sh`` prints, with a line ``RUN …`` for each program that would install."""
    commands = {
        "venv/bin/python": 'echo "RUN python $*"',
        "bin/apt-get": 'echo "RUN apt-get $*" >&2',
        "bin/dpkg-query": "exit 1",
        "bin/id": "echo 0",
    }
    for name, command in commands.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{command}\n")
        path.chmod(0o755)
    done = subprocess.run(
        [str(ROOT / "scripts" / "setup.sh"), purpose],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
        env={
            **os.environ,
            "PATH": f"{directory / 'bin'}:{os.environ['PATH']}",
            "VENV": str(directory / "venv"),
            "PYTHON": sys.executable,
        },
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_the_demo_installs_what_it_needs_and_nothing_more(tmp_path: Path) -> None:
    output = set_up("demo", tmp_path)
    assert "RUN apt-get" not in output
    assert re.search(r"RUN python .* -e \.\[cli,tui,web\]$", output, re.MULTILINE)
    installed = "".join(line for line in output.splitlines() if line.startswith("RUN "))
    assert not [name for name in FOR_TESTS_ONLY if name in installed]


def test_the_tests_install_everything(tmp_path: Path) -> None:
    output = set_up("test", tmp_path)
    assert re.search(r"RUN apt-get install .* chromium .* redis-server ", output)
    assert re.search(r"RUN python .* -e \.\[cli,.*transfer-queue,.*\] pytest", output)
    assert re.search(r"RUN python .* --no-deps .* nixl ", output)


@pytest.mark.parametrize(
    ("purpose", "names"),
    [
        ("demo", ["torch", "textual", "uvicorn"]),
        ("test", ["torch", "TransferQueue", "pytest", "nixl", "chromium"]),
    ],
)
def test_what_will_be_installed_is_said_before(purpose: str, names: list[str], tmp_path: Path) -> None:
    announced = set_up(purpose, tmp_path).partition("RUN ")[0]
    assert not [name for name in names if not re.search(rf"(?<!\S){name}(?!\S)", announced)]


def test_an_unknown_purpose_is_refused() -> None:
    command = [str(ROOT / "scripts" / "setup.sh"), "nosuch"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2
    assert "demo or test" in done.stderr


@pytest.mark.parametrize(("target", "purpose"), [("demo", "demo"), ("lint", "test"), ("test", "test")])
def test_a_target_sets_up_for_its_purpose(target: str, purpose: str) -> None:
    command = ["make", "-n", "--always-make", target]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True)
    assert re.findall(r"scripts/setup\.sh (\w+)", done.stdout) == [purpose]
