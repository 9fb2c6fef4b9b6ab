"""``rlplane serve``: the controller of a shared-memory plane by itself, for jobs that come and go."""

from __future__ import annotations

import signal

from rlplane.cli.options import resolve_config
from rlplane.cli.outcome import CommandError, ExitCode
from rlplane.cli.output import note, write_text


def serve(source: str | None = None, /, *overrides: str) -> None:
    """Serve a shared-memory plane until Ctrl-C or SIGTERM. Its address goes to stdout.

    Parameters
    ----------
    source
        A config file or exemplar with impl local and backend shm. Default: RLPLANE_CONFIG, else shm.
    overrides
        Keys to set on top, as key=value.
    """
    from rlplane.adapters.local.supervisor import Supervisor

    _, config = resolve_config(source, overrides)
    if (config["impl"], config["backend"]) != ("local", "shm"):
        raise CommandError(
            f"rlplane serve is for impl 'local' with backend 'shm'; this config has {config['impl']!r} with"
            f" {config['backend']!r}",
            ExitCode.USAGE,
        )

    # In a process of its own, which is started again if it dies.
    supervisor = Supervisor(config, needs_bootstrap=False)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: supervisor.terminate())
    write_text(supervisor.address)
    note(f"join it with RLPLANE_CONTROLLER_ADDRESS={supervisor.address}; Ctrl-C ends the plane")
    supervisor.wait()
    supervisor.close()
