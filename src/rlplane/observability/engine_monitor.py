"""``EngineMonitor``: asks the engine for its own counts and its transfers, off the path of every operation.

The engine's ``partition_status`` goes to the viewers, and corrects the outstanding bytes: a sample that
another process has cleared would otherwise be counted for ever. Its transfer statistics are collected, added
up, logged and handed on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from typing import Any

from rlplane.interfaces import DataPlaneClient
from rlplane.metrics.events import PartitionStatus, RowChecks
from rlplane.metrics.events import TransferRecord as TransferReport
from rlplane.observability.dispatcher import TelemetryDispatcher
from rlplane.transfer_stats import TransferStats

logger = logging.getLogger("rlplane.observability")

_TICK_S = 1.0
# Without viewers nobody needs to know more often.
_RECONCILE_S = 5.0
_SCALARS_S = 5.0
# At most so many partitions are asked about at each tick, those used last first, and none that was used
# longer ago than this.
_MOST_PARTITIONS = 32
_FORGET_AFTER_S = 300.0
# How long an engine that does not answer is left alone.
_BACK_OFF_S = 5.0


class EngineMonitor:
    """A thread of its own, because an engine may take long to answer. The dispatcher starts and stops it."""

    def __init__(
        self,
        inner: DataPlaneClient,
        dispatcher: TelemetryDispatcher,
        *,
        capacity: Mapping[str, int | None],
        transfer_log_interval_s: float | None,
    ) -> None:
        self._inner = inner
        self._dispatcher = dispatcher
        self._capacity = dict(capacity)
        self._log_interval_s = transfer_log_interval_s
        self._has_status = _overrides(inner, "partition_status")
        self._has_listing = _overrides(inner, "list_sample_ids")
        self._begin()

    def _begin(self) -> None:
        self.engine: dict[str, dict[str, Any]] = {}
        self.transfers = TransferStats()
        self._to_log = TransferStats()
        self._transfer_lock = threading.Lock()
        self._gone: dict[str, int] = {}
        self._listed: dict[str, float] = {}
        self._scalars_at = time.monotonic()

    def after_fork(self) -> None:
        """Forget what the parent saw; :meth:`start` follows with the child's first operation."""
        self._begin()

    def start(self) -> None:
        """Start the thread."""
        threading.Thread(target=self._run, name="rlplane-engine-monitor", daemon=True).start()

    def reconcile(self, partition_id: str, *, thoroughly: bool) -> None:
        """Ask the engine about a partition, and stop counting what is no longer there.

        Unless ``thoroughly``, its samples are only listed when more of them went than we cleared.
        """
        dispatcher = self._dispatcher
        with dispatcher.lock:
            dispatcher.process()
            until, held = dispatcher.accounting.number, dispatcher.accounting.outstanding.keys(partition_id)
        try:
            # As a plain dict: another engine may know less than ours.
            status: dict[str, Any] = dict(self._inner.partition_status(partition_id))
            live = self._live_samples(partition_id, status, held, thoroughly)
        except KeyError:  # Never registered, as far as the engine knows.
            self.engine.pop(partition_id, None)
            return
        with dispatcher.lock:
            if live is not None:
                keys, freed = dispatcher.accounting.outstanding.prune(partition_id, live, until)
                dispatcher.accounting.reconciled["keys"] += keys
                dispatcher.accounting.reconciled["bytes"] += freed
            self.engine[partition_id] = status
        if dispatcher.publisher is not None:
            capacity = {key: status.get(key, limit) for key, limit in self._capacity.items()}
            dispatcher.to_aggregator(PartitionStatus.from_client(status, time.time_ns(), **capacity))

    def _live_samples(
        self, partition_id: str, status: dict[str, Any], held: int, thoroughly: bool
    ) -> set[str] | None:
        gone = int(status.get("written", 0)) - int(status["samples"])
        before = self._gone.get(partition_id, 0)
        if not held:
            return None
        if status["samples"] == 0:
            return set()
        now = time.monotonic()
        rested = now - self._listed.get(partition_id, 0.0) >= _RECONCILE_S
        suspicious = rested and (held > status["samples"] or gone != before)
        if not self._has_listing or not (thoroughly or suspicious):
            return None
        self._listed[partition_id], self._gone[partition_id] = now, gone
        return set(self._inner.list_sample_ids(partition_id))

    def reconcile_all(self, *, thoroughly: bool) -> None:
        """Reconcile the partitions that this client has used lately."""
        if not self._has_status:
            return
        with self._dispatcher.lock:
            self._dispatcher.process()
            touched = self._dispatcher.accounting.last_used
            oldest = time.perf_counter() - _FORGET_AFTER_S
            for partition_id in [name for name, when in touched.items() if when < oldest]:
                del touched[partition_id]
            recent = sorted(touched, key=touched.__getitem__, reverse=True)[:_MOST_PARTITIONS]
        for partition_id in recent:
            self.reconcile(partition_id, thoroughly=thoroughly)

    def collect_transfers(self) -> None:
        """Take over what the engine has recorded since the last time."""
        stats = getattr(self._inner, "transfer_stats", None)
        if not isinstance(stats, TransferStats):
            return
        with self._transfer_lock:
            part = stats.clone_and_reset()
            if part.is_empty():
                return
            self.transfers.aggregate(part)
            self._to_log.aggregate(part)
        wire = part.to_dict()
        self._dispatcher.to_aggregator(TransferReport.from_dict(wire, time.time_ns()))
        if self._dispatcher.has_sinks:
            start, end = wire["window"]
            self._dispatcher.to_sinks("transfers", interval_s=end - start, figures=part.reduce())

    def collect_checks(self) -> None:
        """Take over what the engine has found of the rows that it checked, if it was told to."""
        checks = getattr(self._inner, "row_checks", None)
        if checks is None:
            return
        found = checks.take()
        dispatcher, counts = self._dispatcher, self._dispatcher.accounting.counts
        by_name = {name: getattr(found, name) for name in ("checked", "unchecked", "mismatched")}
        with dispatcher.lock:
            for name, rows in by_name.items():
                counts[f"rows_{name}"] += rows.total()
        for partition_id in {partition_id for partition_id, _ in found.checked}:
            parts = {
                name: {field: count for (of, field), count in rows.items() if of == partition_id and count}
                for name, rows in by_name.items()
            }
            dispatcher.to_aggregator(RowChecks(partition_id, **parts))
        for partition_id, field, sample_id in found.mismatches:
            dispatcher.warn(
                f"mismatch of {field}",
                partition_id,
                f"field {field!r} of sample {sample_id!r} in partition {partition_id!r} came back with other"
                " bytes than were written; further rows of the field are counted only",
            )

    def log_transfers(self, interval_s: float) -> None:
        """Write the line for people, unless nothing happened."""
        self.collect_transfers()
        with self._transfer_lock:
            part, self._to_log = self._to_log, TransferStats()
        if not part.is_empty():
            logger.info("%s", part.describe(interval_s))

    def send_scalars(self) -> None:
        """Give the sinks one number per thing worth plotting, for the time since the last ones."""
        dispatcher = self._dispatcher
        if not dispatcher.has_sinks:
            return
        with dispatcher.lock:
            dispatcher.process()
            now = time.monotonic()
            elapsed_s, self._scalars_at = max(now - self._scalars_at, 1e-3), now
            values: dict[str, float] = dict(dispatcher.accounting.counters.end_interval(elapsed_s))
            stats = dispatcher.accounting.outstanding.stats
            values["bytes_outstanding"] = stats.bytes_outstanding
            values["peak_bytes_outstanding"] = stats.peak_bytes_outstanding
            values["keys_outstanding"] = dispatcher.accounting.outstanding.keys()
            values["last_put_bytes_per_key"] = stats.last_put_bytes_per_key
            values.update(dispatcher.accounting.counts)
            for partition_id, held in dispatcher.accounting.outstanding.bytes_by_partition().items():
                values[f"partition/{partition_id}/bytes_outstanding"] = held
            for partition_id, status in self.engine.items():
                prefix = f"partition/{partition_id}"
                values[f"{prefix}/samples"] = status["samples"]
                values[f"{prefix}/bytes"] = status["bytes"]
                for task, counts in status.get("tasks", {}).items():
                    for name in ("claimed", "unclaimed", "waiting"):
                        values[f"{prefix}/task/{task}/{name}"] = counts.get(name, 0)
        dispatcher.to_sinks("scalars", interval_s=elapsed_s, values=values)

    def _collect(self) -> None:
        self._dispatcher.send_field_bytes()
        self.collect_checks()
        self.collect_transfers()

    def finish(self) -> None:
        """The last transfers and counts, before the engine is closed."""
        self._collect()
        if self._log_interval_s is not None:
            self.log_transfers(self._log_interval_s)
        if self._dispatcher.publisher is not None:
            # Or the report would end with what was held a second before the last clear.
            self.reconcile_all(thoroughly=False)

    def _run(self) -> None:
        dispatcher = self._dispatcher
        status_s = _TICK_S if dispatcher.publisher is not None else _RECONCILE_S
        every = {"status": status_s, "scalars": _SCALARS_S}
        if self._log_interval_s is not None:
            every["log"] = self._log_interval_s
        now = time.monotonic()
        due = {name: now + interval_s for name, interval_s in every.items()} | {"status": now + _TICK_S}
        while not dispatcher.stopped.wait(min(_TICK_S, self._log_interval_s or _TICK_S)):
            now = time.monotonic()
            for what in [name for name, when in due.items() if when <= now]:
                late = now - due[what]
                due[what] = now + every[what]
                try:
                    self._do(what, every[what] + late)
                except NotImplementedError:
                    self._has_status = False  # an adapter may lack it: do not ask again
                except Exception as error:
                    # An engine that is gone or closed: it has its own way to say so.
                    logger.debug("the engine could not be asked for its %s: %r", what, error)
                    due[what] = time.monotonic() + _BACK_OFF_S

    def _do(self, what: str, elapsed_s: float) -> None:
        if what == "status":
            self._collect()
            self.reconcile_all(thoroughly=False)
        elif what == "scalars":
            self.send_scalars()
        else:
            self.log_transfers(round(elapsed_s, 1))


def _overrides(inner: DataPlaneClient, method: str) -> bool:
    return getattr(type(inner), method, None) is not getattr(DataPlaneClient, method)
