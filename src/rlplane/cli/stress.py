"""``rlplane stress``: planes that are killed again and again while processes work, and what held."""

from __future__ import annotations

from typing import Annotated, Literal

from cyclopts import Parameter

from rlplane.cli.outcome import CommandError, ExitCode
from rlplane.cli.output import note, write_text


def stress(
    *,
    minutes: Annotated[float, Parameter(alias="-m")] = 1.0,
    engine: Literal["shm", "simple", "mooncake_cpu"] = "shm",
    scenario: Literal["service", "flow"] = "service",
    every: float | None = None,
) -> None:
    """Kill a plane again and again, and count what was lost, handed out twice, changed or too old.

    Prints the rows of docs/reliability.md. Exits with 4 if anything did not hold.

    Parameters
    ----------
    minutes
        How long; the four policies of flow share it.
    engine
        The engine to attack.
    scenario
        What is killed: service, the control service while eight processes work; flow, whole jobs, one under
        each flow policy (on a cluster with a Ray of its own), which resume from their checkpoints.
    every
        Seconds between two kills. Default: 2 on shm, 20 on a cluster, where Ray starts the service again; 5
        for flow.
    """
    from rlplane.config import EXEMPLAR_OF, load_config
    from rlplane.testing.flow_stress import POLICIES, run_flow_stress
    from rlplane.testing.stress import run_stress

    cfg = load_config(EXEMPLAR_OF[engine])
    held, heading = True, "| what was tried | how often | what held |\n| --- | --- | --- |\n"
    if scenario == "service":
        pause = every if every is not None else 2.0 if engine == "shm" else 20.0
        report = run_stress(cfg, 60 * minutes, kill_every_s=pause, say=note)
        write_text(heading + report.row())
        held = report.held
    else:
        for number, policy in enumerate(POLICIES):
            share = 60 * minutes / len(POLICIES)
            result = run_flow_stress(cfg, policy, share, kill_every_s=every or 5.0, say=note)
            write_text(heading * (number == 0) + result.row())
            held &= result.held
    if not held:
        raise CommandError("something did not hold; see the rows above", ExitCode.FAILED)
