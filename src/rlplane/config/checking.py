"""A merged config against the keys: the same as a new dict with sizes in bytes, or what is wrong with it."""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Iterable, Mapping
from importlib import metadata
from typing import Any, cast

import msgspec

from rlplane.config.keys import KEYS, NOT_READ, REMOVED, TABLES, Key, PlaneSettings
from rlplane.errors import ConfigError
from rlplane.interfaces import DataPlaneConfig

ADAPTER_GROUP = "rlplane.adapters"
BACKENDS: dict[str, tuple[str, ...]] = {
    "local": ("memory", "shm"),
    "transfer_queue": ("simple", "mooncake_cpu"),
}
_log = logging.getLogger(__name__)


def check(config: dict[str, Any]) -> DataPlaneConfig:
    """Check a whole config of plain dicts and lists, with no table of NeMo-RL's left in it."""
    # An engine from an entry point gets a table of its own, under its name, as it was written.
    impl = str(config.get("impl"))
    own = {impl: config.pop(impl)} if impl not in TABLES and isinstance(config.get(impl), dict) else {}
    checked = check_table("", config)
    _check_engine(checked["impl"], checked["backend"])
    return cast(DataPlaneConfig, checked | own)


def settings(cfg: DataPlaneConfig | Mapping[str, Any]) -> PlaneSettings:
    """What ``load_config`` returned, as attributes, with the defaults of the keys that it leaves out."""
    return msgspec.convert(cfg, PlaneSettings)


def check_table(table: str, given: object) -> dict[str, Any]:
    """Check the keys of one table; ``""`` is the first level. A key that is null counts as not set."""
    if not isinstance(given, dict):
        raise ConfigError(f"config key {table!r} must be a table of keys; got {given!r}")
    prefix = f"{table}." if table else ""
    checked: dict[str, Any] = {}
    for name, value in given.items():
        key = KEYS.get(prefix + name)
        if prefix + name in NOT_READ:
            _log.info("the config key %s is one of NeMo-RL's that rlplane does not read", prefix + name)
        elif key is not None:
            if value is not None or key.required:
                checked[name] = check_value(key, value)
        elif not name or prefix + name not in TABLES:
            raise unknown_key(prefix + name)
        elif value is not None:
            checked[name] = check_table(prefix + name, value)
    fields = msgspec.structs.fields(TABLES[table])
    missing = [prefix + field.name for field in fields if field.required and field.name not in checked]
    if missing:
        raise ConfigError(
            f"required config keys are missing: {', '.join(missing)}; start from an exemplar, which has"
            " those of the first level: rlplane config --exemplar shm"
        )
    return checked


def check_value(key: Key, value: object) -> Any:
    """The value as its key's type: sizes in bytes, whole numbers as floats where a number is wanted."""
    try:
        return msgspec.convert(parse_size(value) if key.is_size else value, key.annotation)
    except ConfigError as error:
        raise ConfigError(f"config key {key.name!r} {error}") from error
    except msgspec.ValidationError as error:
        got = "nothing" if value is None else repr(value)
        if value is not None and "got `" in str(error):  # another type, which the value alone may not show
            got += f", a {type(value).__name__}"
        raise ConfigError(f"config key {key.name!r} must be {key.expected}; got {got}") from error


_SIZE = re.compile(r"(\d+(?:\.\d+)?|\d{1,3}(?:_\d{3})+)\s*([a-z]*)")
_UNITS = {"": 1, "b": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("kmgt", start=1)
    for suffix, base in (("b", 1000), ("ib", 1024))
}


def parse_size(value: object) -> int:
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
            f" offers it in the entry-point group {ADAPTER_GROUP!r}{suggest(impl, known)}"
        )


def find_key(dotted: str) -> Key:
    """The key of this name, for a value that comes as text."""
    if dotted in TABLES:
        inner = next(name for name in KEYS if name.startswith(f"{dotted}."))
        raise ConfigError(f"{dotted!r} is a table; set one of its keys, such as {inner}")
    if dotted not in KEYS:
        raise unknown_key(dotted)
    return KEYS[dotted]


def unknown_key(dotted: str) -> ConfigError:
    """What to raise for a name that is no key: what replaced it, or the key that was probably meant."""
    if dotted in REMOVED:
        return ConfigError(f"config key {dotted!r} was removed: {REMOVED[dotted]}")
    names = [*KEYS, *TABLES]
    last = dotted.rpartition(".")[2]  # perhaps the right name in the wrong table
    same = next((name for name in names if name.rpartition(".")[2] == last), None)
    hint = suggest(dotted, names) or (f"; did you mean {same!r}?" if same else "")
    return ConfigError(f"unknown config key {dotted!r}{hint}")


def suggest(name: str, known: Iterable[str]) -> str:
    """The end of an error message: the known name that is nearest to a wrong one, if one is near."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""
