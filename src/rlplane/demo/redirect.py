"""Output that C++ libraries and child processes write, sent somewhere else for a while."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def redirected(descriptor: int, target: int) -> Iterator[None]:
    """Within the block, what anybody writes to ``descriptor`` goes to ``target`` instead."""
    sys.stdout.flush()
    original = os.dup(descriptor)
    os.dup2(target, descriptor)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(original, descriptor)
        os.close(original)
