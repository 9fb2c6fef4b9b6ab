"""A slow, obvious, correct data plane for the conformance suite's own tests: dictionaries and one lock.

Every step is a small method, so that a deliberately broken adapter is this one with one method replaced.
It shares no code with the engines: it is a second reading of the contract.
"""

from __future__ import annotations

import copy
import math
import operator
import random
import re
import threading
import time
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase

from rlplane.errors import (
    CapacityError,
    CapacityTimeoutError,
    ClaimTimeoutError,
    ClientClosedError,
    InvalidRequestError,
    MissingDataError,
    UnknownFieldError,
    UnknownPartitionError,
    UnknownTaskError,
    UnsupportedValueError,
)
from rlplane.interfaces import DataPlaneClient, KVBatchMeta, PartitionStatus

OPERATORS = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "in": lambda value, options: value in options,
    "not in": lambda value, options: value not in options,
}


@dataclass
class Row:
    """One sample's value of one field, and when the field was first written."""

    value: Any
    kind: str  # "dense", "nested" or "object"
    ready_at: int = 0


@dataclass
class Sample:
    """One sample."""

    born_at: int
    group: Any = None
    rows: dict[str, Row] = field(default_factory=dict)
    tags: dict[str, Any] = field(default_factory=dict)
    claimed_by: set[str] = field(default_factory=set)
    holders: dict[str, object] = field(default_factory=dict)  # who has not finished its claim, by task
    claimed_at: dict[str, int] = field(default_factory=dict)
    given_back_at: dict[str, int] = field(default_factory=dict)
    born: float = field(default_factory=time.monotonic)


@dataclass
class Claim:
    """A claim that waits; ``granted`` is set when it has been served."""

    task: str
    required: list[str]
    batch_size: int
    where: dict[str, Any]
    max_tokens: int | None = None
    owner: object = None
    granted: list[str] | None = None


@dataclass
class Flow:
    """The state of a partition."""

    fields: list[str]
    num_samples: int
    tasks: list[str]
    group_size: int | None
    enums: dict[str, list[str]]
    produces: dict[str, list[str]] = field(default_factory=dict)
    written: int = 0
    samples: dict[str, Sample] = field(default_factory=dict)
    ever_written: set[str] = field(default_factory=set)
    warned: set[str] = field(default_factory=set)
    waiting: list[Claim] = field(default_factory=list)


@dataclass
class Store:
    """The state of a plane, shared by its clients."""

    storage_capacity: int
    global_segment_size: int
    allow_pickle: bool
    changed: threading.Condition = field(default_factory=lambda: threading.Condition(threading.RLock()))
    flows: dict[str, Flow] = field(default_factory=dict)
    clock: int = 0


class ReferenceClient(DataPlaneClient):
    """The contract, word by word."""

    # What this second reading of the contract leaves out, and refuses.
    limitations = frozenset(
        {
            "append_samples",
            "finish_claims",
            "finish_partition",
            "flow",
            "order",
            "ranks",
            "reuse",
            "short_groups",
        }
    )

    def refuse(self, beyond: dict[str, Any]) -> None:
        for name in beyond:
            raise self._unsupported(name)

    def __init__(self, store: Store) -> None:
        self.store = store
        self.closed = False
        self.wrote: dict[str, set[str]] = {}

    # Registering.

    def register_partition(
        self,
        partition_id: str,
        fields: list[str],
        num_samples: int,
        consumer_tasks: list[str],
        grpo_group_size: int | None = None,
        enums: dict[str, list[str]] | None = None,
        produces: dict[str, list[str]] | None = None,
        **beyond: Any,
    ) -> None:
        self.check_open()
        self.refuse(beyond)
        enums = enums or {}
        for names in ([partition_id], fields, consumer_tasks, *enums.values()):
            if len(set(names)) < len(names) or "" in names:
                raise InvalidRequestError(f"a name is empty or there twice in {names}")
        if num_samples < 0 or (grpo_group_size is not None and grpo_group_size < 1):
            raise InvalidRequestError(f"num_samples={num_samples}, grpo_group_size={grpo_group_size}")
        if set(enums) - set(fields):
            raise InvalidRequestError(f"enums for {set(enums) - set(fields)}, which are not declared")
        flow = Flow(list(fields), num_samples, list(consumer_tasks), grpo_group_size, copy.deepcopy(enums))
        flow.produces = copy.deepcopy(produces or {})
        with self.store.changed:
            old = self.store.flows.get(partition_id)
            if old is not None:
                self.carry_over(old, flow)
            self.store.flows[partition_id] = flow
            self.serve(flow)

    def carry_over(self, old: Flow, new: Flow) -> None:
        new.samples, new.ever_written, new.warned = old.samples, old.ever_written, old.warned
        new.waiting = old.waiting
        for sample in new.samples.values():
            sample.claimed_by &= set(new.tasks)

    # Writing.

    def put_samples(
        self,
        sample_ids: list[str],
        partition_id: str,
        fields: TensorDict | None = None,
        tags: list[dict[str, Any]] | None = None,
        *,
        timeout_s: float = 60.0,
        must_exist: bool = False,
    ) -> KVBatchMeta:
        self.check_open()
        flow = self.flow(partition_id)
        self.check_ids(sample_ids)
        rows = {} if fields is None else self.columns(flow, sample_ids, fields)
        if tags is not None and len(tags) != len(sample_ids):
            raise InvalidRequestError(f"{len(tags)} tags for {len(sample_ids)} samples")
        own_tags = [self.own(tag, "tags") for tag in tags or [{} for _ in sample_ids]]
        if flow.group_size and any("group_size" in tag for tag in own_tags):
            raise self._unsupported("group_size")
        with self.store.changed:
            if must_exist:
                self.check_exists(flow, sample_ids)
            self.check_groups(flow, sample_ids, own_tags)
            self.wait_for_room(flow, sample_ids, rows, timeout_s)
            self.warn_undeclared(partition_id, flow, rows)
            self.commit(flow, sample_ids, rows, own_tags)
            if rows:
                self.release_written(flow, sample_ids)
            self.wrote.setdefault(partition_id, set()).update(sample_ids)
            self.serve(flow)
        lengths = [tag.get("input_lengths") for tag in own_tags]
        return KVBatchMeta(
            partition_id,
            None,
            sample_ids,
            fields=None if fields is None else list(rows),
            sequence_lengths=None if None in lengths or not lengths else lengths,
            tags=own_tags,
        )

    def release_written(self, flow: Flow, sample_ids: list[str]) -> None:
        for sample in map(flow.samples.__getitem__, sample_ids):
            for task in [task for task, holder in sample.holders.items() if holder is self]:
                if sample.rows.keys() >= set(flow.produces.get(task, ())):
                    del sample.holders[task]

    def check_exists(self, flow: Flow, sample_ids: list[str]) -> None:
        gone = [sample_id for sample_id in sample_ids if sample_id not in flow.samples]
        if gone:
            raise MissingDataError(f"no samples {gone} ({len(gone)} of {len(sample_ids)})")

    def check_ids(self, sample_ids: list[str]) -> None:
        for sample_id in sample_ids:
            if not isinstance(sample_id, str) or not sample_id:
                raise InvalidRequestError(f"sample id {sample_id!r} is not a non-empty string")
        if len(set(sample_ids)) < len(sample_ids):
            raise InvalidRequestError(f"duplicate ids in {sample_ids}")

    def columns(self, flow: Flow, sample_ids: list[str], fields: TensorDict) -> dict[str, list[Row]]:
        if list(fields.batch_size[:1]) != [len(sample_ids)]:
            raise InvalidRequestError(f"{fields.batch_size} rows for {len(sample_ids)} ids")
        self.shared: dict[Any, torch.Tensor] = {}
        columns = {name: self.rows(name, fields.get(name)) for name in fields.keys()}  # noqa: SIM118
        for name, rows in columns.items():
            if len(rows) != len(sample_ids):
                raise InvalidRequestError(f"{len(rows)} rows of {name!r} for {len(sample_ids)} ids")
            for row in rows if name in flow.enums else ():
                if row.value not in flow.enums[name]:
                    raise InvalidRequestError(f"{row.value!r} is not in the enum of {name!r}")
        return columns

    def rows(self, name: str, column: Any) -> list[Row]:
        if isinstance(column, NonTensorStack):
            return [Row(self.own(column[i].data, name), "object") for i in range(len(column))]
        if isinstance(column, NonTensorData):
            if not isinstance(column.data, (list, tuple)) and not np.ndim(column.data):
                raise InvalidRequestError(f"{name!r} holds one object: give a NonTensorStack, one per row")
            return [Row(self.own(value, name), "object") for value in column.data]
        if isinstance(column, TensorDictBase):
            return [Row(self.own(row.to_dict(), name), "object") for row in column.unbind(0)]
        rows = [row.detach().cpu().clone() for row in column.unbind()]
        return [Row(row, "nested" if column.is_nested else "dense") for row in rows]

    def own(self, value: Any, name: str) -> Any:
        """A copy of an object that may travel."""
        if value is None or type(value) in (bool, int, float, str, bytes):
            return value
        if isinstance(value, (list, tuple)):
            return [self.own(item, name) for item in value]
        if type(value) is dict and all(type(key) is str for key in value):
            return {key: self.own(item, name) for key, item in value.items()}
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, np.ndarray) and value.dtype != object:
            return value.copy()
        if isinstance(value, torch.Tensor) and name != "tags":
            same = (value.data_ptr(), value.dtype, value.shape, value.stride())
            return self.shared.setdefault(same, value.detach().clone())
        if self.store.allow_pickle:
            return copy.deepcopy(value)
        raise UnsupportedValueError(f"{name!r} holds a {type(value).__name__}")

    def check_groups(self, flow: Flow, sample_ids: list[str], tags: list[dict[str, Any]]) -> None:
        if flow.group_size is not None:
            for sample_id, tag in zip(sample_ids, tags, strict=True):
                if sample_id not in flow.samples and self.group(sample_id, tag) is None:
                    raise InvalidRequestError(f"{sample_id!r} has no group")

    def group(self, sample_id: str, tag: dict[str, Any]) -> Any:
        match = re.fullmatch(r"(.*)_g\d+", sample_id, re.DOTALL)
        return tag.get("group", match and match[1])

    def wait_for_room(
        self, flow: Flow, sample_ids: list[str], rows: dict[str, list[Row]], timeout_s: float
    ) -> None:
        need = sum(_size(row) for column in rows.values() for row in column)
        if len(sample_ids) > self.store.storage_capacity or need > self.store.global_segment_size:
            raise CapacityError(f"{len(sample_ids)} samples of {need} bytes can never fit")

        def fits() -> bool:
            flows = self.store.flows.values()
            new = sum(sample_id not in flow.samples for sample_id in sample_ids)
            live = sum(len(other.samples) for other in flows)
            held = sum(_bytes(other) for other in flows)
            bound = self.store.global_segment_size
            if new and held:
                bound -= self.kept_for_live()
            return (not new or live + new <= self.store.storage_capacity) and (
                not need or held + need <= bound
            )

        if not self.store.changed.wait_for(fits, timeout_s):
            raise CapacityTimeoutError(f"no room for {len(sample_ids)} samples after {timeout_s} s")

    def kept_for_live(self) -> int:
        return self.store.global_segment_size // 10

    def warn_undeclared(self, partition_id: str, flow: Flow, rows: dict[str, list[Row]]) -> None:
        for name in rows.keys() - flow.fields - flow.warned:
            flow.warned.add(name)
            warnings.warn(f"field {name!r} of {partition_id!r} is not declared", stacklevel=4)

    def commit(
        self,
        flow: Flow,
        sample_ids: list[str],
        rows: dict[str, list[Row]],
        tags: list[dict[str, Any]],
    ) -> None:
        if sample_ids:
            flow.ever_written |= rows.keys()
        for index, sample_id in enumerate(sample_ids):
            self.store.clock += 1
            sample = flow.samples.get(sample_id)
            if sample is None:
                sample = Sample(self.store.clock, self.group(sample_id, tags[index]))
                flow.samples[sample_id] = sample
                flow.written += 1
            for name, column in rows.items():
                row, before = column[index], sample.rows.get(name)
                row.ready_at = self.store.clock if before is None else before.ready_at
                sample.rows[name] = row
            self.merge_tags(sample, tags[index])

    def merge_tags(self, sample: Sample, tags: dict[str, Any]) -> None:
        sample.tags.update(tags)

    # Claiming.

    def claim_meta(
        self,
        partition_id: str,
        task_name: str,
        required_fields: list[str],
        batch_size: int,
        dp_rank: int | None = None,
        blocking: bool = True,
        timeout_s: float | None = 60.0,
        *,
        where: Any = None,
        max_tokens: int | None = None,
        **beyond: Any,
    ) -> KVBatchMeta:
        self.check_open()
        self.refuse(beyond)
        flow = self.flow(partition_id)
        self.check_claim(flow, task_name, required_fields, batch_size, where or {})
        if max_tokens is not None and max_tokens < 1:
            raise InvalidRequestError(f"max_tokens={max_tokens}")
        conditions = copy.deepcopy(dict(where or {}))
        claim = Claim(task_name, list(required_fields), batch_size, conditions, max_tokens, self)
        with self.store.changed:
            if blocking:
                self.wait_for_batch(partition_id, claim, math.inf if timeout_s is None else timeout_s)
            else:
                self.grant(flow, claim, self.fitting(flow, claim)[0])
            assert claim.granted is not None
            tags = [copy.deepcopy(flow.samples[sample_id].tags) for sample_id in claim.granted]
        lengths = [tag["input_lengths"] for tag in tags if tag.get("input_lengths") is not None]
        return KVBatchMeta(
            partition_id,
            task_name,
            claim.granted,
            fields=claim.required,
            sequence_lengths=lengths if len(lengths) == len(tags) else None,
            tags=tags,
        )

    def check_claim(
        self, flow: Flow, task: str, required: list[str], batch_size: int, where: dict[str, Any]
    ) -> None:
        self.check_task(flow, task)
        for name in required:
            if name not in flow.fields and name not in flow.ever_written:
                raise UnknownFieldError(f"field {name!r} is neither declared nor ever written")
        if batch_size < 1 or batch_size % (flow.group_size or 1):
            raise InvalidRequestError(f"batch_size {batch_size} with groups of {flow.group_size}")
        for condition in where.values():
            if isinstance(condition, dict) and condition.keys() - OPERATORS.keys():
                raise InvalidRequestError(f"unknown operator in {condition}")

    def wait_for_batch(self, partition_id: str, claim: Claim, timeout_s: float) -> None:
        flow = self.flow(partition_id)
        self.fitting(flow, claim)
        flow.waiting.append(claim)
        self.serve(flow)
        self.store.changed.wait_for(lambda: claim.granted is not None, timeout_s)
        if claim.granted is None:
            flow = self.flow(partition_id)
            flow.waiting.remove(claim)
            ready = len(self.ready(flow, claim))
            raise ClaimTimeoutError(f"{ready} of {claim.batch_size} ready after {timeout_s} s", ready)

    def serve(self, flow: Flow) -> None:
        """Give what is ready to the claims that wait, the oldest first."""
        while any(self.try_to_serve(flow, claim) for claim in list(flow.waiting)):
            pass
        self.store.changed.notify_all()

    def try_to_serve(self, flow: Flow, claim: Claim) -> bool:
        fitting, is_full = self.fitting(flow, claim)
        if not is_full and not self.is_tail(flow, claim, self.ready(flow, claim)):
            return False
        self.grant(flow, claim, fitting)
        flow.waiting.remove(claim)
        return True

    def fitting(self, flow: Flow, claim: Claim) -> tuple[list[str], bool]:
        """The first of what is ready that fits, and whether there is no room for another."""
        ready = self.ready(flow, claim)
        if claim.max_tokens is None:
            return ready[: claim.batch_size], len(ready) >= claim.batch_size
        taken: list[str] = []
        size = flow.group_size or 1
        for at in range(0, min(len(ready), claim.batch_size), size):
            unit = ready[at : at + size]
            lengths: list[Any] = [flow.samples[sample_id].tags.get("input_lengths") for sample_id in unit]
            if None in lengths or sum(lengths) > claim.max_tokens:
                if taken:
                    return taken, True
                raise InvalidRequestError(f"{unit} have {lengths} tokens")
            before = sum(flow.samples[sample_id].tags["input_lengths"] for sample_id in taken)
            if before + sum(lengths) > claim.max_tokens:
                return taken, True
            taken += unit
        return taken, len(taken) == claim.batch_size

    def grant(self, flow: Flow, claim: Claim, sample_ids: list[str]) -> None:
        for sample_id in sample_ids:
            sample = flow.samples[sample_id]
            sample.claimed_by.add(claim.task)
            sample.holders[claim.task] = claim.owner
            self.store.clock += 1
            sample.claimed_at[claim.task] = self.store.clock
        claim.granted = sample_ids

    def is_tail(self, flow: Flow, claim: Claim, ready: list[str]) -> bool:
        remaining = [
            sample_id
            for sample_id, sample in flow.samples.items()
            if claim.task not in sample.claimed_by and self.matches(flow, sample, claim.where)
        ]
        if flow.group_size is not None:
            groups = [flow.samples[sample_id].group for sample_id in remaining]
            remaining = [group for group in groups if groups.count(group) >= flow.group_size]
        return flow.written == flow.num_samples and bool(ready) and len(ready) == len(remaining)

    def ready(self, flow: Flow, claim: Claim) -> list[str]:
        """What the claim could take, in order; with groups, whole groups one after the other."""
        found = {
            sample_id: self.place(sample, claim.task, claim.required)
            for sample_id, sample in flow.samples.items()
            if claim.task not in sample.claimed_by
            and all(name in sample.rows for name in claim.required)
            and self.matches(flow, sample, claim.where)
        }
        ordered = sorted(found, key=found.__getitem__)
        if flow.group_size is None:
            return ordered
        groups: dict[Any, list[str]] = {}
        for sample_id in ordered:
            groups.setdefault(flow.samples[sample_id].group, []).append(sample_id)
        whole = [members for members in groups.values() if len(members) >= flow.group_size]
        whole.sort(key=lambda members: found[members[-1]])
        return [sample_id for members in whole for sample_id in members]

    def place(self, sample: Sample, task: str, required: list[str]) -> tuple[int, int]:
        ready_at = max((sample.rows[name].ready_at for name in required), default=sample.born_at)
        given_back_at = sample.given_back_at.get(task, 0)
        return (0, -given_back_at) if given_back_at > ready_at else (1, ready_at)

    def matches(self, flow: Flow, sample: Sample, where: dict[str, Any]) -> bool:
        if flow.group_size is None or not where:
            return self.holds(sample.tags, where)
        members = [other for other in flow.samples.values() if other.group == sample.group]
        return all(self.holds(member.tags, where) for member in members)

    def holds(self, tags: dict[str, Any], where: dict[str, Any]) -> bool:
        for name, condition in where.items():
            if name not in tags:
                return False
            if not isinstance(condition, dict):
                condition = {"==": condition}
            for op, value in condition.items():
                try:
                    if not OPERATORS[op](tags[name], value):
                        return False
                except TypeError:
                    return False
        return True

    # Reading.

    def get_data(self, meta: KVBatchMeta, select_fields: list[str] | None = None) -> TensorDict:
        self.check_open()
        fields = meta.fields if select_fields is None else select_fields
        if fields is None:
            raise InvalidRequestError("neither select_fields nor meta.fields names a field")
        return self.get_samples(meta.sample_ids, meta.partition_id, fields)

    def get_samples(self, sample_ids: list[str], partition_id: str, select_fields: list[str]) -> TensorDict:
        self.check_open()
        if not select_fields:
            raise InvalidRequestError("select_fields is empty")
        with self.store.changed:
            samples = self.flow(partition_id).samples
            self.check_there(samples, sample_ids, select_fields)
            rows: dict[str, list[Any]] = {
                name: [self.leaf(samples[sample_id].rows, name) for sample_id in sample_ids]
                for name in select_fields
            }
            columns = {name: self.join(name, column) for name, column in rows.items() if column}
        return TensorDict(columns, [len(sample_ids)])

    def check_there(self, samples: dict[str, Sample], sample_ids: list[str], fields: list[str]) -> None:
        missing = [sample_id for sample_id in sample_ids if sample_id not in samples]
        if missing:
            raise MissingDataError(f"no samples {missing[:5]}")
        for name in fields:
            without = [
                sample_id for sample_id in sample_ids if self.leaf(samples[sample_id].rows, name) is None
            ]
            if without:
                raise MissingDataError(f"field {name!r} is not written for {without[:5]}")

    def leaf(self, rows: dict[str, Row], name: str) -> Row | None:
        """The row of a field, or what is at a path of keys and positions in it; None if there is nothing."""
        if name in rows:
            return rows[name]
        field, _, path = name.partition(".")
        value: Any = rows[field].value if path and field in rows else None
        for key in path.split("."):
            try:
                value = value[int(key)] if isinstance(value, list) else value[key]
            except (IndexError, KeyError, TypeError, ValueError):
                return None
        return Row(value, "object")

    def join(self, name: str, rows: list[Row]) -> Any:
        if rows[0].kind == "object":
            return NonTensorStack(*[NonTensorData(self.copy_out(row.value)) for row in rows])
        dtypes = {str(row.value.dtype) for row in rows}
        if len(dtypes) > 1:
            raise InvalidRequestError(f"rows of {name!r} have the dtypes {sorted(dtypes)}")
        if {row.kind for row in rows} == {"dense"} and len({row.value.shape for row in rows}) == 1:
            return self.stack([row.value for row in rows])
        if len({row.value.shape[1:] for row in rows}) > 1:
            return torch.nested.as_nested_tensor([row.value for row in rows])
        return torch.nested.nested_tensor([row.value for row in rows], layout=torch.jagged)

    def stack(self, rows: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(rows)

    def copy_out(self, value: Any) -> Any:
        return copy.deepcopy(value)

    # The rest.

    def check_consumption_status(self, partition_id: str, task_names: list[str]) -> bool:
        self.check_open()
        with self.store.changed:
            flow = self.flow(partition_id)
            for task in task_names:
                self.check_task(flow, task)
            if not flow.written and not flow.samples:
                return False
            return all(set(task_names) <= sample.claimed_by for sample in flow.samples.values())

    def clear_samples(self, sample_ids: list[str] | None, partition_id: str) -> None:
        self.check_open()
        with self.store.changed:
            flow = self.flow(partition_id)
            if sample_ids is None:
                sample_ids = self.mine_or_all(partition_id, flow)
                if not sample_ids:
                    warnings.warn(f"there is nothing to clear in {partition_id!r}", stacklevel=2)
            for sample_id in sample_ids:
                flow.samples.pop(sample_id, None)
            self.serve(flow)

    def mine_or_all(self, partition_id: str, flow: Flow) -> list[str]:
        wrote = self.wrote.get(partition_id)
        return [sample_id for sample_id in flow.samples if wrote is None or sample_id in wrote]

    def unclaim(self, meta: KVBatchMeta) -> None:
        self.check_open()
        if meta.task_name is None:
            raise InvalidRequestError("the meta has no task")
        with self.store.changed:
            flow = self.flow(meta.partition_id)
            self.give_back(flow, meta.task_name, meta.sample_ids)

    def give_back(self, flow: Flow, task: str, sample_ids: Iterable[str]) -> None:
        samples = [flow.samples[i] for i in sample_ids if i in flow.samples]
        mine = [sample for sample in samples if sample.holders.get(task) is self]
        for sample in sorted(mine, key=lambda sample: -sample.claimed_at[task]):
            del sample.holders[task]
            sample.claimed_by.discard(task)
            self.store.clock += 1
            sample.given_back_at[task] = self.store.clock
        self.serve(flow)

    def drop_partition(self, partition_id: str) -> None:
        self.check_open()
        with self.store.changed:
            self.flow(partition_id)
            del self.store.flows[partition_id]

    def close(self) -> None:
        if not self.closed:
            with self.store.changed:
                for flow in self.store.flows.values():
                    for task in flow.tasks:
                        self.give_back(flow, task, list(flow.samples))
        self.closed = True

    def list_sample_ids(self, partition_id: str) -> list[str]:
        self.check_open()
        with self.store.changed:
            return list(self.flow(partition_id).samples)

    def peek_meta(
        self,
        partition_id: str,
        *,
        where: Any = None,
        fields: list[str] | None = None,
        limit: int | None = None,
        order: str | None = None,
    ) -> KVBatchMeta:
        self.check_open()
        kind, colon, argument = (order or "fifo").partition(":")
        has_argument = kind in ("priority", "random")
        if (
            kind not in ("fifo", "lifo", "priority", "random")
            or has_argument != bool(argument)
            or (limit or 0) < 0
        ):
            raise InvalidRequestError(f"order={order!r}, limit={limit}")
        if bool(colon) != has_argument:
            raise InvalidRequestError(f"order={order!r}")
        with self.store.changed:
            flow = self.flow(partition_id)
            for name in fields or ():
                if name not in flow.fields and name not in flow.ever_written:
                    raise UnknownFieldError(f"field {name!r} is neither declared nor ever written")
            found = {
                sample_id: sample
                for sample_id, sample in flow.samples.items()
                if self.holds(sample.tags, where or {}) and sample.rows.keys() >= set(fields or ())
            }
            ids = list(found)
            if kind == "lifo":
                ids.reverse()
            elif kind == "priority":
                ids.sort(key=lambda i: -found[i].tags.get(argument, float("-inf")))
            elif kind == "random":
                random.Random(argument).shuffle(ids)
            tags = [copy.deepcopy(found[sample_id].tags) for sample_id in ids[:limit]]
        return KVBatchMeta(partition_id, None, ids[:limit], fields=fields, tags=tags)

    def close_group(self, partition_id: str, group: Any, **how: Any) -> int:
        raise self._unsupported("close_group")

    def count(self, partition_id: str, where: Any = None) -> int:
        return self.peek_meta(partition_id, where=where).size

    def partition_status(self, partition_id: str) -> PartitionStatus:
        self.check_open()
        with self.store.changed:
            flow = self.flow(partition_id)
            samples = flow.samples.values()
            names = dict.fromkeys([*flow.fields, *(name for sample in samples for name in sample.rows)])
            status = {
                "partition_id": partition_id,
                "num_samples": flow.num_samples,
                "samples": len(samples),
                "written": flow.written,
                "bytes": _bytes(flow),
                "oldest_age_s": time.monotonic() - min(s.born for s in samples) if samples else None,
                "grpo_group_size": flow.group_size,
                "fields": {
                    name: {
                        "declared": name in flow.fields,
                        "produced": sum(name in sample.rows for sample in samples),
                    }
                    for name in names
                },
                "tasks": {
                    task: {
                        "claimed": sum(task in sample.claimed_by for sample in samples),
                        "unclaimed": sum(task not in sample.claimed_by for sample in samples),
                        "waiting": sum(claim.task == task for claim in flow.waiting),
                    }
                    for task in flow.tasks
                },
            }
            return cast("PartitionStatus", status)  # without the keys that no check reads

    def check_open(self) -> None:
        if self.closed:
            raise ClientClosedError("the client is closed")

    def flow(self, partition_id: str) -> Flow:
        if partition_id not in self.store.flows:
            raise UnknownPartitionError(f"partition {partition_id!r} was never registered")
        return self.store.flows[partition_id]

    def check_task(self, flow: Flow, task: str) -> None:
        if task not in flow.tasks:
            raise UnknownTaskError(f"task {task!r} is not one of {flow.tasks}")


class ReferencePlanes:
    """The factory for the suite: every client gets a plane of its own, and workers share it."""

    def __init__(self, adapter: type[ReferenceClient] = ReferenceClient, time_scale: float = 1.0) -> None:
        self.adapter = adapter
        self.time_scale = time_scale

    def client(
        self,
        *,
        storage_capacity: int = 1 << 30,
        global_segment_size: int = 1 << 30,
        local_buffer_size: int = 0,
        allow_pickle: bool = False,
    ) -> ReferenceClient:
        return self.adapter(Store(storage_capacity, global_segment_size, allow_pickle))

    def worker(self, client: ReferenceClient) -> ReferenceClient:
        return self.adapter(client.store)


def make_client() -> ReferenceClient:
    """The plainest factory: a function without arguments."""
    return ReferencePlanes().client()


def _bytes(flow: Flow) -> int:
    rows = [row for sample in flow.samples.values() for row in sample.rows.values()]
    shared = {id(tensor): tensor.nbytes for row in rows for tensor in _tensors(row.value)}
    return sum(shared.values()) + sum(
        0 if isinstance(row.value, torch.Tensor) else _size(row) for row in rows
    )


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [tensor for item in inner for tensor in _tensors(item)]


def _size(row: Row) -> int:
    return row.value.nbytes if isinstance(row.value, torch.Tensor) else len(repr(row.value))
