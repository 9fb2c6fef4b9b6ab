"""``rlplane serve``: the controller of a shared-memory plane by itself, for jobs that come and go."""

from __future__ import annotations

from rlplane.cli.options import resolve_config
from rlplane.cli.outcome import CommandError, ExitCode
from rlplane.cli.output import note, write_text

__all__ = ["serve"]


def serve(source: str | None = None, /, *overrides: str) -> None:
    """Serve a shared-memory plane until Ctrl-C or SIGTERM. Its address goes to stdout.

    Parameters
    ----------
    source
        A config file or exemplar with impl local and backend shm. Default: RLPLANE_CONFIG, else shm.
    overrides
        Keys to set on top, as key=value.
    """
    from rlplane.adapters.local.server import serve as serve_plane

    _, config = resolve_config(source, overrides)
    if (config["impl"], config["backend"]) != ("local", "shm"):
        raise CommandError(
            f"rlplane serve is for impl 'local' with backend 'shm'; this config has {config['impl']!r} with"
            f" {config['backend']!r}",
            ExitCode.USAGE,
        )

    def announce(address: str) -> None:
        write_text(address)
        note(f"join it with RLPLANE_CONTROLLER_ADDRESS={address}; Ctrl-C ends the plane")

    serve_plane(config, announce=announce)
