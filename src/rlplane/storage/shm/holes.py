"""Giving pages of a file back to the machine. Python has no name for it, so the C library is asked."""

from __future__ import annotations

import ctypes
import os

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
_KEEP_SIZE, _PUNCH_HOLE = 1, 2


def discard_pages(fd: int, start: int, size: int) -> None:
    """Free the pages of a stretch of a file at once, in whoever has it mapped too; it reads as zeros then."""
    if _libc.fallocate(fd, _KEEP_SIZE | _PUNCH_HOLE, start, size):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
