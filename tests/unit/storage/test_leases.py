"""Leases when other threads begin and end reads meanwhile."""

from __future__ import annotations

import sys
import threading

from rlplane.storage.leases import ReadLease, detach_all


def test_a_fork_does_not_fail_because_other_threads_read() -> None:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    stopped = threading.Event()

    def read() -> None:
        kept: list[ReadLease] = []
        while not stopped.is_set():
            kept.append(ReadLease(lambda: None))
            if len(kept) > 200:
                kept.clear()

    readers = [threading.Thread(target=read) for _ in range(2)]
    try:
        for reader in readers:
            reader.start()
        for _ in range(500):
            detach_all()
    finally:
        stopped.set()
        sys.setswitchinterval(before)
        for reader in readers:
            reader.join()
