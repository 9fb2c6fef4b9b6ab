"""``AsyncMetricsDataPlaneClient``: an asyncio client, with every operation measured.

It awaits the operation where ``MetricsDataPlaneClient`` calls it, and records it with that one's code. A
cancelled operation is recorded as an error of the type ``CancelledError``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

from rlplane.async_interface import AsyncDataPlaneClient
from rlplane.call_times import timed_call
from rlplane.errors import PlaneConnectionError
from rlplane.interfaces import (
    DEFAULT_TIMEOUT_S,
    DataPlaneClient,
    KVBatchMeta,
    PartitionStatus,
)
from rlplane.observability import wrap_with_observability
from rlplane.observability.client import MetricsDataPlaneClient
from rlplane.observability.operation import (
    Advanced,
    Cleared,
    Effect,
    Reset,
    as_ids,
    describe_error,
    put_effect,
)
from rlplane.observability.own_aggregator import SpansMachines
from rlplane.observability.training_steps import TrainingStep
from rlplane.transfer_stats import TransferStats

if TYPE_CHECKING:
    from tensordict import TensorDict

    from rlplane.adapters.async_client import AsyncPlaneClient
    from rlplane.control.policies import FlowPolicy
    from rlplane.interfaces import DataPlaneConfig
    from rlplane.storage.sums import RowChecks

__all__ = ["AsyncMetricsDataPlaneClient", "wrap_async_with_observability"]

T = TypeVar("T")


def wrap_async_with_observability(
    client: AsyncPlaneClient, cfg: DataPlaneConfig | Mapping[str, Any], *, bootstrap: bool = False
) -> AsyncDataPlaneClient:
    """Wrap ``client`` as ``cfg["observability"]`` says; see ``wrap_with_observability``."""
    recorder = wrap_with_observability(_view(client), cfg, bootstrap=bootstrap)
    if not isinstance(recorder, MetricsDataPlaneClient):
        return client
    return AsyncMetricsDataPlaneClient(client, recorder)


class AsyncMetricsDataPlaneClient(AsyncDataPlaneClient):
    """Wraps an asyncio client; each operation gives one event, and :meth:`snapshot` has the sums.

    Args:
        inner: The client to measure.
        recorder: What records the operations, made for the engine of ``inner``.
    """

    def __init__(self, inner: AsyncPlaneClient, recorder: MetricsDataPlaneClient) -> None:
        self._inner, self._recorder = inner, recorder

    @property
    def inner(self) -> AsyncPlaneClient:
        """The client that does the work."""
        return self._inner

    def snapshot(self) -> dict[str, Any]:
        """Totals, live bytes and keys, and how the measuring itself goes; see ``docs/observability.md``."""
        return self._recorder.snapshot()

    def bytes_outstanding_by_partition(self) -> dict[str, int]:
        """The bytes that this client put and that are still held, by partition; none held: not there."""
        return self._recorder.bytes_outstanding_by_partition()

    @property
    def transfer_stats(self) -> TransferStats:
        """The engine's transfers since this client was made (a copy)."""
        return self._recorder.transfer_stats

    async def flush(self, timeout_s: float = 5.0) -> bool:
        """Wait until callback and sinks have had every event so far; False if that takes longer."""
        return await asyncio.to_thread(self._recorder.flush, timeout_s)

    def step(self, number: int) -> TrainingStep:
        return self._recorder.step(number)

    def mark_step(self, number: int) -> None:
        self._recorder.mark_step(number)

    def log(self, scalars: Mapping[str, Any]) -> None:
        self._recorder.log(scalars)

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
        call = self._inner.register_partition(
            partition_id,
            fields,
            num_samples,
            consumer_tasks,
            grpo_group_size,
            enums,
            flow=flow,
            produces=produces,
        )
        await self._measure("register", partition_id, call)

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
        call = self._inner.claim_meta(
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
        effect = self._recorder._claim_effect(partition_id)
        return await self._measure("claim_meta", partition_id, call, task=task_name, effect=effect)

    async def get_data(self, meta: KVBatchMeta, select_fields: list[str] | None = None) -> TensorDict:
        return await self._measure(
            "get_data",
            getattr(meta, "partition_id", ""),
            self._inner.get_data(meta, select_fields),
            n_keys=getattr(meta, "size", 0),
            task=getattr(meta, "task_name", None),
        )

    async def check_consumption_status(self, partition_id: str, task_names: list[str]) -> bool:
        call = self._inner.check_consumption_status(partition_id, task_names)
        return await self._measure("check_consumption_status", partition_id, call)

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
        return await self._measure(
            "put",
            partition_id,
            self._inner.put_samples(
                sample_ids, partition_id, fields, tags, timeout_s=timeout_s, must_exist=must_exist
            ),
            n_keys=len(as_ids(sample_ids)),
            effect=put_effect(sample_ids, fields, tags),
        )

    async def get_samples(
        self, sample_ids: list[str], partition_id: str, select_fields: list[str]
    ) -> TensorDict:
        call = self._inner.get_samples(sample_ids, partition_id, select_fields)
        return await self._measure("get", partition_id, call, n_keys=len(as_ids(sample_ids)))

    async def clear_samples(self, sample_ids: list[str] | None, partition_id: str) -> None:
        ids = None if sample_ids is None else as_ids(sample_ids)
        await self._measure(
            "clear",
            partition_id,
            self._inner.clear_samples(sample_ids, partition_id),
            n_keys=0 if ids is None else len(ids),
            effect=lambda _: Cleared(ids),
        )

    async def close(self) -> None:
        """Close the inner client, then hand on the last events, for at most a few seconds. Idempotent."""
        if self._recorder._dispatcher.stopped.is_set():
            await self._inner.close()
            return
        await asyncio.to_thread(self._recorder._look_at_engine)
        try:
            await self._measure("close", "", self._inner.close())
        finally:
            await asyncio.to_thread(self._recorder._end)

    async def peek_meta(
        self,
        partition_id: str,
        *,
        where: Mapping[str, Any] | None = None,
        fields: list[str] | None = None,
        limit: int | None = None,
        order: str | None = None,
    ) -> KVBatchMeta:
        call = self._inner.peek_meta(partition_id, where=where, fields=fields, limit=limit, order=order)
        return await self._measure("peek_meta", partition_id, call)

    async def advance_version(self, partition_id: str, version: int) -> None:
        call = self._inner.advance_version(partition_id, version)
        await self._measure("advance_version", partition_id, call, effect=lambda _: Advanced(version))

    async def finish_partition(self, partition_id: str) -> None:
        call = self._inner.finish_partition(partition_id)
        await self._measure("finish_partition", partition_id, call)

    async def close_group(
        self, partition_id: str, group: str | int, *, reason: str, fields: list[str] | None = None
    ) -> int:
        call = self._inner.close_group(partition_id, group, reason=reason, fields=fields)
        return await self._measure("close_group", partition_id, call)

    async def should_abort(self, sample_ids: list[str], partition_id: str) -> list[str]:
        call = self._inner.should_abort(sample_ids, partition_id)
        return await self._measure("should_abort", partition_id, call)

    async def evicted_meta(self, partition_id: str, *, limit: int | None = None) -> KVBatchMeta:
        call = self._inner.evicted_meta(partition_id, limit=limit)
        return await self._measure("evicted_meta", partition_id, call)

    async def count(self, partition_id: str, where: Mapping[str, Any] | None = None) -> int:
        call = self._inner.count(partition_id, where)
        return await self._measure("count", partition_id, call)

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
        return await self._measure(
            "append",
            partition_id,
            self._inner.append_samples(
                sample_ids, partition_id, fields, tags, finish=finish, timeout_s=timeout_s
            ),
            n_keys=len(as_ids(sample_ids)),
            effect=put_effect(sample_ids, fields, tags, appends=True),
        )

    async def finish_claims(self, meta: KVBatchMeta) -> None:
        call = self._inner.finish_claims(meta)
        await self._measure("finish_claims", meta.partition_id, call, n_keys=meta.size)

    async def unclaim(self, meta: KVBatchMeta) -> None:
        call = self._inner.unclaim(meta)
        await self._measure("unclaim", meta.partition_id, call, n_keys=meta.size)

    async def drop_partition(self, partition_id: str) -> None:
        call = self._inner.drop_partition(partition_id)
        await self._measure("drop_partition", partition_id, call)

    async def list_sample_ids(self, partition_id: str) -> list[str]:
        call = self._inner.list_sample_ids(partition_id)
        return await self._measure("list_sample_ids", partition_id, call)

    async def partition_status(self, partition_id: str) -> PartitionStatus:
        call = self._inner.partition_status(partition_id)
        return await self._measure("partition_status", partition_id, call)

    async def save_checkpoint(
        self, checkpoint_dir: str, *, metadata: Mapping[str, Any] | None = None
    ) -> None:
        call = self._inner.save_checkpoint(checkpoint_dir, metadata=metadata)
        await self._measure("save_checkpoint", "", call)

    async def load_checkpoint(self, checkpoint_dir: str, *, release_claims: bool = False) -> dict[str, Any]:
        call = self._inner.load_checkpoint(checkpoint_dir, release_claims=release_claims)
        # The plane's content is replaced, so nothing of what this client put is there any more.
        return await self._measure("load_checkpoint", "", call, effect=lambda _: Reset())

    async def _measure(
        self,
        op: str,
        partition_id: str,
        call: Awaitable[T],
        *,
        n_keys: int = 0,
        task: str | None = None,
        effect: Callable[[Any], Effect | None] | None = None,
    ) -> T:
        result = error = None
        began = time.perf_counter()
        with timed_call() as times:
            try:
                result = await call
            except BaseException as raised:
                error = describe_error(raised)
                raise
            finally:
                self._recorder._record(op, partition_id, n_keys, 0, began, result, error, task, effect, times)
        return result

    async def __aenter__(self) -> Self:
        await self._inner.__aenter__()
        return self

    def __getattr__(self, name: str) -> Any:
        # What an engine has beyond the contract stays in reach.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __getstate__(self) -> dict[str, Any]:
        return {**self._recorder.__getstate__(), "inner": self._inner}

    def __setstate__(self, state: dict[str, Any]) -> None:
        inner = state["inner"]
        self.__init__(inner, MetricsDataPlaneClient(**{**state, "inner": _view(inner)}))  # type: ignore[misc]

    def __repr__(self) -> str:
        return f"AsyncMetricsDataPlaneClient({self._inner!r})"


class _EngineView:
    """What a recorder asks the engine for in threads of its own, beside the operations."""

    def __init__(self, client: AsyncPlaneClient) -> None:
        self._client = client

    @property
    def transfer_stats(self) -> TransferStats:
        return self._client.transfer_stats

    @property
    def row_checks(self) -> RowChecks | None:
        return self._client.row_checks

    def partition_status(self, partition_id: str) -> PartitionStatus:
        return self._engine().partition_status(partition_id)

    def list_sample_ids(self, partition_id: str) -> list[str]:
        return self._engine().list_sample_ids(partition_id)

    def publish_aggregator(self, address: str) -> None:
        self._spanning_engine().publish_aggregator(address)

    def find_aggregator(self) -> str | None:
        return self._spanning_engine().find_aggregator()

    def _spanning_engine(self) -> SpansMachines:
        engine = self._engine()
        if not isinstance(engine, SpansMachines):
            raise PlaneConnectionError("the plane is on this machine only")
        return engine

    def _engine(self) -> DataPlaneClient:
        if self._client.engine is None:
            raise PlaneConnectionError("the client has not started or joined its plane yet")
        return self._client.engine


def _view(client: AsyncPlaneClient) -> DataPlaneClient:
    return cast(DataPlaneClient, _EngineView(client))
