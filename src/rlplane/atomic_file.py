"""Files that are there whole or not at all, also after a crash."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO


def write_atomically(path: Path, content: bytes | Callable[[BinaryIO], object], *, mode: int = 0o666) -> None:
    """Write ``content``, or what it writes into the file it is called with, and only then give it the name.

    ``mode`` is the file's, before the umask. When this returns, content and name are on the disk. Raises
    ``OSError`` when the file cannot be written, and whatever ``content`` raises; the former file is untouched
    then, and the temporary one is gone.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            if callable(content):
                content(file)
            else:
                file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    # The name is durable only once the directory is.
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
