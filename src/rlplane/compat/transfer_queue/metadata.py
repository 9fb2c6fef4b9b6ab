"""TransferQueue's two receipts: ``KVBatchMeta`` by key, and ``BatchMeta`` by index."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

from rlplane.batch_meta import _own, _same

logger = logging.getLogger(__name__)

Schema = dict[str, dict[str, Any]]
_SHAPES = "per_sample_shapes"
_NO_TENSOR = {"dtype": None, "shape": None, "is_nested": False, "is_non_tensor": True}


@dataclass
class KVBatchMeta:
    """Keys of a partition, with their tags and the fields that all of them have."""

    keys: list[str] = field(default_factory=list)
    tags: list[dict[str, Any]] = field(default_factory=list)
    partition_id: str | None = None
    fields: list[str] | None = None
    extra_info: dict[str, Any] | None = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.tags) != len(self.keys):
            raise ValueError(f"{len(self.tags)} tags for {len(self.keys)} keys; it needs one per key")
        _refuse_duplicates("keys", self.keys)
        _refuse_duplicates("fields", self.fields or [])
        self.tags = [_own(tag) for tag in self.tags]
        self.extra_info = _own(self.extra_info)

    @property
    def size(self) -> int:
        """The number of keys."""
        return len(self.keys)

    def __len__(self) -> int:
        return len(self.keys)

    def __str__(self) -> str:
        return f"KVBatchMeta(size={self.size}, field_names={self.fields}, extra_info={self.extra_info})"

    def _of(self, rows: Sequence[int]) -> KVBatchMeta:
        keys, tags = [self.keys[row] for row in rows], [self.tags[row] for row in rows]
        return KVBatchMeta(keys, tags, self.partition_id, self.fields, self.extra_info)

    def select_keys(self, keys_to_select: list[str]) -> KVBatchMeta:
        """These keys only, in this order. ``RuntimeError`` if one is not in the batch."""
        _refuse_duplicates("keys_to_select", keys_to_select)
        rows = {key: row for row, key in enumerate(self.keys)}
        unknown = [key for key in keys_to_select if key not in rows]
        if unknown:
            raise RuntimeError(f"the batch does not have the keys {unknown[:5]} ({len(unknown)} are missing)")
        return self._of([rows[key] for key in keys_to_select])

    def reorder(self, indexes: list[int]) -> None:
        """Put the rows into this order, in place."""
        _check_permutation(indexes, self.size)
        self.keys = [self.keys[row] for row in indexes]
        self.tags = [self.tags[row] for row in indexes]

    def chunk(self, chunks: int) -> list[KVBatchMeta]:
        """Split into parts of nearly equal size, the larger ones first."""
        return [self._of(rows) for rows in _parts(self.size, chunks)]

    @classmethod
    def concat(cls, data: list[KVBatchMeta]) -> KVBatchMeta:
        """The rows of all, which must be of one partition and have the same fields."""
        data = [meta for meta in data or () if meta is not None and meta.size]
        if not data:
            return cls()
        first = data[0]
        for meta in data:
            if meta.fields is not None and set(meta.fields) != set(first.fields or ()):
                raise ValueError(f"fields do not match: {meta.fields} and {first.fields}")
            if meta.partition_id != first.partition_id:
                raise ValueError(f"partitions do not match: {meta.partition_id!r} and {first.partition_id!r}")
        keys = list(chain.from_iterable(meta.keys for meta in data))
        tags = list(chain.from_iterable(meta.tags for meta in data))
        info = _merged_info([meta.extra_info or {} for meta in data])
        return cls(keys, tags, first.partition_id, first.fields, info or None)


@dataclass(frozen=True)
class SampleView:
    """One row of a :class:`BatchMeta`; what it shows cannot be changed."""

    global_index: int
    partition_id: str
    production_status: int
    custom_meta: Mapping[str, Any]
    fields: Mapping[str, Mapping[str, Any]]


class _Samples:
    """The rows of a :class:`BatchMeta`, made when they are looked at."""

    def __init__(self, meta: BatchMeta) -> None:
        self._meta = meta

    def __len__(self) -> int:
        return self._meta.size

    def __getitem__(self, row: int) -> SampleView:
        meta = self._meta
        fields = {}
        for name, known in meta.field_schema.items():
            own = {key: value for key, value in known.items() if key != _SHAPES}
            if known.get(_SHAPES) is not None:
                own["shape"] = known[_SHAPES][row]
            fields[name] = MappingProxyType(own)
        return SampleView(
            meta.global_indexes[row],
            meta.partition_ids[row],
            int(meta.production_status[row]),
            MappingProxyType(meta.custom_meta[row]),
            MappingProxyType(fields),
        )

    def __iter__(self) -> Iterator[SampleView]:
        return (self[row] for row in range(len(self)))


class BatchMeta:
    """Samples by index, with what is known of their fields. What the low-level client speaks.

    ``_custom_backend_meta`` belongs to whoever made the meta: ours has each sample's id there, under ``_id``.
    """

    def __init__(
        self,
        global_indexes: Sequence[int] = (),
        partition_ids: Sequence[str] = (),
        field_schema: Mapping[str, Mapping[str, Any]] | None = None,
        production_status: NDArray[np.int8] | Sequence[int] | None = None,
        extra_info: Mapping[str, Any] | None = None,
        custom_meta: Sequence[Mapping[str, Any]] | None = None,
        _custom_backend_meta: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        count = len(global_indexes)
        self.global_indexes = list(global_indexes)
        self.partition_ids = list(partition_ids)
        self.field_schema: Schema = {name: dict(known) for name, known in (field_schema or {}).items()}
        given = np.zeros(count, np.int8) if production_status is None else production_status
        self.production_status: NDArray[np.int8] = np.array(given, np.int8)
        self.extra_info = dict(extra_info or {})
        self.custom_meta = [dict(tag) for tag in custom_meta] if custom_meta else [{} for _ in range(count)]
        backend = _custom_backend_meta
        self._custom_backend_meta = (
            [dict(each) for each in backend] if backend else [{} for _ in range(count)]
        )
        lengths: dict[str, Sequence[Any] | NDArray[np.int8] | None] = {
            "partition_ids": self.partition_ids,
            "production_status": self.production_status,
            "custom_meta": self.custom_meta,
            "_custom_backend_meta": self._custom_backend_meta,
        }
        shapes = {f"{_SHAPES} of {name!r}": known.get(_SHAPES) for name, known in self.field_schema.items()}
        for what, values in (lengths | shapes).items():
            if values is not None and len(values) != count:
                raise ValueError(f"{what} has {len(values)} entries for {count} global_indexes")

    @classmethod
    def empty(cls, extra_info: dict[str, Any] | None = None) -> BatchMeta:
        """A batch without samples."""
        return cls(extra_info=extra_info)

    @property
    def size(self) -> int:
        """The number of samples."""
        return len(self.global_indexes)

    @property
    def field_names(self) -> list[str]:
        """The names of the fields, sorted."""
        return sorted(self.field_schema)

    @property
    def is_ready(self) -> bool:
        """Whether there are samples, and all of them have all fields."""
        return self.size > 0 and bool((self.production_status == 1).all())

    @property
    def samples(self) -> _Samples:
        """The batch row by row."""
        return _Samples(self)

    def __len__(self) -> int:
        return self.size

    def __str__(self) -> str:
        return (
            f"BatchMeta(size={self.size}, field_names={self.field_names}, is_ready={self.is_ready}, "
            f"global_indexes={self.global_indexes}, extra_info={self.extra_info})"
        )

    def _known(self, field_name: str) -> dict[str, Any]:
        if field_name not in self.field_schema:
            raise KeyError(f"field {field_name!r} is not one of {self.field_names}")
        return self.field_schema[field_name]

    def get_dtypes(self, field_name: str) -> list[Any]:
        """The dtype of the field, once per sample."""
        return [self._known(field_name).get("dtype")] * self.size

    def get_shapes(self, field_name: str) -> list[Any]:
        """The shape of each sample's value, as far as it is known."""
        known = self._known(field_name)
        shapes = known.get(_SHAPES)
        return [known.get("shape")] * self.size if shapes is None else list(shapes)

    # What the user adds: to the batch, and to each sample (tags, by another name)

    def get_extra_info(self, key: str, default: Any = None) -> Any:
        """A value that was set for the whole batch."""
        return self.extra_info.get(key, default)

    def set_extra_info(self, key: str, value: Any) -> None:
        """Set a value for the whole batch."""
        self.extra_info[key] = value

    def get_all_extra_info(self) -> dict[str, Any]:
        """A copy of all values of the batch."""
        return copy.deepcopy(self.extra_info)

    def update_extra_info(self, info_dict: dict[str, Any]) -> None:
        """Set several values for the whole batch."""
        self.extra_info.update(info_dict)

    def remove_extra_info(self, key: str) -> Any:
        """Take a value of the batch away and return it."""
        return self.extra_info.pop(key, None)

    def clear_extra_info(self) -> None:
        """Take all values of the batch away."""
        self.extra_info.clear()

    def has_extra_info(self, key: str) -> bool:
        """Whether the batch has that value."""
        return key in self.extra_info

    def get_all_custom_meta(self) -> list[dict[str, Any]]:
        """A copy of the tags, one dict per sample."""
        return copy.deepcopy(self.custom_meta)

    def update_custom_meta(self, custom_meta: list[dict[str, Any]] | None) -> None:
        """Merge these tags, one dict per sample, into those that are here."""
        if custom_meta is None:
            return
        if len(custom_meta) != self.size:
            raise ValueError(f"custom_meta has {len(custom_meta)} entries for {self.size} samples")
        for mine, new in zip(self.custom_meta, custom_meta, strict=True):
            mine.update(new)

    def clear_custom_meta(self) -> None:
        """Forget the tags, here only."""
        self.custom_meta = [{} for _ in range(self.size)]

    # Rows and fields

    def add_fields(self, tensor_dict: TensorDict, set_all_ready: bool = True) -> BatchMeta:
        """Add the fields of ``tensor_dict`` to the schema, in place."""
        count = tensor_dict.batch_size[0]
        if count == 0:
            logger.warning("add_fields was given no rows; nothing was added")
            return self
        if count != self.size:
            raise ValueError(f"add_fields was given {count} rows for {self.size} samples")
        self.field_schema |= field_schema_of(tensor_dict)
        if set_all_ready:
            self.production_status[:] = 1
        return self

    def select_samples(self, sample_indices: list[int]) -> BatchMeta:
        """The rows at these positions, in this order."""
        wrong = [row for row in sample_indices if not 0 <= row < self.size]
        if wrong:
            raise ValueError(f"row {wrong[0]} of a batch with {self.size} samples")
        return self._of(sample_indices)

    def _of(self, rows: Sequence[int]) -> BatchMeta:
        schema = copy.deepcopy(self.field_schema)
        for known in schema.values():
            if known.get(_SHAPES) is not None:
                known[_SHAPES] = [known[_SHAPES][row] for row in rows]
        return BatchMeta(
            [self.global_indexes[row] for row in rows],
            [self.partition_ids[row] for row in rows],
            schema,
            self.production_status[list(rows)],
            self.extra_info,
            [copy.deepcopy(self.custom_meta[row]) for row in rows],
            [copy.deepcopy(self._custom_backend_meta[row]) for row in rows],
        )

    def select_fields(self, field_names: list[str]) -> BatchMeta:
        """The same samples with these fields, as far as the batch has them."""
        chosen = self.copy()
        chosen.field_schema = {
            name: chosen.field_schema[name] for name in field_names if name in chosen.field_schema
        }
        chosen._custom_backend_meta = [
            {name: value for name, value in each.items() if name.startswith("_") or name in field_names}
            for each in chosen._custom_backend_meta
        ]
        return chosen

    def copy(self) -> BatchMeta:
        """A copy that shares nothing."""
        return copy.deepcopy(self)

    def __getitem__(self, item: int | slice) -> BatchMeta:
        if isinstance(item, slice):
            return self._of(range(*item.indices(self.size)))
        if not isinstance(item, (int, np.integer)):
            raise TypeError(f"a batch is indexed by an integer or a slice, not by {item!r}")
        if not -self.size <= item < self.size:
            raise IndexError(f"row {item} of a batch with {self.size} samples")
        return self._of([int(item) % self.size])

    def chunk(self, chunks: int) -> list[BatchMeta]:
        """Split into parts of nearly equal size, the larger ones first."""
        return [self._of(rows) for rows in _parts(self.size, chunks)]

    def chunk_by_partition(self) -> list[BatchMeta]:
        """Split into parts that have one partition each."""
        rows: dict[str, list[int]] = {}
        for row, partition_id in enumerate(self.partition_ids):
            rows.setdefault(partition_id, []).append(row)
        return [self._of(each) for each in rows.values()]

    def union(self, other: BatchMeta | None) -> BatchMeta:
        """The same samples with the fields of both; what both have is taken from ``other``."""
        if not other:
            return self.copy()
        if not self.size:
            return other.copy()
        for name in ("global_indexes", "partition_ids"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                raise ValueError(f"{name} do not match: {mine} and {theirs}")
        result, other = self.copy(), other.copy()
        result.field_schema |= other.field_schema
        # Each side may know only some of the fields: ready is what both call ready.
        result.production_status &= other.production_status
        result.extra_info |= other.extra_info
        for mine, theirs in (
            (result.custom_meta, other.custom_meta),
            (result._custom_backend_meta, other._custom_backend_meta),
        ):
            mine[:] = [{**left, **right} for left, right in zip(mine, theirs, strict=True)]
        return result

    @classmethod
    def concat(cls, data: list[BatchMeta], validate: bool = True) -> BatchMeta:
        """The rows of all. With ``validate``, they must have the same fields, of the same dtypes."""
        data = [meta for meta in data or () if meta]
        if not data:
            return cls.empty()
        names = data[0].field_names
        if validate:
            for meta in data:
                if meta.field_names != names:
                    raise ValueError(f"field_names mismatch: {meta.field_names} and {names}")
            for name in names:
                dtypes = [meta.field_schema[name].get("dtype") for meta in data]
                if any(dtype != dtypes[0] for dtype in dtypes):
                    raise ValueError(f"dtype mismatch of field {name!r}: {dtypes}")
        return cls(
            list(chain.from_iterable(meta.global_indexes for meta in data)),
            list(chain.from_iterable(meta.partition_ids for meta in data)),
            {name: _joined_schema(name, data) for name in data[0].field_schema},
            np.concatenate([meta.production_status for meta in data]),
            _merged_info([meta.extra_info for meta in data]),
            list(chain.from_iterable(meta.custom_meta for meta in data)),
            list(chain.from_iterable(meta._custom_backend_meta for meta in data)),
        )

    def reorder(self, indices: list[int]) -> None:
        """Put the rows into this order, in place."""
        _check_permutation(indices, self.size)
        self.__dict__.update(self._of(indices).__dict__)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        # What comes out of Ray's object store cannot be written to.
        self.production_status = np.array(self.production_status)


def field_schema_of(data: TensorDict) -> Schema:
    """What TransferQueue notes of each field: dtype, shape of a row, whether it is nested or no tensor."""
    count = data.batch_size[0]
    schema: Schema = {}
    if not count:
        return schema
    for name, value in data.items():
        if not isinstance(value, torch.Tensor):
            known: dict[str, Any] = dict(_NO_TENSOR)
        elif value.is_nested:
            shapes = [tuple(row.shape) for row in value.unbind()]
            known = {"dtype": value.dtype, "shape": torch.Size(shapes[0]), "is_nested": True}
            known |= {"is_non_tensor": False, _SHAPES: shapes}
        else:
            known = {"dtype": value.dtype, "shape": value.shape[1:] or torch.Size([1])}
            known |= {"is_nested": False, "is_non_tensor": False}
        rows = len(known.get(_SHAPES) or value)
        if rows != count:
            raise ValueError(f"field {name!r} has {rows} rows, and the batch has {count}")
        schema[name] = known
    return schema


def _joined_schema(name: str, data: Sequence[BatchMeta]) -> dict[str, Any]:
    parts = [(meta.size, meta.field_schema.get(name, {})) for meta in data]
    first = parts[0][1]
    is_nested = any(known.get("is_nested", False) for _, known in parts)
    joined = {
        "dtype": first.get("dtype"),
        "shape": None if is_nested else first.get("shape"),
        "is_nested": is_nested,
        "is_non_tensor": first.get("is_non_tensor", False),
    }
    if is_nested or any(known.get(_SHAPES) for _, known in parts):
        joined[_SHAPES] = list(
            chain.from_iterable(known.get(_SHAPES) or [known.get("shape")] * size for size, known in parts)
        )
    return joined


def _merged_info(infos: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """All values of several batches; ``ValueError`` where two of them contradict each other."""
    merged: dict[str, Any] = {}
    for info in infos:
        for key, value in info.items():
            known = merged.setdefault(key, value)
            if type(known) is not type(value) or not _same(known, value):
                raise ValueError(f"extra_info {key!r} has conflicting values: {known!r} and {value!r}")
    return merged


def _parts(size: int, chunks: int) -> Iterator[range]:
    base, larger = divmod(size, chunks)
    start = 0
    for number in range(chunks):
        stop = start + base + (number < larger)
        yield range(start, stop)
        start = stop


def _check_permutation(indexes: Sequence[int], size: int) -> None:
    if sorted(indexes) != list(range(size)):
        raise ValueError(
            f"an order of {size} rows names each of 0 to {size - 1} once; got {list(indexes)!r:.80}"
        )


def _refuse_duplicates(what: str, names: Sequence[str]) -> None:
    if len(set(names)) != len(names):
        twice = next(name for name in names if list(names).count(name) > 1)
        raise ValueError(f"{what} names {twice!r} twice")
