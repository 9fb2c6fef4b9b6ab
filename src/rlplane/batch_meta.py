"""``KVBatchMeta``: what travels between stages instead of tensors, and the groups in it.

Trainers import both from ``rlplane`` or ``rlplane.interfaces``.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

from rlplane.errors import InvalidRequestError

__all__ = ["KVBatchMeta", "SampleGroup"]


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
        meta.sequence_lengths = None
        if tags and "input_lengths" in tags[0]:
            lengths = [tag.get("input_lengths") for tag in tags]
            meta.sequence_lengths = lengths if None not in lengths else None  # type: ignore[assignment]
        meta.extra_info = {}
        return meta

    def _check_length(self, what: str, got: int) -> None:
        if got != len(self.sample_ids):
            raise InvalidRequestError(
                f"{what} has {got} entries for {len(self.sample_ids)} sample_ids; they align 1:1"
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

    def groups(self) -> list[SampleGroup]:
        """The groups of the batch, in order: how many members each has, should have had, and why not.

        Members share the tag ``group``, else the part of their id before ``_g<number>``; a sample with
        neither is a group of its own.
        """
        rows: dict[tuple[str, Any], list[int]] = {}
        for row, sample_id in enumerate(self.sample_ids):
            name = self.tags[row].get("group") if self.tags else None
            if name is None:
                prompt, mark, number = sample_id.rpartition("_g")
                name = prompt if mark and number.isdecimal() else sample_id
            rows.setdefault((type(name).__name__, name), []).append(row)
        found = []
        for (_, name), places in rows.items():
            short = (self.tags[places[0]].get("short_group") if self.tags else None) or {}
            expected = short.get("expected", len(places))
            found.append(SampleGroup(name, self.subset(places), expected, short.get("reason")))
        return found

    def with_fields(self, field_names: Sequence[str]) -> Self:
        """Return the same samples with ``field_names`` added to the ``fields``, each once.

        For a meta of other fields alone, use ``dataclasses.replace(meta, fields=[...])``.
        """
        return replace(
            self, fields=list(dict.fromkeys([*(self.fields or ()), *_names("fields", field_names)]))
        )

    def concat(self, *others: KVBatchMeta) -> Self:
        """Return this meta's rows followed by those of ``others``, all of one partition.

        ``sequence_lengths`` and ``tags`` are kept when every meta with rows has them. ``fields``,
        ``task_name`` and ``extra_info`` are this meta's.
        """
        metas: list[KVBatchMeta] = [self, *others]
        for other in others:
            if other.partition_id != self.partition_id:
                raise InvalidRequestError(
                    f"cannot concat {other.partition_id!r} to {self.partition_id!r}: partition_ids must match"
                )
        filled = [meta for meta in metas if meta.size] or metas[:1]
        lengths = [meta.sequence_lengths for meta in filled]
        tags = [meta.tags for meta in filled]
        return self._replace(
            sample_ids=[sample_id for meta in metas for sample_id in meta.sample_ids],
            sequence_lengths=None
            if any(part is None for part in lengths)
            else [n for part in lengths for n in part or ()],
            tags=None if any(part is None for part in tags) else [tag for part in tags for tag in part or ()],
        )


@dataclass(frozen=True)
class SampleGroup:
    """A group in a batch. ``reason`` says why it was closed with fewer members than ``expected``."""

    name: str | int
    meta: KVBatchMeta
    expected: int
    reason: str | None = None

    @property
    def size(self) -> int:
        """How many members it has here."""
        return self.meta.size


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
