"""``rlplane bench``: measure the engine beside its peers and the machine's limits, in one run.

The bench is a package of its own, ``rlplane_benchmarks``, which is imported when the command runs.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
from cyclopts import Parameter

from rlplane.cli.options import Flag
from rlplane.cli.outcome import CommandError, ExitCode
from rlplane.cli.output import JSON_SCHEMA_VERSION, note, write_text

if TYPE_CHECKING:
    from rlplane_benchmarks import BenchResult
    from rlplane_benchmarks.progress import Progress

# A factor for bytes and counts, with which the tests run the whole bench on a small scale. It is not for
# users: figures of a small scale say nothing.
SCALE_VARIABLE = "RLPLANE_BENCH_SCALE"


def bench(
    *,
    peers: str = "",
    quick: Flag = False,
    json: Annotated[Path | None, Parameter(name="--json")] = None,
    plot: Annotated[Path | None, Parameter(name="--plot")] = None,
    observability: Flag = False,
    metrics: Flag = False,
    cluster: Annotated[Flag, Parameter(name=("--cluster", "--raw-transfer-queue"))] = False,
    cluster_backend: str = "simple",
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
    cluster
        Measure instead the cluster engine beside plain TransferQueue, with Ray actors as clients.
    cluster_backend
        Where the cluster engine keeps its bytes: simple or mooncake_cpu.
    """
    asked = {"observability": observability, "metrics": metrics, "cluster": cluster}
    chosen = [name for name, wanted in asked.items() if wanted]
    if len(chosen) > 1 or (chosen and (peers or plot)):
        raise CommandError(
            "--observability, --metrics and --cluster are benches of their own:"
            " one at a time, without --peers and --plot",
            ExitCode.USAGE,
        )
    if cluster_backend != "simple" and not cluster:
        raise CommandError("--cluster-backend is for --cluster", ExitCode.USAGE)
    for path in (json, plot):
        if path is not None and not path.parent.is_dir():
            raise CommandError(f"there is no directory {path.parent} for {path.name}", ExitCode.USAGE)
    if cluster:
        return _run_cluster(cluster_backend, quick, json)
    if chosen:
        return _run_other(chosen[0], quick, json)
    return _run(peers, quick, json, plot)


def _run_other(name: str, quick: bool, json: Path | None) -> int:
    """Such a bench has ``run(quick)``, which returns plain numbers, and ``render`` of them."""
    module = import_module(f"rlplane_benchmarks.{name}")
    result = module.run(quick=quick)
    if json is not None:
        record = {"schema": f"rlplane.bench.{name}", "schema_version": JSON_SCHEMA_VERSION, **result}
        json.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")
    write_text(module.render(result))
    return ExitCode.OK


def _run(peers: str, quick: bool, json: Path | None, plot: Path | None) -> int:
    from rlplane_benchmarks import full_plan, participants_for, quick_plan, run_bench
    from rlplane_benchmarks.plot import svg_plot

    wanted = [word.strip() for word in peers.split(",") if word.strip()]
    participants, notes = participants_for(wanted)
    scale = _scale()
    plan = (quick_plan() if quick else full_plan()).scaled(scale)
    with _measuring() as progress:
        result = run_bench(
            plan, participants, quick=quick, scale=scale, peers=wanted, notes=notes, progress=progress
        )
    if plot is not None:
        plot.write_text(svg_plot(result), encoding="utf-8")
    return _hand_over(result, json)


def _run_cluster(backend: str, quick: bool, json: Path | None) -> int:
    from rlplane_benchmarks.cluster import full_cluster_plan, quick_cluster_plan, run_cluster_bench
    from rlplane_benchmarks.participants import cluster_participants_for

    participants = cluster_participants_for(backend)
    scale = _scale()
    plan = (quick_cluster_plan() if quick else full_cluster_plan()).scaled(scale)
    with _measuring() as progress:
        result = run_cluster_bench(
            plan, participants, backend=backend, quick=quick, scale=scale, progress=progress
        )
    return _hand_over(result, json)


@contextlib.contextmanager
def _measuring() -> Iterator[Progress]:
    """Progress on the terminal, and an error of the command if the bench cannot go on."""
    from rlplane_benchmarks.progress import Progress
    from rlplane_benchmarks.worker_process import WorkerError

    progress = Progress(sys.stderr)
    try:
        yield progress
    except WorkerError as error:
        progress.done()
        raise CommandError(f"the bench cannot go on: {error}") from error


def _hand_over(result: BenchResult, json: Path | None) -> int:
    """Write the result where it was asked for, and print it."""
    from rlplane_benchmarks.table import format_result

    if json is not None:
        result.save(json)
    write_text(format_result(result))
    if not result.right:
        note("a participant returned wrong bytes: its figures are worth nothing")
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
