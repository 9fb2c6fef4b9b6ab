"""From a file, a mapping or an exemplar, the environment and overrides to a checked ``DataPlaneConfig``.

``keys``      every key, once: type, bounds, default, meaning. The checks and the docs are made from it
``checking``  a mapping against those keys, and what is said about a wrong one
``loading``   files, exemplars, OmegaConf, environment variables and overrides, merged into one mapping
"""

from rlplane.config.checking import ADAPTER_GROUP, BACKENDS, parse_size, settings
from rlplane.config.keys import KEYS, TABLES, Key, PlaneSettings
from rlplane.config.loading import (
    EXEMPLAR_OF,
    EXEMPLARS,
    RESERVED_VARIABLES,
    exemplar_text,
    load_config,
    validate_config,
)

__all__ = [
    "ADAPTER_GROUP",
    "BACKENDS",
    "EXEMPLARS",
    "EXEMPLAR_OF",
    "KEYS",
    "RESERVED_VARIABLES",
    "TABLES",
    "Key",
    "PlaneSettings",
    "exemplar_text",
    "load_config",
    "parse_size",
    "settings",
    "validate_config",
]
