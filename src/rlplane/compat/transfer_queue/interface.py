"""TransferQueue's functions: samples by key, in partitions that come into being by writing."""

from __future__ import annotations

import contextlib
import inspect
import json
import shutil
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, get_args

from rlplane.compat.transfer_queue import calls
from rlplane.compat.transfer_queue.client import PLANE, TransferQueueClient
from rlplane.compat.transfer_queue.conf import returned
from rlplane.compat.transfer_queue.session import Steps, current, end, start

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

P = ParamSpec("P")
T = TypeVar("T")

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


def _both(name: str, steps: Steps[P, T]) -> tuple[Callable[P, T], Callable[P, Coroutine[Any, Any, T]]]:
    """A call of ours as the function ``name`` and as the coroutine function ``async_<name>``."""

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return current().run(steps, *args, **kwargs)

    async def async_call(*args: P.args, **kwargs: P.kwargs) -> T:
        return await current().arun(steps, *args, **kwargs)

    signature = inspect.signature(steps, eval_str=True)
    shown = signature.replace(
        parameters=list(signature.parameters.values())[2:],  # without the plane and the link
        return_annotation=get_args(signature.return_annotation)[-1],
    )
    for made in (call, async_call):
        made.__name__ = made.__qualname__ = name if made is call else f"async_{name}"
        made.__doc__ = steps.__doc__
        vars(made)["__signature__"] = shown
    return call, async_call


kv_put, async_kv_put = _both("kv_put", calls.put_key)
kv_batch_put, async_kv_batch_put = _both("kv_batch_put", calls.put_keys)
kv_batch_get, async_kv_batch_get = _both("kv_batch_get", calls.get_keys)
kv_batch_get_by_meta, async_kv_batch_get_by_meta = _both("kv_batch_get_by_meta", calls.get_by_meta)
kv_list, async_kv_list = _both("kv_list", calls.list_keys)
kv_clear, async_kv_clear = _both("kv_clear", calls.clear_keys)


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
