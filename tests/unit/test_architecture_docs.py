"""docs/architecture.md names files, classes and functions that exist."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "rlplane"
TEXT = (ROOT / "docs" / "architecture.md").read_text()
PRODUCTS = {"TransferQueue", "TensorDict", "PyTorch"}


@functools.cache  # not when tests are collected, which every process does
def defined_names() -> tuple[dict[str, set[str]], set[str]]:
    """The classes of the package with their members, and everything else that it gives a name to."""
    classes: dict[str, set[str]] = {}
    others: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        others.add(path.stem)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                members = classes.setdefault(node.name, set())
                for part in ast.walk(node):
                    if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
                        members.add(part.name)
                    elif isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                        members.add(part.target.id)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                others.add(node.name)
                others.update(argument.arg for argument in [*node.args.args, *node.args.kwonlyargs])
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                others.add(node.target.id)
    return classes, others


ENGINES = {"memory", "shm", "simple", "mooncake_cpu"}


def is_file(name: str) -> bool:
    return (PACKAGE / name).exists() or (ROOT / name).exists() or any(PACKAGE.rglob(name))


def is_known(name: str) -> bool:
    """Whether a name, as it is written in the document, is that of something in the package."""
    classes, others = defined_names()
    first, _, member = name.partition(".")
    if first in classes:
        return not member or member in classes[first]
    if member:
        return (PACKAGE / f"{name.replace('.', '/')}.py").exists() or (first in others and member in others)
    return name in others or name in ENGINES


def names_in_code_font(text: str) -> list[str]:
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"`([^`]+)`", prose)


def names_in_diagrams(text: str) -> list[str]:
    """What is called in a diagram, and its names of several words, such as ``PlaneClient``."""
    fences = "".join(re.findall(r"^```(?!python)\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
    called = re.findall(r"([A-Za-z_][\w.]*)\(", fences)
    joined = re.findall(r"\b(?:[A-Z][a-z]+){2,}(?:\.\w+)?", fences)
    return [name for name in [*called, *joined] if name not in PRODUCTS]


def wrong_names(text: str) -> list[str]:
    wrong = []
    for code in names_in_code_font(text):
        if re.fullmatch(r"[\w/.-]+\.(py|toml|json)|[\w/]+/", code):
            if not (code == "final_snapshot.json" or is_file(code)):
                wrong.append(code)
        elif re.fullmatch(r"[A-Za-z_][\w.]*", code) and not is_known(code):
            wrong.append(code)
    return wrong + [name for name in names_in_diagrams(text) if not is_known(name)]


def test_every_name_in_the_document_is_that_of_something_that_exists() -> None:
    assert wrong_names(TEXT) == []


def test_the_document_names_the_parts_of_the_spine() -> None:
    found = {*names_in_code_font(TEXT), *names_in_diagrams(TEXT)}
    spine = {
        "PlaneClient",
        "Link",
        "ControlService",
        "ControlState",
        "StorageHost",
        "StorageClient",
        "Server",
    }
    assert spine <= found
    assert TEXT.count("```mermaid\n") == 8


def test_no_line_of_a_diagram_is_cut_by_a_semicolon() -> None:
    # Mermaid takes it for the end of a statement, and then draws nothing at all.
    diagrams = re.findall(r"^```mermaid\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
    assert [line for diagram in diagrams for line in diagram.splitlines() if ";" in line] == []


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("in `service/nosuch.py`", ["service/nosuch.py"]),
        ("in `nosuch/`", ["nosuch/"]),
        ("a `NoSuchClass`", ["NoSuchClass"]),
        ("by `ControlState.nosuch`", ["ControlState.nosuch"]),
        ("by `no_such_function`", ["no_such_function"]),
        ("```mermaid\nA->>B: ControlState.nosuch(1)\n```\n", ["ControlState.nosuch", "ControlState.nosuch"]),
        ("```mermaid\nparticipant A as NoSuchClass\n```\n", ["NoSuchClass"]),
        ("by `ControlState.put` in `control/state.py`, with `put_samples`", []),
    ],
)
def test_a_name_of_nothing_is_found(text: str, wrong: list[str]) -> None:
    assert wrong_names(text) == wrong
