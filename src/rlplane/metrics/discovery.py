"""Which aggregators run on this machine: each leaves a small file in a directory of the user's own.

``rlplane top`` and ``rlplane dash`` find a run here without being told an address. The directory is
``$XDG_RUNTIME_DIR/rlplane``, else ``rlplane-<uid>`` among the temporary files, and nobody else can enter it.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path

import msgspec

from rlplane.atomic_file import write_atomically
from rlplane.errors import ConfigError

__all__ = [
    "RunInfo",
    "announce",
    "announce_child",
    "list_finished",
    "list_runs",
    "remember",
    "runtime_directory",
    "withdraw",
]

_MOST_REMEMBERED = 100


class RunInfo(msgspec.Struct, omit_defaults=True):
    """A running aggregator; ``plane`` names the plane whose bootstrap client started it, if one did.

    ``metrics_address`` is where Prometheus finds it, and ``token_file`` has the token for that, if there are.
    ``remote_address`` is where other machines send events to, and ``remote_snapshots`` where they subscribe;
    both have a secret in them.
    """

    run_id: str
    pid: int
    events_address: str
    snapshot_address: str
    started_ns: int
    out_dir: str = ""
    pid_start: int = 0
    plane: str = ""
    metrics_address: str = ""
    token_file: str = ""
    remote_address: str = ""
    remote_snapshots: str = ""

    def without_secrets(self) -> RunInfo:
        """What may be kept when the run has ended."""
        return msgspec.structs.replace(self, token_file="", remote_address="", remote_snapshots="")

    def seen_from_afar(self) -> RunInfo:
        """What a viewer on another machine needs of it."""
        known = self.without_secrets()
        return msgspec.structs.replace(
            known, events_address="", snapshot_address=self.remote_snapshots, metrics_address=""
        )


def runtime_directory() -> Path:
    """The directory, made with mode 0700 if it is not there.

    Raises ``ConfigError`` when it belongs to somebody else, or others may enter it: the sockets in it must
    not be another user's.
    """
    base = os.environ.get("XDG_RUNTIME_DIR")
    path = Path(base) / "rlplane" if base else Path(tempfile.gettempdir()) / f"rlplane-{os.getuid()}"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(f"{path} must be a directory of user {os.getuid()} with mode 0700")
    return path


def announce(info: RunInfo) -> Path:
    """Leave a file that says that this process aggregates a run."""
    info.pid_start = _start_of(info.pid) or 0
    path = runtime_directory() / f"run-{info.pid}.json"
    write_atomically(path, msgspec.json.encode(info), mode=0o600)
    return path


def announce_child(info: RunInfo) -> None:
    """Leave that file for an aggregator that was just started, unless it has done so, and knows more."""
    info.pid_start = _start_of(info.pid) or 0
    directory = runtime_directory()
    made = directory / f"starting-{info.pid}"
    write_atomically(made, msgspec.json.encode(info), mode=0o600)
    with contextlib.suppress(FileExistsError):
        os.link(made, directory / f"run-{info.pid}.json")
    made.unlink()


def withdraw(path: Path) -> None:
    """Remove the file that :func:`announce` made."""
    path.unlink(missing_ok=True)


def remember(info: RunInfo) -> None:
    """Leave a file that says where the final snapshot of a run is that has ended."""
    directory = runtime_directory()
    write_atomically(directory / f"ended-{info.started_ns}-{info.pid}.json", msgspec.json.encode(info))
    for path in sorted(directory.glob("ended-*.json"))[:-_MOST_REMEMBERED]:
        path.unlink(missing_ok=True)


def list_finished() -> list[RunInfo]:
    """The runs that have ended on this machine, newest first; their directories may be gone meanwhile."""
    runs = []
    for path in runtime_directory().glob("ended-*.json"):
        with contextlib.suppress(OSError, msgspec.DecodeError):
            runs.append(msgspec.json.decode(path.read_bytes(), type=RunInfo))
    return sorted(runs, key=lambda run: -run.started_ns)


def list_runs() -> list[RunInfo]:
    """The aggregators that run on this machine, newest first. Files of dead ones are removed."""
    runs = []
    for path in runtime_directory().glob("run-*.json"):
        try:
            info = msgspec.json.decode(path.read_bytes(), type=RunInfo)
        except (OSError, msgspec.DecodeError):
            info = None
        if info is not None and _start_of(info.pid) == info.pid_start:
            runs.append(info)
        else:
            _remove(path, info)
    return sorted(runs, key=lambda run: -run.started_ns)


def _remove(path: Path, info: RunInfo | None) -> None:
    """Remove what a killed aggregator left: its file, and its sockets if they are in our directory."""
    left = [path]
    for address in (info.events_address, info.snapshot_address) if info is not None else ():
        socket = Path(address.removeprefix("ipc://"))
        if address.startswith("ipc://") and socket.parent == path.parent:
            left.append(socket)
    for file in left:
        with contextlib.suppress(OSError):
            file.unlink()


def _start_of(pid: int) -> int | None:
    """When a process started, in the kernel's ticks; None if there is none. Tells a reused pid apart."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])
