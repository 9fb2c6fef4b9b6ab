"""Which put may use which part of the room.

Producers that fill a plane to the brim with new samples would leave nothing for the columns that finish those
samples, and only finished samples are cleared: everything would stand still. So a share of the room is for
puts to samples that exist, and those come first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlplane.control.partition import Partition

if TYPE_CHECKING:
    from rlplane.service.clients import PendingRequest

DEFAULT_RESERVE_FOR_LIVE = 0.1


@dataclass(eq=False, slots=True)
class WaitingReservation:
    """A request for room, and the samples that it is for; without a partition it is for a checkpoint."""

    request: PendingRequest
    nbytes: int
    partition_id: str | None = None
    ids: Sequence[str] = ()


def is_for_live_samples(reservation: WaitingReservation, partitions: Mapping[str, Partition]) -> bool:
    """Whether a put makes no new samples. One that waits may become such a put, when another makes them."""
    if reservation.partition_id is None:
        return True
    partition = partitions.get(reservation.partition_id)
    return partition is not None and all(map(partition.rows.__contains__, reservation.ids))


def share_for_live(cfg: Mapping[str, Any]) -> float:
    """The share of the bytes that a config keeps for samples that exist."""
    share = cfg.get("reserve_for_live")
    return DEFAULT_RESERVE_FOR_LIVE if share is None else float(share)


def may_use(nbytes: int, used: int, limit: int, kept: int) -> bool:
    """Whether new samples may take so many bytes, when ``kept`` of the ``limit`` are for those that exist.

    A single put may be larger than what is left: when nothing else is there, nothing has to be finished.
    """
    return used + nbytes <= limit - kept or used == 0
