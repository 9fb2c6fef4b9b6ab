"""``rlplane doctor``: whether this machine can run the shared-memory engine, and what dead planes left."""

from __future__ import annotations

from rlplane.cli.machine import check_machine
from rlplane.cli.options import Flag, Json
from rlplane.cli.outcome import ExitCode


def doctor(*, clean: Flag = False, as_json: Json = False) -> ExitCode:
    """Check this machine. Exit code 4 if something would stop a plane.

    Parameters
    ----------
    clean
        Remove what dead planes have left behind.
    """
    return check_machine(clean=clean, as_json=as_json)
