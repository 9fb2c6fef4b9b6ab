"""The local engine inside one process: the control state behind a lock, the bytes in ordinary memory.

Threads of one process share a plane. The bootstrap client makes it; others join it by its name, which
is ``controller_address``, or else the newest one that has no name. A waiting claim sleeps on an event of
its own and is woken by the write that completes it.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from rlplane.adapters.local.blocks import Assembler, Layout
from rlplane.adapters.local.checkpoint import read_checkpoint, write_checkpoint
from rlplane.adapters.local.copying import copy_all
from rlplane.adapters.local.mapping import scratch
from rlplane.adapters.local.requests import (
    Write,
    as_batch,
    checked_fields,
    fields_to_read,
    lay_out,
    meta_of_batch,
    warn_undeclared,
)
from rlplane.errors import CapacityError, CapacityTimeoutError, ClientClosedError, PlaneConnectionError
from rlplane.index import Batch, Claim, ControlState, Put
from rlplane.interfaces import DEFAULT_TIMEOUT_S, DataPlaneClient, DataPlaneConfig, KVBatchMeta
from rlplane.persist import dump_state, restore_state
from rlplane.rules import PartitionSpec, check_ids, check_names, check_timeout

__all__ = ["MemoryDataPlaneClient"]


class _Waiter:
    """One parked request: an event, and the answer when it is there."""

    __slots__ = ("event", "result")

    def __init__(self) -> None:
        self.event = threading.Event()
        self.result: Any = None


class _Plane:
    """What the clients of one plane share. Every use of ``state`` and ``blocks`` is under ``lock``."""

    def __init__(self, capacity: int, max_bytes: int) -> None:
        self.lock = threading.Lock()
        self.room = threading.Condition(self.lock)
        self.state = ControlState(capacity)
        self.blocks: dict[int, tuple[Layout, Tensor]] = {}
        self.max_bytes = max_bytes
        self.held_bytes = 0
        self.next_block = 0
        self.next_owner = 0
        self.closed = False

    def settle(self) -> None:
        """Free what the last change released, and wake whom it answered."""
        for block in self.state.freed:
            self.drop(block)
        self.state.freed.clear()
        for waiter, result in self.state.answers:
            waiter.result = result
            waiter.event.set()
        self.state.answers.clear()

    def drop(self, block: int) -> None:
        self.held_bytes -= self.blocks.pop(block)[0].nbytes
        self.room.notify_all()

    def reserve(self, nbytes: int, deadline: float) -> None:
        """Wait until ``nbytes`` more may be held, and count them as held."""
        if nbytes > self.max_bytes:
            raise CapacityError(
                f"a put of {nbytes:,} bytes can never fit into global_segment_size {self.max_bytes:,}"
            )
        with self.lock:
            while self.held_bytes + nbytes > self.max_bytes:
                left = deadline - time.monotonic()
                if left <= 0 or self.closed:
                    raise CapacityTimeoutError(
                        f"no room for {nbytes:,} bytes: {self.held_bytes:,} of global_segment_size "
                        f"{self.max_bytes:,} are in use; nothing was written"
                    )
                self.room.wait(min(left, threading.TIMEOUT_MAX))
            self.held_bytes += nbytes


_planes: dict[str, _Plane] = {}
_planes_lock = threading.Lock()


class MemoryDataPlaneClient(DataPlaneClient):
    """A client of a plane in this process. See ``docs/contract.md`` for what each call promises."""

    def __init__(self, cfg: DataPlaneConfig, *, bootstrap: bool = True) -> None:
        self._name = cfg.get("controller_address") or "default"
        self._allow_pickle = bool(cfg.get("allow_pickle", False))
        self._bootstrap = bootstrap
        self._closed = False
        self._warned: set[tuple[str, str]] = set()
        with _planes_lock:
            if bootstrap:
                self._plane = _Plane(cfg["storage_capacity"], cfg["global_segment_size"])
                _planes[self._name] = self._plane
            elif self._name in _planes:
                self._plane = _planes[self._name]
            else:
                raise PlaneConnectionError(
                    f"no plane named {self._name!r} in this process: build the bootstrap client first, "
                    "or use backend: shm to reach a plane of another process"
                )
        with self._plane.lock:
            self._owner = self._plane.next_owner
            self._plane.next_owner += 1

    def register_partition(
        self,
        partition_id: str,
        fields: list[str],
        num_samples: int,
        consumer_tasks: list[str],
        grpo_group_size: int | None = None,
        enums: dict[str, list[str]] | None = None,
    ) -> None:
        plane = self._open()
        spec = PartitionSpec.checked(
            partition_id, fields, num_samples, consumer_tasks, grpo_group_size, enums
        )
        with plane.lock:
            plane.state.register(spec)
            plane.settle()

    def put_samples(
        self,
        sample_ids: list[str],
        partition_id: str,
        fields: TensorDict | None = None,
        tags: list[dict[str, Any]] | None = None,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> KVBatchMeta:
        plane = self._open()
        deadline = time.monotonic() + check_timeout(timeout_s)
        with plane.lock:
            spec = plane.state.partition(partition_id).spec
        write = lay_out(spec, sample_ids, fields, tags, allow_pickle=self._allow_pickle)
        if write.ids:
            self._write(plane, write, deadline)
            warn_undeclared(spec, write.fields or (), self._warned)
        return write.meta(allow_pickle=self._allow_pickle)

    def _write(self, plane: _Plane, write: Write, deadline: float) -> None:
        sizes = [source.nbytes for source in write.sources]
        plane.reserve(sum(sizes), deadline)
        numbers: list[int] = []
        waiter = _Waiter()
        try:
            filled = [
                (source.layout, torch.empty(source.nbytes, dtype=torch.uint8, device="cpu"))
                for source in write.sources
            ]
            copies = [
                copy
                for source, (_, block) in zip(write.sources, filled, strict=True)
                for copy in source.copies(block, 0)
            ]
            copy_all(copies)
            with plane.lock:
                numbers = list(range(plane.next_block, plane.next_block + len(filled)))
                plane.next_block += len(filled)
                plane.blocks.update(zip(numbers, filled, strict=True))
                names = [source.name for source in write.sources]
                put = Put(write.partition_id, write.ids, dict(zip(names, numbers, strict=True)))
                put.tags = None if write.tags is None else [dict(tag) for tag in write.tags]
                put.nbytes, put.owner, put.now, put.token = sizes, self._owner, time.time(), waiter
                done = plane.state.put(put)
                plane.settle()
            if not done:
                self._wait(plane, waiter, deadline)
        except BaseException:
            with plane.lock:
                if not numbers:
                    plane.held_bytes -= sum(sizes)
                for number in numbers:
                    if number in plane.blocks and not plane.state.holds(number):
                        plane.drop(number)
            raise

    def claim_meta(
        self,
        partition_id: str,
        task_name: str,
        required_fields: list[str],
        batch_size: int,
        dp_rank: int | None = None,
        blocking: bool = True,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        *,
        where: Mapping[str, Any] | None = None,
    ) -> KVBatchMeta:
        plane = self._open()
        deadline = time.monotonic() + check_timeout(timeout_s)
        names = check_names("required_fields", required_fields)
        waiter = _Waiter()
        claim = Claim(partition_id, task_name, names, batch_size, where, owner=self._owner, token=waiter)
        with plane.lock:
            batch = plane.state.claim(claim, blocking=blocking)
            plane.settle()
        if batch is None:
            try:
                batch = self._wait(plane, waiter, deadline)
            except BaseException:
                if isinstance(waiter.result, Batch):
                    # Interrupted just after it was answered: nobody has seen these samples.
                    with plane.lock:
                        plane.state.unclaim(partition_id, task_name, waiter.result.ids, self._owner)
                        plane.settle()
                raise
        return meta_of_batch(partition_id, task_name, names, batch, allow_pickle=self._allow_pickle)

    def _wait(self, plane: _Plane, waiter: _Waiter, deadline: float) -> Any:
        error: BaseException | None = None
        try:
            waiter.event.wait(min(max(deadline - time.monotonic(), 0), threading.TIMEOUT_MAX))
        finally:
            with plane.lock:
                error = plane.state.give_up(waiter)
                plane.settle()
        if error is None and isinstance(waiter.result, BaseException):
            error = waiter.result
        if error is not None:
            raise error
        return waiter.result

    def get_data(self, meta: KVBatchMeta, select_fields: list[str] | None = None) -> TensorDict:
        return self._read(meta.partition_id, meta.sample_ids, fields_to_read(meta, select_fields))

    def get_samples(self, sample_ids: list[str], partition_id: str, select_fields: list[str]) -> TensorDict:
        return self._read(partition_id, sample_ids, checked_fields(select_fields))

    def _read(self, partition_id: str, sample_ids: list[str], names: list[str]) -> TensorDict:
        plane = self._open()
        ids = check_ids(sample_ids, distinct=False)
        with plane.lock:
            places = plane.state.locate(partition_id, ids, names)
            # Holding the tensors keeps them alive: what is read stays valid after a clear.
            used = {number for blocks, _ in places.values() for number in set(blocks.tolist())}
            held = {number: plane.blocks[number] for number in used}

        def own(number: int, start: int, stop: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
            copy = scratch.empty(stop - start)
            copy_all([(copy.data_ptr(), held[number][1].data_ptr() + start, stop - start)])
            return copy.view(dtype).view(shape)

        assembler = Assembler(
            {number: layout for number, (layout, _) in held.items()},
            lambda number: held[number][1].numpy(),
            own,
            scratch.empty,
            allow_pickle=self._allow_pickle,
        )
        columns = {name: assembler.column(name, *places[name]) for name in names}
        assembler.finish()
        return as_batch(columns, len(ids))

    def check_consumption_status(self, partition_id: str, task_names: list[str]) -> bool:
        plane = self._open()
        names = check_names("task_names", task_names)
        with plane.lock:
            return plane.state.partition(partition_id).consumed(names)

    def clear_samples(self, sample_ids: list[str] | None, partition_id: str) -> None:
        plane = self._open()
        ids = None if sample_ids is None else check_ids(sample_ids, distinct=False)
        with plane.lock:
            if ids is None:
                cleared = plane.state.clear_written_by(partition_id, self._owner)
            else:
                cleared = plane.state.clear(partition_id, ids)
            plane.settle()
        if ids is None and not cleared:
            warnings.warn(f"nothing to clear in partition {partition_id!r}", UserWarning, stacklevel=2)

    def list_sample_ids(self, partition_id: str) -> list[str]:
        plane = self._open()
        with plane.lock:
            return list(plane.state.partition(partition_id).rows)

    def partition_status(self, partition_id: str) -> dict[str, Any]:
        plane = self._open()
        with plane.lock:
            status = plane.state.partition(partition_id).status(time.time())
            return status | {"capacity": plane.state.capacity, "capacity_bytes": plane.max_bytes}

    def save_checkpoint(self, path: str) -> None:
        plane = self._open()
        with plane.lock:
            state = dump_state(plane.state)
            # Blocks are never written again, so holding them is a consistent copy.
            blocks = {number: plane.blocks[number] for number in plane.state.blocks()}
        write_checkpoint(path, state, blocks)

    def load_checkpoint(self, path: str, *, release_claims: bool = False) -> None:
        plane = self._open()
        checkpoint = read_checkpoint(path)
        sizes = {number: layout.nbytes for number, layout in checkpoint.layouts.items()}
        total = sum(sizes.values())
        if total > plane.max_bytes:
            raise CapacityError(
                f"the checkpoint has {total:,} bytes; global_segment_size is {plane.max_bytes:,}"
            )
        loaded = {}
        for number, layout in checkpoint.layouts.items():
            block = torch.empty(layout.nbytes, dtype=torch.uint8, device="cpu")
            checkpoint.read_into(number, block)
            loaded[number] = (layout, block)
        with plane.lock:
            numbers = {number: plane.next_block + place for place, number in enumerate(loaded)}
            state = restore_state(
                checkpoint.state, numbers, sizes, plane.state.capacity, release_claims=release_claims
            )
            plane.state.abort(PlaneConnectionError("the plane was replaced by a checkpoint"))
            plane.settle()
            plane.next_block += len(loaded)
            plane.state = state
            plane.blocks = {numbers[number]: block for number, block in loaded.items()}
            plane.held_bytes = total
            plane.room.notify_all()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        plane = self._plane
        gone = ClientClosedError("the client was closed while the call was waiting")
        with plane.lock:
            if not self._bootstrap:
                plane.state.abort(gone, self._owner)
            else:
                plane.closed = True
                plane.state.abort(gone)
                plane.blocks.clear()
                plane.room.notify_all()
            plane.settle()
        with _planes_lock:
            if self._bootstrap and _planes.get(self._name) is plane:
                del _planes[self._name]

    def _open(self) -> _Plane:
        if self._closed:
            raise ClientClosedError("this client is closed; build a new one with build_data_plane_client")
        if self._plane.closed:
            raise PlaneConnectionError("the plane was closed by its bootstrap client")
        return self._plane

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self._plane.state.partitions)} partitions"
        return f"MemoryDataPlaneClient({self._name!r}, {state})"
