"""``MetricsDataPlaneClient``: any data-plane client, with every operation measured.

The operation itself runs as it would without the wrapper, and its outcome is the engine's in every case.
What the wrapper adds to it is a look at the columns' sizes, two clock readings and one append to the
dispatcher's queue.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import pickle
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from threading import get_ident
from typing import TYPE_CHECKING, Any, TypeVar, cast

from rlplane.call_times import CallTimes, timed_call
from rlplane.interfaces import DataPlaneClient, KVBatchMeta
from rlplane.observability.calls import Call, ContractMethod
from rlplane.observability.dispatcher import TelemetryDispatcher
from rlplane.observability.engine_monitor import EngineMonitor
from rlplane.observability.operation import (
    AddedBytes,
    DataPlaneEvent,
    ErrorDescription,
    EventStatus,
    Operation,
    describe_error,
)
from rlplane.observability.own_aggregator import way_to
from rlplane.observability.sizes import _td_bytes
from rlplane.observability.training_steps import StepClock, TrainingStep
from rlplane.sinks import SinkSpec
from rlplane.transfer_stats import TransferStats

if TYPE_CHECKING:
    from rlplane.observability.own_aggregator import OwnAggregator

logger = logging.getLogger("rlplane.observability")

Method = TypeVar("Method", bound=Callable[..., Any])

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


def _measured(method: Method) -> Method:
    """The inner client's method of that name, measured."""
    of = ContractMethod(method)
    name, describe = of.name, of.describe

    @functools.wraps(method)
    def call(self: MetricsDataPlaneClient, *args: Any, **kwargs: Any) -> Any:
        told, handed = describe(*args, **kwargs), of.handed_on(kwargs) if kwargs else kwargs
        return self._measure(told, lambda: getattr(self._inner, name)(*args, **handed))

    call.__isabstractmethod__ = False  # type: ignore[attr-defined]
    return cast(Method, call)


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

    register_partition = _measured(DataPlaneClient.register_partition)
    claim_meta = _measured(DataPlaneClient.claim_meta)
    get_data = _measured(DataPlaneClient.get_data)
    check_consumption_status = _measured(DataPlaneClient.check_consumption_status)
    put_samples = _measured(DataPlaneClient.put_samples)
    get_samples = _measured(DataPlaneClient.get_samples)
    clear_samples = _measured(DataPlaneClient.clear_samples)
    # Optional from here on.
    peek_meta = _measured(DataPlaneClient.peek_meta)
    advance_version = _measured(DataPlaneClient.advance_version)
    finish_partition = _measured(DataPlaneClient.finish_partition)
    close_group = _measured(DataPlaneClient.close_group)
    should_abort = _measured(DataPlaneClient.should_abort)
    evicted_meta = _measured(DataPlaneClient.evicted_meta)
    count = _measured(DataPlaneClient.count)
    append_samples = _measured(DataPlaneClient.append_samples)
    finish_claims = _measured(DataPlaneClient.finish_claims)
    unclaim = _measured(DataPlaneClient.unclaim)
    drop_partition = _measured(DataPlaneClient.drop_partition)
    list_sample_ids = _measured(DataPlaneClient.list_sample_ids)
    partition_status = _measured(DataPlaneClient.partition_status)
    save_checkpoint = _measured(DataPlaneClient.save_checkpoint)
    load_checkpoint = _measured(DataPlaneClient.load_checkpoint)

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

    def __exit__(self, *exc_info: object) -> None:
        self._report_failure(exc_info[1])
        self.close()

    def _report_failure(self, error: object) -> None:
        """Note in the run of this client what has ended its block, if that is an error."""
        if self._aggregator is not None and isinstance(error, Exception):
            self._aggregator.report_error(error)

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
        return self._measure(Call(op, partition_id, n_keys), fn, n_bytes)

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

    def _measure(self, call: Call, fn: Callable[[], Any], n_bytes: int = 0) -> Any:
        result = error = None
        began = _now()
        with timed_call() as times:
            try:
                result = fn()
            except BaseException as raised:
                error = describe_error(raised)
                raise
            finally:
                self._record(call, began, result, error, times, n_bytes)
        return result

    def _record(
        self,
        call: Call,
        began: float,
        result: Any,
        error: ErrorDescription | None,
        times: CallTimes,
        n_bytes: int = 0,
    ) -> None:
        """Emit the event of an operation that has just ended with a result or an error."""
        ended = _now()
        op, partition_id, n_keys, effect = call.op, call.partition_id, call.n_keys, call.effect
        waited = times.waiting_s
        if not times.entered and error is not None and error[0] == "timeout":
            waited = ended - began  # an engine that does not say: it has waited in vain, all the time
        if isinstance(result, KVBatchMeta):
            n_keys = result.size
        elif result is not None and hasattr(result, "batch_size"):
            with contextlib.suppress(Exception):  # A result of an unknown kind is a result all the same.
                n_bytes = _td_bytes(result)
        done = None
        if effect is not None and (not call.if_tracked or self._dispatcher.is_tracked(partition_id)):
            done = effect(result)
        status, what = error or ("ok", None)
        if (step := self._steps.current.get()) is not None:
            step.add(op, ended - began, times, waited, _tokens_of(op, result))
        me, task = get_ident(), call.task
        self._dispatcher.put(
            Operation(op, partition_id, n_keys, n_bytes, began, ended, status, me, task, what, done, waited)
        )


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
