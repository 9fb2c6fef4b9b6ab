"""NeMo-RL on our engines: after :func:`register`, its configs may say ``impl: rlplane``.

NeMo-RL chooses its data plane in one function, ``nemo_rl.data_plane.build_data_plane_client``. What that
returns for ``impl: rlplane`` is a ``DataPlaneClient`` of NeMo-RL's that speaks its ``KVBatchMeta``, so
everything above it stays as it is.

client.py    that client
config.py    a config of NeMo-RL's as ours
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

from rlplane.compat.nemo_rl.config import IMPL, plane_config

__all__ = ["register"]


def register() -> None:
    """Teach NeMo-RL ``impl: rlplane``, with the backends memory, shm, simple and mooncake_cpu. Idempotent.

    To be called once, in the process that starts the job. In Ray actors and other processes the config of the
    running plane does it, when they get it.

    Raises:
        ModuleNotFoundError: NeMo-RL is not installed.
    """
    from nemo_rl.data_plane import factory, interfaces

    # NeMo-RL checks its configs with pydantic, which knows two backends of one implementation.
    interfaces.DataPlaneConfig.__annotations__.update(impl=str, backend=str)
    original = factory.build_data_plane_client
    if not hasattr(original, "knows_rlplane"):
        extended = _extend(original)
        for module in _modules():
            if getattr(module, "build_data_plane_client", None) is original:
                module.build_data_plane_client = extended
    for module in _modules():
        for model in list(vars(module).values()):
            if "data_plane" in (getattr(model, "model_fields", None) or ()):
                model.model_rebuild(force=True)


def _modules() -> Iterator[Any]:
    """The modules of NeMo-RL that are loaded: some have a copy of what is replaced."""
    return (module for name, module in list(sys.modules.items()) if name.partition(".")[0] == "nemo_rl")


def _extend(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def build_data_plane_client(cfg: Any, *, bootstrap: bool = True) -> Any:
        if cfg is None or not cfg["enabled"] or cfg["impl"] != IMPL:
            return original(cfg, bootstrap=bootstrap)
        from rlplane.compat.nemo_rl.client import RlplaneClient

        client = RlplaneClient(plane_config(cfg), bootstrap=bootstrap)
        if bootstrap and isinstance(cfg, dict):
            # NeMo-RL sends this very config to its workers.
            cfg["impl"] = _RegisteringName(IMPL)
            address = getattr(client.plane, "controller_address", None)
            if address is not None:
                cfg["controller_address"] = address
        measured = cfg.get("observability") or {}
        if not measured.get("enabled", False):
            return client
        from nemo_rl.data_plane.observability import MetricsDataPlaneClient, log_event

        return MetricsDataPlaneClient(client, on_event=measured.get("callback") or log_event)

    build_data_plane_client.knows_rlplane = True  # type: ignore[attr-defined]
    return build_data_plane_client


class _RegisteringName(str):
    """The name of our implementation, which registers it in every process that it is sent to."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Callable[[], str], tuple[()]]:
        return (_registered_name, ())


def _registered_name() -> str:
    register()
    return _RegisteringName(IMPL)
