"""Starting a plane on Ray, finding one that runs, and ending what was started.

A plane is a handful of Ray actors in one namespace: TransferQueue's controller and storage units, the actor
that the control service runs in and, for Mooncake, its master. They belong to the process that started them:
Ray ends them with it. TransferQueue's controller is there for programs that speak TransferQueue themselves;
nothing of ours asks it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlplane.adapters.client import DEFAULT_ACK_TIMEOUT_MS
from rlplane.adapters.transfer_queue.runtime_env import _patch_tq_actor_runtime_env
from rlplane.adapters.transfer_queue.service import ServiceActor
from rlplane.errors import ConfigError, MissingExtraError, PlaneConnectionError
from rlplane.interfaces import ADDRESS_VARIABLE, DataPlaneConfig
from rlplane.storage.chunks import ChunkStore
from rlplane.storage.mooncake.network import (
    _get_local_node_ip,
    _mooncake_transport_config,
    set_mooncake_environment,
)
from rlplane.storage.mooncake.processes import MooncakeMaster, MooncakeUnit, quiet_stderr, store_config
from rlplane.storage.mooncake.sharing import share
from rlplane.storage.mooncake.store import MooncakeStore
from rlplane.storage.places import UnitsDiedError
from rlplane.storage.transfer_queue import theirs
from rlplane.storage.transfer_queue.units import StorageUnits

# TransferQueue's own names, so that its tools find the controller where they look for it.
NAMESPACE = "transfer_queue"
CONTROLLER = "TransferQueueController"
UNIT = "TransferQueueStorageUnit#{}"
MASTER = "rlplane.mooncake_master"
SERVICE = "rlplane.control"
AS_TRANSFER_QUEUE = "RLPLANE_AS_TRANSFER_QUEUE"

# What decides how a plane is made; two processes that disagree about it cannot share one.
_PLANE_KEYS = ("backend", "storage_capacity", "num_storage_units", "global_segment_size")
_PLANE_OPTIONS = ("mooncake_protocol", "mooncake_device", "mooncake_master_port")

_NO_MOONCAKE = "backend mooncake_cpu needs Mooncake; install it with: pip install 'rlplane[mooncake]'"


@dataclass
class Plane:
    """A running plane, and what of it this process started.

    ``stores`` is what a client of the storage needs to know; ``service`` is the address of the control
    service and the token that it asks for; ``config`` is what the plane was made from.
    """

    namespace: str
    backend: str
    config: dict[str, Any]
    stores: dict[str, Any]
    service: dict[str, str] = field(repr=False)  # it has the token, which belongs into no log
    actor: Any
    # Where the actors of the storage are: handles of them would not survive a restart of the service's actor.
    home: str
    journal_dir: str = ""
    # Where processes on all machines may send their measurements, if anybody has said; with a secret in it.
    aggregator: str = field(default="", repr=False)
    # What viewers on all machines need to watch the run, likewise.
    run: str = field(default="", repr=False)
    started: list[Any] = field(default_factory=list)
    started_ray: bool = False
    set_address: bool = False

    def describe(self) -> dict[str, Any]:
        """What others need to know of it, to serve it or to join."""
        names = ("namespace", "backend", "config", "stores", "service", "home", "journal_dir")
        return {name: getattr(self, name) for name in (*names, "aggregator", "run")}

    @property
    def units(self) -> list[Any]:
        """The actors of the storage units."""
        return [self._storage_actor(UNIT.format(rank)) for rank in range(self.config["num_storage_units"])]

    @property
    def master(self) -> Any:
        """The actor of Mooncake's master; None where there is none."""
        return self._storage_actor(MASTER) if self.backend == "mooncake_cpu" else None

    def check_alive(self, names: Sequence[str], timeout_s: float) -> None:
        """Raise when one of these actors has died: a ``UnitsDiedError`` for a storage unit, which nobody
        starts again. One that only does not answer may be busy."""
        ray = _ray()
        for name in names:
            try:
                actor = self._storage_actor(name)
                ray.get(actor.get_zmq_server_info.remote(), timeout=max(0.5, min(timeout_s, 5.0)))
            except (ray.exceptions.GetTimeoutError, ray.exceptions.ActorUnavailableError):
                continue
            except (ValueError, ray.exceptions.ActorDiedError) as error:
                died = PlaneConnectionError if name == MASTER else UnitsDiedError
                raise died(f"{name} has died: {str(error).splitlines()[0]}") from error
            except ray.exceptions.RayError as error:
                raise PlaneConnectionError(
                    f"{name} has died or failed: {str(error).splitlines()[0]}"
                ) from error

    def check_unit(self, rank: int, timeout_s: float) -> None:
        """Raise when the storage unit of this rank has died."""
        self.check_alive([UNIT.format(rank)], timeout_s)

    def _storage_actor(self, name: str) -> Any:
        ray = _ray()
        if not ray.is_initialized():
            raise PlaneConnectionError("Ray was shut down under this client")
        return ray.get_actor(name, namespace=self.home)

    def find_service(self) -> tuple[str, str]:
        """Where the control service is now, and the token that it asks for. Ray starts it again when it
        dies."""
        self.service = self._ask(self.actor.describe.remote)["service"]
        return self.service["address"], self.service["token"]

    def publish_aggregator(self, address: str, run: str) -> None:
        """Tell all who join where to send measurements, and viewers how to watch the run."""
        self._ask(self.actor.publish_aggregator.remote, address, run)

    def find_aggregator(self) -> str | None:
        """Where to send measurements, if anybody has said."""
        return self._ask(self.actor.describe.remote)["aggregator"] or None

    def _ask(self, method: Callable[..., Any], *arguments: Any) -> Any:
        ray = _ray()
        if not ray.is_initialized():
            raise ConnectionError("Ray was shut down under this client")
        try:
            return ray.get(method(*arguments), timeout=5.0)
        except ray.exceptions.RayError as error:
            raise ConnectionError(f"the actor of the control service does not answer: {error}") from error

    def end(self) -> None:
        """End the actors, the Mooncake master and the Ray that this process started, and only those."""
        import ray

        if self.started:
            with contextlib.suppress(Exception):
                ray.get(self.actor.close.remote(), timeout=5)
            with contextlib.suppress(Exception):
                ray.get(self.master.stop.remote(), timeout=10)
        for actor in reversed(self.started):
            with contextlib.suppress(Exception):
                ray.kill(actor)
        self.started = []
        if self.set_address:
            os.environ.pop(ADDRESS_VARIABLE, None)
            self.set_address = False
        if self.started_ray:
            self.started_ray = False
            ray.shutdown()


def _init_tq(cfg: DataPlaneConfig) -> Plane:
    """Start a plane for ``cfg``, or join the one that runs in its namespace, if it is made the same way.

    Raises:
        ConfigError: A plane made in another way runs there; the message shows the difference.
    """
    options = _options(cfg)
    if cfg["backend"] == "mooncake_cpu" and importlib.util.find_spec("mooncake") is None:
        raise MissingExtraError(_NO_MOONCAKE)  # before a Ray is started for nothing
    started_ray = _ensure_ray(cfg, start=True)
    if options.get("pin_runtime_env"):
        _patch_tq_actor_runtime_env()
    starting = _Start(cfg)
    try:
        plane = _find(cfg) or starting.run()
        _refuse_another_config(cfg, plane)
    except BaseException:
        starting.undo()
        if started_ray:
            _ray().shutdown()
        raise
    plane.started_ray = started_ray
    if started_ray and ADDRESS_VARIABLE not in os.environ:
        # For children that are not Ray's, such as subprocesses of the driver.
        os.environ[ADDRESS_VARIABLE] = _ray().get_runtime_context().gcs_address
        plane.set_address = True
    return plane


def _connect_existing(cfg: DataPlaneConfig) -> Plane:
    """Join the plane that runs in the namespace of ``cfg``; wait for it as long as an answer may take.

    Raises:
        PlaneConnectionError: There is none.
    """
    started_ray = _ensure_ray(cfg, start=False)
    deadline = time.monotonic() + ack_timeout_s(cfg)
    while True:
        plane = _find(cfg)
        if plane is not None:
            plane.started_ray = started_ray
            return plane
        if time.monotonic() > deadline:
            if started_ray:
                _ray().shutdown()
            raise PlaneConnectionError(
                f"no plane runs in the Ray namespace {namespace(cfg)!r}; "
                "a client with bootstrap=True starts one"
            )
        time.sleep(0.05)


def _find(cfg: DataPlaneConfig) -> Plane | None:
    ray = _ray()
    try:
        actor = ray.get_actor(SERVICE, namespace=namespace(cfg))
    except ValueError:
        return None
    try:
        found = ray.get(actor.describe.remote(), timeout=ack_timeout_s(cfg))
    except ray.exceptions.GetTimeoutError:
        raise PlaneConnectionError(
            f"the plane in the Ray namespace {namespace(cfg)!r} did not answer "
            f"within {ack_timeout_s(cfg):g} s"
        ) from None
    except ray.exceptions.RayError:
        # It died between the two calls.
        return None
    return Plane(**found, actor=actor)


def _refuse_another_config(cfg: DataPlaneConfig, plane: Plane) -> None:
    running = plane.config
    wanted = plane_config(cfg)
    lines = [
        f"  {key}: it has {running.get(key)!r}, this config says {wanted[key]!r}"
        for key in wanted
        if wanted[key] != running.get(key)
    ]
    if lines:
        raise ConfigError(
            f"a plane runs in the Ray namespace {plane.namespace!r} that was started with another config; "
            "connect with bootstrap=False, or choose another transfer_queue.namespace:\n" + "\n".join(lines)
        )


def plane_config(cfg: DataPlaneConfig) -> dict[str, Any]:
    """The part of a config that a plane is made from."""
    options = _options(cfg) if cfg["backend"] == "mooncake_cpu" else {}
    return {
        **{key: cfg[key] for key in _PLANE_KEYS},  # type: ignore[literal-required]
        **{f"transfer_queue.{key}": options[key] for key in _PLANE_OPTIONS if options.get(key) is not None},
    }


class NoController:
    """Has the name of TransferQueue's controller where ours stand in for TransferQueue."""

    def get_zmq_server_info(self) -> None:
        """Answer, as the controller does when it is asked whether it lives."""


class _Start:
    """Starts the actors of a plane one by one, so that a failure can take back those that it has."""

    def __init__(self, cfg: DataPlaneConfig) -> None:
        self._cfg, self._options = cfg, _options(cfg)
        self._namespace = namespace(cfg)
        self._actors: list[Any] = []

    def run(self) -> Plane:
        # Servers that wait for messages: a job that has taken every CPU must not keep them from starting.
        servers: dict[str, Any] = {"num_cpus": 0, "namespace": self._namespace}
        stands_in = theirs.stands_in()
        if stands_in:
            # The job speaks TransferQueue to us. Its actors must be their own all the same.
            servers["runtime_env"] = {"env_vars": {AS_TRANSFER_QUEUE: "0"}}
        try:
            first = (self._claim_name if stands_in else self._controller)(servers)
        except ValueError:
            return self._lost_the_race()
        self._actors.append(first)
        mooncake = self._cfg["backend"] == "mooncake_cpu"
        if mooncake:
            master = self._actor(MooncakeMaster, {**servers, "name": MASTER})(
                self._options.get("node_ip"), self._options.get("mooncake_master_port")
            )
            units, stores = self._mooncake_units(master, servers)
        else:
            units = self._simple_units(servers)
        infos = self._get([actor.get_zmq_server_info.remote() for actor in [first, *units]])
        if not mooncake:
            stores = {"zmq_info": dict(enumerate(infos[1:]))}
        plane = Plane(
            self._namespace,
            self._cfg["backend"],
            plane_config(self._cfg),
            stores,
            {},
            None,
            self._namespace,
        )
        if self._cfg.get("journal") is not False:
            files = self._cfg.get("journal_dir") or tempfile.gettempdir()
            plane.journal_dir = str(Path(files) / f"rlplane-{secrets.token_hex(16)}")
        options = {**servers, "name": SERVICE, "max_restarts": -1}
        plane.actor = self._actor(ServiceActor, options)(dict(self._cfg), plane.describe())
        plane.service = self._get([plane.actor.describe.remote()])[0]["service"]
        if not stands_in:
            self._store_config(first, infos[0], stores)
        plane.started = list(self._actors)
        return plane

    @staticmethod
    def _controller(servers: Mapping[str, Any]) -> Any:
        """TransferQueue's controller, for programs that speak TransferQueue themselves."""
        from transfer_queue.sampler import SequentialSampler

        return (
            theirs.load("controller")
            .TransferQueueController.options(name=CONTROLLER, **servers)
            .remote(sampler=SequentialSampler, polling_mode=True)
        )

    @staticmethod
    def _claim_name(servers: Mapping[str, Any]) -> Any:
        """Something in the place of the controller, so that nobody else starts a plane here."""
        return _ray().remote(NoController).options(name=CONTROLLER, **servers).remote()

    def undo(self) -> None:
        for actor in self._actors:
            with contextlib.suppress(Exception):
                _ray().kill(actor)

    def _actor(self, cls: type, options: Mapping[str, Any]) -> Any:
        remote = _ray().remote(cls).options(**options)

        def start(*args: Any) -> Any:
            actor = remote.remote(*args)
            self._actors.append(actor)
            return actor

        return start

    def _simple_units(self, servers: Mapping[str, Any]) -> list[Any]:
        SimpleStorageUnit = theirs.load("storage.simple_storage").SimpleStorageUnit
        # Capacity is the control service's business: a unit counts chunks, not samples.
        config = {"total_storage_size": None, "num_data_storage_units": self._cfg["num_storage_units"]}
        units = []
        for rank, strategy in enumerate(self._places()):
            unit = SimpleStorageUnit.options(
                name=UNIT.format(rank), scheduling_strategy=strategy, **servers
            ).remote(config=config)
            self._actors.append(unit)
            units.append(unit)
        return units

    def _mooncake_units(self, master: Any, servers: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        address = self._get([master.address.remote()])[0]
        segment, buffer = self._cfg["global_segment_size"], self._cfg["local_buffer_size"]
        unit_config = store_config(address, self._options, segment, min(buffer, 16 << 20))
        units = [
            self._actor(
                MooncakeUnit, {**servers, "name": UNIT.format(rank), "scheduling_strategy": strategy}
            )(unit_config, self._options.get("node_ip"), not self._options.get("log_to_driver"))
            for rank, strategy in enumerate(self._places())
        ]
        return units, store_config(address, self._options, 0, buffer)

    def _places(self) -> list[Any]:
        common = theirs.load("utils.common")
        return list(common.get_node_round_robin_scheduling_strategies(self._cfg["num_storage_units"]))

    def _store_config(self, controller: Any, info: Any, stores: dict[str, Any]) -> None:
        """Leave the config where TransferQueue's own clients look for it, so that they can join too."""
        from omegaconf import OmegaConf

        name = "MooncakeStore" if self._cfg["backend"] == "mooncake_cpu" else "SimpleStorage"
        conf = OmegaConf.create(
            {
                "controller": {"zmq_info": info, "polling_mode": True},
                "backend": {"storage_backend": name, name: dict(stores)},
            },
            flags={"allow_objects": True},
        )
        self._get([controller.store_config.remote(conf)])

    def _get(self, refs: Sequence[Any]) -> list[Any]:
        ray = _ray()
        patience = max(120.0, ack_timeout_s(self._cfg))
        try:
            return list(ray.get(list(refs), timeout=patience))
        except ray.exceptions.GetTimeoutError:
            raise PlaneConnectionError(
                f"the plane's actors did not start within {patience:g} s; "
                f"Ray has {ray.available_resources()} left. If the machine is busy: Ray's workers give way "
                "to everything else, unless RAY_worker_niceness=0 is set where Ray is started"
            ) from None
        except ray.exceptions.RayTaskError as error:
            raise PlaneConnectionError(
                f"an actor of the plane failed to start: {error.cause or error}"
            ) from error
        except ray.exceptions.RayError as error:
            raise PlaneConnectionError(f"an actor of the plane failed to start: {error}") from error

    def _lost_the_race(self) -> Plane:
        """Somebody else starts a plane in this namespace, or runs TransferQueue there without us."""
        deadline = time.monotonic() + ack_timeout_s(self._cfg)
        while time.monotonic() < deadline:
            plane = _find(self._cfg)
            if plane is not None:
                return plane
            time.sleep(0.1)
        raise ConfigError(
            f"a TransferQueue controller that rlplane did not start runs in the Ray namespace "
            f"{self._namespace!r}; "
            "close it, or choose another transfer_queue.namespace"
        )


def open_store(cfg: DataPlaneConfig, plane: Plane, *, wait_for_close: bool = False) -> ChunkStore:
    """This process's way to the bytes of a plane."""
    options = _options(cfg)
    timeout_s = ack_timeout_s(cfg)
    # Before the import of TransferQueue, which reads part of its environment once, as Mooncake does.
    _quiet_transfer_queue(options)
    if plane.backend != "mooncake_cpu":
        return StorageUnits(
            plane.stores["zmq_info"], lambda rank: plane.check_unit(rank, timeout_s), timeout_s
        )
    ip = options.get("node_ip") or _get_local_node_ip()
    quiet = not options.get("log_to_driver")
    set_mooncake_environment(ip, quiet=quiet)
    # This host's RDMA devices are not those of the host that started the plane.
    transport = _mooncake_transport_config({**options, "mooncake_protocol": plane.stores["protocol"]})
    config = {**plane.stores, "local_hostname": ip, **transport}

    def connect() -> Any:
        with quiet_stderr(quiet):
            return theirs.load("storage.clients").StorageClientFactory.create("MooncakeStoreClient", config)

    try:
        client = share(repr(sorted(config.items())), connect)
    except ImportError as error:
        raise MissingExtraError(_NO_MOONCAKE) from error
    except (RuntimeError, TimeoutError) as error:
        raise PlaneConnectionError(f"Mooncake cannot be reached: {error}") from error

    def check_all() -> None:
        units = [UNIT.format(rank) for rank in range(plane.config["num_storage_units"])]
        plane.check_alive([MASTER, *units], timeout_s)

    return MooncakeStore(client, check_all, timeout_s, wait_for_close=wait_for_close)


def _ensure_ray(cfg: DataPlaneConfig, *, start: bool) -> bool:
    """Connect this process to Ray, starting one only if ``start`` and there is none; say whether we did."""
    ray = _ray()
    options = _options(cfg)
    controller_address = _address(cfg)  # a wrong one is refused even where Ray runs already
    if ray.is_initialized():
        return False
    address = options.get("ray_address") or controller_address or os.environ.get("RAY_ADDRESS")
    arguments: dict[str, Any] = {
        "log_to_driver": bool(options.get("log_to_driver")),
        "logging_level": logging.INFO if options.get("log_to_driver") else logging.ERROR,
    }
    if address is None:
        # Ray joins a cluster of this machine where there is one, and else starts one of its own.
        arguments["address"] = None if start else "auto"
    elif address != "local" or start:
        arguments["address"] = address
    else:
        raise PlaneConnectionError("transfer_queue.ray_address is 'local': there is no Ray to connect to yet")
    if start and address in (None, "local"):
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # Ray's workers give way to all other processes by default. The plane's actors are what those wait
        # for, and on a busy machine they would not even start in time.
        os.environ.setdefault("RAY_worker_niceness", "0")
        arguments["include_dashboard"] = False
        if options.get("node_ip"):
            arguments["_node_ip_address"] = options["node_ip"]
    try:
        ray.init(**arguments)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise PlaneConnectionError(f"no Ray at {address or 'this machine'}: {error}") from error
    return True


def _address(cfg: DataPlaneConfig) -> str | None:
    """``controller_address``, or what the process that started Ray left for its children: here, the address
    of the Ray cluster that the plane is on."""
    address = cfg.get("controller_address")
    if address and _is_local_plane(address):
        raise ConfigError(
            f"controller_address is {address!r}, which is that of a local plane; for impl transfer_queue it "
            "is the address of a Ray cluster, such as 10.0.0.1:6379"
        )
    inherited = os.environ.get(ADDRESS_VARIABLE)
    # A local plane's address in the environment is meant for local clients: a program may have both.
    return address or (inherited if inherited and not _is_local_plane(inherited) else None)


def _is_local_plane(address: str) -> bool:
    return address.startswith(("shm://", "unix://", "ipc://", "tcp://", "inproc://", "/"))


def _quiet_transfer_queue(options: Mapping[str, Any]) -> None:
    """TransferQueue gives every module a handler to standard error; ours say what went wrong by errors."""
    if options.get("log_to_driver"):
        return
    os.environ.setdefault("TQ_LOGGING_LEVEL", "CRITICAL")
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    for name in list(logging.root.manager.loggerDict):
        if name.split(".")[0] == "transfer_queue":
            logging.getLogger(name).setLevel(os.environ["TQ_LOGGING_LEVEL"])


def namespace(cfg: DataPlaneConfig) -> str:
    """The Ray namespace of the plane."""
    return str(_options(cfg).get("namespace") or NAMESPACE)


def ack_timeout_s(cfg: DataPlaneConfig) -> float:
    """How long an answer may take."""
    return cfg.get("ack_timeout_ms", DEFAULT_ACK_TIMEOUT_MS) / 1000


def _options(cfg: DataPlaneConfig) -> dict[str, Any]:
    return cfg.get("transfer_queue") or {}


def _ray() -> Any:
    try:
        import ray

        # Objects of it come with answers of Ray, which looks for the module where ours may stand in.
        theirs.load("utils.zmq_utils")
    except ImportError as error:
        raise MissingExtraError(
            "impl transfer_queue needs Ray and TransferQueue; "
            "install them with: pip install 'rlplane[transfer-queue]'"
        ) from error
    return ray
