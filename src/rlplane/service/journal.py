"""The journal of a control service: what it was told, and what it could not have known, in order.

The control state is deterministic, so a service that is given the same inputs again is the same service. The
journal has every input that changes something, and between them the outcomes that the service got from its
storage (which place it was given, how much is in use). It is written before the answer goes out. When it has
grown, a dump of the whole service and a fresh journal replace it.

On disk: ``state.N`` is a dump, ``journal.N`` what came after it. A journal is a row of entries: a length, a
checksum, and the records of one or more inputs with all their outcomes. A torn entry at the end is dropped as
a whole: nobody was told of what is in it.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import pickle
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from rlplane.errors import CheckpointError
from rlplane.service.forked_dump import run_in_child
from rlplane.storage.places import Loss, Place

logger = logging.getLogger(__name__)

_HEADER = struct.Struct("<II")  # length of the records, their checksum
# Reading a journal of this size takes a fraction of a second, and longer than reading a dump of this size.
_COMPACT_BYTES = 2**20


class _Record(msgspec.Struct, array_like=True, tag=True):
    pass


class Joined(_Record):
    """A client has connected."""

    client: int
    secret: str
    bootstrap: bool


class Left(_Record):
    """A client has gone."""

    client: int
    died: bool
    now: float


class Asked(_Record):
    """A request that changes something, as it came."""

    client: int
    number: int
    channel: int
    now: float
    wall: float
    envelope: msgspec.Raw


class Abandoned(_Record):
    """A request whose answer nobody will read."""

    client: int
    number: int
    now: float


class HungUp(_Record):
    """A channel of this client has ended, and these requests were waiting behind it."""

    client: int
    numbers: list[int]
    now: float


class Expired(_Record):
    """The clock, at a moment when requests had run out of time."""

    now: float


class Retried(_Record):
    """Room came free, and waiting reservations were looked at again."""

    now: float


class Lost(_Record):
    """Storage has died, and what was there."""

    loss: Loss
    now: float


class WentOn(_Record):
    """A slice of a long request was worked off."""

    now: float


class Outcome(_Record):
    """What the storage answered to the service: a place, True or False, a number of bytes, or nothing."""

    value: Place | bool | int | None


class Freed(_Record):
    """A place went back to the storage."""

    number: int


class GivenBack(_Record):
    """Stretches (start, size) of a place went back to the storage."""

    number: int
    stretches: list[tuple[int, int]]


Record = (
    Joined
    | Left
    | Asked
    | Abandoned
    | HungUp
    | Expired
    | Retried
    | Lost
    | WentOn
    | Outcome
    | Freed
    | GivenBack
)
_decoder: msgspec.msgpack.Decoder[list[Record]] = msgspec.msgpack.Decoder(list[Record])
_encode = msgspec.msgpack.Encoder().encode


class Journal:
    """Appends records to the newest journal in ``directory``."""

    def __init__(self, directory: Path, generation: int = 0) -> None:
        self.directory, self.generation = directory, generation
        self.records: list[Record] = []
        self._afterwards: list[Callable[[], object]] = []
        self._child: int | None = None
        self._given_up = False
        self._dump_size = 0
        self._open(generation)

    def add(self, record: Record) -> None:
        """Note a record; it is written with the next :meth:`flush`."""
        self.records.append(record)

    def afterwards(self, function: Callable[[], object]) -> None:
        """Call ``function`` after the next :meth:`flush`: it destroys what the records before it still
        need."""
        self._afterwards.append(function)

    def flush(self) -> None:
        """Write what was noted, in one write. Called between inputs, so that an entry has all outcomes of
        its inputs."""
        if self.records:
            records, self.records = self.records, []
            if not self._given_up:
                body = _encode(records)
                self._write(_HEADER.pack(len(body), zlib.crc32(body)) + body)
        if self._afterwards:
            functions, self._afterwards = self._afterwards, []
            for function in functions:
                function()

    def _write(self, data: bytes) -> None:
        try:
            written = os.write(self._fd, data)
            while written < len(data):  # a full disk writes a part, and then raises
                written += os.write(self._fd, memoryview(data)[written:])
            self._size += written
        except OSError:
            # A journal with a hole would bring back another plane than this one. None is better.
            logger.exception("the journal cannot be written; if the service dies, the plane is lost")
            self._given_up = True
            self.remove()

    @property
    def is_long(self) -> bool:
        """Whether it is time for :meth:`compact`."""
        return self._size > max(_COMPACT_BYTES, self._dump_size) and self._child is None

    def compact(self, service_state: Any) -> None:
        """Begin a fresh journal, and dump ``service_state`` as it is now, in a child process: the service
        goes on."""
        self.flush()
        if self._given_up:
            return
        before, size = self._fd, self._size
        try:
            self._open(self.generation + 1)
        except OSError as error:
            logger.warning("the journal is not made shorter, for want of a fresh one: %s", error)
            self._dump_size = 2 * size  # that long it may get until the next attempt
            return
        os.close(before)
        self.generation += 1
        try:
            self._child = run_in_child(lambda: write_dump(self.directory, self.generation, service_state))
        except OSError as error:
            # The journals of before are still there, and are read with this one.
            logger.warning("the journal is not made shorter, for want of a child process: %s", error)

    def tidy(self) -> None:
        """Remove what a finished dump has made superfluous."""
        if self._child is None:
            return
        with contextlib.suppress(ChildProcessError):
            done, _ = os.waitpid(self._child, os.WNOHANG)
            if not done:
                return
        self._child = None
        dump = _dump_path(self.directory, self.generation)
        if dump.exists():
            self._dump_size = dump.stat().st_size
            _remove_before(self.directory, self.generation)

    def close(self) -> None:
        """Stop writing."""
        self.flush()
        os.close(self._fd)
        if self._child is not None:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self._child, 0)
            self._child = None

    def remove(self) -> None:
        """Remove everything that was written: the plane ends, or cannot be brought back."""
        _remove_before(self.directory, self.generation + 1)

    def _open(self, generation: int) -> None:
        path = _journal_path(self.directory, generation)
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._size = os.fstat(self._fd).st_size


def write_dump(directory: Path, generation: int, service_state: Any) -> None:
    """Write a dump that is there whole or not at all."""
    path = _dump_path(directory, generation)
    # The child of a service that was killed may still write one of an earlier generation.
    temporary = path.with_name(f"{path.name}.new")
    # It has the secrets of the clients in it.
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        pickle.dump(service_state, file, protocol=pickle.HIGHEST_PROTOCOL)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def read_records(directory: Path) -> tuple[Any, Iterator[Record], int]:
    """The newest dump (None if there is none), the records after it, and the newest generation."""
    generations = sorted(int(path.suffix[1:]) for path in directory.glob("journal.*"))
    dumps = [number for number in generations if _dump_path(directory, number).exists()]
    first = dumps[-1] if dumps else 0
    state = None
    if dumps:
        with open(_dump_path(directory, first), "rb") as file:
            state = _DumpReader(file).load()
    newest = generations[-1] if generations else 0

    def records() -> Iterator[Record]:
        for number in range(first, newest + 1):
            yield from _records_in(_journal_path(directory, number), last=number == newest)

    return state, records(), newest


def _records_in(path: Path, *, last: bool) -> Iterator[Record]:
    if not path.exists():
        return
    data = path.read_bytes()
    at = 0
    while at + _HEADER.size <= len(data):
        size, checksum = _HEADER.unpack_from(data, at)
        body = data[at + _HEADER.size : at + _HEADER.size + size]
        if not size or len(body) < size or zlib.crc32(body) != checksum:
            break
        yield from _decoder.decode(body)
        at += _HEADER.size + size
    if at < len(data):
        if not last:
            raise CheckpointError(f"the journal {path} is damaged at byte {at:,}")
        # Torn by the death of the service: nobody was told of what is in it.
        os.truncate(path, at)


class _DumpReader(pickle.Unpickler):
    """Reads our own dumps: bookkeeping of rlplane, numpy arrays and containers, and nothing that could
    act."""

    _ALLOWED = (
        "rlplane.control.",
        "rlplane.service.admission",
        "rlplane.service.block_table",
        "rlplane.service.checkpoints",
        "rlplane.service.clients",
        "rlplane.service.commits",
        "rlplane.service.core",
        "rlplane.service.dead_rows",
        "rlplane.service.deadlines",
        "rlplane.service.long_work",
        "rlplane.service.protocol",
        "rlplane.service.reservations",
        "rlplane.storage.places",
        "rlplane.errors",
    )
    _PLAIN = frozenset(
        {
            ("collections", "deque"),
            ("collections", "OrderedDict"),
            ("collections", "Counter"),
            ("numpy", "ndarray"),
            ("numpy", "dtype"),
            ("numpy.core.multiarray", "_reconstruct"),
            ("numpy._core.multiarray", "_reconstruct"),
            ("numpy.core.multiarray", "scalar"),
            ("numpy._core.multiarray", "scalar"),
            ("numpy.core.numeric", "_frombuffer"),
            ("numpy._core.numeric", "_frombuffer"),
            ("msgspec._utils", "rebuild"),
            ("msgspec._core", "rebuild"),
            ("msgspec.msgpack", "Ext"),
            ("msgspec._core", "Ext"),
        }
    )

    def __init__(self, file: io.BufferedReader) -> None:
        super().__init__(file)

    def find_class(self, module: str, name: str) -> Any:
        plain = (module, name) in self._PLAIN
        # A dotted name would lead on to what an allowed module has imported, and so would a plain one.
        if "." not in name and (plain or module.startswith(self._ALLOWED)):
            found = super().find_class(module, name)
            if plain or getattr(found, "__module__", None) == module:
                return found
        raise CheckpointError(f"the dump of the control service refers to {module}.{name}")


def _journal_path(directory: Path, generation: int) -> Path:
    return directory / f"journal.{generation}"


def _dump_path(directory: Path, generation: int) -> Path:
    return directory / f"state.{generation}"


def _remove_before(directory: Path, generation: int) -> None:
    for path in [*directory.glob("journal.*"), *directory.glob("state.*")]:
        number = path.name.split(".")[1]
        if number.isdecimal() and int(number) < generation:
            path.unlink(missing_ok=True)
