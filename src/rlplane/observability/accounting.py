"""What operations add up to: totals, bytes outstanding, and the lifecycle of tracked samples.

Nothing here is locked and nothing waits: the dispatcher calls it from one thread at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rlplane.metrics.events import SampleEvent, SampleEventKind, WeightVersion
from rlplane.observability.counters import OperationCounters
from rlplane.observability.operation import AddedBytes, Advanced, Claimed, Cleared, Operation, Put, Reset
from rlplane.observability.outstanding import JUMP_FACTOR, OutstandingBytes
from rlplane.observability.sizes import measure

_MANY_PARTITIONS = 4096


class Accounting:
    """Applies operations, in the order in which they ended.

    Args:
        tracks: Whether the samples of a partition are followed one by one.
        warn: Called with a topic, a partition and a message.

    Attributes:
        number: How many operations have been applied.
        last_used: When each partition was used last, by ``time.perf_counter``.
        field_bytes: What was written since somebody took it, by partition and field, of trees by leaf.
    """

    def __init__(self, tracks: Callable[[str], bool], warn: Callable[[str, str, str], None]) -> None:
        self._tracks = tracks
        self._warn = warn
        self.outstanding = OutstandingBytes()
        self.counters = OperationCounters()
        self.counts = {
            "failed_ops": 0,
            "claim_timeouts": 0,
            "bytes_per_key_jumps": 0,
            "large_storage_views": 0,
            "unmeasured": 0,
            "rows_checked": 0,
            "rows_unchecked": 0,
            "rows_mismatched": 0,
        }
        self.reconciled = {"keys": 0, "bytes": 0}
        self.number = 0
        self.last_used: dict[str, float] = {}
        self.field_bytes: dict[str, dict[str, int]] = {}

    def apply(self, operation: Operation, epoch: float) -> SampleEvent | WeightVersion | None:
        """Count an operation, and fill in the keys and bytes that were not known on the caller's thread.

        Returns what the aggregator is to know beside it: the step that tracked samples have made, or the
        version of the weights that were published.
        """
        self.number += 1
        effect, good = operation.effect, operation.status == "ok"
        step: SampleEvent | WeightVersion | None = None
        partition, outstanding = operation.partition_id, self.outstanding
        if isinstance(effect, Put):
            step = self._apply_put(operation, effect, epoch)
        elif isinstance(effect, Cleared):
            if good and self._tracks(partition):
                # None means what this client wrote, if it wrote anything here.
                ids = outstanding.held_ids(partition) if effect.ids is None else effect.ids
                step = _step("cleared", operation, ids, None, epoch)
            if good:
                known, _ = outstanding.clear(partition, effect.ids)
                operation.n_keys = known if effect.ids is None else operation.n_keys
        elif isinstance(effect, Claimed):
            step = _step("claimed", operation, effect.ids, effect.tags, epoch)
        elif isinstance(effect, AddedBytes):
            outstanding.add(partition, effect.ids, operation.n_bytes, self.number)
        elif isinstance(effect, Advanced) and good:
            step = WeightVersion(effect.version, int((epoch + operation.ended) * 1e9))
        elif isinstance(effect, Reset) and good:
            outstanding.clear_everything()
        if not isinstance(effect, AddedBytes):
            self._count(operation, good)
        return step

    def _apply_put(self, operation: Operation, put: Put, epoch: float) -> SampleEvent | None:
        partition, good = operation.partition_id, operation.status == "ok"
        columns, large_views = measure(put.sizes, len(put.ids))
        operation.n_bytes = sum([column.total for column in columns])
        operation.field_bytes = {leaf: size for c in columns for leaf, size in c.by_leaf().items()}
        if good:
            written = self.field_bytes.setdefault(partition, {})
            for leaf, size in operation.field_bytes.items():
                written[leaf] = written.get(leaf, 0) + size
        if good and put.appends:
            self.outstanding.add(partition, put.ids, operation.n_bytes, self.number)
        elif good:
            self.counts["large_storage_views"] += large_views
            if self.outstanding.put(partition, put.ids, columns, self.number):
                self.counts["bytes_per_key_jumps"] += 1
                per_key = operation.n_bytes // len(put.ids)
                self._warn(
                    "jump",
                    partition,
                    f"a put into partition {partition!r} had {per_key} bytes per key,"
                    f" more than {JUMP_FACTOR} times the most that its fields had before",
                )
        # A put that ran out of time will be tried again: its samples have not failed.
        if operation.status == "timeout" or not self._tracks(partition):
            return None
        return _step("written" if good else "failed", operation, put.ids, put.tags, epoch)

    def _count(self, operation: Operation, good: bool) -> None:
        if operation.partition_id:
            self.last_used[operation.partition_id] = operation.ended
            if len(self.last_used) > _MANY_PARTITIONS:
                self.last_used = {operation.partition_id: operation.ended}
        stats = self.outstanding.stats
        stats.total_ops += 1
        if good:
            stats.total_keys += operation.n_keys
            stats.total_bytes += operation.n_bytes
        elif operation.found_nothing:
            self.counts["claim_timeouts"] += 1
        else:
            self.counts["failed_ops"] += 1
        self.counters.add(operation)


def _step(
    kind: SampleEventKind,
    operation: Operation,
    ids: Sequence[str] | None,
    tags: Sequence[dict[str, Any]] | None,
    epoch: float,
) -> SampleEvent:
    versions = None
    if tags and any("weight_version" in tag for tag in tags):
        found = [tag.get("weight_version") for tag in tags]
        versions = [value if type(value) is int else None for value in found]
    return SampleEvent(
        kind=kind,
        partition_id=operation.partition_id,
        sample_ids=list(ids or ()),
        time_ns=int((epoch + operation.ended) * 1e9),
        task=operation.task,
        weight_versions=versions,
        n_bytes=operation.n_bytes if kind in ("written", "failed") else 0,
        reason=None if operation.error is None else operation.error[0],
        everything=ids is None,
        start_ns=int((epoch + operation.began) * 1e9),
    )
