"""The boundary between a training job and the data plane.

A trainer imports from here and from nowhere deeper: :class:`DataPlaneClient` is what every engine
implements, :class:`KVBatchMeta` is what travels between stages instead of tensors, and the two
config types describe how a plane is built. What each call promises is in ``docs/contract.md``, and
``rlplane.testing`` checks it for any implementation.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, NotRequired, Self, TypedDict

from rlplane.errors import InvalidRequestError, UnsupportedOperationError

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = ["DataPlaneClient", "DataPlaneConfig", "KVBatchMeta", "ObservabilityConfig"]

DEFAULT_TIMEOUT_S = 60.0


class ObservabilityConfig(TypedDict):
    """What is measured on the client, and where the measurements go. Off by default.

    ``callback`` is set in code, because a callable does not survive YAML: it gets one event per
    operation. The other keys are described in ``docs/configuration.md``.
    """

    enabled: bool
    callback: NotRequired[Callable[[dict[str, Any]], None]]
    metrics_address: NotRequired[str]
    role: NotRequired[str]
    track_partitions: NotRequired[list[str]]
    sinks: NotRequired[list[Any]]
    transfer_log_interval_s: NotRequired[float]


class DataPlaneConfig(TypedDict):
    """How a plane is built. The first eight keys are required in every config a user writes."""

    enabled: bool
    impl: str
    backend: str
    storage_capacity: int
    num_storage_units: int
    claim_meta_poll_interval_s: float
    global_segment_size: int
    local_buffer_size: int
    controller_address: NotRequired[str]
    ack_timeout_ms: NotRequired[int]
    observability: NotRequired[ObservabilityConfig]
    allow_pickle: NotRequired[bool]
    segment_size: NotRequired[int]
    client_timeout_s: NotRequired[float]
    transfer_queue: NotRequired[dict[str, Any]]


@dataclass(eq=False)
class KVBatchMeta:
    """The receipt of a batch: which samples, which fields, how long, with which tags.

    It is small enough to send anywhere, so a driver can shard, filter and route a batch without
    touching a tensor. A meta owns its lists and dicts: changing one never changes another, nor what
    the caller passed in.
    """

    partition_id: str
    task_name: str | None
    sample_ids: list[str]
    fields: list[str] | None = None
    sequence_lengths: list[int] | None = None
    extra_info: dict[str, Any] = field(default_factory=dict)
    tags: list[dict[str, Any]] | None = None

    def __post_init__(self) -> None:
        self.sample_ids = _names("sample_ids", self.sample_ids)
        self.fields = None if self.fields is None else _names("fields", self.fields)
        self.extra_info = _own(self.extra_info)
        if self.sequence_lengths is not None:
            self.sequence_lengths = [_own(length) for length in _as_list(self.sequence_lengths)]
            self._check_length("sequence_lengths", len(self.sequence_lengths))
        if self.tags is not None:
            self.tags = [_own(tag) for tag in self.tags]
            self._check_length("tags", len(self.tags))

    @classmethod
    def _adopt(
        cls,
        partition_id: str,
        task_name: str | None,
        sample_ids: list[str],
        fields: list[str] | None,
        tags: list[dict[str, Any]] | None,
    ) -> Self:
        """Build a meta from lists that the caller gives away: an adapter's way around the copies.

        ``sequence_lengths`` come from the tag ``input_lengths`` when every sample has it.
        """
        meta = cls.__new__(cls)
        meta.partition_id, meta.task_name = partition_id, task_name
        meta.sample_ids, meta.fields, meta.tags = sample_ids, fields, tags
        lengths = [tag.get("input_lengths") for tag in tags or ()]
        meta.sequence_lengths = lengths if lengths and None not in lengths else None  # type: ignore[assignment]
        meta.extra_info = {}
        return meta

    def _check_length(self, what: str, got: int) -> None:
        if got != len(self.sample_ids):
            raise InvalidRequestError(
                f"{what} has {got} entries for {len(self.sample_ids)} sample_ids; it needs one per sample"
            )

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return all(_same(getattr(self, item.name), getattr(other, item.name)) for item in fields(self))

    __hash__ = None  # type: ignore[assignment]  # it compares by value and can change

    def __repr__(self) -> str:
        # A meta of 10,000 samples is printed by debuggers and loggers: show its ends only.
        ids = self.sample_ids
        shown = ", ".join(map(repr, ids if len(ids) <= 4 else ids[:2]))
        if len(ids) > 4:
            shown += f", … , {ids[-1]!r}"
        parts = [f"{self.partition_id!r}", f"task={self.task_name!r}", f"size={self.size}"]
        parts += [f"sample_ids=[{shown}]", f"fields={self.fields!r}"]
        if self.sequence_lengths:
            lengths = self.sequence_lengths
            parts.append(f"sequence_lengths={min(lengths)}..{max(lengths)}")
        if self.tags:
            names = sorted({name for tag in self.tags[:16] for name in tag})
            parts.append(f"tags={names!r}")
        if self.extra_info:
            parts.append(f"extra_info={list(self.extra_info)!r}")
        return f"KVBatchMeta({', '.join(parts)})"

    @property
    def size(self) -> int:
        """The number of samples."""
        return len(self.sample_ids)

    def stamp_tags(self, scalars: dict[str, Sequence[Any]]) -> None:
        """Write one value per sample onto :attr:`tags`, for each name in ``scalars``.

        A value may come from a list, a tensor or an array; tensors and numpy scalars become plain
        Python values. Raises ``ValueError`` if a sequence has another length than the meta, with no
        tag changed.
        """
        columns = {name: _as_list(values) for name, values in scalars.items()}
        for name, values in columns.items():
            self._check_length(f"scalars[{name!r}]", len(values))
        if self.tags is None:
            self.tags = [{} for _ in self.sample_ids]
        for name, values in columns.items():
            for tag, value in zip(self.tags, values, strict=True):
                tag[name] = _own(value)

    def _replace(
        self,
        *,
        sample_ids: list[str],
        sequence_lengths: list[int] | None,
        tags: list[dict[str, Any]] | None = None,
    ) -> Self:
        """Return a copy with other samples and the same partition, task, fields and extra info."""
        return replace(self, sample_ids=sample_ids, sequence_lengths=sequence_lengths, tags=tags)

    def subset(self, indices: Sequence[int]) -> Self:
        """Return the rows at ``indices``, in that order. A negative index counts from the end."""
        rows = self._rows(indices)
        lengths, tags = self.sequence_lengths, self.tags
        return self._replace(
            sample_ids=[self.sample_ids[i] for i in rows],
            sequence_lengths=None if lengths is None else [lengths[i] for i in rows],
            tags=None if tags is None else [tags[i] for i in rows],
        )

    def _rows(self, indices: Sequence[int]) -> list[int]:
        rows = _as_list(indices)
        for index in rows:
            if isinstance(index, bool):
                raise InvalidRequestError("indices are row numbers; a mask has to be turned into them first")
            if not -self.size <= index < self.size:
                raise IndexError(f"row {index} of a meta with {self.size} samples")
        return [index + self.size if index < 0 else index for index in rows]

    def slice(self, start: int, stop: int) -> Self:
        """Return the rows in ``[start, stop)``."""
        return self.subset(range(*slice(start, stop).indices(self.size)))

    def drop(self, indices: Sequence[int]) -> Self | None:
        """Return the rows that are not at ``indices``, or None when nothing is left."""
        gone = set(self._rows(indices))
        kept = [i for i in range(self.size) if i not in gone]
        return self.subset(kept) if kept else None

    def with_fields(self, names: Sequence[str]) -> Self:
        """Return the same samples with ``fields`` set to ``names``."""
        return replace(self, fields=list(names))

    def concat(self, *others: KVBatchMeta) -> Self:
        """Return this meta's rows followed by those of ``others``, all of one partition.

        ``sequence_lengths`` and ``tags`` are kept when every meta with rows has them. ``fields``
        are those that every meta has, so that a read of the result cannot ask for more than is there.
        ``task_name`` and ``extra_info`` are this meta's.
        """
        metas: list[KVBatchMeta] = [self, *others]
        for other in others:
            if other.partition_id != self.partition_id:
                raise InvalidRequestError(
                    f"cannot concat partition {other.partition_id!r} to {self.partition_id!r}"
                )
        filled = [meta for meta in metas if meta.size] or metas[:1]
        lengths = [meta.sequence_lengths for meta in filled]
        tags = [meta.tags for meta in filled]
        named = [meta.fields for meta in filled]
        shared = [f for f in named[0] or [] if all(f in (names or ()) for names in named)]
        joined = self._replace(
            sample_ids=[sample_id for meta in metas for sample_id in meta.sample_ids],
            sequence_lengths=None
            if any(part is None for part in lengths)
            else [n for part in lengths for n in part or ()],
            tags=None if any(part is None for part in tags) else [tag for part in tags for tag in part or ()],
        )
        return replace(joined, fields=None if any(n is None for n in named) else shared)


class DataPlaneClient(ABC):
    """What a stage of a training job calls. Every engine keeps the same promises.

    Three groups: by task (``register_partition``, ``claim_meta``, ``get_data``,
    ``check_consumption_status``), for stages that wait for what others produce; by key
    (``put_samples``, ``get_samples``, ``clear_samples``), for stages that know their samples; and
    ``close``. Writing a field is the signal that a stage is done with a sample: there is no separate
    acknowledgement.

    Below them are optional methods. An adapter that lacks one raises ``NotImplementedError`` with its
    own name in it.
    """

    @abstractmethod
    def register_partition(
        self,
        partition_id: str,
        fields: list[str],
        num_samples: int,
        consumer_tasks: list[str],
        grpo_group_size: int | None = None,
        enums: dict[str, list[str]] | None = None,
    ) -> None:
        """Declare a partition: its fields, expected number of samples and consumer tasks.

        Registering again replaces the schema and the task list. Live samples stay, and so does the
        cursor of a task that stays.

        Args:
            partition_id: Name of the partition.
            fields: The fields that producers may write. They exist at once.
            num_samples: How many samples are expected in all; decides when a claim may return a tail.
            consumer_tasks: Named tasks, each with its own cursor.
            grpo_group_size: When set, claims hand out whole groups of this many samples.
            enums: For each field named here, the strings that it may hold.

        Raises:
            ValueError: An argument contradicts itself, such as a field named twice.
        """

    @abstractmethod
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
        """Claim up to ``batch_size`` samples that have all of ``required_fields``.

        No sample is handed to the same task twice. First ready, first claimed.

        Args:
            partition_id: Partition to claim from.
            task_name: The task whose cursor moves.
            required_fields: Fields that a sample must have to be claimable.
            batch_size: The most samples to claim; with ``grpo_group_size``, a multiple of it.
            dp_rank: Reserved. Shard on the driver with ``shard_meta_for_dp``.
            blocking: Wait for a full batch (or the tail); otherwise return what is ready, perhaps
                nothing.
            timeout_s: How long to wait.
            where: Conditions on tags, checked as the tags are at the moment of the claim, such as
                ``{"weight_version": {">=": 12}}``.

        Raises:
            KeyError: Unknown partition, task or field; at once, not after the timeout.
            ValueError: ``batch_size`` or ``where`` can never be satisfied.
            TimeoutError: Not enough samples in time; the message says how many were ready. Nothing
                was claimed.
        """

    @abstractmethod
    def get_data(self, meta: KVBatchMeta, select_fields: list[str] | None = None) -> TensorDict:
        """Read the samples of ``meta``: ``select_fields``, else ``meta.fields``, else ``ValueError``.

        Raises:
            ValueError: Neither names a field.
            KeyError: A sample is missing or a field has not been written; names the first few.
        """

    @abstractmethod
    def check_consumption_status(self, partition_id: str, task_names: list[str]) -> bool:
        """Whether every live sample has been claimed by every named task.

        False while nothing has been written. Authoritative across processes.
        """

    @abstractmethod
    def put_samples(
        self,
        sample_ids: list[str],
        partition_id: str,
        fields: TensorDict | None = None,
        tags: list[dict[str, Any]] | None = None,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> KVBatchMeta:
        """Write fields and tags of samples: all of it becomes visible at once, or none of it.

        Writing a field again replaces it. Tags are merged into those the sample has. ``fields=None``
        writes tags alone.

        Args:
            sample_ids: The samples, each once.
            partition_id: A registered partition.
            fields: One row per sample: tensors, nested tensors, ``NonTensorStack`` or
                ``NonTensorData`` that holds one entry per row.
            tags: One dict per sample.
            timeout_s: How long to wait for room when the plane is full.

        Returns:
            A meta with ``fields`` of this write, usable for :meth:`get_data`.

        Raises:
            KeyError: The partition was never registered.
            ValueError: Ids, rows and tags do not fit together; nothing was written.
            TypeError: An object that may not travel; nothing was written.
            MemoryError: It can never fit, or (also a ``TimeoutError``) no room came free in time;
                nothing was written.
        """

    @abstractmethod
    def get_samples(self, sample_ids: list[str], partition_id: str, select_fields: list[str]) -> TensorDict:
        """Read ``select_fields`` of the samples, in the order asked. Never moves a cursor.

        The result belongs to the caller: it may be changed, and it stays valid after a clear.

        Raises:
            KeyError: A sample is missing or a field has not been written; names the first few.
        """

    @abstractmethod
    def clear_samples(self, sample_ids: list[str] | None, partition_id: str) -> None:
        """Drop samples. Ids that are not there are ignored.

        ``None`` drops what this process wrote, or, if it wrote nothing, what the store has; if there
        is nothing at all, it warns.
        """

    @abstractmethod
    def close(self) -> None:
        """Release what this client holds. Idempotent.

        The bootstrap client ends what it started, and only that. Any later call raises.
        """

    # Optional from here on.

    def list_sample_ids(self, partition_id: str) -> list[str]:
        """The live samples of a partition, in the order in which they were first written."""
        raise self._unsupported("list_sample_ids")

    def partition_status(self, partition_id: str) -> dict[str, Any]:
        """Counts per field and task, bytes held and the oldest sample's age; see the contract."""
        raise self._unsupported("partition_status")

    def save_checkpoint(self, path: str) -> None:
        """Write all partitions to the file ``path``, consistent at one point of time, all or nothing."""
        raise self._unsupported("save_checkpoint")

    def load_checkpoint(self, path: str, *, release_claims: bool = False) -> None:
        """Replace the plane's content with a checkpoint's. A bad one is refused, and the plane stays.

        Cursors come back as they were. ``release_claims=True`` hands out again what had been claimed by
        somebody who had not finished with it, which is what a job wants that resumes with new workers.
        """
        raise self._unsupported("load_checkpoint")

    def _unsupported(self, method: str) -> UnsupportedOperationError:
        return UnsupportedOperationError(f"{type(self).__name__} does not support {method}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _as_list(values: Any) -> list[Any]:
    tolist = getattr(values, "tolist", None)
    return list(tolist() if callable(tolist) else values)


def _names(what: str, values: Any) -> list[str]:
    if isinstance(values, str):
        raise InvalidRequestError(f"{what} is a list of names; got the text {values!r}")
    return _as_list(values)


_PLAIN = frozenset({type(None), bool, int, float, str, bytes})


def _own(value: Any) -> Any:
    """A copy that shares nothing mutable with ``value``; numpy and torch scalars become plain."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is dict:
        return {key: _own(item) for key, item in value.items()}
    if kind is list:
        return [_own(item) for item in value]
    if getattr(value, "ndim", None) == 0 and callable(getattr(value, "item", None)):
        return value.item()
    if callable(getattr(value, "detach", None)):
        # Not deepcopy: torch refuses it for a tensor that autograd has computed.
        return value.detach().clone()
    return copy.deepcopy(value)


def _same(left: Any, right: Any) -> bool:
    """Equality by value where ``==`` is not a bool (arrays), and where NaN would differ from its copy."""
    if type(left) in _PLAIN and type(right) in _PLAIN:
        return bool(left == right or (left != left and right != right))
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)) and type(left) is type(right):
        return len(left) == len(right) and all(map(_same, left, right))
    if hasattr(left, "shape") or hasattr(right, "shape"):
        if type(left) is not type(right) or left.shape != right.shape or left.dtype != right.dtype:
            return False
        if left.dtype == object:
            return all(map(_same, left.ravel(), right.ravel()))
        return bool(((left == right) | ((left != left) & (right != right))).all())
    return bool(left == right)
