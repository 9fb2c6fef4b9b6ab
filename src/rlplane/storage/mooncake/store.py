"""Bytes in and out of Mooncake, through TransferQueue's client of it.

This process lends the store no memory: that is the storage units' task, so that what a worker wrote stays
when the worker goes.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from torch import Tensor

from rlplane.errors import CapacityTimeoutError, DataPlaneError, PlaneConnectionError
from rlplane.storage.chunks import Chunk, ChunksLostError

__all__ = ["MooncakeStore"]

# What Mooncake answers: not there; no memory for it; the process that holds it, or the master, cannot be
# reached.
_NOT_FOUND, _NO_ROOM = -704, -200
_UNREACHABLE = frozenset([-900, *range(-899, -799)])
# More in one call overflow Mooncake's queues over TCP, which it reports as failed transfers.
_KEYS_PER_CALL = 400
_ATTEMPTS = 3
_ANSWER_S = 60.0

# It is given the buffer and not its address, so that the memory stays for as long as Mooncake may use it.
Move = Callable[[list[Chunk], Tensor], list[int]]


class MooncakeStore:
    """Values in Mooncake, by number.

    Args:
        client: TransferQueue's ``MooncakeStoreClient``; closed with this store.
        check_alive: Raises ``PlaneConnectionError`` when the master or a storage unit has died.
        ack_timeout_s: How long an answer may take.
        wait_for_close: Whether ``close`` waits for Mooncake's own threads.
    """

    def __init__(
        self,
        client: Any,
        check_alive: Callable[[], None],
        ack_timeout_s: float,
        *,
        wait_for_close: bool = False,
    ) -> None:
        self._client, self._check_alive, self._ack_timeout_s = client, check_alive, ack_timeout_s
        self._wait_for_close = wait_for_close
        self._store = client._store
        # One transfer at a time: a buffer that two threads have registered is gone for both when one is done.
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="rlplane-mooncake")

    def put(self, chunks: Sequence[Chunk], buffer: Tensor, deadline: float) -> None:
        """See :class:`~rlplane.storage.chunks.ChunkStore`."""

        def move(part: list[Chunk], memory: Tensor) -> list[int]:
            codes = self._store.batch_upsert_from(
                [_key(chunk.key) for chunk in part],
                [memory.data_ptr() + chunk.start for chunk in part],
                [chunk.size for chunk in part],
                config=self._client.replica_config,
            )
            return [0 if code == 0 else int(code) for code in codes]

        try:
            self._transfer(move, chunks, buffer, deadline)
        except BaseException as error:
            # The service has the place discarded too, but later; this makes room at once.
            if not isinstance(error, _SilentError):
                with contextlib.suppress(DataPlaneError):
                    self.drop([chunk.key for chunk in chunks])
            raise

    def get(self, chunks: Sequence[Chunk], buffer: Tensor) -> None:
        """See :class:`~rlplane.storage.chunks.ChunkStore`."""

        def move(part: list[Chunk], memory: Tensor) -> list[int]:
            codes = self._store.batch_get_into(
                [_key(chunk.key) for chunk in part],
                [memory.data_ptr() + chunk.start for chunk in part],
                [chunk.size for chunk in part],
            )
            return [0 if code == chunk.size else int(code) for code, chunk in zip(codes, part, strict=True)]

        self._transfer(move, chunks, buffer, None)

    def drop(self, keys: Sequence[int]) -> None:
        """See :class:`~rlplane.storage.chunks.ChunkStore`."""
        names = [_key(key) for key in keys]
        for first in range(0, len(names), _KEYS_PER_CALL):
            part = names[first : first + _KEYS_PER_CALL]
            for code in self._call(partial(self._store.batch_remove, part, force=True)):
                if code not in (0, _NOT_FOUND):
                    raise DataPlaneError(f"Mooncake could not remove a value: code {code}")

    def close(self) -> None:
        """See :class:`~rlplane.storage.chunks.ChunkStore`."""
        self._threads.shutdown(wait=False)
        # It joins a thread that looks up once a second. Only whoever ends the store itself has to wait for
        # that.
        closing = threading.Thread(target=self._client.close, name="rlplane-mooncake-close")
        closing.start()
        if self._wait_for_close:
            closing.join()

    def _transfer(self, move: Move, chunks: Sequence[Chunk], buffer: Tensor, deadline: float | None) -> None:
        with self._lock:
            self._store.register_buffer(buffer.data_ptr(), buffer.numel())
            try:
                for first in range(0, len(chunks), _KEYS_PER_CALL):
                    self._move(move, list(chunks[first : first + _KEYS_PER_CALL]), buffer, deadline)
            finally:
                self._store.unregister_buffer(buffer.data_ptr())

    def _move(self, move: Move, chunks: list[Chunk], buffer: Tensor, deadline: float | None) -> None:
        attempts = 0
        while True:
            codes = self._call(partial(move, chunks, buffer))
            failed = [chunk for chunk, code in zip(chunks, codes, strict=True) if code != 0]
            if not failed:
                return
            kinds = {code for code in codes if code != 0}
            if kinds == {_NO_ROOM} and deadline is not None:
                # The service has counted the room. What was removed last may still be on its way out, or the
                # store's memory is in pieces, and Mooncake tells nobody when that changes: ask again.
                if time.monotonic() > deadline:
                    nbytes = sum(chunk.size for chunk in failed)
                    raise CapacityTimeoutError(
                        f"Mooncake has no room for {nbytes:,} more bytes; nothing was written"
                    )
                time.sleep(0.02)
            else:
                attempts += 1
                self._retry_or_raise(kinds, attempts, failed)
            chunks = failed

    def _retry_or_raise(self, kinds: set[int], attempts: int, failed: list[Chunk]) -> None:
        keys = frozenset(chunk.key for chunk in failed)
        if _NOT_FOUND in kinds:
            raise ChunksLostError("Mooncake does not have it any more", keys)
        if kinds <= _UNREACHABLE:
            try:
                self._check_alive()
            except PlaneConnectionError as error:
                raise ChunksLostError(error.message, keys) from error
        if attempts >= _ATTEMPTS:
            raise PlaneConnectionError(f"Mooncake failed {attempts} times with the codes {sorted(kinds)}")
        time.sleep(0.05 * attempts)

    def _call(self, function: Callable[[], list[int]]) -> list[int]:
        """Call Mooncake, which may wait for ever for a master that died."""
        future = self._threads.submit(function)
        try:
            return future.result(timeout=self._ack_timeout_s + _ANSWER_S)
        except TimeoutError:
            self._check_alive()
            raise _SilentError("Mooncake did not answer; its master may have died") from None


class _SilentError(PlaneConnectionError):
    """Mooncake did not answer: it is not asked again for what can wait."""


def _key(number: int) -> str:
    return f"rlplane/{number}"
