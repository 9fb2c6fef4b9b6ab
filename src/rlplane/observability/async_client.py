"""``AsyncMetricsDataPlaneClient``: an asyncio client, with every operation measured.

It awaits the operation where ``MetricsDataPlaneClient`` calls it, and records it with that one's code. A
cancelled operation is recorded as an error of the type ``CancelledError``.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

from rlplane.async_interface import AsyncDataPlaneClient
from rlplane.call_times import timed_call
from rlplane.errors import PlaneConnectionError
from rlplane.interfaces import DataPlaneClient, PartitionStatus
from rlplane.observability import wrap_with_observability
from rlplane.observability.calls import Call, ContractMethod
from rlplane.observability.client import MetricsDataPlaneClient
from rlplane.observability.operation import describe_error
from rlplane.observability.own_aggregator import SpansMachines
from rlplane.observability.training_steps import TrainingStep
from rlplane.transfer_stats import TransferStats

if TYPE_CHECKING:
    from rlplane.adapters.async_client import AsyncPlaneClient
    from rlplane.interfaces import DataPlaneConfig
    from rlplane.storage.sums import RowChecks

T = TypeVar("T")
Method = TypeVar("Method", bound=Callable[..., Any])


def wrap_async_with_observability(
    client: AsyncPlaneClient, cfg: DataPlaneConfig | Mapping[str, Any], *, bootstrap: bool = False
) -> AsyncDataPlaneClient:
    """Wrap ``client`` as ``cfg["observability"]`` says; see ``wrap_with_observability``."""
    recorder = wrap_with_observability(_view(client), cfg, bootstrap=bootstrap)
    if not isinstance(recorder, MetricsDataPlaneClient):
        return client
    return AsyncMetricsDataPlaneClient(client, recorder)


def _measured(method: Method) -> Method:
    """The inner client's coroutine of that name, measured."""
    of = ContractMethod(method)

    @functools.wraps(method)
    async def call(self: AsyncMetricsDataPlaneClient, *args: Any, **kwargs: Any) -> Any:
        told = of.describe(*args, **kwargs)
        return await self._measure(told, getattr(self._inner, of.name)(*args, **of.handed_on(kwargs)))

    call.__isabstractmethod__ = False  # type: ignore[attr-defined]
    return cast(Method, call)


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

    register_partition = _measured(AsyncDataPlaneClient.register_partition)
    claim_meta = _measured(AsyncDataPlaneClient.claim_meta)
    get_data = _measured(AsyncDataPlaneClient.get_data)
    check_consumption_status = _measured(AsyncDataPlaneClient.check_consumption_status)
    put_samples = _measured(AsyncDataPlaneClient.put_samples)
    get_samples = _measured(AsyncDataPlaneClient.get_samples)
    clear_samples = _measured(AsyncDataPlaneClient.clear_samples)
    # Optional from here on.
    peek_meta = _measured(AsyncDataPlaneClient.peek_meta)
    advance_version = _measured(AsyncDataPlaneClient.advance_version)
    finish_partition = _measured(AsyncDataPlaneClient.finish_partition)
    close_group = _measured(AsyncDataPlaneClient.close_group)
    should_abort = _measured(AsyncDataPlaneClient.should_abort)
    evicted_meta = _measured(AsyncDataPlaneClient.evicted_meta)
    count = _measured(AsyncDataPlaneClient.count)
    append_samples = _measured(AsyncDataPlaneClient.append_samples)
    finish_claims = _measured(AsyncDataPlaneClient.finish_claims)
    unclaim = _measured(AsyncDataPlaneClient.unclaim)
    drop_partition = _measured(AsyncDataPlaneClient.drop_partition)
    list_sample_ids = _measured(AsyncDataPlaneClient.list_sample_ids)
    partition_status = _measured(AsyncDataPlaneClient.partition_status)
    save_checkpoint = _measured(AsyncDataPlaneClient.save_checkpoint)
    load_checkpoint = _measured(AsyncDataPlaneClient.load_checkpoint)

    async def close(self) -> None:
        """Close the inner client, then hand on the last events, for at most a few seconds. Idempotent."""
        if self._recorder._dispatcher.stopped.is_set():
            await self._inner.close()
            return
        await asyncio.to_thread(self._recorder._look_at_engine)
        try:
            await self._measure(Call("close", ""), self._inner.close())
        finally:
            await asyncio.to_thread(self._recorder._end)

    async def _measure(self, call: Call, result_to_be: Awaitable[T]) -> T:
        result = error = None
        began = time.perf_counter()
        with timed_call() as times:
            try:
                result = await result_to_be
            except BaseException as raised:
                error = describe_error(raised)
                raise
            finally:
                self._recorder._record(call, began, result, error, times)
        return result

    async def __aenter__(self) -> Self:
        await self._inner.__aenter__()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._recorder._report_failure(exc_info[1])
        await self.close()

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

    def publish_aggregator(self, address: str, run: str) -> None:
        self._spanning_engine().publish_aggregator(address, run)

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
