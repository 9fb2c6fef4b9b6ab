"""The plane under test, as the checks see it: clients, partitions with names of their own, and patience.

Nothing here needs an empty plane or a fast one. Every partition has a name that was never used before, so
that one long-lived plane can serve every check, and every wait is scaled by the factory's ``time_scale``.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar

from rlplane.interfaces import DataPlaneClient, KVBatchMeta
from rlplane.testing.promises import BrokenPromise, NotApplicable

if TYPE_CHECKING:
    from tensordict import TensorDict

    from rlplane.control.policies import FlowPolicy

T = TypeVar("T")

MANY = 1_000_000  # a num_samples that no check reaches, so that no claim sees a tail by accident


class PlaneFactory(Protocol):
    """What ``check_data_plane`` takes, when it is given more than a function.

    A function without arguments that returns a client is a factory too: it is used as ``client``. Beside
    ``client``, everything is optional, and a check that needs what is absent is reported as not applicable:

    - ``client(**config)`` may take keys of ``DataPlaneConfig``: ``storage_capacity``,
      ``global_segment_size``, ``local_buffer_size`` and ``allow_pickle`` are used, and each such call must
      give a plane of its own. Without arguments it may return a client of the same plane every time.
    - ``worker(client)``, or ``worker()``, returns one more client of the plane of ``client``, which is the
      latest that ``client()`` returned.
    - ``time_scale`` multiplies every wait, for engines that are slow. The default of 1.0 means timeouts of
      0.1 s where a timeout is expected, and a deadline of 10 s where it is not.
    - ``limitations`` names checks or features that the adapter does not have; a client may have it too. A
      client's ``not_promised`` maps checks to the reasons for which its store does something else, and does
      not refuse: they are not run.
    - ``close()`` is called by the pytest plugin when the run is over.

    Every client that a factory returns is closed by the check that asked for it.
    """

    def client(self) -> DataPlaneClient:
        """A client that may be closed, of a plane that stays usable for the next call."""


class PlaneUnderTest:
    """One check's view of the plane: what it opens here is cleared and closed when the check ends."""

    def __init__(self, factory: Any) -> None:
        self._factory = factory
        self._make = factory.client if hasattr(factory, "client") else factory
        self._opened: list[DataPlaneClient] = []
        self._partitions: list[PartitionUnderTest] = []
        scale = float(getattr(factory, "time_scale", 1.0))
        self.short = 0.1 * scale
        self.deadline = 10.0 * scale
        self.client = self._open(self._make())

    @property
    def limitations(self) -> Iterable[str]:
        """What the factory and the adapter declare."""
        return {*getattr(self._factory, "limitations", ()), *getattr(self.client, "limitations", ())}

    @property
    def not_promised(self) -> Mapping[str, str]:
        """Checks that the adapter says it may fail, each with the reason."""
        found: Mapping[str, str] = getattr(self.client, "not_promised", {})
        return found

    def another(self) -> DataPlaneClient:
        """A second bootstrap client, of the same plane or of another: the factory decides."""
        return self._open(self._make())

    def configured(self, **config: Any) -> DataPlaneClient:
        """A client of a plane of its own with these keys in its config."""
        try:
            inspect.signature(self._make).bind(**config)
        except TypeError:
            raise NotApplicable(f"the factory's client() does not take {', '.join(config)}") from None
        try:
            return self._open(self._make(**config))
        except NotImplementedError as exc:
            raise NotApplicable(f"the factory cannot make a plane with {config}: {exc}") from exc

    def worker(self) -> DataPlaneClient:
        """One more client of the same plane."""
        make = getattr(self._factory, "worker", None)
        if make is None:
            raise NotApplicable("the factory has no worker(): there is no second client of the same plane")
        try:
            inspect.signature(make).bind(self.client)
        except TypeError:
            return self._open(make())
        return self._open(make(self.client))

    def partition(
        self, fields: Sequence[str] = ("x",), *args: Any, client: DataPlaneClient | None = None, **how: Any
    ) -> PartitionUnderTest:
        """A registered partition whose name was never used before; ``register`` has the arguments."""
        made = self.unregistered(client)
        made.register(fields, *args, **how)
        return made

    def unregistered(self, client: DataPlaneClient | None = None) -> PartitionUnderTest:
        """A partition that nobody has registered."""
        made = PartitionUnderTest(self, client or self.client, f"conformance-{uuid.uuid4().hex[:12]}")
        self._partitions.append(made)
        return made

    def start(self, call: Callable[[], T]) -> PendingCall[T]:
        """Run ``call`` in a thread of its own."""
        return PendingCall(call, self.deadline)

    def has(self, method: str) -> bool:
        """Whether the adapter has an optional method that takes a partition, or a claim."""
        try:
            part = self.partition()
            getattr(self.client, method)(part.claim_ready() if method == "unclaim" else part.name)
        except NotImplementedError:
            return False
        return True

    def close(self) -> None:
        """Clear what the check wrote and close its clients. Raises what ``close`` of a client raises."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            while self._partitions:
                part = self._partitions.pop()
                # Only to free the memory: what a clear must do is checked elsewhere.
                with contextlib.suppress(Exception):
                    part.clear(sorted(part.written))
        while self._opened:
            self._opened.pop().close()

    def _open(self, client: DataPlaneClient) -> DataPlaneClient:
        self._opened.append(client)
        return client

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        # Here a check has failed, or has closed already: its own error is the one to show.
        with contextlib.suppress(Exception):
            self.close()


class PartitionUnderTest:
    """A partition of the plane under test, with the calls of a client that need no name to be repeated."""

    def __init__(self, plane: PlaneUnderTest, client: DataPlaneClient, name: str) -> None:
        self.plane = plane
        self.client = client
        self.name = name
        self.written: set[str] = set()
        self._claims: list[PendingCall[KVBatchMeta]] = []

    def on(self, client: DataPlaneClient) -> PartitionUnderTest:
        """The same partition, seen through another client."""
        other = PartitionUnderTest(self.plane, client, self.name)
        other.written, other._claims = self.written, self._claims
        return other

    def register(
        self,
        fields: Sequence[str] = ("x",),
        num_samples: int = MANY,
        tasks: Sequence[str] = ("train",),
        *,
        group_size: int | None = None,
        enums: dict[str, list[str]] | None = None,
        flow: FlowPolicy | Mapping[str, Any] | None = None,
    ) -> None:
        """Register it, perhaps again."""
        self.client.register_partition(
            self.name,
            list(fields),
            num_samples,
            list(tasks),
            grpo_group_size=group_size,
            enums=enums,
            **_only(flow=flow),
        )

    def put(
        self,
        ids: Iterable[str],
        columns: Mapping[str, Any] | TensorDict | None = None,
        tags: list[dict[str, Any]] | None = None,
        *,
        timeout_s: float | None = None,
        must_exist: bool | None = None,
    ) -> KVBatchMeta:
        """Write; ``columns`` is a mapping with one row per id, or a ready-made ``TensorDict``."""
        from tensordict import TensorDict

        ids = list(ids)
        if columns is not None and not isinstance(columns, TensorDict):
            columns = TensorDict(dict(columns), batch_size=[len(ids)])
        self.written.update(i for i in ids if isinstance(i, str))
        timeout_s = self.plane.deadline if timeout_s is None else timeout_s
        return self.client.put_samples(
            ids, self.name, columns, tags, timeout_s=timeout_s, **_only(must_exist=must_exist)
        )

    def put_numbers(self, ids: Iterable[str], start: float = 0, field: str = "x") -> KVBatchMeta:
        """Write ``start``, ``start + 1``, … as float32 rows of one field: for checks about other things."""
        import torch

        ids = list(ids)
        return self.put(ids, {field: torch.arange(len(ids), dtype=torch.float32) + start})

    def claim(
        self,
        batch_size: int,
        *,
        task: str = "train",
        required: Sequence[str] = ("x",),
        timeout_s: float | None = None,
        **how: Any,
    ) -> KVBatchMeta:
        """A blocking claim; ``how`` has ``where`` and what else a claim may have."""
        timeout_s = self.plane.deadline if timeout_s is None else timeout_s
        return self.client.claim_meta(
            self.name, task, list(required), batch_size, timeout_s=timeout_s, **_only(**how)
        )

    def claim_ready(self, batch_size: int = 1000, **how: Any) -> KVBatchMeta:
        """A claim that does not wait."""
        return self.claim(batch_size, blocking=False, **how)

    def claim_in_thread(self, batch_size: int, **how: Any) -> PendingCall[KVBatchMeta]:
        """A blocking claim in a thread of its own."""
        claim = self.plane.start(lambda: self.claim(batch_size, **how))
        self._claims.append(claim)
        return claim

    def waiting_claim(
        self, batch_size: int, *, among: int = 1, task: str = "train", **how: Any
    ) -> PendingCall[KVBatchMeta]:
        """The same, when it waits, and ``among`` claims of the task do."""
        claim = self.claim_in_thread(batch_size, task=task, **how)
        self.wait_until_claims_wait(among, task)
        return claim

    def wait_until_claims_wait(self, count: int, task: str = "train") -> bool:
        """Wait until ``count`` claims of the task wait; False when the adapter cannot tell."""
        end = time.monotonic() + self.plane.deadline
        while True:
            try:
                waiting = self.client.partition_status(self.name)["tasks"][task]["waiting"]
            except NotImplementedError:
                # Then a claim that starts late only makes the check easier to pass.
                time.sleep(self.plane.short)
                return False
            if waiting >= count:
                return True
            for claim in self._claims:
                claim.raise_refusal()
            if time.monotonic() > end:
                raise BrokenPromise(f"partition_status counts {waiting} waiting claims, and {count} wait")
            time.sleep(0.002)

    def get(self, ids: Iterable[str], fields: Iterable[str] = ("x",)) -> TensorDict:
        """Read by id."""
        return self.client.get_samples(list(ids), self.name, list(fields))

    def numbers(self, ids: Iterable[str], field: str = "x") -> list[float]:
        """The values of a field that holds one number per row."""
        return [float(value) for value in self.get(ids, [field]).get(field)]

    def clear(self, ids: Iterable[str] | None) -> None:
        """Clear samples."""
        self.client.clear_samples(None if ids is None else list(ids), self.name)

    def status(self) -> dict[str, Any]:
        """``partition_status``."""
        return dict(self.client.partition_status(self.name))

    def is_consumed(self, *tasks: str) -> bool:
        """``check_consumption_status`` of the tasks."""
        return self.client.check_consumption_status(self.name, list(tasks))


class PendingCall(Generic[T]):
    """A call that runs in a thread of its own."""

    def __init__(self, call: Callable[[], T], deadline: float) -> None:
        self._deadline = deadline
        self._result: list[T] = []
        self._error: BaseException | None = None
        # A daemon, because an adapter that waits for ever must not keep the process alive.
        self._thread = threading.Thread(target=self._run, args=(call,), daemon=True)
        self._thread.start()

    def _run(self, call: Callable[[], T]) -> None:
        try:
            self._result.append(call())
        except BaseException as exc:
            self._error = exc

    def raise_refusal(self) -> None:
        """Raise what the call raised, if the adapter refused it as a limitation."""
        if isinstance(self._error, NotImplementedError):
            raise self._error

    def is_done_within(self, seconds: float) -> bool:
        """Whether the call ends in that time."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def result(self, what: str, extra_s: float = 0.0) -> T:
        """What the call returned, or raises what it raised; ``what`` names it if it never ends."""
        if not self.is_done_within(self._deadline + extra_s):
            raise BrokenPromise(f"{what} was still waiting after {self._deadline + extra_s:g} s")
        if self._error is not None:
            raise self._error
        return self._result[0]


def _only(**arguments: Any) -> dict[str, Any]:
    """The arguments that are set, so that an adapter without the others is not asked for them."""
    return {name: value for name, value in arguments.items() if value is not None}
