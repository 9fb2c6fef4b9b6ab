"""One operation on its way from the client to whoever is told about it: the entry of the dispatcher's queue.

An operation is recorded as it was seen on the caller's thread. What has to be worked out (sizes, outstanding
bytes) is left to the dispatcher; an *effect* says what the operation did to the samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict

import msgspec

from rlplane.metrics.events import OpRecord, StepRecord
from rlplane.observability.sizes import NotedSizes, note

if TYPE_CHECKING:
    from tensordict import TensorDict

    from rlplane.batch_meta import KVBatchMeta

EventStatus = Literal["ok", "error", "timeout"]
ErrorDescription: TypeAlias = tuple[Literal["timeout", "error"], tuple[str, str]]
"""The status of the event, and the error's type and message."""


class DataPlaneEvent(TypedDict):
    """What the callback gets: one operation."""

    op: str
    partition_id: str
    n_keys: int
    n_bytes: int
    wall_ms: float
    status: EventStatus


class Put(msgspec.Struct, gc=False):
    """Samples were written, with these columns; or, if the operation failed, were not."""

    ids: list[str]
    sizes: NotedSizes
    tags: Sequence[dict[str, Any]] | None = None
    appends: bool = False  # behind what the samples had, instead of in its place


class AddedBytes(msgspec.Struct, gc=False):
    """Bytes were written of which the fields are not known."""

    ids: list[str]


class Claimed(msgspec.Struct, gc=False):
    """A task has claimed samples."""

    ids: list[str]
    tags: list[dict[str, Any]]


class Cleared(msgspec.Struct, gc=False):
    """Samples were cleared; None: all that this client wrote into the partition."""

    ids: list[str] | None


class Reset(msgspec.Struct, gc=False):
    """The whole content of the plane was replaced."""


class Advanced(msgspec.Struct, gc=False):
    """New weights were published."""

    version: int


Effect: TypeAlias = Put | AddedBytes | Advanced | Claimed | Cleared | Reset


class Operation(msgspec.Struct, gc=False):
    """A finished operation. ``began`` and ``ended`` are readings of ``time.perf_counter``.

    ``error`` has the name and the message of an exception, and not the exception itself: its traceback would
    keep the caller's frames, and so its tensors, alive. ``waited_s`` of the time it waited for samples or
    room.
    """

    op: str
    partition_id: str
    n_keys: int
    n_bytes: int
    began: float
    ended: float
    status: EventStatus
    thread_id: int
    task: str | None = None
    error: tuple[str, str] | None = None
    effect: Effect | None = None
    waited_s: float = 0.0
    field_bytes: dict[str, int] | None = None

    @property
    def found_nothing(self) -> bool:
        """Whether it is a claim that ran out of time: the plane was empty, and nothing has failed."""
        return self.status == "timeout" and self.op == "claim_meta"

    def event(self) -> DataPlaneEvent:
        """As the callback gets it."""
        return {
            "op": self.op,
            "partition_id": self.partition_id,
            "n_keys": self.n_keys,
            "n_bytes": self.n_bytes,
            "wall_ms": (self.ended - self.began) * 1e3,
            "status": self.status,
        }

    def record(self, epoch: float) -> OpRecord:
        """As the aggregator gets it; ``epoch`` is the Unix time at which ``perf_counter`` was 0."""
        name, message = self.error or (None, None)
        return OpRecord(
            self.op,
            self.partition_id,
            self.n_keys,
            self.n_bytes,
            max(int((self.ended - self.began) * 1e9), 0),
            int((epoch + self.began) * 1e9),
            self.status,
            self.thread_id,
            self.task,
            name,
            message,
            wait_ns=int(self.waited_s * 1e9),
        )


def step_values(record: StepRecord) -> dict[str, float]:
    """A training step as the sinks get it: shares of its time, tokens per second, and the user's own
    numbers."""
    seconds = max(record.seconds, 1e-9)
    values = {"step/seconds": record.seconds, "step/tokens_per_s": record.tokens / seconds}
    parts = ("seconds", "waiting_s", "round_trips_s", "bytes_s")
    for part, name in zip(parts, ("plane", "waiting", "round_trips", "bytes"), strict=True):
        spent = sum(getattr(op, part) for op in record.ops.values())
        values[f"step/{name}_share"] = spent / seconds
    for op, entry in record.ops.items():
        values[f"step/{op}_share"] = entry.seconds / seconds
    return values | {f"log/{name}": value for name, value in record.scalars.items()}


def sink_record(
    record: OpRecord, thread_name: str, process: dict[str, Any], field_bytes: dict[str, int] | None = None
) -> dict[str, Any]:
    """An operation as the sinks get it; ``process`` says which process this is, ``field_bytes`` what a put
    wrote by field, and of a tree by leaf."""
    fields = msgspec.structs.asdict(record)
    if field_bytes is not None:
        fields["field_bytes"] = field_bytes
    fields["error"] = fields.pop("error_class")
    return {
        "kind": "op",
        "wall_ms": record.wall_ms,
        "wait_ms": record.wait_ms,
        **fields,
        **process,
        "thread": thread_name,
    }


def put_effect(
    sample_ids: list[str],
    fields: TensorDict | None,
    tags: list[dict[str, Any]] | None,
    *,
    appends: bool = False,
) -> Callable[[KVBatchMeta | None], Effect]:
    """What a put does to its samples. Looks at the sizes of the columns now."""
    try:
        sizes = note(fields)
    except Exception:  # Not a TensorDict, say: what is wrong with it is for the engine to tell.
        sizes = []
    ids = as_ids(sample_ids)
    return lambda meta: Put(ids, sizes, meta.tags if tags and meta is not None else None, appends)


def as_ids(sample_ids: Any) -> list[Any]:
    """The ids as a list of our own, or none if they are not a sequence: the engine will say so."""
    return list(sample_ids) if isinstance(sample_ids, (list, tuple)) else []


def describe_error(error: BaseException) -> ErrorDescription:
    """What is told of an error. The error itself would keep the caller's frames, and so its tensors."""
    return "timeout" if isinstance(error, TimeoutError) else "error", (type(error).__name__, _message(error))


def _message(error: BaseException) -> str:
    try:
        # An error that names what is not valid Unicode still has to be told.
        return str(error)[:500].encode(errors="backslashreplace").decode()
    except Exception:
        return ""
