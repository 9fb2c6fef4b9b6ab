"""``claim_in_thread``: a claim of a blocking client in an asyncio program, which may be cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Any

from rlplane.errors import DataPlaneError
from rlplane.interfaces import DataPlaneClient, KVBatchMeta

__all__ = ["claim_in_thread"]


async def claim_in_thread(client: DataPlaneClient, *args: Any, **kwargs: Any) -> KVBatchMeta:
    """``await asyncio.to_thread(client.claim_meta, …)``, but a cancelled one has claimed nothing in the end.

    A thread cannot be cancelled: the claim goes on in it, for ``timeout_s`` at most, and what it gets after a
    cancellation is read by nobody. Here that is given back (:meth:`DataPlaneClient.unclaim`), to the front of
    the queue. ``build_async_data_plane_client`` gives a client whose claims need no thread and are withdrawn
    at once: prefer it where you can.

    Args:
        client: A blocking client that has ``unclaim``.
        args: Those of ``claim_meta``.
        kwargs: Those of ``claim_meta``.
    """
    lock = threading.Lock()
    cancelled = False
    got: KVBatchMeta | None = None

    def claim() -> KVBatchMeta:
        nonlocal got
        meta = client.claim_meta(*args, **kwargs)
        with lock:
            got = meta
            if not cancelled:
                return meta
        _give_back(client, meta)
        return meta

    try:
        return await asyncio.to_thread(claim)
    except asyncio.CancelledError:
        with lock:
            cancelled = True
        if got is not None:
            # It was there already, and this coroutine had not been told.
            asyncio.get_running_loop().run_in_executor(None, _give_back, client, got)
        raise


def _give_back(client: DataPlaneClient, meta: KVBatchMeta) -> None:
    # A client that is closed, or has lost its plane, has given it back by that.
    with contextlib.suppress(DataPlaneError):
        client.unclaim(meta)
