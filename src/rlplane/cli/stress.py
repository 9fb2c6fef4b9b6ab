"""``rlplane stress``: a plane whose control service is killed again and again, while eight processes work."""

from __future__ import annotations

from typing import Annotated, Literal

from cyclopts import Parameter

from rlplane.cli.outcome import CommandError, ExitCode
from rlplane.cli.output import note, write_text

__all__ = ["stress"]


def stress(
    *,
    minutes: Annotated[float, Parameter(alias="-m")] = 1.0,
    engine: Literal["shm", "simple"] = "shm",
    every: float | None = None,
) -> None:
    """Kill the control service again and again, and count what was lost, handed out twice or changed.

    Prints the row of docs/reliability.md. Exits with 4 if anything did not hold.

    Parameters
    ----------
    minutes
        How long.
    engine
        The engine to attack.
    every
        Seconds between two kills. Default: 2 on shm, 20 on simple, where Ray starts the service again.
    """
    from rlplane.config import load_config
    from rlplane.testing.stress import run_stress

    cfg = load_config({"shm": "shm", "simple": "cluster-simple"}[engine])
    pause = every if every is not None else {"shm": 2.0, "simple": 20.0}[engine]
    report = run_stress(cfg, 60 * minutes, kill_every_s=pause, say=note)
    write_text("| what was tried | how often | what held |\n| --- | --- | --- |\n" + report.row())
    if not report.held:
        raise CommandError("something did not hold; see the row above", ExitCode.FAILED)
