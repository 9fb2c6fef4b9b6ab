"""``rlplane trace``: a run's operations as a trace that opens in Perfetto."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from rlplane.cli.options import Json
from rlplane.cli.outcome import CommandError, ExitCode
from rlplane.cli.output import note, write_json
from rlplane.viewing.trace import EVENTS_NAME, find_records, write_run_trace


def trace(
    run: Path,
    /,
    *,
    out: Annotated[Path, Parameter(name=["--out", "-o"])] = Path("trace.json"),
    as_json: Json = False,
) -> None:
    """Make a trace of a run's operations, by process, thread and partition.

    Parameters
    ----------
    run
        The run's directory (with events.jsonl, or the files of a jsonl sink), or one such file.
    out
        The trace. Open it at ui.perfetto.dev or in chrome://tracing.
    """
    sources = find_records(run)
    if not sources:
        raise CommandError(
            f"{run} has no records of operations: it needs {EVENTS_NAME} (the aggregator's jsonl option) or"
            " the files of a jsonl sink",
            ExitCode.USAGE,
        )
    try:
        operations = write_run_trace(sources, out)
    except OSError as error:
        raise CommandError(f"cannot write {out}: {error.strerror}") from error
    if as_json:
        files = [str(path) for path in sources]
        write_json("trace", {"operations": operations, "out": str(out), "sources": files})
    note(f"wrote {out}: {operations:,} operations; open it at ui.perfetto.dev")
