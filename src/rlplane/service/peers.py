"""A connection, as the server sees it."""

from __future__ import annotations

import errno
import socket
from collections import deque

from rlplane.service.framing import Inbox
from rlplane.service.sockets import MAX_MESSAGE


class Peer:
    """One connection, seen from here: unknown at first, then the lifeline or a channel of a client."""

    def __init__(self, number: int, socket_: socket.socket, accepted: float) -> None:
        self.number, self.socket, self.accepted = number, socket_, accepted
        self.inbox = Inbox(MAX_MESSAGE)
        self.unsent = bytearray()
        self.long_answers = 0  # that are being encoded
        # What came while it still had to get earlier answers.
        self.unserved: deque[tuple[int, memoryview]] = deque()
        self.client: int | None = None
        self.is_lifeline = False

    @property
    def has_to_wait(self) -> bool:
        """Whether it gets the answers that it has asked for before it may ask for more: else they would fill
        the memory of the service."""
        return bool(self.unsent or self.long_answers)


def send_some(to: socket.socket, data: bytes | bytearray) -> int:
    """How much of it the socket took: all, if the other end is gone, which is noticed when it is read."""
    try:
        return to.send(data)
    except BlockingIOError:
        return 0
    except OSError as error:
        return 0 if error.errno in (errno.ENOBUFS, errno.ENOMEM) else len(data)
