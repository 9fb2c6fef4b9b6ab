"""The process that the control service of one machine runs in.

The bootstrap client starts it and ends it; ``rlplane serve`` runs the same in the foreground.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlplane.adapters.local.logs import log_to_file, log_to_stderr
from rlplane.service.admission import share_for_live
from rlplane.service.journal import Journal
from rlplane.service.recovery import recover
from rlplane.service.server import Server
from rlplane.service.sockets import listen
from rlplane.service.stall import collect_young_garbage_only, use_small_pages
from rlplane.storage.shm.directory import PlaneDirectory, remove_if_dead, stale_planes
from rlplane.storage.shm.host import ShmHost

SERVICE_KEYS = (
    "storage_capacity",
    "global_segment_size",
    "segment_size",
    "reserve_for_live",
    "journal",
    "journal_dir",
    "reconnect_timeout_s",
)
"""The part of a config that the service is made from."""

DEFAULT_RECONNECT_TIMEOUT_S = 30.0


def make_server(
    cfg: Mapping[str, Any], *, needs_bootstrap: bool = False, take_over: Path | None = None
) -> tuple[Server, str]:
    """A server for a plane in shared memory, and the plane's address.

    With ``take_over``, the directory of a plane whose service has died, it is the same plane, with everything
    that was committed. Otherwise it is a new one, and stale planes are removed first.
    """
    capacity, limit = int(cfg["storage_capacity"]), int(cfg["global_segment_size"])
    patience = cfg.get("reconnect_timeout_s")
    patience = DEFAULT_RECONNECT_TIMEOUT_S if patience is None else float(patience)
    share = share_for_live(cfg)
    recovered = None
    if take_over is None:
        for path in stale_planes():
            remove_if_dead(path)
        directory = PlaneDirectory.create()
    else:
        directory = PlaneDirectory.take_over(take_over)
    host = ShmHost(directory, limit, cfg.get("segment_size"))
    journal = None
    if cfg.get("journal") is not False:
        elsewhere = cfg.get("journal_dir")
        files = directory.path if elsewhere is None else Path(elsewhere) / directory.path.name
        files.mkdir(mode=0o700, parents=True, exist_ok=True)
        if take_over is not None:
            recovered = recover(files, capacity, host.limit, share)
            last = 0 if recovered.last_place is None else recovered.last_place.number
            host.adopt(list(recovered.places.values()), last, recovered.secrets, recovered.given_back)
        journal = Journal(files, 0 if recovered is None else recovered.generation)
        # The bytes of before are needed for as long as the journal says that they are.
        host.before_destroying = journal.afterwards
    listener, _ = listen(directory.socket)
    server = Server(
        capacity,
        host,
        listener,
        needs_bootstrap=needs_bootstrap,
        journal=journal,
        recovered=recovered,
        reconnect_timeout_s=patience,
        reserve_for_live=share,
    )
    return server, directory.address


def serve(
    cfg: Mapping[str, Any],
    *,
    announce: Callable[[str], None] | None = None,
    needs_bootstrap: bool = False,
    take_over: Path | None = None,
) -> None:
    """Run a service in this process until SIGTERM or SIGINT; ``announce(address)`` when it is ready.

    What is logged meanwhile is in ``service.log`` of the plane's directory too, for as long as that exists.
    """
    server, address = make_server(cfg, needs_bootstrap=needs_bootstrap, take_over=take_over)
    collect_young_garbage_only()
    use_small_pages()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.stop())
    handler = log_to_file(PlaneDirectory.at(address).log)
    if announce is not None:
        announce(address)
    try:
        server.run()
    finally:
        logging.getLogger().removeHandler(handler)
        handler.close()


def main() -> None:
    """``python -m rlplane.adapters.local.process``: what the bootstrap client starts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", required=True, help="the resolved config, as JSON")
    parser.add_argument("--ready-fd", type=int, required=True, help="the address is written here")
    parser.add_argument("--take-over", type=Path, help="the directory of a plane whose service has died")
    parser.add_argument(
        "--without-bootstrap", action="store_true", help="go on without the client that started it"
    )
    options = parser.parse_args()
    log_to_stderr(os.environ.get("RLPLANE_LOG_LEVEL", "WARNING").upper())
    # A session of its own. Ctrl-C goes to the process group of the clients, and the bootstrap client decides
    # when the plane ends. And Linux shares the cores out among sessions first: as one process among those of
    # its clients, which all wait for it, the service would get as little as each of them.
    if os.getpgid(0) != os.getpid():
        os.setsid()

    def announce(address: str) -> None:
        os.write(options.ready_fd, address.encode())
        os.close(options.ready_fd)

    serve(
        json.loads(options.config),
        announce=announce,
        needs_bootstrap=not options.without_bootstrap,
        take_over=options.take_over,
    )


if __name__ == "__main__":
    main()
