"""Shared memory as a client sees it: segments to write into, private views to hand out, leases.

A segment is mapped once, shared, for writing and for gathering. What a reader gets without a copy is a
mapping of its own: private and writable, so that a page it changes becomes its own copy, which nobody else
sees, not even another read in the same process. It is unmapped when the last tensor over it is gone, and then
the lease goes back.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlplane.adapters.local.planedir import PlaneDir
from rlplane.adapters.local.wire import Extent
from rlplane.errors import CapacityError, PlaneConnectionError

__all__ = ["Lease", "ScratchPool", "Segments", "detach_all", "scratch"]

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
_PAGE = 4096


class _Bytes(np.ndarray[Any, Any]):
    """An array that can be referred to weakly: when it goes, its memory is given back."""


class Segments:
    """The segments of one plane that this process has mapped."""

    def __init__(self, directory: PlaneDir) -> None:
        self._dir = directory
        self._lock = threading.Lock()
        self._open: dict[int, tuple[int, mmap.mmap, Tensor]] = {}

    def view(self, extent: Extent) -> Tensor:
        """The bytes of an extent, shared: to write into before the commit, or to copy from under a lease."""
        return self._segment(extent.segment)[2][extent.offset : extent.offset + extent.size]

    def whole(self, segment: int) -> Tensor:
        """All bytes of a segment, shared: to reach an extent at its offset without making a view of it."""
        return self._segment(segment)[2]

    def back(self, extent: Extent) -> None:
        """Make sure that the pages of an extent exist, because a write to one that cannot be made kills."""
        if extent.backed:
            return
        try:
            os.posix_fallocate(self._segment(extent.segment)[0], extent.offset, extent.size)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.ENOMEM):
                raise
            stat = os.statvfs(self._dir.path)
            raise CapacityError(
                f"{self._dir.path.parent} is full: {extent.size:,} bytes are needed and "
                f"{stat.f_bavail * stat.f_frsize:,} are free; nothing was written"
            ) from error

    def private(self, extent: Extent, lease: Lease) -> Tensor:
        """The bytes of an extent as memory of the reader's own, without a copy."""
        fd = self._segment(extent.segment)[0]
        return lease.attach(_map(extent.size, mmap.MAP_PRIVATE, fd, extent.offset), extent.size)

    def close(self) -> None:
        """Unmap everything that is not in use."""
        with self._lock:
            for fd, _, _ in self._open.values():
                os.close(fd)
            self._open.clear()

    def _segment(self, number: int) -> tuple[int, mmap.mmap, Tensor]:
        known = self._open.get(number)
        if known is not None:
            return known
        with self._lock:
            if number in self._open:
                return self._open[number]
            self._forget_removed()
            path = self._dir.segment(number)
            try:
                fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                raise PlaneConnectionError(
                    f"the shared memory {path} is gone: the controller has ended, or somebody removed it"
                ) from None
            except OSError as error:
                raise _explained(error, path) from error
            try:
                mapped = mmap.mmap(fd, 0)
            except (OSError, ValueError) as error:
                os.close(fd)
                raise PlaneConnectionError(f"the shared memory {path} cannot be mapped: {error}") from error
            tensor = torch.from_numpy(np.frombuffer(mapped, np.uint8))
            self._open[number] = (fd, mapped, tensor)
            return self._open[number]

    def _forget_removed(self) -> None:
        """Unmap segments that the controller has given back to the machine."""
        gone = [number for number in self._open if not os.path.exists(self._dir.segment(number))]
        for number in gone:
            os.close(self._open.pop(number)[0])


class Lease:
    """What keeps the bytes of a read from being recycled, until all memory attached to it is gone."""

    __slots__ = ("__weakref__", "_left", "_lock", "_maps", "_pid", "_release")

    def __init__(self, release: Callable[[], None]) -> None:
        self._release = release
        # Reentrant, because the collector may run a finalizer in a thread that is in the middle of this.
        self._lock = threading.RLock()
        self._maps: dict[int, int] = {}
        self._left = 1
        self._pid = os.getpid()
        _live.add(self)

    def attach(self, address: int, size: int) -> Tensor:
        """A tensor over a mapping that is unmapped when the tensor and its views are gone."""
        with self._lock:
            self._maps[address] = size
            self._left += 1
        array = _array(address, size)
        weakref.finalize(array, self._drop, address, size).atexit = False
        return torch.from_numpy(array)

    def done(self) -> None:
        """The reader has finished: from now on only attached memory keeps the lease."""
        self._count_down()

    def detach(self) -> None:
        """Give every attached mapping pages of its own, so that it needs the lease no longer."""
        with self._lock:
            for address, size in list(self._maps.items()):
                if address not in self._maps:
                    continue  # a finalizer has run meanwhile
                if _libc.madvise(address, size, _MADV_POPULATE_WRITE) and address in self._maps:
                    pages = _array(address, size)[::_PAGE]
                    pages |= 0

    def _drop(self, address: int, size: int) -> None:
        with self._lock:
            self._maps.pop(address, None)
        _libc.munmap(address, size)
        self._count_down()

    def _count_down(self) -> None:
        with self._lock:
            self._left -= 1
            last = self._left == 0
        # A forked child has copies of its parent's tensors; the lease is the parent's.
        if last and self._pid == os.getpid():
            self._release()


_live: weakref.WeakSet[Lease] = weakref.WeakSet()


def detach_all() -> None:
    """Make everything that was read independent of the arena."""
    for lease in list(_live):
        lease.detach()


# A child would read pages that the parent's lease no longer protects once the parent drops it.
os.register_at_fork(before=detach_all)


class ScratchPool:
    """Memory for gathered batches, reused because fresh pages cost more than the copy into them."""

    def __init__(self, keep: int, smallest: int = 256 * 1024) -> None:
        self._keep, self._smallest = keep, smallest
        self._free: list[tuple[int, int]] = []
        self.after_fork()

    def after_fork(self) -> None:
        """In the child: what is kept is a copy, and the thread that held the lock may not be here."""
        self._lock = threading.RLock()  # as in Lease
        for address, size in self._free:
            _libc.munmap(address, size)
        self._free = []
        self._kept = 0

    def empty(self, nbytes: int) -> Tensor:
        """Uninitialised bytes that belong to the caller."""
        if nbytes < self._smallest:
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        size = -(-nbytes // _PAGE) * _PAGE
        address, size = self._reuse(size) or (_map(size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0), size)
        array = _array(address, size)
        weakref.finalize(array, self._give, address, size).atexit = False
        return torch.from_numpy(array)[:nbytes]

    def _reuse(self, size: int) -> tuple[int, int] | None:
        with self._lock:
            fits = [entry for entry in self._free if size <= entry[1] <= 2 * size]
            if not fits:
                return None
            best = min(fits, key=lambda entry: entry[1])
            self._free.remove(best)
            self._kept -= best[1]
            return best

    def _give(self, address: int, size: int) -> None:
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
scratch = ScratchPool(min(2**30, os.sysconf("SC_PHYS_PAGES") * _PAGE // 16))
os.register_at_fork(after_in_child=scratch.after_fork)


def _map(size: int, flags: int, fd: int, offset: int) -> int:
    address = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags | _MAP_NORESERVE, fd, offset)
    if address == _MAP_FAILED or address is None:
        number = ctypes.get_errno()
        raise _explained(OSError(number, os.strerror(number)), f"{size:,} bytes")
    return int(address)


def _array(address: int, size: int) -> NDArray[np.uint8]:
    memory: memoryview = _memory_at(address, size, _WRITABLE)
    return np.frombuffer(memory, np.uint8).view(_Bytes)


def _explained(error: OSError, what: str) -> CapacityError:
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return CapacityError(f"no file descriptor is left to open {what}: raise the limit (ulimit -n)")
    return CapacityError(f"cannot map {what}: {error.strerror}")
