"""What keeps the bytes of a read from being recycled, until nothing that was read needs them any more."""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlplane.storage.scratch import PAGE, array_at, populate, unmap_pages

# Reentrant, because the collector may run a finalizer in a thread that is in the middle of this. One for all,
# because a finalizer settles whatever there is.
_lock = threading.RLock()


class ReadLease:
    """What keeps the bytes of a read from being recycled, until all memory attached to it is gone."""

    __slots__ = ("__weakref__", "_is_done", "_maps", "_pid", "_release")

    def __init__(self, release: Callable[[], None]) -> None:
        self._release = release
        self._maps: dict[int, tuple[_Mapping, object]] = {}
        self._is_done = False
        self._pid = os.getpid()
        if _dropped or _ended:
            _settle()  # what an interrupt has left behind

    def attach(self, address: int, size: int) -> Tensor:
        """A tensor over a mapping that is unmapped when the tensor and its views are gone."""
        array = array_at(address, size)
        # The last that is made is called first: what is to be done is noted, by C, before any Python runs
        # that Ctrl-C could interrupt.
        then = weakref.ref(array, _settle)
        mapping = _Mapping(array, _dropped.append)
        mapping.lease, mapping.address, mapping.size, mapping.is_mapped = self, address, size, True
        with _lock:
            self._maps[address] = (mapping, then)
            _mapped.add(self)
        return torch.from_numpy(array)

    def done(self) -> None:
        """The reader has finished: from now on only attached memory keeps the lease."""
        self._is_done = True
        self._end()
        _settle()

    def detach(self) -> None:
        """Give every attached mapping pages of its own, so that it needs the lease no longer."""
        with _lock:
            for address, (mapping, _) in list(self._maps.items()):
                if mapping() is None:
                    continue  # it is about to be unmapped
                if not populate(address, mapping.size) and address in self._maps:
                    pages = array_at(address, mapping.size)[::PAGE]
                    pages |= 0

    def drop(self, mapping: _Mapping) -> None:
        """A mapping is needed no longer. May be called again if it was interrupted."""
        if mapping.is_mapped:
            mapping.is_mapped = False
            unmap_pages(mapping.address, mapping.size)
        known = self._maps.get(mapping.address)
        if known is not None and known[0] is mapping:
            del self._maps[mapping.address]
        self._end()

    def _end(self) -> None:
        if self._is_done and not self._maps:
            _ended.append(self)

    def release(self) -> None:
        """Give it back. The service does not mind being told twice."""
        # A forked child has copies of its parent's tensors; the lease is the parent's.
        if self._pid == os.getpid():
            self._release()


class _Mapping(weakref.ref[Any]):
    """A mapping, as long as something needs it."""

    __slots__ = ("address", "is_mapped", "lease", "size")
    lease: ReadLease
    address: int
    size: int
    is_mapped: bool


_mapped: weakref.WeakSet[ReadLease] = weakref.WeakSet()  # leases that have had a mapping
# Mappings that nothing needs any more, and leases of which all mappings are gone. What is in the middle of
# being settled stays in here until it is.
_dropped: deque[_Mapping] = deque()
_ended: deque[ReadLease] = deque()


def _settle(_: object = None) -> None:
    if _dropped:
        with _lock:
            while _dropped:
                _dropped[0].lease.drop(_dropped[0])
                del _dropped[0]
    # Without the lock, because whoever is told may have one of its own.
    while _ended:
        try:
            lease = _ended[0]
        except IndexError:
            return  # another thread was faster
        lease.release()
        try:
            _ended.remove(lease)
        except ValueError:
            pass  # likewise


def detach_all() -> None:
    """Make everything that was read independent of the arena."""
    for lease in _all_mapped():
        lease.detach()


def _all_mapped() -> list[ReadLease]:
    while True:
        try:
            return list(_mapped)
        except RuntimeError:
            continue  # another thread has begun or ended a read meanwhile


def _renew_lock() -> None:
    """In a forked child: the thread that held the lock may not be here."""
    global _lock
    _lock = threading.RLock()


# A child would read pages that the parent's lease no longer protects once the parent drops it.
os.register_at_fork(before=detach_all)
os.register_at_fork(after_in_child=_renew_lock)
