"""``jsonl``: every record as a line of JSON, in files that rotate and hold complete lines only.

Several processes may write to one path. Each batch is one ``write`` under a lock on the file, and whoever
finds the file full renames it away under the same lock. A line that a crash has torn is cut off when the
file is opened again, and skipped by :func:`read_records`.
"""

from __future__ import annotations

import fcntl
import glob
import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rlplane.errors import ConfigError
from rlplane.sinks import Record

_encoder = msgspec.json.Encoder(enc_hook=repr)


class JsonlSink:
    """Appends records to ``path``; ``path.1`` is the file before it, and so on.

    Args:
        path: ``{pid}`` and ``{host}`` in it are replaced. Its directory is made.
        max_bytes: The size at which a file is rotated.
        backups: How many rotated files are kept.
        fsync: Whether each batch is forced to the disk, so that it survives a power failure too.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        max_bytes: int = 64 << 20,
        backups: int = 5,
        fsync: bool = False,
    ) -> None:
        if max_bytes < 1 or backups < 0:
            raise ConfigError(f"sink jsonl: max_bytes is {max_bytes} and backups {backups}; 1 and 0 at least")
        self.path = Path(str(path).replace("{pid}", str(os.getpid())).replace("{host}", socket.gethostname()))
        self._max_bytes = max_bytes
        self._backups = backups
        self._fsync = fsync
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._open()

    def write(self, records: Sequence[Record]) -> None:
        data = b"".join([_encoder.encode(record) + b"\n" for record in records])
        self._lock_current_file()
        try:
            if (size := os.fstat(self._file).st_size) and size + len(data) > self._max_bytes:
                self._rotate()
            self._append(data)
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _open(self) -> int:
        file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            _cut_torn_line(file)
            fcntl.flock(file, fcntl.LOCK_UN)
        except BaseException:
            os.close(file)
            raise
        return file

    def _lock_current_file(self) -> None:
        """Lock the file that ``path`` names now, which another process may have put there since."""
        while True:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            try:
                if os.path.samestat(os.fstat(self._file), os.stat(self.path)):
                    return
            except FileNotFoundError:
                pass
            old, self._file = self._file, self._open()
            os.close(old)

    def _rotate(self) -> None:
        last = 1
        while last < self._backups and _numbered(self.path, last).exists():
            last += 1
        for number in range(min(last, self._backups), 0, -1):
            os.replace(_numbered(self.path, number - 1), _numbered(self.path, number))
        if not self._backups:
            os.unlink(self.path)
        old, self._file = self._file, self._open()
        fcntl.flock(self._file, fcntl.LOCK_EX)
        os.close(old)

    def _append(self, data: bytes) -> None:
        size = os.fstat(self._file).st_size
        written = 0
        try:
            while written < len(data):
                written += os.write(self._file, data[written:])
            if self._fsync:
                os.fsync(self._file)
        except BaseException:
            # A full disk takes half a batch: take it back, so that there are complete lines only.
            os.ftruncate(self._file, size)
            raise


def record_files(path: str | os.PathLike[str]) -> list[Path]:
    """The files of a ``jsonl`` sink, oldest first: those that were rotated away, then ``path``."""
    first = Path(path)
    numbers = []
    for file in first.parent.glob(f"{glob.escape(first.name)}.*"):
        suffix = file.name.removeprefix(f"{first.name}.")
        if suffix.isdigit():
            numbers.append(int(suffix))
    files = [_numbered(first, number) for number in sorted(numbers, reverse=True)]
    return [*files, first] if first.exists() else files


def read_records(*paths: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """The records of these files, without a last line that a crash or a writer at work has left torn."""
    for path in paths:
        with open(path, "rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    yield msgspec.json.decode(line)


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}") if number else path


def _cut_torn_line(file: int) -> None:
    end = size = os.fstat(file).st_size
    while end:
        begin = max(end - 65536, 0)
        block = os.pread(file, end - begin, begin)
        if (newline := block.rfind(b"\n")) >= 0:
            end = begin + newline + 1
            break
        end = begin
    if end != size:
        os.ftruncate(file, end)
