"""What the control service and a storage say to each other about bytes.

A write *reserves* a *place*, fills it, and *commits* it: then each of its *blocks* (one field of one write)
is known to the control state. A *lease* keeps a place from being recycled while somebody reads it.

A storage has two halves. Its :class:`StorageHost` lives with the control service and decides which places
there are. Its :class:`StorageClient` lives in every client and moves bytes into places and out of them.
Bytes never pass through the service.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from rlplane.errors import CapacityError, PlaneConnectionError

if TYPE_CHECKING:
    from torch import Tensor

    from rlplane.storage.assembly import ByteSource
    from rlplane.storage.layout import EncodedColumn
    from rlplane.storage.leases import ReadLease

ALIGN = 64
_WITH_OFFSETS = frozenset({"jagged", "ragged", "object", "tree"})


class Layout(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What the bytes of a block mean. It is on the wire and on disk, so new fields come last, with a
    default."""

    kind: str  # dense, jagged, ragged, object, tree or enum
    dtype: str
    shape: tuple[int, ...]  # of one row; for jagged, of one element of a row
    rows: int
    values_nbytes: int
    vocabulary: list[str] | None = None
    # Where the rows begin, as int64 bytes, for storages in which nobody can look into a block before fetching
    # it. None: they are in the block, behind the values.
    offsets: bytes | None = None
    # For trees in such storages: the paths of the tensors in them, and which bytes each row refers to.
    leaves: list[str] | None = None
    pieces: bytes | None = None
    # The CRC-32 of each row, as uint32 bytes, from writers that were told to compute them.
    sums: bytes | None = None

    @property
    def has_offsets(self) -> bool:
        """Whether its rows may have different sizes."""
        return self.kind in _WITH_OFFSETS

    @property
    def turn(self) -> tuple[str, tuple[int, ...]] | None:
        """The dtype and the shape of what a row may grow by; None if it cannot grow."""
        if self.kind == "jagged":
            return self.dtype, self.shape
        return (self.dtype, self.shape[1:]) if self.kind == "dense" and self.shape else None

    @property
    def offsets_at(self) -> int:
        """Where the offsets are, counted from the start of the block."""
        return -(-self.values_nbytes // ALIGN) * ALIGN

    @property
    def nbytes(self) -> int:
        """The block's size, padded so that the next one is aligned."""
        size = -(-self.values_nbytes // ALIGN) * ALIGN
        if self.offsets is None and self.kind in _WITH_OFFSETS:
            size = -(-(size + 8 * (self.rows + 1)) // ALIGN) * ALIGN
        return size


class Place(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Room for the blocks of one write. Its number is never used again; ``at`` means something to its storage
    only (in shared memory: segment, offset, and whether its pages exist; in storage units: those that were
    dead already, and have nothing of it)."""

    number: int
    size: int
    at: tuple[int, ...] = ()


Stretches = list[tuple[int, int]]


class FieldRows(msgspec.Struct, array_like=True, frozen=True):
    """Which rows of which blocks one field is read from: neighbours of one block, or arrays of blocks and
    positions. Rows that were written turn by turn are read from several, one behind the other."""

    count: int  # of the rows of blocks
    block: int = 0
    start: int = 0
    blocks: bytes | None = None  # int64
    positions: bytes | None = None  # int32
    turns: bytes | None = None  # int32: how many of them each row has; None: one each

    def homes(self) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """The block of each row of a block, and its position there."""
        if self.blocks is None:
            positions = np.arange(self.start, self.start + self.count, dtype=np.int32)
            return np.full(self.count, self.block, np.int64), positions
        return np.frombuffer(self.blocks, np.int64), np.frombuffer(self.positions or b"", np.int32)

    def numbers(self) -> Sequence[int]:
        """For each row of a block, the row of the read that it belongs to."""
        if self.turns is None:
            return range(self.count)
        turns = np.frombuffer(self.turns, np.int32)
        numbers: list[int] = np.repeat(np.arange(len(turns)), turns).tolist()
        return numbers


class Located(msgspec.Struct, array_like=True, tag=True):
    """The service's answer to a read: where the rows are, and the lease that keeps them there."""

    lease: int
    places: list[Place]
    blocks: dict[int, tuple[int, int, Layout]]  # number -> (index into places, start in the place, layout)
    rows: list[FieldRows]
    paths: list[str] | None = None  # for each field, which leaf of its trees is read; empty for all of them
    next_block: int = 0  # blocks from this number on were written after this answer


class Loss(msgspec.Struct, array_like=True, frozen=True):
    """What a client has found to be gone for good: whole storage units, by rank, ``of`` so many, or single
    chunks, by key."""

    units: tuple[int, ...] = ()
    of: int = 0
    chunks: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.units or self.chunks)


class RowsLostError(PlaneConnectionError):
    """Bytes that were written are not in the storage any more; ``rows`` are those of the read that are gone,
    and ``loss`` is what is known to be gone for good."""

    def __init__(self, message: str = "", rows: Sequence[int] = (), loss: Loss | None = None) -> None:
        super().__init__(message)
        self.rows, self.loss = list(rows), loss or Loss()


class UnitsDiedError(PlaneConnectionError):
    """Storage units have died under a write: another place has to be reserved, which avoids them."""

    def __init__(self, message: str = "", loss: Loss | None = None) -> None:
        super().__init__(message)
        self.loss = loss or Loss()


class OutOfPagesError(CapacityError):
    """The machine has no memory for a place now, although the plane may use it. Nothing was written."""


class StorageHost(Protocol):
    """The half that the control service owns: it hands places out and takes them back. Single-threaded."""

    @property
    def limit(self) -> int | None:
        """The most bytes that all places together may have; None if there is no bound."""

    @property
    def used(self) -> int:
        """The bytes of all places that are reserved, committed or not yet discarded."""

    def reserve(self, nbytes: int, client: int) -> Place | None:
        """A place of at least ``nbytes``, or None when there is no room now.

        Raises:
            CapacityError: The machine refuses to give the memory that the config allows.
        """

    def shrink(self, place: Place, nbytes: int) -> Place:
        """Give the end of a place back, beyond ``nbytes``. What is left keeps its number."""

    def free(self, place: Place) -> None:
        """Take a place back. Nobody reads it or writes to it any more."""

    def give_back(self, place: Place, stretches: Stretches) -> Stretches:
        """Take parts (start, stop) of a committed place back, as far as the storage can; returns the parts
        (start, size) that it has taken now. Nobody reads the place. What was taken before may be named
        again."""

    def read_numbers(self, place: Place, start: int, count: int) -> NDArray[np.int64]:
        """Whole numbers of 64 bits that a client has written; none if the storage cannot look."""

    def lose(self, loss: Loss) -> None:
        """Storage units have died: nothing is placed there any more, and there is less room.

        Raises:
            InvalidRequestError: The storage has no such units.
        """

    def offer_spare(self, client: int, place: Place) -> None:
        """Let a client use this place for its next put without asking."""

    def revoke_spare(self, client: int) -> bool:
        """Take the offer back; False if the client has begun to use it."""

    def join(self, client: int) -> None:
        """A client has connected."""

    def leave(self, client: int) -> None:
        """A client has gone."""

    def tidy(self, now: float) -> None:
        """Called now and then when the service has nothing to do."""

    def describe(self) -> dict[str, int]:
        """Sizes for people, by name."""

    def close(self) -> None:
        """Give everything back to the machine."""


class StorageClient(Protocol):
    """The half that every client owns: it moves bytes. Usable from several threads."""

    keeps_offsets: bool
    """Whether a reader can look into a block before it fetches it. If not, layouts carry the offsets."""

    is_remote: bool
    """Whether bytes travel over a network, so that moving even a few of them may have to wait."""

    def take_spare(self, place: Place) -> bool:
        """Begin to use a spare place; False if it was revoked."""

    def write(self, place: Place, columns: Sequence[EncodedColumn], deadline: float) -> None:
        """Fill a place with the blocks of these columns, one behind the other.

        Raises:
            CapacityError: The storage has no memory for it; an ``OutOfPagesError`` if it may have some later.
            PlaneConnectionError: The storage cannot be reached; a ``UnitsDiedError`` if another place can be.
        """

    def discard(self, place: Place) -> None:
        """Drop what was written to a place that will not be committed."""

    def open(self, located: Located, lease: ReadLease) -> ByteSource:
        """Bytes for a read. ``lease`` is kept until nothing that was read needs the place any more.

        Raises:
            RowsLostError: The storage has lost some of them.
        """

    def fetch(self, place: Place, start: int, nbytes: int) -> Tensor:
        """Bytes of one place, as uint8, valid as long as its lease is held."""

    def detach(self) -> None:
        """Make everything that was read independent of the storage, because the leases end."""

    def close(self) -> None:
        """Let go of the storage."""
