"""``TQDataPlaneClient``: a client on a Ray cluster, with TransferQueue's units or Mooncake as its storage."""

from __future__ import annotations

import contextlib
from typing import Any

from rlplane.adapters.client import PlaneClient
from rlplane.adapters.link import Link
from rlplane.adapters.transfer_queue.plane import (
    Plane,
    _connect_existing,
    _init_tq,
    _quiet_transfer_queue,
    open_store,
)
from rlplane.interfaces import DataPlaneConfig
from rlplane.service.connection import SocketConnection
from rlplane.storage.chunks import ChunkedStorage


class TQDataPlaneClient(PlaneClient):
    """A client of a plane on Ray.

    Args:
        cfg: The config. With ``bootstrap=False`` only the client's own keys are read.
        bootstrap: True starts the plane, or joins one that runs with the same config; False joins only.

    Raises:
        ConfigError: A plane with another config runs already.
        PlaneConnectionError: There is no Ray, or no plane on it.
        MissingExtraError: Ray, TransferQueue or Mooncake is not installed.

    Pickling it gives a client that joins the same plane (``bootstrap=False``), wherever it is unpickled.
    """

    def __init__(self, cfg: DataPlaneConfig, *, bootstrap: bool = True) -> None:
        super().__init__(cfg, bootstrap=bootstrap)
        _quiet_transfer_queue(cfg.get("transfer_queue") or {})
        self._plane: Plane = _init_tq(cfg) if bootstrap else _connect_existing(cfg)
        try:
            self._link()
        except BaseException:
            self.close()
            raise

    def _open_link(self) -> Link:
        plane = self._plane
        connection = SocketConnection(
            plane.service["address"],
            token=plane.service["token"],
            ack_timeout_s=self._ack_timeout_s,
            reconnect_timeout_s=self._reconnect_timeout_s,
            find_again=plane.find_service,
        )
        try:
            store = open_store(self._cfg, plane, wait_for_close=bool(plane.started))
            return Link(connection, ChunkedStorage(store))
        except BaseException:
            connection.close()
            raise

    def publish_aggregator(self, address: str, run: str) -> None:
        """Tell all clients of the plane where to send measurements, and viewers how to watch the run."""
        self._plane.publish_aggregator(address, run)

    def find_aggregator(self) -> str | None:
        """Where to send measurements, if anybody has said."""
        return self._plane.find_aggregator()

    def _end_plane(self) -> None:
        with contextlib.suppress(AttributeError):  # it was never found
            self._plane.end()

    def __reduce__(self) -> tuple[Any, ...]:
        self._link()
        return _join, (self._cfg,)

    def __repr__(self) -> str:
        state = "closed" if self._closed else self._plane.backend
        return f"TQDataPlaneClient({state}, namespace={self._plane.namespace!r})"


def _join(cfg: DataPlaneConfig) -> TQDataPlaneClient:
    return TQDataPlaneClient(cfg, bootstrap=False)
