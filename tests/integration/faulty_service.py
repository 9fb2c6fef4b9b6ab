"""A control service that kills itself with SIGKILL at a chosen step: ``faulty_service.py PLAN …``.

PLAN is a file with one fault per line, ``Class.method when nth``: at the nth call of the method, ``before``
it begins, ``after`` it has ended, or ``torn`` (for a write: when half of it is done). Each start of the
service takes the first line away and arms it; without lines it serves without faults.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlplane.adapters.local import process
from rlplane.control import clearing, snapshots, unclaiming
from rlplane.service import journal, long_answers
from rlplane.service.core import ControlService
from rlplane.service.journal import Journal
from rlplane.service.server import Server
from rlplane.storage.shm.host import ShmHost

CLASSES = {cls.__name__: cls for cls in (Journal, ControlService, Server, ShmHost)}


def arm(target: str, when: str, nth: int) -> None:
    name, method = target.split(".")
    original: Callable[..., Any] = getattr(CLASSES[name], method)
    calls = 0

    def faulty(self: Any, *args: Any, **more: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == nth and when == "torn":
            os.write(self._fd, args[0][: len(args[0]) // 2])
        if calls == nth and when != "after":
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(self, *args, **more)
        if calls == nth:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(CLASSES[name], method, faulty)


if __name__ == "__main__":
    plan = Path(sys.argv.pop(1))
    journal._COMPACT_BYTES = 4096
    clearing._SAMPLES_AT_ONCE = unclaiming._SAMPLES_AT_ONCE = 1
    long_answers._MANY = snapshots._MANY = 1
    lines = plan.read_text().splitlines()
    if lines:
        plan.write_text("\n".join(lines[1:]))
        target, when, nth = lines[0].split()
        arm(target, when, int(nth))
    process.main()
