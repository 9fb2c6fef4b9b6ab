"""``Session``: this process's part in the TransferQueue of a job: its plane, its clients and the config.

A session is started by :func:`start` in the first process, and joined in all others. The config travels in
the plane itself, so that whoever joins has the same sampler.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import threading
from collections.abc import Callable, Mapping
from typing import Any, Concatenate, ParamSpec, TypeVar

from rlplane.adapters.async_client import AsyncPlaneClient
from rlplane.adapters.calls import PlaneCalls
from rlplane.adapters.client import PlaneClient
from rlplane.adapters.link import Link
from rlplane.adapters.steps import Call
from rlplane.compat.transfer_queue import calls, metrics, rendezvous
from rlplane.compat.transfer_queue.conf import build_sampler, engine_config, merged
from rlplane.compat.transfer_queue.sampling import make_room_for_sampler
from rlplane.errors import ConfigError, PlaneConnectionError
from rlplane.factory import build_data_plane_client
from rlplane.interfaces import DataPlaneConfig

P = ParamSpec("P")
T = TypeVar("T")
Steps = Callable[Concatenate[PlaneCalls, Link, P], Call[T]]

_SETTINGS = "settings"

_now: Session | None = None
_lock = threading.RLock()


class Session:
    """A connection to the plane, for threads and for any number of event loops."""

    def __init__(self, engine: PlaneClient, conf: dict[str, Any], *, is_owner: bool) -> None:
        self.engine, self.conf, self.is_owner = engine, conf, is_owner
        self._pid = os.getpid()
        self._loops: list[tuple[asyncio.AbstractEventLoop, AsyncPlaneClient]] = []
        self._lock = threading.Lock()
        self._metrics: metrics.MetricsServer | None = None
        self.sampler = build_sampler(conf)
        if is_owner:
            if conf["metrics"]["enabled"]:
                self._metrics = metrics.MetricsServer(self, int(conf["metrics"]["port"] or 0))
                conf["metrics"]["endpoint"] = self._metrics.endpoint
            self.run(make_room_for_sampler)
            self.store_conf()

    @classmethod
    def join(cls, config: DataPlaneConfig) -> Session | None:
        """Join a plane; None if it is gone, or was not started for a TransferQueue."""
        try:
            engine = _build(config, bootstrap=False)
        except PlaneConnectionError:
            if config["impl"] == "local":
                raise
            rendezvous.withdraw()  # the process that started it has died, and its actors with it
            return None
        seen = engine._call(calls.inspect, calls.HIDDEN, [_SETTINGS])
        if not seen.ids:
            engine.close()
            return None
        return cls(engine, pickle.loads(seen.tags[0]["conf"]), is_owner=False)

    def store_conf(self) -> None:
        """Put the config where those who join find it."""
        tags = [{"conf": pickle.dumps(self.conf)}]
        self.run(calls.write, [_SETTINGS], calls.HIDDEN, None, tags)

    def run(self, steps: Steps[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Perform a call in this thread."""
        return self.engine._call(steps, *args, **kwargs)

    async def arun(self, steps: Steps[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Perform a call on the running event loop, without stopping it."""
        return await self._client_of(asyncio.get_running_loop())._call(steps, *args, **kwargs)

    def _client_of(self, loop: asyncio.AbstractEventLoop) -> AsyncPlaneClient:
        with self._lock:
            for place, (owner, client) in enumerate(self._loops):
                if owner is loop or owner.is_closed():
                    self._loops[place] = loop, client
                    return client
            client = AsyncPlaneClient(lambda: self.engine)
            self._loops.append((loop, client))
            return client

    def close(self) -> None:
        """Leave the plane; whoever started it ends it."""
        if self._pid != os.getpid():
            self.engine.close()  # all else is the parent's
            return
        if self._metrics is not None:
            self._metrics.close()
        for _, client in self._loops:
            client.let_go()
        if self.is_owner:
            rendezvous.withdraw()
        self.engine.close()


def start(conf: Any) -> Session:
    """The session of this process: the one it has, the job's, or a new one made from ``conf``."""
    global _now
    with _lock:
        for _ in range(8):
            joined = _current()
            if joined is not None:
                return joined
            settings = merged(conf)
            config = engine_config(settings, rendezvous.ray_nodes())
            session = Session(_build(config, bootstrap=True), settings, is_owner=True)
            if rendezvous.publish(_joining(config, session.engine)):
                _now = session
                return session
            session.is_owner = False  # another process was faster: join its plane
            session.close()
        raise PlaneConnectionError("planes come and go faster than this process can join one")


def current() -> Session:
    """The session of this process; joins the job's plane if it has not."""
    session = _current()
    if session is None:
        raise RuntimeError(
            "TransferQueue is not initialized: call init() first, in this process or in its job"
        )
    return session


def end() -> None:
    """Close the session of this process, if it has one."""
    global _now
    with _lock:
        session, _now = _now, None
        if session is not None:
            session.close()


def _current() -> Session | None:
    global _now
    if _now is not None:
        return _now
    with _lock:
        if _now is None:
            config = rendezvous.find()
            if config is not None:
                _now = Session.join(config)
        return _now


def _build(config: DataPlaneConfig, *, bootstrap: bool) -> PlaneClient:
    engine = build_data_plane_client(config, bootstrap=bootstrap)
    if not isinstance(engine, PlaneClient):
        engine.close()
        raise ConfigError(
            f"impl {config['impl']!r} is a {type(engine).__name__}, which cannot serve this interface"
        )
    return engine


def _joining(config: DataPlaneConfig, engine: PlaneClient) -> Mapping[str, Any]:
    address = getattr(engine, "controller_address", None)
    return {**config, "controller_address": address} if address else dict(config)
