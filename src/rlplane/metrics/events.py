"""What a worker tells the aggregator: the events, and the batch in which they travel.

Every process of a job records events (:data:`EventRecord`) and sends them in :class:`EventBatch` envelopes.
The envelope says who sends (worker, pid, host), numbers its batches so that a lost one is noticed, and
carries how many events the worker had to drop.

Operations are by far the most frequent event, so they do not travel one by one: :class:`OpColumns` holds one
array per field and a table of the distinct ``(op, partition, status, task, thread)``. The aggregator then
folds a batch with a handful of array operations, whatever its size.

Wire rules: msgpack; a new field comes last and has a default; a field is never renamed or removed.
All times are nanoseconds, points in time since the Unix epoch (``time.time_ns()``).
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeAlias, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from rlplane.transport import make_topic

__all__ = [
    "SESSION_ROLE",
    "STATUS_ERROR",
    "STATUS_OK",
    "STATUS_TIMEOUT",
    "EventBatch",
    "EventRecord",
    "EventRecordCodec",
    "FieldBytes",
    "FlowStat",
    "LogRecord",
    "OpColumns",
    "OpError",
    "OpKey",
    "OpRecord",
    "PartitionStatus",
    "RowChecks",
    "SampleEvent",
    "SampleEventKind",
    "SessionEvent",
    "SingleEvent",
    "StepOp",
    "StepRecord",
    "TaskStatus",
    "TransferRecord",
    "WeightVersion",
    "WorkerGoodbye",
    "WorkerHello",
    "pack_ops",
]

STATUS_OK = "ok"
STATUS_ERROR = "error"
STATUS_TIMEOUT = "timeout"

_LONGEST_CONDITION = 200

# The role of a sender that only reports the session; it is not listed as a worker.
SESSION_ROLE = "session"

SampleEventKind: TypeAlias = Literal["written", "claimed", "cleared", "failed"]


class OpRecord(msgspec.Struct, tag="op", gc=False):
    """One finished operation of a data-plane client.

    ``status`` is ``"ok"``, ``"timeout"`` or ``"error"`` (anything else counts as an error). ``wall_ns`` is
    all of its time, and ``wait_ns`` the part of it in which it waited for samples or for room. ``worker`` and
    ``pid`` stay empty in the worker: the envelope has them, and unpacking a batch fills them in.
    """

    op: str
    partition_id: str
    n_keys: int
    n_bytes: int
    wall_ns: int
    start_ns: int
    status: str = STATUS_OK
    thread_id: int = 0
    task: str | None = None
    error_class: str | None = None
    error_message: str | None = None
    worker: str = ""
    pid: int = 0
    wait_ns: int = 0

    @property
    def wall_ms(self) -> float:
        return self.wall_ns / 1e6

    @property
    def wait_ms(self) -> float:
        return self.wait_ns / 1e6


class SampleEvent(msgspec.Struct, tag="life", kw_only=True):
    """One step in the lifecycle of several samples of a partition, all at one point of time.

    Args:
        kind: ``written`` (also for further columns of a sample that is there: only the first one counts),
            ``claimed`` (with ``task``), ``cleared``, or ``failed`` (with ``reason``).
        weight_versions: The tag ``weight_version`` of each sample, None where it has none.
        n_bytes: Bytes written, of all the samples together.
        everything: ``cleared`` with no ids: the whole partition, as it was at ``time_ns``.
        start_ns: When the operation began, 0 if that is not known. Another process may have claimed and
            cleared a sample before the put that wrote it has returned, which is ``time_ns``.
    """

    kind: SampleEventKind
    partition_id: str
    sample_ids: list[str]
    time_ns: int
    task: str | None = None
    weight_versions: list[int | None] | None = None
    n_bytes: int = 0
    reason: str | None = None
    everything: bool = False
    start_ns: int = 0


class WeightVersion(msgspec.Struct, tag="weight_version"):
    """The newest weight version that exists; staleness at a claim is counted from the highest one seen."""

    version: int
    time_ns: int


class TransferRecord(msgspec.Struct, tag="transfer"):
    """What a ``TransferStats`` collected since the last record.

    ``data`` has its lists, durations in seconds; ``beyond_sample`` the exact totals of transfers and failures
    that are not among them (its key ``transfers`` counts the former).
    """

    data: dict[str, list[float]]
    time_ns: int
    beyond_sample: dict[str, float] = {}

    @classmethod
    def from_dict(cls, wire: dict[str, Any], time_ns: int) -> TransferRecord:
        """Make a record of what ``TransferStats.to_dict`` returns, or of its bare ``data``."""
        data = {key: values for key, values in wire.items() if key not in ("beyond_sample", "window")}
        return cls(data, time_ns, dict(wire.get("beyond_sample") or {}))


class TaskStatus(msgspec.Struct, omit_defaults=True):
    """One consumer task of a partition: samples ready for it, claimed by it, and claims that wait.

    ``ready`` is about the claim that waits, or was made last: with ``fields``, and matching ``where`` (as
    text), ``wanted`` at a time. None: there was no claim. ``writes`` are the fields that the task's workers
    write.
    """

    ready: int | None = None
    claimed: int = 0
    waiting: int = 0
    fields: list[str] = []
    where: str = ""
    writes: list[str] = []
    wanted: int | None = None


class FlowStat(msgspec.Struct, omit_defaults=True):
    """What the flow policy of a partition has done so far.

    ``policy`` is empty and ``max_staleness`` None without one. ``admitted`` and ``waiting`` (for admission)
    count prompts of a gated policy; ``evicted`` (samples) and ``closed_short`` (groups) count by reason.
    """

    policy: str = ""
    version: int = 0
    max_staleness: int | None = None
    admitted: int = 0
    waiting: int = 0
    evicted: dict[str, int] = {}
    closed_short: dict[str, int] = {}

    @property
    def is_used(self) -> bool:
        """Whether there is anything to show."""
        return bool(self.policy or self.version or self.evicted or self.closed_short)


class PartitionStatus(msgspec.Struct, tag="partition_status", kw_only=True):
    """What an engine says about a partition. Takes precedence over what the sample events add up to."""

    partition_id: str
    time_ns: int
    samples: int
    bytes: int
    capacity_samples: int | None = None
    capacity_bytes: int | None = None
    oldest_age_s: float | None = None
    tasks: dict[str, TaskStatus] = {}
    flow: FlowStat | None = None

    @classmethod
    def from_client(
        cls,
        status: dict[str, Any],
        time_ns: int,
        *,
        capacity_samples: int | None = None,
        capacity_bytes: int | None = None,
    ) -> PartitionStatus:
        """Make a record of the dict that ``DataPlaneClient.partition_status`` returns.

        A task's ``ready`` is taken where the engine has it, else its ``unclaimed``.
        """
        tasks = {}
        for name, task in status.get("tasks", {}).items():
            ready, where = task.get("ready", task.get("unclaimed", 0)), task.get("where")
            tasks[name] = TaskStatus(
                ready=None if ready is None else int(ready),
                claimed=int(task.get("claimed", 0)),
                waiting=int(task.get("waiting", 0)),
                fields=list(task.get("fields", ())),
                where=str(where)[:_LONGEST_CONDITION] if where else "",
                writes=list(task.get("writes", ())),
                wanted=task.get("wanted"),
            )
        return cls(
            partition_id=str(status["partition_id"]),
            time_ns=time_ns,
            samples=int(status["samples"]),
            bytes=int(status["bytes"]),
            capacity_samples=capacity_samples,
            capacity_bytes=capacity_bytes,
            oldest_age_s=status.get("oldest_age_s"),
            tasks=tasks,
            flow=_flow_of(status.get("flow")),
        )


def _flow_of(status: dict[str, Any] | None) -> FlowStat | None:
    if status is None:
        return None
    flow = FlowStat(
        str(status.get("policy") or ""),
        int(status.get("version", 0)),
        status.get("max_staleness"),
        int(status.get("admitted", 0)),
        int(status.get("waiting_for_admission", 0)),
        {str(reason): int(count) for reason, count in status.get("evicted", {}).items()},
        {str(reason): int(count) for reason, count in status.get("closed_short", {}).items()},
    )
    return flow if flow.is_used else None


class WorkerHello(msgspec.Struct, tag="hello"):
    """The first event of every worker process; ``role`` is free text such as ``rollout``."""

    time_ns: int
    role: str = ""


class WorkerGoodbye(msgspec.Struct, tag="goodbye"):
    """The last event of a worker that ends in order; one that is killed never says it."""

    time_ns: int


class SessionEvent(msgspec.Struct, tag="session"):
    """The run as a whole: STARTED makes it LIVE, ENDED begins the drain, ERROR is counted and logged."""

    kind: Literal["STARTED", "ENDED", "ERROR"]
    time_ns: int
    message: str = ""


class LogRecord(msgspec.Struct, tag="log"):
    """A line for the viewers' log of errors and warnings."""

    level: Literal["warning", "error"]
    message: str
    time_ns: int


class StepOp(msgspec.Struct):
    """One operation within a training step: how often, its seconds in all, and what they were spent on."""

    count: int = 0
    seconds: float = 0.0
    waiting_s: float = 0.0
    round_trips_s: float = 0.0
    bytes_s: float = 0.0


class StepRecord(msgspec.Struct, tag="step"):
    """A training step that ended at ``time_ns``, and numbers of the user's own.

    ``step`` None: only those, logged outside of any step.
    """

    step: int | None
    time_ns: int
    seconds: float = 0.0
    ops: dict[str, StepOp] = {}
    tokens: int = 0
    scalars: dict[str, float] = {}


class FieldBytes(msgspec.Struct, tag="field_bytes"):
    """How many bytes were written to each field of a partition since the last one; of a tree by leaf."""

    partition_id: str
    written: dict[str, int]


class RowChecks(msgspec.Struct, tag="row_checks"):
    """Rows that were read of a partition since the last one, by field: compared with what was written,
    without anything to compare with, and found to be different."""

    partition_id: str
    checked: dict[str, int]
    unchecked: dict[str, int]
    mismatched: dict[str, int]


SingleEvent: TypeAlias = (
    SampleEvent
    | WeightVersion
    | TransferRecord
    | PartitionStatus
    | WorkerHello
    | WorkerGoodbye
    | SessionEvent
    | LogRecord
    | StepRecord
    | FieldBytes
    | RowChecks
)
"""What travels one by one: everything but operations."""

EventRecord: TypeAlias = OpRecord | SingleEvent
"""What a worker says."""


class OpKey(msgspec.Struct, array_like=True, frozen=True):
    """What operations of a batch have in common; the table of these is the batch's dictionary."""

    op: str
    partition_id: str
    status: str
    task: str | None
    thread_id: int


class OpError(msgspec.Struct, array_like=True):
    """The error of the operation at ``position`` of a batch."""

    position: int
    error_class: str
    message: str


ColumnName: TypeAlias = Literal["n_keys", "n_bytes", "wall_ns", "start_ns", "wait_ns"]
_COLUMNS: tuple[ColumnName, ...] = get_args(ColumnName)


class OpColumns(msgspec.Struct, array_like=True):
    """Operations as columns: arrays of little-endian 64-bit integers, and 32-bit indices into ``keys``."""

    keys: list[OpKey]
    key_index: bytes
    n_keys: bytes
    n_bytes: bytes
    wall_ns: bytes
    start_ns: bytes
    errors: list[OpError] = []
    wait_ns: bytes = b""  # Empty: no operation of the batch has waited.

    def __len__(self) -> int:
        return len(self.key_index) // 4

    def indices(self) -> npt.NDArray[np.uint32]:
        return np.frombuffer(self.key_index, dtype="<u4")

    def column(self, name: ColumnName) -> npt.NDArray[np.int64]:
        packed = getattr(self, name)
        if name == "wait_ns" and not packed:
            return np.zeros(len(self), np.int64)
        return np.frombuffer(packed, dtype="<i8")

    def check(self) -> None:
        """Raise ``ValueError`` unless the columns fit together."""
        size = len(self)
        if len(self.key_index) != 4 * size:
            raise ValueError(f"key_index has {len(self.key_index)} bytes, which is no multiple of 4")
        for name in _COLUMNS:
            if len(getattr(self, name)) != 8 * size and (name != "wait_ns" or self.wait_ns):
                raise ValueError(f"column {name} has {len(getattr(self, name))} bytes for {size} operations")
        if size and int(self.indices().max()) >= len(self.keys):
            raise ValueError(f"key index {int(self.indices().max())} of a table with {len(self.keys)} keys")


class EventBatch(msgspec.Struct, kw_only=True):
    """The envelope. ``n_dropped`` counts all events that this worker dropped since it began."""

    worker: str
    pid: int
    host: str
    seq: int
    sent_ns: int
    n_dropped: int = 0
    ops: OpColumns | None = None
    events: list[SingleEvent] = []
    version: int = 1

    def __len__(self) -> int:
        return len(self.events) + (len(self.ops) if self.ops is not None else 0)

    def op_records(self) -> list[OpRecord]:
        """The operations one by one, for whoever writes them down; not for the hot path."""
        if self.ops is None:
            return []
        ops = self.ops
        errors = {error.position: error for error in ops.errors}
        columns = [ops.column(name).tolist() for name in _COLUMNS]
        records = []
        for position, (index, n_keys, n_bytes, wall_ns, start_ns, wait_ns) in enumerate(
            zip(ops.indices().tolist(), *columns, strict=True)
        ):
            key, error = ops.keys[index], errors.get(position)
            records.append(
                OpRecord(
                    key.op,
                    key.partition_id,
                    n_keys,
                    n_bytes,
                    wall_ns,
                    start_ns,
                    key.status,
                    key.thread_id,
                    key.task,
                    error.error_class if error else None,
                    error.message if error else None,
                    self.worker,
                    self.pid,
                    wait_ns,
                )
            )
        return records


def pack_ops(records: Iterable[OpRecord]) -> tuple[OpColumns, int]:
    """Return the records as columns, and how many were refused because a field has the wrong type.

    A record that another thread made wrong must not cost the others in its batch: they are packed again
    without it.
    """
    rows = [msgspec.structs.astuple(record) for record in records]
    try:
        return _pack(rows), 0
    except (TypeError, ValueError, OverflowError, AttributeError):
        kept = [row for row in rows if _is_sound(row)]
        return _pack(kept), len(rows) - len(kept)


def _pack(rows: Sequence[tuple[Any, ...]]) -> OpColumns:
    if not rows:
        return OpColumns([], b"", b"", b"", b"", b"")
    op, partition, n_keys, n_bytes, wall, start, status, thread, task, error_class, message, _, _, wait = zip(
        *rows, strict=True
    )
    table: dict[tuple[str, str, str, str | None, int], int] = {}
    index = [
        table.setdefault(key, len(table)) for key in zip(op, partition, status, task, thread, strict=True)
    ]
    errors = [
        OpError(position, str(name), str(message[position] or ""))
        for position, name in enumerate(error_class)
        if name
    ]
    texts = [text for error in errors for text in (error.error_class, error.message)]
    for text in (*texts, *(text for key in table for text in (key[0], key[1], key[2], key[3] or ""))):
        text.encode()  # What is not valid text must fail here, where the row can be found.
    return OpColumns(
        [OpKey(*key) for key in table],
        _pack_integers("I", index),
        _pack_integers("q", n_keys),
        _pack_integers("q", n_bytes),
        _pack_integers("q", wall),
        _pack_integers("q", start),
        errors,
        _pack_integers("q", wait) if any(wait) else b"",
    )


def _is_sound(row: tuple[Any, ...]) -> bool:
    try:
        msgspec.msgpack.encode(_pack([row]))
    except (TypeError, OverflowError, AttributeError, ValueError):
        return False
    return True


def _pack_integers(code: str, values: Sequence[int]) -> bytes:
    packed = array(code, values)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


class EventRecordCodec:
    """Batches of event records as msgpack. A frame that cannot be read is dropped, and counted."""

    topic = make_topic("rlplane.events")

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(EventBatch)

    def encode(self, item: EventBatch) -> tuple[bytes, bytes]:
        return self.topic, self._encoder.encode(item)

    def decode(self, payload: bytes) -> EventBatch:
        batch = self._decoder.decode(payload)
        if batch.ops is not None:
            batch.ops.check()
        return batch

    def on_decode_error(self, payload: bytes, exc: Exception) -> EventBatch | None:
        if isinstance(exc, (msgspec.DecodeError, ValueError)):
            return None
        raise exc
