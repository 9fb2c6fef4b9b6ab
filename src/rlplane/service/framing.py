"""Messages over a stream socket, Unix-domain or TCP: the length of the body, a number, and the body.

A plain socket and not a ZMQ one, because ZMQ hands every message to a thread of its own on either side. Where
processes share few cores, each of these hand-overs is a wait for the scheduler: a round trip has six of them
with ZMQ, and two here.
"""

from __future__ import annotations

import struct

_HEADER = struct.Struct("<IQ")  # length of the body, number of the request
LONGEST = 2**32 - 1  # body that a header can announce


class MessageTooLong(ValueError):
    """A header that announces more than the receiver takes. What comes after it cannot be understood."""


def message(number: int, body: bytes) -> bytes:
    """What goes over the socket."""
    return _HEADER.pack(len(body), number) + body


def begun_message() -> bytearray:
    """A message whose body is still to be added to it, after which it goes to :func:`ended_message`."""
    return bytearray(_HEADER.size)


def ended_message(begun: bytearray, number: int) -> bytearray:
    """What goes over the socket."""
    _HEADER.pack_into(begun, 0, len(begun) - _HEADER.size, number)
    return begun


class Inbox:
    """Makes messages of the bytes that come, in whatever pieces."""

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._rest = bytearray()
        self._needed = 0

    def messages(self, piece: memoryview) -> list[tuple[int, memoryview]]:
        """The numbers and bodies that are complete with this piece. They may be views of it."""
        if self._rest:
            self._rest += piece
            if len(self._rest) < self._needed:
                return []
            piece, self._rest = memoryview(self._rest), bytearray()
        found = []
        at, end, header = 0, len(piece), _HEADER.size
        while end - at >= header:
            size, number = _HEADER.unpack_from(piece, at)
            if size > self._longest:
                raise MessageTooLong(f"a message of {size} bytes; {self._longest} is the most")
            after = at + header + size
            if after > end:
                self._needed = after - at
                break
            found.append((number, piece[at + header : after]))
            at = after
        else:
            self._needed = header
        if at < end:
            self._rest += piece[at:]
        return found
