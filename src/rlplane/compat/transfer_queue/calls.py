"""What each of TransferQueue's calls does on our plane, as steps that threads and event loops perform alike.

A key is a sample id. A sample that was put without a key gets an id that begins with :data:`UNNAMED`, and is
not listed. An index is the number that a partition gives to each of its samples, and never gives again.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import NonTensorData, NonTensorStack, TensorDict

from rlplane.adapters import many
from rlplane.adapters.calls import PlaneCalls
from rlplane.adapters.link import Link
from rlplane.adapters.steps import Call, ask
from rlplane.compat.transfer_queue.metadata import BatchMeta, KVBatchMeta
from rlplane.errors import (
    ClaimTimeoutError,
    InvalidRequestError,
    MissingDataError,
    NotFoundError,
    UnknownPartitionError,
)
from rlplane.interfaces import DEFAULT_TIMEOUT_S
from rlplane.service import protocol as wire
from rlplane.service.parts import in_parts
from rlplane.storage.objects import open_tags

HIDDEN = "__transfer_queue__"
"""The partition that holds the config and the sampler's memory; it is not listed."""
UNNAMED = "__index__/"
_ATTEMPTS = 8

DataParser = Callable[[dict[str, Any]], Any]


class StorageKeyNotFoundError(MissingDataError, ValueError):
    """A key that was asked for is not there (any more)."""


@dataclass
class Inspected:
    """Samples of a partition that are there."""

    partition_id: str
    ids: list[str]
    numbers: list[int]
    tags: list[dict[str, Any]]
    fields: dict[str, NDArray[np.bool_]]
    tasks: dict[str, NDArray[np.bool_]]
    kinds: dict[str, list[tuple[str, str, Sequence[int]]]]

    @property
    def common_fields(self) -> list[str]:
        """The fields that all of them have, sorted."""
        return sorted(name for name, has in self.fields.items() if len(has) and has.all())

    def has(self, names: Sequence[str]) -> NDArray[np.bool_]:
        """By sample, whether it has all these fields."""
        result = np.ones(len(self.ids), bool)
        for name in names:
            result &= self.fields.get(name, False)
        return result

    def meta(self, names: Sequence[str]) -> BatchMeta:
        """The batch with these fields, as far as somebody has written them."""
        schema = {name: _schema(self.kinds[name]) for name in names if self.kinds.get(name)}
        return BatchMeta(
            self.numbers,
            [self.partition_id] * len(self.ids),
            schema,
            (self.has([name for name in names if name in schema]) & bool(schema)).astype(np.int8),
            None,
            self.tags,
            [{"_id": sample_id} for sample_id in self.ids],
        )


def _schema(kinds: Sequence[tuple[str, str, Sequence[int]]]) -> dict[str, Any]:
    kind, dtype, shape = kinds[0]
    is_tensor = kind in ("dense", "jagged", "ragged")
    is_nested = kind in ("jagged", "ragged") or (is_tensor and len(kinds) > 1)
    return {
        "dtype": getattr(torch, dtype.removeprefix("torch.")) if is_tensor else None,
        "shape": torch.Size(shape or [1]) if is_tensor and not is_nested else None,
        "is_nested": is_nested,
        "is_non_tensor": not is_tensor,
    }


# Looking


def inspect(
    plane: PlaneCalls,
    link: Link,
    partition_id: str,
    ids: list[str] | None,
    with_kinds: bool = False,
    numbers: list[int] | None = None,
) -> Call[Inspected]:
    """What is known of these samples, named by ids or by numbers (None: of all), leaving out those that are
    not there. All are looked at at one moment; of very many that are named, some at a time."""
    parts = []
    try:
        for request in _inspections(partition_id, ids, with_kinds, numbers):
            answer = yield from ask(request, wire.Done)
            parts.append(answer.value)
    except UnknownPartitionError:
        parts = []
    return _joined(partition_id, parts)


def _inspections(
    partition_id: str, ids: list[str] | None, with_kinds: bool, numbers: list[int] | None
) -> Iterator[wire.Inspect]:
    if numbers is not None:
        for some in in_parts(numbers):
            yield wire.Inspect(partition_id, None, with_kinds, some)
    elif ids is None:
        yield wire.Inspect(partition_id, None, with_kinds)
    else:
        for part in in_parts(list(dict.fromkeys(ids))):
            yield wire.Inspect(partition_id, part, with_kinds)


def _joined(partition_id: str, parts: Sequence[dict[str, Any]]) -> Inspected:
    """What several answers have told, as if it had been one."""
    ids, numbers, tags = (
        [each for part in parts for each in part[what]] for what in ("ids", "numbers", "tags")
    )
    masks: dict[str, dict[str, NDArray[np.bool_]]] = {"fields": {}, "tasks": {}}
    for what, by_name in masks.items():
        for name in dict.fromkeys(name for part in parts for name in part[what]):
            # One that came meanwhile is not in those before.
            of_parts = [part[what].get(name, bytes(len(part["ids"]))) for part in parts]
            by_name[name] = np.frombuffer(b"".join(of_parts), bool)
    kinds: dict[str, list[tuple[str, str, Sequence[int]]]] = {}
    for part in parts:
        for name, found in part.get("kinds", {}).items():
            known = kinds.setdefault(name, [])
            known += [kind for kind in found if kind not in known]
    tags = open_tags(tags, allow_pickle=True)
    return Inspected(partition_id, ids, numbers, tags, masks["fields"], masks["tasks"], kinds)


def list_partitions(plane: PlaneCalls, link: Link) -> Call[list[str]]:
    """The partitions, without our own."""
    names = (yield from ask(wire.ServiceStatus(), wire.Done)).value["partitions"]
    return [name for name in names if name != HIDDEN]


def list_keys(
    plane: PlaneCalls, link: Link, partition_id: str | None = None
) -> Call[dict[str, dict[str, dict[str, Any]]]]:
    """By partition, all keys with their tags; of one partition, or of all."""
    names = (yield from list_partitions(plane, link)) if partition_id is None else [partition_id]
    listed = {}
    for name in names:
        try:
            seen = yield from ask(wire.Peek(name), wire.Claimed)
        except UnknownPartitionError:
            continue  # it was never written to, or was cleared
        tags = open_tags(seen.tags, allow_pickle=True)
        listed[name] = {
            key: tag for key, tag in zip(seen.ids, tags, strict=True) if not key.startswith(UNNAMED)
        }
    return listed


# Writing


def write(
    plane: PlaneCalls,
    link: Link,
    ids: list[str],
    partition_id: str,
    fields: TensorDict | None,
    tags: list[dict[str, Any]] | None,
) -> Call[None]:
    """Put samples into a partition that is made by it, if need be."""
    names = [] if fields is None else [str(name) for name in fields.keys()]  # noqa: SIM118
    for _ in range(_ATTEMPTS):
        yield from plane.declare(link, partition_id, names)
        try:
            yield from plane.put(
                link, ids, partition_id, fields, tags, timeout_s=DEFAULT_TIMEOUT_S, must_exist=False
            )
            return
        except UnknownPartitionError:
            link.specs.pop(partition_id, None)  # it was cleared by somebody else meanwhile
    raise InvalidRequestError(f"partition {partition_id!r} is cleared again and again")


def put_key(
    plane: PlaneCalls,
    link: Link,
    key: str,
    partition_id: str,
    fields: TensorDict | dict[str, Any] | None = None,
    tag: dict[str, Any] | None = None,
    data_parser: DataParser | None = None,
) -> Call[KVBatchMeta]:
    """Write fields, a tag or both for one key; a dict of fields holds the values of its one row.

    Returns:
        The key with its whole tag, and with all fields that it has now.
    """
    tags = None if tag is None else [tag]
    return (yield from put_keys(plane, link, [key], partition_id, _one_row(fields), tags, data_parser))


def _one_row(fields: TensorDict | dict[str, Any] | None) -> TensorDict | None:
    """What ``kv_put`` was given for its one key, as a batch of one."""
    if fields is None or isinstance(fields, TensorDict):
        return fields
    if not isinstance(fields, dict):
        raise ValueError(f"fields must be a dict or a TensorDict, not {type(fields).__name__}")
    columns: dict[str, Any] = {}
    for name, value in fields.items():
        if not isinstance(value, torch.Tensor):
            columns[name] = NonTensorStack(value)
        elif value.is_nested:
            raise ValueError(f"field {name!r} is a nested tensor, which has several rows: use kv_batch_put")
        else:
            columns[name] = value.unsqueeze(0)
    return TensorDict(columns, batch_size=[1])


def put_keys(
    plane: PlaneCalls,
    link: Link,
    keys: list[str],
    partition_id: str,
    fields: TensorDict | None = None,
    tags: list[dict[str, Any]] | None = None,
    data_parser: DataParser | None = None,
) -> Call[KVBatchMeta]:
    """Write fields, tags or both for several keys, all at once. Tags are merged into those that are there.

    ``data_parser`` is called with a dict of the columns before they are written; it may replace values there.

    Returns:
        The keys with their whole tags, and with the fields that all of them have now.

    Raises:
        ValueError: Neither fields nor tags, or another number of them than of keys.
    """
    if fields is None and tags is None:
        raise ValueError("a put needs fields, tags or both; it was given neither")
    if fields is not None and fields.batch_size[0] != len(keys):
        raise ValueError(
            f"{len(keys)} keys for fields with batch_size {fields.batch_size[0]}; they must match"
        )
    if tags is not None and len(tags) != len(keys):
        raise ValueError(f"{len(keys)} keys for {len(tags)} tags; it needs one per key")
    keys = _checked(keys)
    if fields is not None:
        fields = parsed(fields, data_parser)
    # A key without tags or fields exists all the same.
    yield from write(plane, link, keys, partition_id, fields, tags)
    seen = yield from inspect(plane, link, partition_id, keys)
    tags_of = dict(zip(seen.ids, seen.tags, strict=True))
    return KVBatchMeta(keys, [tags_of.get(key, {}) for key in keys], partition_id, seen.common_fields)


def parsed(fields: TensorDict, data_parser: DataParser | None) -> TensorDict:
    """The columns after the user's function has replaced values in them."""
    if data_parser is None:
        return fields
    columns = {}
    for name, value in fields.items():
        is_list = not isinstance(value, torch.Tensor) or value.is_nested
        columns[name] = (
            list(value.tolist() if isinstance(value, NonTensorStack) else value) if is_list else value
        )
    names = set(columns)
    data_parser(columns)
    if set(columns) != names:
        raise ValueError(f"data_parser must keep the fields {sorted(names)}; it left {sorted(columns)}")
    for name, value in columns.items():
        if len(value) != len(fields):
            raise ValueError(f"data_parser left {len(value)} values of {name!r} for {len(fields)} samples")
        if isinstance(value, list):
            columns[name] = _packed(value)
    return TensorDict(columns, batch_size=fields.batch_size)


def _packed(rows: list[Any]) -> Any:
    if all(isinstance(row, torch.Tensor) for row in rows):
        try:
            return torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        except (RuntimeError, TypeError):
            return torch.nested.as_nested_tensor(rows, layout=torch.strided)
    return NonTensorStack(*rows)


def clear_keys(plane: PlaneCalls, link: Link, keys: list[str] | str, partition_id: str) -> Call[None]:
    """Clear keys; those that are not there are ignored."""
    keys = _checked(keys)
    try:
        yield from many.clear(partition_id, keys)
    except UnknownPartitionError:
        pass


# Reading


def get_keys(
    plane: PlaneCalls,
    link: Link,
    keys: list[str] | str,
    partition_id: str,
    select_fields: list[str] | str | None = None,
) -> Call[TensorDict]:
    """Read keys: the fields named, or those that all of the keys have.

    A field that none of them has is left out, as TransferQueue does it. One that only some of them have, and
    a key that is not there, are errors: TransferQueue leaves those out too.

    Raises:
        StorageKeyNotFoundError: A ``KeyError`` and a ``ValueError``: a key is not there.
        ValueError: No field is ready, or one is ready for some of the keys only.
    """
    keys = _checked(keys)
    chosen = [select_fields] if isinstance(select_fields, str) else select_fields
    if chosen:
        try:
            return (yield from read(plane, link, keys, partition_id, chosen))
        except NotFoundError:
            pass  # see what is there
    seen = yield from inspect(plane, link, partition_id, keys)
    missing = sorted(set(keys).difference(seen.ids))
    if missing:
        raise StorageKeyNotFoundError(
            f"not found in partition {partition_id!r}: {missing[:3]} ({len(missing)} of {len(keys)} keys)"
        )
    if chosen is not None:
        chosen = [name for name in chosen if name in seen.fields and seen.fields[name].any()]
        short = [name for name in chosen if not seen.fields[name].all()]
        if short:
            count = int((~seen.fields[short[0]]).sum())
            raise ValueError(f"field {short[0]!r} is not ready: {count} of {len(keys)} keys do not have it")
    names = seen.common_fields if chosen is None else chosen
    if not names:
        raise ValueError(f"no field is ready in all of the {len(keys)} keys of partition {partition_id!r}")
    return (yield from read(plane, link, keys, partition_id, names))


def get_by_meta(
    plane: PlaneCalls, link: Link, meta: KVBatchMeta, select_fields: list[str] | str | None = None
) -> Call[TensorDict]:
    """Read what a put returned, or some of its fields."""
    if meta.partition_id is None:
        raise ValueError("the meta does not say of which partition it is: set its partition_id")
    chosen = [select_fields] if isinstance(select_fields, str) else select_fields
    for name in chosen or ():
        if name not in (meta.fields or ()):
            raise ValueError(
                f"select_fields has {name!r}, which was not found in the fields of the meta, {meta.fields}"
            )
    fields = meta.fields if chosen is None else chosen
    return (yield from get_keys(plane, link, meta.keys, meta.partition_id, fields))


def read(
    plane: PlaneCalls, link: Link, ids: list[str], partition_id: str, names: Sequence[str]
) -> Call[TensorDict]:
    """Read columns in the form in which TransferQueue returns them: rows of tensors are nested."""
    data = yield from plane.get(link, ids, partition_id, list(names))
    for name in names:
        value = data.get(name)
        if isinstance(value, torch.Tensor) and not value.is_nested and value.dim() > 1:
            data._tensordict[name] = _as_jagged(value)
        elif isinstance(value, NonTensorData):
            data._tensordict[name] = NonTensorStack(*value.tolist())
    return data


def _as_jagged(value: torch.Tensor) -> torch.Tensor:
    """Rows of one length as a nested tensor over the same memory."""
    count, length = value.shape[:2]
    offsets = (
        torch.arange(0, (count + 1) * length, length) if length else torch.zeros(count + 1, dtype=torch.int64)
    )
    return torch.nested.nested_tensor_from_jagged(
        value.flatten(0, 1), offsets, min_seqlen=length, max_seqlen=length
    )


# By index


def retrieve_meta(
    plane: PlaneCalls, link: Link, keys: list[str] | str, partition_id: str, create: bool = False
) -> Call[BatchMeta]:
    """The batch of these keys, made first if asked for; keys that are not there are left out."""
    keys = _checked(keys)
    if create:
        yield from write(plane, link, keys, partition_id, None, [{} for _ in keys])
    seen = yield from inspect(plane, link, partition_id, keys, with_kinds=True)
    return seen.meta(seen.common_fields)


def retrieve_keys(
    plane: PlaneCalls, link: Link, global_indexes: list[int] | int, partition_id: str
) -> Call[list[str]]:
    """The keys of these indexes."""
    wanted = [global_indexes] if isinstance(global_indexes, int) else global_indexes
    seen = yield from inspect(plane, link, partition_id, None, numbers=wanted)
    keys = dict(zip(seen.numbers, seen.ids, strict=True))
    missing = [index for index in wanted if keys.get(index, UNNAMED).startswith(UNNAMED)]
    if missing:
        raise RuntimeError(f"the indexes {missing[:5]} of partition {partition_id!r} have no keys")
    return [keys[index] for index in wanted]


def insert(
    plane: PlaneCalls, link: Link, partition_id: str, names: Sequence[str], count: int
) -> Call[BatchMeta]:
    """Make samples without keys, for which ``names`` will be written."""
    yield from plane.declare(link, partition_id, names)
    batch = uuid.uuid4().hex
    ids = [f"{UNNAMED}{batch}/{row}" for row in range(count)]
    yield from write(plane, link, ids, partition_id, None, [{} for _ in ids])
    seen = yield from inspect(plane, link, partition_id, ids)
    meta = seen.meta([])
    blank = {"dtype": None, "shape": None, "is_nested": False, "is_non_tensor": False}
    meta.field_schema = {name: dict(blank) for name in names}
    return meta


def put_batch(
    plane: PlaneCalls,
    link: Link,
    data: TensorDict,
    metadata: BatchMeta | None = None,
    partition_id: str | None = None,
    data_parser: DataParser | None = None,
) -> Call[BatchMeta]:
    """Write rows for the samples of a batch, or for new ones."""
    if metadata is None:
        if partition_id is None:
            raise ValueError("a put without metadata needs the partition_id")
        metadata = yield from insert(plane, link, partition_id, list(data.keys()), data.batch_size[0])
    if not metadata:
        raise ValueError("the metadata of a put has no samples")
    ids, home = yield from _ids_of(plane, link, metadata)
    yield from write(plane, link, ids, home, parsed(data, data_parser), metadata.custom_meta)
    return metadata.add_fields(data)


def get_batch(plane: PlaneCalls, link: Link, metadata: BatchMeta) -> Call[TensorDict]:
    """Read the fields of a batch."""
    if not metadata or not metadata.field_names:
        return TensorDict({}, batch_size=0)
    ids, home = yield from _ids_of(plane, link, metadata)
    try:
        return (yield from read(plane, link, ids, home, metadata.field_names))
    except MissingDataError as error:
        raise StorageKeyNotFoundError(str(error)) from None


def set_custom_meta(plane: PlaneCalls, link: Link, metadata: BatchMeta) -> Call[None]:
    """Merge the tags of a batch into those of its samples."""
    for part in metadata.chunk_by_partition():
        ids, home = yield from _ids_of(plane, link, part)
        yield from write(plane, link, ids, home, None, part.custom_meta)


def clear_batch(plane: PlaneCalls, link: Link, metadata: BatchMeta) -> Call[None]:
    """Clear the samples of a batch."""
    for part in metadata.chunk_by_partition():
        ids, home = yield from _ids_of(plane, link, part)
        yield from clear_keys(plane, link, ids, home)


def _ids_of(plane: PlaneCalls, link: Link, metadata: BatchMeta) -> Call[tuple[list[str], str]]:
    (home, *others) = dict.fromkeys(metadata.partition_ids)
    if others:
        raise ValueError(f"a batch of one partition is needed; this one has samples of {[home, *others]}")
    ids: list[str] = [each["_id"] for each in metadata._custom_backend_meta if "_id" in each]
    if len(ids) < metadata.size:  # somebody made the batch by hand
        seen = yield from inspect(plane, link, home, None, numbers=metadata.global_indexes)
        known = dict(zip(seen.numbers, seen.ids, strict=True))
        missing = [index for index in metadata.global_indexes if index not in known]
        if missing:
            raise StorageKeyNotFoundError(f"partition {home!r} does not have the indexes {missing[:5]}")
        ids = [known[index] for index in metadata.global_indexes]
    return ids, home


def clear_partition(plane: PlaneCalls, link: Link, partition_id: str) -> Call[None]:
    """Forget a partition and all that is in it."""
    try:
        yield from plane.drop(link, partition_id)
    except UnknownPartitionError:
        pass


# Who has consumed what


def take_first(
    plane: PlaneCalls,
    link: Link,
    partition_id: str,
    names: list[str],
    batch_size: int,
    task_name: str,
    timeout_s: float,
) -> Call[BatchMeta]:
    """Consume the first samples that are ready; an empty batch if there are too few in time."""
    yield from plane.declare(link, partition_id, names, [task_name])
    request = wire.ClaimRequest(partition_id, task_name, names, batch_size, True, timeout_s)
    try:
        claimed = yield from ask(request, wire.Claimed, waits_s=timeout_s)
    except ClaimTimeoutError:
        return BatchMeta.empty()
    # To be given is to have consumed, also for a process that ends: so it is in TransferQueue.
    yield from many.unclaim(partition_id, task_name, claimed.ids, is_finished=True)
    seen = yield from inspect(plane, link, partition_id, claimed.ids, with_kinds=True)
    return seen.meta(names)


def consumption(
    plane: PlaneCalls, link: Link, task_name: str, partition_id: str
) -> Call[tuple[torch.Tensor | None, torch.Tensor | None]]:
    """The indexes of a partition, and for each whether the task has consumed it; None without a partition."""
    if partition_id not in (yield from list_partitions(plane, link)):
        return None, None
    yield from plane.declare(link, partition_id, [], [task_name])
    seen = yield from inspect(plane, link, partition_id, None)
    return torch.tensor(seen.numbers), torch.from_numpy(seen.tasks[task_name].astype(np.int8))


def production(
    plane: PlaneCalls, link: Link, data_fields: list[str], partition_id: str
) -> Call[tuple[torch.Tensor | None, torch.Tensor | None]]:
    """The indexes of a partition, and for each which of the fields it has; None where a field is unknown."""
    seen = yield from inspect(plane, link, partition_id, None)
    if not data_fields or not seen.fields.keys() >= set(data_fields):
        return None, None
    has = np.stack([seen.fields[name] for name in data_fields], 1).astype(np.int8)
    return torch.tensor(seen.numbers), torch.from_numpy(has)


def is_consumed(plane: PlaneCalls, link: Link, task_name: str, partition_id: str) -> Call[bool]:
    """Whether the task has consumed all that is there, and there is something."""
    _, status = yield from consumption(plane, link, task_name, partition_id)
    return status is not None and status.numel() > 0 and bool((status == 1).all())


def is_produced(plane: PlaneCalls, link: Link, data_fields: list[str], partition_id: str) -> Call[bool]:
    """Whether all samples have all these fields."""
    _, status = yield from production(plane, link, data_fields, partition_id)
    return status is not None and bool((status == 1).all())


def reset_consumption(
    plane: PlaneCalls, link: Link, partition_id: str, task_name: str | None = None
) -> Call[bool]:
    """Let a task, or every task, consume everything again."""
    try:
        _, known = yield from link.describe(partition_id)
        for task in known.tasks if task_name is None else [task_name]:
            yield from ask(wire.MarkClaimed(partition_id, task, None, False), wire.Done)
    except NotFoundError:
        pass  # nobody has consumed anything
    return True


def _checked(keys: list[str] | str) -> list[str]:
    if isinstance(keys, str):
        return [str(keys)]
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise TypeError(f"keys must be a string or a list of strings, not {keys!r:.80}")
    if not keys:
        raise ValueError("keys is empty; name at least one")
    return list(map(str, keys))  # numpy's strings among them
