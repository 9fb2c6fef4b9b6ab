"""What both local clients do before and after they talk to their plane: check, lay out, build the meta."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict

from rlplane.adapters.local.blocks import Source, prepare
from rlplane.errors import InvalidRequestError
from rlplane.index import Batch
from rlplane.interfaces import KVBatchMeta
from rlplane.objects import open_tags, plain_tags
from rlplane.rules import PartitionSpec, check_ids, check_names

__all__ = [
    "Write",
    "as_batch",
    "checked_fields",
    "fields_to_read",
    "lay_out",
    "meta_of_batch",
    "warn_undeclared",
]


@dataclass(frozen=True, slots=True)
class Write:
    """A put that has been checked: ids, sealed tags, and columns ready to be copied."""

    partition_id: str
    ids: list[str]
    tags: list[dict[str, Any]] | None
    sources: list[Source]
    fields: list[str] | None

    def meta(self, *, allow_pickle: bool) -> KVBatchMeta:
        """The receipt that ``put_samples`` returns."""
        tags = None if self.tags is None else open_tags(self.tags, allow_pickle=allow_pickle)
        return KVBatchMeta._adopt(self.partition_id, None, list(self.ids), self.fields, tags)


def lay_out(
    spec: PartitionSpec,
    sample_ids: Sequence[str],
    fields: TensorDict | None,
    tags: Sequence[dict[str, Any]] | None,
    *,
    allow_pickle: bool,
) -> Write:
    """Check the arguments of a put against each other and lay its columns out."""
    ids = check_ids(sample_ids)
    sealed = None
    if tags is not None:
        if len(tags) != len(ids):
            raise InvalidRequestError(f"{len(tags)} tags for {len(ids)} sample_ids; it needs one per sample")
        sealed = plain_tags(tags, allow_pickle=allow_pickle)
    sources = [] if fields is None else prepare(fields, len(ids), spec.enums, allow_pickle=allow_pickle)
    names = None if fields is None else [source.name for source in sources]
    return Write(spec.partition_id, ids, sealed, sources, names)


def meta_of_batch(
    partition_id: str, task_name: str, fields: Sequence[str], batch: Batch, *, allow_pickle: bool
) -> KVBatchMeta:
    """The receipt that ``claim_meta`` returns."""
    tags = open_tags(batch.tags, allow_pickle=allow_pickle)
    return KVBatchMeta._adopt(partition_id, task_name, batch.ids, list(fields), tags)


def fields_to_read(meta: KVBatchMeta, select_fields: Sequence[str] | None) -> list[str]:
    """The fields that ``get_data`` reads: those named, else the meta's, never silently all."""
    chosen = select_fields if select_fields is not None else meta.fields
    if chosen is None:
        raise InvalidRequestError(
            "get_data needs select_fields, or a meta that names its fields; it never reads all unasked"
        )
    return checked_fields(chosen)


def checked_fields(select_fields: Sequence[str]) -> list[str]:
    """At least one field, each once."""
    names = check_names("select_fields", select_fields)
    if not names:
        raise InvalidRequestError("select_fields is empty; name the fields to read")
    return names


def as_batch(columns: dict[str, Any], count: int) -> TensorDict:
    """The columns of a read as a TensorDict.

    Its constructor asks every nested tensor for its shape, which takes longer than reading it. What it would
    check, that every column has ``count`` rows, is known here.
    """
    return TensorDict._new_unsafe(columns, batch_size=torch.Size([count]))


def warn_undeclared(spec: PartitionSpec, names: Sequence[str], warned: set[tuple[str, str]]) -> None:
    """Warn once per partition and field about fields that nobody declared."""
    for name in names:
        if name not in spec.fields and (spec.partition_id, name) not in warned:
            warned.add((spec.partition_id, name))
            warnings.warn(
                f"field {name!r} of partition {spec.partition_id!r} was not declared; "
                f"declared are {spec.fields}",
                UserWarning,
                stacklevel=4,
            )
