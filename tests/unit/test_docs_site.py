"""The site of the docs builds in strict mode, has every public name, and needs no other host."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

import rlplane
from rlplane import errors

ROOT = Path(__file__).parents[2]
TROUBLESHOOTING = (ROOT / "docs" / "troubleshooting.md").read_text()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(target)]
    # What the theme says about its own future is for maintainers, not for a test.
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return target


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    pages = "".join(page.read_text() for page in (site / "api").glob("*.html"))
    identifiers = set(re.findall(r'id="([\w.]+)"', pages))
    shown = {identifier.rpartition(".")[2] for identifier in identifiers}
    assert set(rlplane.__all__) - shown == {"__version__"}
    assert "rlplane.DataPlaneClient.claim_meta" in identifiers


def test_docstrings_are_shown_as_text(site: Path) -> None:
    for page in (site / "api").glob("*.html"):
        assert ":class:" not in page.read_text(), page.name


class _Fetches(HTMLParser):
    """Collects what a browser fetches by itself: not links, which are followed by people."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag == "link" and values.get("rel") in {"canonical", "next", "prev"}:
            return
        self.found += [value for name in ("src", "href") if tag != "a" and (value := values.get(name))]


def test_a_reader_s_browser_asks_no_other_host(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        fetches = _Fetches()
        fetches.feed(page.read_text())
        assert fetches.found
        assert not [url for url in fetches.found if re.match(r"(https?:)?//", url)], page.name
    # The theme takes Mermaid from another host only where the page has not brought it.
    assert "mermaid" in (site / "assets" / "mermaid.js").read_text()[:200]
    assert "assets/mermaid.js" in (site / "index.html").read_text()


def test_the_search_finds_a_page_by_its_words(site: Path) -> None:
    index = (site / "search" / "search_index.json").read_text()
    assert "troubleshooting.html" in index and "RLPLANE_CONTROLLER_ADDRESS" in index


def messages_in_source() -> Iterator[str]:
    """Every text of the package that may be a message, with … for each value that is filled in."""
    for path in (ROOT / "src" / "rlplane").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield re.sub(r"\{[^}]*\}", "…", node.value)
            elif isinstance(node, ast.JoinedStr):
                yield "".join(
                    str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values
                )


def has_in_order(message: str, parts: list[str]) -> bool:
    start = 0
    for part in parts:
        start = message.find(part, start)
        if start < 0:
            return False
        start += len(part)
    return True


def test_the_messages_of_the_troubleshooting_page_are_messages_of_the_package() -> None:
    headings = re.findall(r"^### `(.*)`$", TROUBLESHOOTING, re.MULTILINE)
    assert len(headings) > 40
    source = {message for message in messages_in_source() if " " in message and "\n" not in message}
    # The quotes around a value come from its repr, so they are not in the source.
    parts = {heading: [part.strip(" '") for part in heading.split("…")] for heading in headings}
    unknown = [name for name in headings if not any(has_in_order(text, parts[name]) for text in source)]
    assert not unknown


def test_every_error_is_on_the_troubleshooting_page() -> None:
    assert [name for name in errors.__all__ if f"`{name}`" not in TROUBLESHOOTING] == []
