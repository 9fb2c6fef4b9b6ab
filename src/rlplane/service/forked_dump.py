"""The control state as it is now, written by a child process while the service goes on.

A fork shares all memory until somebody writes to it, so the service stands still for milliseconds, however
large the state is.
"""

from __future__ import annotations

import contextlib
import io
import logging
import mmap
import os
import select
import signal
from collections.abc import Callable, Collection, Iterable, Iterator

logger = logging.getLogger(__name__)

_PIECE_BYTES = 2**20


def run_in_child(function: Callable[[], None], keep: Collection[int] = ()) -> int:
    """Call ``function`` in a child process that has of our files only those in ``keep``: the sockets and the
    lock of the service must not outlive it in there. Returns the child's pid; it ends with 0 if all went
    well."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        first = 3
        for fd in sorted(keep):
            os.closerange(first, fd)
            first = fd + 1
        os.closerange(first, os.sysconf("SC_OPEN_MAX"))
        function()
        status = 0
    finally:
        os._exit(status)


class ForkedDump:
    """What ``pieces`` makes in a child, gathered in memory. The file ``ended`` is readable when it has
    ended."""

    def __init__(self, pieces: Callable[[], Iterable[bytes]]) -> None:
        with contextlib.ExitStack() as opened:
            self._memory = opened.enter_context(
                io.FileIO(os.memfd_create("rlplane-dump", os.MFD_CLOEXEC), "r+")
            )
            reading, writing = os.pipe2(os.O_CLOEXEC)
            self.ended = opened.enter_context(io.FileIO(reading))
            try:
                self._child = run_in_child(lambda: self._write(pieces), keep=(self._memory.fileno(), writing))
            finally:
                os.close(writing)  # so that the child's is the only one
            opened.pop_all()

    def _write(self, pieces: Callable[[], Iterable[bytes]]) -> None:
        for piece in pieces():
            rest = memoryview(piece)
            while rest:
                rest = rest[self._memory.write(rest) :]

    def pieces(self) -> Iterator[bytes] | None:
        """When the child has ended: what it has written; None if that is not everything."""
        with self._memory, self.ended:
            if not self._went_well():
                return None
            written = mmap.mmap(self._memory.fileno(), 0)
        return _read_once(written)

    def kill(self) -> None:
        """Nobody needs it any more, whether or not it has ended."""
        with self._memory, self.ended, contextlib.suppress(ProcessLookupError):
            os.kill(self._child, signal.SIGKILL)
            self._went_well()

    def _went_well(self) -> bool:
        try:
            return os.waitpid(self._child, 0)[1] == 0
        except ChildProcessError:  # somebody else in this process waits for all children
            return False


def _read_once(written: mmap.mmap) -> Iterator[bytes]:
    for at in range(0, len(written), _PIECE_BYTES):
        piece = written[at : at + _PIECE_BYTES]
        with contextlib.suppress(OSError):
            # Its memory goes with it: to free all of it at the end takes tens of milliseconds.
            written.madvise(mmap.MADV_REMOVE, at, len(piece))
        yield piece


class ForkedDumps:
    """The dumps that a loop waits for."""

    def __init__(self, epoll: select.epoll) -> None:
        self._epoll = epoll
        self._running: dict[int, tuple[ForkedDump, Callable[[Iterator[bytes] | None], None]]] = {}

    def start(
        self, pieces: Callable[[], Iterator[bytes]], then: Callable[[Iterator[bytes] | None], None]
    ) -> None:
        """Have what ``pieces`` makes given to ``then``, in the loop; None if the child died."""
        try:
            dump = ForkedDump(pieces)
        except OSError as error:
            logger.warning("dumps the state in place, for want of a child process: %s", error)
            then(pieces())
            return
        self._running[dump.ended.fileno()] = dump, then
        self._epoll.register(dump.ended.fileno(), select.EPOLLIN)

    def __contains__(self, fd: int) -> bool:
        return fd in self._running

    def __len__(self) -> int:
        return len(self._running)

    def finish(self, fd: int) -> None:
        """The child that holds this file has ended."""
        dump, then = self._running.pop(fd)
        self._epoll.unregister(fd)
        then(dump.pieces())

    def close(self) -> None:
        """End the children that still write."""
        while self._running:
            self._running.popitem()[1][0].kill()
