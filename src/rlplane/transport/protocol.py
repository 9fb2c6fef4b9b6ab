"""Publisher and subscriber of messages of one kind, whatever carries the frames.

The base classes own what must not depend on the carrier: that a frame nobody can decode harms nobody, and
that a wait has one deadline in total.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Generic, Self, TypeVar

from rlplane.transport.codec import TOPIC_FRAME_SIZE, MessageCodec, join_frame, split_frame

T = TypeVar("T")


class MessagePublisher(ABC, Generic[T]):
    """Sends messages without ever waiting for a receiver, unless a deadline is given."""

    def __init__(self, codec: MessageCodec[T]) -> None:
        self._codec = codec

    def publish(self, item: T, *, deliver_within_s: float | None = None) -> bool:
        """Send ``item``. Returns whether the carrier took it for every receiver that is connected.

        Without ``deliver_within_s`` a receiver that is too slow loses the message. With it, the message is
        offered again for up to that long while a receiver may be full: it may arrive more than once, and
        False means that one may have missed it.
        """
        topic, payload = self._codec.encode(item)
        return self._send_frame(join_frame(topic, payload), deliver_within_s)

    @abstractmethod
    def _send_frame(self, frame: bytes, deliver_within_s: float | None) -> bool: ...

    @abstractmethod
    def close(self) -> None:
        """Release the socket, after what is queued has been sent or the linger time is over. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class MessageSubscriber(ABC, Generic[T]):
    """Receives messages; a frame that cannot be decoded is the codec's to judge.

    Attributes:
        n_received: Frames taken from the carrier.
        n_decode_errors: Frames for which the codec's ``decode`` raised, whatever it raised.
    """

    def __init__(self, codec: MessageCodec[T]) -> None:
        self._codec = codec
        self.n_received = 0
        self.n_decode_errors = 0

    def receive(self, timeout_s: float | None = None) -> T | None:
        """Return the next message, or None when none came in ``timeout_s`` (None: wait for ever).

        Frames that the codec drops are passed over within the same deadline. An exception that the codec
        re-raises reaches the caller; the frame is gone, and the next call goes on behind it.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            frame = self._receive_frame(left)
            if frame is None:
                return None
            item = self._decode(frame)
            if item is not None:
                return item

    def _decode(self, frame: bytes) -> T | None:
        self.n_received += 1
        try:
            return self._codec.decode(split_frame(frame)[1])
        except Exception as exc:
            # Any exception: which one a decoder raises is the codec's business, not the carrier's.
            self.n_decode_errors += 1
            return self._codec.on_decode_error(frame[TOPIC_FRAME_SIZE:], exc)

    @abstractmethod
    def _receive_frame(self, timeout_s: float | None) -> bytes | None: ...

    @abstractmethod
    def close(self) -> None:
        """Release the socket. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
