"""The messages between a client and the controller of the shared-memory engine.

A request is msgpack and has a number, and its answer has the same. Bulk bytes are never in a message. Structs
are arrays on the wire, so new fields come last, with a default.
"""

from __future__ import annotations

from typing import Any

import msgspec

from rlplane import errors
from rlplane.rules import PartitionSpec

__all__ = [
    "Answer",
    "ClaimRequest",
    "Claimed",
    "Clear",
    "Commit",
    "Consumed",
    "Describe",
    "Described",
    "Done",
    "Envelope",
    "Extent",
    "Failure",
    "Freeze",
    "Frozen",
    "Layout",
    "ListIds",
    "Locate",
    "Located",
    "Place",
    "Register",
    "Reserve",
    "Reserved",
    "Restore",
    "Shutdown",
    "Status",
    "Unreserve",
    "answer_decoder",
    "encode",
    "envelope_decoder",
    "error_of",
    "failure_of",
]

ALIGN = 64


class Layout(msgspec.Struct, frozen=True, array_like=True):
    """What the bytes of a block mean. It is on the wire and on disk."""

    kind: str  # dense, jagged, object or enum
    dtype: str
    shape: tuple[int, ...]  # of one row; for jagged, of one element of a row
    rows: int
    values_nbytes: int
    vocabulary: list[str] | None = None

    @property
    def offsets_at(self) -> int:
        """Where the offsets are, counted from the start of the block."""
        return -(-self.values_nbytes // ALIGN) * ALIGN

    @property
    def nbytes(self) -> int:
        """The block's size, padded so that the next one is aligned."""
        if self.kind in ("jagged", "object"):
            return -(-(self.offsets_at + 8 * (self.rows + 1)) // ALIGN) * ALIGN
        return self.offsets_at


class Extent(msgspec.Struct, frozen=True, array_like=True):
    """A stretch of a segment. ``backed`` says that its pages exist, so that a write cannot fail."""

    number: int
    segment: int
    offset: int
    size: int
    backed: bool = True


class _Request(msgspec.Struct, array_like=True, tag=True):
    pass


class Register(_Request):
    spec: PartitionSpec


class Describe(_Request):
    partition_id: str


class Reserve(_Request):
    nbytes: int
    timeout_s: float


class Unreserve(_Request):
    extent: int


class Commit(_Request):
    partition_id: str
    version: int
    ids: list[str]
    fields: list[str]
    layouts: list[Layout]
    extent: int | None
    used: int
    timeout_s: float
    tags: list[dict[str, Any]] | None = None
    want: int = 0  # how much to reserve for the next put, if there is room to spare


class ClaimRequest(_Request):
    partition_id: str
    task: str
    fields: list[str]
    batch_size: int
    blocking: bool
    timeout_s: float
    where: dict[str, Any] | None = None


class Locate(_Request):
    partition_id: str
    ids: list[str]
    fields: list[str]


class Clear(_Request):
    partition_id: str
    ids: list[str] | None


class Consumed(_Request):
    partition_id: str
    tasks: list[str]


class Status(_Request):
    partition_id: str | None  # None: of the arena


class ListIds(_Request):
    partition_id: str


class Freeze(_Request):
    """Take the whole state at one point of time, with a lease on every block."""


class Restore(_Request):
    """Replace the whole state; the blocks were committed to extents of this client's."""

    state: bytes
    extents: list[int]
    blocks: dict[int, tuple[int, int, Layout]]  # number in the state -> (extent, start, layout)
    release_claims: bool = False


class Shutdown(_Request):
    pass


Request = (
    Register
    | Describe
    | Reserve
    | Unreserve
    | Commit
    | ClaimRequest
    | Locate
    | Clear
    | Consumed
    | Status
    | ListIds
    | Freeze
    | Restore
    | Shutdown
)


class Envelope(msgspec.Struct, array_like=True, frozen=True):
    """A request with its sender, the leases that the sender gives back with it, and the numbers of earlier
    requests whose answers it will not read."""

    owner: int
    request: Request
    released: list[int] = []
    abandoned: list[int] = []


class _Answer(msgspec.Struct, array_like=True, tag=True):
    pass


class Failure(_Answer):
    kind: str
    message: str
    ready: int = 0


class Done(_Answer):
    value: Any = None
    spare: Extent | None = None


class Described(_Answer):
    version: int
    spec: PartitionSpec


class Reserved(_Answer):
    extent: Extent


class Claimed(_Answer):
    ids: list[str]
    tags: list[dict[str, Any]]


class Place(msgspec.Struct, array_like=True, frozen=True):
    """Where the rows of one field are: neighbours of one block, or arrays of blocks and positions."""

    count: int
    block: int = 0
    start: int = 0
    blocks: bytes | None = None  # int64
    positions: bytes | None = None  # int32


class Located(_Answer):
    lease: int
    extents: list[Extent]
    blocks: dict[int, tuple[int, int, Layout]]  # number -> (index into extents, start in the extent, layout)
    places: list[Place]


class Frozen(_Answer):
    lease: int
    state: bytes
    extents: list[Extent]
    blocks: dict[int, tuple[int, int, Layout]]


Answer = Failure | Done | Described | Reserved | Claimed | Located | Frozen

envelope_decoder = msgspec.msgpack.Decoder(Envelope)
answer_decoder: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
encode = msgspec.msgpack.Encoder().encode


def failure_of(error: errors.DataPlaneError) -> Failure:
    """An error as it travels."""
    return Failure(type(error).__name__, error.message, getattr(error, "ready", 0))


def error_of(failure: Failure) -> errors.DataPlaneError:
    """The error that a failure stands for."""
    kind = getattr(errors, failure.kind, None) if failure.kind in errors.__all__ else None
    if kind is None:
        return errors.DataPlaneError(f"the controller failed: {failure.message}")
    if kind is errors.ClaimTimeoutError:
        return errors.ClaimTimeoutError(failure.message, failure.ready)
    error: errors.DataPlaneError = kind(failure.message)
    return error
