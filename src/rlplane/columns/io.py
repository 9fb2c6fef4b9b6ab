"""Columns of a batch in and out of the plane, in the form that a stage computes with.

The client moves what it is given. These three functions add what every stage would otherwise repeat:
packing by sequence length on the way in, padding on the way out, and the tag ``input_lengths``, from which
a later claim knows the lengths without reading a tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from tensordict import TensorDict

from rlplane.columns.codec import TOKEN_ALIGNED_FIELDS, PadValue, materialize, pack_jagged_fields
from rlplane.columns.padding import Lengths, PaddingSide, check_cut_off, check_width, token_spans
from rlplane.errors import InvalidRequestError
from rlplane.interfaces import DEFAULT_TIMEOUT_S, DataPlaneClient, KVBatchMeta

__all__ = ["LENGTH_TAG", "PAD_TO", "kv_first_write", "read_columns", "write_columns"]

LENGTH_TAG = "input_lengths"
PAD_TO = "global_forward_pad_seqlen"


def kv_first_write(
    final_batch_cpu: Mapping[str, Any],
    *,
    sample_ids: Sequence[str],
    dp_client: DataPlaneClient,
    partition_id: str,
    extra_info: Mapping[str, Any] | None = None,
    task_name: str | None = "train",
    pad_to_multiple: int = 1,
    tags: Sequence[Mapping[str, Any]] | None = None,
    lengths: Lengths | None = None,
    token_aligned_fields: Collection[str] | None = None,
    padding: PaddingSide | None = None,
    attention_mask: Any = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> KVBatchMeta:
    """Write new samples, as a rollout does: fields, tags and lengths in one put.

    Up to ``tags`` the arguments are those of NeMo-RL's ``kv_first_write``; the others say what it assumes.

    Args:
        final_batch_cpu: Tensors, arrays or lists of ``N`` rows, by name. Its ``input_lengths``, if it has
            them and ``lengths`` is not given, are the lengths. With lengths, per-token fields may be
            padded: they travel without the padding.
        sample_ids: One id per row.
        dp_client: Any data plane client.
        partition_id: A registered partition.
        extra_info: What the returned meta has in its ``extra_info``.
        task_name: The task of the returned meta.
        pad_to_multiple: If above 1, noted in the meta's ``extra_info`` for whoever pads.
        tags: One mapping per sample.
        lengths: The number of tokens of each sample. Also written as the tag ``input_lengths``, so that
            claims and :func:`rlplane.shard_meta_for_dp` know it.
        token_aligned_fields: Which fields are per token. Without it, those with one of NeMo-RL's names for
            such fields (``input_ids``, ``token_mask``, ``prev_logprobs``, …). All others travel as they are.
        padding: On which side per-token fields are padded; on the right by default.
        attention_mask: Instead of ``padding`` and ``lengths``: 1 where a token is, ``[N, S]``.
        timeout_s: How long to wait for room when the plane is full.

    Returns:
        A meta with the fields of this write, the tags and, if they are known, the sequence lengths.

    Raises:
        ValueError: Rows, ids, lengths and tags do not fit together. Nothing was written.
        Otherwise as :meth:`DataPlaneClient.put_samples`.
    """
    ids = list(sample_ids)
    if lengths is None and attention_mask is None:
        lengths = final_batch_cpu.get(LENGTH_TAG)
    columns, counts = _pack(final_batch_cpu, len(ids), lengths, token_aligned_fields, padding, attention_mask)
    stamped = KVBatchMeta(partition_id, None, ids, tags=None if tags is None else [dict(tag) for tag in tags])
    if counts is not None:
        stamped.stamp_tags({LENGTH_TAG: counts})
    meta = dp_client.put_samples(ids, partition_id, columns, stamped.tags, timeout_s=timeout_s)
    info = dict(extra_info or {})
    if pad_to_multiple > 1:
        info["pad_to_multiple"] = int(pad_to_multiple)
    return replace(meta, task_name=task_name, extra_info=info)


def read_columns(
    dp_client: DataPlaneClient,
    meta: KVBatchMeta,
    select_fields: Sequence[str] | None = None,
    *,
    layout: Literal["padded", "jagged"] = "padded",
    pad_value_dict: Mapping[str, PadValue] | None = None,
    pad_to_seqlen: int = 0,
) -> dict[str, Any]:
    """Read the samples of ``meta`` as tensors, and arrays of objects, by name, in the order of the meta.

    ``select_fields``, else ``meta.fields``, says which. Padding is at the end of the rows, up to
    ``pad_to_seqlen``, else to the ``global_forward_pad_seqlen`` of the meta's ``extra_info``, and at least to
    the longest row. The rest is :func:`rlplane.materialize`.

    Raises:
        As :meth:`DataPlaneClient.get_data` and :func:`rlplane.materialize`.
    """
    names = None if select_fields is None else list(select_fields)
    width = pad_to_seqlen or int(meta.extra_info.get(PAD_TO, 0))
    return materialize(dp_client.get_data(meta, names), layout, pad_value_dict, width)


def write_columns(
    dp_client: DataPlaneClient,
    meta: KVBatchMeta,
    fields: Mapping[str, Any],
    *,
    token_aligned_fields: Collection[str] | None = None,
    padding: PaddingSide | None = None,
    attention_mask: Any = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    must_exist: bool = True,
) -> KVBatchMeta:
    """Write what a stage computed for the samples of ``meta``, row by row in its order.

    Per-token columns may be padded when the meta has ``sequence_lengths``: they are packed by them. On a
    meta without lengths every column is written as it is. No fields at all are nothing to write.

    Args:
        dp_client: Any data plane client.
        meta: The samples; as claimed, or a shard of it.
        fields: Tensors, arrays or lists of ``meta.size`` rows, by name.
        token_aligned_fields: Which columns are per token; as in :func:`kv_first_write`.
        padding: On which side they are padded; by default on the right, as :func:`read_columns` pads what a
            stage computes with.
        attention_mask: Instead of ``padding``: 1 where a token is, ``[N, S]``.
        timeout_s: How long to wait for room when the plane is full.
        must_exist: Refuse to write (``KeyError`` that names them) when samples of the meta were cleared
            meanwhile. Without it they would come back, with these columns alone.

    Returns:
        ``meta`` with the written columns added to its fields.

    Raises:
        ValueError: The columns do not fit the meta. Nothing was written.
        Otherwise as :meth:`DataPlaneClient.put_samples`.
    """
    if not fields:
        return meta
    lengths = meta.sequence_lengths
    packed, _ = _pack(fields, meta.size, lengths, token_aligned_fields, padding, attention_mask)
    dp_client.put_samples(
        meta.sample_ids, meta.partition_id, packed, timeout_s=timeout_s, must_exist=must_exist
    )
    return meta.with_fields(list(fields))


def _pack(
    fields: Mapping[str, Any],
    size: int,
    lengths: Lengths | None,
    token_aligned_fields: Collection[str] | None,
    padding: PaddingSide | None,
    attention_mask: Any,
) -> tuple[TensorDict, list[int] | None]:
    """The columns to put, and the lengths of their rows if those are known."""
    if not fields:
        raise InvalidRequestError("no fields were given; to write tags alone, use client.put_samples")
    if isinstance(token_aligned_fields, str):
        raise InvalidRequestError(
            f"token_aligned_fields is a list of names, such as ['input_ids'], not {token_aligned_fields!r}"
        )
    counts = None
    if lengths is not None or attention_mask is not None:
        if lengths is not None and len(lengths) != size:
            raise InvalidRequestError(
                f"lengths has {len(lengths)} entries for {size} samples: sample_ids must match batch size"
            )
        spans = token_spans(lengths, size, padding=padding, attention_mask=attention_mask)
        counts = spans.counts.tolist()
        for name in token_aligned_fields or ():
            check_width(name, fields.get(name), spans.counts)
        if padding is None and attention_mask is None:
            for name in TOKEN_ALIGNED_FIELDS if token_aligned_fields is None else token_aligned_fields:
                check_cut_off(name, fields.get(name), spans.counts)
    elif token_aligned_fields:
        raise InvalidRequestError(
            f"token_aligned_fields names {sorted(token_aligned_fields)}, but there are no lengths to pack by"
        )
    columns = pack_jagged_fields(
        fields,
        lengths=lengths,
        token_aligned_fields=TOKEN_ALIGNED_FIELDS if token_aligned_fields is None else token_aligned_fields,
        padding=padding,
        attention_mask=attention_mask,
    )
    if columns.batch_size[0] != size:
        raise InvalidRequestError(
            f"the batch has {columns.batch_size[0]} rows for {size} samples: sample_ids must match batch size"
        )
    return columns, counts
