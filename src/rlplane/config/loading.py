"""Where a config comes from: files, exemplars, OmegaConf, environment variables and overrides."""

from __future__ import annotations

import json
import os
import sys
import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, cast

import msgspec
from msgspec import inspect

from rlplane.config.checking import check, check_table, check_value, find_key, suggest
from rlplane.config.keys import KEYS, REMOVED, Key
from rlplane.errors import ConfigError, MissingExtraError
from rlplane.interfaces import ADDRESS_VARIABLE, DataPlaneConfig

EXEMPLAR_OF = {
    "memory": "local",
    "shm": "shm",
    "simple": "cluster-simple",
    "mooncake_cpu": "cluster-mooncake",
}
"""The exemplar of each backend."""
EXEMPLARS = tuple(EXEMPLAR_OF.values())
DEFAULT_EXEMPLAR = "shm"

ENV_PREFIX = "RLPLANE_"
# Variables that are not the name of a key. A parent sets the first two for its children; an address that the
# config names wins over an inherited one.
METRICS_ADDRESS_VARIABLE = "RLPLANE_METRICS_ADDRESS"
RESERVED_VARIABLES: dict[str, str] = {
    ADDRESS_VARIABLE: "where a shm plane listens, when controller_address is not set",
    METRICS_ADDRESS_VARIABLE: "where the aggregator listens, when observability.metrics_address is not set",
    "RLPLANE_AS_TRANSFER_QUEUE": "1: `import transfer_queue` gives rlplane.compat.transfer_queue",
    "RLPLANE_CONFIG": "the config that the command line uses when it is given none",
    "RLPLANE_DEBUG": "show tracebacks on the command line",
    "RLPLANE_LOG_LEVEL": "how much the command line and the control service log",
    "RLPLANE_TOKEN": "the token of `rlplane dash` and of the aggregator's /metrics, when no file is given",
}
RESERVED_PREFIXES = ("RLPLANE_TEST_", "RLPLANE_BENCH_")
_SIZES = ("storage_capacity", "num_storage_units", "global_segment_size", "local_buffer_size")
_NEMO_RL_TABLES = ("simple", "mooncake_cpu")


def load_config(
    source: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | Sequence[str] | None = None,
) -> DataPlaneConfig:
    """Read a config, merge the environment and the overrides into it, and check the result.

    What comes later wins: ``source``, then ``RLPLANE_*`` variables, then ``overrides``.
    ``RLPLANE_METRICS_ADDRESS`` only fills in what is not set. ``RLPLANE_CONTROLLER_ADDRESS`` is read by the
    client that is built, not here: a config that is handed on must not name a plane of before.

    Args:
        source: The name of a packaged exemplar (:data:`EXEMPLARS`), the path of a ``.yaml``, ``.yml`` or
            ``.toml`` file, a mapping, or an OmegaConf ``DictConfig``. None is the exemplar ``shm``.
        overrides: A mapping of dotted keys (``{"observability.enabled": True}``) or of nested ones, or
            ``key=value`` strings as from a command line, whose values are read as the key's type says.

    Returns:
        A new dict with sizes in bytes. It shares no dict or list with ``source`` or ``overrides``.

    Raises:
        ConfigError: A key is missing, unknown or wrong; the message names it.
        MissingExtraError: A YAML file, and PyYAML is not installed.
    """
    config = _merge_layers(_read(source), _from_environment(os.environ), _from_overrides(overrides))
    _fill_metrics_address(config, os.environ)
    return check(config)


def validate_config(raw: Mapping[str, Any]) -> DataPlaneConfig:
    """Check a whole config and return it as a new dict, with sizes in bytes.

    A key that is not required may be None, which is the same as leaving it out. The environment is not read.

    Raises:
        ConfigError: A key is missing, unknown, or wrong for its type, its range or its ``impl``.
    """
    if not isinstance(raw, Mapping):
        raise ConfigError(f"a config is a mapping of keys; got {raw!r}")
    return check(_merge_layers(_plain(raw)))


def exemplar_text(name: str) -> str:
    """The TOML text of a packaged exemplar, comments included: a start for a file of one's own."""
    if name not in EXEMPLARS:
        raise ConfigError(f"no exemplar is named {name!r}; there are {', '.join(EXEMPLARS)}")
    return (resources.files("rlplane") / "exemplars" / f"{name}.toml").read_text(encoding="utf-8")


# Reading


def _read(source: str | os.PathLike[str] | Mapping[str, Any] | None) -> dict[str, Any]:
    if source is None:
        source = DEFAULT_EXEMPLAR
    if isinstance(source, Mapping):
        return _plain(source)
    if not isinstance(source, (str, os.PathLike)):
        raise ConfigError(f"a config is a path, a mapping or the name of an exemplar; got {source!r}")
    if source in EXEMPLARS:
        return tomllib.loads(exemplar_text(str(source)))
    path = Path(source)
    if path.suffix not in (".toml", ".yaml", ".yml"):
        raise ConfigError(
            f"{os.fspath(source)!r} is neither an exemplar ({', '.join(EXEMPLARS)}) nor a .yaml, .yml or"
            f" .toml file{suggest(os.fspath(source), EXEMPLARS)}"
        )
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the config {path}: {error.strerror}") from error
    form, parse = ("TOML", msgspec.toml.decode) if path.suffix == ".toml" else ("YAML", msgspec.yaml.decode)
    try:
        content = parse(text)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is not {form}: {error}") from error
    except ImportError as error:
        raise MissingExtraError(
            f"reading {path} needs PyYAML: pip install 'rlplane[cli]', or write the config as .toml"
        ) from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a mapping of keys; it holds {type(content).__name__}")
    return _plain(content)


def _plain(value: Mapping[Any, Any]) -> dict[str, Any]:
    """Nested plain dicts and lists of our own; leaves (callbacks, sinks) stay the objects they are."""
    if type(value).__module__.partition(".")[0] == "omegaconf":
        value = _resolve_omegaconf(value)
    bad = [key for key in value if not isinstance(key, str)]
    if bad:
        raise ConfigError(f"a config key is text; got {bad[0]!r}")
    return {key: _plain_value(item) for key, item in value.items()}


def _plain_value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return _plain(value)
    return [_plain_value(item) for item in value] if isinstance(value, (list, tuple)) else value


def _resolve_omegaconf(value: Any) -> dict[Any, Any]:
    # A DictConfig exists, so the package is loaded; importing it here would make it a dependency.
    omegaconf = sys.modules["omegaconf"]
    try:
        return cast(
            dict[Any, Any], omegaconf.OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
        )
    except omegaconf.errors.OmegaConfBaseException as error:
        raise ConfigError(f"the OmegaConf config cannot be resolved: {error}") from error


# Merging


def _merge_layers(*layers: dict[str, Any]) -> dict[str, Any]:
    """One config from several, of which the later win, with NeMo-RL's tables resolved.

    NeMo-RL writes sizes either on the first level or in tables named after the backends. Each layer is
    brought to the first form before they are merged, so that the later one wins in whichever form it is.
    """
    backend = next((layer["backend"] for layer in reversed(layers) if layer.get("backend")), None)
    merged: dict[str, Any] = {}
    has_tables = any(table in layer for layer in layers for table in _NEMO_RL_TABLES)
    for layer in layers:
        for table in _NEMO_RL_TABLES:
            sizes = check_table(table, layer.pop(table, None) or {})
            if table == backend:
                _move_up(layer, table, sizes)
        _merge(merged, layer)
    if has_tables:  # such a config leaves out the sizes of the other backends, and may leave out its own
        exemplar = tomllib.loads(exemplar_text(EXEMPLAR_OF.get(str(backend), DEFAULT_EXEMPLAR)))
        missing = [name for name in _SIZES if merged.get(name) is None]
        merged |= {name: exemplar[name] for name in missing}
    return merged


def _move_up(layer: dict[str, Any], table: str, sizes: dict[str, Any]) -> None:
    for name, size in sizes.items():
        flat = layer.get(name)
        if flat is not None and check_value(KEYS[name], flat) != size:
            raise ConfigError(
                f"config keys {name!r} and '{table}.{name}' contradict each other: {flat!r} and {size!r};"
                " keep one of them"
            )
        layer[name] = size


def _merge(into: dict[str, Any], other: Mapping[str, Any]) -> None:
    for key, value in other.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    variables = {ENV_PREFIX + name.upper().replace(".", "__"): name for name in (*KEYS, *REMOVED)}
    for variable, text in sorted(environ.items()):
        reserved = variable in RESERVED_VARIABLES or variable.startswith(RESERVED_PREFIXES)
        if not variable.startswith(ENV_PREFIX) or reserved or not text:
            continue
        if variable not in variables:
            known = [*variables, *RESERVED_VARIABLES]
            raise ConfigError(
                f"the environment variable {variable} is not a config key{suggest(variable, known)}"
            )
        _merge(found, _parse_assignment(variables[variable], text, f" (from {variable})"))
    return found


def _from_overrides(overrides: Mapping[str, Any] | Sequence[str] | None) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if overrides is None:
        return found
    if isinstance(overrides, Mapping):
        for dotted, value in _plain(overrides).items():
            _merge(found, _nest(dotted, value))
        return found
    if isinstance(overrides, str):
        raise ConfigError(f"overrides are a mapping or a list of 'key=value'; got the text {overrides!r}")
    for override in overrides:
        dotted, equals, text = override.partition("=")
        if not equals:
            raise ConfigError(f"an override is written key=value; got {override!r}")
        _merge(found, _parse_assignment(dotted.strip(), text.strip(), f" (from the override {override!r})"))
    return found


def _fill_metrics_address(config: dict[str, Any], environ: Mapping[str, str]) -> None:
    metrics, table = environ.get(METRICS_ADDRESS_VARIABLE), config.get("observability")
    if metrics and isinstance(table, dict) and table.get("metrics_address") is None:
        table["metrics_address"] = metrics


def _nest(dotted: str, value: Any) -> dict[str, Any]:
    *tables, name = dotted.split(".")
    nested = {name: value}
    for table in reversed(tables):
        nested = {table: nested}
    return nested


def _parse_assignment(dotted: str, text: str, origin: str) -> dict[str, Any]:
    """A typed value from text. Checked here, while it is still known where the text came from."""
    try:
        key = find_key(dotted)
        return _nest(dotted, check_value(key, _parse_text(key, text)))
    except ConfigError as error:
        raise ConfigError(f"{error}{origin}") from error


_BOOLS = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(("0", "false", "no", "off"), False)


def _parse_text(key: Key, text: str) -> Any:
    """The value that ``text`` means for this key, or ``text`` itself for the check to refuse."""
    try:
        if isinstance(key.type, inspect.BoolType):
            return _BOOLS.get(text.lower(), text)
        if isinstance(key.type, inspect.IntType) and not key.is_size:
            return int(text)
        if isinstance(key.type, inspect.FloatType):
            return float(text)
        if isinstance(key.type, inspect.ListType):
            parts = [part.strip() for part in text.split(",") if part.strip()]
            return json.loads(text) if text.startswith("[") else parts
    except ValueError:
        pass
    return text
