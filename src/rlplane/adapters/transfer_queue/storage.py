"""Bytes in and out of TransferQueue: its storage units, or Mooncake through its client.

A write is stored as chunks, one row of TransferQueue each. Beside the bytes goes the write's number, because
TransferQueue gives an index to a new owner after a clear: a reader who comes late must not take that one's
bytes for his own. In SimpleStorage the number is a field of the row, in Mooncake a part of the key.
"""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict
from torch import Tensor

from rlplane.adapters.transfer_queue.wire import Column
from rlplane.adapters.transfer_queue.writes import Write
from rlplane.errors import CapacityTimeoutError, DataPlaneError, PlaneConnectionError

__all__ = ["Gone", "MooncakeStorage", "Pieces", "SimpleStorage", "Storage", "UnitDied", "Wanted", "key_of"]

NUMBER_FIELD = "__rlplane_write__"

# What Mooncake answers: not there; no memory for it; the process that holds it cannot be reached.
_NOT_FOUND, _NO_ROOM = -704, -200
_TRANSFER_ERRORS = range(-899, -799)
# More in one call overflow Mooncake's queues over TCP, which it reports as failed transfers.
_KEYS_PER_CALL = 400


class Gone(Exception):
    """What was asked for is not in storage any more: it was cleared, or it went with a storage unit."""

    def __init__(self, keys: Sequence[str] = ()) -> None:
        super().__init__(*keys[:3])
        self.keys = frozenset(keys)


class UnitDied(PlaneConnectionError):
    """A storage unit does not live any more: ``unit`` says which, ``keys`` what could not be read."""

    def __init__(self, message: str = "", unit: int = -1) -> None:
        super().__init__(message)
        self.unit = unit
        self.keys: frozenset[str] = frozenset()

    def __reduce__(self) -> tuple[type[UnitDied], tuple[str, int]]:
        return type(self), (self.message, self.unit)


@dataclass
class Wanted:
    """Chunks of one write that are to be read, with the fields that are wanted of them."""

    write: Write
    chunks: NDArray[np.int64]
    fields: list[str]


@dataclass
class Pieces:
    """Bytes of one field that were read.

    Chunk ``c`` of write ``w`` starts at byte ``base[w, c][1]`` of ``tensors[base[w, c][0]]``. ``private``
    says that the tensors belong to the reader, who may hand them out without a copy.
    """

    tensors: list[Tensor]
    base: dict[tuple[int, int], tuple[int, int]]
    private: bool


def chunk_bounds(write: Write, name: str) -> NDArray[np.int64]:
    """Where the chunks of a field begin in the bytes of the write, and behind the last one its end."""
    offsets = write.layouts[name].offsets()
    starts = np.arange(0, write.layouts[name].rows, max(1, write.chunk_rows))
    return np.append(offsets[starts], offsets[-1])


class Storage(ABC):
    """What the client needs of a backend. Calls raise ``PlaneConnectionError`` instead of hanging."""

    def __init__(self, client: Any, units: Sequence[Any], controller: Any, ack_timeout_s: float) -> None:
        self.client, self.units, self.controller = client, list(units), controller
        self.ack_timeout_s = ack_timeout_s

    @abstractmethod
    def store(self, write: Write, columns: Mapping[str, Column], deadline: float) -> int:
        """Store a write that is not visible yet; return the number of values it became."""

    @abstractmethod
    def fetch(self, wanted: Sequence[Wanted]) -> dict[str, Pieces]:
        """Read chunks; ``Gone`` when one is not there any more."""

    @abstractmethod
    def discard(self, write: Write) -> None:
        """Clear a write and give its rows back to TransferQueue."""

    @abstractmethod
    def unit_of(self, index: int) -> int | None:
        """The storage unit that holds a row, where that is known."""

    def allocate(self, partition_id: str, count: int) -> list[int]:
        """Get ``count`` rows from TransferQueue's controller."""
        # By key, because rows that were inserted without one cannot be cleared before they are produced.
        call = uuid.uuid4().hex
        keys = [f"rlplane-{call}-{number}" for number in range(count)]
        request = self.client.async_kv_retrieve_meta(keys=keys, partition_id=partition_id, create=True)
        return list(self.run(request, "TransferQueue's controller").global_indexes)

    def close(self, *, wait: bool = True) -> None:
        """Close this process's client of TransferQueue; ``wait`` for what ends by itself a little later."""
        self.client.close()

    def run(self, coroutine: Any, what: str, nbytes: int = 0) -> Any:
        """Run a coroutine of TransferQueue's client, which would wait for ever for somebody who died."""
        future: Future[Any] = asyncio.run_coroutine_threadsafe(coroutine, self.client._loop)
        # 50 MB/s is slow for a network: what has not arrived by then is not coming.
        deadline = time.monotonic() + self.ack_timeout_s + nbytes / 50e6
        while True:
            left = deadline - time.monotonic()
            try:
                return future.result(timeout=max(0.0, min(0.5, left)))
            except TimeoutError:
                if future.done():
                    # It came in the moment between, or the timeout is its own.
                    return future.result()
                try:
                    self.check_alive(max(0.5, min(left, self.ack_timeout_s)))
                    if left <= 0:
                        raise PlaneConnectionError(
                            f"{what} did not answer within {self.ack_timeout_s:g} s (ack_timeout_ms)"
                        )
                except PlaneConnectionError:
                    future.cancel()
                    raise

    def check_alive(self, timeout_s: float) -> None:
        """Raise when TransferQueue's controller or a storage unit has died."""
        import ray

        names = ["TransferQueue's controller", *(f"storage unit {n}" for n in range(len(self.units)))]
        for place, handle in enumerate([self.controller, *self.units]):
            try:
                ray.get(handle.get_zmq_server_info.remote(), timeout=timeout_s)
            except ray.exceptions.GetTimeoutError:
                continue
            except ray.exceptions.RayError as error:
                message = f"{names[place]} has died: {str(error).splitlines()[0]}"
                if place:
                    raise UnitDied(message, place - 1) from error
                raise PlaneConnectionError(message) from error


class SimpleStorage(Storage):
    """TransferQueue's own storage units, reached over ZMQ."""

    def store(self, write: Write, columns: Mapping[str, Column], deadline: float) -> int:
        from transfer_queue.metadata import BatchMeta

        count = len(write.indexes)
        fields: dict[str, Tensor] = {NUMBER_FIELD: torch.full((count, 1), write.number, dtype=torch.int64)}
        for name, column in columns.items():
            bounds = torch.from_numpy(chunk_bounds(write, name))
            fields[name] = torch.nested.nested_tensor_from_jagged(column.data, bounds)
        meta = BatchMeta(write.indexes, [write.partition_id] * count)
        data = TensorDict(fields, batch_size=[count])
        put = self.client.storage_manager.put_data(data, meta)
        self.run(_as_connection_errors(put), "TransferQueue's storage", write.nbytes)
        return count * len(columns)

    def fetch(self, wanted: Sequence[Wanted]) -> dict[str, Pieces]:
        manager = self.client.storage_manager
        unit_ids = list(manager.storage_unit_infos)
        # One request per storage unit and set of fields, however many writes the rows come from.
        requests: dict[tuple[tuple[str, ...], int], list[tuple[Write, int]]] = {}
        for want in wanted:
            for chunk in want.chunks.tolist():
                unit = want.write.indexes[chunk] % len(unit_ids)
                requests.setdefault((tuple(want.fields), unit), []).append((want.write, chunk))
        calls = [
            manager._get_from_single_storage_unit(
                [write.indexes[chunk] for write, chunk in rows],
                [NUMBER_FIELD, *fields],
                target_storage_unit=unit_ids[unit],
            )
            for (fields, unit), rows in requests.items()
        ]
        nbytes = sum(want.write.nbytes for want in wanted)
        answers = self.run(_gather(calls), "TransferQueue's storage", nbytes)
        pieces: dict[str, Pieces] = {}
        for ((fields, _), rows), (_, data) in zip(requests.items(), answers, strict=True):
            numbers = data[NUMBER_FIELD]
            if any(int(number) != write.number for number, (write, _) in zip(numbers, rows, strict=True)):
                raise Gone
            for name in fields:
                piece = pieces.setdefault(name, Pieces([], {}, private=False))
                for tensor, (write, chunk) in zip(data[name], rows, strict=True):
                    piece.base[write.number, chunk] = (len(piece.tensors), 0)
                    piece.tensors.append(tensor)
        return pieces

    def discard(self, write: Write) -> None:
        from transfer_queue.metadata import BatchMeta

        meta = BatchMeta(write.indexes, [write.partition_id] * len(write.indexes))
        self.run(self.client.async_clear_samples(meta), "TransferQueue")

    def unit_of(self, index: int) -> int | None:
        return index % len(self.units)


async def _gather(calls: Sequence[Any]) -> Any:
    return await _as_connection_errors(asyncio.gather(*calls))


async def _as_connection_errors(call: Any) -> Any:
    from transfer_queue.storage.simple_storage import StorageKeyNotFoundError

    try:
        return await call
    except StorageKeyNotFoundError as error:
        raise Gone from error
    except RuntimeError as error:
        if "not found. Available" in str(error):
            # A unit that has none of a field answers so: the last of its rows have been cleared.
            raise Gone from error
        raise PlaneConnectionError(f"TransferQueue's storage failed: {error}") from error


class MooncakeStorage(Storage):
    """Mooncake's store, through TransferQueue's client of it.

    This process lends it no memory: that is the storage units' task, so that what a worker wrote stays when
    the worker goes.
    """

    def __init__(self, client: Any, units: Sequence[Any], controller: Any, ack_timeout_s: float) -> None:
        super().__init__(client, units, controller, ack_timeout_s)
        self._mooncake = client.storage_manager.storage_client
        self._store = self._mooncake._store
        # One transfer at a time: a buffer that two threads have registered is gone for both when one is done.
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="rlplane-mooncake")

    def store(self, write: Write, columns: Mapping[str, Column], deadline: float) -> int:
        keys: list[str] = []
        pointers: list[int] = []
        sizes: list[int] = []
        for name, column in columns.items():
            base = column.data.data_ptr()
            for chunk, (start, stop) in enumerate(pairwise(chunk_bounds(write, name).tolist())):
                if stop > start:
                    keys.append(key_of(write, chunk, name))
                    pointers.append(base + start)
                    sizes.append(stop - start)
        regions = [(c.data.data_ptr(), c.data.numel()) for c in columns.values() if c.data.numel()]
        try:
            self._transfer(self._put, keys, pointers, sizes, regions, deadline)
        except BaseException:
            self._store.batch_remove(keys, force=True)
            raise
        self._announce(write, columns)
        return len(keys)

    def fetch(self, wanted: Sequence[Wanted]) -> dict[str, Pieces]:
        keys: list[str] = []
        pointers: list[int] = []
        sizes: list[int] = []
        pieces: dict[str, Pieces] = {}
        by_field: dict[str, list[Wanted]] = {}
        for want in wanted:
            for name in want.fields:
                by_field.setdefault(name, []).append(want)
        for name, wants in by_field.items():
            extents = []
            total = 0
            for want in wants:
                bounds = chunk_bounds(want.write, name)
                for chunk in want.chunks.tolist():
                    size = int(bounds[chunk + 1] - bounds[chunk])
                    extents.append((want.write, chunk, total, size))
                    total += size
            # One buffer per field, in the order of the rows: what is read in full is the column already.
            buffer = torch.empty(total, dtype=torch.uint8)
            piece = pieces[name] = Pieces([buffer], {}, private=True)
            for write, chunk, offset, size in extents:
                piece.base[write.number, chunk] = (0, offset)
                if size:
                    keys.append(key_of(write, chunk, name))
                    pointers.append(buffer.data_ptr() + offset)
                    sizes.append(size)
        regions = [(p.tensors[0].data_ptr(), p.tensors[0].numel()) for p in pieces.values()]
        self._transfer(self._get, keys, pointers, sizes, [r for r in regions if r[1]], 0.0)
        return pieces

    def discard(self, write: Write) -> None:
        from transfer_queue.metadata import BatchMeta

        count = len(write.indexes)
        keys = [key_of(write, chunk, name) for name in write.layouts for chunk in range(count)]
        for code in self._store.batch_remove(keys, force=True):
            if code not in (0, _NOT_FOUND):
                raise DataPlaneError(f"Mooncake could not remove a value of write {write.number}: {code}")
        meta = BatchMeta(write.indexes, [write.partition_id] * count)
        self.run(self.client._mark_clearing_in_controller(meta), "TransferQueue's controller")
        self.run(self.client._clear_meta_in_controller(meta), "TransferQueue's controller")

    def unit_of(self, index: int) -> int | None:
        return None

    def close(self, *, wait: bool = True) -> None:
        self._threads.shutdown(wait=False)
        super().close()
        # It joins a thread that looks up once a second; nobody else has to wait for that.
        closing = threading.Thread(target=self._mooncake.close, name="rlplane-mooncake-close")
        closing.start()
        if wait:
            closing.join()

    def _announce(self, write: Write, columns: Mapping[str, Column]) -> None:
        """Keep TransferQueue's production status true, as its own put does."""
        schema = {}
        for name in columns:
            sizes = np.diff(chunk_bounds(write, name)).tolist()
            schema[name] = {
                "dtype": torch.uint8,
                "shape": (sizes[0],),
                "is_nested": True,
                "is_non_tensor": False,
                "per_sample_shapes": [(size,) for size in sizes],
            }
        notify = self.client.storage_manager.notify_data_update(write.partition_id, write.indexes, schema)
        self.run(notify, "TransferQueue's controller")

    def _transfer(
        self,
        move: Any,
        keys: list[str],
        pointers: list[int],
        sizes: list[int],
        regions: Sequence[tuple[int, int]],
        deadline: float,
    ) -> None:
        with self._lock:
            for pointer, size in regions:
                self._store.register_buffer(pointer, size)
            try:
                for first in range(0, len(keys), _KEYS_PER_CALL):
                    part = slice(first, first + _KEYS_PER_CALL)
                    move(keys[part], pointers[part], sizes[part], deadline)
            finally:
                for pointer, _ in regions:
                    self._store.unregister_buffer(pointer)

    def _put(self, keys: list[str], pointers: list[int], sizes: list[int], deadline: float) -> None:
        config = self._mooncake.replica_config
        attempts = 0
        while keys:
            codes = self._call(
                lambda keys=keys, pointers=pointers, sizes=sizes: self._store.batch_upsert_from(
                    keys, pointers, sizes, config=config
                )
            )
            failed = [place for place, code in enumerate(codes) if code != 0]
            kinds = {codes[place] for place in failed}
            if kinds == {_NO_ROOM}:
                # What was cleared last may still be on its way out, or the store is in pieces.
                if time.monotonic() > deadline:
                    raise CapacityTimeoutError(
                        f"Mooncake has no room for {sum(sizes)} more bytes; nothing was written"
                    )
                time.sleep(0.02)
            elif failed:
                attempts += 1
                self._retry_or_raise(kinds, attempts, [keys[place] for place in failed])
            keys = [keys[place] for place in failed]
            pointers = [pointers[place] for place in failed]
            sizes = [sizes[place] for place in failed]

    def _get(self, keys: list[str], pointers: list[int], sizes: list[int], deadline: float) -> None:
        attempts = 0
        while keys:
            codes = self._call(
                lambda keys=keys, pointers=pointers, sizes=sizes: self._store.batch_get_into(
                    keys, pointers, sizes
                )
            )
            failed = [
                place for place, (code, size) in enumerate(zip(codes, sizes, strict=True)) if code != size
            ]
            kinds = {codes[place] for place in failed}
            if _NOT_FOUND in kinds:
                raise Gone([keys[place] for place in failed])
            if failed:
                attempts += 1
                self._retry_or_raise(kinds, attempts, [keys[place] for place in failed])
            keys = [keys[place] for place in failed]
            pointers = [pointers[place] for place in failed]
            sizes = [sizes[place] for place in failed]

    def _retry_or_raise(self, kinds: set[int], attempts: int, keys: Sequence[str]) -> None:
        if kinds <= set(_TRANSFER_ERRORS):
            try:
                self.check_alive(self.ack_timeout_s)
            except UnitDied as error:
                error.keys = frozenset(keys)
                raise
        if attempts >= 3:
            raise PlaneConnectionError(
                f"Mooncake failed three times with {sorted(kinds)}, first for {keys[0]!r}"
            )
        time.sleep(0.05 * attempts)

    def _call(self, function: Any) -> list[int]:
        """Call Mooncake, which may wait for ever for a master that died."""
        future = self._threads.submit(function)
        try:
            return list(future.result(timeout=self.ack_timeout_s + 60))
        except TimeoutError:
            self.check_alive(self.ack_timeout_s)
            raise PlaneConnectionError("Mooncake did not answer; its master may have died") from None


def key_of(write: Write, chunk: int, name: str) -> str:
    """The key of a chunk in Mooncake."""
    return f"rlplane/{write.number}/{chunk}@{name}"
