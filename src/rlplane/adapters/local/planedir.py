"""The directory of a plane in /dev/shm: its segments, sockets and lock, and how left-overs are found.

Everything a plane has on disk is in one directory, mode 0700. Its controller holds a lock on a file in it
for as long as it lives, and the kernel drops the lock when it dies, however it dies. So a directory whose
lock can be taken is a left-over, and whoever notices may remove it.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import tempfile
import time
from pathlib import Path

from rlplane.errors import PlaneConnectionError

__all__ = ["PlaneDir", "left_overs", "remove_if_dead"]

SHM = Path("/dev/shm")
PREFIX = "rlplane-"
SPARE_SLOTS = 65536


class PlaneDir:
    """Paths inside a plane's directory."""

    def __init__(self, path: Path, lock_fd: int | None = None) -> None:
        self.path = path
        # Held open, and so locked, for the life of the controller.
        self._lock_fd = lock_fd

    @classmethod
    def create(cls) -> PlaneDir:
        """Make the directory of a new plane and lock it. It appears under its name with the lock held."""
        base = SHM if SHM.is_dir() else Path(tempfile.gettempdir())
        name = f"{PREFIX}{os.getuid()}-{os.getpid()}-{secrets.token_hex(3)}"
        hidden = base / f".{name}"
        hidden.mkdir(mode=0o700)
        lock_fd = os.open(hidden / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock_fd, fcntl.LOCK_EX)
        info = {"pid": os.getpid(), "started": time.time()}
        (hidden / "plane.json").write_text(json.dumps(info))
        os.close(os.open(hidden / "spares", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        os.truncate(hidden / "spares", 8 * SPARE_SLOTS)
        hidden.rename(base / name)
        return cls(base / name, lock_fd)

    @classmethod
    def at(cls, address: str) -> PlaneDir:
        """The directory of the plane at an address such as ``shm:///dev/shm/rlplane-…``."""
        path = Path(address.removeprefix("shm://"))
        if not path.is_absolute():
            raise PlaneConnectionError(
                f"controller_address {address!r} is not the address of a plane on this machine; "
                "one looks like shm:///dev/shm/rlplane-…"
            )
        if not (path / "lock").exists():
            raise PlaneConnectionError(f"there is no plane at {address!r}; its controller has ended")
        return cls(path)

    @property
    def address(self) -> str:
        """What clients put into ``controller_address``."""
        return f"shm://{self.path}"

    @property
    def control(self) -> str:
        """The socket for requests."""
        return str(self.path / "control")

    @property
    def alive(self) -> str:
        """The socket that each client keeps open while it lives."""
        return str(self.path / "alive")

    @property
    def spares(self) -> str:
        """A number per client: the extent that it may take as its spare, or 0."""
        return str(self.path / "spares")

    def segment(self, number: int) -> str:
        """The file of a segment."""
        return str(self.path / f"segment-{number}")

    def client_lock(self, owner: int) -> str:
        """The file whose lock guards a client's number in ``spares``."""
        return str(self.path / f"client-{owner}")

    def remove(self) -> None:
        """Remove everything. For the controller, when it ends."""
        shutil.rmtree(self.path, ignore_errors=True)


def left_overs() -> list[Path]:
    """Directories of this user's planes whose controller is dead."""
    dead = []
    for base in {SHM, Path(tempfile.gettempdir())}:
        if not base.is_dir():
            continue
        for pattern in (f"{PREFIX}{os.getuid()}-*", f".{PREFIX}{os.getuid()}-*"):
            dead += [path for path in base.glob(pattern) if _is_dead(path)]
    return sorted(dead)


def remove_if_dead(path: Path, patience_s: float = 0.0) -> bool:
    """Remove a plane's directory if its controller is dead; say whether it was.

    The kernel ends a process step by step: its sockets can be closed some time before its lock is. Who has
    seen the one gives it ``patience_s`` for the other.
    """
    deadline = time.monotonic() + patience_s
    while not _is_dead(path):
        if time.monotonic() >= deadline or not path.exists():
            return False
        time.sleep(0.005)
    shutil.rmtree(path, ignore_errors=True)
    return True


def _is_dead(path: Path) -> bool:
    try:
        if path.name.startswith(".") and time.time() - path.stat().st_mtime < 60:
            return False  # being made
        fd = os.open(path / "lock", os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return path.exists() and path.name.startswith((PREFIX, f".{PREFIX}"))
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True
