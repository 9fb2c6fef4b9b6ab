"""From a file, a mapping or an exemplar, the environment and overrides to a checked ``DataPlaneConfig``.

:data:`SCHEMA` is the one place that says which keys exist. To add a key, add it there, to the
``TypedDict`` in ``rlplane.interfaces`` if it is on the first level, and to ``docs/configuration.md``; the
file, the environment variable, the dotted override and the error messages follow from it.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import re
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata, resources
from pathlib import Path
from typing import Any, Literal, cast

from rlplane.errors import ConfigError, MissingExtraError
from rlplane.interfaces import DataPlaneConfig

__all__ = [
    "ADAPTER_GROUP",
    "BACKENDS",
    "EXEMPLARS",
    "RESERVED_VARIABLES",
    "SCHEMA",
    "Key",
    "exemplar_text",
    "load_config",
    "parse_size",
    "validate_config",
]

EXEMPLARS = ("local", "shm", "cluster-simple", "cluster-mooncake")
DEFAULT_EXEMPLAR = "shm"
ADAPTER_GROUP = "rlplane.adapters"
BACKENDS: dict[str, tuple[str, ...]] = {
    "local": ("memory", "shm"),
    "transfer_queue": ("simple", "mooncake_cpu"),
}

ENV_PREFIX = "RLPLANE_"
# Variables that are not the name of a key. The first two only fill in an address that the config leaves
# open, because a parent sets them for its children; an explicit address has to win over an inherited one.
CONTROLLER_ADDRESS_VARIABLE = "RLPLANE_CONTROLLER_ADDRESS"
METRICS_ADDRESS_VARIABLE = "RLPLANE_METRICS_ADDRESS"
RESERVED_VARIABLES: dict[str, str] = {
    CONTROLLER_ADDRESS_VARIABLE: "where a shm plane listens, when controller_address is not set",
    METRICS_ADDRESS_VARIABLE: "where the aggregator listens, when observability.metrics_address is not set",
    "RLPLANE_CONFIG": "the config that the command line uses when it is given none",
    "RLPLANE_DEBUG": "show tracebacks on the command line",
    "RLPLANE_LOG_LEVEL": "how much the command line and the controller process log",
}
RESERVED_PREFIXES = ("RLPLANE_TEST_", "RLPLANE_BENCH_")


@dataclass(frozen=True)
class Key:
    """What a value may be. ``more_than`` and ``at_least`` bound numbers and sizes."""

    kind: Literal["bool", "int", "float", "str", "size", "list", "names", "callable"]
    required: bool = False
    at_least: float | None = None
    more_than: float | None = None
    choices: tuple[str, ...] = ()


Table = dict[str, Key]

SCHEMA: dict[str, Key | Table] = {
    "enabled": Key("bool", required=True),
    "impl": Key("str", required=True),
    "backend": Key("str", required=True),
    "storage_capacity": Key("int", required=True, at_least=1),
    "num_storage_units": Key("int", required=True, at_least=1),
    "claim_meta_poll_interval_s": Key("float", required=True, more_than=0),
    "global_segment_size": Key("size", required=True, at_least=1),
    "local_buffer_size": Key("size", required=True, at_least=1),
    "controller_address": Key("str"),
    "ack_timeout_ms": Key("int", at_least=1),
    "allow_pickle": Key("bool"),
    "segment_size": Key("size", at_least=1),
    "client_timeout_s": Key("float", more_than=0),
    "observability": {
        "enabled": Key("bool", required=True),
        "callback": Key("callable"),
        "metrics_address": Key("str"),
        "role": Key("str"),
        "track_partitions": Key("names"),
        "sinks": Key("list"),
        "transfer_log_interval_s": Key("float", more_than=0),
    },
    "transfer_queue": {
        "node_ip": Key("str"),
        "ray_address": Key("str"),
        "pin_runtime_env": Key("bool"),
        "log_to_driver": Key("bool"),
        "namespace": Key("str"),
        "mooncake_protocol": Key("str", choices=("tcp", "rdma")),
        "mooncake_device": Key("str"),
        "mooncake_master_port": Key("int", at_least=1),
    },
}


def load_config(
    source: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | Sequence[str] | None = None,
) -> DataPlaneConfig:
    """Read a config, merge the environment and the overrides into it, and check the result.

    What comes later wins: ``source``, then ``RLPLANE_*`` variables, then ``overrides``.
    ``RLPLANE_CONTROLLER_ADDRESS`` and ``RLPLANE_METRICS_ADDRESS`` only fill in what is not set.

    Args:
        source: The name of a packaged exemplar (:data:`EXEMPLARS`), the path of a ``.yaml``, ``.yml`` or
            ``.toml`` file, a mapping, or an OmegaConf ``DictConfig``. None is the exemplar ``shm``.
        overrides: A mapping of dotted keys (``{"observability.enabled": True}``) or of nested ones, or
            ``key=value`` strings as from a command line, whose values are read as the schema says.

    Returns:
        A new dict with sizes in bytes. It shares no dict or list with ``source`` or ``overrides``.

    Raises:
        ConfigError: A key is missing, unknown or wrong; the message names it.
        MissingExtraError: A YAML file, and PyYAML is not installed.
    """
    merged = _read(source)
    _merge(merged, _from_environment(os.environ))
    _merge(merged, _from_overrides(overrides))
    _fill_addresses(merged, os.environ)
    return validate_config(merged)


def validate_config(raw: Mapping[str, Any]) -> DataPlaneConfig:
    """Check a whole config against the schema and return it as a new dict, with sizes in bytes.

    A key that is not required may be None, which is the same as leaving it out.

    Raises:
        ConfigError: A key is missing, unknown, or wrong for its type, its range or its ``impl``.
    """
    if not isinstance(raw, Mapping):
        raise ConfigError(f"a config is a mapping of keys; got {raw!r}")
    raw = _plain(raw)
    impl = raw.get("impl")
    checked: dict[str, Any] = {}
    for name, value in raw.items():
        entry = SCHEMA.get(name)
        if entry is None:
            # An engine from an entry point gets a table of its own, under its name, as it was written.
            if name == impl and isinstance(value, dict):
                checked[name] = value
                continue
            raise _unknown_key(name)
        if isinstance(entry, Key):
            if value is not None or entry.required:
                checked[name] = _coerce(name, entry, value)
        elif value is not None:
            checked[name] = _check_table(name, entry, value)
    _check_present("", SCHEMA, checked)
    _check_engine(checked["impl"], checked["backend"])
    return cast(DataPlaneConfig, checked)


def exemplar_text(name: str) -> str:
    """The TOML text of a packaged exemplar, comments included: a start for a file of one's own."""
    if name not in EXEMPLARS:
        raise ConfigError(f"no exemplar is named {name!r}; there are {', '.join(EXEMPLARS)}")
    return (resources.files("rlplane") / "exemplars" / f"{name}.toml").read_text(encoding="utf-8")


_SIZE = re.compile(r"(\d+(?:\.\d+)?|\d{1,3}(?:_\d{3})+)\s*([a-z]*)")
_UNITS = {"": 1, "b": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("kmgt", start=1)
    for suffix, base in (("b", 1000), ("ib", 1024))
}


def parse_size(value: int | str) -> int:
    """Bytes from an int, or from text such as ``"8 GiB"`` (1024³) or ``"512MB"`` (1000²)."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _SIZE.fullmatch(value.strip().lower()) if isinstance(value, str) else None
    if match is None or match[2] not in _UNITS:
        raise ConfigError(
            f"must be a size in bytes, as a whole number or text such as '8 GiB'; got {value!r}"
        )
    number = match[1].replace("_", "")
    size = float(number) * _UNITS[match[2]] if "." in number else int(number) * _UNITS[match[2]]
    if size != int(size):
        raise ConfigError(f"must be a whole number of bytes; got {value!r}")
    return int(size)


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
            f" .toml file{_suggest(os.fspath(source), EXEMPLARS)}"
        )
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the config {path}: {error.strerror}") from error
    return _parse_toml(path, text) if path.suffix == ".toml" else _parse_yaml(path, text)


def _parse_toml(path: Path, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error


def _parse_yaml(path: Path, text: str) -> dict[str, Any]:
    try:
        import yaml
    except ImportError as error:
        raise MissingExtraError(
            f"reading {path} needs PyYAML: pip install 'rlplane[cli]', or write the config as .toml"
        ) from error
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from error
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


def _merge(into: dict[str, Any], other: Mapping[str, Any]) -> None:
    for key, value in other.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    variables = {ENV_PREFIX + name.upper().replace(".", "__"): name for name in _dotted_names()}
    for variable, text in sorted(environ.items()):
        if not variable.startswith(ENV_PREFIX) or variable in RESERVED_VARIABLES or not text:
            continue
        if variable.startswith(RESERVED_PREFIXES):
            continue
        if variable not in variables:
            known = [*variables, *RESERVED_VARIABLES]
            raise ConfigError(
                f"the environment variable {variable} is not a config key{_suggest(variable, known)}"
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


def _fill_addresses(config: dict[str, Any], environ: Mapping[str, str]) -> None:
    controller = environ.get(CONTROLLER_ADDRESS_VARIABLE)
    # Only the shm engine sets it for its children. To another engine the same key means something else: the
    # name of a plane inside the process, or a Ray cluster.
    if controller and config.get("backend") == "shm" and config.get("controller_address") is None:
        config["controller_address"] = controller
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
    key = _find_key(dotted)
    try:
        value = _coerce(dotted, key, _parse_text(key, text))
    except ConfigError as error:
        raise ConfigError(f"{error}{origin}") from error
    return _nest(dotted, value)


_BOOLS = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(("0", "false", "no", "off"), False)


def _parse_text(key: Key, text: str) -> Any:
    """The value that ``text`` means for this key, or ``text`` itself for the check to refuse."""
    if key.kind == "bool":
        return _BOOLS.get(text.lower(), text)
    if key.kind in ("int", "float"):
        try:
            return int(text) if key.kind == "int" else float(text)
        except ValueError:
            return text
    if key.kind in ("list", "names"):
        if text.startswith("["):
            try:
                return json.loads(text)
            except ValueError:
                return text
        return [part.strip() for part in text.split(",") if part.strip()]
    return text


# Checking


_EXPECTED = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "list": "a list",
    "names": "a list of names",
    "callable": "a function, set in code",
}


def _coerce(name: str, key: Key, value: Any) -> Any:
    if key.kind == "size":
        try:
            value = parse_size(value)
        except ConfigError as error:
            raise ConfigError(f"config key {name!r} {error}") from error
    elif not _fits(key, value):
        got = f"{value!r}, a {type(value).__name__}" if value is not None else "nothing"
        raise ConfigError(f"config key {name!r} must be {_EXPECTED[key.kind]}; got {got}")
    if key.kind == "float":
        value = float(value)
    if key.at_least is not None and value < key.at_least:
        raise ConfigError(f"config key {name!r} must be at least {key.at_least:g}; got {value}")
    if key.more_than is not None and value <= key.more_than:
        raise ConfigError(f"config key {name!r} must be more than {key.more_than:g}; got {value}")
    if key.choices and value not in key.choices:
        raise ConfigError(f"config key {name!r} must be one of {', '.join(key.choices)}; got {value!r}")
    return value


def _fits(key: Key, value: Any) -> bool:
    match key.kind:
        case "bool":
            return isinstance(value, bool)
        case "int":
            return isinstance(value, int) and not isinstance(value, bool)
        case "float":
            return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        case "str":
            return isinstance(value, str) and value != ""
        case "list":
            return isinstance(value, list)
        case "names":
            return isinstance(value, list) and all(isinstance(item, str) and item for item in value)
        case _:
            return callable(value)


def _check_table(name: str, table: Table, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"config key {name!r} must be a table of keys; got {value!r}")
    checked: dict[str, Any] = {}
    for inner, item in value.items():
        key = table.get(inner)
        if key is None:
            raise _unknown_key(f"{name}.{inner}")
        if item is not None or key.required:
            checked[inner] = _coerce(f"{name}.{inner}", key, item)
    _check_present(f"{name}.", table, checked)
    return checked


def _check_present(prefix: str, table: Mapping[str, Key | Table], checked: dict[str, Any]) -> None:
    required = [name for name, key in table.items() if isinstance(key, Key) and key.required]
    missing = [f"{prefix}{name}" for name in required if name not in checked]
    if missing:
        raise ConfigError(
            f"required config keys are missing: {', '.join(missing)}; the exemplars carry them all"
            f" ({', '.join(EXEMPLARS)})"
        )


def _check_engine(impl: str, backend: str) -> None:
    if impl in BACKENDS:
        if backend not in BACKENDS[impl]:
            raise ConfigError(
                f"config key 'backend' must be one of {', '.join(BACKENDS[impl])} for impl {impl!r};"
                f" got {backend!r}"
            )
        return
    # What a backend means to an engine from outside is for that engine to say.
    known = [*BACKENDS, *sorted(metadata.entry_points(group=ADAPTER_GROUP).names)]
    if impl not in known:
        raise ConfigError(
            f"config key 'impl' must be one of {', '.join(known)}; got {impl!r}, and no installed package"
            f" offers it in the entry-point group {ADAPTER_GROUP!r}{_suggest(impl, known)}"
        )


def _dotted_names() -> list[str]:
    names: list[str] = []
    for name, entry in SCHEMA.items():
        names += [name] if isinstance(entry, Key) else [f"{name}.{inner}" for inner in entry]
    return names


def _find_key(dotted: str) -> Key:
    table, _, inner = dotted.rpartition(".")
    scope: Any = SCHEMA.get(table, {}) if table else SCHEMA
    entry = scope.get(inner) if isinstance(scope, dict) else None
    if isinstance(entry, dict):
        raise ConfigError(f"{dotted!r} is a table; set one of its keys, such as {dotted}.{next(iter(entry))}")
    if entry is None:
        raise _unknown_key(dotted)
    return cast(Key, entry)


def _unknown_key(dotted: str) -> ConfigError:
    names = [*_dotted_names(), *(name for name, entry in SCHEMA.items() if isinstance(entry, dict))]
    hint = _suggest(dotted, names)
    if not hint:  # perhaps the right name in the wrong table
        last = dotted.rpartition(".")[2]
        same = [name for name in names if name.rpartition(".")[2] == last]
        hint = f"; did you mean {same[0]!r}?" if same else ""
    return ConfigError(f"unknown config key {dotted!r}{hint}")


def _suggest(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""
