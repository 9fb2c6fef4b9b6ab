"""The client of the shared-memory engine: any number of processes of one machine share a plane.

A put is one copy into recycled shared memory and one round trip. A get is one round trip, and hands
neighbouring rows out without a copy. Who builds the bootstrap client starts the controller and ends it;
others find it by ``controller_address`` or by the environment variable that the bootstrap client sets.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from rlplane.adapters.local import wire
from rlplane.adapters.local.blocks import Assembler, Bytes, Source
from rlplane.adapters.local.checkpoint import read_checkpoint, write_checkpoint
from rlplane.adapters.local.connection import Connection
from rlplane.adapters.local.copying import copy_all
from rlplane.adapters.local.mapping import Lease, Segments, detach_all, scratch
from rlplane.adapters.local.planedir import SPARE_SLOTS, PlaneDir, remove_if_dead
from rlplane.adapters.local.requests import (
    Write,
    as_batch,
    checked_fields,
    fields_to_read,
    lay_out,
    meta_of_batch,
    warn_undeclared,
)
from rlplane.adapters.local.wire import Extent
from rlplane.errors import ClientClosedError, PlaneConnectionError
from rlplane.index import Batch
from rlplane.interfaces import DEFAULT_TIMEOUT_S, DataPlaneClient, DataPlaneConfig, KVBatchMeta
from rlplane.rules import PartitionSpec, check_ids, check_names, check_timeout, compile_where
from rlplane.transfer_stats import TransferRecord, TransferStats

__all__ = ["ADDRESS_VARIABLE", "ShmDataPlaneClient"]

ADDRESS_VARIABLE = "RLPLANE_CONTROLLER_ADDRESS"
_START_TIMEOUT_S = 60.0
_DEFAULT_ACK_TIMEOUT_MS = 30_000
# Below this a copy is cheaper than a mapping of one's own.
_WORTH_MAPPING = 128 * 1024
_NO_SPARE = 0


class ShmDataPlaneClient(DataPlaneClient):
    """A client of a plane on this machine. See ``docs/contract.md`` for what each call promises.

    Usable from several threads. A forked child connects anew, as a worker, on its first call; a
    pickled client does the same where it is unpickled.
    """

    _address: str | None

    def __init__(self, cfg: DataPlaneConfig, *, bootstrap: bool = True) -> None:
        self._cfg = cfg
        self._bootstrap = bootstrap
        self._process: subprocess.Popen[bytes] | None = None
        self._set_up_unconnected(cfg.get("controller_address") or os.environ.get(ADDRESS_VARIABLE))
        if bootstrap:
            self._address = self._start_controller()
        self._link()

    def _set_up_unconnected(self, address: str | None) -> None:
        cfg = self._cfg
        self._address = address
        self._allow_pickle = bool(cfg.get("allow_pickle", False))
        self._slab = int(cfg["local_buffer_size"])
        self._ack_timeout_s = cfg.get("ack_timeout_ms", _DEFAULT_ACK_TIMEOUT_MS) / 1000
        self._closed = False
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._plane: _Link | None = None
        self._warned: set[tuple[str, str]] = set()
        self.transfer_stats = TransferStats()

    @property
    def controller_address(self) -> str | None:
        """Where workers find this plane; goes into their ``controller_address``."""
        return self._address

    def register_partition(
        self,
        partition_id: str,
        fields: list[str],
        num_samples: int,
        consumer_tasks: list[str],
        grpo_group_size: int | None = None,
        enums: dict[str, list[str]] | None = None,
    ) -> None:
        link = self._link()
        spec = PartitionSpec.checked(
            partition_id, fields, num_samples, consumer_tasks, grpo_group_size, enums
        )
        link.connection.request(wire.Register(spec))
        link.specs.pop(partition_id, None)

    def put_samples(
        self,
        sample_ids: list[str],
        partition_id: str,
        fields: TensorDict | None = None,
        tags: list[dict[str, Any]] | None = None,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> KVBatchMeta:
        link = self._link()
        deadline = time.monotonic() + check_timeout(timeout_s)
        while True:
            version, spec = link.describe(partition_id)
            write = lay_out(spec, sample_ids, fields, tags, allow_pickle=self._allow_pickle)
            if not write.ids or self._write(link, write, version, deadline):
                break
            # Registered again meanwhile, perhaps with another vocabulary: look, and lay out anew.
            link.specs.pop(partition_id, None)
        warn_undeclared(spec, write.fields or (), self._warned)
        return write.meta(allow_pickle=self._allow_pickle)

    def _write(self, link: _Link, write: Write, version: int, deadline: float) -> bool:
        layouts = [source.layout for source in write.sources]
        used = sum([source.nbytes for source in write.sources])
        extent: Extent | None = None
        asked = False
        copied = committing = started = time.perf_counter()
        try:
            if layouts:
                extent = link.take_spare(used) or self._reserve(link, used, deadline)
                with link.copying:
                    link.segments.back(extent)
                    copied = time.perf_counter()
                    _fill(link.segments.whole(extent.segment), extent.offset, write.sources)
                committing = time.perf_counter()
            left = max(deadline - time.monotonic(), 0.0)
            commit = wire.Commit(
                write.partition_id,
                version,
                write.ids,
                write.fields or [],
                layouts,
                None if extent is None else extent.number,
                max(used, 1),
                left,
                write.tags,
                # A little more than this put, because the next ragged batch is never of the same size.
                min(used + used // 8, self._slab) if used <= self._slab else 0,
            )
            asked = True
            answer = link.connection.exchange(commit, waits_s=left)
        except BaseException as error:
            # A controller that has not answered the commit is not asked again.
            gone = asked and isinstance(error, PlaneConnectionError)
            if extent is not None and not gone:
                # Nothing happens if the commit has come through after all.
                with contextlib.suppress(PlaneConnectionError):
                    link.connection.request(wire.Unreserve(extent.number))
            raise
        if isinstance(answer, wire.Failure):
            if answer.kind == "StaleSpecError":
                return False
            self.transfer_stats.record_failed_transfer()
            raise wire.error_of(answer)
        assert isinstance(answer, wire.Done)
        if answer.spare is not None:
            link.spare = answer.spare
        if layouts:
            done = time.perf_counter()
            post_s = done - committing + copied - started
            self.transfer_stats.record_transfer(
                TransferRecord(used, len(layouts), post_s, committing - copied)
            )
        return True

    def _reserve(self, link: _Link, nbytes: int, deadline: float) -> Extent:
        left = max(deadline - time.monotonic(), 0.0)
        extent: Extent = link.connection.request(wire.Reserve(nbytes, left), waits_s=left).extent
        return extent

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
        link = self._link()
        check_timeout(timeout_s)
        names = check_names("required_fields", required_fields)
        compile_where(where)  # refused here, with the caller's own values in the message
        plain = None if where is None else {tag: _plain(condition) for tag, condition in where.items()}
        request = wire.ClaimRequest(
            partition_id, task_name, names, batch_size, blocking, float(timeout_s), plain
        )
        answer: wire.Claimed = link.connection.request(request, waits_s=timeout_s if blocking else 0.0)
        batch = Batch(answer.ids, answer.tags)
        return meta_of_batch(partition_id, task_name, names, batch, allow_pickle=self._allow_pickle)

    def get_data(self, meta: KVBatchMeta, select_fields: list[str] | None = None) -> TensorDict:
        return self._read(meta.partition_id, meta.sample_ids, fields_to_read(meta, select_fields))

    def get_samples(self, sample_ids: list[str], partition_id: str, select_fields: list[str]) -> TensorDict:
        return self._read(partition_id, sample_ids, checked_fields(select_fields))

    def _read(self, partition_id: str, sample_ids: list[str], names: list[str]) -> TensorDict:
        link = self._link()
        ids = check_ids(sample_ids, distinct=False)
        started = time.perf_counter()
        located: wire.Located = link.connection.request(wire.Locate(partition_id, ids, names))
        reading = time.perf_counter()
        connection, number = link.connection, located.lease
        lease = Lease(lambda: connection.release(number))
        try:
            with link.copying:
                reader = _Reader(link, located, lease)
                # The reader does not know the assembler: in a cycle, what was read would outlive its reader
                # until the garbage collector came by.
                layouts = {number: layout for number, (_, _, layout) in located.blocks.items()}
                assembler = Assembler(
                    layouts, reader.read, reader.own, reader.empty, allow_pickle=self._allow_pickle
                )
                columns = {
                    name: _column(assembler, name, place)
                    for name, place in zip(names, located.places, strict=True)
                }
                assembler.finish()
        finally:
            lease.done()
        result = as_batch(columns, len(ids))
        if located.blocks:
            nbytes = reader.nbytes
            record = TransferRecord(
                nbytes, len(located.blocks), reading - started, time.perf_counter() - reading
            )
            self.transfer_stats.record_transfer(record)
        return result

    def check_consumption_status(self, partition_id: str, task_names: list[str]) -> bool:
        names = check_names("task_names", task_names)
        return bool(self._link().connection.request(wire.Consumed(partition_id, names)).value)

    def clear_samples(self, sample_ids: list[str] | None, partition_id: str) -> None:
        link = self._link()
        ids = None if sample_ids is None else check_ids(sample_ids, distinct=False)
        cleared = link.connection.request(wire.Clear(partition_id, ids)).value
        if ids is None and not cleared:
            warnings.warn(f"nothing to clear in partition {partition_id!r}", UserWarning, stacklevel=2)

    def list_sample_ids(self, partition_id: str) -> list[str]:
        ids: list[str] = self._link().connection.request(wire.ListIds(partition_id)).value
        return ids

    def partition_status(self, partition_id: str) -> dict[str, Any]:
        status: dict[str, Any] = self._link().connection.request(wire.Status(partition_id)).value
        return status

    def arena_status(self) -> dict[str, Any]:
        """Sizes of the arena, and what is held: segments, extents, leases, clients."""
        status: dict[str, Any] = self._link().connection.request(wire.Status(None)).value
        return status

    def save_checkpoint(self, path: str) -> None:
        link = self._link()
        frozen: wire.Frozen = link.connection.request(wire.Freeze())
        lease = Lease(lambda: link.connection.release(frozen.lease))
        try:
            with link.copying:
                extents = [link.segments.view(extent) for extent in frozen.extents]
                blocks = {
                    number: (layout, extents[index][start : start + layout.nbytes])
                    for number, (index, start, layout) in frozen.blocks.items()
                }
                write_checkpoint(path, frozen.state, blocks)
        finally:
            lease.done()

    def load_checkpoint(self, path: str, *, release_claims: bool = False) -> None:
        link = self._link()
        checkpoint = read_checkpoint(path)
        reserved: list[int] = []
        blocks: dict[int, tuple[int, int, wire.Layout]] = {}
        deadline = time.monotonic() + DEFAULT_TIMEOUT_S
        try:
            for group in _grouped(checkpoint.layouts, self._slab):
                extent = self._reserve(link, sum(layout.nbytes for _, layout in group), deadline)
                reserved.append(extent.number)
                start = 0
                with link.copying:
                    link.segments.back(extent)
                    memory = link.segments.view(extent)
                    for number, layout in group:
                        checkpoint.read_into(number, memory[start : start + layout.nbytes])
                        blocks[number] = (extent.number, start, layout)
                        start += layout.nbytes
            link.connection.request(wire.Restore(checkpoint.state, reserved, blocks, release_claims))
        except BaseException:
            for number in reserved:
                with contextlib.suppress(PlaneConnectionError):
                    link.connection.request(wire.Unreserve(number))
            raise
        link.specs.clear()

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            link, self._plane = self._plane, None
        if link is not None and self._pid == os.getpid():
            # The memory goes to others as soon as the controller hears of the end.
            link.copying.end(self._ack_timeout_s)
            detach_all()
            if self._process is not None:
                with contextlib.suppress(PlaneConnectionError):
                    link.connection.request(wire.Shutdown())
            link.close()
        if self._process is not None and self._pid == os.getpid():
            self._end_controller(self._process)

    # The connection, and how it comes to be

    def _link(self) -> _Link:
        if self._closed:
            raise ClientClosedError("this client is closed; build a new one with build_data_plane_client")
        link = self._plane
        if link is not None and self._pid == os.getpid():
            return link
        return self._connect()

    def _connect(self) -> _Link:
        if self._pid != os.getpid():
            # A forked child: the lock and the connection are the parent's.
            self._lock, self._pid, self._plane = threading.Lock(), os.getpid(), None
            self._bootstrap, self._process = False, None
            self.transfer_stats = TransferStats()
            # The threads of torch's pool did not survive the fork, and a large copy would wait for them for
            # ever. torch's DataLoader does the same in its workers.
            torch.set_num_threads(1)
        with self._lock:
            if self._plane is None:
                if self._address is None:
                    raise PlaneConnectionError(
                        "no plane to connect to: set controller_address in the config or "
                        f"{ADDRESS_VARIABLE} in the environment, or build a bootstrap client"
                    )
                directory = PlaneDir.at(self._address)
                connection = Connection(
                    directory, bootstrap=self._bootstrap, ack_timeout_s=self._ack_timeout_s
                )
                self._plane = _Link(connection)
            return self._plane

    def _start_controller(self) -> str:
        wanted = {
            key: self._cfg.get(key) for key in ("storage_capacity", "global_segment_size", "segment_size")
        }
        read_fd, write_fd = os.pipe()
        command = [sys.executable, "-m", "rlplane.adapters.local.server", "--config", json.dumps(wanted)]
        try:
            self._process = subprocess.Popen(
                [*command, "--ready-fd", str(write_fd)], pass_fds=[write_fd], stdin=subprocess.DEVNULL
            )
        finally:
            os.close(write_fd)
        with os.fdopen(read_fd, "rb") as ready:
            address = ready.read().decode()
        if not address:
            code = self._process.wait(_START_TIMEOUT_S)
            raise PlaneConnectionError(
                f"the controller ended with code {code} before it was ready; see its log"
            )
        os.environ[ADDRESS_VARIABLE] = address
        return address

    def _end_controller(self, process: subprocess.Popen[bytes]) -> None:
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if self._address is not None:
            remove_if_dead(Path(self._address.removeprefix("shm://")))
            if os.environ.get(ADDRESS_VARIABLE) == self._address:
                del os.environ[ADDRESS_VARIABLE]

    def __getstate__(self) -> dict[str, Any]:
        cfg = {key: value for key, value in self._cfg.items() if key != "observability"}
        return {"cfg": cfg, "address": self._address, "closed": self._closed}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._cfg = state["cfg"]
        self._bootstrap, self._process = False, None
        self._set_up_unconnected(state["address"])
        self._closed = state["closed"]

    def __del__(self) -> None:
        # Without close, a bootstrap client that is dropped still ends its controller: the socket closes.
        with contextlib.suppress(Exception):
            if self._process is not None and self._pid == os.getpid() and not self._closed:
                self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "connected" if self._plane else "not connected"
        return f"ShmDataPlaneClient({self._address!r}, {state})"


class _Link:
    """What a connected client has: its connection, mappings, specs it knows, and a spare extent."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.segments = Segments(connection.directory)
        self.specs: dict[str, tuple[int, PartitionSpec]] = {}
        self.spare: Extent | None = None
        self.copying = _Copying()
        self._lock = threading.Lock()
        self._slot = connection.owner % SPARE_SLOTS
        directory = connection.directory
        fd = os.open(directory.spares, os.O_RDWR | os.O_CLOEXEC)
        self._spares = memoryview(mmap.mmap(fd, 8 * SPARE_SLOTS)).cast("Q")
        os.close(fd)
        self._spare_lock = os.open(directory.client_lock(connection.owner), os.O_RDWR | os.O_CLOEXEC)

    def describe(self, partition_id: str) -> tuple[int, PartitionSpec]:
        known = self.specs.get(partition_id)
        if known is None:
            answer: wire.Described = self.connection.request(wire.Describe(partition_id))
            known = self.specs[partition_id] = (answer.version, answer.spec)
        return known

    def take_spare(self, nbytes: int) -> Extent | None:
        """The extent that came with the last answer, if it is large enough and not revoked."""
        with self._lock:
            spare = self.spare
            if spare is None or spare.size < nbytes:
                return None
            self.spare = None
            fcntl.flock(self._spare_lock, fcntl.LOCK_EX)
            try:
                if self._spares[self._slot] != spare.number:
                    return None
                self._spares[self._slot] = _NO_SPARE
                return spare
            finally:
                fcntl.flock(self._spare_lock, fcntl.LOCK_UN)

    def close(self) -> None:
        self.connection.close()
        self.segments.close()
        os.close(self._spare_lock)


class _Copying:
    """Around every use of shared memory: ``close`` in another thread waits for it, and none begins after."""

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
        """Let none begin, and wait for those of other threads. A signal handler may have come in between one
        of this thread. Bounded, because Ctrl-C may have kept one from saying that it is done."""
        mine = threading.get_ident()
        with self._lock:
            self._ended = True
            self._changed.wait_for(lambda: all(thread == mine for thread in self._inside), patience_s)


class _Reader:
    """Where the columns of one read get their bytes from."""

    def __init__(self, link: _Link, located: wire.Located, lease: Lease) -> None:
        self._segments = link.segments
        self._located, self._lease = located, lease
        self._shared: dict[int, Bytes] = {}
        self._private: dict[int, Tensor] = {}
        self.nbytes = 0

    def read(self, number: int) -> Bytes:
        index, start, layout = self._located.blocks[number]
        shared = self._shared.get(index)
        if shared is None:
            shared = self._shared[index] = self._segments.view(self._located.extents[index]).numpy()
        return shared[start : start + layout.nbytes]

    def own(self, number: int, begin: int, end: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        self.nbytes += end - begin
        index, start, _ = self._located.blocks[number]
        extent = self._located.extents[index]
        if end - begin < _WORTH_MAPPING:
            copy = torch.empty(shape, dtype=dtype, device="cpu")
            segment = self._segments.whole(extent.segment)  # held, or it could be unmapped meanwhile
            block = segment.data_ptr() + extent.offset + start
            copy_all([(copy.data_ptr(), block + begin, end - begin)])
            return copy
        private = self._private.get(index)
        if private is None:
            private = self._private[index] = self._segments.private(extent, self._lease)
        return private[start + begin : start + end].view(dtype).view(shape)

    def empty(self, nbytes: int) -> Tensor:
        self.nbytes += nbytes
        return scratch.empty(nbytes)


def _column(assembler: Assembler, name: str, place: wire.Place) -> Any:
    if place.blocks is None and place.count:
        return assembler.neighbours(name, place.block, place.start, place.start + place.count)
    blocks = np.frombuffer(place.blocks or b"", np.int64)
    positions = np.frombuffer(place.positions or b"", np.int32)
    return assembler.column(name, blocks, positions)


def _grouped(layouts: dict[int, wire.Layout], most: int) -> list[list[tuple[int, wire.Layout]]]:
    """Blocks in groups of at most ``most`` bytes, so that each group needs one reservation."""
    groups: list[list[tuple[int, wire.Layout]]] = []
    room = 0
    for number, layout in layouts.items():
        if layout.nbytes > room or not groups:
            groups.append([])
            room = most
        groups[-1].append((number, layout))
        room -= layout.nbytes
    return groups


def _fill(memory: Tensor, start: int, sources: list[Source]) -> None:
    copies = []
    for source in sources:
        copies += source.copies(memory, start)
        start += source.nbytes
    copy_all(copies)


def _plain(condition: Any) -> Any:
    """Sets and numpy scalars in a condition, as what msgpack has for them."""
    if isinstance(condition, Mapping):
        return {name: _plain(operand) for name, operand in condition.items()}
    if isinstance(condition, (set, frozenset, tuple, list)):
        return [_plain(item) for item in condition]
    if isinstance(condition, (np.generic, Tensor)):
        return condition.item()
    return condition
