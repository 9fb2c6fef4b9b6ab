"""What a command writes: data to stdout, as text or as JSON with a schema version; the rest to stderr."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

import msgspec

JSON_SCHEMA_VERSION = 1


def write_json(command: str, content: Mapping[str, Any]) -> None:
    """One JSON object, with ``schema`` and ``schema_version`` first: how a script knows what it reads.

    ``content`` may bring a ``schema_version`` of its own.
    """
    record = {"schema": f"rlplane.{command}", "schema_version": JSON_SCHEMA_VERSION, **content}
    encoded = msgspec.json.format(msgspec.json.encode(record), indent=2)
    sys.stdout.write(encoded.decode() + "\n")
    sys.stdout.flush()


def write_text(text: str) -> None:
    sys.stdout.write(text if text.endswith("\n") else text + "\n")
    sys.stdout.flush()


def note(text: str) -> None:
    """A line for people, which must not get into a pipe."""
    print(text, file=sys.stderr, flush=True)


def stdout_is_terminal() -> bool:
    return sys.stdout.isatty()


def wants_colour() -> bool:
    """Colour is for a terminal, and not where NO_COLOR says no."""
    return stdout_is_terminal() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
