"""``BlockingClient``: an asyncio client for callers that block, so that the checks of the suite can drive it.

The event loop runs in a thread of its own. Each call becomes a task on it, and the caller waits for that.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from rlplane.async_interface import AsyncDataPlaneClient
from rlplane.interfaces import DataPlaneClient

P = ParamSpec("P")
T = TypeVar("T")


def loop_in_thread(loop: asyncio.AbstractEventLoop | None = None) -> asyncio.AbstractEventLoop:
    """An event loop (a new one, unless given) that runs in a thread until the process ends."""
    loop = asyncio.new_event_loop() if loop is None else loop
    threading.Thread(target=loop.run_forever, name="rlplane-loop", daemon=True).start()
    return loop


def _blocking(
    coroutine: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[BlockingClient, P], T]:
    @wraps(coroutine, updated=())  # or it would be abstract too
    def method(self: BlockingClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        result: T = self._wait(getattr(self._client, coroutine.__name__)(*args, **kwargs))
        return result

    return method


class BlockingClient(DataPlaneClient):
    """The methods of an asyncio client, for any thread but that of its loop.

    Args:
        client: The client. It is connected before this returns.
        loop: An event loop that runs in another thread, as :func:`loop_in_thread` gives one.
    """

    def __init__(self, client: AsyncDataPlaneClient, loop: asyncio.AbstractEventLoop) -> None:
        self._client, self._loop = client, loop
        self._wait(client.__aenter__())

    @property
    def asynchronous(self) -> AsyncDataPlaneClient:
        """The client that does the work."""
        return self._client

    register_partition = _blocking(AsyncDataPlaneClient.register_partition)
    claim_meta = _blocking(AsyncDataPlaneClient.claim_meta)
    get_data = _blocking(AsyncDataPlaneClient.get_data)
    check_consumption_status = _blocking(AsyncDataPlaneClient.check_consumption_status)
    put_samples = _blocking(AsyncDataPlaneClient.put_samples)
    get_samples = _blocking(AsyncDataPlaneClient.get_samples)
    clear_samples = _blocking(AsyncDataPlaneClient.clear_samples)
    close = _blocking(AsyncDataPlaneClient.close)
    peek_meta = _blocking(AsyncDataPlaneClient.peek_meta)
    advance_version = _blocking(AsyncDataPlaneClient.advance_version)
    finish_partition = _blocking(AsyncDataPlaneClient.finish_partition)
    close_group = _blocking(AsyncDataPlaneClient.close_group)
    should_abort = _blocking(AsyncDataPlaneClient.should_abort)
    evicted_meta = _blocking(AsyncDataPlaneClient.evicted_meta)
    count = _blocking(AsyncDataPlaneClient.count)
    append_samples = _blocking(AsyncDataPlaneClient.append_samples)
    finish_claims = _blocking(AsyncDataPlaneClient.finish_claims)
    unclaim = _blocking(AsyncDataPlaneClient.unclaim)
    drop_partition = _blocking(AsyncDataPlaneClient.drop_partition)
    list_sample_ids = _blocking(AsyncDataPlaneClient.list_sample_ids)
    partition_status = _blocking(AsyncDataPlaneClient.partition_status)
    save_checkpoint = _blocking(AsyncDataPlaneClient.save_checkpoint)
    load_checkpoint = _blocking(AsyncDataPlaneClient.load_checkpoint)

    def _wait(self, call: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(call, self._loop).result()

    def __getattr__(self, name: str) -> Any:
        # What an engine has beyond the contract stays in reach.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._client, name)

    def __repr__(self) -> str:
        return f"BlockingClient({self._client!r})"
