"""``StreamingDataset``: the samples of a partition as a torch ``IterableDataset``, while they are written."""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from functools import partial
from typing import Any, Literal, TypeVar

from torch.utils.data import IterableDataset, get_worker_info

from rlplane.columns.codec import PadValue, materialize
from rlplane.errors import (
    InvalidRequestError,
    PlaneConnectionError,
    StepOverError,
    UnsupportedOperationError,
)
from rlplane.factory import build_data_plane_client
from rlplane.interfaces import DataPlaneClient, KVBatchMeta

__all__ = ["StreamingDataset"]

T = TypeVar("T")
# What was read: the number of the step that comes next, and the batch; None at the end of all ranks.
_Read = tuple[int, KVBatchMeta | None, Any]

_CHECK_S = 0.25  # how soon a reader that waits notices that the partition is drained, or that it should end


class StreamingDataset(IterableDataset[Any]):
    """Batches of a partition, each sample once, in the order in which they become ready.

    All readers of one ``task_name`` share the samples out among them: the workers of a ``DataLoader``,
    processes on other machines. Each sample goes to exactly one of them, to whoever asks first, so a slow one
    gets fewer. Data-parallel ranks, which must all get the same number, say ``dp_rank`` and ``dp_world``:
    then every rank gets equally many batches, each of ``batch_size`` samples of about equal length; the last
    one is shorter for all of them, and fewer than ``dp_world`` samples may be left over. What a rank has read
    ahead and not used when the iteration is left comes with its next one. ``step`` counts what it has used;
    a rank that is started again begins with the first step whose samples have not been cleared, or where you
    set ``step`` to.

    The iteration ends when the partition is drained: ``num_samples`` of its registration have been written,
    or it was ended with ``finish_partition``, and this task has claimed every sample that is there (or, given
    ``where``, every one that can match). A partition that was registered with ``num_samples=0`` and is never
    finished has no end: the iteration goes on until it is left.
    Where a reader's process dies in the middle, what it had claimed and neither cleared nor written to is
    handed out again, as always.

    It yields batches, as dicts of tensors (and object arrays), so the ``DataLoader`` must not make batches
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
        batch_size: Samples per batch, on each rank. The last one may have fewer.
        dp_rank: This process's data-parallel rank.
        dp_world: How many ranks there are. They all iterate over the same dataset equally often.
        where: Conditions on tags; see :meth:`DataPlaneClient.claim_meta`.
        prefetch: Batches that are claimed and read ahead, by a thread. If the iteration is left early, those
            that were not used are handed out again, to the same rank if there are ranks. 0 reads when asked.
        clear: Clear the samples of a batch when it is handed over.
        with_meta: Yield ``(meta, batch)``, for a reader that writes to its samples or clears them itself.
        layout: How ragged columns come; see :func:`rlplane.materialize`.
        pad_value_dict: What ragged columns are padded with, by field.

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
        dp_world: int | None = None,
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
        if dp_world is not None and (dp_rank is None or not 0 <= dp_rank < dp_world):
            raise InvalidRequestError(f"dp_rank is {dp_rank}; it must be one of dp_world={dp_world}")
        self.partition_id, self.task_name = partition_id, task_name
        self.dp_world = dp_world
        self.step = 0
        self.fields, self.batch_size = list(fields), batch_size
        self.dp_rank, self.where, self.prefetch = dp_rank, where, prefetch
        self.clear, self.with_meta = clear, with_meta
        self.layout, self.pad_value_dict = layout, pad_value_dict
        self._source = client
        self._home = os.getpid()

    def __iter__(self) -> Iterator[Any]:
        client, is_own = self._connect()
        stop = threading.Event()
        read = self._read(client, stop)
        give_back = partial(_give_back, client)
        batches = read if self.prefetch == 0 else _prefetched(read, self.prefetch, stop, give_back)
        try:
            for self.step, meta, batch in batches:
                if meta is None:
                    return  # the end of all ranks, which is a step too
                if self.clear:
                    client.clear_samples(meta.sample_ids, self.partition_id)
                yield (meta, batch) if self.with_meta else batch
                # Whoever asks for the next one has used this one: it is not handed out again when the client
                # goes.
                if not self.clear:
                    with contextlib.suppress(UnsupportedOperationError):
                        client.finish_claims(meta)
        finally:
            stop.set()
            batches.close()
            if is_own:
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

    def _read(self, client: DataPlaneClient, stop: threading.Event) -> Generator[_Read, None, None]:
        metas = self._claimed(client, stop) if self.dp_world is None else self._parts(client, stop)
        for step, meta in metas:
            if meta is None:
                yield step, None, None
                return
            # A dict of tensors: what a DataLoader hands on from its workers as it is.
            data = client.get_data(meta, self.fields)
            yield step, meta, materialize(data, self.layout, self.pad_value_dict)

    def _claimed(
        self, client: DataPlaneClient, stop: threading.Event
    ) -> Iterator[tuple[int, KVBatchMeta | None]]:
        """Batches for whoever asks first."""
        while not stop.is_set():
            meta = self._claim(client)
            if meta is None:
                meta, is_drained = self._claim_rest(client)
                if is_drained:
                    return
            if meta is not None:
                if not meta.size:
                    return  # the plane says that nothing is to come
                yield self.step, meta

    def _parts(
        self, client: DataPlaneClient, stop: threading.Event
    ) -> Iterator[tuple[int, KVBatchMeta | None]]:
        """This rank's part of each step, with the number of the next; all ranks come to the end, where there
        is none, at the same one."""
        if get_worker_info() is not None:
            raise InvalidRequestError(
                "with dp_world the dataset is read by its rank itself: use num_workers=0"
            )
        step = self.step
        while not stop.is_set():
            try:
                meta = client.claim_meta(
                    self.partition_id,
                    self.task_name,
                    self.fields,
                    self.batch_size * (self.dp_world or 1),
                    self.dp_rank,
                    timeout_s=_CHECK_S,
                    where=self.where,
                    dp_world=self.dp_world,
                    step=f"stream/{step}",
                )
            except TimeoutError:
                continue
            except StepOverError:
                step += 1  # used before this rank was started again
                continue
            step += 1
            yield step, meta if meta.size else None
            if not meta.size:
                return

    def _claim(self, client: DataPlaneClient, blocking: bool = True) -> KVBatchMeta | None:
        try:
            meta = client.claim_meta(
                self.partition_id,
                self.task_name,
                self.fields,
                self.batch_size,
                self.dp_rank,
                blocking,
                _CHECK_S,
                where=self.where,
            )
        except TimeoutError:
            return None
        return meta if meta.size or blocking else None

    def _claim_rest(self, client: DataPlaneClient) -> tuple[KVBatchMeta | None, bool]:
        """What is ready now that no more samples are to be written, and whether all have been claimed."""
        status = client.partition_status(self.partition_id)
        is_finished = status.get("finished", False)
        if not is_finished and not 0 < status["num_samples"] <= status["written"]:
            return None, False
        # After the status: what became ready in between is found here.
        meta = self._claim(client, blocking=False)
        complete = all(status["fields"][name]["produced"] >= status["samples"] for name in self.fields)
        # A complete sample that cannot be claimed fails the condition, or its group lacks a member.
        nothing_to_come = complete or status["tasks"][self.task_name]["unclaimed"] == 0
        # Of a flow that is finished the plane says itself when nothing is left.
        return meta, meta is None and nothing_to_come and not is_finished


def _give_back(client: DataPlaneClient, read: _Read) -> None:
    _, meta, _ = read
    with contextlib.suppress(UnsupportedOperationError, PlaneConnectionError):
        if meta is not None:
            client.unclaim(meta)


def _prefetched(
    items: Iterator[T], count: int, stop: threading.Event, give_back: Callable[[T], None]
) -> Generator[T, None, None]:
    """The same items, made by a thread that keeps up to ``count`` of them ready. Those that were not asked
    for in the end are given back."""
    ready: queue.Queue[tuple[bool, Any]] = queue.Queue(count)

    def put(entry: tuple[bool, Any]) -> None:
        while not stop.is_set():
            try:
                ready.put(entry, timeout=_CHECK_S)
                return
            except queue.Full:
                continue
        if entry[0]:
            give_back(entry[1])

    def read() -> None:
        try:
            for item in items:
                put((True, item))
            put((False, None))
        except BaseException as error:
            put((False, error))

    thread = threading.Thread(target=read, name="rlplane-prefetch", daemon=True)
    thread.start()
    try:
        while True:
            is_item, entry = ready.get()
            if is_item:
                yield entry
            elif entry is None:
                return
            else:
                raise entry
    finally:
        stop.set()
        thread.join()
        while not ready.empty():
            is_item, entry = ready.get()
            if is_item:
                give_back(entry)
