"""``StreamingDataset``: the samples of a partition as a torch ``IterableDataset``, while they are written."""

from __future__ import annotations

import os
import pickle
import queue
import threading
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from torch.utils.data import IterableDataset

from rlplane.codec import PadValue, materialize
from rlplane.errors import InvalidRequestError
from rlplane.factory import build_data_plane_client
from rlplane.interfaces import DataPlaneClient, KVBatchMeta

__all__ = ["StreamingDataset"]

_LOOK_S = 0.25  # how soon a reader that waits notices that the partition is drained, or that it should end


class StreamingDataset(IterableDataset[Any]):
    """Batches of a partition, each sample once, in the order in which they become ready.

    All readers of one ``task_name`` share the samples out among them: the workers of a ``DataLoader``, the
    data-parallel ranks, processes on other machines. Each sample goes to exactly one of them, to whoever asks
    first, so a slow rank gets fewer; where every rank must get the same number, shard a claimed batch with
    :func:`rlplane.shard_meta_for_dp` instead.

    The iteration ends when the partition is drained: ``num_samples`` of its registration have been written,
    and this task has claimed every sample that is there (or, given ``where``, every one that can match). A
    partition that was registered with ``num_samples=0`` has no end: the iteration goes on until it is left.
    Where a reader's process dies in the middle, what it had claimed and neither cleared nor written to is
    handed out again, as always.

    It yields batches, as dicts of tensors (and lists of objects), so the ``DataLoader`` must not make batches
    of its own::

        dataset = StreamingDataset(client, "rollouts", "train", ["input_ids", "advantages"], batch_size=64)
        for batch in DataLoader(dataset, batch_size=None, num_workers=2):
            ...

    Args:
        client: A client, or the config of one, which is then built as a worker where the iteration runs. With
            ``num_workers`` above 0 it has to be of an engine that is shared by processes.
        partition_id: The partition.
        task_name: The task whose cursor moves.
        fields: What a sample must have to be claimed, and what is read of it.
        batch_size: Samples per batch. The last one may have fewer.
        dp_rank: This process's data-parallel rank, which goes with its claims.
        where: Conditions on tags; see :meth:`DataPlaneClient.claim_meta`.
        prefetch: Batches that are claimed and read ahead, by a thread. They count as claimed: if the
            iteration is left early, they are not handed out again. 0 reads when asked.
        clear: Clear the samples of a batch once they have been read.
        with_meta: Yield ``(meta, batch)``, for a reader that writes to its samples or clears them itself.
        layout: How ragged columns come, and
        pad_value_dict: what they are padded with; see :func:`rlplane.materialize`.

    Raises:
        ValueError: ``fields`` is empty, ``batch_size`` is below 1 or ``prefetch`` below 0. The iteration
            raises what :meth:`DataPlaneClient.claim_meta` does.
    """

    def __init__(
        self,
        client: DataPlaneClient | Mapping[str, Any],
        partition_id: str,
        task_name: str,
        fields: list[str],
        batch_size: int,
        *,
        dp_rank: int | None = None,
        where: Mapping[str, Any] | None = None,
        prefetch: int = 2,
        clear: bool = False,
        with_meta: bool = False,
        layout: Literal["padded", "jagged"] = "padded",
        pad_value_dict: Mapping[str, PadValue] | None = None,
    ) -> None:
        if not fields:
            raise InvalidRequestError("fields is empty; name at least one to read")
        if batch_size < 1:
            raise InvalidRequestError(f"batch_size is {batch_size}; it must be at least 1")
        if prefetch < 0:
            raise InvalidRequestError(f"prefetch is {prefetch}; it must be at least 0")
        self.partition_id, self.task_name = partition_id, task_name
        self.fields, self.batch_size = list(fields), batch_size
        self.dp_rank, self.where, self.prefetch = dp_rank, where, prefetch
        self.clear, self.with_meta = clear, with_meta
        self.layout, self.pad_value_dict = layout, pad_value_dict
        self._source = client
        self._home = os.getpid()

    def __iter__(self) -> Iterator[Any]:
        client, is_ours = self._connect()
        stop = threading.Event()
        batches = self._batches(client, stop)
        try:
            yield from batches if self.prefetch == 0 else _ahead(batches, self.prefetch, stop)
        finally:
            stop.set()
            if is_ours:
                client.close()

    def _connect(self) -> tuple[DataPlaneClient, bool]:
        if not isinstance(self._source, DataPlaneClient):
            return build_data_plane_client(self._source, bootstrap=False), True
        if os.getpid() == self._home:
            return self._source, False
        try:
            # A client that other processes can use can be sent to them. One that cannot has been copied by
            # the fork, samples and all: every worker would get every sample. The copy is closed at the end:
            # a process that ends without that is dead to the plane, and its claims are handed out again.
            return pickle.loads(pickle.dumps(self._source)), True
        except Exception as error:
            raise InvalidRequestError(
                f"{self._source!r} lives in one process, where the workers of a DataLoader cannot read it:"
                " use num_workers=0, or backend: shm"
            ) from error

    def _batches(self, client: DataPlaneClient, stop: threading.Event) -> Iterator[Any]:
        while not stop.is_set():
            meta = self._claim(client)
            if meta is None:
                meta, is_last = self._rest(client)
                if is_last:
                    return
            if meta is None:
                continue
            # A dict of tensors: what a DataLoader hands on from its workers as it is.
            batch = materialize(client.get_data(meta, self.fields), self.layout, self.pad_value_dict)
            if self.clear:
                client.clear_samples(meta.sample_ids, self.partition_id)
            yield (meta, batch) if self.with_meta else batch

    def _claim(self, client: DataPlaneClient, blocking: bool = True) -> KVBatchMeta | None:
        try:
            meta = client.claim_meta(
                self.partition_id,
                self.task_name,
                self.fields,
                self.batch_size,
                self.dp_rank,
                blocking,
                _LOOK_S,
                where=self.where,
            )
        except TimeoutError:
            return None
        return meta if meta.size else None

    def _rest(self, client: DataPlaneClient) -> tuple[KVBatchMeta | None, bool]:
        """Asked when no full batch came: what is left of a flow that has ended, and whether that was all."""
        status = client.partition_status(self.partition_id)
        if not 0 < status["num_samples"] <= status["written"]:
            return None, False
        # After the status: what became ready in between is found here.
        meta = self._claim(client, blocking=False)
        complete = all(status["fields"][name]["produced"] >= status["samples"] for name in self.fields)
        # What is complete and yet cannot be claimed does not match, or is of a group that is not whole.
        nothing_to_come = complete or status["tasks"][self.task_name]["unclaimed"] == 0
        return meta, meta is None and nothing_to_come


def _ahead(batches: Iterator[Any], count: int, stop: threading.Event) -> Iterator[Any]:
    """The same batches, made by a thread that is up to ``count`` of them ahead."""
    ready: queue.Queue[tuple[bool, Any]] = queue.Queue(count)

    def put(item: tuple[bool, Any]) -> None:
        while not stop.is_set():
            try:
                ready.put(item, timeout=_LOOK_S)
                return
            except queue.Full:
                continue

    def read() -> None:
        try:
            for batch in batches:
                put((True, batch))
            put((False, None))
        except BaseException as error:
            put((False, error))

    thread = threading.Thread(target=read, name="rlplane-prefetch", daemon=True)
    thread.start()
    try:
        while True:
            is_batch, item = ready.get()
            if is_batch:
                yield item
            elif item is None:
                return
            else:
                raise item
    finally:
        stop.set()
        thread.join()
