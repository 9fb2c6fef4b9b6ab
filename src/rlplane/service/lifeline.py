"""The connection that shows a control service that its client lives, with the notices that go over it."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from collections import deque

from rlplane.service import protocol as wire
from rlplane.service.framing import message

_GOODBYE_S = 5.0
_LONGEST_POLL_MS = 3_600_000


class Lifeline:
    """The connection that shows that this client lives. What goes over it needs no answer.

    Finalizers write to it, in any thread and in the middle of anything, so nothing here waits, not even for
    a lock. What cannot be sent now is sent along with the next request, or by a thread that waits for room,
    whichever is first.
    """

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        self._socket = connected
        self._sending = threading.Lock()
        self._rest = b""  # of a message of which TCP has taken only a part
        self._released: deque[int] = deque()
        self._abandoned: deque[int] = deque()
        self._flushing = False
        self._pid = os.getpid()
        self.closed = False
        self._is_broken = False
        self.said_farewell = False  # the service has ended in order, and does not come back

    def release(self, lease: int) -> None:
        self._notify(wire.Release(lease), self._released, lease)

    def abandon(self, number: int) -> None:
        self._notify(wire.Abandon(number), self._abandoned, number)

    def unsent(self) -> tuple[list[int], list[int]]:
        """What did not go out yet, to be sent along with a request."""
        if not self._released and not self._abandoned:
            return [], []
        return _drain(self._released), _drain(self._abandoned)

    def keep_unsent(self, released: list[int], abandoned: list[int]) -> None:
        """The request that was to take them along has failed."""
        self._released.extend(released)
        self._abandoned.extend(abandoned)
        self._flush_later()

    def stop_sending(self) -> None:
        """Another one takes the place of this. What is to be sent from now on is kept for it."""
        self._is_broken = True

    def take_over(self, before: Lifeline) -> None:
        """Send what the one before did not."""
        self.keep_unsent(*before.unsent())

    def say_goodbye(self) -> None:
        released = [wire.Release(lease) for lease in _drain(self._released)]
        abandoned = [wire.Abandon(number) for number in _drain(self._abandoned)]
        notices = [*released, *abandoned, wire.Goodbye()]
        data = b"".join(message(0, wire.encode(notice)) for notice in notices)
        # This may wait: without a goodbye the client is taken for dead, and its claims are handed out again.
        if self._sending.acquire(timeout=_GOODBYE_S):
            try:
                self._socket.settimeout(_GOODBYE_S)
                self._socket.sendall(self._rest + data)
            except OSError:
                pass  # the service is gone, or has been stopped for too long
            finally:
                self._sending.release()
        self.close()

    def wait_for_end(self) -> None:
        """Return when the service or this process has closed the connection."""
        poll = select.poll()
        try:
            poll.register(self._socket, select.POLLIN)
            while not self.closed and not poll.poll(_LONGEST_POLL_MS):
                pass
        except (OSError, ValueError):
            pass  # closed

    def is_alive(self) -> bool:
        """Whether the service still holds its end."""
        try:
            # All that ever comes is a farewell.
            self.said_farewell = bool(self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def close(self) -> None:
        self.closed = True
        with contextlib.suppress(OSError):
            if self._pid == os.getpid():
                # Wakes the thread that waits for the end. In a forked child it would end the parent's too.
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()

    def _notify(self, notice: wire.Release | wire.Abandon, unsent: deque[int], number: int) -> None:
        # First noted, then sent, then crossed out: an interrupt in between sends it twice, which is harmless.
        unsent.append(number)
        if self._send(notice):
            try:
                unsent.remove(number)
            except (ValueError, IndexError, RuntimeError):
                pass  # another thread drains it
        self._flush_later()

    def _flush_later(self) -> None:
        if self._left() and not self._flushing:
            self._flushing = True
            with contextlib.suppress(RuntimeError):  # no thread to be had: the next request takes it along
                threading.Thread(target=self._flush, name="rlplane-lifeline", daemon=True).start()

    def _send(self, notice: wire.Release | wire.Abandon) -> bool:
        return self._send_bytes(message(0, wire.encode(notice)))

    def _send_bytes(self, data: bytes) -> bool:
        """Send ``data`` behind the rest of the last message; True if the caller is done with it."""
        if self._is_broken or not self._sending.acquire(blocking=False):
            return False  # another thread is here, or this one, when a finalizer has interrupted it
        try:
            if self._rest:
                self._rest = self._rest[self._socket.send(self._rest, socket.MSG_DONTWAIT) :]
            if self._rest:
                return False
            self._rest = data[self._socket.send(data, socket.MSG_DONTWAIT) :]
        except BlockingIOError:
            return False
        except OSError:
            self._is_broken = True  # if the service comes back, it is told by the next lifeline
            return False
        finally:
            self._sending.release()
        return True

    def _flush(self) -> None:
        try:
            poll = select.poll()
            poll.register(self._socket, select.POLLOUT)
            while self._left():
                poll.poll(1000)
                self._send_bytes(b"")
                while self._send_first(self._released, wire.Release):
                    pass
                while self._send_first(self._abandoned, wire.Abandon):
                    pass
                # Whoever could not send until here has left it to this thread.
                self._flushing = self._left()
        except (OSError, ValueError):
            pass  # closed
        finally:
            self._flushing = False

    def _left(self) -> bool:
        return not self._is_broken and bool(self._released or self._abandoned or self._rest)

    def _send_first(self, unsent: deque[int], kind: type[wire.Release | wire.Abandon]) -> bool:
        try:
            number = unsent[0]
        except IndexError:
            return False
        if not self._send(kind(number)):
            return False
        with contextlib.suppress(ValueError, IndexError, RuntimeError):  # a request has taken it along
            unsent.remove(number)
        return True


def _drain(numbers: deque[int]) -> list[int]:
    drained: list[int] = []
    while numbers:
        with contextlib.suppress(IndexError):
            drained.append(numbers.popleft())
    return drained
