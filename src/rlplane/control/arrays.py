"""Columns in memory that grow, and stay where they are when they do."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

# Address space that a column of many rows is given at once; memory comes with what is written to it.
_RESERVED_BYTES = 2**27
_FEW_ROWS = 2**14
_IN_CACHE = 2**16  # rows whose part of a column fits into the caches


def filled(size: int, dtype: DTypeLike, fill: Any) -> NDArray[Any]:
    """A new column of ``size`` entries."""
    if size < _FEW_ROWS or np.dtype(dtype).hasobject:
        return np.full(size, fill, dtype)
    return _with_room(np.empty(0, dtype), size, fill)


def grown(array: NDArray[Any], size: int, fill: Any) -> NDArray[Any]:
    """The array with ``size`` entries, of which nobody may keep a view: its memory may be moved.

    Numbers have room to grow in place. To move a million rows of thirty columns would take tens of
    milliseconds, whether the memory is copied or the kernel moves it. Objects are moved by the kernel, and
    not copied: that would take long, above all while a child process dumps the state, because every object
    that is referred to once more is a page to copy.
    """
    if not array.dtype.hasobject and size >= _FEW_ROWS:
        return _with_room(array, size, fill)
    return _resized(array, size, fill)


def starts_of_runs(values: NDArray[Any]) -> NDArray[np.int64]:
    """Where equal values that follow one another begin."""
    if not len(values):
        return np.empty(0, np.int64)
    return np.concatenate(([0], np.flatnonzero(values[1:] != values[:-1]) + 1))


def _with_room(array: NDArray[Any], size: int, fill: Any) -> NDArray[Any]:
    before, room = len(array), _RESERVED_BYTES // array.itemsize
    reserved = array.base
    if not _is_reserved(reserved, array, size):
        if size > room:
            return _resized(array, size, fill)
        try:
            reserved = np.frombuffer(_address_space(), array.dtype)
        except OSError:  # the system does not lend address space without memory
            return _resized(array, size, fill)
        reserved[:before] = array
    assert isinstance(reserved, np.ndarray)
    if fill != 0:
        reserved[before:size] = fill
    return reserved[:size]


def _address_space() -> mmap.mmap:
    """Zeros. numpy asks for large pages for so many, and to make room for one of these in memory that is in
    pieces takes the kernel longer than others should wait."""
    space = mmap.mmap(-1, _RESERVED_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without large pages
            space.madvise(mmap.MADV_NOHUGEPAGE)
    return space


def _is_reserved(reserved: object, array: NDArray[Any], size: int) -> bool:
    """Whether an array is the beginning of a reserved column, which has room for ``size`` entries."""
    return (
        isinstance(reserved, np.ndarray)
        and reserved.nbytes == _RESERVED_BYTES
        and reserved.dtype == array.dtype
        and len(reserved) >= size
        and reserved.ctypes.data == array.ctypes.data
    )


def _resized(array: NDArray[Any], size: int, fill: Any) -> NDArray[Any]:
    if not array.flags.owndata:
        array = array.copy()
    before = len(array)
    array.resize(size, refcheck=False)
    array[before:] = fill
    return array


def in_pieces(
    rows: NDArray[np.int64], at_once: int = _IN_CACHE
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64] | slice]]:
    """Rows in pieces that fit into the caches, and what to read their part of a column with: rows that were
    never used again follow one another, and such a part need not be gathered."""
    for some in np.split(rows, range(at_once, len(rows), at_once)):
        follow = len(some) > 0 and bool((some[1:] - some[:-1] == 1).all())
        yield some, slice(int(some[0]), int(some[-1]) + 1) if follow else some
