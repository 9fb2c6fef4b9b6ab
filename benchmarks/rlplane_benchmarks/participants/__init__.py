"""The participants: rlplane, the limits of the machine, and the peers that a run asks for.

To add a participant: a store in this directory (``store.py`` says what one has) and an entry in
:data:`PARTICIPANTS`.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec

from rlplane.errors import InvalidRequestError, MissingExtraError
from rlplane_benchmarks.ray_cluster import ray_environment

__all__ = [
    "AS_TRANSFER_QUEUE",
    "CLUSTER_PARTICIPANTS",
    "COPY",
    "COPY_1",
    "PARTICIPANTS",
    "PEERS",
    "RLPLANE",
    "TRANSFER_QUEUE",
    "ZMQ",
    "Participant",
    "cluster_participants_for",
    "participants_for",
]

RLPLANE, COPY, COPY_1, ZMQ = "rlplane", "copy", "copy-1", "zmq"
TRANSFER_QUEUE = "transfer-queue"
AS_TRANSFER_QUEUE = "rlplane-as-tq"


@dataclass(frozen=True)
class Participant:
    """An engine or a limit that is measured, and the parts of the bench that it takes part in.

    ``store`` names its class as ``module:Class``. ``peer`` is the word of ``--peers`` that asks for it; a
    participant without it takes part always. With ``consumer_is_actor`` the reading side is a Ray actor that
    only the writing side can call.
    """

    name: str
    title: str
    store: str
    peer: str | None = None
    parts: frozenset[str] = frozenset({"data"})
    consumer_is_actor: bool = False
    most_resident: int = 1_000_000
    most_clients: int = 64
    modules: tuple[str, ...] = ()
    program: str | None = None
    extra: str = ""

    def environment(self) -> dict[str, str]:
        """What its processes need in their environment, in addition to what they inherit."""
        return ray_environment() if "ray" in self.modules else {}

    def check(self) -> None:
        """Raise ``MissingExtraError`` if it cannot run here."""
        for module in self.modules:
            if find_spec(module) is None:
                raise MissingExtraError(
                    f"{self.peer or self.name} needs the package {module!r}, which is not installed:"
                    f" pip install 'rlplane[{self.extra}]'"
                )
        if self.program is not None and shutil.which(self.program) is None:
            raise MissingExtraError(
                f"{self.peer or self.name} needs the program {self.program!r}, which is not on the path:"
                " install it with the system's packages"
            )


_HERE = "rlplane_benchmarks.participants"
_ALL_PARTS = frozenset({"data", "wake", "claims", "clients"})
_QUEUE_MODULES = ("ray", "transfer_queue", "omegaconf")
_on_ray = partial(Participant, modules=_QUEUE_MODULES, extra="transfer-queue")
_on_mooncake = partial(Participant, modules=(*_QUEUE_MODULES, "mooncake"), extra="mooncake")
_in_ray_store = partial(
    Participant, peer="ray", consumer_is_actor=True, modules=("ray",), extra="transfer-queue"
)

PARTICIPANTS = (
    Participant(COPY, "torch copy into mapped memory", f"{_HERE}.memory_copy:CopyStore"),
    Participant(COPY_1, "the same with one thread", f"{_HERE}.memory_copy:OneThreadCopyStore"),
    Participant(
        ZMQ,
        "bare ZMQ round trips",
        f"{_HERE}.zmq_round_trips:PingStore",
        parts=frozenset({"ping", "clients"}),
    ),
    Participant(
        RLPLANE,
        "rlplane, shared memory",
        f"{_HERE}.rlplane_client:PlaneStore",
        parts=_ALL_PARTS | {"images", "held", "loop"},
    ),
    _in_ray_store(
        "ray-batch",
        "Ray object store, the batch as one object",
        f"{_HERE}.ray_store:RayBatchStore",
        parts=frozenset({"data", "wake"}),
    ),
    _in_ray_store("ray-rows", "Ray object store, a row per object", f"{_HERE}.ray_store:RayRowsStore"),
    Participant(
        "redis",
        "Redis over a Unix socket, a hash per row",
        f"{_HERE}.redis_store:RedisStore",
        peer="redis",
        parts=_ALL_PARTS,
        modules=("redis",),
        program="redis-server",
        extra="bench",
    ),
    _on_ray(
        "tq-simple",
        "TransferQueue, SimpleStorage",
        f"{_HERE}.transfer_queue:SimpleStore",
        peer="tq-simple",
        parts=_ALL_PARTS | {"list", "images"},
        most_resident=100_000,
        most_clients=4,
    ),
    Participant(
        AS_TRANSFER_QUEUE,
        "rlplane, by TransferQueue's interface",
        f"{_HERE}.transfer_queue:FacadeStore",
        peer="tq-simple",
        parts=frozenset({"data", "list", "images"}),
    ),
    _on_mooncake(
        "tq-mooncake",
        "TransferQueue, Mooncake over TCP",
        f"{_HERE}.transfer_queue:MooncakeStore",
        peer="tq-mooncake",
        parts=frozenset({"data", "wake", "claims"}),
        most_resident=1_000,
    ),
)

CLUSTER_PARTICIPANTS = {
    "simple": (
        _on_ray(
            RLPLANE, "rlplane on TransferQueue's SimpleStorage", f"{_HERE}.rlplane_client:ClusterPlaneStore"
        ),
        _on_ray(
            TRANSFER_QUEUE, "plain TransferQueue, SimpleStorage", f"{_HERE}.transfer_queue:KeyValueStore"
        ),
    ),
    "mooncake_cpu": (
        _on_mooncake(RLPLANE, "rlplane on Mooncake over TCP", f"{_HERE}.rlplane_client:MooncakePlaneStore"),
        _on_mooncake(
            TRANSFER_QUEUE,
            "plain TransferQueue, Mooncake over TCP",
            f"{_HERE}.transfer_queue:MooncakeKeyValueStore",
        ),
    ),
}

PEERS = tuple(dict.fromkeys(participant.peer for participant in PARTICIPANTS if participant.peer))


def participants_for(peers: Sequence[str]) -> tuple[list[Participant], list[str]]:
    """The participants of a run with these peers, and notes about those that ``all`` had to leave out.

    Raises:
        InvalidRequestError: There is no such peer.
        MissingExtraError: A peer that was named cannot run here.
    """
    unknown = [peer for peer in peers if peer not in PEERS and peer != "all"]
    if unknown:
        raise InvalidRequestError(f"no peer is named {unknown[0]!r}; there are {', '.join(PEERS)} and all")
    chosen, notes = [], []
    for participant in PARTICIPANTS:
        if participant.peer is not None and participant.peer not in peers and "all" not in peers:
            continue
        try:
            participant.check()
        except MissingExtraError as error:
            if participant.peer in peers:
                raise
            notes.append(f"{participant.name} was left out: {error}")
            continue
        chosen.append(participant)
    return chosen, notes


def cluster_participants_for(backend: str) -> tuple[Participant, ...]:
    """The participants of the cluster bench on a backend.

    Raises:
        InvalidRequestError: There is no such backend.
        MissingExtraError: It cannot run here.
    """
    if backend not in CLUSTER_PARTICIPANTS:
        known = " and ".join(CLUSTER_PARTICIPANTS)
        raise InvalidRequestError(f"no cluster backend is named {backend!r}; there are {known}")
    for participant in CLUSTER_PARTICIPANTS[backend]:
        participant.check()
    return CLUSTER_PARTICIPANTS[backend]
