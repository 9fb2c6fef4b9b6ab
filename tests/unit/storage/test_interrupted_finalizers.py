"""A lease comes back, whatever interrupts the finalizer that gives it back."""

from __future__ import annotations

import mmap
import sys
from types import FrameType
from typing import Any

import pytest

from rlplane.storage import leases
from rlplane.storage.leases import ReadLease
from rlplane.storage.scratch import map_pages

SIZE = 8192


def read(told: list[str]) -> Any:
    lease = ReadLease(lambda: told.append("given back"))
    tensor = lease.attach(map_pages(SIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0), SIZE)
    lease.done()
    return tensor


class InterruptAt:
    """Raises at the n-th step of the finalizer: a call or a line of its module."""

    def __init__(self, step: int) -> None:
        self.left = step

    def __call__(self, frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code.co_filename != leases.__file__:
            return None
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        return self


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_at_any_step_of_the_finalizer_loses_no_lease() -> None:
    step, was_interrupted = 0, True
    while was_interrupted:
        step += 1
        told: list[str] = []
        tensor = read(told)
        interrupt = InterruptAt(step)
        sys.settrace(interrupt)
        try:
            del tensor  # an exception in here is reported, and goes no further
        finally:
            sys.settrace(None)
        was_interrupted = interrupt.left <= 0
        while leases._lock._is_owned():  # type: ignore[attr-defined]
            # The tracer can raise where no signal does: between the end of a "with" and its exit.
            leases._lock.release()
        # The next read finds what was left behind.
        other: list[str] = []
        later = read(other)
        assert told and set(told) == {"given back"}
        del later
        assert other == ["given back"]
        assert not leases._dropped and not leases._ended
    assert step > 10
