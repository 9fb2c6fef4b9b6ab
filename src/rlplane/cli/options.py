"""Options that several commands share, so that they are spelled and explained in one way."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from cyclopts import Parameter

__all__ = ["Flag", "Json"]

Flag: TypeAlias = Annotated[bool, Parameter(negative="", show_default=False)]
"""A switch that is off unless it is given; there is no --no-… for it."""

Json: TypeAlias = Annotated[
    bool, Parameter(name="--json", negative="", show_default=False, help="Print JSON, with a schema version.")
]
