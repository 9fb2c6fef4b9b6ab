"""The table of promises: which check proves which sentence of the contract.

``python scripts/promises_table.py`` writes it.
"""

import inspect
import re
from pathlib import Path

from rlplane.interfaces import DataPlaneClient
from rlplane.testing.promises import PromiseCheck, checks

DOCS = Path(__file__).parents[1] / "docs"
_HEAD = """# The promises and their checks

Every sentence of [the contract](contract.md), and the checks of `rlplane.testing` that prove it for an
adapter. [Testing an adapter](testing.md) tells how to run them. This file is written by
`python scripts/promises_table.py`; a test fails when it is out of date.

{count} checks. One that is marked with a feature can be declared as a limitation under that name too.
"""
_DOCSTRINGS = "In the docstrings of `DataPlaneClient`"


def contract_sections(contract: str) -> dict[str, str]:
    """The sections of the contract that promise something, by their title, each on one line."""
    parts = re.split(r"^## (.*)$", contract, flags=re.MULTILINE)[1:]
    return {title: _flat(text) for title, text in zip(parts[::2], parts[1::2], strict=True)}


def promises_table(contract: str) -> str:
    """The whole of ``docs/promises.md``."""
    found = checks()
    sections = {**contract_sections(contract), _DOCSTRINGS: _docstrings()}
    lines = [_HEAD.format(count=len(found))]
    seen: set[str] = set()
    for title, text in sections.items():
        quotes = {quote for check in found for quote in check.quotes if _flat(quote) in text} - seen
        seen |= quotes
        lines += [f"## {title}", "", "| promise | check |", "| --- | --- |"]
        for quote in sorted(quotes, key=lambda quote: (text.index(_flat(quote)), len(quote))):
            names = "<br>".join(_cell(check) for check in found if quote in check.quotes)
            lines.append(f"| {_flat(quote).replace('|', '&#124;')} | {names} |")
        lines.append("")
    return "\n".join(lines)


def unproven(contract: str) -> list[str]:
    """The pieces of the contract that no check quotes."""
    left = []
    for text in contract_sections(contract).values():
        covered = [False] * len(text)
        for quote in {_flat(quote) for check in checks() for quote in check.quotes}:
            for match in re.finditer(re.escape(quote), text):
                covered[match.start() : match.end()] = [True] * len(quote)
        rest = "".join(" " if is_covered else char for char, is_covered in zip(text, covered, strict=True))
        left += [piece.strip() for piece in re.split(r"\s{2,}", rest) if re.search(r"\w", piece)]
    return left


def quotes_from_nowhere(contract: str) -> list[str]:
    """The quotes that are neither in the contract nor in a docstring of ``DataPlaneClient``."""
    sources = [*contract_sections(contract).values(), _docstrings()]
    quotes = [quote for check in checks() for quote in check.quotes]
    return [quote for quote in quotes if not any(_flat(quote) in source for source in sources)]


def _cell(check: PromiseCheck) -> str:
    features = f" ({', '.join(sorted(check.features))})" if check.features else ""
    return f"`{check.name}`{features}"


def _docstrings() -> str:
    methods = (getattr(DataPlaneClient, name) for name in vars(DataPlaneClient) if not name.startswith("__"))
    return _flat(" ".join(inspect.getdoc(method) or "" for method in methods))


def _flat(text: str) -> str:
    """``text`` without list marks and line breaks."""
    return re.sub(r"\s+", " ", re.sub(r"^- ", "", text, flags=re.MULTILINE)).strip()


if __name__ == "__main__":
    contract = (DOCS / "contract.md").read_text(encoding="utf-8")
    (DOCS / "promises.md").write_text(promises_table(contract), encoding="utf-8")
