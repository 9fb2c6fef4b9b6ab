"""``AsyncPlaneClient``: any engine's client on an event loop.

It has the engine's own client, which starts or joins the plane, keeps the connection's lifeline and knows the
storage, and performs the steps of its calls (``adapters/steps.py``) without blocking: requests go over one
channel that the loop watches, and bytes are moved by a few helper threads when it is many of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from tensordict import TensorDict

from rlplane.adapters.calls import PlaneCalls
from rlplane.adapters.client import PlaneClient, rows_of
from rlplane.adapters.link import Link
from rlplane.adapters.steps import Call, Exchange, Undo
from rlplane.async_interface import AsyncDataPlaneClient
from rlplane.call_times import open_account
from rlplane.control.policies import FlowPolicy
from rlplane.errors import ClientClosedError, InvalidRequestError, UnsupportedOperationError
from rlplane.interfaces import (
    DEFAULT_TIMEOUT_S,
    DataPlaneClient,
    KVBatchMeta,
    PartitionStatus,
)
from rlplane.service import protocol as wire
from rlplane.service.async_connection import AsyncChannel, AsyncConnection, SocketChannel
from rlplane.service.connection import SocketConnection
from rlplane.service.in_process import InProcessConnection
from rlplane.storage.sums import RowChecks
from rlplane.transfer_stats import TransferStats

# Moving this much takes about as long as handing it to a thread and back.
_WORTH_A_THREAD = 256 * 1024
_HELPERS = 4

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Attachment:
    """The client on one event loop."""

    engine: PlaneClient
    link: Link
    connection: AsyncConnection
    pid: int


class AsyncPlaneClient(AsyncDataPlaneClient):
    """A client of a plane, for the tasks of one event loop.

    A forked child that runs an event loop of its own connects anew, as a worker, on its first call. A pickled
    client does the same where it is unpickled, on engines that processes share.

    Args:
        build: Makes the engine's client: it starts the plane or joins it. Called once, in a helper thread.
    """

    def __init__(self, build: Callable[[], DataPlaneClient]) -> None:
        self._build = build
        self._engine: PlaneClient | None = None
        self._set_up_unattached()

    def _set_up_unattached(self) -> None:
        self._attachment: _Attachment | None = None
        self._attaching: asyncio.Task[_Attachment] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._closed = False
        # What helper threads are doing, also for calls that were cancelled meanwhile.
        self._moving: set[asyncio.Future[Any]] = set()
        self._helpers, self._pid = _new_helpers(), os.getpid()

    # By task

    async def register_partition(
        self,
        partition_id: str,
        fields: list[str],
        num_samples: int,
        consumer_tasks: list[str],
        grpo_group_size: int | None = None,
        enums: dict[str, list[str]] | None = None,
        *,
        flow: FlowPolicy | Mapping[str, Any] | None = None,
        produces: dict[str, list[str]] | None = None,
    ) -> None:
        return await self._call(
            PlaneCalls.register,
            partition_id,
            fields,
            num_samples,
            consumer_tasks,
            grpo_group_size,
            enums,
            flow,
            produces,
        )

    async def claim_meta(
        self,
        partition_id: str,
        task_name: str,
        required_fields: list[str],
        batch_size: int,
        dp_rank: int | None = None,
        blocking: bool = True,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
        *,
        where: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
        order: str | None = None,
        dp_world: int | None = None,
        step: str | int | None = None,
        max_uses: int = 1,
        repeat_where: Mapping[str, Any] | None = None,
        split_groups: bool = False,
    ) -> KVBatchMeta:
        return await self._call(
            PlaneCalls.claim,
            partition_id,
            task_name,
            required_fields,
            batch_size,
            dp_rank,
            blocking,
            timeout_s,
            where=where,
            max_tokens=max_tokens,
            order=order,
            dp_world=dp_world,
            step=step,
            max_uses=max_uses,
            repeat_where=repeat_where,
            split_groups=split_groups,
        )

    async def get_data(self, meta: KVBatchMeta, select_fields: list[str] | None = None) -> TensorDict:
        return await self.get_samples(*rows_of(meta, select_fields))

    async def check_consumption_status(self, partition_id: str, task_names: list[str]) -> bool:
        return await self._call(PlaneCalls.consumed, partition_id, task_names)

    # By key

    async def put_samples(
        self,
        sample_ids: list[str],
        partition_id: str,
        fields: TensorDict | None = None,
        tags: list[dict[str, Any]] | None = None,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        must_exist: bool = False,
    ) -> KVBatchMeta:
        return await self._call(
            PlaneCalls.put,
            sample_ids,
            partition_id,
            fields,
            tags,
            timeout_s=timeout_s,
            must_exist=must_exist,
        )

    async def append_samples(
        self,
        sample_ids: list[str],
        partition_id: str,
        fields: TensorDict,
        tags: list[dict[str, Any]] | None = None,
        *,
        finish: bool = False,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> KVBatchMeta:
        return await self._call(
            PlaneCalls.put,
            sample_ids,
            partition_id,
            fields,
            tags,
            timeout_s=timeout_s,
            appends=True,
            finishes=finish,
        )

    async def get_samples(
        self, sample_ids: list[str], partition_id: str, select_fields: list[str]
    ) -> TensorDict:
        return await self._call(PlaneCalls.get, sample_ids, partition_id, select_fields)

    async def clear_samples(self, sample_ids: list[str] | None, partition_id: str) -> None:
        return await self._call(PlaneCalls.clear, sample_ids, partition_id)

    # The optional ones

    async def peek_meta(
        self,
        partition_id: str,
        *,
        where: Mapping[str, Any] | None = None,
        fields: list[str] | None = None,
        limit: int | None = None,
        order: str | None = None,
    ) -> KVBatchMeta:
        return await self._call(PlaneCalls.peek, partition_id, where, fields, limit, order)

    async def advance_version(self, partition_id: str, version: int) -> None:
        await self._call(PlaneCalls.advance, partition_id, version)

    async def finish_partition(self, partition_id: str) -> None:
        await self._call(PlaneCalls.value, wire.Finish(partition_id))

    async def close_group(
        self, partition_id: str, group: str | int, *, reason: str, fields: list[str] | None = None
    ) -> int:
        return await self._call(PlaneCalls.close_group, partition_id, group, reason, fields)

    async def should_abort(self, sample_ids: list[str], partition_id: str) -> list[str]:
        return await self._call(PlaneCalls.should_abort, sample_ids, partition_id)

    async def evicted_meta(self, partition_id: str, *, limit: int | None = None) -> KVBatchMeta:
        return await self._call(PlaneCalls.evicted, partition_id, limit)

    async def count(self, partition_id: str, where: Mapping[str, Any] | None = None) -> int:
        return await self._call(PlaneCalls.count, partition_id, where)

    async def unclaim(self, meta: KVBatchMeta) -> None:
        await self._call(PlaneCalls.unclaim, meta)

    async def finish_claims(self, meta: KVBatchMeta) -> None:
        await self._call(PlaneCalls.unclaim, meta, is_finished=True)

    async def drop_partition(self, partition_id: str) -> None:
        await self._call(PlaneCalls.drop, partition_id)

    async def list_sample_ids(self, partition_id: str) -> list[str]:
        ids: list[str] = await self._call(PlaneCalls.value, wire.ListIds(partition_id))
        return ids

    async def partition_status(self, partition_id: str) -> PartitionStatus:
        status: PartitionStatus = await self._call(PlaneCalls.value, wire.Status(partition_id))
        return status

    async def service_status(self) -> dict[str, Any]:
        """What the control service holds: its process, clients, leases, requests served, sizes of storage."""
        status: dict[str, Any] = await self._call(PlaneCalls.value, wire.ServiceStatus())
        return status

    async def save_checkpoint(
        self, checkpoint_dir: str, *, metadata: Mapping[str, Any] | None = None
    ) -> None:
        engine = (await self._attached()).engine
        await self._in_helper(partial(engine.save_checkpoint, checkpoint_dir, metadata=metadata))

    async def load_checkpoint(self, checkpoint_dir: str, *, release_claims: bool = False) -> dict[str, Any]:
        engine = (await self._attached()).engine
        return await self._in_helper(
            partial(engine.load_checkpoint, checkpoint_dir, release_claims=release_claims)
        )

    @property
    def engine(self) -> PlaneClient | None:
        """The engine's own client, once it is connected: for other threads, which may block."""
        return self._engine

    @property
    def controller_address(self) -> str | None:
        """Where workers find this plane, once it was started or joined; goes into their
        ``controller_address``."""
        return getattr(self._engine, "controller_address", None)

    @property
    def transfer_stats(self) -> TransferStats:
        """The engine's transfers."""
        return TransferStats() if self._engine is None else self._engine.transfer_stats

    @property
    def row_checks(self) -> RowChecks | None:
        """What the engine found of the rows that it checked, if it was told to."""
        return None if self._engine is None else self._engine.row_checks

    async def __aenter__(self) -> Self:
        await self._attached()
        return self

    async def close(self) -> None:
        self._closed = True
        if self._closing is not None and self._closing.done():
            return
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close())
        # Whoever closes may be cancelled; the rest is then done all the same.
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        if self._pid != os.getpid():
            return  # a forked child that never used it: all of it is the parent's
        loop = asyncio.get_running_loop()
        if self._attaching is not None:
            await asyncio.wait([self._attaching])
        if self._attachment is not None and self._attachment.connection.loop is loop:
            await self._attachment.connection.close()
        self._leave_other_loop(loop)
        if self._engine is not None:
            # It waits for what the helpers do, but not for ever.
            await loop.run_in_executor(self._helpers, self._engine.close)
        self._helpers.shutdown(wait=False)

    def let_go(self) -> None:
        """Leave the event loop, from any thread. The engine's client stays open: it is somebody else's."""
        self._closed = True
        attachment, self._attachment = self._attachment, None
        if attachment is not None and attachment.pid == os.getpid():
            loop = attachment.connection.loop
            if loop.is_running():
                loop.call_soon_threadsafe(attachment.connection.drop)
            else:
                attachment.connection.drop()
        self._helpers.shutdown(wait=False)

    # How the steps of a call are performed

    async def _call(
        self,
        steps: Callable[Concatenate[PlaneCalls, Link, P], Call[T]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        attachment = self._attachment_now() or await self._attached()
        link, connection = attachment.link, attachment.connection
        call = steps(attachment.engine._calls, link, *args, **kwargs)
        result: Any = None
        error: BaseException | None = None
        while True:
            try:
                if error is None:
                    step = call.send(result)
                else:
                    thrown, error = error, None
                    step = call.throw(thrown)
            except StopIteration as end:
                returned: T = end.value
                return returned
            moving: asyncio.Future[Any] | None = None
            began, times, answer = time.perf_counter(), open_account(), None
            try:
                if isinstance(step, Exchange):
                    answer = result = await connection.exchange(step.request, waits_s=step.waits_s)
                elif isinstance(step, Undo):
                    connection.post(step.request)
                elif not link.storage.is_remote and step.about() < _WORTH_A_THREAD:
                    result = step.function()
                else:
                    moving = self._start(step.function)
                    result = await asyncio.shield(moving)
            except BaseException as raised:
                if moving is not None and not moving.done():
                    # The thread still uses the place or the lease: they are given back after that.
                    moving.add_done_callback(partial(_cancel, call, connection))
                    raise
                error = raised
            finally:
                if times is not None and isinstance(step, Exchange):
                    times.add_exchange(time.perf_counter() - began, answer)
                elif times is not None and not isinstance(step, Undo):
                    times.add_bytes(time.perf_counter() - began)

    def _start(self, function: Callable[[], T]) -> asyncio.Future[T]:
        moving = asyncio.get_running_loop().run_in_executor(self._helpers, function)
        self._moving.add(moving)
        moving.add_done_callback(self._moving.discard)
        return moving

    async def _in_helper(self, function: Callable[[], T]) -> T:
        return await asyncio.shield(self._start(function))

    # How the client comes to its event loop

    def _attachment_now(self) -> _Attachment | None:
        """The attachment to the running loop, if it can still be used."""
        attachment = self._attachment
        if (
            attachment is None
            or self._closed
            or attachment.connection.ended is not None
            or attachment.connection.loop is not asyncio.get_running_loop()
            or attachment.engine._link_now is not attachment.link
            or attachment.pid != os.getpid()
        ):
            return None
        return attachment

    async def _attached(self) -> _Attachment:
        if self._closed:
            raise ClientClosedError(
                "this client is closed; build a new one with build_async_data_plane_client"
            )
        attachment = self._attachment_now()
        if attachment is not None:
            return attachment
        loop = asyncio.get_running_loop()
        if self._pid != os.getpid():
            # A forked child has no threads but its own, and everything else here is the parent's.
            self._set_up_unattached()
        self._leave_other_loop(loop)
        if self._attaching is None:
            self._attaching = loop.create_task(self._attach())
            self._attaching.add_done_callback(self._attached_or_failed)
        return await asyncio.shield(self._attaching)

    def _leave_other_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        others = [self._attachment.connection.loop] if self._attachment is not None else []
        others += [self._attaching.get_loop()] if self._attaching is not None else []
        for other in others:
            if other is not loop and not other.is_closed():
                raise InvalidRequestError(
                    "this client belongs to another event loop; build one for each loop"
                )
        if self._attaching is not None and self._attaching.get_loop() is not loop:
            self._attaching = None
        if self._attachment is not None:
            self._attachment.connection.forget()
            self._attachment = None

    async def _attach(self) -> _Attachment:
        loop = asyncio.get_running_loop()
        if self._engine is None:
            engine = await loop.run_in_executor(self._helpers, self._build)
            if not isinstance(engine, PlaneClient):
                await loop.run_in_executor(self._helpers, engine.close)
                raise UnsupportedOperationError(
                    f"{type(engine).__name__} is not made of steps, and has no asyncio client"
                )
            self._engine = engine
        engine = self._engine
        link: Link = await loop.run_in_executor(self._helpers, engine._link)
        channel: AsyncChannel
        match link.connection:
            case SocketConnection() as owner:
                open_channel = partial(_open_channel, owner, loop)
                channel = await loop.run_in_executor(self._helpers, open_channel)
                connection = AsyncConnection(owner, channel, engine._ack_timeout_s, open_channel)
            case InProcessConnection() as owner:
                connection = AsyncConnection(owner, owner.open_channel(loop), engine._ack_timeout_s)
            case other:
                raise InvalidRequestError(f"a {type(other).__name__} has no channels for an event loop")
        return _Attachment(engine, link, connection, os.getpid())

    def _attached_or_failed(self, attaching: asyncio.Task[_Attachment]) -> None:
        if self._attaching is attaching:
            self._attaching = None
        if not attaching.cancelled() and attaching.exception() is None:
            self._attachment = attaching.result()

    def __getstate__(self) -> dict[str, Any]:
        if self._engine is None:
            raise InvalidRequestError(
                "this client has not started or joined its plane yet: call it once before it is pickled"
            )
        return {"engine": self._engine, "closed": self._closed}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._engine = state["engine"]
        self._set_up_unattached()
        self._closed = state["closed"]

    def __repr__(self) -> str:
        return f"AsyncPlaneClient({self._engine or 'not connected'!r})"


def _open_channel(owner: SocketConnection, loop: asyncio.AbstractEventLoop) -> AsyncChannel:
    return SocketChannel(owner.open_channel(), loop)


def _new_helpers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_HELPERS, thread_name_prefix="rlplane-helper")


def _cancel(call: Call[Any], connection: AsyncConnection, _: asyncio.Future[Any]) -> None:
    """End a call whose caller was cancelled while a helper moved bytes for it."""
    with contextlib.suppress(asyncio.CancelledError, StopIteration):
        step = call.throw(asyncio.CancelledError())
        while True:
            if isinstance(step, Undo):
                connection.post(step.request)
            step = next(call)
