"""TransferQueue's config, and which of our engines serves it.

``backend.storage_backend`` decides: ``SimpleStorage`` is shared memory on one machine, and on several the
storage units of TransferQueue; ``MooncakeStore`` is Mooncake. What TransferQueue has no key for goes into the
table ``rlplane``, in the words of our own config; it wins.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from rlplane.compat.transfer_queue.sampler import SAMPLERS, BaseSampler
from rlplane.config import EXEMPLAR_OF, load_config
from rlplane.errors import ConfigError
from rlplane.interfaces import DataPlaneConfig

_DEFAULTS: dict[str, Any] = {
    "metrics": {"enabled": False, "port": 0},
    "controller": {"sampler": "SequentialSampler", "polling_mode": False, "zmq_info": None},
    "backend": {
        "storage_backend": "SimpleStorage",
        "SimpleStorage": {"total_storage_size": None, "num_data_storage_units": 2},
        "MooncakeStore": {
            "global_segment_size": 4 << 30,
            "local_buffer_size": 1 << 30,
            "protocol": "tcp",
            "device_name": "",
        },
    },
    "rlplane": {},
}
_UNLIMITED = 1 << 40
_SHM = "/dev/shm"


def merged(conf: Any) -> dict[str, Any]:
    """The whole config: what the user gave over the defaults, as plain dicts and objects."""
    return _over(_DEFAULTS, _plain(conf))


def returned(settings: dict[str, Any]) -> Any:
    """A config in the form that users of TransferQueue expect; a dict where OmegaConf is not installed."""
    try:
        from omegaconf import OmegaConf
    except ImportError:
        return settings
    return OmegaConf.create(settings, flags={"allow_objects": True})


def build_sampler(settings: Mapping[str, Any]) -> BaseSampler:
    """The sampler that a config names, or brings."""
    given = settings["controller"]["sampler"]
    if isinstance(given, str):
        if given not in SAMPLERS:
            raise ValueError(
                f"controller.sampler is {given!r}; it must be one of {sorted(SAMPLERS)}, or a sampler"
            )
        given = SAMPLERS[given]
    sampler = given() if isinstance(given, type) and issubclass(given, BaseSampler) else given
    if not isinstance(sampler, BaseSampler):
        raise ValueError(
            f"controller.sampler must be a name, a BaseSampler or a class of them, not {given!r}"
        )
    return sampler


def engine_config(settings: Mapping[str, Any], nodes: int) -> DataPlaneConfig:
    """Our config for it. ``nodes`` is the number of machines that the job has."""
    backend, own = settings["backend"], dict(settings["rlplane"])
    kind = backend["storage_backend"]
    keys: dict[str, Any] = {"allow_pickle": True}
    if kind == "SimpleStorage":
        table = backend["SimpleStorage"]
        exemplar = "shm" if nodes == 1 else "cluster-simple"
        keys["storage_capacity"] = table.get("total_storage_size") or _UNLIMITED
        if exemplar == "shm":
            keys["global_segment_size"] = _size_of_shared_memory()
        else:
            keys["num_storage_units"] = table.get("num_data_storage_units") or 2
    elif kind == "MooncakeStore":
        table, exemplar = backend["MooncakeStore"], "cluster-mooncake"
        keys |= {"storage_capacity": _UNLIMITED, "transfer_queue.mooncake_protocol": table["protocol"]}
        keys |= {key: table[key] for key in ("global_segment_size", "local_buffer_size")}
        if table.get("device_name"):
            keys["transfer_queue.mooncake_device"] = table["device_name"]
    else:
        raise ConfigError(
            f"backend.storage_backend is {kind!r}; rlplane serves SimpleStorage and MooncakeStore"
        )
    if "backend" in own:
        if own["backend"] not in EXEMPLAR_OF:
            known = sorted(EXEMPLAR_OF)
            raise ConfigError(f"rlplane.backend is {own['backend']!r}; it must be one of {known}")
        exemplar = EXEMPLAR_OF[own["backend"]]
        if not exemplar.startswith("cluster"):
            keys = {key: value for key, value in keys.items() if not key.startswith("transfer_queue.")}
    return load_config(exemplar, {**keys, **own})


def _size_of_shared_memory() -> int:
    try:
        about = os.statvfs(_SHM)
    except OSError:
        return 8 << 30
    return about.f_blocks * about.f_frsize or 8 << 30


def _plain(conf: Any) -> dict[str, Any]:
    if conf is None:
        return {}
    if type(conf).__module__.partition(".")[0] == "omegaconf":
        from omegaconf import OmegaConf

        conf = OmegaConf.to_container(conf, resolve=True)
    if not isinstance(conf, Mapping):
        raise ConfigError(f"init takes a mapping or an OmegaConf config, not {conf!r:.80}")
    return {str(key): value for key, value in conf.items()}


def _over(base: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    result = {key: _over(value, {}) if isinstance(value, Mapping) else value for key, value in base.items()}
    for key, value in given.items():
        if isinstance(value, Mapping):
            below = base.get(key)
            result[key] = _over(below if isinstance(below, Mapping) else {}, value)
        elif not isinstance(base.get(key), Mapping) or value is not None:
            result[key] = value
    return result
