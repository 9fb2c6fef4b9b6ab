"""Who takes part: rlplane, the machine's limits, and the peers that a run asks for.

To add a contestant: a store in this directory (``store.py`` says what one has) and an entry in
:data:`CONTESTANTS`.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from rlplane.errors import InvalidRequestError, MissingExtraError

__all__ = ["CONTESTANTS", "COPY", "COPY_1", "PEERS", "RLPLANE", "ZMQ", "Contestant", "contestants_for"]

RLPLANE, COPY, COPY_1, ZMQ = "rlplane", "copy", "copy-1", "zmq"


@dataclass(frozen=True)
class Contestant:
    """Someone who takes part, and in what.

    ``peer`` is the word of ``--peers`` that asks for it; None takes part always. ``consumer_inside``: the
    reading side is reached through the writing one, because it is an actor of its.
    """

    name: str
    title: str
    store: str
    peer: str | None = None
    parts: frozenset[str] = frozenset({"data"})
    consumer_inside: bool = False
    most_resident: int = 1_000_000
    most_clients: int = 64
    modules: tuple[str, ...] = ()
    program: str | None = None
    extra: str = ""

    def environment(self) -> dict[str, str]:
        """What its processes need in their environment, beside ours.

        A Ray that finds a token in the user's home asks for it, but a process that joins does not look there.
        So a contestant's Ray has a token of its own, which only its own processes know.
        """
        if "ray" not in self.modules:
            return {}
        return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}

    def check(self) -> None:
        """Raise ``MissingExtraError`` if it cannot run here."""
        for module in self.modules:
            if find_spec(module) is None:
                raise MissingExtraError(
                    f"the peer {self.peer!r} needs the package {module!r}, which is not installed:"
                    f" pip install 'rlplane[{self.extra}]'"
                )
        if self.program is not None and shutil.which(self.program) is None:
            raise MissingExtraError(
                f"the peer {self.peer!r} needs the program {self.program!r}, which is not on the path:"
                " install it with the system's packages"
            )


_HERE = "rlplane.bench.contestants"
_ALL_PARTS = frozenset({"data", "wake", "claims", "clients"})

CONTESTANTS = (
    Contestant(COPY, "torch copy into mapped memory", f"{_HERE}.copying:CopyStore"),
    Contestant(COPY_1, "the same with one thread", f"{_HERE}.copying:OneThreadCopyStore"),
    Contestant(
        ZMQ, "bare ZMQ round trips", f"{_HERE}.pinging:PingStore", parts=frozenset({"ping", "clients"})
    ),
    Contestant(RLPLANE, "rlplane, shared memory", f"{_HERE}.plane:PlaneStore", parts=_ALL_PARTS),
    Contestant(
        "ray-batch",
        "Ray object store, the batch as one object",
        f"{_HERE}.ray_store:RayBatchStore",
        peer="ray",
        parts=frozenset({"data", "wake"}),
        consumer_inside=True,
        modules=("ray",),
        extra="transfer-queue",
    ),
    Contestant(
        "ray-rows",
        "Ray object store, a row per object",
        f"{_HERE}.ray_store:RayRowsStore",
        peer="ray",
        consumer_inside=True,
        modules=("ray",),
        extra="transfer-queue",
    ),
    Contestant(
        "redis",
        "Redis over a Unix socket, a hash per row",
        f"{_HERE}.redis_store:RedisStore",
        peer="redis",
        parts=_ALL_PARTS,
        modules=("redis",),
        program="redis-server",
        extra="bench",
    ),
    Contestant(
        "tq-simple",
        "TransferQueue, SimpleStorage",
        f"{_HERE}.transfer_queue:SimpleStore",
        peer="tq-simple",
        parts=_ALL_PARTS,
        most_resident=100_000,
        most_clients=4,
        modules=("ray", "transfer_queue", "omegaconf"),
        extra="transfer-queue",
    ),
    Contestant(
        "tq-mooncake",
        "TransferQueue, Mooncake over TCP",
        f"{_HERE}.transfer_queue:MooncakeStore",
        peer="tq-mooncake",
        parts=frozenset({"data", "wake", "claims"}),
        most_resident=1_000,
        modules=("ray", "transfer_queue", "omegaconf", "mooncake"),
        extra="mooncake",
    ),
)

PEERS = tuple(dict.fromkeys(contestant.peer for contestant in CONTESTANTS if contestant.peer))


def contestants_for(peers: Sequence[str]) -> tuple[list[Contestant], list[str]]:
    """The contestants of a run with these peers, and notes about those that ``all`` had to leave out.

    Raises:
        InvalidRequestError: There is no such peer.
        MissingExtraError: A peer that was named cannot run here.
    """
    unknown = [peer for peer in peers if peer not in PEERS and peer != "all"]
    if unknown:
        raise InvalidRequestError(f"no peer is named {unknown[0]!r}; there are {', '.join(PEERS)} and all")
    chosen, notes = [], []
    for contestant in CONTESTANTS:
        if contestant.peer is not None and contestant.peer not in peers and "all" not in peers:
            continue
        try:
            contestant.check()
        except MissingExtraError as error:
            if contestant.peer in peers:
                raise
            notes.append(f"{contestant.name} was left out: {error}")
            continue
        chosen.append(contestant)
    return chosen, notes
