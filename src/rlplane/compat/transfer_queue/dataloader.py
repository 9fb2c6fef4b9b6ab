"""TransferQueue's ``StreamingDataset`` and ``StreamingDataLoader``: a task's batches as they become ready."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from tensordict import TensorDict
from torch.utils.data import DataLoader, IterableDataset

from rlplane.compat.transfer_queue.client import TransferQueueClient
from rlplane.compat.transfer_queue.metadata import BatchMeta

Batch = tuple[TensorDict, BatchMeta]
_LOOK_EVERY_S = 0.05


class StreamingDataset(IterableDataset[Batch]):
    """Micro-batches with their metas, for ever, or until the task has consumed all there is.

    Args:
        config: What ``init`` returned. A worker process finds the plane by itself, so it is not read.
        batch_size: How many samples are fetched at once.
        micro_batch_size: How many of them are handed out at once.
        data_fields: The fields that are needed and read.
        partition_id: The partition.
        task_name: Who consumes.
        dp_rank: Processes of the same rank get the same samples, with a sampler that knows ranks.
        should_check_consumption_status: Stop when everything in the partition has been consumed.
        fetch_batch_fn: In place of :func:`default_fetch_batch_fn`.
        process_batch_fn: In place of :func:`chunk_batch_fn`.
    """

    def __init__(
        self,
        config: Any,
        batch_size: int,
        micro_batch_size: int,
        data_fields: list[str],
        partition_id: str,
        task_name: str,
        dp_rank: int,
        should_check_consumption_status: bool = False,
        fetch_batch_fn: Callable[..., tuple[TensorDict | None, BatchMeta]] | None = None,
        process_batch_fn: Callable[..., list[Batch]] | None = None,
    ) -> None:
        if micro_batch_size < 1:
            raise ValueError(f"micro_batch_size must be >= 1, got {micro_batch_size}")
        if not data_fields:
            raise ValueError(f"data_fields must name at least one field, got {data_fields}")
        if dp_rank < 0:
            raise ValueError(f"dp_rank {dp_rank} must be greater than or equal to 0")
        super().__init__()
        self.config = config
        self.batch_size, self.micro_batch_size = batch_size, micro_batch_size
        self.data_fields, self.partition_id, self.task_name = data_fields, partition_id, task_name
        self.dp_rank = dp_rank
        self.should_check_consumption_status = should_check_consumption_status
        self.fetch_batch_fn = fetch_batch_fn or default_fetch_batch_fn
        self.process_batch_fn = process_batch_fn or chunk_batch_fn
        self.sampling_config = {"dp_rank": dp_rank, "task_name": task_name}
        # What was fetched, so that reset() can go through it again.
        self.buffer: list[Batch] = []
        self.batch_index = 0

    def __iter__(self) -> Iterator[Batch]:
        client = TransferQueueClient()
        while True:
            if self.batch_index < len(self.buffer):
                batch = self.buffer[self.batch_index]
                self.batch_index += 1
                yield from self.process_batch_fn(*batch, micro_batch_size=self.micro_batch_size)
                continue
            if self.should_check_consumption_status and client.check_consumption_status(
                self.task_name, self.partition_id
            ):
                return
            data, meta = self.fetch_batch_fn(
                tq_client=client,
                data_fields=self.data_fields,
                batch_size=self.batch_size,
                partition_id=self.partition_id,
                task_name=self.task_name,
                sampling_config=self.sampling_config,
                batch_index=self.batch_index,
            )
            if data is None:
                time.sleep(_LOOK_EVERY_S)
            else:
                self.buffer.append((data, meta))

    def reset(self) -> None:
        """Begin again with the first batch that was fetched."""
        self.batch_index = 0

    def step(self, partition_id: str) -> None:
        """Go on with another partition."""
        self.buffer, self.batch_index, self.partition_id = [], 0, partition_id


def default_fetch_batch_fn(
    tq_client: TransferQueueClient,
    data_fields: list[str],
    batch_size: int,
    partition_id: str,
    task_name: str,
    sampling_config: dict[str, Any],
    batch_index: int,
) -> tuple[TensorDict | None, BatchMeta]:
    """Fetch the next batch; None while too little is ready."""
    config = {**sampling_config, "batch_index": batch_index, "partition_id": partition_id}
    meta = tq_client.get_meta(data_fields, batch_size, partition_id, "fetch", task_name, config)
    return (tq_client.get_data(meta) if meta else None), meta


def chunk_batch_fn(td: TensorDict, batch_meta: BatchMeta, micro_batch_size: int = 1) -> list[Batch]:
    """Split a batch into micro-batches; the last one may be smaller."""
    if not isinstance(td, TensorDict):
        raise TypeError(f"a batch is a TensorDict, not a {type(td).__name__}")
    if type(micro_batch_size) is not int or micro_batch_size <= 0:
        raise ValueError(f"micro_batch_size must be a positive integer, got {micro_batch_size}")
    if not td.batch_size:
        raise ValueError("the batch has no batch_size")
    count = td.batch_size[0]
    if micro_batch_size > count:
        raise ValueError(
            f"micro_batch_size ({micro_batch_size}) exceeds the batch, which has {count} samples"
        )
    # Nested tensors cannot be sliced: they go row by row.
    nested = {
        name: value for name, value in td.items() if isinstance(value, torch.Tensor) and value.is_nested
    }
    rows = {name: (value.unbind(), value.layout) for name, value in nested.items()}
    dense = td.exclude(*nested)
    parts = []
    for start in range(0, count, micro_batch_size):
        stop = min(start + micro_batch_size, count)
        part = dense[start:stop]
        for name, (values, layout) in rows.items():
            part[name] = torch.nested.as_nested_tensor(list(values[start:stop]), layout=layout)
        parts.append((part, batch_meta[start:stop]))
    return parts


def _as_it_is(batch: Any) -> Any:
    return batch


class StreamingDataLoader(DataLoader[Batch]):
    """torch's DataLoader over a :class:`StreamingDataset`, which makes the batches itself."""

    def __init__(
        self,
        dataset: StreamingDataset,
        num_workers: int = 0,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
    ) -> None:
        super().__init__(
            dataset,
            batch_size=None,
            num_workers=num_workers,
            collate_fn=collate_fn or _as_it_is,
            pin_memory=pin_memory,
            worker_init_fn=worker_init_fn,
            multiprocessing_context=multiprocessing_context,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
        )
        self.stream = dataset

    def reset(self) -> None:
        """See :meth:`StreamingDataset.reset`."""
        self.stream.reset()

    def step(self, partition_id: str) -> None:
        """See :meth:`StreamingDataset.step`."""
        self.stream.step(partition_id)

    def get_buffer(self) -> list[Batch]:
        """What the dataset has fetched in this process."""
        return self.stream.buffer
