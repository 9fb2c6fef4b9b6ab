"""``build_data_plane_client``: the one place that knows every engine, by name, and loads it when asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib import metadata
from typing import Any, cast

from rlplane.async_interface import AsyncDataPlaneClient
from rlplane.config import ADAPTER_GROUP, validate_config
from rlplane.errors import ConfigError, MissingExtraError
from rlplane.interfaces import DataPlaneClient, DataPlaneConfig

__all__ = ["build_async_data_plane_client", "build_data_plane_client"]

# Written as entry points are, so that our engines and those of other packages are loaded in one way, and
# none of them (nor torch, Ray or Mooncake) before it is asked for.
_ENGINES = {
    ("local", "memory"): "rlplane.adapters.local.memory:MemoryDataPlaneClient",
    ("local", "shm"): "rlplane.adapters.local.shm:ShmDataPlaneClient",
    ("transfer_queue", "simple"): "rlplane.adapters.transfer_queue:TQDataPlaneClient",
    ("transfer_queue", "mooncake_cpu"): "rlplane.adapters.transfer_queue:TQDataPlaneClient",
}
_NATIVE = "rlplane.adapters.transfer_queue.native:NativeTQDataPlaneClient"
_OBSERVABILITY = "rlplane.observability:wrap_with_observability"
_ASYNC_CLIENT = "rlplane.adapters.async_client:AsyncPlaneClient"
_ASYNC_OBSERVABILITY = "rlplane.observability.async_client:wrap_async_with_observability"
# Which extra brings an engine, and the modules whose absence means that it is not installed.
_EXTRAS = {"simple": "transfer-queue", "mooncake_cpu": "mooncake"}
_EXTRA_MODULES = {"ray", "transfer_queue", "omegaconf", "mooncake"}


def build_data_plane_client(
    cfg: DataPlaneConfig | Mapping[str, Any] | None, *, bootstrap: bool = True
) -> DataPlaneClient:
    """Build the client that ``cfg`` describes.

    The environment is not read here: ``rlplane.load_config`` does that.

    Args:
        cfg: A config as ``load_config`` returns it. It is checked again, and copied.
        bootstrap: True in the one process that starts the plane, and ends it with its ``close``; False
            in every process that joins it.

    Returns:
        The engine's client; with ``observability.enabled``, wrapped so that every operation is measured.

    Raises:
        ConfigError: A ``ValueError``: ``cfg`` is None, disabled, or not a valid config.
        MissingExtraError: An ``ImportError``: the engine's extra is not installed.
    """
    config = _checked(cfg)
    client = _build_engine(config, bootstrap)
    if not _is_measured(config):
        return client
    try:
        wrap = _load(_OBSERVABILITY)
        return cast(DataPlaneClient, wrap(client, config, bootstrap=bootstrap))
    except BaseException:
        client.close()
        raise


def build_async_data_plane_client(
    cfg: DataPlaneConfig | Mapping[str, Any] | None, *, bootstrap: bool = True
) -> AsyncDataPlaneClient:
    """Build the client that ``cfg`` describes, for the tasks of an event loop.

    The config is checked here. The plane is started or joined, without stopping the event loop, by
    ``async with`` or by the first call, which raise what :func:`build_data_plane_client` does.

    Args:
        cfg: A config as ``load_config`` returns it. It is checked again, and copied.
        bootstrap: True in the one process that starts the plane, and ends it with its ``close``; False
            in every process that joins it.

    Returns:
        The client; with ``observability.enabled``, wrapped so that every operation is measured.

    Raises:
        ConfigError: A ``ValueError``: ``cfg`` is None, disabled, or not a valid config.
    """
    config = _checked(cfg)
    client = cast(AsyncDataPlaneClient, _load(_ASYNC_CLIENT)(partial(_build_engine, config, bootstrap)))
    if not _is_measured(config):
        return client
    return cast(AsyncDataPlaneClient, _load(_ASYNC_OBSERVABILITY)(client, config, bootstrap=bootstrap))


def _checked(cfg: DataPlaneConfig | Mapping[str, Any] | None) -> DataPlaneConfig:
    if cfg is None:
        raise ConfigError(
            "no data plane is configured: pass one with enabled: true, such as rlplane.load_config('shm')"
        )
    if isinstance(cfg, Mapping) and cfg.get("enabled") is False:
        raise ConfigError("the data plane is disabled in its config: set enabled: true")
    return validate_config(cfg)


def _is_measured(config: DataPlaneConfig) -> bool:
    return config.get("observability", {}).get("enabled", False)


def _build_engine(config: DataPlaneConfig, bootstrap: bool) -> DataPlaneClient:
    impl, backend = config["impl"], config["backend"]
    value = _ENGINES.get((impl, backend))
    if impl == "transfer_queue" and config.get("transfer_queue", {}).get("native"):
        value = _NATIVE
    if value is None:
        return _build_plugin(impl, config, bootstrap)
    try:
        return cast(DataPlaneClient, _load(value)(config, bootstrap=bootstrap))
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _EXTRA_MODULES:
            raise
        raise MissingExtraError(
            f"impl {impl!r} with backend {backend!r} needs the package {missing!r}, which is not installed:"
            f" pip install 'rlplane[{_EXTRAS[backend]}]'"
        ) from error


def _build_plugin(impl: str, config: DataPlaneConfig, bootstrap: bool) -> DataPlaneClient:
    found = metadata.entry_points(group=ADAPTER_GROUP, name=impl)
    if len(found) != 1:
        owners = ", ".join(sorted(point.value for point in found))
        raise ConfigError(f"config key 'impl': {len(found)} installed adapters are named {impl!r}: {owners}")
    (point,) = found
    try:
        build = point.load()
    except ImportError as error:
        raise MissingExtraError(
            f"the adapter {impl!r} ({point.value}) is installed but cannot be imported: {error}"
        ) from error
    client = build(config, bootstrap=bootstrap)
    if not isinstance(client, DataPlaneClient):
        raise ConfigError(
            f"the adapter {impl!r} ({point.value}) returned a {type(client).__name__};"
            " it must return a rlplane.DataPlaneClient"
        )
    return client


def _load(value: str) -> Callable[..., Any]:
    return cast(Callable[..., Any], metadata.EntryPoint(name="", value=value, group=ADAPTER_GROUP).load())
