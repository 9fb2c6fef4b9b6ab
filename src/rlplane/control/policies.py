"""The decisions of flow control, pure: what is too old, what may be admitted, what comes first.

Nothing here knows rows, queues or clients: numbers and tags go in, decisions come out.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from rlplane.errors import InvalidRequestError

LENGTH_TAG = "input_lengths"
_SIMPLE_NUMBERS = {int, float, bool}
_ORDERS = "fifo, lifo, priority:<tag> or random:<seed>"

PolicyKind = Literal["unbounded", "windowed", "ready_first", "weight_fifo", "in_order"]


class FlowPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a partition keeps rollouts and training together: how old a sample may be, and what follows.

    The *version* of a partition is what the trainer last told with ``advance_version``; that of a sample is
    its tag ``version_tag``. A *prompt* is a sample, or with ``grpo_group_size`` a group.

    Groups that end short: ``group_timeout_s`` after its first member was finished (has ``finished_fields``),
    a group that has ``min_group_size`` of them is closed, and any other is given up.

    ``on_lost`` says what becomes of a sample whose bytes died with the storage that had them: it is cleared
    and told by ``evicted_meta``, or stays, and the fields that it has lost can be written again.

    Make one with :meth:`windowed`, :meth:`ready_first`, :meth:`weight_fifo` or :meth:`in_order`, or give
    ``register_partition`` a mapping with the same names: ``{"kind": "windowed", "max_staleness": 2}``.
    It is on the wire and on disk: new fields come last, with a default.
    """

    kind: PolicyKind = "unbounded"
    max_staleness: int = 0
    batch: int = 0
    freshest_first: bool = False
    version_tag: str = "weight_version"
    first_version: int = 0
    training_task: str = "train"
    admitting_task: str = "rollout"
    finished_fields: list[str] = []
    min_group_size: int = 0
    group_timeout_s: float | None = None
    on_lost: Literal["clear", "keep"] = "clear"

    @classmethod
    def windowed(cls, max_staleness: int, *, freshest_first: bool = False, **more: Any) -> Self:
        """Rollouts are never held back; what has become older than ``max_staleness`` is evicted."""
        return cls(kind="windowed", max_staleness=max_staleness, freshest_first=freshest_first, **more)

    @classmethod
    def ready_first(cls, max_staleness: int, batch: int, **more: Any) -> Self:
        """Only as many prompts are admitted as can be trained in time; what is ready first is trained first.

        ``batch`` is the number of prompts of a training step.
        """
        return cls(kind="ready_first", max_staleness=max_staleness, batch=batch, **more)

    @classmethod
    def weight_fifo(cls, max_staleness: int, batch: int, **more: Any) -> Self:
        """Admission as :meth:`ready_first`; the oldest version is trained first."""
        return cls(kind="weight_fifo", max_staleness=max_staleness, batch=batch, **more)

    @classmethod
    def in_order(cls, lookahead: int, batch: int, **more: Any) -> Self:
        """Admission as :meth:`ready_first`; a step trains exactly the prompts that were admitted for it."""
        return cls(kind="in_order", max_staleness=lookahead, batch=batch, **more)

    @classmethod
    def checked(cls, flow: FlowPolicy | Mapping[str, Any] | None, tasks: Sequence[str]) -> FlowPolicy | None:
        """A policy from what ``register_partition`` was given, or what is wrong with it."""
        if flow is None:
            return None
        if not isinstance(flow, FlowPolicy):
            if not isinstance(flow, Mapping):
                raise InvalidRequestError(f"flow must be a FlowPolicy or a mapping, not {flow!r:.80}")
            given = dict(flow)
            if given.get("kind") == "in_order" and "lookahead" in given:
                given["max_staleness"] = given.pop("lookahead")
            _refuse_unknown(given, cls.__struct_fields__)
            try:
                flow = msgspec.convert(given, cls)
            except msgspec.ValidationError as error:
                raise InvalidRequestError(f"flow is not a policy: {error}") from error
        try:
            # A policy that was made in code has not been looked at yet.
            flow = msgspec.convert(msgspec.structs.asdict(flow), cls)
        except msgspec.ValidationError as error:
            raise InvalidRequestError(f"flow is not a policy: {error}") from error
        if flow.max_staleness < 0:
            raise InvalidRequestError(f"flow: max_staleness must be at least 0, not {flow.max_staleness}")
        if flow.kind == "unbounded" and (flow.max_staleness or flow.batch or flow.freshest_first):
            raise InvalidRequestError(
                "flow: max_staleness, batch and freshest_first need a kind of policy that goes by them: "
                "windowed, ready_first, weight_fifo or in_order"
            )
        if flow.is_gated and flow.batch < 1:
            raise InvalidRequestError(f"flow: {flow.kind} needs batch, the number of prompts of a step")
        if flow.group_timeout_s is not None and not (flow.group_timeout_s > 0 and flow.finished_fields):
            raise InvalidRequestError(
                "flow: group_timeout_s must be above 0 and needs finished_fields, which say when a member is "
                f"finished; they are {flow.group_timeout_s} and {flow.finished_fields}"
            )
        for role, task in flow.roles():
            if task not in tasks:
                raise InvalidRequestError(
                    f"flow: {flow.kind} needs {role}, and {task!r} is not one of the tasks {list(tasks)}"
                )
        return flow

    def roles(self) -> list[tuple[str, str]]:
        """The tasks that the policy is about."""
        training, admitting = ("training_task", self.training_task), ("admitting_task", self.admitting_task)
        return {
            "unbounded": [],
            "windowed": [training],
            "ready_first": [admitting],
            "weight_fifo": [training, admitting],
            "in_order": [training, admitting],
        }[self.kind]

    @property
    def is_gated(self) -> bool:
        """Whether prompts have to be admitted."""
        return self.kind in ("ready_first", "weight_fifo", "in_order")

    @property
    def training_order(self) -> Order | None:
        """In which order the training task gets samples, if not first ready, first claimed."""
        if self.kind == "weight_fifo":
            return Order.by_version(self.version_tag, freshest=False)
        if self.kind == "windowed" and self.freshest_first:
            return Order.by_version(self.version_tag, freshest=True)
        return None

    def version_of(self, tags: Mapping[str, Any]) -> int | None:
        """The version of a sample, if it has one."""
        version = tags.get(self.version_tag)
        return version if type(version) is int else None

    def oldest(self, version: int) -> int | None:
        """The oldest version of a sample that may be trained at ``version``; None: any may."""
        return version - self.max_staleness if self.kind == "windowed" else None

    def admissible(self, version: int) -> int:
        """How many prompts may have been admitted, in all, at ``version``."""
        return max(version - self.first_version + self.max_staleness + 1, 0) * self.batch


def _refuse_unknown(given: Mapping[str, Any], names: Sequence[str]) -> None:
    kinds = get_args(PolicyKind)
    if given.get("kind", kinds[0]) not in kinds:
        raise InvalidRequestError(f"flow has the kind {given['kind']!r}; there are {', '.join(kinds)}")
    for name in given:
        if name not in names:
            raise InvalidRequestError(f"flow has no {name!r}; it has {', '.join(names)}")


class Order:
    """In which order samples come: ``fifo``, ``lifo``, ``priority:<tag>`` or ``random:<seed>``."""

    __slots__ = ("argument", "kind", "text")

    def __init__(self, text: str | None) -> None:
        if text is not None and not isinstance(text, str):
            raise InvalidRequestError(f"order must be {_ORDERS}, not {text!r:.80}")
        self.text = text or "fifo"
        self.kind, colon, self.argument = self.text.partition(":")
        needs_argument = self.kind in ("priority", "random")
        if self.kind not in ("fifo", "lifo", "priority", "random") or needs_argument != bool(colon):
            raise InvalidRequestError(f"order must be {_ORDERS}, not {text!r}")
        if needs_argument and not self.argument:
            raise InvalidRequestError(f"order {text!r} lacks what comes after the colon")

    @classmethod
    @functools.lru_cache(maxsize=64)  # every claim asks for its policy's
    def by_version(cls, tag: str, *, freshest: bool) -> Self:
        """By the version of the oldest member."""
        order = cls("fifo")
        order.kind, order.argument = "freshest" if freshest else "oldest", tag
        order.text = f"{order.kind}:{tag}"
        return order

    def keys(self, ids: Sequence[str], tags: Sequence[Mapping[str, Any]]) -> NDArray[np.float64]:
        """What samples are sorted by, of which each comes by itself: the lowest key comes first, and of equal
        keys what came first (last, for ``lifo``, which has none)."""
        if self.kind == "random":
            digests = b"".join(self._digest(sample_id) for sample_id in ids)
            return (np.frombuffer(digests, ">u8") >> np.uint64(11)).astype(np.float64)
        values = [of_sample.get(self.argument) for of_sample in tags]
        missing = math.inf if self.kind == "oldest" else -math.inf
        keys = _numbers(values, missing)
        return keys if self.kind == "oldest" else -keys

    def _digest(self, sample_id: str) -> bytes:
        return hashlib.blake2b(f"{self.argument}/{sample_id}".encode(), digest_size=8).digest()

    def group_keys(self, keys: NDArray[np.float64], starts: NDArray[np.int64]) -> NDArray[np.float64]:
        """The same for groups that come by their tags, of whose members these are the keys; those of each
        group begin at one of ``starts``."""
        # By the highest priority, or by the oldest version, that a member has.
        furthest = np.maximum if self.kind == "freshest" else np.minimum
        found: NDArray[np.float64] = furthest.reduceat(keys, starts) if len(starts) else keys
        return found


def _number(value: Any, otherwise: float) -> float:
    return value if isinstance(value, (int, float)) and value == value else otherwise


def _numbers(values: list[Any], otherwise: float) -> NDArray[np.float64]:
    """The same for many, as far as 64 bits go."""
    if set(map(type, values)) <= _SIMPLE_NUMBERS:
        with contextlib.suppress(OverflowError):
            numbers = np.array(values, np.float64)
            numbers[np.isnan(numbers)] = otherwise
            return numbers
    return np.array([_bounded(_number(value, otherwise)) for value in values], np.float64)


def _bounded(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


class TokenCounts:
    """How many tokens samples have, infinitely many where :func:`tokens_of` raises."""

    @staticmethod
    def keys(ids: Sequence[str], tags: Sequence[Mapping[str, Any]]) -> NDArray[np.float64]:
        """The number of each."""
        lengths = [of_sample.get(LENGTH_TAG) for of_sample in tags]
        known = [length if type(length) is int and length >= 0 else math.inf for length in lengths]
        return _numbers(known, math.inf)


def tokens_of(sample_id: str, tags: Mapping[str, Any]) -> int:
    """How many tokens a sample has by its tag ``input_lengths``."""
    length = tags.get(LENGTH_TAG)
    if type(length) is not int or length < 0:
        raise InvalidRequestError(
            f"a claim with max_tokens counts the tag {LENGTH_TAG!r}, and that of sample {sample_id!r} is "
            f"{length!r}"
        )
    return length
