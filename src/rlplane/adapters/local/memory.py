"""The memory engine: any number of clients and threads of one process share a plane."""

from __future__ import annotations

import threading

from rlplane.adapters.client import PlaneClient
from rlplane.adapters.link import Link
from rlplane.errors import PlaneConnectionError
from rlplane.interfaces import DataPlaneConfig
from rlplane.service.admission import share_for_live
from rlplane.service.in_process import InProcessConnection, LocalService
from rlplane.storage.memory import MemoryStore

_planes: dict[str, tuple[LocalService, MemoryStore]] = {}
_planes_lock = threading.Lock()


class MemoryDataPlaneClient(PlaneClient):
    """A client of a plane in this process. Planes are told apart by ``controller_address``."""

    def __init__(self, cfg: DataPlaneConfig, *, bootstrap: bool = True) -> None:
        super().__init__(cfg, bootstrap=bootstrap)
        self._name = cfg.get("controller_address") or "default"
        if bootstrap:
            store = MemoryStore(cfg["global_segment_size"])
            service = LocalService(cfg["storage_capacity"], store.host, reserve_for_live=share_for_live(cfg))
            self._plane = service, store
            with _planes_lock:
                _planes[self._name] = self._plane
        self._link()

    def _open_link(self) -> Link:
        with _planes_lock:
            plane = _planes.get(self._name)
        if plane is None:
            raise PlaneConnectionError(
                f"no plane named {self._name!r} in this process: build the bootstrap client first, "
                "or use backend: shm to reach a plane of another process"
            )
        self._plane = plane
        service, store = plane
        return Link(InProcessConnection(service), store)

    def _end_plane(self) -> None:
        if not self._bootstrap:
            return
        self._plane[0].close()
        with _planes_lock:
            if _planes.get(self._name) is self._plane:
                del _planes[self._name]

    def __repr__(self) -> str:
        return f"MemoryDataPlaneClient({self._name!r}, {'closed' if self._closed else 'connected'})"
