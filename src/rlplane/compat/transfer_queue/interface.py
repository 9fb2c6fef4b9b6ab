"""TransferQueue's functions: samples by key, in partitions that come into being by writing."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

from tensordict import TensorDict

from rlplane.compat.transfer_queue import calls
from rlplane.compat.transfer_queue.calls import DataParser
from rlplane.compat.transfer_queue.client import PLANE, TransferQueueClient
from rlplane.compat.transfer_queue.conf import returned
from rlplane.compat.transfer_queue.metadata import KVBatchMeta
from rlplane.compat.transfer_queue.session import current, end, start

__all__ = [
    "async_kv_batch_get",
    "async_kv_batch_get_by_meta",
    "async_kv_batch_put",
    "async_kv_clear",
    "async_kv_list",
    "async_kv_put",
    "close",
    "get_client",
    "get_metrics_endpoint",
    "init",
    "kv_batch_get",
    "kv_batch_get_by_meta",
    "kv_batch_put",
    "kv_clear",
    "kv_list",
    "kv_put",
    "load_checkpoint",
    "save_checkpoint",
]

_METADATA = "metadata.json"


def init(conf: Any = None) -> Any:
    """Start the job's TransferQueue, or join it if it runs: then ``conf`` is not read.

    Args:
        conf: TransferQueue's config, as an OmegaConf ``DictConfig`` or as dicts, over its defaults. The table
            ``rlplane`` holds keys of our own config: ``{"rlplane": {"global_segment_size": "64 GiB"}}``.

    Returns:
        The whole config.
    """
    return returned(start(conf).conf)


def close() -> None:
    """Leave the TransferQueue. It ends with the close of the process that started it, and with no other."""
    end()


def get_client() -> TransferQueueClient:
    """The low-level client of this process."""
    current()
    return TransferQueueClient()


def get_metrics_endpoint() -> str | None:
    """``host:port`` of ``/metrics``, or None where ``metrics.enabled`` is off or nothing was started."""
    try:
        endpoint: str | None = current().conf["metrics"].get("endpoint")
    except RuntimeError:
        return None
    return endpoint


def kv_put(
    key: str,
    partition_id: str,
    fields: TensorDict | dict[str, Any] | None = None,
    tag: dict[str, Any] | None = None,
    data_parser: DataParser | None = None,
) -> KVBatchMeta:
    """Write fields, a tag or both for one key; a dict of fields holds the values of its one row.

    Returns:
        The key with its whole tag, and with all fields that it has now.
    """
    tags = None if tag is None else [tag]
    return current().run(calls.put_keys, [key], partition_id, calls.one_row(fields), tags, data_parser)


async def async_kv_put(
    key: str,
    partition_id: str,
    fields: TensorDict | dict[str, Any] | None = None,
    tag: dict[str, Any] | None = None,
    data_parser: DataParser | None = None,
) -> KVBatchMeta:
    """See :func:`kv_put`."""
    tags = None if tag is None else [tag]
    return await current().arun(calls.put_keys, [key], partition_id, calls.one_row(fields), tags, data_parser)


def kv_batch_put(
    keys: list[str],
    partition_id: str,
    fields: TensorDict | None = None,
    tags: list[dict[str, Any]] | None = None,
    data_parser: DataParser | None = None,
) -> KVBatchMeta:
    """Write fields, tags or both for several keys, all at once. Tags are merged into those that are there.

    ``data_parser`` is called with a dict of the columns before they are written; it may replace values there.

    Returns:
        The keys with their whole tags, and with the fields that all of them have now.

    Raises:
        ValueError: Neither fields nor tags, or another number of them than of keys.
    """
    return current().run(calls.put_keys, keys, partition_id, fields, tags, data_parser)


async def async_kv_batch_put(
    keys: list[str],
    partition_id: str,
    fields: TensorDict | None = None,
    tags: list[dict[str, Any]] | None = None,
    data_parser: DataParser | None = None,
) -> KVBatchMeta:
    """See :func:`kv_batch_put`."""
    return await current().arun(calls.put_keys, keys, partition_id, fields, tags, data_parser)


def kv_batch_get(
    keys: list[str] | str, partition_id: str, select_fields: list[str] | str | None = None
) -> TensorDict:
    """Read keys: the fields named, or those that all of the keys have.

    Raises:
        StorageKeyNotFoundError: A ``KeyError`` and a ``ValueError``: a key is not there.
        ValueError: No field is ready, or one is ready for some of the keys only.
    """
    return current().run(calls.get_keys, keys, partition_id, select_fields)


async def async_kv_batch_get(
    keys: list[str] | str, partition_id: str, select_fields: list[str] | str | None = None
) -> TensorDict:
    """See :func:`kv_batch_get`."""
    return await current().arun(calls.get_keys, keys, partition_id, select_fields)


def kv_batch_get_by_meta(meta: KVBatchMeta, select_fields: list[str] | str | None = None) -> TensorDict:
    """Read what a put returned, or some of its fields."""
    return kv_batch_get(*_wanted(meta, select_fields))


async def async_kv_batch_get_by_meta(
    meta: KVBatchMeta, select_fields: list[str] | str | None = None
) -> TensorDict:
    """See :func:`kv_batch_get_by_meta`."""
    return await async_kv_batch_get(*_wanted(meta, select_fields))


def _wanted(
    meta: KVBatchMeta, select_fields: list[str] | str | None
) -> tuple[list[str], str, list[str] | None]:
    if meta.partition_id is None:
        raise ValueError("the meta does not say of which partition it is: set its partition_id")
    chosen = [select_fields] if isinstance(select_fields, str) else select_fields
    for name in chosen or ():
        if name not in (meta.fields or ()):
            raise ValueError(
                f"select_fields has {name!r}, which was not found in the fields of the meta, {meta.fields}"
            )
    return meta.keys, meta.partition_id, meta.fields if chosen is None else chosen


def kv_list(partition_id: str | None = None) -> dict[str, dict[str, dict[str, Any]]]:
    """By partition, all keys with their tags; of one partition, or of all."""
    return current().run(calls.list_keys, partition_id)


async def async_kv_list(partition_id: str | None = None) -> dict[str, dict[str, dict[str, Any]]]:
    """See :func:`kv_list`."""
    return await current().arun(calls.list_keys, partition_id)


def kv_clear(keys: list[str] | str, partition_id: str) -> None:
    """Clear keys; those that are not there are ignored."""
    current().run(calls.clear_keys, keys, partition_id)


async def async_kv_clear(keys: list[str] | str, partition_id: str) -> None:
    """See :func:`kv_clear`."""
    await current().arun(calls.clear_keys, keys, partition_id)


def save_checkpoint(
    checkpoint_dir: str | Path, *, include_storage: bool = True, metadata: dict[str, Any] | None = None
) -> None:
    """Save all partitions, as they are at one point of time, while work goes on. A directory is replaced.

    Args:
        checkpoint_dir: Where to. The plane is in it in our own format, which every engine loads.
        include_storage: Always the case.
        metadata: Goes into ``metadata.json``, under ``user_metadata``.

    Raises:
        RuntimeError: There is no TransferQueue.
    """
    client = get_client()
    target = Path(checkpoint_dir)
    new, old = target.with_name(f"{target.name}.tmp"), target.with_name(f"{target.name}.old")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    try:
        client.save_storage_checkpoint(str(new))
        about = {"storage_saved": True, "user_metadata": metadata or {}}
        (new / _METADATA).write_text(json.dumps(about, indent=2))
        shutil.rmtree(old, ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):
            target.rename(old)
        new.rename(target)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        if old.exists() and not target.exists():
            old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def load_checkpoint(checkpoint_dir: str | Path) -> None:
    """Replace everything by what was saved.

    Raises:
        FileNotFoundError: There is no checkpoint, or it is one of TransferQueue's own format.
        RuntimeError: There is no TransferQueue.
    """
    client = get_client()
    target = Path(checkpoint_dir)
    old = target.with_name(f"{target.name}.old")
    if old.exists() and not target.exists():
        old.rename(target)  # the process that saved it died between its two renames
    for needed in (target, target / _METADATA, target / PLANE):
        if not needed.exists():
            raise FileNotFoundError(f"{needed} does not exist: it is not a checkpoint that rlplane has saved")
    client.load_storage_checkpoint(str(target))
