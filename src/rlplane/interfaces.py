"""The boundary between a training job and the data plane.

A trainer imports from here and from nowhere deeper: :class:`DataPlaneClient` is what every engine
implements, :class:`KVBatchMeta` is what travels between stages instead of tensors, and the two
config types describe how a plane is built. What each call promises is in ``docs/contract.md``, and
``rlplane.testing`` checks it for any implementation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NotRequired, Self, TypedDict

from rlplane.batch_meta import KVBatchMeta, SampleGroup
from rlplane.errors import UnsupportedOperationError

if TYPE_CHECKING:
    from tensordict import TensorDict

    from rlplane.control.policies import FlowPolicy

__all__ = [
    "DataPlaneClient",
    "DataPlaneConfig",
    "FieldStatus",
    "FlowStatus",
    "KVBatchMeta",
    "ObservabilityConfig",
    "PartitionStatus",
    "SampleGroup",
    "TaskStatus",
]

DEFAULT_TIMEOUT_S = 60.0
ADDRESS_VARIABLE = "RLPLANE_CONTROLLER_ADDRESS"
"""Where children find the plane of the process that started it, when ``controller_address`` is not set."""


class ObservabilityConfig(TypedDict):
    """What is measured on the client, and where the measurements go. Off by default.

    ``callback`` is set in code, because a callable does not survive YAML: it gets one event per
    operation. The other keys are described in ``docs/configuration.md``.
    """

    enabled: bool
    callback: NotRequired[Callable[[dict[str, Any]], None]]
    metrics_address: NotRequired[str]
    run_dir: NotRequired[str]
    role: NotRequired[str]
    track_partitions: NotRequired[list[str]]
    sinks: NotRequired[list[Any]]
    verify: NotRequired[bool]
    transfer_log_interval_s: NotRequired[float]


class CheckpointConfig(TypedDict):
    """Where and how often the plane saves a checkpoint by itself."""

    dir: str
    every_s: float
    keep: NotRequired[int]


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
    reserve_for_live: NotRequired[float]
    reconnect_timeout_s: NotRequired[float]
    journal: NotRequired[bool]
    journal_dir: NotRequired[str]
    checkpoint: NotRequired[CheckpointConfig]
    transfer_queue: NotRequired[dict[str, Any]]


class FieldStatus(TypedDict):
    """A field in a :class:`PartitionStatus`. ``lost`` is there if values of it died with the storage that had
    them, and their samples were kept."""

    declared: bool
    produced: int
    lost: NotRequired[int]


class TaskStatus(TypedDict):
    """A consumer task in a :class:`PartitionStatus`.

    ``ready`` counts the samples that satisfy the claim that has waited longest, or, when none waits, the
    claim that was made last: with its ``fields``, and matching its ``where``; ``wanted`` is its
    ``batch_size``. None before the first claim. (More than 10,000 are not counted where there is a
    condition.) ``writes`` are the fields that those who claim for this task have written to what they
    claimed.
    """

    claimed: int
    unclaimed: int
    ready: int | None
    waiting: int
    wanted: NotRequired[int | None]
    fields: NotRequired[list[str]]
    where: NotRequired[dict[str, Any] | None]
    writes: NotRequired[list[str]]


class FlowStatus(TypedDict):
    """What the flow policy of a partition has done, in a :class:`PartitionStatus`.

    ``policy`` and ``max_staleness`` are None without one. ``admitted`` and ``waiting_for_admission`` count
    prompts of a gated policy; ``evicted`` (samples) and ``closed_short`` (groups) count by reason.
    """

    policy: str | None
    version: int
    max_staleness: int | None
    admitted: int
    waiting_for_admission: int
    evicted: dict[str, int]
    closed_short: dict[str, int]


class PartitionStatus(TypedDict):
    """What ``partition_status`` returns, with the same keys on every engine.

    ``num_samples`` is what the registration expects and ``written`` how many new samples came since;
    ``samples`` and ``bytes`` are what is held now, ``capacity`` and ``capacity_bytes`` the most that all
    partitions together may hold. ``oldest_age_s`` is None when there is no sample.
    """

    partition_id: str
    num_samples: int
    samples: int
    written: int
    bytes: int
    oldest_age_s: float | None
    grpo_group_size: int | None
    fields: dict[str, FieldStatus]
    tasks: dict[str, TaskStatus]
    capacity: int | None
    capacity_bytes: int | None
    flow: NotRequired[FlowStatus]
    finished: NotRequired[bool]


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
        *,
        flow: FlowPolicy | Mapping[str, Any] | None = None,
        produces: dict[str, list[str]] | None = None,
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
            flow: How old a sample may be when it is trained, and what follows from that: a
                :class:`rlplane.FlowPolicy`, or a mapping with its names. See ``docs/flow.md``.
            produces: For each task named here, the fields that it writes: it is finished with a sample when
                all of them are there. Without, when it has written any.

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
        """Claim up to ``batch_size`` samples that have all of ``required_fields``.

        No sample is handed to the same task twice. First ready, first claimed.

        Args:
            partition_id: Partition to claim from.
            task_name: The task whose cursor moves.
            required_fields: Fields that a sample must have to be claimable.
            batch_size: The most samples to claim; with ``grpo_group_size``, a multiple of it.
            dp_rank: With ``dp_world`` and ``step``, which rank asks. Alone it changes nothing.
            blocking: Wait for a full batch (or the tail); otherwise return what is ready, perhaps
                nothing.
            timeout_s: How long to wait; None: for ever.
            where: Conditions on tags, checked as the tags are at the moment of the claim, such as
                ``{"weight_version": {">=": 12}}``.
            max_tokens: The most tokens to claim, by the tag ``input_lengths``: a batch is full when the next
                sample (or group) does not fit any more, or at ``batch_size``.
            order: ``fifo`` (as without it), ``lifo``, ``priority:<tag>`` (the highest first) or
                ``random:<seed>``.
            dp_world: How many ranks share the batch of ``step``: it is claimed once, and each rank gets
                equally many samples (whole groups, unless ``split_groups``) of about equal length.
            step: The name of the step. Asking again with the same one returns the same part.
            max_uses: How often this task may claim a sample: what was claimed fewer times lines up again,
                behind all others. A use that is not the last need not be finished: nobody gets it again when
                the client dies.
            repeat_where: Conditions on the tags of samples that line up again; the others were used for the
                last time.
            split_groups: Divide a step by samples: ranks get equally many, also of groups that are short, and
                the members of a group may be on several.

        Raises:
            KeyError: Unknown partition, task or field; at once, not after the timeout.
            ValueError: ``batch_size`` or ``where`` can never be satisfied; the next sample (or group) alone
                has more than ``max_tokens``, or no ``input_lengths``.
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
        must_exist: bool = False,
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
            must_exist: Write only to samples that are there, so that a late write does not bring back what
                was cleared meanwhile.

        Returns:
            A meta with ``fields`` of this write, usable for :meth:`get_data`.

        Raises:
            KeyError: The partition was never registered; with ``must_exist``, a sample is not there (named
                in the message), and nothing was written.
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
        """Release what this client holds, unfinished claims among it: they are handed out again. Idempotent.

        The bootstrap client ends what it started, and only that. Any later call raises.
        """

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
        """Ids and tags of what is there, claimed or not, without claiming it.

        Args:
            partition_id: A registered partition.
            where: Conditions on tags; see :meth:`claim_meta`.
            fields: Only samples that have all of these; they are the meta's fields.
            limit: The most samples.
            order: ``fifo`` (in the order of their first write, as without it), ``lifo``, ``priority:<tag>``
                (the highest first) or ``random:<seed>``.

        Raises:
            KeyError: Unknown partition or field.
            ValueError: ``where``, ``limit`` or ``order`` cannot be understood.
        """
        raise self._unsupported("peek_meta")

    def advance_version(self, partition_id: str, version: int) -> None:
        """Tell the partition which version of the weights the trainer has published. See ``docs/flow.md``.

        What has become too old by the flow policy is evicted, and prompts that may be admitted now are.

        Raises:
            KeyError: Unknown partition.
            ValueError: ``version`` is below that which the partition has.
        """
        raise self._unsupported("advance_version")

    def finish_partition(self, partition_id: str) -> None:
        """Say that nothing new comes to the partition, until it is registered again.

        Claims that wait get what is left, fewer than they asked for, and after that an empty meta at once.
        """
        raise self._unsupported("finish_partition")

    def close_group(
        self, partition_id: str, group: str | int, *, reason: str, fields: list[str] | None = None
    ) -> int:
        """End a group short: its finished members are the whole group, the others are given up.

        What is given up is cleared, counted under ``reason`` and told by :meth:`evicted_meta`. With no member
        finished, the whole group is given up. A group that is whole already stays as it is.

        Args:
            partition_id: A partition with ``grpo_group_size``.
            group: The tag ``group`` of its members, or the part of their ids before ``_g<number>``.
            reason: Why, such as ``"generation failed"``.
            fields: What a member must have to be finished. By default the policy's ``finished_fields``, else
                all fields that at least one of the members has.

        Returns:
            How many members the group has now.

        Raises:
            KeyError: Unknown partition, group or field.
            ValueError: The partition has no groups.
        """
        raise self._unsupported("close_group")

    def should_abort(self, sample_ids: list[str], partition_id: str) -> list[str]:
        """Those of ``sample_ids`` whose generation is in vain: they were cleared, or are too old already."""
        raise self._unsupported("should_abort")

    def evicted_meta(self, partition_id: str, *, limit: int | None = None) -> KVBatchMeta:
        """Ids and last tags of samples that the flow policy has evicted, each told once, the oldest first.

        The tag ``evicted`` says why. Of those that nobody asks for, the last 65,536 are kept.
        """
        raise self._unsupported("evicted_meta")

    def count(self, partition_id: str, where: Mapping[str, Any] | None = None) -> int:
        """How many samples are there, claimed or not, that match ``where``."""
        raise self._unsupported("count")

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
        """Append a turn to per-token fields: its tokens go behind those that each sample has, with its tags.

        A sample that is not there yet begins with this turn. ``get_samples`` reads the turns that there are,
        each of them whole, as one nested tensor. Appending costs what is appended, not what is there.

        Args:
            sample_ids: Distinct, non-empty.
            partition_id: A registered partition.
            fields: For each field a nested tensor, or a dense one of at least two dimensions; dtype and the
                dimensions behind the second are those of the turns before.
            tags: One mapping per sample; merged into what the sample has.
            finish: This was the last turn: the fields count as written, and claims that wait for them get
                the samples. A field that is finished cannot grow any more; ``put_samples`` replaces it.
            timeout_s: How long to wait for room.

        Raises:
            KeyError: Unknown partition.
            ValueError: A field is finished for one of the samples, or grows by another kind of tokens.
                Nothing was written.
            CapacityTimeoutError: There was no room; nothing was written.
        """
        raise self._unsupported("append_samples")

    def finish_claims(self, meta: KVBatchMeta) -> None:
        """Be done with what was claimed and only read: it is not handed out again when this client goes."""
        raise self._unsupported("finish_claims")

    def unclaim(self, meta: KVBatchMeta) -> None:
        """Give a claim back: what this client still holds of it is handed out again, ahead of all else."""
        raise self._unsupported("unclaim")

    def drop_partition(self, partition_id: str) -> None:
        """Forget a partition: its samples, its schema and its tasks. Whoever waits for it gets
        ``UnknownPartitionError``."""
        raise self._unsupported("drop_partition")

    def list_sample_ids(self, partition_id: str) -> list[str]:
        """The live samples of a partition, in the order in which they were first written."""
        raise self._unsupported("list_sample_ids")

    def partition_status(self, partition_id: str) -> PartitionStatus:
        """Counts per field and task, bytes held and the oldest sample's age; see :class:`PartitionStatus`."""
        raise self._unsupported("partition_status")

    def save_checkpoint(self, checkpoint_dir: str, *, metadata: Mapping[str, Any] | None = None) -> None:
        """Write all partitions to a directory, consistent at one point of time, all or nothing.

        ``metadata`` comes back from :meth:`load_checkpoint`: anything that JSON can hold.
        """
        raise self._unsupported("save_checkpoint")

    def load_checkpoint(self, checkpoint_dir: str, *, release_claims: bool = False) -> dict[str, Any]:
        """Replace the plane's content with a checkpoint's, and return the metadata that was saved with it.

        A checkpoint can be loaded on another engine than it was saved on. A bad one is refused, and the
        plane stays as it is.

        Cursors come back as they were. ``release_claims=True`` hands out again what had been claimed by
        somebody who had not finished with it, which is what a job wants that resumes with new workers.
        """
        raise self._unsupported("load_checkpoint")

    # Nothing but measurements: without observability they do nothing.

    def step(self, number: int) -> AbstractContextManager[Any]:
        """Mark a training step: the block of ``with client.step(number):``.

        Views then show which share of the step this thread spent in the plane, by operation, split into
        waiting for samples, round trips and bytes; and tokens per second, of the samples that the step
        claimed by their tag ``input_lengths``, or of ``tokens`` if that is set on what ``with`` gives.
        """
        return nullcontext(SimpleNamespace(tokens=None))

    def mark_step(self, number: int) -> None:  # noqa: B027 - it is optional
        """Say that step ``number`` ends now, for a loop that has no block for it. It began with the call
        before; the first call only begins."""

    def log(self, scalars: Mapping[str, Any]) -> None:  # noqa: B027 - it is optional
        """Show numbers of your own, such as the reward, beside those of the step, in every view and sink."""

    def _unsupported(self, method: str) -> UnsupportedOperationError:
        return UnsupportedOperationError(f"{type(self).__name__} does not support {method}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
