"""``UnitWatch``: notices storage units that die, so that nobody has to be handed a sample to find out.

Clients notice too, when they write or read, and tell the service. This is for what nobody touches.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from rlplane.errors import DataPlaneError
from rlplane.service.server import Server
from rlplane.storage.chunks import ChunkStore, chunk_keys
from rlplane.storage.mooncake.store import MooncakeStore
from rlplane.storage.places import Loss, UnitsDiedError

if TYPE_CHECKING:
    from rlplane.adapters.transfer_queue.plane import Plane

logger = logging.getLogger(__name__)

_EVERY_S = 2.0
# Mooncake's master drops what a unit had when it has not heard of it for 30 s (client_ttl).
_MOONCAKE_NOTICES_S = 90.0
_ANSWER_S = 60.0


class UnitWatch:
    """Asks Ray now and then which storage units of a plane live, in a thread."""

    def __init__(self, plane: Plane, store: ChunkStore, server: Server) -> None:
        self._plane, self._store, self._server = plane, store, server
        self._units = dict.fromkeys(range(plane.config["num_storage_units"]))
        self._sweep_until = 0.0
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="rlplane-unit-watch", daemon=True).start()

    def close(self) -> None:
        """Stop watching."""
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.wait(_EVERY_S):
            try:
                self._look()
            except DataPlaneError as error:
                logger.info("the storage units cannot be asked now: %s", error)
            except Exception:
                logger.exception("watching the storage units failed; it is tried again")

    def _look(self) -> None:
        for rank in list(self._units):
            try:
                self._plane.check_unit(rank, _ANSWER_S)
            except UnitsDiedError:
                if self._ended.is_set():
                    return
                del self._units[rank]
                if not isinstance(self._store, MooncakeStore):
                    self._tell(Loss((rank,), self._plane.config["num_storage_units"]))
                self._sweep_until = time.monotonic() + _MOONCAKE_NOTICES_S
        if isinstance(self._store, MooncakeStore) and time.monotonic() < self._sweep_until:
            self._sweep(self._store)

    def _sweep(self, store: MooncakeStore) -> None:
        """Only Mooncake knows what was where: ask it for everything that was committed."""
        keys: list[int] = []
        listed = threading.Event()

        def list_keys() -> None:
            for place in self._server.service.committed_places():
                keys.extend(chunk_keys(place))
            listed.set()

        self._server.call_soon(list_keys)
        if listed.wait(_ANSWER_S):
            missing = store.missing(keys)
            if missing:
                self._tell(Loss(chunks=tuple(missing)))

    def _tell(self, loss: Loss) -> None:
        self._server.call_soon(lambda: self._server.service.lose(loss))
