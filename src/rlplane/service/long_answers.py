"""Answers that name very many samples: encoded a slice at a time, between which others are served."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import msgspec

from rlplane.service import protocol as wire

__all__ = ["LongAnswer", "is_long_answer"]

_MANY = 65_536  # samples, whose names are encoded within a few milliseconds
_AT_ONCE = 32_768  # fewer than that, so that the header of an encoded slice is known


def is_long_answer(answer: wire.Answer) -> bool:
    """Whether to encode an answer at once would take so long that others notice."""
    if type(answer) is wire.Claimed:
        return len(answer.ids) > _MANY
    return type(answer) is wire.Done and type(answer.value) is list and len(answer.value) > _MANY


class LongAnswer:
    """An answer that is being encoded."""

    def __init__(self, answer: wire.Answer) -> None:
        assert isinstance(answer, wire.Claimed | wire.Done)
        self._answer = answer
        named: list[Any] = [answer.ids, answer.tags] if isinstance(answer, wire.Claimed) else [answer.value]
        self._lists = [_LongList(values) for values in named]

    def encode_some(self) -> bool:
        """Go on; True when nothing is left to do but :meth:`body`."""
        for each in self._lists:
            if not each.is_over:
                each.encode_some()
                break
        return all(each.is_over for each in self._lists)

    def body(self) -> bytes:
        """The whole answer."""
        encoded = [each.encoded() for each in self._lists]
        if isinstance(self._answer, wire.Claimed):
            ids, tags = (cast("list[Any]", each) for each in encoded)
            return wire.encode(wire.Claimed(ids, tags, self._answer.waited_s))
        return wire.encode(msgspec.structs.replace(self._answer, value=encoded[0]))


class _LongList:
    """The entries of a list in msgpack, as far as they have been encoded."""

    def __init__(self, values: Sequence[Any]) -> None:
        self._values = values
        self._slices = [b"\xdd" + len(values).to_bytes(4, "big")]  # the header of a list of up to 2**32
        self._at = 0

    @property
    def is_over(self) -> bool:
        return self._at >= len(self._values)

    def encode_some(self) -> None:
        some = self._values[self._at : self._at + _AT_ONCE]
        self._at += len(some)
        self._slices.append(wire.encode(some)[1 if len(some) < 16 else 3 :])  # without the header of its own

    def encoded(self) -> msgspec.Raw:
        return msgspec.Raw(b"".join(self._slices))
