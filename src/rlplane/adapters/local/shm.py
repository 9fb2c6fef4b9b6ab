"""The shared-memory engine: any number of processes of one machine share a plane.

The bootstrap client starts the control service and ends it; others find it by ``controller_address`` or by
the environment variable that the bootstrap client sets.
"""

from __future__ import annotations

import os
import time
from typing import Any

from rlplane.adapters.client import PlaneClient
from rlplane.adapters.link import Link
from rlplane.adapters.local.supervisor import Supervisor
from rlplane.caller import warn_caller
from rlplane.errors import DataPlaneError, PlaneConnectionError
from rlplane.interfaces import ADDRESS_VARIABLE, DataPlaneConfig
from rlplane.service.connection import RefusedError, SocketConnection
from rlplane.storage.shm.client import ShmStorage
from rlplane.storage.shm.directory import PlaneDirectory, remove_if_dead

_DYING_S = 1.0
_RETRY_S = 0.05


class ShmDataPlaneClient(PlaneClient):
    """A client of a plane on this machine."""

    def __init__(self, cfg: DataPlaneConfig, *, bootstrap: bool = True) -> None:
        super().__init__(cfg, bootstrap=bootstrap)
        self._supervisor: Supervisor | None = None
        self._former_address: str | None = None
        self._address = cfg.get("controller_address") or os.environ.get(ADDRESS_VARIABLE)
        if bootstrap and _is_inherited(os.environ.get(ADDRESS_VARIABLE)):
            inherited = os.environ[ADDRESS_VARIABLE]
            warn_caller(
                f"this process was started by one that has a plane, and joins it ({ADDRESS_VARIABLE} is "
                f"{inherited!r}): build its client with bootstrap=False, or unset the variable for a plane "
                "of its own",
                RuntimeWarning,
            )
            self._bootstrap, self._address = False, inherited
        elif bootstrap:
            self._former_address = os.environ.get(ADDRESS_VARIABLE)
            self._supervisor = Supervisor(cfg)
            self._address = os.environ[ADDRESS_VARIABLE] = self._supervisor.address
            _started_here[self._address] = os.getpid()
        self._link()

    @property
    def controller_address(self) -> str | None:
        """Where workers find this plane; goes into their ``controller_address``."""
        return self._address

    def _open_link(self) -> Link:
        if self._address is None:
            raise PlaneConnectionError(
                "no plane to connect to: set controller_address in the config or "
                f"{ADDRESS_VARIABLE} in the environment, or build a bootstrap client"
            )
        directory = PlaneDirectory.at(self._address)
        deadline = time.monotonic() + self._reconnect_timeout_s
        while True:
            try:
                connection = SocketConnection(
                    directory.socket,
                    bootstrap=self._bootstrap,
                    ack_timeout_s=self._ack_timeout_s,
                    reconnect_timeout_s=self._reconnect_timeout_s,
                    on_end=lambda: _remove(directory),
                )
                break
            except RefusedError:
                raise
            except PlaneConnectionError:
                # The service may have died, and is being started again.
                if directory.is_dead or time.monotonic() > deadline:
                    raise
                time.sleep(_RETRY_S)
        try:
            return Link(connection, ShmStorage(directory, connection.client))
        except BaseException:
            connection.close()
            raise

    def _end_plane(self) -> None:
        if self._supervisor is None:
            return
        self._supervisor.close()
        if os.environ.get(ADDRESS_VARIABLE) == self._address:
            del os.environ[ADDRESS_VARIABLE]
            if self._former_address and _is_alive(self._former_address):
                os.environ[ADDRESS_VARIABLE] = self._former_address

    def __getstate__(self) -> dict[str, Any]:
        cfg = {key: value for key, value in self._cfg.items() if key != "observability"}
        return {"cfg": cfg, "address": self._address, "closed": self._closed}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._cfg, self._bootstrap, self._supervisor = state["cfg"], False, None
        self._address = state["address"]
        self._set_up_unconnected()
        self._closed = state["closed"]

    def __del__(self) -> None:
        # A bootstrap client that is dropped without close still ends its service.
        try:
            if self._supervisor is not None and self._pid == os.getpid() and not self._closed:
                self.close()
        except Exception:  # not contextlib: at the end of the interpreter the module may be gone
            pass

    def __repr__(self) -> str:
        state = "closed" if self._closed else "connected" if self._link_now else "not connected"
        return f"ShmDataPlaneClient({self._address!r}, {state})"


# The planes that clients of this process have started, and which process it was then: a forked child is
# another.
_started_here: dict[str, int] = {}


def _is_inherited(address: str | None) -> bool:
    """Whether it is the address of a living plane that another process has left for its children."""
    return address is not None and _started_here.get(address) != os.getpid() and _is_alive(address)


def _is_alive(address: str) -> bool:
    try:
        return not PlaneDirectory.at(address).is_dead
    except DataPlaneError:
        return False  # not one of ours, or already gone


def _remove(directory: PlaneDirectory) -> None:
    remove_if_dead(directory.path, _DYING_S)
