"""The control state as it is now, written by a child process while the service goes on.

A fork shares all memory until somebody writes to it, so the service stands still for milliseconds, however
large the state is.
"""

from __future__ import annotations

import io
import mmap
import os
from collections.abc import Callable, Collection, Iterable, Iterator

__all__ = ["ForkedDump", "run_in_child"]

_PIECE_BYTES = 2**22


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
        self._memory = io.FileIO(os.memfd_create("rlplane-dump", os.MFD_CLOEXEC), "r+")
        reading, writing = os.pipe2(os.O_CLOEXEC)
        self.ended = io.FileIO(reading)
        try:
            self._child = run_in_child(lambda: self._write(pieces), keep=(self._memory.fileno(), writing))
        except OSError:
            self._memory.close()
            self.ended.close()
            raise
        finally:
            os.close(writing)  # so that the child's is the only one

    def _write(self, pieces: Callable[[], Iterable[bytes]]) -> None:
        for piece in pieces():
            rest = memoryview(piece)
            while rest:
                rest = rest[self._memory.write(rest) :]

    def pieces(self) -> Iterator[bytes] | None:
        """When the child has ended: what it has written; None if that is not everything."""
        with self._memory, self.ended:
            try:
                _, status = os.waitpid(self._child, 0)
            except ChildProcessError:  # somebody else in this process waits for all children
                status = 1
            if status:
                return None
            written = mmap.mmap(self._memory.fileno(), 0)
        return (written[at : at + _PIECE_BYTES] for at in range(0, len(written), _PIECE_BYTES))
