"""The picture that the aggregator publishes: one :class:`MetricsSnapshot` per tick, complete in itself.

A viewer needs no history: whichever snapshot it gets first shows everything, and every later one replaces it.

**Where to look.** What describes the run is in ``metrics``, each entry a name with labels:

==========================  ==================  ==============================================================
counter                     labels              what
==========================  ==================  ==============================================================
``ops``                     op, partition       finished; ``rate`` is per second, over the last seconds
``op_keys``                 op, partition       samples they touched
``op_bytes``                op, partition       bytes they moved
``op_failures``             op, partition       those that raised, timeouts aside
``op_timeouts``             op, partition       those that timed out; of ``claim_meta``, that found nothing
``claim_keys``              partition, task     samples that claims returned, tracked or not
``field_bytes``             partition, field    bytes that puts wrote; of a field that is a tree, by leaf
``rows_checked``            partition, field    rows that readers compared with what was written (``verify``)
``rows_unchecked``          partition, field    rows that such readers had nothing to compare with
``rows_mismatched``         partition, field    rows whose bytes were not those that were written
``samples_written``         partition           samples seen for the first time
``samples_claimed``         partition, task     first claims
``samples_reclaimed``       partition, task     claims of a sample that the task had claimed before
``samples_cleared``         partition
``tracked_samples_failed``  partition           each once, whether it failed before or after its clear
``transfers``               —                   successful transfers; with ``transfer_bytes``
``transfer_failures``       kind                ``transfer``, ``notification`` or ``expired``
``events``                  —                   events that reached the aggregator
``events_dropped``          —                   dropped by workers: a full queue, or not to be encoded
``batches_lost``            —                   gaps in the workers' numbering
``bad_frames``              —                   frames that could not be read
``values_refused``          —                   NaN, infinite, negative or mistyped values
``samples_untracked``       —                   steps of samples beyond the table's bound
``trigger_failures``        —                   triggers of the table that raised
``session_errors``          —                   ERROR events
==========================  ==================  ==============================================================

=======================  ================  ========  ==================================================
series                   labels            unit      what
=======================  ================  ========  ==================================================
``op_latency``           op                ns        time of operations, failed ones included, waiting left
out ``op_wait``              op, partition,    ns        how long those that waited did: claims for samples,
puts                          task                        for room
``written_to_claimed``   partition, task   ns
``written_to_cleared``   partition         ns
``staleness``            partition, task   versions  newest weight version minus the sample's, at the claim
``transfer_duration``    —                 ns        with ``transfer_post_duration``
``transfer_size``        —                 bytes     bytes per transfer
``transfer_descriptors`` —                 1         descriptors per transfer
=======================  ================  ========  ==================================================

Gauges: ``bytes_held``, ``samples_held`` (all partitions, with their peak), ``weight_version``,
``workers_alive``.

The same per worker is in ``workers`` (:class:`WorkerStat`, with its operations in ``by_op``), and what a
partition holds is in ``partitions`` (:class:`PartitionStat`, with its tasks). The product of workers and
partitions is left out on purpose: 500 workers with 200 partitions stay a few hundred kilobytes. Beyond
:data:`MAX_PARTITIONS`, :data:`MAX_WORKERS`, … names are summed up under :data:`OTHER`.

Percentiles are observed values (the smallest one with at least that share at or below it). While the run goes
on they come from a histogram with 3 significant figures (2 for one worker's); ``exact`` says that they were
computed from all the values.

**Wire rules.** msgpack maps; new fields come last, with a default, and none is renamed or removed, so old
viewers read new snapshots and the other way round. ``SCHEMA_VERSION`` changes only if that is broken.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Iterator
from typing import TypeAlias

import msgspec

from rlplane.metrics.events import FlowStat
from rlplane.transport import make_topic

__all__ = [
    "GRIDS",
    "MAX_FIELDS",
    "MAX_FINISHED",
    "MAX_LOG_LINES",
    "MAX_OLDEST",
    "MAX_OLDEST_AT_END",
    "MAX_OPS",
    "MAX_PARTITIONS",
    "MAX_STEPS",
    "MAX_TASKS",
    "MAX_TIMELINE",
    "MAX_WORKERS",
    "OTHER",
    "PERCENTILES",
    "SCHEMA_VERSION",
    "CounterStat",
    "GaugeStat",
    "LogLine",
    "MetricsSnapshot",
    "MetricsSnapshotCodec",
    "Number",
    "PartitionStat",
    "SampleAge",
    "SeriesStat",
    "SeriesSummary",
    "SessionState",
    "Stat",
    "StepOpStat",
    "StepStat",
    "StepTotals",
    "TaskStat",
    "TimelinePoint",
    "WorkerOpStat",
    "WorkerStat",
]

SCHEMA_VERSION = 1

PERCENTILES: tuple[tuple[str, int], ...] = (
    # The name, and the share in hundred-thousandths: ranks are computed in integers.
    ("p50", 50_000),
    ("p75", 75_000),
    ("p90", 90_000),
    ("p95", 95_000),
    ("p99", 99_000),
    ("p99.9", 99_900),
)

# Fixed bucket edges by unit, for whoever compares two snapshots: `bucket_edges` move with min and max. The
# first and the last bucket hold what lies outside. Times: 1, 1.5, 2.5, 3.5, 5, 7 per decade, 1 µs to 1000 s.
GRIDS: dict[str, tuple[float, ...]] = {
    "ns": (*(step * 10.0**power / 2 for power in range(3, 12) for step in (2, 3, 5, 7, 10, 14)), 1e12),
    "bytes": tuple(2.0**power for power in range(8, 41)),
    "versions": (0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32, 64, 128, 256, 1024),
    "1": tuple(float(2**power) for power in range(21)),
}

OTHER = "(other)"
MAX_OPS = 64
MAX_PARTITIONS = 256
MAX_TASKS = 64
MAX_WORKERS = 1024
MAX_OLDEST = 20
MAX_OLDEST_AT_END = 1000
MAX_FIELDS = 128
MAX_FINISHED = 20
MAX_LOG_LINES = 100
MAX_TIMELINE = 360
MAX_STEPS = 400

logger = logging.getLogger(__name__)


class SessionState(enum.Enum):
    """INITIALIZE → LIVE → DRAINING → COMPLETE, and from any of the first three to INTERRUPTED."""

    INITIALIZE = "INITIALIZE"
    LIVE = "LIVE"
    DRAINING = "DRAINING"
    COMPLETE = "COMPLETE"
    INTERRUPTED = "INTERRUPTED"

    @property
    def is_final(self) -> bool:
        """Whether no further snapshot of the run follows."""
        return self in (SessionState.COMPLETE, SessionState.INTERRUPTED)


# msgspec decodes what is declared as float into a float, which cannot hold every 64-bit integer.
Number: TypeAlias = int | float


class CounterStat(msgspec.Struct, tag="counter", omit_defaults=True):
    """A number that only grows. ``rate`` is its growth per second over the last seconds."""

    name: str
    value: int
    labels: dict[str, str] = {}
    rate: float = 0.0


class GaugeStat(msgspec.Struct, tag="gauge", omit_defaults=True):
    """A number that goes up and down; ``peak`` is the highest it has been."""

    name: str
    value: Number
    labels: dict[str, str] = {}
    peak: Number | None = None


class SeriesStat(msgspec.Struct, tag="series", omit_defaults=True):
    """The distribution of a value. Without a value, ``count`` is 0 and the optional fields are None.

    ``bucket_counts[i]`` counts values from ``bucket_edges[i]`` to ``bucket_edges[i + 1]``, the last bucket
    with its end; the counts add up to ``count``. ``n_clamped`` values lay outside the live histogram's range
    and count at its end; ``min``, ``max``, ``total`` and ``mean`` are true all the same.

    ``grid_counts`` are the same values in the fixed buckets of ``GRIDS[unit]``, those before the bucket
    ``grid_first`` and after the last one given being 0: two snapshots of a run can be subtracted.
    """

    name: str
    count: int
    labels: dict[str, str] = {}
    unit: str = "ns"
    total: Number = 0
    min: Number | None = None
    max: Number | None = None
    mean: float | None = None
    std_dev: float | None = None
    percentiles: dict[str, Number] = {}
    bucket_edges: list[float] = []
    bucket_counts: list[int] = []
    n_clamped: int = 0
    n_refused: int = 0
    exact: bool = False
    grid_first: int = 0
    grid_counts: list[int] = []


Stat: TypeAlias = CounterStat | GaugeStat | SeriesStat


class SeriesSummary(msgspec.Struct, omit_defaults=True):
    """A series in short, for one worker."""

    count: int
    mean: float
    p50: Number
    p90: Number
    p99: Number
    max: Number
    exact: bool = False


class TaskStat(msgspec.Struct, omit_defaults=True):
    """A consumer task of a partition: samples ready for it, claimed by it, and claims that wait.

    ``ready`` counts the samples that satisfy the claim that waits, or that was made last: those with
    ``fields`` that match the condition ``where``; it wants ``wanted`` of them. ``writes`` are the fields
    that the task's workers write. None means that nobody reports it: ``ready`` and ``waiting`` need an
    engine with ``partition_status``, and ``ready`` a first claim.
    """

    task: str
    ready: int | None = None
    claimed: int | None = None
    waiting: int | None = None
    fields: list[str] = []
    where: str = ""
    writes: list[str] = []
    wanted: int | None = None

    @property
    def starves(self) -> bool:
        """Whether claims wait because too few samples are ready (and not, say, for admission)."""
        few = self.ready is not None and (self.wanted is None or self.ready < self.wanted)
        return bool(self.waiting) and few


class PartitionStat(msgspec.Struct, omit_defaults=True):
    """What a partition holds now, at its peak, and has seen in all.

    ``reported`` says that an engine's ``partition_status`` is the source of ``samples`` and ``bytes``; else
    they add up from the sample events. Without ``tracked`` there are no sample events, and nobody knows what
    was written, claimed, cleared and failed: those are 0, and views show a dash. ``flow`` is what its flow
    policy has done, if it has one, or if weight versions are announced.
    """

    partition: str
    samples: int = 0
    bytes: int = 0
    peak_samples: int = 0
    peak_bytes: int = 0
    capacity_samples: int | None = None
    capacity_bytes: int | None = None
    oldest_age_s: float | None = None
    reported: bool = False
    written: int = 0
    claimed: int = 0
    cleared: int = 0
    failed: int = 0
    never_cleared: int = 0
    tasks: list[TaskStat] = []
    tracked: bool = True
    flow: FlowStat | None = None

    @property
    def known(self) -> bool:
        """Whether anybody says what it holds."""
        return self.reported or self.tracked


class WorkerOpStat(msgspec.Struct, omit_defaults=True):
    """One operation of one worker."""

    op: str
    count: int
    keys: int = 0
    bytes: int = 0
    failures: int = 0
    timeouts: int = 0
    rate: float = 0.0
    latency: SeriesSummary | None = None
    waited_s: float = 0.0


class WorkerStat(msgspec.Struct, omit_defaults=True):
    """One worker process.

    ``state`` is ``alive``, ``silent`` (no sign for some seconds) or ``gone`` (said so). ``never_cleared``
    counts samples that it wrote and that are in flight.
    """

    worker: str
    pid: int
    host: str
    role: str = ""
    state: str = "alive"
    first_seen_ns: int = 0
    last_seen_ns: int = 0
    ops: int = 0
    keys: int = 0
    bytes: int = 0
    failures: int = 0
    timeouts: int = 0
    rate: float = 0.0
    bytes_rate: float = 0.0
    dropped: int = 0
    lost_batches: int = 0
    written: int = 0
    claimed: int = 0
    cleared: int = 0
    failed: int = 0
    never_cleared: int = 0
    by_op: list[WorkerOpStat] = []
    written_to_claimed: SeriesSummary | None = None
    written_to_cleared: SeriesSummary | None = None
    staleness: SeriesSummary | None = None


class SampleAge(msgspec.Struct, omit_defaults=True):
    """A sample, in flight (written and not cleared) unless ``cleared_ns`` says when it ended.

    ``claimed_ns`` has the time of each claim in ``claimed_by``. ``age_s`` is the age at its clear, or now.
    """

    sample_id: str
    partition: str
    age_s: float
    written_ns: int = 0
    worker: str = ""
    weight_version: int | None = None
    claimed_by: list[str] = []
    failed: bool = False
    claimed_ns: list[int] = []
    cleared_ns: int | None = None


class LogLine(msgspec.Struct, omit_defaults=True):
    """A line of the log; ``level`` is ``warning`` or ``error``, ``worker`` empty for the aggregator's own.

    What is said again is one line: ``count`` times, first at ``first_ns`` and last at ``time_ns``.
    """

    time_ns: int
    level: str
    message: str
    worker: str = ""
    count: int = 1
    first_ns: int = 0


class TimelinePoint(msgspec.Struct, omit_defaults=True):
    """What happened in ``seconds`` that began ``elapsed_s`` after the start; ``…_held`` are at its end."""

    elapsed_s: float
    seconds: float
    ops: int = 0
    keys: int = 0
    bytes: int = 0
    failures: int = 0
    busy_ns: int = 0
    written: int = 0
    claimed: int = 0
    cleared: int = 0
    stale_sum: int = 0
    stale_count: int = 0
    samples_held: int = 0
    bytes_held: int = 0
    waits: int = 0
    wait_ns: int = 0


class StepStat(msgspec.Struct, omit_defaults=True):
    """A training step of one worker, which ended ``elapsed_s`` after the start of the run.

    ``plane_s`` of its ``seconds`` were spent in calls to the plane: ``waiting_s`` for samples or room,
    ``round_trips_s`` to the service, ``bytes_s`` on bytes. ``step`` None: only ``scalars``, logged outside
    of any.
    """

    step: int | None
    elapsed_s: float
    worker: str = ""
    seconds: float = 0.0
    plane_s: float = 0.0
    waiting_s: float = 0.0
    round_trips_s: float = 0.0
    bytes_s: float = 0.0
    tokens: int = 0
    scalars: dict[str, float] = {}


class StepOpStat(msgspec.Struct, omit_defaults=True):
    """One operation in all training steps of a run."""

    op: str
    count: int = 0
    seconds: float = 0.0
    waiting_s: float = 0.0
    round_trips_s: float = 0.0
    bytes_s: float = 0.0


class StepTotals(msgspec.Struct, omit_defaults=True):
    """All training steps of a run together; ``ops`` by the time that they took."""

    count: int = 0
    seconds: float = 0.0
    tokens: int = 0
    ops: list[StepOpStat] = []

    @property
    def plane_s(self) -> float:
        return sum(op.seconds for op in self.ops)

    def share(self, part: str = "seconds") -> float:
        """Which share of the steps' time the plane took, or one ``part`` of it, such as ``waiting_s``."""
        return sum(getattr(op, part) for op in self.ops) / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


class MetricsSnapshot(msgspec.Struct, omit_defaults=True, kw_only=True):
    """One picture of the run.

    ``exact`` says that all percentiles come from all the values, which only a final snapshot can say.
    ``n_pending_tasks`` above 0 in a COMPLETE one means that the drain timed out. ``n_in_flight`` counts
    samples written and not cleared; ``oldest`` lists the oldest of them, ``finished`` the last ones cleared.
    ``steps`` are the last training steps that were marked, and ``step_totals`` all of them together.
    """

    run_id: str
    state: SessionState
    seq: int
    time_ns: int
    monotonic_ns: int
    # A factory, because a plain default would be left out on the wire.
    schema_version: int = msgspec.field(default_factory=lambda: SCHEMA_VERSION)
    started_ns: int = 0
    elapsed_s: float = 0.0
    exact: bool = False
    n_pending_tasks: int = 0
    refresh_hz: float = 0.0
    host: str = ""
    pid: int = 0
    metrics: list[Stat] = []
    partitions: list[PartitionStat] = []
    workers: list[WorkerStat] = []
    n_in_flight: int = 0
    oldest: list[SampleAge] = []
    log: list[LogLine] = []
    timeline: list[TimelinePoint] = []
    finished: list[SampleAge] = []
    steps: list[StepStat] = []
    step_totals: StepTotals = msgspec.field(default_factory=StepTotals)

    @property
    def n_never_cleared(self) -> int:
        """Of those in flight, what is left at the end: without what the plane evicted."""
        if not self.state.is_final:
            return self.n_in_flight
        return sum(part.never_cleared for part in self.partitions)

    def counters(self, name: str, **labels: str) -> Iterator[CounterStat]:
        """The counters of that name whose labels include ``labels``."""
        for stat in self.metrics:
            if isinstance(stat, CounterStat) and _fits(stat, name, labels):
                yield stat

    def total(self, name: str, **labels: str) -> int:
        """The sum of those counters."""
        return sum(stat.value for stat in self.counters(name, **labels))

    def rate(self, name: str, **labels: str) -> float:
        """The sum of their rates, per second."""
        return sum(stat.rate for stat in self.counters(name, **labels))

    def series(self, name: str, **labels: str) -> Iterator[SeriesStat]:
        """The series of that name whose labels include ``labels``."""
        for stat in self.metrics:
            if isinstance(stat, SeriesStat) and _fits(stat, name, labels):
                yield stat

    def gauges(self) -> Iterator[GaugeStat]:
        """Every gauge, those of the partitions and their tasks included, with labels."""
        for stat in self.metrics:
            if isinstance(stat, GaugeStat):
                yield stat
        for part in self.partitions:
            labels = {"partition": part.partition}
            if part.known:
                yield GaugeStat("partition_samples", part.samples, labels, part.peak_samples)
                yield GaugeStat("partition_bytes", part.bytes, labels, part.peak_bytes)
            if part.tracked:
                yield GaugeStat("partition_never_cleared", part.never_cleared, labels)
            for name, value in (
                ("partition_capacity_samples", part.capacity_samples),
                ("partition_capacity_bytes", part.capacity_bytes),
                ("partition_oldest_age_seconds", part.oldest_age_s),
            ):
                if value is not None:
                    yield GaugeStat(name, value, labels)
            yield from _flow_gauges(part.flow, labels)
            for task in part.tasks:
                for name, value in (
                    ("task_ready", task.ready),
                    ("task_claimed", task.claimed),
                    ("task_waiting", task.waiting),
                    ("task_wanted", task.wanted),
                ):
                    if value is not None:
                        yield GaugeStat(name, value, {**labels, "task": task.task})


def _flow_gauges(flow: FlowStat | None, labels: dict[str, str]) -> Iterator[GaugeStat]:
    if flow is None:
        return
    yield GaugeStat("flow_version", flow.version, labels)
    if flow.max_staleness is not None:
        yield GaugeStat("flow_max_staleness", flow.max_staleness, labels)
    yield GaugeStat("flow_admitted", flow.admitted, labels)
    yield GaugeStat("flow_waiting", flow.waiting, labels)
    for name, counts in (("flow_evicted", flow.evicted), ("flow_closed_short", flow.closed_short)):
        for reason, count in counts.items():
            yield GaugeStat(name, count, {**labels, "reason": reason})


def _fits(stat: CounterStat | SeriesStat, name: str, labels: dict[str, str]) -> bool:
    return stat.name == name and labels.items() <= stat.labels.items()


class MetricsSnapshotCodec:
    """Snapshots as msgpack. One that cannot be read is dropped, with one log line."""

    topic = make_topic("rlplane.snapshot")

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(MetricsSnapshot)
        self._warned = False

    def encode(self, item: MetricsSnapshot) -> tuple[bytes, bytes]:
        return self.topic, self._encoder.encode(item)

    def decode(self, payload: bytes) -> MetricsSnapshot:
        return self._decoder.decode(payload)

    def on_decode_error(self, payload: bytes, exc: Exception) -> MetricsSnapshot | None:
        if not isinstance(exc, (msgspec.DecodeError, ValueError)):
            raise exc
        if not self._warned:
            self._warned = True
            logger.warning("a snapshot of %d bytes cannot be read: %s", len(payload), exc)
        return None
