"""``BlockingClient``: an asyncio client for callers that block, so that the checks of the suite can drive it.

The event loop runs in a thread of its own. Each call becomes a task on it, and the caller waits for that.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from rlplane.async_interface import AsyncDataPlaneClient
from rlplane.interfaces import (
    DEFAULT_TIMEOUT_S,
    DataPlaneClient,
    KVBatchMeta,
    PartitionStatus,
)

if TYPE_CHECKING:
    from tensordict import TensorDict

    from rlplane.control.policies import FlowPolicy

__all__ = ["BlockingClient", "loop_in_thread"]

T = TypeVar("T")


def loop_in_thread(loop: asyncio.AbstractEventLoop | None = None) -> asyncio.AbstractEventLoop:
    """An event loop (a new one, unless given) that runs in a thread until the process ends."""
    loop = asyncio.new_event_loop() if loop is None else loop
    threading.Thread(target=loop.run_forever, name="rlplane-loop", daemon=True).start()
    return loop


class BlockingClient(DataPlaneClient):
    """The methods of an asyncio client, for any thread but that of its loop.

    Args:
        client: The client. It is connected before this returns.
        loop: An event loop that runs in another thread, as :func:`loop_in_thread` gives one.
    """

    def __init__(self, client: AsyncDataPlaneClient, loop: asyncio.AbstractEventLoop) -> None:
        self._client, self._loop = client, loop
        self._wait(client.__aenter__())

    @property
    def asynchronous(self) -> AsyncDataPlaneClient:
        """The client that does the work."""
        return self._client

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
        self._wait(
            self._client.register_partition(
                partition_id,
                fields,
                num_samples,
                consumer_tasks,
                grpo_group_size,
                enums,
                flow=flow,
                produces=produces,
            )
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
        return self._wait(
            self._client.claim_meta(
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
        )

    def get_data(self, meta: KVBatchMeta, select_fields: list[str] | None = None) -> TensorDict:
        return self._wait(self._client.get_data(meta, select_fields))

    def check_consumption_status(self, partition_id: str, task_names: list[str]) -> bool:
        return self._wait(self._client.check_consumption_status(partition_id, task_names))

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
        return self._wait(
            self._client.put_samples(
                sample_ids, partition_id, fields, tags, timeout_s=timeout_s, must_exist=must_exist
            )
        )

    def get_samples(self, sample_ids: list[str], partition_id: str, select_fields: list[str]) -> TensorDict:
        return self._wait(self._client.get_samples(sample_ids, partition_id, select_fields))

    def clear_samples(self, sample_ids: list[str] | None, partition_id: str) -> None:
        self._wait(self._client.clear_samples(sample_ids, partition_id))

    def close(self) -> None:
        self._wait(self._client.close())

    def peek_meta(
        self,
        partition_id: str,
        *,
        where: Mapping[str, Any] | None = None,
        fields: list[str] | None = None,
        limit: int | None = None,
        order: str | None = None,
    ) -> KVBatchMeta:
        return self._wait(
            self._client.peek_meta(partition_id, where=where, fields=fields, limit=limit, order=order)
        )

    def advance_version(self, partition_id: str, version: int) -> None:
        self._wait(self._client.advance_version(partition_id, version))

    def finish_partition(self, partition_id: str) -> None:
        self._wait(self._client.finish_partition(partition_id))

    def close_group(
        self, partition_id: str, group: str | int, *, reason: str, fields: list[str] | None = None
    ) -> int:
        return self._wait(self._client.close_group(partition_id, group, reason=reason, fields=fields))

    def should_abort(self, sample_ids: list[str], partition_id: str) -> list[str]:
        return self._wait(self._client.should_abort(sample_ids, partition_id))

    def evicted_meta(self, partition_id: str, *, limit: int | None = None) -> KVBatchMeta:
        return self._wait(self._client.evicted_meta(partition_id, limit=limit))

    def count(self, partition_id: str, where: Mapping[str, Any] | None = None) -> int:
        return self._wait(self._client.count(partition_id, where))

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
        return self._wait(
            self._client.append_samples(
                sample_ids, partition_id, fields, tags, finish=finish, timeout_s=timeout_s
            )
        )

    def finish_claims(self, meta: KVBatchMeta) -> None:
        self._wait(self._client.finish_claims(meta))

    def unclaim(self, meta: KVBatchMeta) -> None:
        self._wait(self._client.unclaim(meta))

    def drop_partition(self, partition_id: str) -> None:
        self._wait(self._client.drop_partition(partition_id))

    def list_sample_ids(self, partition_id: str) -> list[str]:
        return self._wait(self._client.list_sample_ids(partition_id))

    def partition_status(self, partition_id: str) -> PartitionStatus:
        return self._wait(self._client.partition_status(partition_id))

    def save_checkpoint(self, checkpoint_dir: str, *, metadata: Mapping[str, Any] | None = None) -> None:
        self._wait(self._client.save_checkpoint(checkpoint_dir, metadata=metadata))

    def load_checkpoint(self, checkpoint_dir: str, *, release_claims: bool = False) -> dict[str, Any]:
        return self._wait(self._client.load_checkpoint(checkpoint_dir, release_claims=release_claims))

    def _wait(self, call: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(call, self._loop).result()

    def __getattr__(self, name: str) -> Any:
        # What an engine has beyond the contract stays in reach.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._client, name)

    def __repr__(self) -> str:
        return f"BlockingClient({self._client!r})"
