"""``MetricsDataPlaneClient``: any data-plane client, with every operation measured.

The operation itself runs as it would without the wrapper, and its outcome is the engine's in every case.
What the wrapper adds to it is a look at the columns' sizes, two clock readings and one append to the
journal.
"""

from __future__ import annotations

import logging
import pickle
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from threading import get_ident
from typing import TYPE_CHECKING, Any

from rlplane.interfaces import DEFAULT_TIMEOUT_S, DataPlaneClient, KVBatchMeta
from rlplane.metrics.sender import EventSender
from rlplane.observability.journal import (
    ADD,
    CLAIM,
    CLEAR,
    NOTHING,
    PUT,
    RESET,
    DataPlaneEvent,
    EventStatus,
    Journal,
)
from rlplane.observability.sizes import glance, total_bytes
from rlplane.observability.watch import Watcher
from rlplane.sinks import SinkSpec
from rlplane.transfer_stats import TransferStats

if TYPE_CHECKING:
    from tensordict import TensorDict

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
    description. The copy, like a forked child, starts with empty books.

    Args:
        inner: The client to measure.
        on_event: Called with one :class:`DataPlaneEvent` per operation.
        sinks: Names, mappings with ``kind``, or objects with ``write`` and ``close``.
        metrics_address: The aggregator's address for events.
        role: What this client is to the job, such as ``rollout``; the viewers show it.
        track_partitions: Partitions whose samples are followed one by one (``"*"``: all).
        transfer_log_interval_s: How often a line about the engine's transfers is logged; None: never.
        capacity: ``capacity_samples`` and ``capacity_bytes`` of the plane, for the viewers.

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
    ) -> None:
        self._inner = inner
        self._options: dict[str, Any] = {
            "metrics_address": metrics_address,
            "role": role,
            "track_partitions": list(track_partitions),
            "transfer_log_interval_s": transfer_log_interval_s,
            "capacity": dict(capacity or {}),
        }
        sender = EventSender(metrics_address, role=role) if metrics_address else None
        self._journal = Journal(on_event, sinks, sender, track_partitions)
        self._watcher = Watcher(
            inner,
            self._journal,
            capacity=self._options["capacity"],
            transfer_log_interval_s=transfer_log_interval_s,
        )
        self._journal.companion = self._watcher
        weakref.finalize(self, self._journal.close, 1.0).atexit = False

    @property
    def inner(self) -> DataPlaneClient:
        """The client that does the work."""
        return self._inner

    # What was measured.

    def snapshot(self) -> dict[str, Any]:
        """Totals, live bytes and keys, and how the measuring itself goes; see ``docs/observability.md``."""
        snapshot = self._journal.snapshot()
        held = self.bytes_outstanding_by_partition()
        snapshot["engine"] = {
            partition_id: {
                "samples": status["samples"],
                "bytes": status["bytes"],
                "difference": status["bytes"] - held.get(partition_id, 0),
            }
            for partition_id, status in dict(self._watcher.engine).items()
        }
        snapshot["transfers"] = self.transfer_stats.reduce()
        return snapshot

    def bytes_outstanding_by_partition(self) -> dict[str, int]:
        """The bytes that this client put and that are still held, by partition; none held: not there."""
        with self._journal.lock:
            self._journal.fold()
            return self._journal.books.bytes_by_partition()

    @property
    def transfer_stats(self) -> TransferStats:
        """The engine's transfers since this client was made (a copy)."""
        self._watcher.collect_transfers()
        return TransferStats().aggregate(self._watcher.transfers)

    def reconcile(self) -> None:
        """Take samples off the books that other processes have cleared, now. It also happens by itself.

        Engines without ``partition_status`` and ``list_sample_ids`` cannot say; nothing happens then.
        """
        self._watcher.reconcile_all(thoroughly=True)

    def flush(self, timeout_s: float = 5.0) -> bool:
        """Wait until callback and sinks have had every event so far; False if that takes longer."""
        return self._journal.flush(timeout_s)

    # The operations.

    def register_partition(
        self,
        partition_id: str,
        fields: list[str],
        num_samples: int,
        consumer_tasks: list[str],
        grpo_group_size: int | None = None,
        enums: dict[str, list[str]] | None = None,
    ) -> None:
        self._run(
            "register",
            partition_id,
            lambda: self._inner.register_partition(
                partition_id, fields, num_samples, consumer_tasks, grpo_group_size, enums
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
        timeout_s: float = DEFAULT_TIMEOUT_S,
        *,
        where: Mapping[str, Any] | None = None,
    ) -> KVBatchMeta:
        # An engine written for the contract without ``where`` is not handed one that nobody asked for.
        extra = {} if where is None else {"where": where}
        began = _now()
        try:
            meta = self._inner.claim_meta(
                partition_id, task_name, required_fields, batch_size, dp_rank, blocking, timeout_s, **extra
            )
        except BaseException as error:
            self._failed("claim_meta", partition_id, 0, 0, began, error, task=task_name)
            raise
        end = _now()
        act, payload = NOTHING, None
        if self._journal.sender is not None and self._journal.is_tracked(partition_id):
            act, payload = CLAIM, (list(meta.sample_ids), [dict(tag) for tag in meta.tags or ()])
        size, me = meta.size, get_ident()
        self._journal.note(
            ("claim_meta", partition_id, size, 0, began, end, "ok", me, task_name, None, act, payload)
        )
        return meta

    def get_data(self, meta: KVBatchMeta, select_fields: list[str] | None = None) -> TensorDict:
        result: TensorDict = self._run(
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
    ) -> KVBatchMeta:
        try:
            seen = glance(fields)
        except Exception:  # Not a TensorDict, say: what is wrong with it is for the engine to tell.
            seen = []
        began = _now()
        try:
            if timeout_s == DEFAULT_TIMEOUT_S:
                meta = self._inner.put_samples(sample_ids, partition_id, fields, tags)
            else:
                meta = self._inner.put_samples(sample_ids, partition_id, fields, tags, timeout_s=timeout_s)
        except BaseException as error:
            payload = (_as_ids(sample_ids), seen, None)
            self._failed("put", partition_id, len(payload[0]), 0, began, error, PUT, payload)
            raise
        ended = _now()
        ids = list(sample_ids) if type(sample_ids) is list else _as_ids(sample_ids)
        noted = (ids, seen, tags and meta.tags)
        self._journal.note(
            ("put", partition_id, len(ids), 0, began, ended, "ok", get_ident(), None, None, PUT, noted)
        )
        return meta

    def get_samples(self, sample_ids: list[str], partition_id: str, select_fields: list[str]) -> TensorDict:
        result: TensorDict = self._run(
            "get",
            partition_id,
            lambda: self._inner.get_samples(sample_ids, partition_id, select_fields),
            n_keys=len(_as_ids(sample_ids)),
        )
        return result

    def clear_samples(self, sample_ids: list[str] | None, partition_id: str) -> None:
        ids = None if sample_ids is None else _as_ids(sample_ids)
        self._run(
            "clear",
            partition_id,
            lambda: self._inner.clear_samples(sample_ids, partition_id),
            n_keys=0 if ids is None else len(ids),
            action=CLEAR,
            payload=ids,
        )

    def close(self) -> None:
        """Close the inner client, then hand on the last events, for at most a few seconds. Idempotent."""
        if self._journal.stopped.is_set():
            self._inner.close()
            return
        try:
            self._watcher.finish()
        except Exception as error:
            logger.debug("the last look at the engine failed: %r", error)
        try:
            self._run("close", "", self._inner.close)
        finally:
            self._watcher.send_scalars()
            self._journal.close()

    # Optional from here on.

    def list_sample_ids(self, partition_id: str) -> list[str]:
        result: list[str] = self._run(
            "list_sample_ids", partition_id, lambda: self._inner.list_sample_ids(partition_id)
        )
        return result

    def partition_status(self, partition_id: str) -> dict[str, Any]:
        result: dict[str, Any] = self._run(
            "partition_status", partition_id, lambda: self._inner.partition_status(partition_id)
        )
        return result

    def save_checkpoint(self, path: str) -> None:
        self._run("save_checkpoint", "", lambda: self._inner.save_checkpoint(path))

    def load_checkpoint(self, path: str, *, release_claims: bool = False) -> None:
        extra: dict[str, Any] = {"release_claims": True} if release_claims else {}
        # The plane's content is replaced, so nothing of what this client put is there any more.
        self._run("load_checkpoint", "", lambda: self._inner.load_checkpoint(path, **extra), action=RESET)

    def __getattr__(self, name: str) -> Any:
        # What an engine has beyond the contract stays in reach.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __repr__(self) -> str:
        return f"MetricsDataPlaneClient({self._inner!r})"

    def __getstate__(self) -> dict[str, Any]:
        on_event, sinks = self._journal.on_event, []
        if on_event is not None and not _pickles(on_event):
            logger.warning(
                "the callback %r does not pickle: the copy of the client goes without it", on_event
            )
            on_event = None
        for spec in self._journal.sink_specs:
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
        task: str | None = None,
        action: int = NOTHING,
        payload: Any = None,
    ) -> Any:
        """Run ``fn`` and note one operation with its time and status.

        ``n_keys`` and ``n_bytes`` are taken from the result when it is a meta or a ``TensorDict``.
        """
        began = _now()
        try:
            result = fn()
        except BaseException as error:
            self._failed(op, partition_id, n_keys, n_bytes, began, error, task=task)
            raise
        ended = _now()
        if isinstance(result, KVBatchMeta):
            n_keys = result.size
        elif result is not None and hasattr(result, "batch_size"):
            try:
                n_bytes = total_bytes(result)
            except Exception:  # A result of a kind that we do not know is a result all the same.
                pass
        self._journal.note(
            (op, partition_id, n_keys, n_bytes, began, ended, "ok", get_ident(), task, None, action, payload)
        )
        return result

    def _failed(
        self,
        op: str,
        partition_id: str,
        n_keys: int,
        n_bytes: int,
        began: float,
        error: BaseException,
        action: int = NOTHING,
        payload: Any = None,
        *,
        task: str | None = None,
    ) -> None:
        status = "timeout" if isinstance(error, TimeoutError) else "error"
        # Not the error itself: its traceback would keep the caller's frames, and so its tensors, alive.
        kept = (type(error).__name__, _message(error))
        self._journal.note(
            (
                op,
                partition_id,
                n_keys,
                n_bytes,
                began,
                _now(),
                status,
                get_ident(),
                task,
                kept,
                action,
                payload,
            )
        )

    def _emit(
        self, op: str, partition_id: str, n_keys: int, n_bytes: int, t0: float, status: EventStatus
    ) -> None:
        """Note an operation that began at ``t0`` (``time.perf_counter()``) and ends now."""
        self._journal.note(
            (op, partition_id, n_keys, n_bytes, t0, _now(), status, get_ident(), None, None, NOTHING, None)
        )

    def _record_put(self, partition_id: str, keys: list[str], n_bytes: int) -> None:
        """Enter ``n_bytes``, spread evenly over ``keys``, on top of what they have."""
        now = _now()
        self._journal.note(
            ("put", partition_id, len(keys), n_bytes, now, now, "ok", 0, None, None, ADD, list(keys))
        )

    def _record_clear(self, partition_id: str, keys: list[str] | None) -> None:
        """Take ``keys``, or all of the partition, off the books."""
        with self._journal.lock:
            self._journal.fold()
            self._journal.books.clear(partition_id, keys)


def _as_ids(sample_ids: Any) -> list[Any]:
    """The ids as a list of our own, or none if they are not a sequence: the engine will say so."""
    return list(sample_ids) if isinstance(sample_ids, (list, tuple)) else []


def _message(error: BaseException) -> str:
    try:
        return str(error)[:500]
    except Exception:
        return ""


def _pickles(value: Any) -> bool:
    try:
        pickle.dumps(value)
    except Exception:
        return False
    return True
