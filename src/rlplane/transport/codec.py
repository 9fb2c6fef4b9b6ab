"""The boundary between messages and frames: what a codec is, and how topic and payload share a frame.

A message travels as *one* frame, its topic in the first :data:`TOPIC_FRAME_SIZE` bytes. One frame, because
ZeroMQ's conflation ("keep the last message only") does not work on multipart messages; a fixed size, because
a subscriber filters by prefix, and a topic must never be mistaken for the beginning of a longer one.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

from rlplane.errors import InvalidRequestError

TOPIC_FRAME_SIZE = 16

T = TypeVar("T")


class MessageCodec(Protocol[T]):
    """How messages of one kind become bytes and come back."""

    def encode(self, item: T) -> tuple[bytes, bytes]:
        """Return ``(topic, payload)``; the topic has exactly ``TOPIC_FRAME_SIZE`` bytes."""
        ...

    def decode(self, payload: bytes) -> T:
        """Return the message. May raise anything; the subscriber then asks :meth:`on_decode_error`."""
        ...

    def on_decode_error(self, payload: bytes, exc: Exception) -> T | None:
        """Return a substitute for a payload that cannot be decoded, None to drop it, or re-raise."""
        ...


def make_topic(name: str) -> bytes:
    """Return ``name`` as a topic, padded with zero bytes to ``TOPIC_FRAME_SIZE``."""
    raw = name.encode()
    if not 0 < len(raw) <= TOPIC_FRAME_SIZE:
        raise InvalidRequestError(f"topic {name!r} has {len(raw)} bytes; 1 to {TOPIC_FRAME_SIZE} are allowed")
    return raw.ljust(TOPIC_FRAME_SIZE, b"\0")


def join_frame(topic: bytes, payload: bytes) -> bytes:
    """Return the frame for a topic and a payload."""
    if len(topic) != TOPIC_FRAME_SIZE:
        raise InvalidRequestError(
            f"a codec returned the topic {topic!r} of {len(topic)} bytes; it must be {TOPIC_FRAME_SIZE}"
        )
    return topic + payload


def split_frame(frame: bytes) -> tuple[bytes, bytes]:
    """Return the topic and the payload of a frame; ``ValueError`` when it is too short to have a topic."""
    if len(frame) < TOPIC_FRAME_SIZE:
        raise InvalidRequestError(f"a frame of {len(frame)} bytes has no topic of {TOPIC_FRAME_SIZE} bytes")
    return frame[:TOPIC_FRAME_SIZE], frame[TOPIC_FRAME_SIZE:]
