"""Renew the tables of config keys in docs/configuration.md from their definition."""

from pathlib import Path

from rlplane.config.keys import KEYS, NOT_READ, TABLES, Key

DOCUMENT = Path(__file__).parents[1] / "docs" / "configuration.md"
BEGIN, END = "<!-- begin: python scripts/config_tables.py -->\n", "<!-- end -->\n"


def renewed(text: str) -> str:
    """The document with its tables as the definition says."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + "".join(map(_section, TABLES)) + END + rest.split(END)[1]


def _section(table: str) -> str:
    rows = [key for name, key in KEYS.items() if name.rpartition(".")[0] == table]
    lines = [f"### `{table}`" if table else "### First level", "", str(TABLES[table].__doc__), ""]
    lines += ["| key | value | default | meaning |", "| --- | --- | --- | --- |", *map(_row, rows), ""]
    unread = [f"`{name}`" for name in NOT_READ if name.startswith(f"{table}.")]
    if unread:
        lines += [f"Accepted from NeMo-RL's configs, and not read: {', '.join(unread)}.", ""]
    return "\n".join(lines) + "\n"


def _row(key: Key) -> str:
    if key.required:
        default = "required"
    elif key.default is None:
        default = ""
    else:
        default = f"`{str(key.default).lower() if isinstance(key.default, bool) else key.default}`"
    value = "a size" if key.is_size else key.expected
    # A key of NeMo-RL's tables has no meaning of its own.
    meaning = key.description or f"as `{key.name.rpartition('.')[2]}`"
    return f"| `{key.name}` | {value} | {default} | {meaning} |"


if __name__ == "__main__":
    DOCUMENT.write_text(renewed(DOCUMENT.read_text()))
