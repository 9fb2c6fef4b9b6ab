"""Answers that name very many samples: encoded a slice at a time, between which others are served."""

from __future__ import annotations

from typing import Any

import msgspec

from rlplane.control.snapshots import SampleColumn
from rlplane.service import protocol as wire
from rlplane.service.framing import LONGEST, begun_message, ended_message

_COLUMNS = (list, SampleColumn)
_MANY = 65_536  # samples, whose names are encoded within a few milliseconds
_AT_ONCE = 32_768  # fewer than 2**16, so that the size of an encoded slice's header is known


def is_long_answer(answer: wire.Answer) -> bool:
    """Whether to encode an answer at once would take so long that others notice."""
    if type(answer) is wire.Claimed:
        return len(answer.ids) > _MANY
    return type(answer) is wire.Done and type(answer.value) in _COLUMNS and len(answer.value) > _MANY


class LongAnswer:
    """An answer that is being encoded, into the message that it will be: to copy that would take long too."""

    def __init__(self, number: int, answer: wire.Answer) -> None:
        self._number = number
        # On the wire, an answer is a list of its kind and its fields.
        self._fields: list[Any] = [type(answer).__name__, *msgspec.structs.astuple(answer)]
        self._at = 0  # in the first of the fields, if that is a list
        self._message = begun_message()
        self._message.append(0x90 + len(self._fields))

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

    def body(self) -> memoryview:
        """The same without what a socket needs."""
        return memoryview(self.message())[len(begun_message()) :]
