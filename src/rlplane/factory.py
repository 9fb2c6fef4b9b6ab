"""``build_data_plane_client``: the one place that knows every engine, by name, and loads it when asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any, cast

from rlplane.config import ADAPTER_GROUP, validate_config
from rlplane.errors import ConfigError, MissingExtraError
from rlplane.interfaces import DataPlaneClient, DataPlaneConfig

__all__ = ["build_data_plane_client"]

# Written as entry points are, so that our engines and those of other packages are loaded in one way, and
# none of them (nor torch, Ray or Mooncake) before it is asked for.
_ENGINES = {
    ("local", "memory"): "rlplane.adapters.local.memory:MemoryDataPlaneClient",
    ("local", "shm"): "rlplane.adapters.local.client:ShmDataPlaneClient",
    ("transfer_queue", "simple"): "rlplane.adapters.transfer_queue:TQDataPlaneClient",
    ("transfer_queue", "mooncake_cpu"): "rlplane.adapters.transfer_queue:TQDataPlaneClient",
}
_OBSERVABILITY = "rlplane.observability:wrap_with_observability"
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
    if cfg is None:
        raise ConfigError(
            "no data plane is configured: pass one with enabled: true, such as rlplane.load_config('shm')"
        )
    if isinstance(cfg, Mapping) and cfg.get("enabled") is False:
        raise ConfigError("the data plane is disabled in its config: set enabled: true")
    config = validate_config(cfg)
    client = _build_engine(config, bootstrap)
    if not config.get("observability", {}).get("enabled", False):
        return client
    try:
        wrap = _load(_OBSERVABILITY)
        return cast(DataPlaneClient, wrap(client, config))
    except BaseException:
        client.close()
        raise


def _build_engine(config: DataPlaneConfig, bootstrap: bool) -> DataPlaneClient:
    impl, backend = config["impl"], config["backend"]
    value = _ENGINES.get((impl, backend))
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
