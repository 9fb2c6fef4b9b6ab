"""Bytes in and out of Mooncake, through TransferQueue's client of it.

This process lends the store no memory: that is the storage units' task, so that what a worker wrote stays
when the worker goes.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from torch import Tensor

from rlplane.errors import CapacityTimeoutError, DataPlaneError, PlaneConnectionError
from rlplane.storage.chunks import Chunk, ChunksLostError
from rlplane.storage.mooncake.sharing import SharedMooncake
from rlplane.storage.places import Loss, UnitsDiedError

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
    """A ``ChunkStore``: values in Mooncake, by number.

    Args:
        client: The process's connection, of which this is one user; closed with this store.
        check_alive: Raises ``UnitsDiedError`` when a storage unit has died, and ``PlaneConnectionError`` when
            the master has.
        ack_timeout_s: How long an answer may take.
        wait_for_close: Whether ``close`` waits for Mooncake's own threads.
    """

    def __init__(
        self,
        client: SharedMooncake,
        check_alive: Callable[[], None],
        ack_timeout_s: float,
        *,
        wait_for_close: bool = False,
    ) -> None:
        self._client, self._check_alive, self._ack_timeout_s = client, check_alive, ack_timeout_s
        self._wait_for_close = wait_for_close
        self._store = client._store
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="rlplane-mooncake")

    def put(self, chunks: Sequence[Chunk], buffer: Tensor, deadline: float) -> None:
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
                    self.drop(chunks)
            raise

    def get(self, chunks: Sequence[Chunk], buffer: Tensor) -> None:
        def move(part: list[Chunk], memory: Tensor) -> list[int]:
            codes = self._store.batch_get_into(
                [_key(chunk.key) for chunk in part],
                [memory.data_ptr() + chunk.start for chunk in part],
                [chunk.size for chunk in part],
            )
            return [0 if code == chunk.size else int(code) for code, chunk in zip(codes, part, strict=True)]

        self._transfer(move, chunks, buffer, None)

    def missing(self, keys: Sequence[int]) -> list[int]:
        """Those of the keys that Mooncake has no value for."""
        absent: list[int] = []
        for first in range(0, len(keys), _KEYS_PER_CALL):
            part = keys[first : first + _KEYS_PER_CALL]
            found = self._call(partial(self._store.batch_is_exist, [_key(key) for key in part]))
            absent += [key for key, code in zip(part, found, strict=True) if code == 0]
        return absent

    def drop(self, chunks: Sequence[Chunk]) -> None:
        names = [_key(chunk.key) for chunk in chunks]
        for first in range(0, len(names), _KEYS_PER_CALL):
            part = names[first : first + _KEYS_PER_CALL]
            for code in self._call(partial(self._store.batch_remove, part, force=True)):
                if code not in (0, _NOT_FOUND):
                    raise DataPlaneError(f"Mooncake could not remove a value: code {code}")

    def close(self) -> None:
        self._threads.shutdown(wait=False)
        # The last one joins a thread that looks up once a second. Only whoever ends the store itself has to
        # wait for that.
        closing = threading.Thread(target=self._client.close, name="rlplane-mooncake-close")
        closing.start()
        if self._wait_for_close:
            closing.join()

    def _transfer(self, move: Move, chunks: Sequence[Chunk], buffer: Tensor, deadline: float | None) -> None:
        attempts = 0
        while chunks:
            failed = self._move(move, chunks, buffer)
            if failed and (deadline is None or not self._waits(failed, deadline)):
                attempts += 1
                self._retry_or_raise(failed, attempts, is_read=deadline is None)
            chunks = list(failed)

    def _move(self, move: Move, chunks: Sequence[Chunk], buffer: Tensor) -> dict[Chunk, int]:
        """Move every chunk once; return those that failed, with what Mooncake said. Others of this process
        can use the connection between two attempts."""
        failed: dict[Chunk, int] = {}
        with self._client.lock:
            self._store.register_buffer(buffer.data_ptr(), buffer.numel())
            try:
                for first in range(0, len(chunks), _KEYS_PER_CALL):
                    part = list(chunks[first : first + _KEYS_PER_CALL])
                    codes = self._call(partial(move, part, buffer))
                    failed |= {chunk: code for chunk, code in zip(part, codes, strict=True) if code != 0}
            finally:
                self._store.unregister_buffer(buffer.data_ptr())
        return failed

    def _waits(self, failed: Mapping[Chunk, int], deadline: float) -> bool:
        """Wait, if that is what a put has to do.

        The service has counted the room. What was removed last may still be on its way out, or the store's
        memory is in pieces. A unit that has died is on offer until the master has noticed. Mooncake tells
        nobody when that changes: ask again.
        """
        others = set(failed.values()) - {_NO_ROOM}
        died = self._dead_unit(others) if others else None
        if others and died is None:
            return False
        if time.monotonic() > deadline:
            nbytes = sum(chunk.size for chunk in failed)
            raise CapacityTimeoutError(
                f"Mooncake has no room for {nbytes:,} more bytes; nothing was written"
            ) from died
        time.sleep(0.1 if died else 0.02)
        return True

    def _retry_or_raise(self, failed: Mapping[Chunk, int], attempts: int, *, is_read: bool) -> None:
        absent = tuple(chunk.key for chunk, code in failed.items() if code == _NOT_FOUND)
        if absent and is_read:
            raise ChunksLostError(
                "Mooncake does not have it any more", frozenset(absent), Loss(chunks=absent)
            )
        died = self._dead_unit(failed.values())
        if attempts < _ATTEMPTS:
            time.sleep(0.05 * attempts)
            return
        if died is not None:
            keys = tuple(chunk.key for chunk in failed)
            raise ChunksLostError(died.message, frozenset(keys), Loss(chunks=keys)) from died
        codes = sorted(set(failed.values()))
        raise PlaneConnectionError(f"Mooncake failed {attempts} times with the codes {codes}")

    def _dead_unit(self, codes: Collection[int]) -> UnitsDiedError | None:
        """The unit that has died, which may be why these calls failed. A dead master is the end of it."""
        if set(codes) <= _UNREACHABLE:
            try:
                self._check_alive()
            except UnitsDiedError as error:
                return error
        return None

    def _call(self, function: Callable[[], list[int]]) -> list[int]:
        """Call Mooncake, which may wait for ever for a master that died."""
        future = self._threads.submit(function)
        try:
            return future.result(timeout=self._ack_timeout_s + _ANSWER_S)
        except TimeoutError:
            with contextlib.suppress(UnitsDiedError):
                self._check_alive()
            raise _SilentError("Mooncake did not answer; its master may have died") from None


class _SilentError(PlaneConnectionError):
    """Mooncake did not answer: it is not asked again for what can wait."""


def _key(number: int) -> str:
    return f"rlplane/{number}"
