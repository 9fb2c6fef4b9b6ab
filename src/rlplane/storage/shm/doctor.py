"""Whether this machine can run the shared-memory engine, and which stale planes there are."""

from __future__ import annotations

import os
import resource
import sys
from dataclasses import dataclass
from pathlib import Path

from rlplane.storage.copying import is_native
from rlplane.storage.shm.directory import SHM, remove_if_dead, stale_planes

_SMALL_SHM = 2 * 2**30
_FEW_FILES = 1024


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at. ``status`` is ``ok``, ``warning`` or ``problem``."""

    name: str
    status: str
    detail: str


def inspect() -> list[Check]:
    """Look at everything that the engine needs of the machine."""
    return [_platform(), _shm_size(), _shm_write(), _file_limit(), _mappings(), _copies(), _stale_planes()]


def clean() -> list[Path]:
    """Remove what dead planes have left, and say what it was."""
    return [path for path in stale_planes() if remove_if_dead(path)]


def _platform() -> Check:
    if sys.platform != "linux":
        return Check(
            "platform",
            "problem",
            f"{sys.platform}: the shm backend needs Linux; backend memory runs anywhere",
        )
    return Check("platform", "ok", f"Linux {os.uname().release}, Python {sys.version.split()[0]}")


def _shm_size() -> Check:
    if not SHM.is_dir():
        return Check("shared memory", "problem", f"{SHM} is not there; mount a tmpfs on it")
    stat = os.statvfs(SHM)
    total, free = stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize
    detail = f"{SHM}: {_format_size(free)} of {_format_size(total)} free"
    if free < _SMALL_SHM:
        hint = "set global_segment_size below it, or enlarge it (docker run --shm-size=16g)"
        return Check("shared memory", "warning", f"{detail}; {hint}")
    return Check("shared memory", "ok", detail)


def _shm_write() -> Check:
    probe = SHM / f".rlplane-probe-{os.getpid()}"
    try:
        fd = os.open(probe, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, 2**20)
        finally:
            os.close(fd)
            probe.unlink()
    except OSError as error:
        return Check("shared memory is writable", "problem", f"{SHM}: {error.strerror}")
    return Check("shared memory is writable", "ok", "1 MiB written and removed")


def _file_limit() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    detail = f"{soft} open files (hard limit {hard})"
    if soft < _FEW_FILES:
        return Check("file descriptors", "warning", f"{detail}; raise it: ulimit -n {min(hard, 65536)}")
    return Check("file descriptors", "ok", detail)


def _mappings() -> Check:
    try:
        limit = int(Path("/proc/sys/vm/max_map_count").read_text())
    except (OSError, ValueError):
        return Check("mappings", "warning", "vm.max_map_count cannot be read")
    detail = f"vm.max_map_count is {limit}; every batch that is held without a copy needs one or a few"
    return Check("mappings", "ok" if limit >= 65530 else "warning", detail)


def _copies() -> Check:
    if is_native():
        return Check("copies", "ok", "the compiled loop")
    hint = "install gcc and the headers of Python, then pip install --no-cache-dir --force-reinstall rlplane"
    return Check("copies", "warning", f"no compiled loop, so large ones take half as long again; {hint}")


def _stale_planes() -> Check:
    found = stale_planes()
    if not found:
        return Check("stale planes", "ok", "none")
    size = sum(map(_size_on_disk, found))
    names = ", ".join(path.name for path in found[:3]) + (", …" if len(found) > 3 else "")
    detail = f"{len(found)} ({_format_size(size)}): {names}; remove them with rlplane doctor --clean"
    return Check("stale planes", "warning", detail)


def _format_size(size: float) -> str:
    """Bytes in the unit that fits, as 64 MiB of shared memory are not 0.1 GiB to anybody."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def _size_on_disk(directory: Path) -> int:
    try:
        return sum(file.stat().st_blocks * 512 for file in directory.iterdir())
    except OSError:
        return 0  # somebody else is removing it
