"""``rlplane``, the command: where it starts, how it ends, and what it says when something is wrong.

A command returns None or an exit code (:class:`~rlplane.cli.outcome.ExitCode`), writes its data to stdout and
everything else to stderr. What it raises becomes one line on stderr and an exit code here.

    commands.py   the list of commands; each has a module of its name, imported when it is called
    options.py    options that several commands share
    outcome.py    exit codes, and the error that carries one
    output.py     text and JSON on stdout, notes on stderr
    cluster.py    the runs of the Ray cluster that this machine belongs to
    compare.py    what ``rlplane report --compare`` computes and prints
    machine.py    what ``rlplane doctor`` does, also where the extra ``cli`` is not installed
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import NoReturn

from rlplane.cli.outcome import CommandError, ExitCode
from rlplane.errors import ConfigError, DataPlaneError, InvalidRequestError, MissingExtraError

__all__ = ["CommandError", "ExitCode", "main", "run"]

_MISSING_CLI = "the command line needs the package {!r}, which is not installed: pip install 'rlplane[cli]'"


def main() -> NoReturn:
    """The console script."""
    sys.exit(run(sys.argv[1:]))


def run(argv: Sequence[str]) -> int:
    """Run one command and return its exit code. Only what ``--debug`` asks for is raised."""
    arguments, debug = _split_off_debug(argv)
    try:
        _set_up_logging(debug)
        return _dispatch(arguments)
    except SystemExit as request:
        return request.code if isinstance(request.code, int) else int(request.code is not None)
    except KeyboardInterrupt:
        if debug:
            raise
        print("interrupted", file=sys.stderr)
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        # The reader of our stdout has gone (`rlplane report … | head`). Python would complain once more when
        # it flushes stdout at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.FAILED
    except Exception as error:
        if debug:
            raise
        print(_describe(error), file=sys.stderr)
        return exit_code_for(error)


def exit_code_for(error: Exception) -> ExitCode:
    """The exit code that an error stands for."""
    match error:
        case CommandError():
            return error.code
        case ConfigError() | InvalidRequestError():
            return ExitCode.USAGE
        case MissingExtraError() | ConnectionError():
            return ExitCode.CANNOT_START
        case _:
            return ExitCode.FAILED


def _dispatch(arguments: list[str]) -> int:
    try:
        import cyclopts

        from rlplane.cli.commands import build_app
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing == "rlplane":
            raise
        code = _run_without_extra(arguments)
        if code is None:
            raise MissingExtraError(_MISSING_CLI.format(missing)) from error
        return code
    app = build_app()
    try:
        result = app(
            arguments, exit_on_error=False, print_error=False, result_action="return_value", verbose=False
        )
    except cyclopts.CycloptsError as error:
        print(f"rlplane: {' '.join(str(error).split())}", file=sys.stderr)
        print(f"Try: rlplane {_command_of(arguments)}--help", file=sys.stderr)
        return ExitCode.USAGE
    return int(result) if isinstance(result, int) else ExitCode.OK


def _run_without_extra(arguments: list[str]) -> int | None:
    """What is asked of a broken installation has to work in one: ``--version`` and ``doctor``. Else None."""
    command, *options = arguments or [""]
    if command == "--version" and not options:
        print(version("rlplane"))
        return ExitCode.OK
    if command == "doctor" and set(options) <= {"--clean", "--json"}:
        from rlplane.cli.machine import check_machine

        return check_machine(clean="--clean" in options, as_json="--json" in options)
    return None


def _split_off_debug(argv: Sequence[str]) -> tuple[list[str], bool]:
    """``--debug`` may stand anywhere, for every command: it is ours, and not the command's."""
    own = list(argv)
    limit = own.index("--") if "--" in own else len(own)
    kept = [word for word in own[:limit] if word != "--debug"]
    debug = len(kept) < limit or os.environ.get("RLPLANE_DEBUG", "").lower() not in ("", "0", "false", "no")
    return kept + own[limit:], debug


def _set_up_logging(debug: bool) -> None:
    wanted = os.environ.get("RLPLANE_LOG_LEVEL", "DEBUG" if debug else "WARNING").upper()
    level = logging.getLevelNamesMapping().get(wanted)
    if level is None:
        raise ConfigError(
            f"RLPLANE_LOG_LEVEL is {wanted!r}; it must be one of DEBUG, INFO, WARNING, ERROR, CRITICAL"
        )
    logging.basicConfig(
        level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("rlplane").setLevel(level)


def _describe(error: Exception) -> str:
    if isinstance(error, (CommandError, DataPlaneError)):
        return f"rlplane: {error}"
    if isinstance(error, OSError):
        return f"rlplane: {error} (--debug shows where)"
    return f"rlplane: {type(error).__name__}: {error} (--debug shows where)"


def _command_of(arguments: list[str]) -> str:
    from rlplane.cli.commands import COMMANDS

    named = arguments[:1] if arguments and arguments[0] in COMMANDS else []
    return "".join(f"{name} " for name in named)
