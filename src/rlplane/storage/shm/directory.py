"""The directory of a plane in /dev/shm: its segments, socket and lock, and how stale planes are found.

Everything a plane has on disk is in one directory, mode 0700. Its control service, and whoever would start
the service again, share a lock on a file in it for as long as they live, and the kernel drops the lock of
a process that dies, however it dies. So a directory whose lock can be had alone belongs to a plane that is
gone, and whoever notices may remove it. A second lock is the service's alone: there is never more than one.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import secrets
import shutil
import stat
import tempfile
import time
import weakref
from pathlib import Path

from rlplane.errors import PlaneConnectionError

SHM = Path("/dev/shm")
PREFIX = "rlplane-"
_KEPT_FOR_JOURNAL = 4 * 2**20
_NO_LIMIT = 2**63


class PlaneDirectory:
    """Paths inside a plane's directory."""

    def __init__(self, path: Path, locks: tuple[int, ...] = ()) -> None:
        self.path = path
        # Held open, and so locked, for the life of the service.
        self._locks = locks

    @classmethod
    def create(cls) -> PlaneDirectory:
        """Make the directory of a new plane and lock it. It appears under its name with the lock held."""
        base = SHM if SHM.is_dir() else Path(tempfile.gettempdir())
        name = f"{PREFIX}{os.getuid()}-{os.getpid()}-{secrets.token_hex(16)}"
        hidden = base / f".{name}"
        hidden.mkdir(mode=0o700)
        locks = _locked(hidden / "lock", fcntl.LOCK_SH), _locked(hidden / "service", fcntl.LOCK_EX)
        info = {"pid": os.getpid(), "started": time.time()}
        (hidden / "plane.json").write_text(json.dumps(info))
        hidden.rename(base / name)
        return cls(base / name, locks)

    @classmethod
    def take_over(cls, path: Path) -> PlaneDirectory:
        """The directory of a plane whose service has died, to go on in its place."""
        deadline = time.monotonic() + 5.0
        while True:
            try:
                alone = _locked(path / "service", fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                # The kernel ends a process step by step, and its lock may be the last.
                if time.monotonic() > deadline:
                    raise PlaneConnectionError(f"the service of the plane in {path} is alive") from None
                time.sleep(0.005)
        locks = _locked(path / "lock", fcntl.LOCK_SH), alone
        (path / "control").unlink(missing_ok=True)
        return cls(path, locks)

    @classmethod
    def at(cls, address: str) -> PlaneDirectory:
        """The directory of the plane at an address such as ``shm:///dev/shm/rlplane-…``."""
        path = Path(address.removeprefix("shm://"))
        if not path.is_absolute():
            raise PlaneConnectionError(
                f"controller_address {address!r} is not the address of a plane on this machine; "
                "one looks like shm:///dev/shm/rlplane-…"
            )
        try:
            about = os.lstat(path)
        except OSError:
            about = None
        if about is not None and (
            not stat.S_ISDIR(about.st_mode) or about.st_uid not in (os.getuid(), 0) or about.st_mode & 0o077
        ):
            raise PlaneConnectionError(
                f"{path} is not a directory that belongs to this user alone; somebody else may have made it"
            )
        if not (path / "lock").exists():
            raise PlaneConnectionError(f"there is no plane at {address!r}; its control service has ended")
        return cls(path)

    @property
    def address(self) -> str:
        """What clients put into ``controller_address``."""
        return f"shm://{self.path}"

    @property
    def socket(self) -> str:
        """The address of the control service."""
        return f"unix://{self.path / 'control'}"

    @property
    def log(self) -> Path:
        """Where the control service logs to."""
        return self.path / "service.log"

    def segment(self, number: int) -> str:
        """The file of a segment."""
        return str(self.path / f"segment-{number}")

    def segments(self) -> dict[int, Path]:
        """The files of all segments that there are."""
        return {int(path.name.removeprefix("segment-")): path for path in self.path.glob("segment-*")}

    @property
    def room(self) -> int:
        """How many bytes of the file system puts may still fill. The last are the journal's: without one the
        plane does not survive its service."""
        about = os.statvfs(self.path)
        if not about.f_blocks:
            return _NO_LIMIT
        kept = min(_KEPT_FOR_JOURNAL, about.f_blocks * about.f_frsize // 16)
        return about.f_bavail * about.f_frsize - kept

    def supervise(self) -> io.FileIO:
        """Say that this process starts the service again if it dies, until the file returned is closed."""
        lock = io.FileIO(_locked(self.path / "lock", fcntl.LOCK_SH))
        _supervised.add(lock)
        return lock

    @property
    def is_dead(self) -> bool:
        """Whether neither the service lives nor anybody who would start it again."""
        return _is_dead(self.path)

    def client_file(self, client: int) -> str:
        """A client's own file: the number of its spare place, guarded by the file's lock."""
        return str(self.path / f"client-{client}")

    def remove(self) -> None:
        """Remove everything. For the service, when it ends."""
        shutil.rmtree(self.path, ignore_errors=True)


def stale_planes() -> list[Path]:
    """Directories of this user's planes whose service is dead."""
    dead = []
    for base in {SHM, Path(tempfile.gettempdir())}:
        if not base.is_dir():
            continue
        for pattern in (f"{PREFIX}{os.getuid()}-*", f".{PREFIX}{os.getuid()}-*"):
            dead += [path for path in base.glob(pattern) if _is_dead(path)]
    return sorted(dead)


def remove_if_dead(path: Path, patience_s: float = 0.0) -> bool:
    """Remove a plane's directory if its service is dead; say whether it was.

    The kernel ends a process step by step: its sockets can be closed some time before its lock is. Whoever
    has noticed the one waits up to ``patience_s`` for the other.
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


_supervised: weakref.WeakSet[io.FileIO] = weakref.WeakSet()


def _supervise_no_more() -> None:
    for lock in list(_supervised):
        lock.close()


# A forked child starts no service, and must not keep what a dead plane has left.
os.register_at_fork(after_in_child=_supervise_no_more)


def _locked(path: Path, kind: int) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, kind)
    except BaseException:
        os.close(fd)
        raise
    return fd
