"""``rlplane config``: what the plane would be built from, after file, environment and overrides."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rlplane.cli.options import Flag, Json, resolve_config
from rlplane.cli.output import write_json, write_text
from rlplane.config import EXEMPLARS, KEYS, exemplar_text
from rlplane.viewing.units import format_bytes


def config(
    source: str | None = None,
    /,
    *overrides: str,
    check: Flag = False,
    exemplar: Flag = False,
    as_json: Json = False,
) -> None:
    """Print the resolved config, or check a file.

    Parameters
    ----------
    source
        A .toml or .yaml file, or an exemplar: local, shm, cluster-simple, cluster-mooncake.
        Default: RLPLANE_CONFIG, else shm.
    overrides
        Keys to set on top, as key=value.
    check
        Print nothing but whether it is valid; exit code 2 if not.
    exemplar
        Print the exemplar's text with its comments, as a start for a file of your own.
    """
    if exemplar:
        write_text(exemplar_text(source or "shm"))
        return
    name, found = resolve_config(source, overrides)
    resolved = dict(found)
    if as_json:
        write_json("config", {"source": name, "valid": True, "config": _printable(resolved)})
    elif check:
        kind = "exemplar" if name in EXEMPLARS else "file"
        write_text(f"the {kind} {name} is valid: impl {resolved['impl']!r}, backend {resolved['backend']!r}")
    else:
        write_text(to_toml(resolved))


def to_toml(resolved: Mapping[str, Any]) -> str:
    """A config as TOML that ``load_config`` reads back, with sizes explained."""
    lines: list[str] = []
    tables = {name: value for name, value in resolved.items() if isinstance(value, Mapping)}
    lines += [_toml_line(name, value) for name, value in resolved.items() if name not in tables]
    for table, content in tables.items():
        lines += ["", f"[{table}]", *(_toml_line(name, value) for name, value in content.items())]
    return "\n".join(lines)


def _toml_line(name: str, value: Any) -> str:
    comment = f"  # {format_bytes(value)}" if name in KEYS and KEYS[name].is_size else ""
    return f"{name} = {_toml_value(_printable(value))}{comment}"


def _toml_value(value: Any) -> str:
    # A JSON string, number, boolean or list of them is also a TOML one; nested tables are written inline.
    if isinstance(value, Mapping):
        inner = ", ".join(f"{json.dumps(key)} = {_toml_value(item)}" for key, item in value.items())
        return f"{{{inner}}}"
    if isinstance(value, list):
        return f"[{', '.join(_toml_value(item) for item in value)}]"
    return json.dumps(value, ensure_ascii=False)


def _printable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _printable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_printable(item) for item in value]
    return value if isinstance(value, (str, int, float, bool)) else repr(value)
