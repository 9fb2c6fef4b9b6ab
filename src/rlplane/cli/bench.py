"""``rlplane bench``: measure the engine beside its peers and the machine's limits, in one run."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter

from rlplane.cli.options import Flag
from rlplane.cli.outcome import CommandError, ExitCode
from rlplane.cli.output import JSON_SCHEMA_VERSION, note, write_text

__all__ = ["bench"]

# A factor for bytes and counts: the tests run the whole bench on a small scale. Not for users, since figures
# from a small scale say nothing.
SCALE_VARIABLE = "RLPLANE_BENCH_SCALE"


def bench(
    *,
    peers: str = "",
    quick: Flag = False,
    json: Annotated[Path | None, Parameter(name="--json")] = None,
    plot: Annotated[Path | None, Parameter(name="--plot")] = None,
    observability: Flag = False,
    metrics: Flag = False,
    raw_transfer_queue: Flag = False,
) -> int:
    """Measure put, get, clear, claims and many clients, and judge the targets.

    Parameters
    ----------
    peers
        Whom to measure beside rlplane and the limits, with commas: ray, redis, tq-simple, tq-mooncake, all.
    quick
        Fewer rounds: under a minute without peers.
    json
        Write the whole result to this file, as JSON with a schema version.
    plot
        Write a picture of it to this file, as SVG.
    observability
        Measure instead what observability costs an operation.
    metrics
        Measure instead the live metrics service.
    raw_transfer_queue
        Measure instead the TransferQueue engine beside TransferQueue without it.
    """
    asked = {
        "observability": observability,
        "metrics": metrics,
        "raw_transfer_queue": raw_transfer_queue,
    }
    chosen = [name for name, wanted in asked.items() if wanted]
    if len(chosen) > 1 or (chosen and (peers or plot)):
        raise CommandError(
            "--observability, --metrics and --raw-transfer-queue are benches of their own:"
            " one at a time, without --peers and --plot",
            ExitCode.USAGE,
        )
    for path in (json, plot):
        if path is not None and not path.parent.is_dir():
            raise CommandError(f"there is no directory {path.parent} for {path.name}", ExitCode.USAGE)
    if chosen:
        return _run_other(chosen[0], quick, json)
    return _run(peers, quick, json, plot)


def _run_other(name: str, quick: bool, json: Path | None) -> int:
    """Such a bench has ``run(quick)``, which returns plain numbers, and ``render`` of them."""
    path = f"rlplane.bench.{name}"
    if find_spec(path) is None:
        raise CommandError(f"this rlplane has no {path}", ExitCode.CANNOT_START)
    module = import_module(path)
    result = module.run(quick=quick)
    if json is not None:
        record = {"schema": path, "schema_version": JSON_SCHEMA_VERSION, **result}
        json.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")
    write_text(module.render(result))
    return ExitCode.OK


def _run(peers: str, quick: bool, json: Path | None, plot: Path | None) -> int:
    from rlplane.bench import contestants_for, full_plan, quick_plan, run_bench
    from rlplane.bench.plot import svg_plot
    from rlplane.bench.progress import Progress
    from rlplane.bench.seat import SeatError
    from rlplane.bench.table import format_result

    wanted = [word.strip() for word in peers.split(",") if word.strip()]
    contestants, notes = contestants_for(wanted)
    scale = _scale()
    plan = (quick_plan() if quick else full_plan()).scaled(scale)
    progress = Progress(sys.stderr)
    try:
        result = run_bench(
            plan, contestants, quick=quick, scale=scale, peers=wanted, notes=notes, progress=progress
        )
    except SeatError as error:
        progress.done()
        raise CommandError(f"the bench cannot go on: {error}") from error
    if json is not None:
        result.save(json)
    if plot is not None:
        plot.write_text(svg_plot(result), encoding="utf-8")
    write_text(format_result(result))
    if not result.right:
        note("a contestant returned wrong bytes: its figures are worth nothing")
        return ExitCode.FAILED
    return ExitCode.OK


def _scale() -> float:
    text = os.environ.get(SCALE_VARIABLE, "1")
    try:
        scale = float(text)
    except ValueError:
        scale = 0.0
    if not 0 < scale <= 1:
        raise CommandError(f"{SCALE_VARIABLE} is {text!r}; it must be in (0, 1]", ExitCode.USAGE)
    return scale
