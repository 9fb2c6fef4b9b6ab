"""``PlaneClient``: the one client, over a connection to the control service and a storage.

What a call does is in ``adapters/calls.py``, as steps, which this client performs in the calling thread.
Engines differ only in how a client gets its connection and its storage: they subclass it and say so in
:meth:`PlaneClient._open_link`.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import sys
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from tensordict import TensorDict

from rlplane.adapters.calls import PlaneCalls
from rlplane.adapters.checkpoint import PeriodicCheckpoints, load_plane, save_plane
from rlplane.adapters.link import Link
from rlplane.adapters.steps import Call, MoveBytes, Step, Undo
from rlplane.call_times import open_account
from rlplane.caller import warn_caller
from rlplane.control.policies import FlowPolicy
from rlplane.errors import (
    ClientClosedError,
    DataPlaneError,
    InvalidRequestError,
    PlaneConnectionError,
)
from rlplane.interfaces import (
    DEFAULT_TIMEOUT_S,
    DataPlaneClient,
    DataPlaneConfig,
    KVBatchMeta,
    PartitionStatus,
)
from rlplane.service import protocol as wire
from rlplane.service.connection import Connection
from rlplane.storage.sums import RowChecks
from rlplane.transfer_stats import TransferStats

__all__ = ["DEFAULT_ACK_TIMEOUT_MS", "DEFAULT_RECONNECT_TIMEOUT_S", "PlaneClient", "rows_of"]

DEFAULT_ACK_TIMEOUT_MS = 30_000
DEFAULT_RECONNECT_TIMEOUT_S = 30.0
_HAS_WAITED_S = 0.05

P = ParamSpec("P")
T = TypeVar("T")


class PlaneClient(DataPlaneClient):
    """A client of a plane. See ``docs/contract.md`` for what each call promises.

    Usable from several threads at once: a call that waits in one holds up no other. In an asyncio program,
    use ``build_async_data_plane_client``: a call that waits here stops the event loop, which is warned of
    once. A forked child connects anew, as a worker, on its first call; a pickled client does the same where
    it is unpickled.
    """

    def __init__(self, cfg: DataPlaneConfig, *, bootstrap: bool = True) -> None:
        self._cfg = cfg
        self._bootstrap = bootstrap
        self._set_up_unconnected()

    def _set_up_unconnected(self) -> None:
        cfg = self._cfg
        self._calls = PlaneCalls(cfg)
        self._ack_timeout_s = cfg.get("ack_timeout_ms", DEFAULT_ACK_TIMEOUT_MS) / 1000
        self._reconnect_timeout_s = cfg.get("reconnect_timeout_s", DEFAULT_RECONNECT_TIMEOUT_S)
        self._closed = False
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._link_now: Link | None = None
        self._checkpoints: PeriodicCheckpoints | None = None
        self._warned_of_loop = False

    # What an engine says

    @abstractmethod
    def _open_link(self) -> Link:
        """Connect to the plane: a connection to its control service, and its storage."""

    def _end_plane(self) -> None:
        """Called by ``close``, after the link was closed: end what this client has started, and only that."""

    # By task

    def register_partition(
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
        self._call(
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

    def claim_meta(
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
        return self._call(
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

    def get_data(self, meta: KVBatchMeta, select_fields: list[str] | None = None) -> TensorDict:
        return self.get_samples(*rows_of(meta, select_fields))

    def check_consumption_status(self, partition_id: str, task_names: list[str]) -> bool:
        return self._call(PlaneCalls.consumed, partition_id, task_names)

    # By key

    def put_samples(
        self,
        sample_ids: list[str],
        partition_id: str,
        fields: TensorDict | None = None,
        tags: list[dict[str, Any]] | None = None,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        must_exist: bool = False,
    ) -> KVBatchMeta:
        return self._call(
            PlaneCalls.put,
            sample_ids,
            partition_id,
            fields,
            tags,
            timeout_s=timeout_s,
            must_exist=must_exist,
        )

    def append_samples(
        self,
        sample_ids: list[str],
        partition_id: str,
        fields: TensorDict,
        tags: list[dict[str, Any]] | None = None,
        *,
        finish: bool = False,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> KVBatchMeta:
        return self._call(
            PlaneCalls.put,
            sample_ids,
            partition_id,
            fields,
            tags,
            timeout_s=timeout_s,
            appends=True,
            finishes=finish,
        )

    def get_samples(self, sample_ids: list[str], partition_id: str, select_fields: list[str]) -> TensorDict:
        return self._call(PlaneCalls.get, sample_ids, partition_id, select_fields)

    def clear_samples(self, sample_ids: list[str] | None, partition_id: str) -> None:
        self._call(PlaneCalls.clear, sample_ids, partition_id)

    # The optional ones

    def peek_meta(
        self,
        partition_id: str,
        *,
        where: Mapping[str, Any] | None = None,
        fields: list[str] | None = None,
        limit: int | None = None,
        order: str | None = None,
    ) -> KVBatchMeta:
        return self._call(PlaneCalls.peek, partition_id, where, fields, limit, order)

    def advance_version(self, partition_id: str, version: int) -> None:
        self._call(PlaneCalls.advance, partition_id, version)

    def finish_partition(self, partition_id: str) -> None:
        self._call(PlaneCalls.value, wire.Finish(partition_id))

    def close_group(
        self, partition_id: str, group: str | int, *, reason: str, fields: list[str] | None = None
    ) -> int:
        return self._call(PlaneCalls.close_group, partition_id, group, reason, fields)

    def should_abort(self, sample_ids: list[str], partition_id: str) -> list[str]:
        return self._call(PlaneCalls.should_abort, sample_ids, partition_id)

    def evicted_meta(self, partition_id: str, *, limit: int | None = None) -> KVBatchMeta:
        return self._call(PlaneCalls.evicted, partition_id, limit)

    def count(self, partition_id: str, where: Mapping[str, Any] | None = None) -> int:
        return self._call(PlaneCalls.count, partition_id, where)

    def finish_claims(self, meta: KVBatchMeta) -> None:
        self._call(PlaneCalls.unclaim, meta, is_finished=True)

    def unclaim(self, meta: KVBatchMeta) -> None:
        self._call(PlaneCalls.unclaim, meta)

    def drop_partition(self, partition_id: str) -> None:
        self._call(PlaneCalls.drop, partition_id)

    def list_sample_ids(self, partition_id: str) -> list[str]:
        ids: list[str] = self._call(PlaneCalls.value, wire.ListIds(partition_id))
        return ids

    def partition_status(self, partition_id: str) -> PartitionStatus:
        status: PartitionStatus = self._call(PlaneCalls.value, wire.Status(partition_id))
        return status

    def service_status(self) -> dict[str, Any]:
        """What the control service holds: its process, clients, leases, requests served, sizes of storage."""
        status: dict[str, Any] = self._call(PlaneCalls.value, wire.ServiceStatus())
        return status

    def save_checkpoint(self, checkpoint_dir: str, *, metadata: Mapping[str, Any] | None = None) -> None:
        save_plane(self._link(), checkpoint_dir, metadata)

    def load_checkpoint(self, checkpoint_dir: str, *, release_claims: bool = False) -> dict[str, Any]:
        return load_plane(
            self._link(), checkpoint_dir, self._calls.spare_limit, release_claims=release_claims
        )

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            link, self._link_now = self._link_now, None
        if self._pid != os.getpid():
            return
        if self._checkpoints is not None:
            self._checkpoints.stop()
        if link is not None:
            # The memory goes to others as soon as the service hears of the end.
            link.in_use.end(self._ack_timeout_s)
            link.storage.detach()
            if self._bootstrap:
                with contextlib.suppress(PlaneConnectionError):
                    link.connection.exchange(wire.Shutdown())
            link.close()
        self._end_plane()

    @property
    def transfer_stats(self) -> TransferStats:
        """What this client has transferred."""
        return self._calls.transfer_stats

    @property
    def row_checks(self) -> RowChecks | None:
        """What it found of the rows that it checked, if it was told to."""
        return self._calls.row_checks

    # How the steps of a call are performed

    def _call(
        self,
        steps: Callable[Concatenate[PlaneCalls, Link, P], Call[T]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        link = self._link()
        call = steps(self._calls, link, *args, **kwargs)
        perform = self._perform if open_account() is None else self._perform_timed
        result: Any = None
        error: BaseException | None = None
        link.connection.unseen.clear()
        while True:
            try:
                if error is None:
                    step = call.send(result)
                else:
                    thrown, error = error, None
                    step = call.throw(thrown)
                result = perform(link, step)
            except StopIteration as end:
                returned: T = end.value
                return returned
            except BaseException as raised:
                if not isinstance(raised, DataPlaneError):
                    _give_back_unseen(link.connection)
                if inspect.getgeneratorstate(call) == inspect.GEN_CLOSED:
                    raise  # the call itself has ended with it
                # Of a step, or an interrupt between two: the call decides what has to be undone.
                error = raised

    def _perform_timed(self, link: Link, step: Step) -> Any:
        times = open_account()
        if times is None or isinstance(step, Undo):
            return self._perform(link, step)
        began, result = time.perf_counter(), None
        try:
            result = self._perform(link, step)
        finally:
            took = time.perf_counter() - began
            if isinstance(step, MoveBytes):
                times.add_bytes(took)
            else:
                times.add_exchange(took, result)
        return result

    def _perform(self, link: Link, step: Step) -> Any:
        if isinstance(step, MoveBytes):
            return step.function()
        if isinstance(step, Undo):
            with contextlib.suppress(PlaneConnectionError):
                link.connection.exchange(step.request)
            return None
        if not step.waits_s or self._warned_of_loop or not _in_event_loop():
            return link.connection.exchange(step.request, waits_s=step.waits_s)
        if isinstance(step.request, wire.ClaimRequest):
            self._warn_of_loop("claim_meta")
        started = time.perf_counter()
        answer = link.connection.exchange(step.request, waits_s=step.waits_s)
        if not self._warned_of_loop and time.perf_counter() - started > _HAS_WAITED_S:
            self._warn_of_loop("put_samples")
        return answer

    def _warn_of_loop(self, method: str) -> None:
        self._warned_of_loop = True
        warn_caller(
            f"{method} waits in a thread that runs an event loop, which stands still meanwhile: "
            "use rlplane.build_async_data_plane_client there",
            RuntimeWarning,
        )

    # The link, and how it comes to be

    def _link(self) -> Link:
        if self._closed:
            raise ClientClosedError("this client is closed; build a new one with build_data_plane_client")
        link = self._link_now
        if link is not None and self._pid == os.getpid():
            return link
        return self._connect()

    def _connect(self) -> Link:
        if self._pid != os.getpid():
            # A forked child: the lock and the connection are the parent's.
            self._lock, self._pid, self._link_now = threading.Lock(), os.getpid(), None
            self._bootstrap = False
            self._calls.count_anew()
            # The threads of torch's pool did not survive the fork, and a large copy would wait for them for
            # ever. torch's DataLoader does the same in its workers.
            torch.set_num_threads(1)
        with self._lock:
            if self._link_now is None:
                self._link_now = self._open_link()
                checkpoint = self._cfg.get("checkpoint")
                if self._bootstrap and checkpoint:
                    self._checkpoints = PeriodicCheckpoints(self._link_now, checkpoint)
            return self._link_now


def rows_of(meta: KVBatchMeta, select_fields: list[str] | None) -> tuple[list[str], str, list[str]]:
    """What ``get_data`` asks ``get_samples`` for."""
    chosen = select_fields if select_fields is not None else meta.fields
    if chosen is None:
        raise InvalidRequestError(
            "get_data needs select_fields, or a meta that names its fields; it never reads all unasked"
        )
    return meta.sample_ids, meta.partition_id, chosen


def _in_event_loop() -> bool:
    # Not the function without the underscore, which raises where there is none: that is nearly always.
    if asyncio._get_running_loop() is None:
        return False
    # A notebook's cell runs in a loop of the kernel's, and is expected to hold it up.
    return "ipykernel" not in sys.modules


def _give_back_unseen(connection: Connection) -> None:
    """A call was interrupted that may not know what it has been given. What it does know is given back a
    second time, which changes nothing."""
    unseen = connection.unseen
    if unseen.number is not None:
        connection.abandon(unseen.number)
    for lease in unseen.leases:
        connection.release(lease)
    unseen.clear()
