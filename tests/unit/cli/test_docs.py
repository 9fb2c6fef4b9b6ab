"""What docs/cli.md and docs/dashboards.md show is what there is."""

import re
import shlex
from pathlib import Path

import pytest
from tests.simulated_run import SimulatedRun

from rlplane.cli.commands import COMMANDS, build_app
from rlplane.sinks.prometheus import render
from rlplane.tui.screens import KeysScreen

DOCS = Path(__file__).parents[3] / "docs"
CLI, DASHBOARDS = (DOCS / "cli.md").read_text(), (DOCS / "dashboards.md").read_text()


def shown_commands() -> list[str]:
    blocks = re.findall(r"```console\n(.*?)```", CLI + DASHBOARDS, re.DOTALL)
    lines = (line for block in blocks for line in block.splitlines())
    return [line.removeprefix("$ ").partition("#")[0].strip() for line in lines if line.startswith("$ ")]


@pytest.mark.parametrize("line", shown_commands())
def test_a_command_in_the_docs_can_be_called_so(line: str) -> None:
    program, *arguments = shlex.split(line)
    assert program == "rlplane"
    if arguments != ["--help"]:
        build_app().parse_args(arguments, exit_on_error=False, print_error=False)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_example_of_a_command_can_be_called_so(name: str) -> None:
    _, *arguments = shlex.split(COMMANDS[name].example)
    build_app().parse_args(arguments, exit_on_error=False, print_error=False)


def test_every_command_is_in_the_docs() -> None:
    assert set(re.findall(r"^\| `rlplane (\w+)`", CLI, re.MULTILINE)) == set(COMMANDS)


def test_every_metric_is_in_the_docs_and_none_that_is_not_there() -> None:
    families = set(re.findall(r"^# TYPE (\S+)", render(SimulatedRun().step)[0].decode(), re.MULTILINE))
    table = DASHBOARDS.partition("| metric |")[2].partition("\n\n")[0]
    documented = {name for text in re.findall(r"`(rlplane_\S+)`", table) for name in spelled_out(text)}
    assert documented == families - {"rlplane_run_info"}


def spelled_out(text: str) -> list[str]:
    found = re.fullmatch(r"(.*)\{(.*)\}(.*)", text)
    return [f"{found[1]}{part}{found[3]}" for part in found[2].split(",")] if found else [text]


def test_every_picture_of_the_docs_is_there() -> None:
    images = re.findall(r"\]\((images/[^)]+)\)", CLI + DASHBOARDS)
    assert len(images) == 3
    assert all((DOCS / image).stat().st_size > 10_000 for image in images)


def test_every_key_of_the_help_is_in_the_docs() -> None:
    for keys, _ in KeysScreen.KEYS:
        for key in keys.split():
            if key not in ("or", "tab", "esc"):
                assert key.lower() in DASHBOARDS.lower(), key
