"""Answers that name very many samples: encoded a slice at a time, between which others are served."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any, TypeAlias, TypeVar

import msgspec

from rlplane.control.snapshots import SampleColumn
from rlplane.service import protocol as wire
from rlplane.service.framing import LONGEST, begun_message, ended_message

T = TypeVar("T")
_Copying: TypeAlias = Generator[None, None, T]

_COLUMNS = (list, SampleColumn)
_MANY = 65_536  # samples, whose names are encoded within a few milliseconds
_AT_ONCE = 32_768  # fewer than 2**16, so that the size of an encoded slice's header is known


def is_long_answer(answer: wire.Answer) -> bool:
    """Whether to encode an answer at once would take so long that others notice."""
    if type(answer) is wire.Claimed:
        return len(answer.ids) > _MANY
    if type(answer) is not wire.Done:
        return False
    if type(answer.value) is dict:  # what is known of samples
        return type(answer.value.get("ids")) is SampleColumn
    return type(answer.value) in _COLUMNS and len(answer.value) > _MANY


class LongAnswer:
    """An answer that is being encoded, into the message that it will be: to copy that would take long too."""

    def __init__(self, number: int, answer: wire.Answer) -> None:
        self._number = number
        # On the wire, an answer is a list of its kind and its fields.
        fields: list[Any] = [type(answer).__name__, *msgspec.structs.astuple(answer)]
        self._fields = [part for field in fields for part in _parts(field)]
        self._at = 0  # in the first of the fields, if that is a list
        self._message = begun_message()
        self._message.append(0x90 + len(fields))

    def encode_some(self) -> bool:
        """Go on; True when nothing is left to do but :meth:`message`."""
        field = self._fields[0]
        if type(field) not in _COLUMNS:
            self._message += wire.encode(field)
            del self._fields[0]
            return not self._fields
        if not self._at and isinstance(field, SampleColumn) and not field.get_ready():
            return False
        if not self._at:
            self._message += b"\xdd" + len(field).to_bytes(4, "big")  # a list of up to 2**32
        some = field[self._at : self._at + _AT_ONCE]
        self._message += memoryview(wire.encode(some))[1 if len(some) < 16 else 3 :]  # without its own header
        self._at += len(some)
        if self._at >= len(field):
            del self._fields[0]
            self._at = 0
        return not self._fields

    def message(self) -> bytearray:
        """The whole answer, as it goes over the socket."""
        nbytes = len(self._message)
        if nbytes > LONGEST:
            self._message = begun_message()
            self._message += wire.encode(
                wire.Failure("", f"the answer has {nbytes} bytes, which is too much for one")
            )
        return ended_message(self._message, self._number)


class CopiedAnswer:
    """The same inside one process, where nothing is sent: an answer that is being copied, into what would be
    decoded on the other side."""

    def __init__(self, answer: wire.Answer) -> None:
        self.answer = answer
        self._copying = _copied_answer(answer)

    def copy_some(self) -> bool:
        """Go on; True when ``answer`` is the copy."""
        try:
            next(self._copying)
        except StopIteration as end:
            self.answer = end.value
            return True
        return False


def _copied_answer(answer: wire.Answer) -> _Copying[wire.Answer]:
    fields = []
    for field in msgspec.structs.astuple(answer):
        fields.append((yield from _copied(field)))  # noqa: PERF401 - a list cannot be made with yield
    return type(answer)(*fields)


def _copied(value: Any) -> _Copying[Any]:
    if type(value) is dict:
        copies = {}
        for name, field in value.items():
            copies[name] = yield from _copied(field)
        return copies
    if type(value) not in _COLUMNS:
        return value
    copy: list[Any] = []
    for at in range(0, len(value), _AT_ONCE):
        copy += msgspec.msgpack.decode(wire.encode(value[at : at + _AT_ONCE]))
        yield
    return copy


def _parts(value: Any) -> Iterator[Any]:
    """What is encoded one after the other: of a dictionary what it holds, because that may be long."""
    if type(value) is not dict or len(value) > 15:
        yield value
        return
    yield msgspec.Raw(bytes([0x80 + len(value)]))
    for name, field in value.items():
        yield name
        yield from _parts(field)
