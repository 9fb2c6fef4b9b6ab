"""Memory by the page: anonymous mappings, and a pool of them for what a read gathers.

Memory is reused because fresh pages cost more than the copy into them.
"""

from __future__ import annotations

import ctypes
import errno
import math
import mmap
import os
import threading
import weakref
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlplane.errors import CapacityError

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_MAP_FAILED = ctypes.c_void_p(-1).value
_MADV_POPULATE_WRITE = 23
_MAP_NORESERVE = 0x4000
_memory_at = ctypes.pythonapi.PyMemoryView_FromMemory
_memory_at.restype = ctypes.py_object
_memory_at.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int]
_WRITABLE = 0x200
PAGE = 4096


class _Bytes(np.ndarray[Any, Any]):
    """An array that can be referred to weakly: when it goes, its memory is given back."""


class ScratchPool:
    """Memory for gathered batches, reused because fresh pages cost more than the copy into them."""

    def __init__(self, keep: int, smallest: int = 256 * 1024) -> None:
        self._keep, self._smallest = keep, smallest
        self._free: list[tuple[int, int]] = []
        self.after_fork()

    def after_fork(self) -> None:
        """In the child: what is kept is a copy, and the thread that held the lock may not be here."""
        self._lock = threading.RLock()  # reentrant for the same reason as in ReadLease
        for address, size in self._free:
            _libc.munmap(address, size)
        self._free = []
        self._kept = 0

    def empty(self, nbytes: int) -> Tensor:
        """Uninitialised bytes that belong to the caller."""
        if nbytes < self._smallest:
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        size = -(-nbytes // PAGE) * PAGE
        address, size = self._find(size) or (
            map_pages(size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0),
            size,
        )
        array = array_at(address, size)
        weakref.finalize(array, self._recycle, address, size).atexit = False
        return torch.from_numpy(array)[:nbytes]

    def _find(self, size: int) -> tuple[int, int] | None:
        with self._lock:
            fits = [entry for entry in self._free if size <= entry[1] <= 2 * size]
            if not fits:
                return None
            best = min(fits, key=lambda entry: entry[1])
            self._free.remove(best)
            self._kept -= best[1]
            return best

    def _recycle(self, address: int, size: int) -> None:
        drop = [(address, size)]
        with self._lock:
            if size <= self._keep:
                # The oldest go first, or sizes that nobody asks for any more would fill the pool for ever.
                drop = []
                while self._kept + size > self._keep:
                    drop.append(self._free.pop(0))
                    self._kept -= drop[-1][1]
                self._free.append((address, size))
                self._kept += size
        for old_address, old_size in drop:
            _libc.munmap(old_address, old_size)


# The memory of a read of the largest usual batches, and never much of the machine's.
scratch = ScratchPool(min(2**30, os.sysconf("SC_PHYS_PAGES") * PAGE // 16))
os.register_at_fork(after_in_child=scratch.after_fork)


def populate(address: int, size: int) -> bool:
    """Give a private mapping pages of its own at once; False if the kernel cannot."""
    return not _libc.madvise(address, size, _MADV_POPULATE_WRITE)


def unmap_pages(address: int, size: int) -> None:
    """Give a mapping back."""
    _libc.munmap(address, size)


def map_pages(size: int, flags: int, fd: int, offset: int) -> int:
    """A writable mapping; its address."""
    address = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags | _MAP_NORESERVE, fd, offset)
    if address == _MAP_FAILED or address is None:
        number = ctypes.get_errno()
        raise out_of_memory(OSError(number, os.strerror(number)), f"{size:,} bytes")
    return int(address)


def array_at(address: int, size: int) -> NDArray[np.uint8]:
    """The bytes at an address, as an array that can be referred to weakly."""
    memory: memoryview = _memory_at(address, size, _WRITABLE)
    return np.frombuffer(memory, np.uint8).view(_Bytes)


def tensor_at(memory: NDArray[np.uint8], start: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """The bytes of ``memory`` from ``start`` on, without a copy, as a tensor that is not empty.

    It is no slice of a larger tensor: whoever pickles a slice sends all that it is a slice of.
    """
    flat = torch.frombuffer(memory, dtype=dtype, count=math.prod(shape), offset=start)
    # Not a view, which would be a second tensor. And torch takes half as long again to read a shape that
    # comes as a tuple.
    return flat.resize_(*shape) if shape else flat.resize_(())


def out_of_memory(error: OSError, what: str) -> CapacityError:
    """Why a file could not be opened or mapped."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return CapacityError(f"no file descriptor is left to open {what}: raise the limit (ulimit -n)")
    return CapacityError(f"cannot map {what}: {error.strerror}")
