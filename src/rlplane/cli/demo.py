"""``rlplane demo``: options, signals and exit codes around the job of :mod:`rlplane.demo`."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter
from cyclopts.validators import Number

from rlplane.cli.options import Flag, Json
from rlplane.cli.outcome import CommandError, ExitCode
from rlplane.cli.output import note, write_json, write_text

if TYPE_CHECKING:
    from rlplane.demo.job import Job, RunOutcome
    from rlplane.demo.settings import Settings

_Positive = Annotated[int, Parameter(validator=Number(gte=1))]
_NotNegative = Annotated[int, Parameter(validator=Number(gte=0))]
_Letters = Annotated[int, Parameter(validator=Number(gte=3, lte=10))]
_Share = Annotated[float, Parameter(validator=Number(gte=0, lte=1))]
_BACKENDS = {"local": ["shm", "memory"], "transfer_queue": ["simple", "mooncake_cpu"]}


def demo(
    *,
    steps: _Positive | None = None,
    seed: int | None = None,
    impl: Literal["local", "transfer_queue"] | None = None,
    backend: Literal["shm", "memory", "simple", "mooncake_cpu"] | None = None,
    policy: Literal["windowed", "ready_first", "weight_fifo", "in_order"] | None = None,
    max_staleness: _NotNegative | None = None,
    slow_groups: _Share | None = None,
    letters: _Letters | None = None,
    groups_per_step: _Positive | None = None,
    dp_world: _Positive | None = None,
    chaos: Flag = False,
    chaos_every: Annotated[float, Parameter(validator=Number(gt=0))] = 5.0,
    checkpoint_every: Annotated[float, Parameter(validator=Number(gt=0))] = 5.0,
    resume: Path | None = None,
    out: Path = Path("runs"),
    as_json: Json = False,
) -> int:
    """Train a small transformer by asynchronous GRPO, with everything that moves going through the plane.

    Parameters
    ----------
    steps
        Steps of the optimizer. The default, 80, takes one to two minutes on two cores.
    seed
        Seed of the weights, the prompts and the sampling. Default 0.
    impl
        The engine: one machine, or TransferQueue on Ray. Default local.
    backend
        Where the engine keeps the data: shm or memory, simple or mooncake_cpu. Default shm, or simple.
    policy
        What keeps rollouts and training together: windowed evicts what is too old; the others admit only as
        many prompts as can be trained in time. Default windowed.
    max_staleness
        How many weight versions old a group may be when it is trained. Default 3.
    slow_groups
        The share of the groups that take ten times as long, such as 0.1. Default 0.
    letters
        The length of the longest string that is to be turned around. Default 10; fewer are learned sooner.
    groups_per_step
        How many groups of eight answers a step learns from. Default 64; with fewer, a step is shorter.
    dp_world
        Shard each batch by length for this many data-parallel ranks. Default 1.
    chaos
        Kill a random rollout or log-prob worker every few seconds, and replace it; on shm, kill the control
        service in turn with them.
    chaos_every
        Seconds between two kills, on average.
    checkpoint_every
        Seconds between two checkpoints that the plane saves by itself.
    resume
        The directory of a run that is to go on: it was interrupted, or killed with all its processes.
    out
        Where the directory of a new run is made.
    """
    given = {
        "steps": steps,
        "seed": seed,
        "policy": policy,
        "max_staleness": max_staleness,
        "slow_groups": slow_groups,
        "letters": letters,
        "groups_per_step": groups_per_step,
        "dp_world": dp_world,
        "trace_attempts": True if chaos else None,
    }
    settings, engine, run_dir = _resolve(given, impl, backend, resume, out)
    if chaos and engine == ("local", "memory"):
        raise CommandError("--chaos kills processes, and --backend memory has threads", ExitCode.USAGE)
    # What cannot run has been refused by now: these load torch.
    from rlplane.demo.display import choose_display
    from rlplane.demo.job import DemoError, Job
    from rlplane.demo.redirect import redirected
    from rlplane.demo.results import story, write_results

    display = choose_display(settings.steps, as_json)
    job = Job(
        settings,
        run_dir,
        impl=engine[0],
        backend=engine[1],
        chaos_s=chaos_every if chaos else None,
        checkpoint_s=checkpoint_every,
        on_start=_tell_how_to_watch,
        on_step=display.step,
        on_death=display.death,
    )
    what = f"{settings.steps} steps, seed {settings.seed}, {settings.policy}"
    note(f"run {run_dir}: {'/'.join(engine)}, {what}")
    # Packing ragged columns makes torch warn, once per process, about its own internals.
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    # stdout is for the JSON: Ray prints its raylet's warnings there.
    for_data = redirected(1, 2) if as_json else contextlib.nullcontext()
    with _interrupting(job), display, _threads_share_the_cores(engine), for_data:
        try:
            outcome = job.run()
        except DemoError as error:
            raise CommandError(str(error)) from error
    summary = write_results(outcome, run_dir)
    if as_json:
        write_json("demo", {**summary, "run_dir": str(run_dir)})
    else:
        write_text("\n".join(story(summary)))
        write_text(f"report: {run_dir}/report.html, and .txt, .json, reward.svg, trace.json beside it")
    if outcome.state == "INTERRUPTED":
        note(how_to_go_on(outcome, run_dir))
        return ExitCode.INTERRUPTED
    return ExitCode.OK if outcome.balance is not None and outcome.balance.balanced else ExitCode.FAILED


def how_to_go_on(outcome: RunOutcome, run_dir: Path) -> str:
    """The command that resumes an interrupted run, or the reason why there is none."""
    if outcome.resumable:
        return f"to go on: rlplane demo --resume {run_dir}"
    return "there is nothing to resume: it was interrupted before the trainer had begun"


def _resolve(
    given: dict[str, Any],
    impl: str | None,
    backend: str | None,
    resume: Path | None,
    out: Path,
) -> tuple[Settings, tuple[str, str], Path]:
    """What is to run and where: from the options, and from an earlier run that goes on."""
    from rlplane.demo.settings import Settings

    changes = {name: value for name, value in given.items() if value is not None}
    if resume is None:
        impl = impl or ("transfer_queue" if backend in _BACKENDS["transfer_queue"] else "local")
        backend = backend or _BACKENDS[impl][0]
        if backend not in _BACKENDS[impl]:
            choices = " or ".join(_BACKENDS[impl])
            raise CommandError(f"--impl {impl} has --backend {choices}, not {backend}", ExitCode.USAGE)
        return Settings(**changes), (impl, backend), _new_directory(out)
    from rlplane.demo.job import earlier_run

    earlier = earlier_run(resume)
    if earlier is None:
        raise CommandError(
            f"{resume} cannot be resumed: it has no checkpoint, as an interrupted or killed run leaves one",
            ExitCode.USAGE,
        )
    before = Settings(**earlier["settings"])
    for name in ("seed", "policy", "max_staleness", "letters", "groups_per_step"):
        if changes.get(name, getattr(before, name)) != getattr(before, name):
            option = f"--{name.replace('_', '-')}"
            raise CommandError(f"{option} of a run that goes on cannot be changed", ExitCode.USAGE)
    engine = (earlier["impl"], earlier["backend"])
    if (impl or engine[0], backend or engine[1]) != engine:
        raise CommandError(f"{resume} ran on {'/'.join(engine)}, and goes on there", ExitCode.USAGE)
    return replace(before, **changes), engine, resume


def _new_directory(out: Path) -> Path:
    name = time.strftime("%Y-%m-%d_%H-%M-%S")
    for suffix in ["", *(f".{number}" for number in range(2, 100))]:
        with contextlib.suppress(FileExistsError):
            (out / f"{name}{suffix}").mkdir(parents=True)
            return out / f"{name}{suffix}"
    raise CommandError(f"there are too many runs of {name} in {out}", ExitCode.CANNOT_START)


def _tell_how_to_watch(job: Job) -> None:
    name = _command_of_another_terminal()
    note(f"watch it from another terminal: {name} top, or {name} dash for a page. Ctrl-C ends it in order.")


def _command_of_another_terminal() -> str:
    """`make demo` runs it from .venv, which is not on the PATH of another terminal."""
    if shutil.which("rlplane"):
        return "rlplane"
    beside_python = Path(sys.executable).with_name("rlplane")
    return os.path.relpath(beside_python) if beside_python.exists() else f"{sys.executable} -m rlplane.cli"


@contextlib.contextmanager
def _interrupting(job: Job) -> Iterator[None]:
    """The first Ctrl-C (or SIGTERM) ends the job in order, the second at once."""

    def ask(signal_number: int, frame: object) -> None:
        signal.signal(signal_number, signal.default_int_handler)
        job.interrupt()

    former = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _threads_share_the_cores(engine: tuple[str, str]) -> Iterator[None]:
    """In one process, each stage's torch would take all cores for itself."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1 if engine == ("local", "memory") else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
