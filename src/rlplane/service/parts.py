"""How a client divides the names of very many samples over several requests."""

from __future__ import annotations

from collections.abc import Sized
from typing import TypeVar

T = TypeVar("T")

# Named by one request: it is decoded and served within some ten milliseconds.
_AT_ONCE = 16_384


def are_many(ids: Sized) -> bool:
    """Whether so many samples are named by several requests."""
    return len(ids) > _AT_ONCE


def in_parts(ids: list[T]) -> list[list[T]]:
    """The names, or numbers, that one request has each; of no names, one part with none."""
    return [ids[at : at + _AT_ONCE] for at in range(0, len(ids) or 1, _AT_ONCE)]
