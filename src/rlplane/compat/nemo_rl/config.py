"""A config as NeMo-RL writes it, as ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlplane.config import BACKENDS, validate_config
from rlplane.errors import ConfigError
from rlplane.interfaces import DataPlaneConfig

IMPL = "rlplane"
_IMPL_OF = {backend: impl for impl, backends in BACKENDS.items() for backend in backends}
# What NeMo-RL says about itself and not about the plane.
_NOT_OURS = {"checkpointing_enabled"}


def plane_config(cfg: Mapping[str, Any]) -> DataPlaneConfig:
    """The config of our plane for one of NeMo-RL's with ``impl: rlplane``.

    Sizes are on the first level or in a table named after the backend. NeMo-RL measures operations by itself,
    so its callback is left to it; with other keys in ``observability``, which are ours, we measure too.

    Raises:
        ConfigError: A ``ValueError``: the backend or another key is wrong.
    """
    backend = cfg.get("backend")
    if backend not in _IMPL_OF:
        raise ConfigError(f"backend is one of {', '.join(_IMPL_OF)} for impl {IMPL!r}; got {backend!r}")
    config = {name: _plain(value) for name, value in cfg.items() if name not in _NOT_OURS}
    config["impl"] = _IMPL_OF[backend]
    measured = dict(config.pop("observability", None) or {})
    measured.pop("callback", None)
    if measured.keys() - {"enabled"}:
        config["observability"] = measured
    return validate_config(config)


def _plain(value: Any) -> Any:
    """A table that pydantic has made into a model, as a dict of what was set."""
    return value.model_dump(exclude_unset=True) if hasattr(value, "model_dump") else value
