#!/usr/bin/env python3
"""Print what the changelog says about a version, for the release of that name.

``release_notes.py v0.2.0`` fails unless the tag, ``pyproject.toml`` and a dated section of ``CHANGELOG.md``
agree, so that a release cannot have the wrong version or no notes.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def release_notes(tag: str, version: str, changelog: str) -> str:
    """The section of ``changelog`` about ``version``, without its heading."""
    if tag != f"v{version}":
        raise ValueError(f"pyproject.toml has version {version}: the tag must be v{version}, not {tag}")
    heading = rf"^## \[?{re.escape(version)}\]? - \d{{4}}-\d{{2}}-\d{{2}}$"
    found = re.search(rf"{heading}\n(.*?)(?=^## |\Z)", changelog, re.DOTALL | re.MULTILINE)
    if found is None or not found[1].strip():
        raise ValueError(f"CHANGELOG.md needs a section '## {version} - YYYY-MM-DD' that says what changed")
    return found[1].strip() + "\n"


def main() -> int:
    if len(sys.argv) != 2:
        print(f"usage: {sys.argv[0]} TAG", file=sys.stderr)
        return 2
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    try:
        print(release_notes(sys.argv[1], version, (ROOT / "CHANGELOG.md").read_text()), end="")
    except ValueError as error:
        print(f"release_notes: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
