"""``MetricsDataPlaneClient``: any data-plane client, with every operation measured.

The operation itself runs as it would without the wrapper, and its outcome is the engine's in every case.
What the wrapper adds to it is a look at the columns' sizes, two clock readings and one append to the
dispatcher's queue.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from threading import get_ident
from typing import TYPE_CHECKING, Any, Literal

from rlplane.call_times import CallTimes, timed_call
from rlplane.interfaces import DEFAULT_TIMEOUT_S, DataPlaneClient, KVBatchMeta, PartitionStatus
from rlplane.observability.dispatcher import TelemetryDispatcher
from rlplane.observability.engine_monitor import EngineMonitor
from rlplane.observability.operation import (
    AddedBytes,
    Advanced,
    Claimed,
    Cleared,
    DataPlaneEvent,
    Effect,
    ErrorDescription,
    EventStatus,
    Operation,
    Reset,
    as_ids,
    describe_error,
    put_effect,
)
from rlplane.observability.own_aggregator import way_to
from rlplane.observability.sizes import _td_bytes
from rlplane.observability.training_steps import StepClock, TrainingStep
from rlplane.sinks import SinkSpec
from rlplane.transfer_stats import TransferStats

if TYPE_CHECKING:
    from tensordict import TensorDict

    from rlplane.control.policies import FlowPolicy
    from rlplane.observability.own_aggregator import OwnAggregator

__all__ = ["MetricsDataPlaneClient", "log_event"]

logger = logging.getLogger("rlplane.observability")

_now = time.perf_counter


def log_event(event: DataPlaneEvent) -> None:
    """Log one line per operation, at level INFO."""
    logger.info(
        "data_plane op=%s partition=%s keys=%d bytes=%d wall_ms=%.3f status=%s",
        event["op"],
        event["partition_id"],
        event["n_keys"],
        event["n_bytes"],
        event["wall_ms"],
        event["status"],
    )


class MetricsDataPlaneClient(DataPlaneClient):
    """Wraps a client; each operation gives one event, and :meth:`snapshot` has the sums.

    A callback that only appends to a list, a deque or a ``SimpleQueue`` is called before the operation
    returns. Any other is called on a thread of its own, in order, within milliseconds; :meth:`flush`
    waits for it. It may raise, block or be slow: that is counted, logged once, and ends with the callback
    being switched off.

    The wrapper pickles if ``inner`` does. A callback that does not pickle is left out, with a log line,
    because telemetry does not decide whether a client can be sent somewhere; sinks travel by their
    description. The copy, like a forked child, starts at zero.

    Args:
        inner: The client to measure.
        on_event: Called with one :class:`DataPlaneEvent` per operation.
        sinks: Names, mappings with ``kind``, or objects with ``write`` and ``close``.
        metrics_address: The aggregator's address for events. One that is not of this machine is replaced by
            what the plane says, if it spans machines; ``plane``: always that one.
        role: What this client is to the job, such as ``rollout``; the viewers show it.
        track_partitions: Partitions whose samples are followed one by one (``"*"``: all).
        transfer_log_interval_s: How often a line about the engine's transfers is logged; None: never.
        capacity: ``capacity_samples`` and ``capacity_bytes`` of the plane, for the viewers.
        aggregator: What ends with this client. A copy goes without it.

    Raises:
        ConfigError: A sink or the address cannot be used.
        MissingExtraError: A sink's package is not installed.
    """

    def __init__(
        self,
        inner: DataPlaneClient,
        on_event: Callable[[DataPlaneEvent], None] | None = None,
        *,
        sinks: Sequence[SinkSpec] = (),
        metrics_address: str | None = None,
        role: str = "",
        track_partitions: Sequence[str] = (),
        transfer_log_interval_s: float | None = None,
        capacity: Mapping[str, int | None] | None = None,
        aggregator: OwnAggregator | None = None,
    ) -> None:
        self._inner = inner
        self._aggregator = aggregator
        self._options: dict[str, Any] = {
            "metrics_address": metrics_address,
            "role": role,
            "track_partitions": list(track_partitions),
            "transfer_log_interval_s": transfer_log_interval_s,
            "capacity": dict(capacity or {}),
        }
        way = way_to(metrics_address, inner)
        self._dispatcher = TelemetryDispatcher(on_event, sinks, way, role, track_partitions)
        self._monitor = EngineMonitor(
            inner,
            self._dispatcher,
            capacity=self._options["capacity"],
            transfer_log_interval_s=transfer_log_interval_s,
        )
        self._dispatcher.accompany(self._monitor)
        self._steps = StepClock(self._dispatcher.finish_step)
        weakref.finalize(self, self._dispatcher.close, 1.0).atexit = False

    @property
    def inner(self) -> DataPlaneClient:
        """The client that does the work."""
        return self._inner

    # What was measured.

    def snapshot(self) -> dict[str, Any]:
        """Totals, live bytes and keys, and how the measuring itself goes; see ``docs/observability.md``."""
        self._monitor.collect_checks()
        snapshot = self._dispatcher.snapshot()
        held = self.bytes_outstanding_by_partition()
        snapshot["engine"] = {
            partition_id: {
                "samples": status["samples"],
                "bytes": status["bytes"],
                "difference": status["bytes"] - held.get(partition_id, 0),
            }
            for partition_id, status in dict(self._monitor.engine).items()
        }
        snapshot["transfers"] = self.transfer_stats.reduce()
        return snapshot

    def bytes_outstanding_by_partition(self) -> dict[str, int]:
        """The bytes that this client put and that are still held, by partition; none held: not there."""
        with self._dispatcher.lock:
            self._dispatcher.process()
            return self._dispatcher.accounting.outstanding.bytes_by_partition()

    @property
    def transfer_stats(self) -> TransferStats:
        """The engine's transfers since this client was made (a copy)."""
        self._monitor.collect_transfers()
        return TransferStats().aggregate(self._monitor.transfers)

    def reconcile(self) -> None:
        """Stop counting samples that other processes have cleared, now. It also happens by itself.

        Engines without ``partition_status`` and ``list_sample_ids`` cannot say; nothing happens then.
        """
        self._monitor.reconcile_all(thoroughly=True)

    def flush(self, timeout_s: float = 5.0) -> bool:
        """Wait until callback and sinks have had every event so far; False if that takes longer."""
        return self._dispatcher.flush(timeout_s)

    def step(self, number: int) -> TrainingStep:
        return self._steps.step(number)

    def mark_step(self, number: int) -> None:
        self._steps.mark(number)

    def log(self, scalars: Mapping[str, Any]) -> None:
        self._steps.log(scalars)

    # The operations.

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
        extra = _given(flow=flow, produces=produces)
        self._run(
            "register",
            partition_id,
            lambda: self._inner.register_partition(
                partition_id, fields, num_samples, consumer_tasks, grpo_group_size, enums, **extra
            ),
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
        # An engine written for the contract without these is not handed one that nobody asked for.
        extra = _given(
            where=where,
            max_tokens=max_tokens,
            order=order,
            dp_world=dp_world,
            step=step,
            max_uses=None if max_uses == 1 else max_uses,
            repeat_where=repeat_where,
            split_groups=split_groups or None,
        )
        meta: KVBatchMeta = self._measure(
            "claim_meta",
            partition_id,
            lambda: self._inner.claim_meta(
                partition_id, task_name, required_fields, batch_size, dp_rank, blocking, timeout_s, **extra
            ),
            task=task_name,
            effect=self._claim_effect(partition_id),
        )
        return meta

    def get_data(self, meta: KVBatchMeta, select_fields: list[str] | None = None) -> TensorDict:
        result: TensorDict = self._measure(
            "get_data",
            getattr(meta, "partition_id", ""),
            lambda: self._inner.get_data(meta, select_fields),
            n_keys=getattr(meta, "size", 0),
            task=getattr(meta, "task_name", None),
        )
        return result

    def check_consumption_status(self, partition_id: str, task_names: list[str]) -> bool:
        result: bool = self._run(
            "check_consumption_status",
            partition_id,
            lambda: self._inner.check_consumption_status(partition_id, task_names),
        )
        return result

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
        # An engine written for the contract without these is not handed one that nobody asked for.
        extra = _given(
            timeout_s=None if timeout_s == DEFAULT_TIMEOUT_S else timeout_s, must_exist=must_exist or None
        )
        meta: KVBatchMeta = self._measure(
            "put",
            partition_id,
            lambda: self._inner.put_samples(sample_ids, partition_id, fields, tags, **extra),
            n_keys=len(as_ids(sample_ids)),
            effect=put_effect(sample_ids, fields, tags),
        )
        return meta

    def get_samples(self, sample_ids: list[str], partition_id: str, select_fields: list[str]) -> TensorDict:
        result: TensorDict = self._run(
            "get",
            partition_id,
            lambda: self._inner.get_samples(sample_ids, partition_id, select_fields),
            n_keys=len(as_ids(sample_ids)),
        )
        return result

    def clear_samples(self, sample_ids: list[str] | None, partition_id: str) -> None:
        ids = None if sample_ids is None else as_ids(sample_ids)
        self._measure(
            "clear",
            partition_id,
            lambda: self._inner.clear_samples(sample_ids, partition_id),
            n_keys=0 if ids is None else len(ids),
            effect=lambda _: Cleared(ids),
        )

    def close(self) -> None:
        """Close the inner client, then hand on the last events, for at most a few seconds. Idempotent."""
        if self._dispatcher.stopped.is_set():
            self._inner.close()
            return
        self._look_at_engine()
        try:
            self._run("close", "", self._inner.close)
        finally:
            self._end()

    def _look_at_engine(self) -> None:
        """For the last time, before it is closed."""
        try:
            self._monitor.finish()
        except Exception as error:
            logger.debug("the last look at the engine failed: %r", error)

    def _end(self) -> None:
        """Hand on the last events."""
        self._monitor.send_scalars()
        self._dispatcher.close()
        if self._aggregator is not None:
            self._aggregator.close()

    # Optional from here on.

    def peek_meta(
        self,
        partition_id: str,
        *,
        where: Mapping[str, Any] | None = None,
        fields: list[str] | None = None,
        limit: int | None = None,
        order: str | None = None,
    ) -> KVBatchMeta:
        result: KVBatchMeta = self._run(
            "peek_meta",
            partition_id,
            lambda: self._inner.peek_meta(partition_id, where=where, fields=fields, limit=limit, order=order),
        )
        return result

    def advance_version(self, partition_id: str, version: int) -> None:
        self._measure(
            "advance_version",
            partition_id,
            lambda: self._inner.advance_version(partition_id, version),
            effect=lambda _: Advanced(version),
        )

    def finish_partition(self, partition_id: str) -> None:
        self._run("finish_partition", partition_id, lambda: self._inner.finish_partition(partition_id))

    def close_group(
        self, partition_id: str, group: str | int, *, reason: str, fields: list[str] | None = None
    ) -> int:
        result: int = self._run(
            "close_group",
            partition_id,
            lambda: self._inner.close_group(partition_id, group, reason=reason, fields=fields),
        )
        return result

    def should_abort(self, sample_ids: list[str], partition_id: str) -> list[str]:
        result: list[str] = self._run(
            "should_abort", partition_id, lambda: self._inner.should_abort(sample_ids, partition_id)
        )
        return result

    def evicted_meta(self, partition_id: str, *, limit: int | None = None) -> KVBatchMeta:
        result: KVBatchMeta = self._run(
            "evicted_meta", partition_id, lambda: self._inner.evicted_meta(partition_id, limit=limit)
        )
        return result

    def count(self, partition_id: str, where: Mapping[str, Any] | None = None) -> int:
        result: int = self._run("count", partition_id, lambda: self._inner.count(partition_id, where))
        return result

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
        meta: KVBatchMeta = self._measure(
            "append",
            partition_id,
            lambda: self._inner.append_samples(
                sample_ids, partition_id, fields, tags, finish=finish, timeout_s=timeout_s
            ),
            n_keys=len(as_ids(sample_ids)),
            effect=put_effect(sample_ids, fields, tags, appends=True),
        )
        return meta

    def finish_claims(self, meta: KVBatchMeta) -> None:
        self._run(
            "finish_claims", meta.partition_id, lambda: self._inner.finish_claims(meta), n_keys=meta.size
        )

    def unclaim(self, meta: KVBatchMeta) -> None:
        self._run("unclaim", meta.partition_id, lambda: self._inner.unclaim(meta), n_keys=meta.size)

    def drop_partition(self, partition_id: str) -> None:
        self._run("drop_partition", partition_id, lambda: self._inner.drop_partition(partition_id))

    def list_sample_ids(self, partition_id: str) -> list[str]:
        result: list[str] = self._run(
            "list_sample_ids", partition_id, lambda: self._inner.list_sample_ids(partition_id)
        )
        return result

    def partition_status(self, partition_id: str) -> PartitionStatus:
        result: PartitionStatus = self._run(
            "partition_status", partition_id, lambda: self._inner.partition_status(partition_id)
        )
        return result

    def save_checkpoint(self, checkpoint_dir: str, *, metadata: Mapping[str, Any] | None = None) -> None:
        self._run(
            "save_checkpoint", "", lambda: self._inner.save_checkpoint(checkpoint_dir, metadata=metadata)
        )

    def load_checkpoint(self, checkpoint_dir: str, *, release_claims: bool = False) -> dict[str, Any]:
        # The plane's content is replaced, so nothing of what this client put is there any more.
        metadata: dict[str, Any] = self._measure(
            "load_checkpoint",
            "",
            lambda: self._inner.load_checkpoint(checkpoint_dir, release_claims=release_claims),
            effect=lambda _: Reset(),
        )
        return metadata

    def __getattr__(self, name: str) -> Any:
        # What an engine has beyond the contract stays in reach.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __repr__(self) -> str:
        return f"MetricsDataPlaneClient({self._inner!r})"

    def __getstate__(self) -> dict[str, Any]:
        on_event, sinks = self._dispatcher.on_event, []
        if on_event is not None and not _pickles(on_event):
            logger.warning(
                "the callback %r does not pickle: the copy of the client goes without it", on_event
            )
            on_event = None
        for spec in self._dispatcher.sink_specs:
            if isinstance(spec, (str, Mapping)) or _pickles(spec):
                sinks.append(spec)
            else:
                logger.warning("the sink %r does not pickle: the copy of the client goes without it", spec)
        return {"inner": self._inner, "on_event": on_event, "sinks": sinks, **self._options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    # The private methods of the documented class.

    def _run(
        self,
        op: str,
        partition_id: str,
        fn: Callable[[], Any],
        *,
        n_keys: int = 0,
        n_bytes: int = 0,
    ) -> Any:
        """Run ``fn`` and emit one event with its time and status.

        ``n_keys`` and ``n_bytes`` are taken from the result when it is a meta or a ``TensorDict``.
        """
        return self._measure(op, partition_id, fn, n_keys=n_keys, n_bytes=n_bytes)

    def _emit(
        self, op: str, partition_id: str, n_keys: int, n_bytes: int, t0: float, status: EventStatus
    ) -> None:
        """Emit the event of an operation that began at ``t0`` (``time.perf_counter()``) and ends now."""
        self._dispatcher.put(Operation(op, partition_id, n_keys, n_bytes, t0, _now(), status, get_ident()))

    def _record_put(self, partition_id: str, keys: list[str], n_bytes: int) -> None:
        """Count ``n_bytes``, spread evenly over ``keys``, on top of what they have."""
        now = _now()
        self._dispatcher.put(
            Operation(
                "put", partition_id, len(keys), n_bytes, now, now, "ok", 0, effect=AddedBytes(list(keys))
            )
        )

    def _record_clear(self, partition_id: str, keys: list[str] | None) -> None:
        """Stop counting ``keys``, or (None) all of the partition."""
        with self._dispatcher.lock:
            self._dispatcher.process()
            self._dispatcher.accounting.outstanding.clear(partition_id, keys)

    def _measure(
        self,
        op: str,
        partition_id: str,
        fn: Callable[[], Any],
        *,
        n_keys: int = 0,
        n_bytes: int = 0,
        task: str | None = None,
        effect: Callable[[Any], Effect | None] | None = None,
    ) -> Any:
        """As :meth:`_run`; ``effect`` says what the operation did, from its result (None if it failed)."""
        result = error = None
        began = _now()
        with timed_call() as times:
            try:
                result = fn()
            except BaseException as raised:
                error = describe_error(raised)
                raise
            finally:
                self._record(op, partition_id, n_keys, n_bytes, began, result, error, task, effect, times)
        return result

    def _claim_effect(self, partition_id: str) -> Callable[[KVBatchMeta | None], Effect | None] | None:
        """What a claim does to samples that are followed one by one."""
        if not self._dispatcher.is_tracked(partition_id):
            return None
        return lambda meta: (
            None if meta is None else Claimed(list(meta.sample_ids), [dict(tag) for tag in meta.tags or ()])
        )

    def _record(
        self,
        op: str,
        partition_id: str,
        n_keys: int,
        n_bytes: int,
        began: float,
        result: Any,
        error: ErrorDescription | None,
        task: str | None,
        effect: Callable[[Any], Effect | None] | None,
        times: CallTimes,
    ) -> None:
        """Emit the event of an operation that has just ended with a result or an error."""
        ended = _now()
        waited = times.waiting_s
        if not times.entered and error is not None and error[0] == "timeout":
            waited = ended - began  # an engine that does not say: it has waited in vain, all the time
        if isinstance(result, KVBatchMeta):
            n_keys = result.size
        elif result is not None and hasattr(result, "batch_size"):
            with contextlib.suppress(Exception):  # A result of an unknown kind is a result all the same.
                n_bytes = _td_bytes(result)
        done = effect(result) if effect is not None else None
        status: Literal["ok", "timeout", "error"] = "ok"
        what: tuple[str, str] | None = None
        if error is not None:
            status, what = error
        me = get_ident()
        if (step := self._steps.current.get()) is not None:
            step.add(op, ended - began, times, waited, _tokens_of(op, result))
        self._dispatcher.put(
            Operation(op, partition_id, n_keys, n_bytes, began, ended, status, me, task, what, done, waited)
        )


def _given(**arguments: Any) -> dict[str, Any]:
    """The arguments that are set."""
    return {name: value for name, value in arguments.items() if value is not None}


def _tokens_of(op: str, result: Any) -> int:
    if op != "claim_meta" or not isinstance(result, KVBatchMeta):
        return 0
    return sum(length for length in result.sequence_lengths or () if type(length) is int)


def _pickles(value: Any) -> bool:
    try:
        pickle.dumps(value)
    except Exception:
        return False
    return True
