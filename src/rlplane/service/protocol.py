"""The messages between a client and the control service, on every engine.

A request is msgpack and has a number, and its answer has the same. Bulk bytes are never in a message. Structs
are arrays on the wire, so new fields come last, with a default.

A connection begins with a :class:`Hello`. A client's first one is its *lifeline*: the service answers it
with a :class:`Welcome`, and takes the client for dead when it ends without a :class:`Goodbye`. Further
connections are *channels*, over which requests go.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from rlplane import errors
from rlplane.control.rules import PartitionSpec
from rlplane.control.snapshots import SampleColumn
from rlplane.storage.places import FieldRows, Layout, Located, Loss, Place

__all__ = [
    "CHANGES",
    "PROTOCOL_VERSION",
    "Abandon",
    "Advance",
    "Answer",
    "ClaimRequest",
    "Claimed",
    "Clear",
    "CloseGroup",
    "Commit",
    "Consumed",
    "Count",
    "Describe",
    "Described",
    "Done",
    "DropPartition",
    "Envelope",
    "Evicted",
    "Failure",
    "FieldRows",
    "Finish",
    "Freeze",
    "Frozen",
    "FrozenBlocks",
    "FrozenPiece",
    "FrozenPlane",
    "Goodbye",
    "Hello",
    "Inspect",
    "ListIds",
    "Locate",
    "Located",
    "Lost",
    "MarkClaimed",
    "Naming",
    "Peek",
    "Register",
    "Release",
    "Request",
    "Reserve",
    "Reserved",
    "Restore",
    "RestorePiece",
    "ServiceStatus",
    "ShouldAbort",
    "Shutdown",
    "Status",
    "Unclaim",
    "Unload",
    "Unname",
    "Unreserve",
    "Welcome",
    "Withdraw",
    "answer_decoder",
    "encode",
    "envelope_decoder",
    "error_of",
    "failure_of",
    "hello_decoder",
    "notice_decoder",
]

PROTOCOL_VERSION = 4

# How a connection begins


class Hello(msgspec.Struct, array_like=True, frozen=True):
    """The first message of every connection. Without ``client`` it is the lifeline of a new one."""

    version: int
    token: str
    pid: int = 0
    bootstrap: bool = False
    client: int | None = None
    secret: str = ""
    # A lifeline that was lost: the client is there again, holds these leases (on places, by number), and has
    # abandoned these requests, which the service may not have heard.
    resumes: bool = False
    leases: dict[int, list[int]] = {}
    abandoned: list[int] = []


class Welcome(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Who the client is from now on. ``secret`` is what its channels prove that with. ``lasting``: a client
    that loses the service may find it again."""

    client: int
    secret: str
    lasting: bool = False


# What a client says over its lifeline, without an answer


class _Notice(msgspec.Struct, array_like=True, tag=True):
    pass


class Release(_Notice):
    """A lease is not needed any more."""

    lease: int


class Abandon(_Notice):
    """Whoever made this request was interrupted and will not read its answer: undo what it was given."""

    number: int


class Goodbye(_Notice):
    """The client closes. It has not died."""


# Requests


class _Request(msgspec.Struct, array_like=True, tag=True):
    pass


class Register(_Request):
    spec: PartitionSpec
    extend: bool = False  # add its fields and tasks to a partition that exists, instead of replacing them


class Describe(_Request):
    partition_id: str


class Reserve(_Request):
    nbytes: int
    timeout_s: float
    # Which samples the room is for: those that exist come first. None: it is for a checkpoint.
    partition_id: str | None = None
    ids: list[str] = []
    named: int | None = None


class Unreserve(_Request):
    place: int
    # There was no memory for it: what is kept for next puts should be given back to the machine.
    out_of_pages: bool = False


class Commit(_Request):
    partition_id: str
    version: int
    ids: list[str]
    fields: list[str]
    layouts: list[Layout]
    place: int | None
    used: int
    timeout_s: float
    tags: list[dict[str, Any]] | None = None
    want: int = 0  # how much to reserve for the next put, if there is room to spare
    must_exist: bool = False
    appends: bool = False  # a turn, behind what the rows have
    finishes: bool = True
    named: int | None = None  # its ids and tags have come before, with :class:`Naming`


class Naming(_Request):
    """Some of the samples of a request that is still to come and says ``named``, with their tags: to read the
    names of very many at once would hold up others. Nobody sees anything of it before."""

    named: int  # chosen by the client
    at: int  # how many have come before
    ids: list[str]
    tags: list[dict[str, Any]] | None = None


class Unname(_Request):
    """The request whose samples were named will not come."""

    named: int


class ClaimRequest(_Request):
    partition_id: str
    task: str
    fields: list[str]
    batch_size: int
    blocking: bool
    timeout_s: float
    where: dict[str, Any] | None = None
    max_tokens: int | None = None
    order: str | None = None
    step: str | None = None
    dp_rank: int = 0
    dp_world: int = 1
    max_uses: int = 1
    repeat_where: dict[str, Any] | None = None
    split_groups: bool = False


class Finish(_Request):
    """Nothing new comes to a partition."""

    partition_id: str


class Advance(_Request):
    """The version of the weights that the trainer has published."""

    partition_id: str
    version: int


class ShouldAbort(_Request):
    partition_id: str
    ids: list[str]


class Evicted(_Request):
    """What was evicted and not told yet; answered like a claim."""

    partition_id: str
    limit: int | None = None


class CloseGroup(_Request):
    partition_id: str
    group: str | int
    reason: str
    fields: list[str] = []


class Peek(_Request):
    """Ids and tags of what is there, without claiming; answered like a claim."""

    partition_id: str
    where: dict[str, Any] | None = None
    fields: list[str] = []
    limit: int | None = None
    order: str | None = None


class Count(_Request):
    partition_id: str
    where: dict[str, Any] | None = None


class Locate(_Request):
    partition_id: str
    ids: list[str]
    fields: list[str]


class Lost(_Request):
    """Storage has died. That can be said twice without harm; the journal has a record of it of its own."""

    loss: Loss


class Clear(_Request):
    partition_id: str
    ids: list[str] | None
    named: int | None = None


class Unclaim(_Request):
    """Give a claim back, as far as this client still holds it."""

    partition_id: str
    task: str
    ids: list[str]
    is_finished: bool = False  # or keep it for good: the client is done with these samples


class MarkClaimed(_Request):
    """Set the cursor of a task for these samples (None: for all) by hand, whoever claimed them.

    To be marked as claimed, all must be there and unclaimed; else the answer is False, and nothing changes.
    """

    partition_id: str
    task: str
    ids: list[str] | None
    is_claimed: bool
    named: int | None = None


class Inspect(_Request):
    """Numbers, tags, fields and cursors of these samples, named by ids or by numbers (neither: of all); those
    that are missing are left out."""

    partition_id: str
    ids: list[str] | None = None
    with_kinds: bool = False  # also kind, dtype and shape of what each field holds
    numbers: list[int] | None = None


class DropPartition(_Request):
    partition_id: str


class Consumed(_Request):
    partition_id: str
    tasks: list[str]


class Status(_Request):
    partition_id: str


class ServiceStatus(_Request):
    pass


class ListIds(_Request):
    partition_id: str


class Freeze(_Request):
    """Take the whole plane at one point of time, with a lease on all places that there are. It comes in
    pieces, for which :class:`FrozenPiece` asks, so that nobody else waits until all of it is written."""


class FrozenPiece(_Request):
    """The next piece of what was frozen under this lease, and whether it is the last. Together they are a
    :class:`FrozenPlane`."""

    lease: int


class RestorePiece(_Request):
    """Some of what :class:`Restore` will put in the place of the whole state: blocks, which come before what
    refers to them, and a piece of the state. Nobody sees it before."""

    load: int  # chosen by the client, because it may load two checkpoints at once
    blocks: dict[int, tuple[int, int, Layout]] = {}  # number in the state -> (place, start, layout)
    state: bytes = b""


class Restore(_Request):
    """Replace the whole state by what was loaded; its blocks were written to places that this client has
    reserved."""

    load: int
    places: list[int]
    release_claims: bool = False


class Unload(_Request):
    """The pieces of a checkpoint that has come so far will not be restored."""

    load: int


class Shutdown(_Request):
    pass


class Withdraw(_Request):
    """The callers of these requests, which went over the same channel before, do not wait any more.

    Those that still wait end without an answer. The others were answered before this is: a client whose
    channel has many requests under way reads what they were given, and gives it back itself.
    """

    numbers: list[int]


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
    | ServiceStatus
    | ListIds
    | Freeze
    | FrozenPiece
    | RestorePiece
    | Restore
    | Unload
    | Shutdown
    | Peek
    | Count
    | Advance
    | ShouldAbort
    | Evicted
    | CloseGroup
    | Finish
    | Unclaim
    | DropPartition
    | Withdraw
    | MarkClaimed
    | Inspect
    | Lost
    | Naming
    | Unname
)


CHANGES: frozenset[type[Request]] = frozenset(
    {
        Register,
        Reserve,
        Unreserve,
        Commit,
        ClaimRequest,
        Clear,
        RestorePiece,
        Restore,
        Unload,
        Unclaim,
        DropPartition,
        Advance,
        CloseGroup,
        Finish,
        Evicted,
        Withdraw,
        MarkClaimed,
        Naming,
        Unname,
    }
)
"""The kinds of request that change something. The others can be made twice without harm."""


class Envelope(msgspec.Struct, array_like=True, frozen=True):
    """A request, with the leases that its client gives back by the way, and the numbers of earlier requests
    whose answers it will not read."""

    request: Request
    released: list[int] = []
    abandoned: list[int] = []
    # Requests whose answers the client has read: they need not be remembered any more.
    read: list[int] = []


# Answers


class _Answer(msgspec.Struct, array_like=True, tag=True):
    pass


# ``waited_s`` is how long the service kept a request because it had to wait for others.


class Failure(_Answer):
    kind: str
    message: str
    ready: int = 0
    waited_s: float = 0.0


class Done(_Answer):
    value: Any = None
    spare: Place | None = None
    waited_s: float = 0.0


class Described(_Answer):
    version: int
    spec: PartitionSpec


class Reserved(_Answer):
    place: Place
    waited_s: float = 0.0


class Claimed(_Answer):
    ids: list[str]
    tags: list[dict[str, Any]]
    waited_s: float = 0.0


class Frozen(_Answer):
    lease: int


Answer = Failure | Done | Described | Reserved | Claimed | Located | Frozen | Welcome


def _plain(value: Any) -> Any:
    """What is not read yet of the columns of very many samples."""
    if isinstance(value, SampleColumn):
        return value[:]
    raise TypeError(f"Encoding objects of type {type(value).__name__} is unsupported")


hello_decoder = msgspec.msgpack.Decoder(Hello)
notice_decoder: msgspec.msgpack.Decoder[Release | Abandon | Goodbye] = msgspec.msgpack.Decoder(
    Release | Abandon | Goodbye
)
envelope_decoder = msgspec.msgpack.Decoder(Envelope)
answer_decoder: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
encode = msgspec.msgpack.Encoder(enc_hook=_plain).encode


class FrozenBlocks(msgspec.Struct, array_like=True):
    """Where the bytes of a frozen plane are: for each block the number of its place, its start in there, and
    its layout, and the places by number."""

    blocks: dict[int, tuple[int, int, Layout]]
    places: dict[int, Place]


class FrozenPlane(FrozenBlocks):
    """A plane at one point of time."""

    state: bytes

    @staticmethod
    def pieces(where: Iterable[bytes], state: Iterable[bytes]) -> Iterator[bytes]:
        """How it travels: its blocks, its state, and how long the first of these is."""
        length = 0
        for piece in where:
            length += len(piece)
            yield piece
        yield from state
        yield length.to_bytes(8, "big")

    @classmethod
    def read(cls, data: bytes) -> FrozenPlane:
        """The plane that these pieces make together."""
        end = int.from_bytes(data[-8:], "big")
        where = msgspec.msgpack.decode(memoryview(data)[:end], type=FrozenBlocks)
        return cls(where.blocks, where.places, data[end:-8])


def failure_of(error: errors.DataPlaneError) -> Failure:
    """An error as it travels."""
    return Failure(type(error).__name__, error.message, getattr(error, "ready", 0))


def error_of(failure: Failure) -> errors.DataPlaneError:
    """The error that a failure stands for."""
    kind = getattr(errors, failure.kind, None) if failure.kind in errors.__all__ else None
    if kind is None:
        return errors.DataPlaneError(f"the control service failed: {failure.message}")
    if kind is errors.ClaimTimeoutError:
        return errors.ClaimTimeoutError(failure.message, failure.ready)
    error: errors.DataPlaneError = kind(failure.message)
    return error
