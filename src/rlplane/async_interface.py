"""``AsyncDataPlaneClient``: the methods of ``DataPlaneClient`` as coroutines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

from rlplane.errors import UnsupportedOperationError
from rlplane.interfaces import DEFAULT_TIMEOUT_S, KVBatchMeta, PartitionStatus

if TYPE_CHECKING:
    from tensordict import TensorDict

    from rlplane.control.policies import FlowPolicy

__all__ = ["AsyncDataPlaneClient"]

# How soon a reader that waits looks whether its partition is drained: at first, and later on.
_FIRST_LOOK_S = 0.05
_LATER_LOOKS_S = 1.0


class AsyncDataPlaneClient(ABC):
    """The methods of :class:`DataPlaneClient` as coroutines, with the same promises.

    Nothing here stops the event loop, and a call that waits takes no thread: thousands of claims may wait at
    once. A cancelled call has claimed nothing and holds nothing, and the client stays usable. A put or an
    append that is cancelled has written nothing, unless the plane had carried it out before the cancellation
    came: then it is there whole, with its tags.

    A client belongs to the event loop of its first call. It starts or joins its plane there: in
    ``async with``, or with the first call.
    """

    @abstractmethod
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
        """See :meth:`DataPlaneClient.register_partition`."""

    @abstractmethod
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
        """See :meth:`DataPlaneClient.claim_meta`. ``blocking`` makes the caller wait, not the event loop."""

    @abstractmethod
    async def get_data(self, meta: KVBatchMeta, select_fields: list[str] | None = None) -> TensorDict:
        """See :meth:`DataPlaneClient.get_data`."""

    @abstractmethod
    async def check_consumption_status(self, partition_id: str, task_names: list[str]) -> bool:
        """See :meth:`DataPlaneClient.check_consumption_status`."""

    @abstractmethod
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
        """See :meth:`DataPlaneClient.put_samples`. ``fields`` must not be changed before it returns."""

    @abstractmethod
    async def get_samples(
        self, sample_ids: list[str], partition_id: str, select_fields: list[str]
    ) -> TensorDict:
        """See :meth:`DataPlaneClient.get_samples`."""

    @abstractmethod
    async def clear_samples(self, sample_ids: list[str] | None, partition_id: str) -> None:
        """See :meth:`DataPlaneClient.clear_samples`."""

    @abstractmethod
    async def close(self) -> None:
        """See :meth:`DataPlaneClient.close`. Calls that wait end with an error."""

    async def claims(
        self,
        partition_id: str,
        task_name: str,
        required_fields: list[str],
        batch_size: int,
        *,
        where: Mapping[str, Any] | None = None,
        timeout_s: float = float("inf"),
    ) -> AsyncGenerator[KVBatchMeta, None]:
        """Claim batch after batch, for ``async for``, until the partition is drained.

        It is drained when ``num_samples`` of its registration have been written and this task has claimed
        every sample that is there (or, given ``where``, every one that can match). A partition that was
        registered with ``num_samples=0`` has no end.

        Raises:
            TimeoutError: No batch came for ``timeout_s``.
        """
        waited, patience = 0.0, _FIRST_LOOK_S
        while True:
            wait = min(patience, timeout_s - waited)
            try:
                meta = await self.claim_meta(
                    partition_id, task_name, required_fields, batch_size, timeout_s=wait, where=where
                )
            except TimeoutError:
                waited += wait
                # What is left of a flow that has ended, and whether that was all.
                status = await self.partition_status(partition_id)
                if 0 < status["num_samples"] <= status["written"]:
                    # After the status: what became ready in between is found here.
                    meta = await self.claim_meta(
                        partition_id, task_name, required_fields, batch_size, blocking=False, where=where
                    )
                    produced = [status["fields"][name]["produced"] for name in required_fields]
                    complete = all(count >= status["samples"] for count in produced)
                    if meta.size == 0 and (complete or status["tasks"][task_name]["unclaimed"] == 0):
                        return
                    if meta.size:
                        waited, patience = 0.0, _FIRST_LOOK_S
                        yield meta
                        continue
                if waited >= timeout_s:
                    raise
                patience = min(2 * patience, _LATER_LOOKS_S)
            else:
                waited, patience = 0.0, _FIRST_LOOK_S
                yield meta

    # Optional from here on.

    async def peek_meta(
        self,
        partition_id: str,
        *,
        where: Mapping[str, Any] | None = None,
        fields: list[str] | None = None,
        limit: int | None = None,
        order: str | None = None,
    ) -> KVBatchMeta:
        """See :meth:`DataPlaneClient.peek_meta`."""
        raise self._unsupported("peek_meta")

    async def advance_version(self, partition_id: str, version: int) -> None:
        """See :meth:`DataPlaneClient.advance_version`."""
        raise self._unsupported("advance_version")

    async def finish_partition(self, partition_id: str) -> None:
        """See :meth:`DataPlaneClient.finish_partition`."""
        raise self._unsupported("finish_partition")

    async def close_group(
        self, partition_id: str, group: str | int, *, reason: str, fields: list[str] | None = None
    ) -> int:
        """See :meth:`DataPlaneClient.close_group`."""
        raise self._unsupported("close_group")

    async def should_abort(self, sample_ids: list[str], partition_id: str) -> list[str]:
        """See :meth:`DataPlaneClient.should_abort`."""
        raise self._unsupported("should_abort")

    async def evicted_meta(self, partition_id: str, *, limit: int | None = None) -> KVBatchMeta:
        """See :meth:`DataPlaneClient.evicted_meta`."""
        raise self._unsupported("evicted_meta")

    async def count(self, partition_id: str, where: Mapping[str, Any] | None = None) -> int:
        """See :meth:`DataPlaneClient.count`."""
        raise self._unsupported("count")

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
        """See :meth:`DataPlaneClient.append_samples`."""
        raise self._unsupported("append_samples")

    async def finish_claims(self, meta: KVBatchMeta) -> None:
        """See :meth:`DataPlaneClient.finish_claims`."""
        raise self._unsupported("finish_claims")

    async def unclaim(self, meta: KVBatchMeta) -> None:
        """See :meth:`DataPlaneClient.unclaim`."""
        raise self._unsupported("unclaim")

    async def drop_partition(self, partition_id: str) -> None:
        """See :meth:`DataPlaneClient.drop_partition`."""
        raise self._unsupported("drop_partition")

    async def list_sample_ids(self, partition_id: str) -> list[str]:
        """See :meth:`DataPlaneClient.list_sample_ids`."""
        raise self._unsupported("list_sample_ids")

    async def partition_status(self, partition_id: str) -> PartitionStatus:
        """See :meth:`DataPlaneClient.partition_status`."""
        raise self._unsupported("partition_status")

    async def save_checkpoint(
        self, checkpoint_dir: str, *, metadata: Mapping[str, Any] | None = None
    ) -> None:
        """See :meth:`DataPlaneClient.save_checkpoint`. Once begun, it is finished even if it is cancelled."""
        raise self._unsupported("save_checkpoint")

    async def load_checkpoint(self, checkpoint_dir: str, *, release_claims: bool = False) -> dict[str, Any]:
        """See :meth:`DataPlaneClient.load_checkpoint`. Once begun, it is finished even if it is cancelled."""
        raise self._unsupported("load_checkpoint")

    def step(self, number: int) -> AbstractContextManager[Any]:
        """See :meth:`DataPlaneClient.step`; the step is that of the task. Not a coroutine."""
        return nullcontext(SimpleNamespace(tokens=None))

    def mark_step(self, number: int) -> None:  # noqa: B027 - it is optional
        """See :meth:`DataPlaneClient.mark_step`. Not a coroutine."""

    def log(self, scalars: Mapping[str, Any]) -> None:  # noqa: B027 - it is optional
        """See :meth:`DataPlaneClient.log`. Not a coroutine."""

    def _unsupported(self, method: str) -> UnsupportedOperationError:
        return UnsupportedOperationError(f"{type(self).__name__} does not support {method}")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()
