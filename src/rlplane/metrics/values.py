"""All the values of a run, for the exact figures at its end, in bounded memory.

Values gather in memory up to a bound; beyond it the largest logs are sorted and appended to one temporary
file. The file has no name once it is open, so a killed process leaves nothing. Order statistics then come
from binary searches in the sorted parts, on disk and in memory: nothing is loaded whole.
"""

from __future__ import annotations

import logging
import mmap
import os
import tempfile
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

DEFAULT_MAX_IN_MEMORY = 4_000_000

Int64Array = npt.NDArray[np.int64]

logger = logging.getLogger(__name__)


class ValueLog:
    """The values of one series, as 64-bit keys whose order is that of the values."""

    __slots__ = ("_store", "chunks", "lost", "n_in_memory", "spilled")

    def __init__(self, store: ValueStore) -> None:
        self._store = store
        self.chunks: list[Int64Array] = []
        self.n_in_memory = 0
        self.spilled: list[tuple[int, int]] = []
        self.lost = False

    def append(self, keys: Int64Array) -> None:
        """Keep the keys; the caller must not change the array afterwards."""
        if keys.size and not self.lost:
            # A view would keep all of what it is cut from in memory.
            self.chunks.append(keys if keys.base is None else keys.copy())
            self.n_in_memory += keys.size
            self._store.note_growth(keys.size)

    def sorted_parts(self) -> list[Int64Array]:
        """Sorted arrays that together hold every key."""
        parts = [self._store.read(offset, count) for offset, count in self.spilled]
        if self.chunks:
            merged = np.sort(np.concatenate(self.chunks))
            self.chunks = [merged]
            parts.append(merged)
        return parts


class ValueStore:
    """The logs of one registry, their common bound, and the file behind them.

    Args:
        max_in_memory: Values kept in memory, of all logs together.
        directory: Where the temporary file is made; the system's own by default. When it cannot be written,
            the logs that did not fit are marked ``lost`` and their series stays with its histogram.
    """

    def __init__(self, max_in_memory: int = DEFAULT_MAX_IN_MEMORY, directory: Path | None = None) -> None:
        if max_in_memory < 1:
            raise ValueError(f"max_in_memory is {max_in_memory}; it must be at least 1")
        self._max_in_memory = max_in_memory
        self._directory = directory
        self._logs: list[ValueLog] = []
        self._in_memory = 0
        self._file: BinaryIO | None = None
        self._size = 0
        self._map: mmap.mmap | None = None
        self.n_spilled = 0

    @property
    def n_in_memory(self) -> int:
        return self._in_memory

    def new_log(self) -> ValueLog:
        log = ValueLog(self)
        self._logs.append(log)
        return log

    def note_growth(self, count: int) -> None:
        self._in_memory += count
        if self._in_memory > self._max_in_memory:
            self._spill(self._in_memory - self._max_in_memory // 2)

    def _spill(self, at_least: int) -> None:
        moved = 0
        for log in sorted(self._logs, key=lambda log: -log.n_in_memory):
            if moved >= at_least or not log.chunks:
                break
            keys = np.sort(np.concatenate(log.chunks))
            try:
                log.spilled.append((self._write(keys), keys.size))
                self.n_spilled += keys.size
            except OSError as exc:
                logger.warning("the exact percentiles of a series are given up: cannot spill values: %s", exc)
                log.lost = True
                log.spilled.clear()
            log.chunks, log.n_in_memory = [], 0
            moved += keys.size
        self._in_memory -= moved

    def _write(self, keys: Int64Array) -> int:
        if self._file is None:
            self._file = tempfile.TemporaryFile(dir=self._directory, prefix="rlplane-values-")  # noqa: SIM115
            weakref.finalize(self, self._file.close)  # for a registry that is dropped without close
        offset = self._size
        data = keys.data.cast("B")
        try:
            while data:
                data = data[os.pwrite(self._file.fileno(), data, self._size) :]
                self._size = offset + keys.nbytes - len(data)
        except OSError:
            self._size = offset
            raise
        return offset

    def read(self, offset: int, count: int) -> Int64Array:
        """A spilled part, mapped and not loaded."""
        if self._map is None or len(self._map) < offset + 8 * count:
            if self._file is None:
                raise ValueError("nothing has been spilled")
            self._map = mmap.mmap(self._file.fileno(), self._size, access=mmap.ACCESS_READ)
        return np.frombuffer(self._map, np.int64, count, offset)

    def close(self) -> None:
        """Give up the file. Parts that were read before stay valid until they are dropped."""
        self._map = None
        if self._file is not None:
            self._file.close()
            self._file = None


# Up to this many values it is quicker to bring the parts together than to search in each.
_MERGE_BELOW = 1 << 21


def order_statistics(parts: Sequence[Int64Array], ranks: Iterable[int]) -> list[int]:
    """The keys of the given ranks (from 1) over all sorted parts."""
    total = sum(part.size for part in parts)
    if len(parts) > 1 and total <= _MERGE_BELOW:
        parts = [np.sort(np.concatenate(parts))]
    if len(parts) == 1:
        return [int(parts[0][rank - 1]) for rank in ranks]
    lowest = min(int(part[0]) for part in parts if part.size)
    highest = max(int(part[-1]) for part in parts if part.size)
    return [_search(parts, rank, lowest, highest) for rank in ranks]


def _search(parts: Sequence[Int64Array], rank: int, low: int, high: int) -> int:
    while low < high:
        middle = (low + high) // 2
        if sum(int(np.searchsorted(part, middle, side="right")) for part in parts) >= rank:
            high = middle
        else:
            low = middle + 1
    return low


def count_below(parts: Sequence[Int64Array], keys: Int64Array) -> Int64Array:
    """For each key, how many values over all sorted parts are below it."""
    below = np.zeros(keys.size, np.int64)
    for part in parts:
        below += np.searchsorted(part, keys, side="left")
    return below
