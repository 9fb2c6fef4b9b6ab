"""Columns of a batch in and out of the plane, in the form that a stage computes with.

The client moves what it is given. These three functions add what every stage would otherwise repeat:
packing by sequence length on the way in, padding on the way out, and the tag ``input_lengths``, from which
a later claim knows the lengths without reading a tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

from tensordict import TensorDict

from rlplane.codec import Lengths, PadValue, as_column, materialize, pack_jagged_fields
from rlplane.errors import InvalidRequestError
from rlplane.interfaces import DEFAULT_TIMEOUT_S, DataPlaneClient, KVBatchMeta

__all__ = ["LENGTH_TAG", "kv_first_write", "read_columns", "write_columns"]

LENGTH_TAG = "input_lengths"


def kv_first_write(
    client: DataPlaneClient,
    *,
    partition_id: str,
    sample_ids: Sequence[str],
    fields: Mapping[str, Any],
    lengths: Lengths | None = None,
    tags: Sequence[Mapping[str, Any]] | None = None,
    per_token: Collection[str] | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> KVBatchMeta:
    """Write new samples, as a rollout does: fields, tags and lengths in one put.

    Args:
        client: Any data plane client.
        partition_id: A registered partition.
        sample_ids: One id per row.
        fields: Tensors, arrays or lists of ``N`` rows, by name. With ``lengths``, per-token fields may be
            padded: they travel without the padding.
        lengths: The number of tokens of each sample. Also written as the tag ``input_lengths``, so that
            claims and :func:`rlplane.shard_meta_for_dp` know it.
        tags: One mapping per sample.
        per_token: Which fields are per token; see :func:`rlplane.pack_jagged_fields`.
        timeout_s: How long to wait for room when the plane is full.

    Returns:
        A meta with the fields of this write, the tags and, given ``lengths``, the sequence lengths.

    Raises:
        ValueError: Rows, ids, lengths and tags do not fit together. Nothing was written.
        Otherwise as :meth:`DataPlaneClient.put_samples`.
    """
    ids = list(sample_ids)
    columns = _pack(fields, len(ids), lengths, per_token)
    stamped = KVBatchMeta(partition_id, None, ids, tags=None if tags is None else [dict(tag) for tag in tags])
    if lengths is not None:
        stamped.stamp_tags({LENGTH_TAG: list(lengths)})
    return client.put_samples(ids, partition_id, columns, stamped.tags, timeout_s=timeout_s)


def read_columns(
    client: DataPlaneClient,
    meta: KVBatchMeta,
    select_fields: Sequence[str] | None = None,
    *,
    layout: Literal["padded", "jagged"] = "padded",
    pad_value_dict: Mapping[str, PadValue] | None = None,
    pad_to_seqlen: int = 0,
) -> dict[str, Any]:
    """Read the samples of ``meta`` as tensors by name, in the order of the meta; objects as lists.

    ``select_fields``, else ``meta.fields``, says which. The rest is :func:`rlplane.materialize`.

    Raises:
        As :meth:`DataPlaneClient.get_data` and :func:`rlplane.materialize`.
    """
    names = None if select_fields is None else list(select_fields)
    return materialize(client.get_data(meta, names), layout, pad_value_dict, pad_to_seqlen)


def write_columns(
    client: DataPlaneClient,
    meta: KVBatchMeta,
    columns: Mapping[str, Any],
    *,
    per_token: Collection[str] | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> KVBatchMeta:
    """Write what a stage computed for the samples of ``meta``, row by row in its order.

    Per-token columns may be padded when the meta has ``sequence_lengths``: they are packed by them. On a
    meta without lengths every column is written as it is.

    Args:
        client: Any data plane client.
        meta: The samples; as claimed, or a shard of it.
        columns: Tensors, arrays or lists of ``meta.size`` rows, by name.
        per_token: Which columns are per token; see :func:`rlplane.pack_jagged_fields`.
        timeout_s: How long to wait for room when the plane is full.

    Returns:
        ``meta`` with the written columns added to its fields.

    Raises:
        ValueError: The columns do not fit the meta. Nothing was written.
        Otherwise as :meth:`DataPlaneClient.put_samples`.
    """
    packed = _pack(columns, meta.size, meta.sequence_lengths, per_token)
    client.put_samples(meta.sample_ids, meta.partition_id, packed, timeout_s=timeout_s)
    known = meta.fields or []
    return meta.with_fields([*known, *(name for name in columns if name not in known)])


def _pack(
    fields: Mapping[str, Any], size: int, lengths: Lengths | None, per_token: Collection[str] | None
) -> TensorDict:
    if not fields:
        raise InvalidRequestError("no fields were given; to write tags alone, use client.put_samples")
    if lengths is not None:
        if len(lengths) != size:
            raise InvalidRequestError(f"lengths has {len(lengths)} entries for {size} samples")
        return pack_jagged_fields(fields, lengths, per_token=per_token)
    if per_token:
        raise InvalidRequestError(f"per_token names {sorted(per_token)}, but there are no lengths to pack by")
    columns = {}
    for name, value in fields.items():
        try:
            columns[name] = as_column(value, size)
        except InvalidRequestError as error:
            raise InvalidRequestError(f"field {name!r}: {error}") from error
    return TensorDict(columns, batch_size=[size])
