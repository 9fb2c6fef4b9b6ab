"""One connection of a process to a Mooncake store, for all who use that store.

To close a connection takes Mooncake a second, and no other thread of the process runs meanwhile. So it is
closed when its last user goes.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any


class SharedMooncake:
    """TransferQueue's ``MooncakeStoreClient``, with the lock that its users share."""

    def __init__(self, key: str, client: Any) -> None:
        self._key, self._client = key, client
        self._store, self.replica_config = client._store, client.replica_config
        # One transfer at a time: a buffer that two threads have registered is gone for both when one is done.
        self.lock = threading.Lock()
        self.users = 0

    def close(self) -> None:
        """One user less."""
        with _guard:
            self.users -= 1
            if self.users:
                return
            _open.pop(self._key, None)
        self._client.close()


_open: dict[str, SharedMooncake] = {}
_guard = threading.Lock()


def share(key: str, connect: Callable[[], Any]) -> SharedMooncake:
    """The connection that ``key`` names, which ``connect`` makes if there is none. To be closed by each who
    gets it."""
    with _guard:
        shared = _open.get(key)
        if shared is None:
            shared = _open[key] = SharedMooncake(key, connect())
        shared.users += 1
        return shared


def _forget_all() -> None:
    """In a forked child: the connections, and perhaps the lock, are the parent's."""
    global _guard
    _guard = threading.Lock()
    _open.clear()


os.register_at_fork(after_in_child=_forget_all)
