"""What a connected client has: its connection, its storage, the partitions that it knows, a spare place."""

from __future__ import annotations

import threading
from typing import TypeVar

from rlplane.adapters.steps import Call, ask
from rlplane.control.rules import PartitionSpec
from rlplane.errors import ClientClosedError, InvalidRequestError
from rlplane.service import protocol as wire
from rlplane.service.connection import Connection
from rlplane.storage.places import Place, StorageClient

__all__ = ["Link"]

A = TypeVar("A")


class Link:
    """A connection and a storage of one plane."""

    def __init__(self, connection: Connection, storage: StorageClient) -> None:
        self.connection, self.storage = connection, storage
        self.specs: dict[str, tuple[int, PartitionSpec]] = {}
        self.spare: Place | None = None
        self.in_use = UsesOfStorage()
        self._lock = threading.Lock()

    def request(self, request: wire.Request, expected: type[A], *, waits_s: float = 0.0) -> A:
        """Send a request and return its answer; a failure is raised."""
        answer = self.connection.exchange(request, waits_s=waits_s)
        if isinstance(answer, wire.Failure):
            raise wire.error_of(answer)
        assert isinstance(answer, expected)
        return answer

    def describe(self, partition_id: str) -> Call[tuple[int, PartitionSpec]]:
        """The partition's version and schema, as this client last saw them."""
        if not isinstance(partition_id, str):
            raise InvalidRequestError(f"partition_id must be a string, not a {type(partition_id).__name__}")
        known = self.specs.get(partition_id)
        if known is None:
            answer = yield from ask(wire.Describe(partition_id), wire.Described)
            known = self.specs[partition_id] = (answer.version, answer.spec)
        return known

    def take_spare(self, nbytes: int) -> Place | None:
        """The place that came with the last answer, if it is large enough and was not revoked."""
        with self._lock:
            spare = self.spare
            if spare is None or spare.size < nbytes:
                return None
            self.spare = None
            return spare if self.storage.take_spare(spare) else None

    def close(self) -> None:
        """Say goodbye to the service, and let go of the storage."""
        self.connection.close()
        self.storage.close()


class UsesOfStorage:
    """Around every use of storage: ``close`` in another thread waits for it, and none begins after."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may close the client in here
        self._changed = threading.Condition(self._lock)
        self._inside: list[int] = []
        self._ended = False

    def __enter__(self) -> None:
        with self._lock:
            if self._ended:
                raise ClientClosedError("the client was closed during the call")
            self._inside.append(threading.get_ident())

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside.remove(threading.get_ident())
            if self._ended:
                self._changed.notify_all()

    def end(self, patience_s: float) -> None:
        """Let none begin, and wait for those of other threads. A signal handler may have interrupted one
        of this thread. Bounded, because Ctrl-C may have kept one from saying that it is done."""
        mine = threading.get_ident()
        with self._lock:
            self._ended = True
            self._changed.wait_for(lambda: all(thread == mine for thread in self._inside), patience_s)
