"""The commands, by name. To add one: a module here with a function of its name, and an entry in
:data:`COMMANDS`.

A command's module is imported when the command is called, and all of them for completion and for an unknown
command. ``rlplane --help`` reads this table alone: it is quick, and works when a command cannot be imported.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import NamedTuple

import cyclopts


class Command(NamedTuple):
    """What a command does in one line, and one call that works."""

    line: str
    example: str


COMMANDS: dict[str, Command] = {
    "demo": Command("Run the main job: asynchronous GRPO through the plane.", "rlplane demo"),
    "bench": Command(
        "Measure the engine beside its peers and the machine's limits.", "rlplane bench --quick --peers redis"
    ),
    "top": Command("Watch a run on the terminal.", "rlplane top"),
    "dash": Command("Watch a run on a page.", "rlplane dash --open"),
    "report": Command(
        "Show the report of a run, or compare two runs.", "rlplane report runs/1 --html report.html"
    ),
    "trace": Command("Make a trace of a run for Perfetto.", "rlplane trace runs/1 -o trace.json"),
    "serve": Command("Serve a shared-memory plane by itself.", "rlplane serve storage_capacity=5000"),
    "aggregate": Command(
        "Run the metrics aggregator by itself.", "rlplane aggregate --out runs/1 --prometheus-port 9464"
    ),
    "stress": Command(
        "Kill the control service again and again, and count what is lost.", "rlplane stress --minutes 0.2"
    ),
    "doctor": Command("Check this machine, and clean up after dead planes.", "rlplane doctor --clean"),
    "config": Command(
        "Print the resolved config, or check a file.", "rlplane config plane.toml storage_capacity=5000"
    ),
}

_HELP = "The data plane for RL post-training: run it, watch it, measure it."
_EPILOGUE = (
    "Every command takes --debug (or RLPLANE_DEBUG=1) to show tracebacks.\n\n"
    "Exit codes: 0 fine, 2 usage or config, 3 cannot start, 4 failed, 130 interrupted."
)


def build_app() -> cyclopts.App:
    """The command line, with nothing of the commands imported yet."""
    app = cyclopts.App(
        name="rlplane",
        help=_HELP,
        help_epilogue=_EPILOGUE,
        help_format="markdown",
        version=version("rlplane"),
        # Without this a command's function would swallow Ctrl-C, and the shell would be told 0.
        suppress_keyboard_interrupt=False,
    )
    for name, command in COMMANDS.items():
        text = f"{command.line}\n\nExample: `{command.example}`"
        app.command(f"rlplane.cli.{name}:{name}", name=name, help=text, help_epilogue="")
    app.register_install_completion_command(add_to_startup=False)
    return app
