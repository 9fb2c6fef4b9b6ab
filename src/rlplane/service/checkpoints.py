"""``Checkpoints``: how a plane is frozen to be saved, and replaced by one that is loaded, while others are
served.

A save reads the plane as it was at one moment, in pieces. A load brings the new plane in pieces, of which
nobody sees anything until all are there; then it takes the place of the old one, which is cleared in slices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rlplane.control.clearing import Clearing
from rlplane.control.dump import StateDump
from rlplane.control.loading import BlockSize, StateLoader
from rlplane.errors import CheckpointError, InvalidRequestError, MissingDataError, PlaneConnectionError
from rlplane.service import protocol as wire
from rlplane.service.block_table import Block
from rlplane.service.clients import Client, PendingRequest
from rlplane.service.long_work import RestoreWork
from rlplane.storage.places import Place

if TYPE_CHECKING:
    from rlplane.service.core import ControlService

# Of a frozen plane: what takes some ten milliseconds to write, to send and to read.
_PIECE_BYTES = 2**20
_BLOCKS_AT_ONCE = 4096
_MANY_SAMPLES = 10_000  # a fork takes less time than to copy more than these

DumpApart = Callable[[Callable[[], Iterator[bytes]], Callable[[Iterator[bytes] | None], None]], None]
"""Takes what makes the pieces of a dump, and whom to give them to; None if they could not be made."""


@dataclass(eq=False, slots=True)
class _Frozen:
    """A plane that is being read: until when its places are from, and what is still to be read."""

    mark: int
    pieces: Iterator[bytes] | None = None


@dataclass(eq=False, slots=True)
class Loading:
    """A checkpoint so far as it has come: the state, its blocks by their numbers here, and by place their
    ends."""

    loader: StateLoader
    blocks: dict[int, Block] = field(default_factory=dict)
    ends: dict[int, list[int]] = field(default_factory=dict)


class Checkpoints:
    """Saves and loads of one service. What is being read is not dumped: whoever reads it begins anew when the
    service was started again."""

    def __init__(self, service: ControlService) -> None:
        self._service = service
        self.frozen: dict[int, _Frozen] = {}  # by lease
        # Has the pieces of a large dump made elsewhere, so that others are served meanwhile.
        self.dump_apart: DumpApart = lambda pieces, then: then(pieces())

    # Saving

    def freeze(self, request: PendingRequest, held: Client) -> None:
        """Keep everything as it is now for a client that will read it."""
        service = self._service
        lease = service.new_lease(held, [])
        frozen = self.frozen[lease] = _Frozen(service.table.freeze())
        held.grant(request, lease)

        def answer(pieces: Iterator[bytes] | None) -> None:
            if lease not in held.leases:
                return  # nobody waits for it any more
            if pieces is None:
                service.drop_lease(held, lease)
                died = CheckpointError("the process that dumps the state died")
                service.send(request, wire.failure_of(died))
                return
            frozen.pieces = pieces
            service.send(request, wire.Frozen(lease))

        if service.state.live > _MANY_SAMPLES:
            self.dump_apart(self._plane_in_pieces, answer)
        else:
            answer(self._plane_in_pieces())

    def _plane_in_pieces(self) -> Iterator[bytes]:
        """The plane as it is now."""
        state, table = self._service.state, self._service.table
        # What they have is never changed, only dropped.
        where = _blocks_in_pieces(list(state.blocks()), table.blocks.copy(), table.places.copy())
        return wire.FrozenPlane.pieces(where, StateDump(state).pieces())

    def next_piece(self, held: Client, lease: int) -> tuple[bytes, bool]:
        """Some more of a frozen plane, and whether that was all."""
        frozen = self.frozen.get(lease)
        if lease not in held.leases or frozen is None or frozen.pieces is None:
            raise MissingDataError(f"nothing more is known of a plane that was frozen under lease {lease}")
        pieces, length = [], 0
        for piece in frozen.pieces:
            pieces.append(piece)
            length += len(piece)
            if length >= _PIECE_BYTES or not piece:  # an empty one took its time too
                return b"".join(pieces), False
        frozen.pieces = None
        return b"".join(pieces), True

    def thaw(self, lease: int) -> bool:
        """Whatever was frozen under a lease is needed no longer; False if nothing was."""
        frozen = self.frozen.pop(lease, None)
        if frozen is not None:
            self._service.table.thaw(frozen.mark, self._service.storage)
        return frozen is not None

    # Loading

    def add_piece(self, held: Client, body: wire.RestorePiece) -> None:
        """Take some more of a checkpoint that a client loads. With one that is refused all of it is."""
        loading = held.loading.pop(body.load, None) or Loading(StateLoader(self._service.state.capacity))
        self._add_blocks(held, loading, body.blocks)
        if body.state:
            loading.loader.add(body.state)
        held.loading[body.load] = loading

    def _add_blocks(self, held: Client, loading: Loading, blocks: Mapping[int, Block]) -> None:
        table = self._service.table
        numbers, sizes = {}, {}
        for number, (home, start, layout) in blocks.items():
            place = held.reserved.get(home)
            if place is None:
                raise InvalidRequestError(
                    f"block {number} is in place {home}, which is not reserved for this client"
                )
            if start < 0 or start + layout.nbytes > place.size:
                raise InvalidRequestError(f"block {number} does not fit into place {home}")
            numbers[number] = table.new_number()
            sizes[number] = BlockSize(layout.nbytes, layout.rows)
            loading.blocks[numbers[number]] = (home, start, layout)
            loading.ends.setdefault(home, []).append(start + layout.nbytes)
        loading.loader.add_blocks(numbers, sizes)

    def restore(self, request: PendingRequest, held: Client, body: wire.Restore) -> None:
        """Put what was loaded in the place of everything else; the old state goes in slices."""
        service = self._service
        loading = held.loading.pop(body.load, None)
        if loading is None:
            raise InvalidRequestError("nothing has come of the checkpoint that is to be restored")
        missing = [number for number in body.places if number not in held.reserved]
        if missing:
            raise InvalidRequestError(f"places {missing[:3]} are not reserved for this client")
        others = loading.ends.keys() - set(body.places)
        if others:
            raise InvalidRequestError(f"places {sorted(others)[:3]} have blocks, and are not of this restore")
        restored = loading.loader.finish(release_claims=body.release_claims)
        # Clients that know a partition as it was before must notice that it is another one.
        latest = service.state.latest_version
        for partition in restored.partitions.values():
            partition.version = latest + 1
        restored.latest_dropped = latest
        service.carry_out(service.state.abort(PlaneConnectionError("the plane was replaced by a checkpoint")))
        for number in body.places:
            place, ends = held.reserved.pop(number), loading.ends.get(number)
            if ends is None:
                service.storage.free(place)
            else:
                service.table.put_in(service.storage.shrink(place, max(*ends, 1)), len(ends))
        service.table.blocks.update(loading.blocks)
        old = [Clearing.of_all(partition) for partition in service.state.partitions.values()]
        restored.live += service.state.live  # until that is cleared
        restored.now = service.now
        service.state = restored
        service.begin(
            RestoreWork(request, old, [restored.begin_advance(name) for name in restored.partitions])
        )


def _blocks_in_pieces(
    numbers: list[int], blocks: Mapping[int, Block], places: Mapping[int, Place]
) -> Iterator[bytes]:
    """The blocks of these numbers, and the places that they are in, as ``wire.FrozenBlocks``."""
    used: dict[int, Place] = {}
    yield b"\x92"
    yield b"\xdf" + len(numbers).to_bytes(4, "big")
    for at in range(0, len(numbers), _BLOCKS_AT_ONCE):
        some = {number: blocks[number] for number in numbers[at : at + _BLOCKS_AT_ONCE]}
        used |= {home: places[home] for home, _, _ in some.values()}
        yield _items(some)
    yield b"\xdf" + len(used).to_bytes(4, "big")
    homes = list(used)
    for at in range(0, len(homes), _BLOCKS_AT_ONCE):
        yield _items({home: used[home] for home in homes[at : at + _BLOCKS_AT_ONCE]})


def _items(some: Mapping[int, object]) -> bytes:
    """Entries of a map, without its header."""
    return wire.encode(some)[1 if len(some) < 16 else 3 :]
