"""``OutstandingBytes``: the bytes that this client has put and that are still held, exact and cheap per put.

A put is kept as one block, with its ids and the sizes of its columns, and each id points to its block: two
operations on dictionaries that run in C for the whole put. What a single row has is worked out only when some
rows of a block go and others stay.

Blocks lie in layers, one for each set of fields that is written together. A stage that writes other fields of
the same samples gets a layer of its own, so that nothing has to be looked up but whether a layer that shares
a field already has one of the ids, in which case those bytes are replaced.

Nothing here is locked: the owner (``dispatcher.py``) calls it from one thread at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, repeat

from rlplane.observability.sizes import ColumnSize

# Bytes per key are said to jump when a put has this many times the most that its fields ever had before.
JUMP_FACTOR = 4
# Above these numbers, empty ones are forgotten: some jobs use new names in every step.
_MANY_LAYERS = 64
_MANY_PARTITIONS = 1024
_ANY_FIELD = ""


@dataclass
class DataPlaneStats:
    """Totals since the client was made, and what it holds now. Only operations that succeeded count bytes."""

    total_bytes: int = 0
    total_keys: int = 0
    total_ops: int = 0
    bytes_outstanding: int = 0
    peak_bytes_outstanding: int = 0
    max_bytes_per_key_seen: int = 0
    last_put_bytes_per_key: int = 0


class OutstandingBytes:
    """Bytes by partition. ``stats`` has the sums."""

    def __init__(self) -> None:
        self.stats = DataPlaneStats()
        self._partitions: dict[str, _Partition] = {}

    def put(self, partition_id: str, ids: Sequence[str], columns: Sequence[ColumnSize], number: int) -> bool:
        """Count a put. ``number`` grows from put to put; whether its bytes per key jumped is returned."""
        partition = self._partitions.get(partition_id)
        if partition is None:
            partition = self._add_partition(partition_id)
        layer = partition.layer(tuple([column.name for column in columns]))
        block = _Block(ids, columns, number)
        n_bytes = block.total
        change = n_bytes
        if not layer.owners.keys().isdisjoint(ids):
            change -= layer.remove(ids)
        for other, shared in layer.overlaps:
            if not other.owners.keys().isdisjoint(ids):
                change -= other.strip(ids, shared)
        layer.owners.update(zip(ids, repeat(block)))
        partition.bytes += change
        stats = self.stats
        stats.bytes_outstanding += change
        if stats.bytes_outstanding > stats.peak_bytes_outstanding:
            stats.peak_bytes_outstanding = stats.bytes_outstanding
        return bool(ids) and self._note_size(layer, n_bytes // len(ids))

    def add(self, partition_id: str, ids: Sequence[str], n_bytes: int, number: int) -> None:
        """Count bytes of which the fields are not known: spread evenly, on top of what the keys have."""
        if not ids:
            return
        share, left = divmod(n_bytes, len(ids))
        partition = self._partitions.get(partition_id)
        layer = partition.layer((_ANY_FIELD,)) if partition else None
        counts = []
        for index, key in enumerate(ids):
            block = layer.owners.get(key) if layer else None
            before = block.row(block.position(key)) if block else 0
            counts.append(before + share + (index < left))
        self.put(partition_id, ids, [ColumnSize(_ANY_FIELD, sum(counts), 1, counts)], number)

    def clear(self, partition_id: str, ids: Iterable[str] | None) -> tuple[int, int]:
        """Take samples off, or (``None``) all of the partition. Returns how many and their bytes."""
        partition = self._partitions.get(partition_id)
        if partition is None:
            return 0, 0
        if ids is None:
            keys, freed = partition.keys(), partition.bytes
            for layer in partition.layers.values():
                layer.owners = {}
        else:
            wanted = list(dict.fromkeys(ids))
            layers = [layer for layer in partition.layers.values() if layer.owners]
            keys = len(set().union(*[layer.owners.keys() & wanted for layer in layers]))
            freed = sum([layer.remove(wanted) for layer in layers])
        partition.bytes -= freed
        self.stats.bytes_outstanding -= freed
        return keys, freed

    def held_ids(self, partition_id: str) -> list[str] | None:
        """The samples of a partition that are outstanding; None if nothing was ever put there."""
        partition = self._partitions.get(partition_id)
        if partition is None:
            return None
        return list(dict.fromkeys(chain.from_iterable(layer.owners for layer in partition.layers.values())))

    def clear_everything(self) -> None:
        """Take all samples of all partitions off."""
        for partition_id in list(self._partitions):
            self.clear(partition_id, None)

    def prune(self, partition_id: str, live: set[str], until: int) -> tuple[int, int]:
        """Take samples off that are not in ``live``, except those put after number ``until``."""
        partition = self._partitions.get(partition_id)
        if partition is None:
            return 0, 0
        gone: set[str] = set()
        recent: set[str] = set()
        for layer in partition.layers.values():
            missing = layer.owners.keys() - live
            new = {key for key in missing if layer.owners[key].number > until}
            recent |= new
            gone |= missing - new
        return self.clear(partition_id, gone - recent)

    def bytes_by_partition(self) -> dict[str, int]:
        """The bytes of each partition. One that holds nothing is left out; looked up, it has 0."""
        return Counter({name: held.bytes for name, held in self._partitions.items() if held.bytes})

    def keys(self, partition_id: str | None = None) -> int:
        """How many samples are held, in one partition or in all."""
        if partition_id is None:
            return sum(partition.keys() for partition in self._partitions.values())
        partition = self._partitions.get(partition_id)
        return partition.keys() if partition else 0

    def _add_partition(self, partition_id: str) -> _Partition:
        if len(self._partitions) >= _MANY_PARTITIONS:
            self._partitions = {name: held for name, held in self._partitions.items() if held.keys()}
        partition = self._partitions[partition_id] = _Partition()
        return partition

    def _note_size(self, layer: _Layer, per_key: int) -> bool:
        self.stats.last_put_bytes_per_key = per_key
        if per_key > self.stats.max_bytes_per_key_seen:
            self.stats.max_bytes_per_key_seen = per_key
        most = layer.most_per_key
        if per_key > most:
            layer.most_per_key = per_key
        return 0 < JUMP_FACTOR * most < per_key


class _Partition:
    __slots__ = ("_by_order", "bytes", "layers")

    def __init__(self) -> None:
        self.bytes = 0
        self.layers: dict[frozenset[str], _Layer] = {}
        self._by_order: dict[tuple[str, ...], _Layer] = {}

    def layer(self, names: tuple[str, ...]) -> _Layer:
        layer = self._by_order.get(names)
        return layer if layer is not None else self._find(names)

    def _find(self, names: tuple[str, ...]) -> _Layer:
        fields = frozenset(names)
        layer = self.layers.get(fields)
        if layer is None:
            if len(self.layers) >= _MANY_LAYERS:
                self._forget_empty_layers()
            layer = _Layer(fields)
            for other in self.layers.values():
                if shared := fields & other.fields:
                    layer.overlaps.append((other, shared))
                    other.overlaps.append((layer, shared))
            self.layers[fields] = layer
        self._by_order[names] = layer
        return layer

    def _forget_empty_layers(self) -> None:
        self.layers = {fields: layer for fields, layer in self.layers.items() if layer.owners}
        for layer in self.layers.values():
            layer.overlaps = [(other, shared) for other, shared in layer.overlaps if other.owners]
        self._by_order.clear()

    def keys(self) -> int:
        held = [layer.owners.keys() for layer in self.layers.values() if layer.owners]
        return len(held[0]) if len(held) == 1 else len(set().union(*held))


class _Layer:
    """Blocks that have the same fields, by the ids that are still theirs."""

    __slots__ = ("fields", "most_per_key", "overlaps", "owners")

    def __init__(self, fields: frozenset[str]) -> None:
        self.fields = fields
        self.owners: dict[str, _Block] = {}
        self.overlaps: list[tuple[_Layer, frozenset[str]]] = []
        self.most_per_key = 0

    def remove(self, ids: Sequence[str]) -> int:
        """Let go of those of ``ids`` that are here; returns their bytes."""
        blocks = list(map(self.owners.pop, ids, repeat(None)))
        freed = 0
        parted = set()
        for block, count in Counter(blocks).items():
            if block is None:
                continue
            if count == block.live:
                freed += block.total
            else:
                parted.add(block)
        if parted:
            for key, block in zip(ids, blocks, strict=True):
                if block is not None and block in parted:
                    freed += block.forget(key)
        return freed

    def strip(self, ids: Sequence[str], fields: frozenset[str]) -> int:
        """Let those of ``ids`` that are here have no bytes in ``fields``; returns what they had."""
        owners = self.owners
        return sum(owners[key].strip(key, fields) for key in ids if key in owners)


class _Block:
    """One put: ``live`` of its rows are still held, with ``total`` bytes."""

    __slots__ = ("_positions", "columns", "ids", "live", "number", "total")

    def __init__(self, ids: Sequence[str], columns: Sequence[ColumnSize], number: int) -> None:
        self.ids = ids
        self.columns = columns
        self.number = number
        self.live = len(ids)
        self.total = sum([column.total for column in columns]) if ids else 0
        self._positions: dict[str, int] | None = None

    def position(self, key: str) -> int:
        if self._positions is None:
            self._positions = {name: index for index, name in enumerate(self.ids)}
        return self._positions[key]

    def row(self, position: int) -> int:
        return sum(column.row(position) for column in self.columns)

    def forget(self, key: str) -> int:
        freed = self.row(self.position(key))
        self.live -= 1
        self.total -= freed
        return freed

    def strip(self, key: str, fields: frozenset[str]) -> int:
        position, rows = self.position(key), len(self.ids)
        freed = sum(column.drop(position, rows) for column in self.columns if column.name in fields)
        self.total -= freed
        return freed
