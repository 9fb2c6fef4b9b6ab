"""Options that several commands share, so that they are spelled and explained in one way."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Annotated, TypeAlias

from cyclopts import Parameter

from rlplane.config import load_config
from rlplane.interfaces import DataPlaneConfig

Flag: TypeAlias = Annotated[bool, Parameter(negative="", show_default=False)]
"""A switch that is off unless it is given; there is no --no-… for it."""

Json: TypeAlias = Annotated[
    bool, Parameter(name="--json", negative="", show_default=False, help="Print JSON, with a schema version.")
]


def resolve_config(source: str | None, overrides: Sequence[str]) -> tuple[str, DataPlaneConfig]:
    """The config that a command line names, and where it came from.

    The source may be left out: a first word such as ``storage_capacity=5`` is an override.
    """
    if source is not None and "=" in source and not os.path.exists(source):
        overrides, source = [source, *overrides], None
    name = source or os.environ.get("RLPLANE_CONFIG") or "shm"
    return name, load_config(name, list(overrides))
