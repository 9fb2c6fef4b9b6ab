"""The TransferQueue that a native client speaks to: found, or started, and left as it was found."""

from __future__ import annotations

import contextlib
import time
from typing import Any

from rlplane.adapters.transfer_queue.plane import (
    CONTROLLER,
    NAMESPACE,
    _ensure_ray,
    _options,
    _quiet_transfer_queue,
    _ray,
    ack_timeout_s,
)
from rlplane.errors import ConfigError, PlaneConnectionError
from rlplane.interfaces import DataPlaneConfig
from rlplane.storage.mooncake.network import _get_local_node_ip, set_mooncake_environment
from rlplane.storage.mooncake.processes import MooncakeMaster, quiet_stderr, store_config
from rlplane.storage.transfer_queue import theirs

_LOOK_EVERY_S = 0.05


class RunningQueue:
    """TransferQueue's module in this process, connected.

    The module has one client per process. Whoever uses it beside us goes on using it: ``close`` ends what was
    started or connected here, and leaves what was there before.
    """

    def __init__(self, cfg: DataPlaneConfig, *, bootstrap: bool) -> None:
        options = _options(cfg)
        _quiet_transfer_queue(options)
        self._started_ray = _ensure_ray(cfg, start=bootstrap)
        self._master: Any = None
        self._is_started = self._is_connected = False
        if cfg["backend"] == "mooncake_cpu":
            # Before the import: Mooncake reads some of it when it is loaded, which TransferQueue does.
            ip = options.get("node_ip") or _get_local_node_ip()
            set_mooncake_environment(ip, quiet=not options.get("log_to_driver"))
        if theirs.stands_in():
            raise ConfigError(
                "transfer_queue.native speaks to the real TransferQueue, and rlplane stands in for it in "
                "this process (RLPLANE_AS_TRANSFER_QUEUE, or install()): one of the two has to go"
            )
        import transfer_queue
        from transfer_queue import interface

        self.module: Any = transfer_queue
        self._interface: Any = interface
        try:
            with quiet_stderr(not options.get("log_to_driver")):
                self._connect(cfg, bootstrap)
        except BaseException:
            self.close()
            raise

    @property
    def backend(self) -> str:
        """TransferQueue's name of its storage."""
        conf = _ray().get(self._controller().get_config.remote())
        return str(conf.backend.storage_backend)

    def _connect(self, cfg: DataPlaneConfig, bootstrap: bool) -> None:
        if self._interface._TQ_CLIENT is not None:
            return  # this process has it already
        deadline = time.monotonic() + ack_timeout_s(cfg)
        while not self._is_there():
            if bootstrap:
                self._is_started = self._is_connected = True
                self.module.init(self._conf(cfg))
                return
            if time.monotonic() > deadline:
                raise PlaneConnectionError(
                    f"no TransferQueue runs in the Ray namespace {NAMESPACE!r}; a client with bootstrap=True "
                    "starts one, and so does transfer_queue.init()"
                )
            time.sleep(_LOOK_EVERY_S)
        self._is_connected = True
        self.module.init()

    def _conf(self, cfg: DataPlaneConfig) -> Any:
        from omegaconf import OmegaConf

        if cfg["backend"] == "mooncake_cpu":
            options = _options(cfg)
            remote = _ray().remote(MooncakeMaster).options(num_cpus=0)
            self._master = remote.remote(options.get("node_ip"), options.get("mooncake_master_port"))
            address = _ray().get(self._master.address.remote())
            segment, buffer = cfg["global_segment_size"], cfg["local_buffer_size"]
            name, table = "MooncakeStore", store_config(address, options, segment, buffer)
            table["local_hostname"] = options.get("node_ip") or ""
        else:
            name = "SimpleStorage"
            table = {
                "total_storage_size": cfg["storage_capacity"],
                "num_data_storage_units": cfg["num_storage_units"],
            }
        return OmegaConf.create(
            {"controller": {"polling_mode": True}, "backend": {"storage_backend": name, name: table}}
        )

    @staticmethod
    def _controller() -> Any:
        return _ray().get_actor(CONTROLLER, namespace=NAMESPACE)

    def _is_there(self) -> bool:
        try:
            self._controller()
        except ValueError:
            return False
        return True

    def close(self) -> None:
        """End what was started here; leave what was joined."""
        manager = getattr(self._interface._TQ_CLIENT, "storage_manager", None)
        store = getattr(manager, "storage_client", None) if self._is_connected else None
        if self._is_started:
            with contextlib.suppress(Exception):
                self.module.close()
        elif self._is_connected and self._interface._TQ_CLIENT is not None:
            # Not transfer_queue.close(): it would end the controller, which is somebody else's.
            self._interface._TQ_CLIENT.close()
            self._interface._TQ_CLIENT = self._interface._TQ_CONTROLLER = None
        self._is_started = self._is_connected = False
        if store is not None:
            # TransferQueue leaves Mooncake's client open, which then looks for its master for ever.
            with contextlib.suppress(Exception):
                store.close()
        if self._master is not None:
            with contextlib.suppress(Exception):
                _ray().get(self._master.stop.remote(), timeout=10)
            _ray().kill(self._master)
            self._master = None
        if self._started_ray:
            self._started_ray = False
            _ray().shutdown()
