"""The trainer's side: prompts go into the plane, and scored groups come out of it into TRL's queue."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tensordict import NonTensorData, NonTensorStack, TensorDict

from rlplane.control.policies import FlowPolicy
from rlplane.integrations.trl.rollouts import PROMPT_FIELD, ROLLOUT_FIELDS, TOKEN_FIELDS
from rlplane.integrations.trl.weights import VERSION_TAG
from rlplane.interfaces import DataPlaneClient, KVBatchMeta

_WAIT_S = 0.2


class PlaneRolloutWorker:
    """TRL's ``RolloutWorkerProtocol`` over a plane, for processes that call :func:`run_rollouts`.

    Args:
        plane: The client of the trainer's process.
        dataset: What TRL's dataset is: rows with ``prompt`` (text or messages) and other columns, which
            reward functions get. It is repeated for ever.
        num_generations: The size of a group.
        max_groups: How many groups are in the plane at once, waiting, in progress or ready: how far rollouts
            may be ahead of the trainer.
        max_staleness: Groups that were begun with older weights than so many versions ago are given up. As in
            the trainer's config.
        partition_id: The name of the partition. It is registered here.
    """

    def __init__(
        self,
        plane: DataPlaneClient,
        dataset: Iterable[Mapping[str, Any]],
        *,
        num_generations: int,
        max_groups: int = 8,
        max_staleness: int = 3,
        partition_id: str = "trl",
    ) -> None:
        self.rollout_buffer: queue.Queue[Any] = queue.Queue(maxsize=num_generations)
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        self._plane, self._partition = plane, partition_id
        self._size, self._max_samples = num_generations, max_groups * num_generations
        self._examples = enumerate(_repeated(dataset))
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._last_group = 0.0
        plane.register_partition(
            partition_id,
            [PROMPT_FIELD, *ROLLOUT_FIELDS],
            0,
            ["rollout", "train"],
            num_generations,
            flow=FlowPolicy.windowed(max_staleness),
        )

    def start(self) -> None:
        """Let prompts out."""
        self._last_group = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="rlplane-trl", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End; the rollout processes do so after the group that each is at."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()
        self._plane.clear_samples(self._plane.list_sample_ids(self._partition), self._partition)
        self._plane.finish_partition(self._partition)

    def update_model_version(self, model_version: int) -> None:
        """Groups that are too old for ``model_version`` are given up."""
        self._plane.advance_version(self._partition, model_version)

    def check_health(self, stale_after_s: float) -> None:
        """Raise if no group has come for ``stale_after_s`` seconds, or none can come any more."""
        if self._error is not None:
            raise RuntimeError("the worker has failed") from self._error
        silence = time.monotonic() - self._last_group
        if silence > stale_after_s:
            waiting = self._plane.count(self._partition)
            raise RuntimeError(
                f"no rollouts for {silence:.0f} s, with {waiting} samples wanted;"
                " does a process call run_rollouts?"
            )

    def _run(self) -> None:
        try:
            while not self._stopped.is_set():
                while self._plane.count(self._partition) + self._size <= self._max_samples:
                    self._put_prompt()
                try:
                    meta = self._plane.claim_meta(
                        self._partition, "train", list(ROLLOUT_FIELDS), self._size, timeout_s=_WAIT_S
                    )
                except TimeoutError:
                    continue
                self._hand_over(meta)
        except BaseException as error:
            self._error = error

    def _put_prompt(self) -> None:
        number, example = next(self._examples)
        rows = NonTensorStack(*(NonTensorData(dict(example)) for _ in range(self._size)))
        ids = [f"{number}_g{member}" for member in range(self._size)]
        self._plane.put_samples(ids, self._partition, TensorDict({PROMPT_FIELD: rows}, [self._size]))

    def _hand_over(self, meta: KVBatchMeta) -> None:
        from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

        data = self._plane.get_data(meta, [PROMPT_FIELD, *ROLLOUT_FIELDS])
        tokens = {name: data[name].unbind() for name in TOKEN_FIELDS}
        objects = {name: data.get(name).tolist() for name in (PROMPT_FIELD, "completion", "metrics")}
        for row, tag in enumerate(meta.tags or []):
            sample = RolloutSample(
                prompt=objects[PROMPT_FIELD][row]["prompt"],
                completion=objects["completion"][row],
                **{name: tokens[name][row].numpy() for name in TOKEN_FIELDS},
                advantage=data["advantage"][row].item(),
                model_version=tag[VERSION_TAG],
                group_id=int(meta.sample_ids[row].partition("_g")[0]),
                metrics=objects["metrics"][row],
                enqueued_at=time.time(),
            )
            while not self._stopped.is_set():
                try:
                    self.rollout_buffer.put(sample, timeout=_WAIT_S)
                    break
                except queue.Full:
                    continue
        self._plane.clear_samples(meta.sample_ids, self._partition)
        self._last_group = time.monotonic()  # and not before: the trainer may have been busy for long


def _repeated(dataset: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    while True:
        example = None
        for example in dataset:
            yield example
        if example is None:
            raise ValueError("the dataset has no rows, or can be read only once")
