"""The control actor: the part of the plane that decides, beside TransferQueue, which stores and moves.

TransferQueue's controller cannot make the contract's promises: its tags arrive after readiness, its sampler
sees neither tails nor conditions, and a write that fails half-way is half visible. So one Ray actor owns
the same :class:`~rlplane.index.ControlState` that the local engine has, and a write becomes visible by one
call to it, after its bytes are in TransferQueue's storage.

Bytes in storage are never overwritten. A write gets rows of TransferQueue of its own, reserved before its
bytes move and known by the writer's name, so whatever a writer leaves behind when it dies can be found and
cleared. Rows that no sample refers to any more are cleared by a thread here, through TransferQueue.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import msgspec
import numpy as np

from rlplane.adapters.transfer_queue.liveness import Watcher
from rlplane.adapters.transfer_queue.wire import Layout
from rlplane.adapters.transfer_queue.writes import Frozen, FrozenWrite, Location, Reservation, Write
from rlplane.errors import CapacityError, CapacityTimeoutError, CheckpointError, DataPlaneError
from rlplane.index import Batch, Claim, ControlState, Put
from rlplane.objects import decode_tags, encode_tags
from rlplane.persist import dump_state, restore_state
from rlplane.rules import PartitionSpec

__all__ = ["Control"]

logger = logging.getLogger(__name__)

# A put that waits for room asks again and again; one that has stopped asking no longer holds others back.
_FORGET_WAITER_S = 10.0
_MOST_INDEXES_AT_ONCE = 1024


@dataclass
class _Waiter:
    seen: float
    owner: int


def _locked(method: Callable[..., Any]) -> Callable[..., Any]:
    """Run under the lock; give errors of the contract back as values, which Ray does not wrap."""

    @wraps(method)
    def call(self: Control, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            try:
                return method(self, *args, **kwargs)
            except DataPlaneError as error:
                return error
            finally:
                self._sweep()

    return call


class Control:
    """The state behind the actor. Free of Ray, so that it can be tested by itself.

    Args:
        capacity: The most samples that may be live.
        capacity_bytes: The most bytes that may be in storage; None when the backend has no limit.
        allocate: Gets rows of TransferQueue: ``allocate(partition_id, count)`` returns indexes.
        discard: Clears a write from storage; called from a thread of its own.
        client_timeout_s: How long a client whose connection broke may take to come back.
        listen_ip: Where clients connect to show that they live; None to go without.
    """

    def __init__(
        self,
        capacity: int | None,
        capacity_bytes: int | None,
        allocate: Callable[[str, int], list[int]],
        discard: Callable[[Write], None],
        *,
        client_timeout_s: float = 2.0,
        listen_ip: str | None = None,
    ) -> None:
        self._state = ControlState()
        self._capacity, self._capacity_bytes = capacity, capacity_bytes
        self._allocate, self._discard = allocate, discard
        self._lock = threading.RLock()
        self._owners = 0
        # Anywhere but where another plane began: numbers of two planes must not meet in one store.
        self._numbers = secrets.randbits(40) << 20
        self._blocks = 0
        self._stored_bytes = 0
        self._reserved_samples = 0
        self._open: dict[int, Write] = {}
        self._writes: dict[int, Write] = {}
        self._write_of_block: dict[int, tuple[Write, str]] = {}
        self._spare: dict[str, list[int]] = {}
        self._waiting_puts: dict[str, _Waiter] = {}
        self._answers: dict[str, Any] = {}
        self._parked: dict[str, Claim] = {}
        self._garbage: deque[Write] = deque()
        self._discarding = False
        # Clients that save or load a checkpoint: nothing is cleared for them, and one may shut writers out.
        self._holders: set[int] = set()
        self._gate: int | None = None
        self._work = threading.Condition(self._lock)
        self._closed = False
        self._watcher = Watcher(listen_ip, self._release, client_timeout_s) if listen_ip else None
        threading.Thread(target=self._collect, name="rlplane-garbage", daemon=True).start()

    # Clients

    @_locked
    def join(self) -> tuple[int, tuple[str, int] | None]:
        """Welcome a client: its number, and where to hold a connection while it lives."""
        self._owners += 1
        return self._owners, self._watcher.address if self._watcher else None

    @_locked
    def leave(self, owner: int) -> None:
        """A client that closes: what it claimed stays claimed, what it left unfinished goes."""
        if self._watcher:
            self._watcher.forget(owner)
        self._drop_open(owner)

    def _release(self, owner: int) -> None:
        """A client that died: its unfinished claims return, its uncommitted writes never appear."""
        with self._lock:
            self._drop_open(owner)
            self._state.release_owner(owner)
            self._sweep()

    def _drop_open(self, owner: int) -> None:
        for write in [write for write in self._open.values() if write.put and write.put.owner == owner]:
            self._abandon(write)
        for token in [token for token, claim in self._parked.items() if claim.owner == owner]:
            self._cancel(token)
        self._holders.discard(owner)
        if self._gate == owner:
            self._gate = None
        self._work.notify_all()
        for token in [t for t, waiter in self._waiting_puts.items() if waiter.owner == owner]:
            del self._waiting_puts[token]

    # Partitions

    @_locked
    def register(self, spec: PartitionSpec) -> None:
        self._state.register(spec)

    @_locked
    def consumed(self, partition_id: str, tasks: Sequence[str]) -> bool:
        return self._state.partition(partition_id).consumed(tasks)

    @_locked
    def ids(self, partition_id: str) -> list[str]:
        return list(self._state.partition(partition_id).rows)

    @_locked
    def status(self, partition_id: str) -> dict[str, Any]:
        return self._state.partition(partition_id).status(time.time())

    # Writing: reserve, store the bytes, commit

    @_locked
    def reserve(
        self,
        token: str,
        owner: int,
        partition_id: str,
        ids: list[str],
        tags: bytes | None,
        layouts: dict[str, Layout],
        chunk_rows: int,
    ) -> Reservation | None:
        """Room and rows for a write.

        None when there is no room now: ask again with the same ``token``. First come, first served.
        """
        partition = self._state.partition(partition_id)
        if self._gate is not None:
            return None
        sizes = [layout.nbytes for layout in layouts.values()]
        sealed = None if tags is None else decode_tags(tags)
        put = Put(partition_id, ids, {}, sealed, nbytes=sizes, owner=owner)
        new, nbytes = partition.check_put(put), sum(sizes)
        self._refuse_what_never_fits(new, nbytes)
        if not self._has_turn(token, owner, new, nbytes):
            return None
        indexes = self._take_indexes(partition_id, -(-len(ids) // chunk_rows) if layouts else 0)
        self._numbers += 1
        write = Write(self._numbers, partition_id, indexes, chunk_rows, layouts, nbytes, put, new)
        self._open[write.number] = write
        self._stored_bytes += nbytes
        self._reserved_samples += new
        spec = partition.spec
        undeclared = [name for name in layouts if name not in spec.fields]
        return Reservation(
            write.number, indexes, undeclared, {n: spec.enums[n] for n in layouts if n in spec.enums}
        )

    @_locked
    def commit(self, number: int) -> None:
        """Make a reserved write visible: fields, tags and readiness of all its rows, in this one call."""
        write = self._open.pop(number, None)
        if write is None or write.put is None:
            raise DataPlaneError(
                f"write {number} is not open: its client was taken for dead, and what it stored was cleared"
            )
        self._reserved_samples -= write.new_samples
        put, write.put = write.put, None
        for name in write.layouts:
            self._blocks += 1
            put.blocks[name] = self._blocks
            self._write_of_block[self._blocks] = (write, name)
        put.now = time.time()
        write.blocks_left = len(put.blocks)
        try:
            self._state.put(put)
        except DataPlaneError:
            for block in put.blocks.values():
                del self._write_of_block[block]
            self._discard_later(write)
            raise
        if put.blocks:
            self._writes[number] = write

    @_locked
    def abandon(self, number: int) -> None:
        """Give a reserved write up: it never appears, and its rows are cleared."""
        write = self._open.get(number)
        if write is not None:
            self._abandon(write)

    @_locked
    def give_up_room(self, token: str, new: int, partition_id: str) -> None:
        """A put that waited for room and has run out of time."""
        self._waiting_puts.pop(token, None)
        raise CapacityTimeoutError(
            f"no room for {new} samples in partition {partition_id!r}: {self._in_use()}; nothing was written"
        )

    def _abandon(self, write: Write) -> None:
        del self._open[write.number]
        self._reserved_samples -= write.new_samples
        self._discard_later(write)

    def _refuse_what_never_fits(self, new: int, nbytes: int) -> None:
        if self._capacity is not None and new > self._capacity:
            raise CapacityError(
                f"a put of {new} new samples can never fit into storage_capacity {self._capacity}"
            )
        if self._capacity_bytes is not None and nbytes > self._capacity_bytes:
            raise CapacityError(
                f"a put of {nbytes} bytes can never fit into the {self._capacity_bytes} bytes of the store "
                "(global_segment_size times num_storage_units)"
            )

    def _has_turn(self, token: str, owner: int, new: int, nbytes: int) -> bool:
        samples = new if self._capacity is not None else 0
        size = nbytes if self._capacity_bytes is not None else 0
        if not samples and not size:
            return True
        now = time.monotonic()
        for other, waiter in list(self._waiting_puts.items()):
            if other == token:
                break
            if now - waiter.seen > _FORGET_WAITER_S:
                del self._waiting_puts[other]
        in_use = self._state.live + self._reserved_samples
        fits = in_use + samples <= (self._capacity or 0) if samples else True
        if size:
            fits = fits and self._stored_bytes + size <= (self._capacity_bytes or 0)
        # Behind the puts that already wait, or a large one would starve.
        if fits and next(iter(self._waiting_puts), token) == token:
            self._waiting_puts.pop(token, None)
            return True
        self._waiting_puts.setdefault(token, _Waiter(now, owner)).seen = now
        return False

    def _in_use(self) -> str:
        text = f"{self._state.live} of storage_capacity {self._capacity} are in use"
        if self._capacity_bytes is not None:
            text += f", and {self._stored_bytes} of {self._capacity_bytes} bytes"
        return text

    def _take_indexes(self, partition_id: str, count: int) -> list[int]:
        """Rows of TransferQueue, fetched ahead so that most reservations cost no round trip to it."""
        if not count:
            return []
        spare = self._spare.setdefault(partition_id, [])
        if len(spare) < count:
            ahead = min(_MOST_INDEXES_AT_ONCE, 2 * count)
            spare.extend(self._allocate(partition_id, count - len(spare) + ahead))
        taken = spare[:count]
        del spare[:count]
        return taken

    # Reading

    @_locked
    def locate(self, partition_id: str, ids: Sequence[str], fields: Sequence[str]) -> Location:
        """Where the fields of the samples are."""
        places = {}
        writes: dict[int, Write] = {}
        for name, (blocks, positions) in self._state.locate(partition_id, ids, fields).items():
            unique, inverse = np.unique(blocks, return_inverse=True)
            numbers = np.empty(len(unique), np.int64)
            for place, block in enumerate(unique.tolist()):
                write, _ = self._write_of_block[block]
                numbers[place] = write.number
                if write.number not in writes:
                    writes[write.number] = write
            places[name] = (numbers[inverse], positions)
        wanted = set(fields)
        return Location(places, {number: write.narrowed(wanted) for number, write in writes.items()})

    # Claiming

    @_locked
    def claim(
        self,
        token: str,
        owner: int,
        partition_id: str,
        task: str,
        fields: list[str],
        batch_size: int,
        where: dict[str, Any] | None,
        blocking: bool,
    ) -> tuple[list[str], bytes] | None:
        """Claim at once, or wait in line under ``token`` (None). The answer is ids and encoded tags."""
        claim = Claim(partition_id, task, fields, batch_size, where, owner=owner, token=token)
        batch = self._state.claim(claim, blocking=blocking)
        if batch is None:
            self._parked[token] = claim
            return None
        return _reply(batch)

    @_locked
    def poll(self, token: str) -> tuple[list[str], bytes] | None:
        """What became of a claim that waits: None while it does."""
        answer = self._answers.pop(token, None)
        if answer is None:
            return None
        self._parked.pop(token, None)
        return _reply(answer)

    @_locked
    def give_up_claim(self, token: str) -> tuple[list[str], bytes] | None:
        """Take a waiting claim back. It may have been answered in the meantime: then that is the answer."""
        claim = self._parked.pop(token, None)
        answer = self._answers.pop(token, None)
        if answer is None and claim is not None:
            # The state knows a token by identity, and ``token`` is a copy that came over the wire.
            answer = self._state.give_up(claim.token)
        return None if answer is None else _reply(answer)

    @_locked
    def cancel_claim(self, token: str) -> None:
        """Forget a claim whose caller was interrupted; what it was given goes to the next one."""
        self._cancel(token)

    def _cancel(self, token: str) -> None:
        claim = self._parked.pop(token, None)
        answer = self._answers.pop(token, None)
        if claim is None:
            return
        if isinstance(answer, Batch):
            self._state.unclaim(claim.partition_id, claim.task, answer.ids, claim.owner)
        elif answer is None:
            self._state.give_up(claim.token)

    # Clearing

    @_locked
    def clear(self, partition_id: str, ids: Sequence[str]) -> int:
        """Drop samples; how many there were."""
        return self._state.clear(partition_id, ids)

    @_locked
    def clear_written_by(self, partition_id: str, owner: int) -> int:
        """Drop what a client wrote, or everything if it never wrote here; how many there were."""
        return self._state.clear_written_by(partition_id, owner)

    def _sweep(self) -> None:
        """Take what the state has left for its owner: answers for waiting claims, and freed blocks."""
        for token, answer in self._state.answers:
            self._answers[token] = answer
        self._state.answers.clear()
        for block in self._state.freed:
            write, _ = self._write_of_block.pop(block)
            write.blocks_left -= 1
            if not write.blocks_left:
                self._discard_later(self._writes.pop(write.number))
        self._state.freed.clear()

    def _discard_later(self, write: Write) -> None:
        self._garbage.append(write)
        self._work.notify_all()

    def _collect(self) -> None:
        while True:
            with self._work:
                self._work.wait_for(lambda: self._closed or (self._garbage and not self._holders))
                if self._closed:
                    return
                write = self._garbage.popleft()
                self._discarding = True
            try:
                if write.indexes:
                    self._discard(write)
            except Exception:
                # Its bytes are leaked, and that is logged; what it must not do is stop this thread.
                logger.exception("write %d could not be cleared from TransferQueue", write.number)
            with self._work:
                self._discarding = False
                self._stored_bytes -= write.nbytes
                self._work.notify_all()

    @_locked
    def open_writes(self) -> int:
        """How many writes are reserved and neither committed nor given up."""
        return len(self._open)

    def drain(self, timeout_s: float = 10.0) -> int:
        """Wait until everything that was freed is cleared from storage; return what is left."""
        with self._work:
            self._work.wait_for(lambda: not self._garbage and not self._discarding, timeout_s)
            return len(self._garbage) + self._discarding

    @_locked
    def close(self) -> None:
        """Stop the threads."""
        self._closed = True
        self._work.notify_all()
        if self._watcher:
            self._watcher.close()

    # Checkpoints: TransferQueue dumps the bytes; what they mean is dumped here.

    @_locked
    def freeze(self, owner: int) -> bytes:
        """The state at this moment. Until :meth:`thaw`, nothing that it refers to leaves the storage."""
        self._holders.add(owner)
        return msgspec.msgpack.encode(
            Frozen(
                dump_state(self._state),
                {block: (write.number, name) for block, (write, name) in self._write_of_block.items()},
                [FrozenWrite.of(write) for write in self._writes.values()],
            )
        )

    @_locked
    def thaw(self, owner: int) -> None:
        """Let freed rows be cleared, and writers write, again."""
        self._holders.discard(owner)
        if self._gate == owner:
            self._gate = None
        self._work.notify_all()

    @_locked
    def shut(self, owner: int) -> bool:
        """Keep writers out until :meth:`thaw`; True when none is under way and nothing is being cleared."""
        if self._gate not in (None, owner):
            return False
        self._gate = owner
        self._holders.add(owner)
        return not self._open and not self._discarding

    @_locked
    def restore(self, content: bytes, owner: int, release_claims: bool = False) -> dict[str, list[int]]:
        """Replace everything by a frozen state, whose bytes are in storage already.

        With ``release_claims``, what was claimed and not finished is handed out again.

        Returns:
            For each partition, the rows of TransferQueue that the state refers to.
        """
        if self._gate != owner:
            raise CheckpointError("the plane is not shut: another client loads a checkpoint")
        try:
            frozen = msgspec.msgpack.decode(content, type=Frozen)
        except msgspec.MsgspecError as error:
            raise CheckpointError(f"the checkpoint's control state cannot be decoded: {error}") from error
        writes = {saved.number: saved.thaw() for saved in frozen.writes}
        blocks = {old: self._blocks + place for place, old in enumerate(frozen.blocks, start=1)}
        sizes = {old: writes[number].layouts[name].nbytes for old, (number, name) in frozen.blocks.items()}
        state = restore_state(frozen.state, blocks, sizes, None, release_claims=release_claims)
        if self._capacity is not None and state.live > self._capacity:
            raise CheckpointError(
                f"the checkpoint has {state.live} samples, more than storage_capacity {self._capacity}"
            )
        self._state.abort(DataPlaneError("the plane's content was replaced by a checkpoint"))
        self._sweep()
        self._state = state
        self._blocks += len(blocks)
        self._writes = writes
        self._write_of_block = {
            blocks[old]: (writes[number], name) for old, (number, name) in frozen.blocks.items()
        }
        for write, _ in self._write_of_block.values():
            write.blocks_left += 1
        # Never backwards: readers of before would take a number that is used again for their own.
        self._numbers = max([self._numbers, *writes])
        self._stored_bytes = sum(write.nbytes for write in writes.values())
        self._garbage.clear()
        self._spare.clear()
        used: dict[str, list[int]] = {}
        for write in writes.values():
            used.setdefault(write.partition_id, []).extend(write.indexes)
        return used


def _reply(answer: Batch | DataPlaneError) -> tuple[list[str], bytes]:
    if isinstance(answer, DataPlaneError):
        raise answer
    return answer.ids, encode_tags(answer.tags)
