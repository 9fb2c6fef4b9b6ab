"""The directory of a plane, and how it is known that nobody needs it any more."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from rlplane.storage.shm import directory
from rlplane.storage.shm.directory import PlaneDirectory


def test_a_forked_child_does_not_keep_the_directory_of_a_dead_plane(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "SHM", tmp_path)
    plane = PlaneDirectory.create()
    supervised = plane.supervise()
    for lock in plane._locks:
        os.close(lock)  # the service has died
    child = os.fork()
    if not child:
        time.sleep(600)
        os._exit(0)
    try:
        assert not plane.is_dead
        supervised.close()  # and so has the process that would have started it again
        deadline = time.monotonic() + 20
        while not plane.is_dead:
            assert time.monotonic() < deadline, "the child holds the lock"
            time.sleep(0.01)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
